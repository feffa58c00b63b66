"""Which kernels run: by what the processor has, or as asked, and never what it lacks; and what their code may use."""

import platform
from types import SimpleNamespace

import numba
import pytest

from millpond.errors import ConfigError
from millpond.kernels import isa as isa_module
from millpond.kernels.isa import (
    AVX2,
    AVX512,
    FEATURES,
    NEEDS,
    PERMITTED,
    PORTABLE,
    VNNI256,
    CpuFeatures,
    choose,
    detect,
    limits,
    permit_tiles,
    runnable,
)

HASWELL = frozenset({"avx2", "fma", "f16c"})
ALDER_LAKE = HASWELL | {"avxvnni"}
ICE_LAKE = HASWELL | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni"}
ZEN_4 = ICE_LAKE | {"avx512bf16"}
SAPPHIRE_RAPIDS = ZEN_4 | {"avxvnni", "avx512fp16", "amx-tile", "amx-bf16", PERMITTED}


def processor(flags) -> CpuFeatures:
    return CpuFeatures("a processor", "x86_64", frozenset(flags))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (SAPPHIRE_RAPIDS, ["amx", "avx512", "vnni256", "avx2", "portable"]),
        (ZEN_4, ["avx512", "vnni256", "avx2", "portable"]),
        (ICE_LAKE, ["vnni256", "avx2", "portable"]),
        (ALDER_LAKE, ["vnni256", "avx2", "portable"]),
        (ALDER_LAKE | ZEN_4, ["avx512", "vnni256", "avx2", "portable"]),
        (HASWELL, ["avx2", "portable"]),
        (HASWELL - {"fma"}, ["portable"]),
        ({"sse2"}, ["portable"]),
    ],
)
def test_a_processor_runs_the_best_kernels_that_it_can_and_may_be_told_to_run_the_others(flags, expected):
    assert runnable(processor(flags)) == expected
    assert choose("auto", processor(flags)) == expected[0]
    assert [choose(isa, processor(flags)) for isa in expected] == expected


@pytest.mark.parametrize("lacks", NEEDS["avx512"][0])
def test_a_processor_that_lacks_any_part_of_avx512_does_not_run_its_kernels(lacks):
    assert choose("auto", processor(ZEN_4 - {lacks})) != "avx512"


@pytest.mark.parametrize("lacks", NEEDS["amx"][0])
def test_a_processor_that_lacks_any_part_of_amx_does_not_run_its_kernels(lacks):
    assert choose("auto", processor(SAPPHIRE_RAPIDS - {lacks})) != "amx"


@pytest.fixture
def system(monkeypatch):
    """What the system answers when it is asked for AMX's registers: 0 is yes. Lists what it was asked."""

    def answer(value):
        asked = []
        library = SimpleNamespace(syscall=lambda *numbers: asked.append(numbers) or value)
        monkeypatch.setattr(isa_module.ctypes, "CDLL", lambda name: library)
        monkeypatch.setattr(isa_module.sys, "platform", "linux")
        monkeypatch.setattr(isa_module.platform, "machine", lambda: "x86_64")
        permit_tiles.cache_clear()
        return asked

    yield answer
    permit_tiles.cache_clear()


def test_the_system_is_asked_once_for_the_registers_of_amx(system, compiled_for):
    compiled_for(SAPPHIRE_RAPIDS - {PERMITTED})
    asked = system(0)
    assert detect().flags == detect().flags == SAPPHIRE_RAPIDS
    assert asked == [(158, 0x1023, 18)]  # arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    assert choose() == "amx"


def test_where_the_system_refuses_the_next_best_runs_and_amx_is_refused_saying_so(system, compiled_for):
    compiled_for(SAPPHIRE_RAPIDS - {PERMITTED})
    system(-1)
    assert detect().flags == SAPPHIRE_RAPIDS - {PERMITTED}
    assert choose() == "avx512"
    with pytest.raises(ConfigError, match="the system refuses them to this process"):
        choose("amx")


