"""Where the real model's text ends and how it is cut: stop strings, lengths, and characters of several tokens."""

from __future__ import annotations

import pytest

from e2e.real import assert_nothing_is_left
from millpond.core.request import FinishReason, SamplingParams
from millpond.errors import InvalidRequestError
from millpond.lab.asking import Ask, drive
from millpond.lab.fresh_engine import engine_over
from reference import golden

pytestmark = pytest.mark.slow

PROMPT = "The three primary colours are"


def answer(engine, prompt, **sampling):
    """What a fresh engine over the same runner gives one prompt, and the number of its steps."""
    engine = engine_over(engine)
    ids = engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    settings = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, **sampling}
    got = drive(engine, {"a": Ask(ids, SamplingParams(**settings))})["a"]
    assert_nothing_is_left(engine)
    return got, engine.scheduler.counters.iterations - 1  # the last one only releases


@pytest.fixture(scope="module")
def whole(base):
    return answer(base, PROMPT)[0]


def across(whole, base, index):
    """A stop string that begins inside one token and ends inside the next."""
    texts = [base.tokenizer.decode([token_id]) for token_id in whole.token_ids]
    return texts[index][-2:] + texts[index + 1][:2], "".join(texts[:index]) + texts[index][:-2]


@pytest.mark.parametrize("index", [0, 3, 7])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_tokens_cuts_the_text_and_ends_the_steps_there(base, whole, index, include):
    stop, before = across(whole, base, index)
    assert whole.text.index(stop) == len(before), "the string must not come earlier for this test to mean anything"
    got, num_steps = answer(base, PROMPT, stop=[stop, "never said"], include_stop_str_in_output=include)
    assert got.text == before + (stop if include else "")
    assert got.finish_reason is FinishReason.STOP
    assert got.token_ids == whole.token_ids[: index + 2]
    assert num_steps == index + 2


def test_a_stop_string_that_never_comes_whole_loses_no_text(base, whole):
    got, _ = answer(base, PROMPT, stop=[whole.text[5:9] + "\0", whole.text + "!", whole.text[-3:] + "?"])
    assert (got.text, got.token_ids, got.finish_reason) == (whole.text, whole.token_ids, FinishReason.LENGTH)


def test_a_stop_string_in_the_last_allowed_token_is_a_stop_and_not_a_length(base, whole):
    stop, _ = across(whole, base, 3)
    got, num_steps = answer(base, PROMPT, stop=[stop], max_tokens=5)
    assert (got.finish_reason, num_steps) == (FinishReason.STOP, 5)


def test_a_stop_token_ends_the_answer_in_its_own_step_and_is_not_in_the_text(base, whole):
    stop_id = whole.token_ids[6]
    first = whole.token_ids.index(stop_id)
    got, num_steps = answer(base, PROMPT, stop_token_ids=[stop_id])
    assert (got.token_ids, num_steps) == (whole.token_ids[: first + 1], first + 1)
    assert got.text == base.tokenizer.decode(whole.token_ids[:first])
    assert got.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_an_answer_is_cut_at_its_length_in_that_many_steps(base, whole, max_tokens):
    got, num_steps = answer(base, PROMPT, max_tokens=max_tokens)
    assert (got.token_ids, num_steps) == (whole.token_ids[:max_tokens], max_tokens)
    assert got.finish_reason is FinishReason.LENGTH


def test_an_emoji_of_several_tokens_comes_whole_or_not_at_all(base):
    engine = engine_over(base)
    prompt = engine.tokenizer.encode("🦆🌅🦆🌅🦆🌅🦆🌅🦆🌅🦆🌅🦆🌅")
    engine.add_request("a", prompt, SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))
    texts, token_ids, late = [], [], 0
    while engine.has_unfinished:
        for output in engine.step():
            texts.append(output.text)
            token_ids += output.new_token_ids
            late = 0 if output.text else late + 1
            assert late <= 3
            if output.finish_reason is None:
                assert "�" not in output.text
    assert any(character > "\uffff" for character in "".join(texts)), "the model must go on with the pattern here"
    assert "" in texts
    assert "".join(texts) == engine.tokenizer.decode(token_ids)


def test_the_end_token_ends_a_chat_and_ignore_eos_goes_on_past_it(base):
    prompt = base.chat_template.render([{"role": "user", "content": "Say hello."}])
    ids = base.tokenizer.encode(prompt, add_special_tokens=False)
    ended, _ = answer(base, ids, ignore_eos=False, max_tokens=60)
    assert ended.finish_reason is FinishReason.STOP
    assert ended.token_ids[-1] in base.tokenizer.eos_token_ids
    went_on, _ = answer(base, ids, max_tokens=len(ended.token_ids) + 3)
    assert went_on.token_ids[: len(ended.token_ids)] == ended.token_ids
    assert (went_on.finish_reason, len(went_on.token_ids)) == (FinishReason.LENGTH, len(ended.token_ids) + 3)


def test_a_prompt_of_all_the_length_but_one_gets_one_token_and_one_more_is_refused(two_threads):
    """The length is the one that the runner's own tables were made for."""
    limit = two_threads.config.max_model_len
    tokens = [*golden.load_prompts()[3].token_ids.tolist(), *golden.load_prompts()[1].token_ids.tolist()]
    shorter, _ = answer(two_threads, tokens[: limit - 3], max_tokens=None)
    assert len(shorter.token_ids) == 3
    got, num_steps = answer(two_threads, tokens[: limit - 1], max_tokens=None)
    assert (len(got.token_ids), got.finish_reason, num_steps) == (1, FinishReason.LENGTH, 1)
    with pytest.raises(InvalidRequestError, match=rf"{limit} tokens.*no room for one new token"):
        answer(two_threads, tokens[:limit], max_tokens=None)
    with pytest.raises(InvalidRequestError, match=rf"{limit + 1} tokens, more than max_model_len {limit}"):
        answer(two_threads, tokens[: limit + 1], max_tokens=1)


def test_the_last_position_of_the_context_gets_the_token_that_a_longer_context_gives_it(base, two_threads):
    tokens = [*golden.load_prompts()[3].token_ids.tolist(), *golden.load_prompts()[1].token_ids.tolist()]
    prompt = tokens[: two_threads.config.max_model_len - 2]
    assert answer(two_threads, prompt, max_tokens=2)[0] == answer(base, prompt, max_tokens=2)[0]
