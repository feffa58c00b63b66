from __future__ import annotations

import numpy as np
import pytest

from helpers import expected_output
from millpond.core.request import FinishReason, SamplingParams
from millpond.errors import InvalidRequestError
from millpond.llm import LLM
from tiny_engine import LETTERS, ids, make_engine, tiny_tokenizer, tokenizer_with


def params(max_tokens=6, **settings):
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **settings)


def expected_text(prompt, num_tokens=6):
    return tiny_tokenizer().decode(expected_output(prompt, num_tokens, LETTERS))


def test_prompts_are_answered_in_their_order_whatever_the_pool_does():
    engine = make_engine(num_blocks=8, max_num_seqs=3)
    prompts = [f"prompt {number}" for number in range(9)]
    completions = LLM.from_engine(engine).generate(prompts, params())
    assert [each.prompt for each in completions] == prompts
    for each in completions:
        assert each.prompt_token_ids == tiny_tokenizer().encode(each.prompt)
        assert each.outputs[0].text == expected_text(each.prompt_token_ids)
        assert each.outputs[0].token_ids == expected_output(each.prompt_token_ids, 6, LETTERS)
        assert each.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    "prompts", ["hi", ["hi"], ids("hi"), [ids("hi")], tuple(ids("hi")), np.array(ids("hi")), [np.array(ids("hi"))]]
)
def test_one_prompt_comes_as_text_or_ids_alone_or_in_a_list(prompts):
    completions = LLM.from_engine(make_engine()).generate(prompts, params())
    assert len(completions) == 1
    assert completions[0].outputs[0].text == expected_text(ids("hi"))


@pytest.mark.parametrize(
    "prompts",
    [5, b"hi", [b"hi"], [None], [5.5], [[5.5]], [[5, "a"]], [["a"]], {"prompt": "hi"}, ["a", {"b": 1}], [[5, True]]],
)
def test_what_is_neither_text_nor_token_ids_is_refused_and_not_read_as_ids(prompts):
    engine = make_engine()
    with pytest.raises(InvalidRequestError, match="text or token ids") as caught:
        LLM.from_engine(engine).generate(prompts, params())
    assert caught.value.param == "prompt"
    assert engine.runner.outputs == []


def test_no_prompts_give_no_completions():
    assert LLM.from_engine(make_engine()).generate([], params()) == []


def test_each_prompt_may_have_its_own_sampling():
    completions = LLM.from_engine(make_engine()).generate(["a", "b"], [params(1), params(3)])
    assert [len(each.outputs[0].token_ids) for each in completions] == [1, 3]


def test_a_list_of_sampling_of_another_length_is_refused():
    with pytest.raises(InvalidRequestError, match="2 prompts but 1 sampling_params"):
        LLM.from_engine(make_engine()).generate(["a", "b"], [params()])


def test_one_bad_prompt_is_refused_before_any_runs():
    engine = make_engine()
    with pytest.raises(InvalidRequestError, match="empty"):
        LLM.from_engine(engine).generate(["fine", ""], params())
    assert not engine.has_unfinished
    assert engine.runner.outputs == []


def test_two_calls_on_one_llm_keep_their_order_and_count():
    llm = LLM.from_engine(make_engine())
    for prompts in (["a", "b", "c"], ["d", "e"]):
        completions = llm.generate(prompts, params())
        assert [each.outputs[0].text for each in completions] == [expected_text(ids(each)) for each in prompts]


def test_a_fault_ends_one_completion_and_not_the_others():
    llm = LLM.from_engine(make_engine(faults={"llm-0": 2}))
    bad, good = llm.generate(["a", "b"], params())
    assert bad.outputs[0].finish_reason is FinishReason.ERROR
    assert bad.outputs[0].error == "the logits are not finite"
    assert good.outputs[0].text == expected_text(ids("b"))


def test_an_interrupt_aborts_everything_and_the_next_call_works():
    engine = make_engine(max_num_seqs=2, raises={2: KeyboardInterrupt()})
    llm = LLM.from_engine(engine)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], params())
    assert not engine.has_unfinished
    assert engine.scheduler.pool.num_free == 64
    assert llm.generate("a", params())[0].outputs[0].text == expected_text(ids("a"))


def test_a_conversation_is_rendered_by_the_models_template():
    llm = LLM.from_engine(make_engine())
    messages = [{"role": "user", "content": "hi"}]
    (completion,) = llm.chat(messages, params())
    assert completion.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert completion.prompt_token_ids == tiny_tokenizer().encode(completion.prompt, add_special_tokens=False)
    assert completion.outputs[0].text == expected_text(completion.prompt_token_ids)


@pytest.mark.parametrize(("template", "token_ids"), [("{{ bos_token }}hi", [1, *ids("hi")]), ("hi", ids("hi"))])
def test_a_chat_prompt_has_only_the_special_tokens_that_the_template_writes(template, token_ids):
    llm = LLM.from_engine(make_engine(tokenizer=tokenizer_with(ggml__add_bos_token=True, chat_template=template)))
    assert llm.chat([{"role": "user", "content": "-"}], params())[0].prompt_token_ids == token_ids
    assert llm.generate("hi", params())[0].prompt_token_ids == [1, *ids("hi")]


def test_several_conversations_are_answered_in_order():
    conversations = [[{"role": "user", "content": text}] for text in ("a", "b")]
    completions = LLM.from_engine(make_engine()).chat(conversations, params())
    assert [each.prompt[17] for each in completions] == ["a", "b"]


@pytest.mark.parametrize("messages", [None, 5, "hi", {"role": "user", "content": "hi"}, [[]], [5], [["hi"]]])
def test_what_is_no_conversation_is_refused(messages):
    with pytest.raises(InvalidRequestError, match="must"):
        LLM.from_engine(make_engine()).chat(messages, params())


def test_no_conversations_give_no_completions():
    assert LLM.from_engine(make_engine()).chat([], params()) == []


def test_a_model_without_a_chat_template_refuses_to_chat():
    llm = LLM.from_engine(make_engine(tokenizer=tokenizer_with(chat_template=None)))
    with pytest.raises(InvalidRequestError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_the_bar_is_shown_on_request_and_not_off_a_terminal(capsys):
    llm = LLM.from_engine(make_engine())
    llm.generate("a", params())
    assert capsys.readouterr().err == ""
    llm.generate("a", params(), progress=True)
    shown = capsys.readouterr().err
    assert "1/1" in shown
    assert "6 tokens" in shown


@pytest.mark.parametrize("params", [5, "x", {}, SamplingParams, [None], ["x"]])
def test_sampling_params_of_another_kind_are_refused_by_name(params):
    with pytest.raises(InvalidRequestError, match="sampling_params must be SamplingParams") as caught:
        LLM.from_engine(make_engine()).generate(["a"], params)
    assert caught.value.param == "sampling_params"


def test_what_is_packed_while_a_model_is_loaded_is_heard_of_and_shown_to_nobody_but_a_terminal(monkeypatch, capsys):
    def build_engine(model, config, *, notify, progress, chat_template):
        assert (model, config.quantize, chat_template) == ("some folder", "q8", None)
        progress(1 << 20, 2 << 20, "packing model.safetensors")
        progress(done_bytes=2 << 20, total_bytes=2 << 20, what="packing model.safetensors")
        return make_engine()

    monkeypatch.setattr("millpond.build.build_engine", build_engine)
    assert LLM("some folder", quantize="q8").generate("hi", params())[0].outputs[0].text
    assert capsys.readouterr().err == ""
