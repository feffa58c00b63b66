from __future__ import annotations

from dataclasses import replace

import pytest

from engine_helpers import drive, text_of
from millpond.core.pace import StepPrices
from millpond.core.request import SamplingParams
from millpond.core.step import SchedulerOutput
from millpond.engine.engine import Engine
from tiny_engine import FakeClock, ids, make_engine

ROW_SECONDS, TOKEN_SECONDS = 0.001, 0.0005


class TimedRunner:
    """A runner whose steps take a millisecond a row, for three more, and half of one for a token of a prompt."""

    def __init__(self, inner, clock) -> None:
        self.inner, self.clock = inner, clock
        self.seconds: list[float] = []
        self.plans: list[SchedulerOutput] = []

    def execute(self, output):
        prompts = sum(len(each.token_ids) for each in output.scheduled if not each.output_position)
        rows = sum(1 for each in output.scheduled if each.output_position)
        self.seconds.append(ROW_SECONDS * (3 + rows if rows else 0) + TOKEN_SECONDS * prompts)
        self.plans.append(output)
        self.clock.now += self.seconds[-1]
        return self.inner.execute(output)


def paced_engine(itl_target):
    clock = FakeClock()
    engine = make_engine(num_blocks=600, max_model_len=2000, max_num_batched_tokens=256, max_num_seqs=8)
    return Engine(
        config=replace(engine.config, itl_target=itl_target),
        scheduler=engine.scheduler,
        runner=TimedRunner(engine.runner, clock),
        tokenizer=engine.tokenizer,
        model_name="tiny",
        vocab_size=engine.limits.vocab_size,
        clock=clock,
    )


def with_a_long_prompt(itl_target):
    """Four that decode when a long prompt comes: the seconds of the steps until its first token, and all texts."""
    engine = paced_engine(itl_target)
    sampling = SamplingParams(max_tokens=150, ignore_eos=True)
    for number in range(4):
        engine.add_request(f"d{number}", ids("hello"), sampling)
    outputs = {}

    def step():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)

    for _ in range(5):
        step()
    engine.add_request("long", ids("x" * 1000), replace(sampling, max_tokens=3))
    before = len(engine.runner.seconds)
    while "long" not in outputs:
        step()
    seconds = engine.runner.seconds[before:]
    for request_id, rest in drive(engine, until=1000).items():
        outputs[request_id] += rest
    return seconds, {request_id: text_of(each) for request_id, each in outputs.items()}


def test_steps_beside_a_long_prompt_keep_to_the_target_and_no_text_changes():
    free, paced = with_a_long_prompt(None), with_a_long_prompt(20.0)
    assert max(free[0]) > 0.100
    assert max(paced[0][1:]) <= 0.0205
    assert sum(paced[0]) < 1.3 * (1000 * TOKEN_SECONDS + len(paced[0]) * 7 * ROW_SECONDS)
    assert free[1] == paced[1]


def test_a_target_below_what_decoding_takes_still_lets_the_prompt_through():
    seconds, texts = with_a_long_prompt(1.0)
    assert len(seconds) < 1000
    assert texts == with_a_long_prompt(None)[1]


def test_a_prompts_last_token_counts_as_a_prompts_and_only_decoding_rows_as_rows(monkeypatch):
    noted = []
    monkeypatch.setattr(StepPrices, "note", lambda self, *step: noted.append(step[:2]))
    monkeypatch.setattr(StepPrices, "prefill_budget", lambda self, num_decoding, target: 2 if num_decoding else None)
    engine = paced_engine(20.0)
    engine.add_request("a", ids("hi"), SamplingParams(max_tokens=5, ignore_eos=True))
    engine.step()
    engine.add_request("b", ids("four"), SamplingParams(max_tokens=2, ignore_eos=True))
    drive(engine)
    assert noted[:4] == [(0, 2), (1, 2), (1, 2), (2, 0)]
    engine.add_request("c", ids("x"), SamplingParams(max_tokens=1))
    drive(engine)
    assert (0, 1) in noted


def test_a_prompt_alone_has_the_whole_step():
    engine = paced_engine(1.0)
    engine.add_request("long", ids("x" * 1000), SamplingParams(max_tokens=1))
    drive(engine)
    assert [plan.num_tokens for plan in engine.runner.plans] == [256, 256, 256, 232]


def test_what_steps_take_is_learned_without_a_target_too():
    engine = paced_engine(None)
    engine.add_request("a", ids("hello"), SamplingParams(max_tokens=5, ignore_eos=True))
    drive(engine)
    assert engine.prices.token_seconds == pytest.approx(TOKEN_SECONDS)
    assert engine.prices.decode_seconds(5) == pytest.approx(8 * ROW_SECONDS)
