"""Greedy text against transformers, whose values are in tests/golden, and between the two sets of kernels."""

from __future__ import annotations

import json

import pytest

from e2e.real import KV_MEMORY, SETTINGS, millpond
from millpond import LLM, SamplingParams
from millpond.lab.asking import Ask, drive
from millpond.lab.fresh_engine import engine_over
from reference import golden

pytestmark = pytest.mark.slow

PROMPTS = {prompt.name: prompt for prompt in golden.load_prompts()}
TEXTS = {prompt["name"]: prompt["text"] for prompt in json.loads(golden.TEXTS_FILE.read_text(encoding="utf-8"))}


def asks(num_tokens):
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    return {name: Ask(prompt.token_ids.tolist(), sampling) for name, prompt in PROMPTS.items()}


@pytest.fixture(scope="module")
def float32():
    return LLM("smollm2", **{**SETTINGS, "dtype": "float32", "kv_memory": 2 * KV_MEMORY}).engine


def test_float32_gives_the_greedy_tokens_of_transformers_for_all_prompts_at_once(float32):
    got = drive(engine_over(float32), asks(64))
    for name, prompt in PROMPTS.items():
        assert got[name].token_ids == prompt.greedy_token_ids.tolist(), name


def test_float32_gives_the_greedy_tokens_of_transformers_in_chunks_and_after_preemptions(float32):
    """The five hold 36 blocks before their first token and 43 at the end."""
    engine = engine_over(float32, num_blocks=37, max_num_batched_tokens=64)
    got = drive(engine, asks(24), max_steps=150)
    for name, prompt in PROMPTS.items():
        assert got[name].token_ids == prompt.greedy_token_ids[:24].tolist(), name
    assert engine.scheduler.counters.preemptions > 0


@pytest.mark.parametrize(("name", "threads"), [("chat", ()), ("languages", ("--threads", "1"))])
def test_the_command_generates_the_greedy_tokens_of_transformers(base, name, threads):
    prompt = PROMPTS[name]
    flags = ("--dtype", "float32", "--max-tokens", "64", "--ignore-eos", "--json", *threads)
    done = millpond("generate", "-", *flags, stdin=TEXTS[name])
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["prompt_token_ids"] == prompt.token_ids.tolist()
    assert told["token_ids"] == prompt.greedy_token_ids.tolist()
    assert told["text"] == base.tokenizer.decode(told["token_ids"])
    assert told["finish_reason"] == "length"


def test_without_ignore_eos_the_answer_ends_at_the_first_end_token(float32):
    ask = Ask(PROMPTS["chat"].token_ids.tolist(), SamplingParams(max_tokens=64, temperature=0))
    got = drive(engine_over(float32), {"chat": ask})["chat"]
    before_end = PROMPTS["chat"].greedy_until(float32.tokenizer.eos_token_ids)
    assert got.token_ids[:-1] == before_end
    assert got.token_ids[-1] in float32.tokenizer.eos_token_ids
    assert got.text == float32.tokenizer.decode(before_end)
    assert "Paris" in got.text


@pytest.fixture(scope="module")
def portable():
    return LLM("smollm2", **SETTINGS, isa="portable").engine


def test_the_portable_kernels_give_the_same_greedy_tokens(base, portable):
    """As those of every other instruction set but AMX, which rounds attention in a way of its own."""
    assert portable.config.isa == "portable"
    if base.config.isa == "amx":
        base = LLM("smollm2", **SETTINGS, isa="avx512").engine
    expected = {name: got.token_ids for name, got in drive(engine_over(base), asks(24)).items()}
    got = {name: got.token_ids for name, got in drive(engine_over(portable), asks(24)).items()}
    assert got == expected


def test_the_portable_kernels_too_give_the_same_tokens_alone_and_in_a_crowd(portable, eight):
    few = {name: eight[name] for name in ("one", "penalty", "story", "block")}
    alone = {name: drive(engine_over(portable), {name: ask})[name] for name, ask in few.items()}
    assert drive(engine_over(portable, num_blocks=8, max_num_batched_tokens=64), few) == alone
