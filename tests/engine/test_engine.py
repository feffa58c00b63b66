from __future__ import annotations

from dataclasses import replace

import pytest

from engine_helpers import answer, drive, text_of
from helpers import expected_output
from millpond.core.request import FinishReason, SamplingParams
from millpond.core.step import RunnerTimes
from millpond.errors import InvalidRequestError, InvariantError
from tiny_engine import LETTERS, ids, make_engine


def refusal(engine, prompt=(5,), request_id="a", **sampling):
    with pytest.raises(InvalidRequestError) as caught:
        engine.add_request(request_id, list(prompt), SamplingParams(**sampling))
    assert not engine.has_unfinished
    return caught.value


def test_an_answer_is_the_text_of_its_tokens_and_ends_with_length():
    outputs = answer(ids("hello"), max_tokens=5)
    assert text_of(outputs) == "hello"
    assert [output.finish_reason for output in outputs] == [None] * 4 + [FinishReason.LENGTH]
    assert [output.num_output_tokens for output in outputs] == [1, 2, 3, 4, 5]
    assert {output.num_prompt_tokens for output in outputs} == {2}


def test_the_last_output_comes_in_the_step_of_the_last_token():
    engine = make_engine()
    engine.add_request("a", ids("hi"), SamplingParams(max_tokens=3))
    assert [engine.step()[0].finish_reason for _ in range(3)] == [None, None, FinishReason.LENGTH]


def test_every_request_of_a_tight_pool_gets_the_answer_it_gets_alone():
    engine = make_engine(num_blocks=8, max_num_seqs=3)
    for number in range(8):
        engine.add_request(str(number), ids(f"abcd{number}"), SamplingParams(max_tokens=11, ignore_eos=True))
    outputs = drive(engine)
    assert engine.scheduler.counters.preemptions > 0
    for number in range(8):
        tokens = [token for output in outputs[str(number)] for token in output.new_token_ids]
        assert tokens == expected_output(ids(f"abcd{number}"), 11, LETTERS)


@pytest.mark.parametrize("prompt", [[], ()])
def test_an_empty_prompt_is_refused(prompt):
    assert refusal(make_engine(), prompt).param == "prompt"


@pytest.mark.parametrize("token_id", [-1, 267, 2**31, 2**70])
def test_a_prompt_with_an_id_outside_the_vocabulary_is_refused_by_id(token_id):
    error = refusal(make_engine(), [5, token_id])
    assert error.param == "prompt"
    assert str(token_id) in str(error)
    assert "266" in str(error)


@pytest.mark.parametrize("bad", [1.5, 5.0, "5", None, True])
def test_a_prompt_with_anything_but_whole_numbers_is_refused(bad):
    error = refusal(make_engine(), [5, bad])
    assert error.param == "prompt"
    assert repr(bad) in str(error)


@pytest.mark.parametrize("token_id", [267, 2**40])
def test_a_stop_token_outside_the_vocabulary_is_refused_by_id(token_id):
    error = refusal(make_engine(), stop_token_ids=(3, token_id))
    assert error.param == "stop_token_ids"
    assert str(token_id) in str(error)


def test_the_last_id_of_the_vocabulary_is_taken():
    engine = make_engine()
    engine.add_request("a", [266], SamplingParams(max_tokens=1, stop_token_ids=(266,)))
    assert len(drive(engine)["a"]) == 1


def test_an_id_that_is_in_use_is_refused_and_the_first_request_goes_on():
    engine = make_engine()
    engine.add_request("a", ids("hi"), SamplingParams(max_tokens=2))
    with pytest.raises(InvalidRequestError, match="'a' is already in use"):
        engine.add_request("a", ids("ho"), SamplingParams(max_tokens=2))
    assert len(drive(engine)["a"]) == 2


def test_an_id_can_be_used_again_after_its_answer():
    engine = make_engine()
    for _ in range(2):
        engine.add_request("a", ids("hi"), SamplingParams(max_tokens=2))
        assert len(drive(engine)["a"]) == 2


@pytest.mark.parametrize(
    ("length", "max_tokens", "runs"),
    [
        (9, None, True), (9, 1, True), (9, 2, False),
        (10, None, False), (10, 1, False),
        (11, None, False), (11, 1, False),
    ],
)  # fmt: skip
def test_the_context_limit_is_one_rule_for_prompts_around_it(length, max_tokens, runs):
    engine = make_engine(max_model_len=10)
    if runs:
        engine.add_request("a", [5] * length, SamplingParams(max_tokens=max_tokens))
        assert len(drive(engine)["a"]) == 1
    else:
        refusal(engine, [5] * length, max_tokens=max_tokens)


def test_a_full_prompt_and_a_too_long_prompt_are_told_apart():
    engine = make_engine(max_model_len=10)
    assert "leaves no room for one new token" in str(refusal(engine, [5] * 10, max_tokens=1))
    assert "11 tokens, more than max_model_len 10" in str(refusal(engine, [5] * 11, max_tokens=1))


