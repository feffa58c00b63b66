"""Embeddings of an encoder against a slow forward pass, and the same bits of them in any crowd."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from millpond.build import build_engine, build_model_runner
from millpond.config import EngineConfig
from millpond.core.sampling import SamplingParams
from millpond.engine.embeddings import embedding_params
from millpond.errors import ConfigError, InvalidRequestError, ModelFileError
from millpond.lab.fresh_engine import engine_over
from model.reference_bert import embedding
from tiny_bert import CONTEXT, HIDDEN, VOCAB, random_bert, write_bert_folder, write_bert_gguf

SIZES = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "num_blocks": 64,
    "threads": 1,
    "audit": True,
}
PROMPTS = {
    str(count): np.random.default_rng(count).integers(0, VOCAB, count).tolist() for count in (1, 2, 9, 16, 33, 77, 96)
}


def settings(**changes):
    return EngineConfig(**{**SIZES, **changes})


def embed(engine, prompts):
    """Float32 vectors by name, of requests that come all at once."""
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, embedding_params())
    found = {}
    while engine.has_unfinished:
        for output in engine.step():
            assert output.error is None
            assert output.request_id not in found
            found[output.request_id] = np.frombuffer(output.embedding, "<f4")
    return found


def assert_close(found, pooling="mean", **tolerance):
    for name, prompt in PROMPTS.items():
        np.testing.assert_allclose(found[name], embedding(random_bert(), prompt, pooling), **tolerance)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_bert_folder(tmp_path_factory.mktemp("bert") / "tiny")


@pytest.fixture(scope="module")
def exact(folder):
    return build_engine(folder, settings(dtype="float32"))


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_each_pooling_gives_the_vectors_of_the_slow_forward_pass(pooling, tmp_path):
    engine = build_engine(write_bert_folder(tmp_path / "tiny", pooling), settings(dtype="float32"))
    found = embed(engine, PROMPTS)
    assert_close(found, pooling, atol=1e-6)
    assert {each.size for each in found.values()} == {HIDDEN} == {engine.limits.embedding_size}


def test_a_gguf_gives_the_vectors_of_the_slow_forward_pass(tmp_path):
    engine = build_engine(write_bert_gguf(tmp_path / "tiny.gguf"), settings(dtype="float32"))
    assert_close(embed(engine, PROMPTS), atol=1e-6)


def test_names_may_have_bert_in_front_and_what_is_beside_the_encoder_is_left_out(tmp_path):
    engine = build_engine(write_bert_folder(tmp_path / "tiny", "cls", prefix="bert."), settings(dtype="float32"))
    assert_close(embed(engine, PROMPTS), "cls", atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "least"),
    [({}, 0.9995), ({"kv_dtype": "int8"}, 0.999), ({"quantize": "q8"}, 0.9985), ({"quantize": "q4"}, 0.98)],
    ids=str,
)
def test_fewer_bits_turn_the_vectors_a_little(folder, changes, least):
    found = embed(build_engine(folder, settings(**changes)), PROMPTS)
    for name, prompt in PROMPTS.items():
        cosine = float(found[name].astype(np.float64) @ embedding(random_bert(), prompt, "mean"))
        assert least <= cosine <= 1 + 1e-6, name


def test_a_gguf_of_quantised_matrices_runs(tmp_path):
    path = write_bert_gguf(tmp_path / "tiny.gguf", types={"*": "Q8_0"})
    found = embed(build_engine(path, settings()), PROMPTS)
    assert min(found[name] @ embedding(random_bert(), prompt, "mean") for name, prompt in PROMPTS.items()) > 0.998


@pytest.mark.parametrize(
    "changes",
    [{"dtype": "float32"}, {}, {"kv_dtype": "int8"}, {"quantize": "q8"}, {"block_size": 32}],
    ids=str,
)
def test_the_bits_are_the_same_alone_in_any_crowd_and_on_two_threads(folder, changes):
    engine = build_engine(folder, settings(**changes))
    alone = {name: embed(engine, {name: prompt})[name] for name, prompt in PROMPTS.items()}
    crowd = {**PROMPTS, **{f"{name} again": prompt for name, prompt in reversed(PROMPTS.items())}}
    others = [
        engine,
        engine_over(engine, max_num_seqs=2, max_num_batched_tokens=CONTEXT),
        engine_over(engine, num_blocks=8),
        build_engine(folder, settings(**changes, threads=2)),
    ]
    for other in others:
        for name, vector in embed(other, crowd).items():
            np.testing.assert_array_equal(vector.view(np.uint32), alone[name.split()[0]].view(np.uint32))


def test_every_token_sees_what_is_behind_it(exact):
    one, other = PROMPTS["33"], [*PROMPTS["33"][:-1], (PROMPTS["33"][-1] + 1) % VOCAB]
    pooled_by_cls = [embedding(random_bert(), each, "cls") for each in (one, other)]
    assert np.abs(pooled_by_cls[0] - pooled_by_cls[1]).max() > 1e-3
    found = embed(exact, {"one": one, "other": other})
    assert not np.allclose(found["one"], found["other"], atol=1e-3)


def test_all_prompts_that_fit_a_step_share_it(exact):
    for name in ("1", "2", "9", "16", "77"):
        exact.add_request(name, PROMPTS[name], embedding_params())
    assert len(exact.step()) == 5


def test_a_vector_that_is_not_finite_is_that_requests_fault_alone(tmp_path):
    arrays = random_bert()
    arrays["embeddings.word_embeddings.weight"][7] *= np.float32(1e30)
    engine = build_engine(write_bert_gguf(tmp_path / "tiny.gguf", arrays=arrays), settings(dtype="float32"))
    for name, prompt in {"bad": [5, 7, 9], "good": PROMPTS["9"]}.items():
        engine.add_request(name, [each for each in prompt if each != 7 or name == "bad"], embedding_params())
    outputs = {output.request_id: output for output in engine.step()}
    assert "not finite" in outputs["bad"].error
    assert outputs["bad"].embedding is None
    assert outputs["good"].error is None
    assert np.isfinite(np.frombuffer(outputs["good"].embedding, "<f4")).all()


def test_a_prompt_may_have_all_positions_and_no_more(exact):
    with pytest.raises(
        InvalidRequestError, match=f"has {CONTEXT + 1} tokens, more than max_model_len {CONTEXT}"
    ) as error:
        exact.add_request("long", [5] * (CONTEXT + 1), embedding_params())
    assert error.value.param == "prompt"
    assert exact.limits.max_prompt_tokens == exact.limits.max_total_tokens == CONTEXT


@pytest.mark.parametrize(
    ("sampling", "param", "said"),
    [
        (
            SamplingParams(max_tokens=3),
            "model",
            "makes embeddings and generates no text: send the text to /v1/embeddings",
        ),
        (SamplingParams(max_tokens=2, embedding=True), "max_tokens", "must be 1"),
        (SamplingParams(max_tokens=1, embedding=True, logprobs=1), "logprobs", "no log probabilities"),
    ],
    ids=["text", "more tokens", "logprobs"],
)
def test_what_it_cannot_give_is_refused(exact, sampling, param, said):
    with pytest.raises(InvalidRequestError, match=said) as error:
        exact.add_request("a", [5, 6], sampling)
    assert error.value.param == param


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_num_batched_tokens": 95}, "max_num_batched_tokens, 95, must be at least max_model_len, 96"),
        ({"prefix_dir": "/nowhere"}, "prefix_dir is of no use with this model: every token sees the whole prompt"),
        ({"itl_target": 20.0}, "itl_target is of no use"),
        ({"speculative": "ngram"}, "speculative is of no use"),
    ],
    ids=str,
)
def test_settings_that_it_would_ignore_are_refused_at_the_start(folder, changes, said):
    with pytest.raises(ConfigError, match=said):
        build_engine(folder, settings(**changes))


def test_a_shorter_max_model_len_takes_a_smaller_step(folder):
    engine = build_engine(folder, settings(max_model_len=40, max_num_batched_tokens=40))
    assert len(embed(engine, {name: PROMPTS[name] for name in ("1", "33")})) == 2
    assert engine.limits.max_prompt_tokens == 40


def test_a_pool_of_its_own_choice_holds_every_step(folder):
    """Whose prompts leave all but a position of their last blocks empty, one of a step's tokens each."""
    sizes = {**SIZES, "num_blocks": None, "max_num_seqs": 32}
    engine = build_engine(folder, EngineConfig(**sizes))
    for name in range(32):
        engine.add_request(str(name), [5], embedding_params())
    engine.add_request("rest", PROMPTS["96"], embedding_params())
    assert len(engine.step()) == 32
    assert engine.scheduler.pool.num_blocks == 128 // 16 + 32
    assert len(engine.step()) == 1


