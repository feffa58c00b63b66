"""LLM on the real model, with no server."""

from __future__ import annotations

import pytest

from e2e.real import assert_nothing_is_left
from millpond import SamplingParams
from millpond.errors import InvalidRequestError

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(max_tokens=8, temperature=0)
PROMPTS = ["1, 2, 3, 4, 5,", "The opposite of hot is", "10, 20, 30, 40, 50,", "Once upon a time"]


def texts(completions):
    return [completion.outputs[0].text for completion in completions]


def test_answers_come_in_the_order_of_the_prompts_and_again_in_the_next_call(llm):
    first = llm.generate(PROMPTS, GREEDY)
    again = llm.generate(PROMPTS[::-1], GREEDY)[::-1]
    assert [completion.prompt for completion in first] == PROMPTS
    assert texts(first) == texts(again)
    assert texts(first)[0].startswith(" 6, 7")
    assert texts(first)[2].startswith(" 60, 70")
    assert len({completion.request_id for completion in first + again}) == 8
    assert_nothing_is_left(llm.engine)


def test_several_prompts_share_their_steps(llm):
    before = llm.engine.scheduler.counters.iterations
    llm.generate(PROMPTS, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    assert llm.engine.scheduler.counters.iterations - before == 9


def test_each_prompt_can_have_its_own_parameters(llm):
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (1, 2, 3, 4)]
    completions = llm.generate(PROMPTS, params)
    assert [len(completion.outputs[0].token_ids) for completion in completions] == [1, 2, 3, 4]
    assert texts(completions) == [texts(llm.generate(*one))[0] for one in zip(PROMPTS, params, strict=True)]


def test_chat_answers_one_conversation_or_several_through_the_template(llm):
    hello = [{"role": "user", "content": "Say hello."}]
    longer = [*hello, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Again."}]
    one, both = llm.chat(hello, GREEDY), llm.chat([longer, hello], GREEDY)
    assert texts(one) == texts(both)[1:]
    assert one[0].prompt.count("<|im_start|>") == 3  # the template's own system message, the user's, the answer's
    assert one[0].prompt_token_ids == llm.engine.tokenizer.encode(one[0].prompt, add_special_tokens=False)
    assert len(one[0].prompt_token_ids) < len(both[0].prompt_token_ids)


def test_a_refused_prompt_runs_nothing_and_the_next_call_works(llm):
    before = llm.engine.scheduler.counters.forward_tokens
    for bad in ("", [], [49152], [-1]):
        with pytest.raises(InvalidRequestError):
            llm.generate([PROMPTS[0], bad], GREEDY)
    with pytest.raises(InvalidRequestError, match="4000"):
        llm.generate([PROMPTS[0], [5] * 4000], GREEDY)
    assert llm.engine.scheduler.counters.forward_tokens == before
    assert texts(llm.generate(PROMPTS[0], GREEDY))[0].startswith(" 6, 7")


def test_ctrl_c_in_the_middle_leaves_an_engine_that_goes_on(llm):
    calls = iter([None, None, KeyboardInterrupt()])

    def interrupt(stats):
        if (error := next(calls)) is not None:
            raise error

    llm.engine.observer = interrupt
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY)
    finally:
        llm.engine.observer = None
    assert_nothing_is_left(llm.engine)
    assert texts(llm.generate(PROMPTS[0], GREEDY))[0].startswith(" 6, 7")