def test_the_system_is_not_asked_where_the_processor_has_no_amx(system, compiled_for):
    compiled_for(ZEN_4)
    asked = system(0)
    assert detect().flags == ZEN_4
    assert not asked


@pytest.mark.parametrize("lacks", sorted(ALDER_LAKE))
def test_a_processor_that_lacks_any_part_of_vnni256_does_not_run_its_kernels(lacks):
    assert "vnni256" not in runnable(processor(ALDER_LAKE - {lacks}))


@pytest.mark.parametrize("lacks", ["avx512vl", "avx512vnni"])
def test_avx512s_own_vnni_does_only_with_vectors_of_every_length(lacks):
    assert runnable(processor(ICE_LAKE - {lacks})) == ["avx2", "portable"]


def test_a_processor_of_another_kind_runs_the_portable_kernels():
    assert choose("auto", CpuFeatures("apple-m1", "arm64", frozenset({"neon"}))) == "portable"


@pytest.mark.parametrize(
    ("isa", "flags", "lacks"),
    [
        ("avx512", ZEN_4 - {"avx512bf16", "avx512vnni"}, "avx512vnni, avx512bf16"),
        ("avx512", ICE_LAKE, "avx512bf16"),
        ("amx", ZEN_4, "avx512fp16, amx-tile, amx-bf16, amx-permission"),
        ("vnni256", HASWELL, "avxvnni"),
        ("vnni256", ICE_LAKE - {"avx512vl"}, "avxvnni"),
        ("avx2", {"avx2"}, "fma, f16c"),
    ],
)
def test_kernels_that_a_processor_cannot_run_are_refused_naming_what_is_missing(isa, flags, lacks):
    with pytest.raises(ConfigError, match=f"isa {isa} needs {lacks}, which this processor lacks; use --isa auto"):
        choose(isa, processor(flags))


@pytest.mark.parametrize("setting", ["sse", "", "AVX512"])
def test_an_unknown_name_is_refused_with_those_that_are_known(setting):
    with pytest.raises(
        ConfigError, match=f"must be one of auto, amx, avx512, vnni256, avx2, portable; got '{setting}'"
    ):
        choose(setting, processor(ZEN_4))


@pytest.fixture
def compiled_for(monkeypatch):
    """Have Numba compile for a processor with these features, and the oldest ones beside them off."""

    def pretend(flags):
        off = {*FEATURES, "avx512fp16", "avx10.1", "gfni"} - set(flags)
        features = [f"+{flag}" for flag in flags] + [f"-{flag}" for flag in off]
        monkeypatch.setattr(numba.config, "CPU_FEATURES", ",".join(features))

    return pretend


def test_features_that_numba_is_told_to_do_without_are_not_there(compiled_for):
    compiled_for(HASWELL)
    assert detect().flags == HASWELL
    assert choose() == "avx2"


def allowed(isa) -> set[str]:
    return {each[1:] for each in limits(isa)["target-features"].split(",") if each[0] == "+"}


def test_the_code_of_avx2_has_nothing_that_came_later_whatever_the_processor_has(compiled_for):
    compiled_for(ALDER_LAKE | ZEN_4 | {"sse2", "avx512fp16", "avx10.1", "gfni"})
    assert allowed(AVX2) == HASWELL | {"sse2"}


def test_the_code_of_vnni256_has_no_avx512_where_vnni_came_without_it(compiled_for):
    compiled_for(ALDER_LAKE | ZEN_4 | {"sse2"})
    assert allowed(VNNI256) == ALDER_LAKE | {"sse2"}


def test_the_code_of_vnni256_is_kept_to_256_bits_where_vnni_is_avx512s_own(compiled_for):
    compiled_for(ICE_LAKE)
    assert limits(VNNI256) == {"prefer-vector-width": "256", "min-legal-vector-width": "0"}


def test_the_others_may_use_all_that_the_processor_has():
    assert limits(AVX512) == limits(PORTABLE) == {}


def test_this_processor_is_described():
    found = detect()
    assert found.name
    assert found.architecture == platform.machine()
    assert choose("auto", found) == choose()
    assert found.missing("portable") == []
