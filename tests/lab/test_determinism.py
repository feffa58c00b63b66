"""The check of determinism over a scripted runner: what it forces, and that each planted fault is found where it is."""

from __future__ import annotations

import dataclasses
import math

import pytest

from millpond.core.step import SampledTokens
from millpond.errors import ConfigError
from millpond.lab import determinism
from millpond.lab.determinism import CONDITIONS, Determinism, Plan
from millpond.lab.determinism_asks import draw_asks
from tiny_engine import LETTERS, make_engine

PLAN = Plan(num_requests=24, slots=6, prompt_tokens=64, max_tokens=12)


def engine_for(plan, wrap=lambda runner: runner):
    config = plan.config()
    sizes = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
    return make_engine(wrap=wrap, **{name: getattr(config, name) for name in sizes})


def check(*conditions, wrap=lambda runner: runner, plan=PLAN):
    """The rows by condition, the first of which is that of the requests alone."""
    rows = Determinism(engine_for(plan, wrap), plan).run(conditions)
    return {row.condition: row for row in rows}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_requests", [determinism.LEAST_REQUESTS, 40])
def test_every_condition_comes_about_and_changes_nothing(seed, num_requests):
    rows = check(*CONDITIONS, plan=dataclasses.replace(PLAN, seed=seed, num_requests=num_requests))
    names = {"cache": ("cache, cold", "cache, warm")}
    assert list(rows) == ["alone", *(row for name in CONDITIONS for row in names.get(name, (name,)))]
    assert {row.verdict for row in rows.values()} == {"same"}
    assert {row.num_answers for name, row in rows.items() if name != "http"} == {num_requests + 2 * (num_requests // 8)}


def test_what_each_condition_forces_is_counted():
    rows = {name: row.counts for name, row in check(*CONDITIONS).items()}
    forced = {name: {each for each, count in dataclasses.asdict(row).items() if count} for name, row in rows.items()}
    assert forced["alone"] == {"steps"}
    assert forced["crowd"] - {"cut"} == {"steps", "others"}
    assert forced["chunks"] == {"steps", "others", "cut"}
    assert forced["preempted"] - {"cut"} == {"steps", "others", "preempted"}
    assert forced["resumed"] >= {"preempted", "found", "resumed"}
    assert forced["guesses"] - {"cut"} == {"steps", "others", "right", "wrong"}
    assert forced["everything"] >= {"others", "cut", "preempted", "found", "resumed", "right", "wrong", "aborted"}
    for policy in ("priority", "fair"):
        assert forced[policy] >= {"others", "preempted", "displaced"}
        assert rows[policy].others == 2
    assert forced["http"] >= {"others", "found", "streamed"}
    assert rows["chunks"].cut > 4 * rows["crowd"].cut
    assert rows["cache, warm"].found > rows["cache, cold"].found
    # As many steps as tokens for those that run alone, and one that releases the last; guesses save some.
    assert rows["alone"].steps == check()["alone"].num_tokens + 1
    assert rows["guesses"].steps < rows["crowd"].steps < rows["alone"].steps / 3


class Faulty:
    """A runner that answers a request otherwise at one output position, in the steps that is_wrong says."""

    position = 3

    def __init__(self, inner):
        self.inner = inner
        self.began = {}

    def execute(self, output):
        for each in output.scheduled:
            if each.admission is not None:
                self.began[each.request_id] = each.first_position
        result = self.inner.execute(output)
        wrong = {each.request_id for each in output.scheduled if self.is_wrong(each, output) and self.is_there(each)}
        sampled = [self.changed(each) if each.request_id in wrong else each for each in result.sampled]
        return dataclasses.replace(result, sampled=tuple(sampled))

    def is_there(self, each):
        return each.samples and each.output_position == self.position

    def is_wrong(self, each, output):
        raise NotImplementedError

    def changed(self, each):
        last = LETTERS[(LETTERS.index(each.token_ids[-1]) + 1) % len(LETTERS)]
        return SampledTokens(each.request_id, (*each.token_ids[:-1], last))


class InACrowd(Faulty):
    def is_wrong(self, each, output):
        return len(output.scheduled) > 1


class Resumed(Faulty):
    def is_wrong(self, each, output):
        return each.admission is not None and each.output_position > 0

    def is_there(self, each):
        return each.samples


class Found(Faulty):
    def is_wrong(self, each, output):
        return self.began[each.request_id] > 0


class Guessed(Faulty):
    def is_wrong(self, each, output):
        return each.num_drafts > 0

    def is_there(self, each):
        return each.samples


class Cut(Faulty):
    """The answer begins wrong where the prompt came in parts."""

    position = 0

    def is_wrong(self, each, output):
        return each.first_position > 0 and each.admission is None


class OverHttp(Faulty):
    def is_wrong(self, each, output):
        return each.request_id.startswith("cmpl-")


class InTheLastBit(InACrowd):
    """The token is right, its log probability has another last bit."""

    def execute(self, output):
        result = self.inner.execute(output)
        there = {each.request_id for each in output.scheduled if self.is_wrong(each, output) and self.is_there(each)}
        scores = tuple(
            each._replace(
                sampled=tuple(score._replace(logprob=math.nextafter(score.logprob, 0)) for score in each.sampled)
            )
            if each.request_id in there
            else each
            for each in result.scores
        )
        return dataclasses.replace(result, scores=scores)


FAULTS = {
    "crowd": InACrowd,
    "chunks": Cut,
    "preempted": Resumed,
    "resumed": Resumed,
    "cache": Found,
    "guesses": Guessed,
    "http": OverHttp,
}


@pytest.mark.parametrize(("condition", "fault"), FAULTS.items(), ids=FAULTS)
def test_a_planted_fault_is_found_by_its_condition(condition, fault):
    rows = check(condition, wrap=fault)
    bad = [row for row in rows.values() if row.verdict == "different"]
    assert bad
    assert "alone" not in {row.condition for row in bad}
    for row in bad:
        assert row.condition.startswith(condition)
        assert 0 < row.num_different <= row.num_answers
        assert row.difference.where in ("output", "text")


@pytest.mark.parametrize(
    ("fault", "other"), [(Resumed, "crowd"), (Found, "preempted"), (Guessed, "cache"), (Cut, "crowd")]
)
def test_a_fault_that_a_condition_does_not_touch_is_not_seen_by_it(fault, other):
    plan = dataclasses.replace(PLAN, slots=2)
    assert {row.verdict for row in check(other, wrap=fault, plan=plan).values()} == {"same"}


def test_a_difference_names_the_request_the_position_and_both_sides():
    row = check("crowd", wrap=InACrowd)["crowd"]
    assert (row.difference.where, row.difference.position) == ("output", 3)
    assert row.difference.request in draw_asks(0, 24, prompt_tokens=64, max_tokens=12, vocab_size=267)
    assert LETTERS.index(row.difference.got.token) - LETTERS.index(row.difference.expected.token) in (1, -25)
    shown = row.as_json()
    assert (shown["verdict"], shown["difference"]["position"]) == ("different", 3)


def test_the_last_bit_of_a_log_probability_is_enough():
    found = check("crowd", wrap=InTheLastBit)["crowd"].difference
    assert (found.where, found.position, found.got.token) == ("output", 3, found.expected.token)
    assert found.got.logprob == math.nextafter(found.expected.logprob, 0)


def test_another_engine_is_held_to_the_first_ones_answers():
    first = Determinism(engine_for(PLAN), PLAN)
    first.run(())
    same, other = (Determinism(engine_for(PLAN, wrap), PLAN, first.reference) for wrap in (lambda each: each, Always))
    assert [row.verdict for row in same.run(())] == ["same"]
    (row,) = other.run(())
    assert (row.condition, row.verdict, row.difference.position) == ("alone", "different", 3)
    assert same.fingerprint == first.fingerprint


class Always(Faulty):
    def is_wrong(self, each, output):
        return True


def test_a_condition_that_did_not_come_about_is_no_success(monkeypatch):
    crowd = dataclasses.replace(CONDITIONS["crowd"], forces=("others", "aborted", "resumed"))
    monkeypatch.setitem(CONDITIONS, "crowd", crowd)
    row = check("crowd")["crowd"]
    assert (row.verdict, row.missing, row.difference) == ("not forced", ("aborted", "resumed"), None)


def test_the_same_numbers_run_the_same_steps_whatever_else_is_run():
    everything, alone = check(*CONDITIONS)["everything"], check("everything")["everything"]
    assert everything.counts == alone.counts
    other = check("everything", plan=dataclasses.replace(PLAN, seed=1))["everything"]
    assert other.counts != everything.counts


def test_requests_are_of_every_kind_and_more_of_them_begin_alike():
    few, many = (draw_asks(3, count, prompt_tokens=64, max_tokens=12, vocab_size=267) for count in (16, 40))
    assert few == {name: many[name] for name in few}
    kinds = ("greedy", "seeded", "choices", "penalties", "min_p", "masked", "scored", "plain")
    assert [ask.kind for ask in few.values()] == [*kinds, *kinds]
    assert all(1 <= len(ask.prompt) <= 64 and 4 <= ask.sampling.max_tokens <= 12 for ask in many.values())
    assert len({tuple(ask.prompt[:16]) for ask in many.values() if len(ask.prompt) >= 16}) < len(many) * 0.8


@pytest.mark.parametrize("seed", range(5))
def test_the_smallest_plan_can_be_drawn(seed):
    asks = draw_asks(seed, 64, prompt_tokens=32, max_tokens=4, vocab_size=10)
    assert {ask.sampling.max_tokens for ask in asks.values()} == {2, 3, 4}
    assert max(max(ask.prompt) for ask in asks.values()) == 9


def test_an_unknown_condition_and_a_plan_that_forces_nothing_are_refused():
    with pytest.raises(ConfigError, match="no condition is called 'crowds'; there are crowd, chunks"):
        check("crowds")
    with pytest.raises(ConfigError, match=r"num_requests must be at least 16 to force .* got 15"):
        Plan(num_requests=15)
    with pytest.raises(ConfigError, match=r"slots must be at least 2 .* got 1"):
        Plan(slots=1)
