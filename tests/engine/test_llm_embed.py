"""LLM.embed over an engine whose vectors are known."""

from __future__ import annotations

import math
import struct

import pytest

from helpers import scripted_embedding
from millpond.core.sampling import SamplingParams
from millpond.errors import EngineDeadError, EngineError, InvalidRequestError
from millpond.llm import LLM
from tiny_engine import ids, make_engine, tiny_tokenizer

SIZE = 4


def llm_of(**settings):
    return LLM.from_engine(make_engine(**{"embedding_size": SIZE, **settings}))


def numbers(prompt):
    token_ids = tiny_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
    return list(struct.unpack("<4f", scripted_embedding(token_ids)))


@pytest.mark.parametrize("prompts", [["hi", "the cat", "hi"], [ids("abc"), "b"]])
def test_each_prompt_gets_its_vector_in_the_order_of_the_prompts(prompts):
    assert llm_of().embed(prompts) == [numbers(each) for each in prompts]


def test_one_prompt_comes_alone_too_and_none_give_none():
    assert llm_of().embed("hi") == llm_of().embed(ids("hi")) == [numbers("hi")]
    assert llm_of().embed([]) == []


def test_all_prompts_run_in_the_same_steps_and_a_small_pool_is_enough():
    llm = llm_of(max_num_seqs=4, num_blocks=14, max_num_batched_tokens=64)
    prompts = [[*ids("abc" * 5), 3 + number] for number in range(6)]
    assert llm.embed(prompts) == list(map(numbers, prompts))
    assert max(len(output.scheduled) for output in llm.engine.runner.outputs) == 4


@pytest.mark.parametrize("dimensions", [1, 2, 4])
def test_the_first_dimensions_are_again_of_length_1(dimensions):
    (got,) = llm_of().embed("hi", dimensions=dimensions)
    first = numbers("hi")[:dimensions]
    assert got == pytest.approx([value / math.hypot(*first) for value in first], rel=1e-6)


@pytest.mark.parametrize(
    ("prompts", "dimensions", "param", "said"),
    [
        (["a", ""], None, "prompt", "empty"),
        ([[267]], None, "prompt", "from 0 to 266"),
        ([5] * 128, None, "prompt", "has 128 tokens, which leaves no room"),
        ("a", 5, "dimensions", "from 1 to 4, got 5"),
        ("a", 0, "dimensions", "from 1 to 4, got 0"),
        ("a", True, "dimensions", "an integer"),
        ([5.5], None, "prompt", "text or token ids"),
    ],
)
def test_what_cannot_be_embedded_is_refused_before_anything_runs(prompts, dimensions, param, said):
    llm = llm_of()
    with pytest.raises(InvalidRequestError, match=said) as caught:
        llm.embed(prompts, dimensions=dimensions)
    assert caught.value.param == param
    assert llm.engine.runner.outputs == []


def test_a_language_model_makes_none():
    with pytest.raises(InvalidRequestError, match="this is a language model and makes no embeddings"):
        llm_of(embedding_size=0).embed("hi")


def test_a_vector_is_asked_for_by_embed_and_not_by_generate():
    llm = llm_of()
    asking = SamplingParams(max_tokens=1, embedding=True)
    for ask in (lambda: llm.generate(["a", "b"], [SamplingParams(), asking]), lambda: llm.generate("a", asking)):
        with pytest.raises(InvalidRequestError, match=r"LLM\.embed") as caught:
            ask()
        assert caught.value.param == "embedding"
    assert llm.engine.runner.outputs == []


def test_a_prompt_that_fails_is_an_error_that_says_why_and_the_next_call_works():
    llm = llm_of(raises={0: RuntimeError("boom")})
    with pytest.raises(EngineError, match="llm-0: the forward pass of this step failed"):
        llm.embed(["a", "b"])
    assert not llm.engine.has_unfinished
    assert llm.embed("a") == [numbers("a")]


def test_a_closed_one_embeds_nothing():
    llm = llm_of()
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.embed("a")


def test_the_bar_counts_prompts_and_no_tokens(capsys):
    llm_of().embed(["a", "b"], progress=True)
    shown = capsys.readouterr().err
    assert "embedding" in shown
    assert "2/2" in shown
    assert "tokens" not in shown
