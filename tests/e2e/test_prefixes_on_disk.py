"""The demo model with its prefixes on disk: what is loaded after a restart has the bits that computing gives."""

from __future__ import annotations

import dataclasses

import pytest

from e2e.real import SETTINGS, assert_nothing_is_left
from millpond import LLM, SamplingParams
from millpond.build import open_disk
from millpond.lab.asking import Ask, drive
from millpond.lab.fresh_engine import engine_over
from millpond.load.store import resolve
from reference import golden

pytestmark = pytest.mark.slow


@pytest.fixture
def restarted(base, tmp_path):
    """A function that makes an engine with an empty cache over the same folder."""

    def restart(**sizes):
        disk = open_disk(tmp_path, (resolve("smollm2"),), base.config, base.runner)
        return engine_over(base, prefix_cache=True, disk=disk, **sizes)

    return restart


def test_every_answer_is_the_one_it_gets_alone_before_and_after_restarts(eight, alone, restarted):
    loaded = []
    for sizes in ({}, {}, {"max_num_batched_tokens": 64, "max_num_seqs": 3}, {"num_blocks": 24}):
        engine = restarted(**sizes)
        assert drive(engine, eight) == alone
        assert_nothing_is_left(engine)
        loaded.append(engine.scheduler.counters.disk_hit_tokens)
        engine.close()
    assert loaded[0] == 0
    # All but the block of the last token: of the prompts of 251, 100 and 32 tokens that begin alike, the longest once.
    assert min(loaded[1:]) >= 240


def test_log_probabilities_of_a_long_prompt_are_the_same_bits_from_disk(base, restarted):
    prompt = golden.load_prompts()[3].token_ids.tolist()
    asks = {"long": Ask(prompt, SamplingParams(max_tokens=6, temperature=0, logprobs=5))}

    def scores(engine):
        engine.add_request("long", *dataclasses.astuple(asks["long"])[:1], asks["long"].sampling)
        found = []
        while engine.has_unfinished:
            for output in engine.step():
                found += output.scores
        engine.close()
        return found, engine.scheduler.counters

    expected, cold = scores(restarted())
    got, warm = scores(restarted())
    assert got == expected
    full = (len(prompt) - 1) // 16 * 16
    assert (cold.disk_hit_tokens, cold.forward_tokens) == (0, len(prompt) + 5)
    assert (warm.disk_hit_tokens, warm.forward_tokens) == (full, len(prompt) - full + 5)
    assert warm.iterations == 6 + 1


def test_another_start_of_the_same_model_finds_them_and_another_kind_of_kv_does_not(tmp_path):
    prompt = "The prefix of this prompt is long enough for more than one block of sixteen tokens, and then it goes on."
    sampling = SamplingParams(max_tokens=4, temperature=0)
    texts, counts = [], []
    for kv_dtype in ("auto", "auto", "int8"):
        llm = LLM("smollm2", **SETTINGS, prefix_dir=tmp_path, kv_dtype=kv_dtype)
        texts.append(llm.generate(prompt, sampling)[0].outputs[0].text)
        counts.append(llm.engine.scheduler.counters.disk_hit_tokens)
        llm.engine.close()
    assert counts == [0, 16, 0]
    assert texts[0] == texts[1]