def test_asking_for_more_than_fits_names_the_limit_the_prompt_and_the_request():
    error = refusal(make_engine(max_model_len=100), [5] * 8, max_tokens=93)
    assert error.param == "max_tokens"
    assert all(number in str(error) for number in ("100", "8 tokens", "93", "at most 92"))


def test_a_pool_smaller_than_the_context_is_the_limit_and_says_so():
    engine = make_engine(num_blocks=2, block_size=4, max_model_len=100)
    assert "needs 3 blocks of 4 tokens and the pool has 2" in str(refusal(engine, [5] * 4, max_tokens=6))
    engine.add_request("a", [5] * 4, SamplingParams(max_tokens=5, ignore_eos=True))
    assert len(drive(engine)["a"]) == 5


def test_an_unset_max_tokens_is_what_fits_and_ends_with_length():
    engine = make_engine(max_model_len=10)
    engine.add_request("a", [5] * 4, SamplingParams(max_tokens=None, ignore_eos=True))
    outputs = drive(engine)["a"]
    assert len(outputs) == 6
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_a_failed_forward_ends_the_requests_of_its_step_and_the_engine_goes_on(caplog):
    engine = make_engine(max_num_seqs=2, raises={1: RuntimeError("boom at /secret/path")})
    for name in "abc":
        engine.add_request(name, ids("hi"), SamplingParams(max_tokens=3, ignore_eos=True))
    outputs = drive(engine)
    assert [outputs[name][-1].finish_reason for name in "abc"] == ["error", "error", "length"]
    assert outputs["a"][-1].error == "the forward pass of this step failed"
    assert "boom" in caplog.text
    assert engine.scheduler.pool.num_free == 64


def test_a_failed_forward_in_the_middle_of_a_prompt_ends_it_too(caplog):
    engine = make_engine(max_num_batched_tokens=4, raises={1: RuntimeError("boom")})
    engine.add_request("a", [5] * 20, SamplingParams(max_tokens=3))
    assert [output.finish_reason for output in drive(engine)["a"]] == ["error"]
    assert engine.scheduler.pool.num_free == 64


def test_a_fault_of_one_request_leaves_the_others_alone():
    engine = make_engine(faults={"a": 2})
    for name in "ab":
        engine.add_request(name, ids("hi" + name), SamplingParams(max_tokens=5, ignore_eos=True))
    outputs = drive(engine)
    assert outputs["a"][-1].finish_reason is FinishReason.ERROR
    assert outputs["a"][-1].error == "the logits are not finite"
    assert text_of(outputs["b"]) == "".join(chr(each - 3) for each in expected_output(ids("hib"), 5, LETTERS))


def test_a_token_whose_text_cannot_be_made_ends_its_request_alone(caplog):
    engine = make_engine(script={"a": [*ids("ok"), 10**6]})
    for name in "ab":
        engine.add_request(name, ids("hi"), SamplingParams(max_tokens=5, ignore_eos=True))
    outputs = drive(engine)
    assert outputs["a"][-1].finish_reason is FinishReason.ERROR
    assert len(outputs["a"]) == 3
    assert outputs["b"][-1].finish_reason is FinishReason.LENGTH


def test_what_is_held_back_is_given_out_before_an_error():
    engine = make_engine(script={"a": ids("ab")}, faults={"a": 2})
    engine.add_request("a", ids("hi"), SamplingParams(max_tokens=9, stop=("bc",)))
    assert text_of(drive(engine)["a"]) == "ab"


def test_the_last_output_alone_names_the_stop_string_that_ended_the_answer():
    engine = make_engine(script=dict.fromkeys("ab", ids("abcd")))
    engine.add_request("a", ids("hi"), SamplingParams(max_tokens=9, stop=("x", "bc")))
    engine.add_request("b", ids("hi"), SamplingParams(max_tokens=4, stop=("x",)))
    outputs = drive(engine)
    assert [output.stop_string for output in outputs["a"]] == [None, None, "bc"]
    assert {output.stop_string for output in outputs["b"]} == {None}


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_abort_gives_everything_back_and_says_no_more(steps):
    engine = make_engine(max_num_batched_tokens=4)
    engine.add_request("a", [5] * 10, SamplingParams(max_tokens=9, ignore_eos=True))
    for _ in range(steps):
        engine.step()
    engine.abort("a")
    engine.abort("a")
    engine.abort("unknown")
    assert drive(engine) == {}
    assert engine.scheduler.pool.num_free == 64
    assert len(engine.runner.outputs) == steps


