"""A few hundred requests with the real kernels, alone and under every condition; and faults that must be found."""

from __future__ import annotations

import json

import numpy as np
import pytest

from millpond.build import build_engine
from millpond.cli.app import run
from millpond.lab.determinism import CONDITIONS, Determinism, Plan
from millpond.lab.determinism_asks import draw_asks
from millpond.runner.model_runner import ModelRunner
from tiny_llama import write_tiny_llama
from tiny_runner import TYPES

PLAN = Plan(num_requests=120, slots=16, prompt_tokens=80, max_tokens=12)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    types = {"blk.0*": "Q4_1", "blk.1.ffn*": "Q8_0", "blk.1.attn*": "F16", "token_embd*": "Q8_0"}
    # Tied, its logits would lie so far apart that nearly every log probability is 0.
    write_tiny_llama(path, types=types, heads=6, kv_heads=2, head_dim=32, tied=False)
    return path


def check(path, plan=PLAN, conditions=tuple(CONDITIONS), reference=None, **settings):
    each = Determinism(build_engine(str(path), plan.config(**settings)), plan, reference or {})
    return each, {row.condition: row for row in each.run(conditions)}


@pytest.mark.slow
@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
def test_hundreds_of_requests_get_the_same_bits_under_every_condition_and_with_two_threads(path, types):
    one, rows = check(path, threads=1, **types)
    assert {name: row.difference for name, row in rows.items() if row.verdict != "same"} == {}
    assert rows["crowd"].num_answers == 150
    assert rows["http"].num_answers == 2 * 150 - 15  # a scored prompt is not streamed
    # The answers are worth comparing: many, long, and unlike one another.
    assert rows["crowd"].num_tokens > 1000
    assert len({tuple(got.token_ids) for got in one.reference.values()}) > 120
    logprobs = [score.logprob for got in one.reference.values() for score in got.scores]
    assert len(set(logprobs)) > 0.9 * len(logprobs)
    # It was no accident that each condition came about.
    counts = {name: row.counts for name, row in rows.items()}
    assert counts["chunks"].cut > 300
    assert min(counts[name].preempted for name in ("preempted", "resumed", "everything")) > 10
    assert counts["cache, warm"].found > counts["cache, cold"].found > 600
    assert min(counts["guesses"].right, counts["guesses"].wrong) > 60
    assert counts["crowd"].steps < counts["alone"].steps / 5
    _, two = check(path, conditions=("everything",), reference=one.reference, threads=2, **types)
    assert [row.verdict for row in two.values()] == ["same", "same"]


SMALL = ["--requests", "16", "--slots", "6", "--prompt-tokens", "48", "--max-tokens", "8", "--threads", "1"]


@pytest.mark.parametrize("size", [1e-6, 2.0])
def test_a_forward_pass_that_looks_at_the_batch_is_found_at_its_position(path, size, monkeypatch, capsys):
    """The logits of one position of each sequence are a little off where other sequences are in the step."""
    asks = draw_asks(0, 16, prompt_tokens=48, max_tokens=8, vocab_size=267)
    position = len(asks["r0"].prompt) + 1  # what its third token is chosen by
    forward = ModelRunner._forward

    def nudging(self, batch, scratch, *rest):
        forward(self, batch, scratch, *rest)
        if len(batch.tables) > 1:
            rows = np.flatnonzero(batch.positions[batch.sampled] == position)
            scratch.logits[rows] *= np.float32(1 + size)
            scratch.tops[rows] *= np.float32(1 + size)

    monkeypatch.setattr(ModelRunner, "_forward", nudging)
    flags = ["verify", "determinism", "--model", str(path), *SMALL, "--conditions", "crowd", "--kv-dtype", "auto"]
    assert run([*flags, "--json"], {}) == 1
    alone, crowd = json.loads(capsys.readouterr().out)["parts"][0]["rows"]
    assert (alone["verdict"], crowd["verdict"]) == ("same", "different")
    found = crowd["difference"]
    prompt = asks[found["request"].partition("-")[0]].prompt
    assert (found["where"], found["position"]) == ("output", position - len(prompt) + 1)
    assert found["expected"]["bits"] != found["got"]["bits"]
