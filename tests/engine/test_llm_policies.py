"""Offline: priorities and tenants, and the end of an LLM whose prefixes are kept on disk."""

from __future__ import annotations

import pytest

from disk_stand_in import disk_in
from helpers import expected_output
from millpond.core.request import SamplingParams
from millpond.errors import EngineDeadError, InvalidRequestError
from millpond.llm import LLM
from tiny_engine import LETTERS, ids, make_engine

FOUR = SamplingParams(max_tokens=4, ignore_eos=True)
CHAT = [[{"role": "user", "content": name}] for name in ("a", "b", "c")]


def order_of(engine):
    """The prompts in the order in which they began, by their places in the call."""
    return [int(name.split("-")[1]) for output in engine.runner.outputs for name in output.admitted]


@pytest.mark.parametrize("how", ["generate", "chat"])
def test_a_smaller_priority_goes_first_and_the_answers_keep_the_order_of_the_prompts(how):
    engine = make_engine(policy="priority", max_num_seqs=1)
    asked = {"generate": ["a", "b", "c"], "chat": CHAT}[how]
    completions = getattr(LLM.from_engine(engine), how)(asked, FOUR, priority=[5, 0, -5])
    assert order_of(engine) == [2, 1, 0]
    for each in completions:
        assert each.outputs[0].token_ids == expected_output(each.prompt_token_ids, 4, LETTERS)


def test_one_priority_is_for_all_and_none_is_0():
    engine = make_engine(policy="priority", max_num_seqs=1)
    LLM.from_engine(engine).generate(["a", "b"], FOUR, priority=7)
    assert order_of(engine) == [0, 1]
    LLM.from_engine(make_engine()).generate("a", FOUR, priority=None, tenant=None)


def test_every_answer_of_a_prompt_has_its_priority():
    engine = make_engine(policy="priority", max_num_seqs=1)
    LLM.from_engine(engine).generate(["a", "b"], SamplingParams(n=2, max_tokens=2), priority=[1, 0])
    assert order_of(engine) == [1, 1, 0, 0]


@pytest.mark.parametrize("how", ["generate", "chat"])
def test_tenants_take_turns(how):
    engine = make_engine(policy="fair", max_num_seqs=1)
    asked = {"generate": ["a", "b", "c"], "chat": CHAT}[how]
    getattr(LLM.from_engine(engine), how)(asked, FOUR, tenant=["one", "one", "two"])
    assert order_of(engine) == [0, 2, 1]


@pytest.mark.parametrize(
    ("policy", "given", "message"),
    [
        ("fcfs", {"priority": 1}, "priority 1 would change nothing: the policy here is fcfs"),
        ("fcfs", {"tenant": "a"}, "tenant 'a' would change nothing: the policy here is fcfs"),
        ("priority", {"tenant": ["", "a"]}, "tenant 'a' would change nothing: the policy here is priority"),
        ("priority", {"priority": [0, 1001]}, "priority must be from -1000 to 1000, got 1001"),
        ("priority", {"priority": [1]}, "2 prompts but 1 priority"),
        ("priority", {"priority": "1"}, "priority must be int, or a list with one for each prompt; got '1'"),
        ("fair", {"tenant": ["a", "b", "c"]}, "2 prompts but 3 tenant"),
        ("fair", {"tenant": [1, 2]}, "tenant must be str, or a list"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(policy, given, message):
    engine = make_engine(policy=policy)
    with pytest.raises(InvalidRequestError, match=message) as caught:
        LLM.from_engine(engine).generate(["a", "b"], FOUR, **given)
    assert caught.value.param == next(iter(given))
    assert (engine.runner.outputs, engine.has_unfinished) == ([], False)


def test_what_was_computed_is_on_disk_once_it_is_closed(tmp_path):
    prompt = ids("Once upon a time, in")  # five blocks of four
    with LLM.from_engine(make_engine(disk=disk_in(tmp_path))) as llm:
        (first,) = llm.generate([prompt], FOUR)
    assert len(list(tmp_path.rglob("*.kv"))) == 5
    engine = make_engine(disk=disk_in(tmp_path))
    with LLM.from_engine(engine) as llm:
        (second,) = llm.generate([prompt], FOUR)
    assert engine.scheduler.counters.disk_hit_tokens == 16
    assert second.outputs[0].token_ids == first.outputs[0].token_ids


def test_a_fault_closes_it_too_and_then_it_answers_nothing(tmp_path):
    engine = make_engine(disk=disk_in(tmp_path))
    with pytest.raises(InvalidRequestError), LLM.from_engine(engine) as llm:
        llm.generate(["a"], FOUR, priority=3)
    with pytest.raises(EngineDeadError, match="this LLM has been closed"):
        llm.generate(["a"], FOUR)
    llm.close()
    assert engine.runner.outputs == []
