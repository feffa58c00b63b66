"""What is compiled ahead is what a step calls: all of it, and nothing that these kernels and this model do not need."""

import numpy as np
import pytest

from millpond.build import build_engine
from millpond.config import EngineConfig
from millpond.kernels.matmul import BF16, F32_WEIGHTS, U4
from millpond.kernels.precompile import Wanted
from millpond.kernels.tiles import attention_rows
from millpond.model.encoder import walk_of
from millpond.model.experts import link_ffn
from millpond.model.forward import link_attention, link_forward
from millpond.runner.compiled import jobs_of, tile_loader
from millpond.runner.sampler import link_compiled
from tiny_bert import write_bert_folder
from tiny_llama import write_tiny_llama
from tiny_runner import TYPES, tiny_runner

ALWAYS = ["attend_groups", "gate_and_up", "sample_by", "sample_rows", "walk", "walk_together"]
ROWS = len(attention_rows(2))  # query heads that share a K/V head of the tiny model


def asked(jobs):
    return {(job.module, job.name): set(job.signatures) for job in jobs}


def linked(runner, isa="portable"):
    """What a runner links, by its own arrays."""
    wanted, scratch = Wanted(), runner._scratch
    tile_loader(runner.config, runner._packed.kinds, runner._kv_dtype, isa, 1)(link=wanted)
    tiles = runner._tiles.fields
    arguments = tiles, runner._weights, runner._cache, runner._batch(()), scratch
    link_forward(walk_of(runner.config), *arguments, link=wanted)
    link_attention(*arguments, link=wanted)
    if not runner.config.is_encoder:
        link_ffn(tiles, runner._weights, scratch, link=wanted)
        link_compiled(wanted)
    return asked(wanted.jobs())


@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("changes", [{}, {"layers": 1, "heads": 1, "kv_heads": 1}], ids=["some heads", "one head"])
def test_what_is_known_without_weights_is_what_the_runner_links(tmp_path, types, changes):
    write_tiny_llama(tmp_path / "tiny.gguf", types={"*": "Q4_1"}, head_dim=32, **changes)
    runner = tiny_runner(tmp_path / "tiny.gguf", isa="portable", **types)
    assert asked(jobs_of(runner.config, runner._packed.kinds, runner._kv_dtype, "portable")) == linked(runner)


@pytest.fixture
def config(tmp_path):
    write_tiny_llama(tmp_path / "tiny.gguf", types={"*": "Q4_1"}, head_dim=32)
    return tiny_runner(tmp_path / "tiny.gguf").config


@pytest.mark.parametrize(
    ("isa", "kinds", "kv_dtype", "expected"),
    [
        ("avx2", {BF16}, np.uint16, {"gemm": 4, "score": ROWS, "value": ROWS, "softmax": 1}),
        ("avx512", {F32_WEIGHTS}, np.float32, {"gemm": 4, "score": ROWS, "value": ROWS, "softmax": 1}),
        ("avx512", {U4}, np.uint8, {"gemm": 10, "score": ROWS, "value": ROWS, "softmax": 1}),
        ("amx", {BF16}, np.uint16, {"more_rows": 1, "gated": 1, "attend_rows": 1}),
        (
            "amx",
            {U4, F32_WEIGHTS},
            np.uint16,
            {"gemm": 4, "first_rows": 2, "more_rows": 1, "gated": 1, "attend_rows": 1},
        ),
    ],
)
def test_only_what_the_kernels_the_weights_and_the_cache_need_is_compiled(config, isa, kinds, kv_dtype, expected):
    assert config.heads_per_kv == 2
    counts = {job.name: len(job.signatures) for job in jobs_of(config, kinds, kv_dtype, isa)}
    assert counts == dict.fromkeys(ALWAYS, 1) | expected


def test_the_longest_is_begun_first(config):
    assert jobs_of(config, {U4}, np.uint16, "avx512")[0].name == "walk"


@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
def test_of_an_encoder_too_which_has_a_walk_of_its_own_and_no_sampler(tmp_path, monkeypatch, types):
    path = write_bert_folder(tmp_path / "tiny")
    monkeypatch.setattr("millpond.runner.sampler.link_compiled", pytest.fail)
    runner = build_engine(path, EngineConfig(isa="portable", num_blocks=8, threads=1, **types)).runner
    known = asked(jobs_of(runner.config, runner._packed.kinds, runner._kv_dtype, "portable"))
    assert known == linked(runner)
    assert {name for _, name in known} & {*ALWAYS, "walk_encoder"} == {"attend_groups", "walk_encoder", "walk_together"}
