from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from millpond.core.request import SamplingParams
from millpond.errors import ConfigError, EngineError
from millpond.lab.bench_engine import BenchPlan, BenchResult, EngineBench
from millpond.lab.workload import w1


@dataclass
class Output:
    new_token_ids: tuple[int, ...]


@dataclass
class FakeRequest:
    prefill_steps: int
    left: int


@dataclass
class FakeEngine:
    """One prefill step at a time, for 100 virtual seconds; a step of decode alone takes half a second.

    While one request prefills, those that are ready decode along, as under a token budget. give_up_at is a number of
    requests: with that many decoding, one of them gets nothing, as after a preemption. At most `room` run at once.
    """

    tokens_per_prefill_step: int = 128
    give_up_at: int | None = None
    room: int = 1000
    now: float = 0.0
    requests: dict[str, FakeRequest] = field(default_factory=dict)
    seen: list[tuple[int, SamplingParams]] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def add_request(self, request_id, prompt_token_ids, sampling):
        self.seen.append((len(prompt_token_ids), sampling))
        steps = -(-len(prompt_token_ids) // self.tokens_per_prefill_step)
        self.requests[request_id] = FakeRequest(steps, sampling.max_tokens or 10**9)

    def abort(self, request_id):
        self.requests.pop(request_id, None)

    @property
    def has_unfinished(self):
        return bool(self.requests)

    def step(self):
        running = list(self.requests.values())[: self.room]
        prefilling = next((each for each in running if each.prefill_steps), None)
        ready = [each for each in running if not each.prefill_steps]
        self.now += 100.0 if prefilling else 0.5
        if prefilling:
            prefilling.prefill_steps -= 1
            if not prefilling.prefill_steps:
                ready.append(prefilling)
        if len(ready) == self.give_up_at and not prefilling:
            ready.pop()
        for each in ready:
            each.left -= 1
        self.requests = {name: each for name, each in self.requests.items() if each.left}
        return [Output((1,)) for _ in ready]


def bench_of(engine: FakeEngine) -> EngineBench:
    return EngineBench(engine, vocab_size=100, clock=engine.clock, decode_steps=5)


@pytest.mark.parametrize("num_sequences", [1, 4])
def test_decode_counts_only_the_steps_in_which_all_sequences_decode(num_sequences):
    engine = FakeEngine()
    assert bench_of(engine).decode(num_sequences, Random(0)) == num_sequences / 0.5
    assert not engine.has_unfinished


def test_decode_prompts_have_128_tokens_and_nothing_ends_by_itself():
    engine = FakeEngine()
    bench_of(engine).decode(2, Random(0))
    assert [(length, sampling.ignore_eos, sampling.temperature) for length, sampling in engine.seen] == [
        (128, True, 0)
    ] * 2


def test_decode_refuses_to_report_a_figure_when_a_sequence_was_left_out():
    with pytest.raises(EngineError, match="3 tokens to 4 sequences"):
        bench_of(FakeEngine(give_up_at=4)).decode(4, Random(0))


def test_decode_refuses_when_the_pool_never_holds_all_the_sequences():
    with pytest.raises(EngineError, match="3 tokens to 4 sequences"):
        bench_of(FakeEngine(room=3)).decode(4, Random(0))


@pytest.mark.parametrize("tokens_per_step", [1, 128])
def test_decode_waits_for_the_slowest_prefill(tokens_per_step):
    engine = FakeEngine(tokens_per_prefill_step=tokens_per_step)
    assert bench_of(engine).decode(3, Random(0)) == 3 / 0.5


def test_prefill_is_the_prompt_over_the_time_to_its_first_token():
    assert bench_of(FakeEngine()).prefill(512, Random(0)) == 512 / 400.0


def test_w1_is_every_output_token_over_the_whole_time():
    engine = FakeEngine()
    speed = bench_of(engine).w1()
    requests = w1(100, 0)
    assert [length for length, _ in engine.seen] == [len(each.prompt_token_ids) for each in requests]
    assert speed == pytest.approx(sum(each.max_tokens for each in requests) / engine.now)


def test_each_figure_is_the_median_of_the_rounds_after_one_that_warms_up():
    figures = iter([1000.0, 7.0, 1.0, 5.0])

    class Scripted(EngineBench):
        def decode(self, num_sequences, random):
            return next(figures)

    engine = FakeEngine()
    plan = BenchPlan(decode=(1,), prefill=(), w1=False, rounds=3)
    assert Scripted(engine, 100, engine.clock).run(plan, lambda name: None).decode_tok_s == {1: 5.0}


def test_every_round_has_prompts_of_its_own():
    engine = FakeEngine()
    prompts = []
    engine.add_request = lambda request_id, prompt, sampling: (
        prompts.append(prompt) or FakeEngine.add_request(engine, request_id, prompt, sampling)
    )
    bench_of(engine).run(BenchPlan(decode=(), prefill=(128,), w1=False, rounds=2), lambda name: None)
    assert len(set(prompts)) == 3


def test_the_plan_says_what_is_measured_and_in_which_order():
    names = []
    plan = BenchPlan(decode=(1, 2), prefill=(128,), w1=True, rounds=1)
    result = bench_of(FakeEngine()).run(plan, names.append)
    assert names == ["decode, 1 sequences", "decode, 2 sequences", "prefill, 128 tokens", "W1, 64 mixed requests"]
    assert len(names) == plan.num_measurements
    assert (list(result.decode_tok_s), list(result.prefill_tok_s)) == ([1, 2], [128])


def test_json_holds_the_three_families_and_null_for_a_w1_that_was_not_asked_for():
    result = BenchResult({1: 264.04}, {512: 1795.06}, None)
    assert result.as_json() == {"decode_tok_s": {"1": 264.0}, "prefill_tok_s": {"512": 1795.1}, "w1_output_tok_s": None}


def test_a_plan_of_no_rounds_is_refused():
    with pytest.raises(ConfigError, match="rounds must be at least 1, got 0"):
        BenchPlan(rounds=0)
