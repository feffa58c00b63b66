"""The same tokens alone or in a crowd: bit for bit, in any order, in chunks of any size, preempted or not."""

from __future__ import annotations

import dataclasses
import random

import pytest

from e2e.real import assert_nothing_is_left
from millpond.build import build_engine
from millpond.core.request import FinishReason, SamplingParams
from millpond.lab.asking import Ask, Got, drive
from millpond.lab.determinism import CONDITIONS, Determinism, Plan
from millpond.lab.fresh_engine import engine_over
from reference import golden

pytestmark = pytest.mark.slow


def shuffled(asks, seed):
    names = list(asks)
    random.Random(seed).shuffle(names)
    return {name: asks[name] for name in names}


def test_the_eight_answers_are_all_different_and_end_as_they_should(eight, alone):
    assert len({tuple(got.token_ids) for got in alone.values()}) == 8
    for name, got in alone.items():
        assert got.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        if got.finish_reason is FinishReason.LENGTH:
            assert len(got.token_ids) == eight[name].sampling.max_tokens


@pytest.mark.parametrize("order", range(2))
@pytest.mark.parametrize("budget", [64, 512])
def test_eight_at_once_get_the_tokens_they_get_alone(base, eight, alone, budget, order):
    engine = engine_over(base, max_num_batched_tokens=budget)
    assert drive(engine, shuffled(eight, order)) == alone
    # One by one they take more than 140 steps.
    assert engine.scheduler.counters.iterations < 45
    assert_nothing_is_left(engine)


def test_what_was_computed_before_gives_the_tokens_that_computing_it_gives(base, eight, alone):
    engine = engine_over(base, max_num_batched_tokens=64, prefix_cache=True)
    assert drive(engine, shuffled(eight, 0)) == alone
    cold = dataclasses.replace(engine.scheduler.counters)
    again = {f"{name}-again": ask for name, ask in shuffled(eight, 1).items()}
    assert drive(engine, again) == {f"{name}-again": got for name, got in alone.items()}
    warm, block_size = engine.scheduler.counters, engine.scheduler.block_size
    found = sum((len(ask.prompt) - 1) // block_size * block_size for ask in eight.values())
    assert warm.hit_tokens - cold.hit_tokens == found > 200
    assert warm.forward_tokens - cold.forward_tokens == cold.forward_tokens - found + cold.hit_tokens
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("seed", range(2))
def test_requests_that_come_and_go_in_the_middle_of_others_change_no_answer(base, eight, alone, seed):
    draw = random.Random(seed)
    engine = engine_over(base, max_num_batched_tokens=64, max_num_seqs=5)
    left, got = list(shuffled(eight, seed).items()), {name: Got() for name in eight}
    passing = Ask(list(range(1000, 1040)), SamplingParams(max_tokens=50, seed=seed))
    number = 0
    while left or engine.has_unfinished:
        if left and draw.random() < 0.5:
            name, ask = left.pop()
            engine.add_request(name, ask.prompt, ask.sampling)
        if draw.random() < 0.3:
            number += 1
            engine.add_request(f"passing-{number}", passing.prompt, passing.sampling)
        if number and draw.random() < 0.3:
            engine.abort(f"passing-{draw.randint(1, number)}")
        if not left and engine.scheduler.num_running <= number:
            for each in range(1, number + 1):
                engine.abort(f"passing-{each}")
        for output in engine.step():
            if output.request_id in got:
                got[output.request_id].add(output)
        assert engine.scheduler.counters.iterations < 400
    assert got == alone
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("budget", [64, 512])
def test_a_pool_too_small_for_all_preempts_and_changes_no_answer(base, eight, alone, budget):
    asks = shuffled(eight, budget)
    asks["long"] = asks.pop("long")  # it needs the whole pool, so it goes last and the others fight for room
    engine = engine_over(base, num_blocks=17, max_num_batched_tokens=budget)
    assert drive(engine, asks, max_steps=250) == alone
    assert engine.scheduler.counters.preemptions > 0
    assert_nothing_is_left(engine)


def test_blocks_handed_from_one_request_to_the_next_carry_nothing_over(base, eight, alone):
    """A pool of two blocks serves short requests one after another, each in what the last one wrote."""
    engine = engine_over(base, num_blocks=3)
    small = {name: eight[name] for name in ("one", "block", "story", "penalty")}
    for _ in range(2):
        assert drive(engine, small, max_steps=200) == {name: alone[name] for name in small}


def test_the_wall_is_passed_a_request_larger_than_the_reserve_leaves_still_runs(base):
    """Six blocks, three in reserve: b is preempted holding four, which the reserve alone would never let in again."""
    long = golden.load_prompts()[3].token_ids.tolist()
    asks = {
        "a": Ask(long[:1], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)),
        "b": Ask(long[100:130], SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)),
    }
    alone = {name: drive(engine_over(base), {name: ask})[name] for name, ask in asks.items()}
    engine = engine_over(base, num_blocks=6, watermark_blocks=3)
    # a's 40 steps, then the 16 that b lacks when it is preempted, one release each.
    assert drive(engine, asks, max_steps=60) == alone
    assert engine.scheduler.counters.preemptions == 1
    assert_nothing_is_left(engine)


BLOCK_EDGES = (15, 16, 17, 31, 32, 33)


def test_prompts_that_end_at_the_edges_of_blocks_get_the_same_tokens_alone_in_a_crowd_and_in_chunks(base):
    tokens = golden.load_prompts()[3].token_ids.tolist()
    asks = {f"{n}": Ask(tokens[:n], SamplingParams(max_tokens=3, temperature=0)) for n in BLOCK_EDGES}
    alone = {name: drive(engine_over(base), {name: ask})[name] for name, ask in asks.items()}
    assert drive(engine_over(base), asks) == alone
    chunked = engine_over(base, max_num_batched_tokens=7, max_num_seqs=6)
    assert drive(chunked, asks) == alone
    assert chunked.scheduler.counters.iterations > sum(BLOCK_EDGES) // 7
    assert len({tuple(got.token_ids) for got in alone.values()}) > 3


def test_two_threads_give_the_tokens_of_one(eight, alone, two_threads):
    assert two_threads.config.threads == 2
    assert drive(engine_over(two_threads), eight) == alone


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_requests_of_every_kind_get_the_same_bits_under_every_condition(kv_dtype):
    """What `millpond verify determinism` does, in the smallest size; then two threads, held to the answers of one."""
    plan = Plan(num_requests=16, slots=8, prompt_tokens=64, max_tokens=10)
    one = Determinism(build_engine("smollm2", plan.config(threads=1, kv_dtype=kv_dtype)), plan)
    rows = one.run(tuple(CONDITIONS))
    assert [(row.condition, row.verdict, row.difference) for row in rows if row.verdict != "same"] == []
    assert len(rows) == 1 + len(CONDITIONS) + 1
    assert sum(row.num_tokens for row in rows) > 1000
    two = Determinism(build_engine("smollm2", plan.config(threads=2, kv_dtype=kv_dtype)), plan, one.reference)
    assert [(row.condition, row.verdict) for row in two.run(("everything",))] == [
        ("alone", "same"),
        ("everything", "same"),
    ]