def test_abort_all_leaves_an_engine_that_serves_the_next_request():
    engine = make_engine(max_num_seqs=2)
    for name in "abc":
        engine.add_request(name, ids("hi"), SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    engine.abort_all()
    assert not engine.has_unfinished
    assert engine.scheduler.pool.num_free == 64
    engine.add_request("a", ids("hi"), SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(drive(engine)["a"]) == 2


def seeds_drawn(seed):
    engine = make_engine(seed=seed)
    for name in "abc":
        engine.add_request(name, ids("hi"), SamplingParams(max_tokens=1))
    drive(engine)
    return [admission.seed for _, _, admission in engine.runner.admissions]


def test_unset_seeds_are_drawn_from_the_engines_own_seed():
    assert seeds_drawn(1) == seeds_drawn(1)
    assert seeds_drawn(1) != seeds_drawn(2)
    assert len(set(seeds_drawn(1))) == 3


def test_a_given_seed_is_used():
    engine = make_engine()
    engine.add_request("a", ids("hi"), SamplingParams(max_tokens=1, seed=7))
    engine.step()
    assert engine.runner.admissions[0][2].seed == 7


def test_the_observer_sees_every_step_in_numbers():
    engine = make_engine()
    ticks = iter(range(100))
    engine._clock = lambda: float(next(ticks))
    seen = []
    engine.observer = seen.append
    engine.add_request("a", ids("hi"), SamplingParams(max_tokens=2, ignore_eos=True))
    drive(engine)
    assert [(each.step, each.num_scheduled, each.num_tokens, each.num_sampled) for each in seen] == [
        (0, 1, 2, 1),
        (1, 1, 1, 1),
        (2, 0, 0, 0),
    ]
    assert [each.free_blocks for each in seen] == [63, 63, 64]
    seconds = (seen[0].schedule_seconds, seen[0].execute_seconds, seen[0].update_seconds, seen[0].text_seconds)
    assert seconds == (1.0, 1.0, 1.0, 1.0)


def test_the_observer_hears_of_prefixes_in_the_step_that_admits():
    engine = make_engine(num_blocks=8)
    seen = []
    engine.observer = seen.append
    for name in "ab":
        engine.add_request(name, ids("hello you"), SamplingParams(max_tokens=2, ignore_eos=True))
    drive(engine)
    numbers = [(each.num_tokens, each.num_queried, each.num_hit, each.num_resumed_hit) for each in seen]
    # The first computes 9 tokens; the second waits for its two blocks of 4 and computes one.
    assert numbers == [(9, 9, 0, 0), (2, 9, 8, 0), (1, 0, 0, 0), (0, 0, 0, 0)]


def test_the_observer_hears_of_what_a_preempted_request_finds_and_computes_again():
    engine = make_engine(num_blocks=5, max_num_seqs=2)
    seen = []
    engine.observer = seen.append
    for name, text in (("a", "12345678"), ("b", "abcdefgh")):
        engine.add_request(name, ids(text), SamplingParams(max_tokens=4, ignore_eos=True))
    drive(engine)
    assert sum(each.num_hit for each in seen) == 0
    assert [(each.num_resumed_hit, each.num_recomputed) for each in seen if each.num_resumed_hit] == [(8, 1)]


def test_the_observer_is_told_where_the_runner_spent_its_time():
    times = RunnerTimes(0.1, 0.2, 0.3)

    class Timed:
        def __init__(self, inner):
            self.inner = inner

        def execute(self, output):
            return replace(self.inner.execute(output), times=times)

    engine = make_engine(wrap=Timed)
    seen = []
    engine.observer = seen.append
    engine.add_request("a", ids("hi"), SamplingParams(max_tokens=1))
    engine.step()
    assert seen[0].times == times


@pytest.mark.parametrize("audit", [True, False])
def test_the_audit_finds_a_broken_rule_in_the_step_after_it_broke(audit):
    engine = make_engine(audit=audit)
    engine.add_request("a", ids("hi"), SamplingParams(max_tokens=5, ignore_eos=True))
    engine.step()
    engine.scheduler.pool.allocate(1)
    if audit:
        with pytest.raises(InvariantError, match="INV-1"):
            engine.step()
    else:
        engine.step()


class Forgetful:
    """A runner that keeps who has a slot until it hears of the end, and may fail before it has heard anything."""

    def __init__(self, inner):
        self.inner, self.seated, self.fails, self.told = inner, set(), False, []

    def execute(self, output):
        if self.fails:
            raise RuntimeError("a fault")
        self.told += output.released
        self.seated -= {*output.released, *output.preempted}
        self.seated |= {each.request_id for each in output.scheduled if each.admission is not None}
        return self.inner.execute(output)


@pytest.mark.parametrize("missed", ["a step without a forward", "a failed step", "an end of everything"])
def test_a_runner_hears_of_every_request_that_left_its_slot_even_if_it_missed_the_step(missed):
    engine = make_engine(wrap=Forgetful)
    engine.add_request("a", ids("hi"), SamplingParams(max_tokens=1 if missed == "a step without a forward" else 9))
    engine.step()
    assert engine.runner.seated == {"a"}
    if missed == "a failed step":
        engine.abort("a")
        engine.add_request("b", ids("hi"), SamplingParams(max_tokens=1))
        engine.runner.fails = True
        engine.step()
        engine.runner.fails = False
    elif missed == "an end of everything":
        engine.abort_all()
    while engine.has_unfinished:
        engine.step()
    engine.add_request("never", ids("hi"), SamplingParams(max_tokens=1))
    engine.abort("never")
    engine.step()
    engine.add_request("c", ids("hi"), SamplingParams(max_tokens=1))
    engine.step()
    assert engine.runner.seated == {"c"}
    assert "never" not in engine.runner.told
    engine.step()
    assert engine._seated - {*engine._unheard} == set()
