"""Which kernels run: by what the processor has, or as asked, and never what it lacks."""

import platform

import pytest

from millpond.errors import ConfigError
from millpond.kernels.isa import AVX512_NEEDS, CpuFeatures, choose, detect


def processor(*lacks: str) -> CpuFeatures:
    return CpuFeatures("a processor", "x86_64", frozenset(AVX512_NEEDS) - set(lacks))


def test_a_processor_with_everything_runs_the_avx512_kernels():
    assert choose("auto", processor()) == "avx512"
    assert choose("avx512", processor()) == "avx512"


@pytest.mark.parametrize("lacks", AVX512_NEEDS)
def test_a_processor_that_lacks_any_part_of_avx512_runs_the_portable_kernels(lacks):
    assert choose("auto", processor(lacks)) == "portable"


def test_a_processor_of_another_kind_runs_the_portable_kernels():
    assert choose("auto", CpuFeatures("apple-m1", "arm64", frozenset({"neon"}))) == "portable"


def test_portable_kernels_may_be_asked_for_anywhere():
    assert choose("portable", processor()) == "portable"
    assert choose("portable", processor(*AVX512_NEEDS)) == "portable"


def test_avx512_on_a_processor_without_it_is_refused_naming_what_is_missing():
    with pytest.raises(ConfigError, match="isa avx512 needs avx512vnni, avx512bf16, which this processor lacks"):
        choose("avx512", processor("avx512bf16", "avx512vnni"))


@pytest.mark.parametrize("setting", ["avx2", "", "AVX512"])
def test_an_unknown_name_is_refused_with_those_that_are_known(setting):
    with pytest.raises(ConfigError, match=f"isa must be one of auto, avx512, portable; got '{setting}'"):
        choose(setting, processor())


def test_this_processor_is_described():
    found = detect()
    assert found.name
    assert found.architecture == platform.machine()
    assert found.missing(("no such feature",)) == ["no such feature"]
    assert found.missing(tuple(found.flags)) == []