def test_it_has_no_prefix_cache(exact):
    assert exact.scheduler.cache is None
    assert not exact.config.prefix_cache
    with pytest.raises(ConfigError, match="no prefix to find"):
        engine_over(exact, prefix_cache=True)


def test_it_has_no_logits(folder, exact):
    with pytest.raises(ConfigError, match="tiny makes embeddings: it has no logits"):
        build_model_runner(folder)
    with pytest.raises(ValueError, match="no logits"):
        exact.runner.logits([5])


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda path: write_bert_folder(path / "tiny", None), "does not say how .* by 1_Pooling/config.json"),
        (lambda path: write_bert_gguf(path / "tiny.gguf", None), "does not say how .* by pooling_type"),
        (
            lambda path: write_bert_gguf(path / "tiny.gguf", metadata={"bert.pooling_type": 4}),
            "makes its embeddings by 'rank'; supported are 'mean', 'cls', 'last'",
        ),
    ],
    ids=["folder", "gguf", "rank"],
)
def test_an_encoder_that_does_not_say_how_it_pools_is_refused(tmp_path, write, said):
    with pytest.raises(ModelFileError, match=said):
        build_engine(write(tmp_path), settings())


def test_the_probe_for_outlier_channels_fits_a_short_table_of_positions(tmp_path):
    """The table of a real model is longer than the probe, that of a cut one need not be."""
    arrays = random_bert()
    arrays["embeddings.position_embeddings.weight"] = arrays["embeddings.position_embeddings.weight"][:32].copy()
    path = write_bert_gguf(
        tmp_path / "tiny.gguf", arrays=arrays, types={"*": "Q8_0"}, metadata={"bert.context_length": 32}
    )
    engine = build_engine(path, settings(isa="portable"))
    assert any(channels.size for channels in engine.runner.outliers)
    assert embed(engine, {"16": PROMPTS["16"]})["16"] @ embedding(arrays, PROMPTS["16"], "mean") > 0.998


def test_the_engine_of_an_encoder_can_be_made_again_over_its_runner(exact):
    again = engine_over(exact, max_num_batched_tokens=100)
    assert dataclasses.asdict(again.scheduler.door)["whole_prompts"]
    assert_close(embed(again, PROMPTS), atol=1e-6)
