"""Encoders held to transformers: tiny random ones of either file, and all-MiniLM-L6-v2, from text to vector."""

from __future__ import annotations

import base64
import json
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from millpond.build import build_engine
from millpond.config import EngineConfig
from millpond.engine.embeddings import embedding_params
from millpond.llm import LLM
from millpond.load.store import resolve
from tiny_bert import CONTEXT, VOCAB, write_bert_folder, write_bert_gguf
from tiny_server import ask

pytestmark = [pytest.mark.reference, pytest.mark.slow]

TEXT = Path(__file__).parent.parent / "golden" / "sherlock.txt"
PROMPTS = [np.random.default_rng(count).integers(0, VOCAB, count).tolist() for count in (1, 7, 31, 75, CONTEXT)]
MOST_ERROR = 1e-5
LEAST_COSINE = 0.9999  # of the usual types to float32


def vectors_of(folder, prompts, pool) -> np.ndarray:
    """What transformers' model gives for each list of ids, pooled and of length 1, in float64."""
    torch, transformers = import_module("torch"), import_module("transformers")
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = model.eval().to(torch.float64)
    with torch.inference_mode():
        pooled = torch.stack([pool(model(torch.tensor([each])).last_hidden_state[0]) for each in prompts])
        return torch.nn.functional.normalize(pooled, dim=1).numpy()


POOLS = {"mean": lambda hidden: hidden.mean(dim=0), "cls": lambda hidden: hidden[0], "last": lambda hidden: hidden[-1]}


def embedded(path, prompts, **settings) -> np.ndarray:
    engine = build_engine(str(path), EngineConfig(**{"num_blocks": 64, "threads": 1, **settings}))
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, embedding_params())
    found = {}
    while engine.has_unfinished:
        found |= {output.request_id: output.embedding for output in engine.step()}
    return np.stack([np.frombuffer(found[str(number)], "<f4") for number in range(len(prompts))])


@pytest.mark.parametrize("pooling", POOLS)
def test_either_file_gives_the_vectors_of_transformers(pooling, tmp_path):
    folder = write_bert_folder(tmp_path / "folder", pooling)
    expected = vectors_of(folder, PROMPTS, POOLS[pooling])
    for path in (folder, write_bert_gguf(tmp_path / "tiny.gguf", pooling)):
        np.testing.assert_allclose(embedded(path, PROMPTS, dtype="float32"), expected, atol=MOST_ERROR)


@pytest.fixture(scope="module")
def minilm():
    return resolve("all-minilm-l6-v2")


@pytest.fixture(scope="module")
def texts():
    """Paragraphs, words, a sentence in another case and other scripts, and as much as there are positions."""
    found = [each for each in TEXT.read_text(encoding="utf-8").split("\n\n") if 100 < len(each) < 1500][:40]
    return [*found, "", "Holmes", "A CAT sat on the mat.", "Ein Fluß ist ein Gewässer.", "猫在垫子上。", "word " * 510]


@pytest.fixture(scope="module")
def expected(minilm, texts):
    theirs = import_module("transformers").AutoTokenizer.from_pretrained(minilm)
    return vectors_of(minilm, [theirs.encode(text) for text in texts], POOLS["mean"])


def test_texts_become_the_vectors_that_transformers_makes_of_them(minilm, texts, expected):
    found = np.array(LLM(minilm, dtype="float32").embed(texts, progress=False))
    np.testing.assert_allclose(found, expected, atol=MOST_ERROR)


def test_the_usual_types_turn_a_vector_by_less_than_a_degree(minilm, texts, expected):
    for settings in ({}, {"kv_dtype": "int8"}):
        found = np.array(LLM(minilm, **settings).embed(texts, progress=False))
        cosines = (found * expected).sum(axis=1)
        print(settings, "least cosine", cosines.min(), "largest error", np.abs(found - expected).max())
        assert cosines.min() > LEAST_COSINE


# Where rows are rounded to 8 bits, the weights of outlier channels are the file's own, which q4 shows: 0.975, without
# them, as with AMX, 0.966.
@pytest.mark.parametrize(("quantize", "least", "mean"), [("q8", 0.997, 0.999), ("q4", 0.9, 0.96)])
def test_fewer_bits_keep_a_vector_near(minilm, texts, expected, quantize, least, mean):
    cosines = (np.array(LLM(minilm, quantize=quantize).embed(texts, progress=False)) * expected).sum(axis=1)
    print(quantize, "least cosine", cosines.min(), "mean", cosines.mean())
    assert cosines.min() > least
    assert cosines.mean() > mean


def test_the_server_sends_those_vectors_as_numbers_and_in_base64(minilm, texts, expected):
    engine = build_engine(str(minilm), EngineConfig(dtype="float32"))
    given = texts[:6]
    answer = ask(engine, "/v1/embeddings", json.dumps({"input": given})).json()
    found = np.array([each["embedding"] for each in answer["data"]])
    np.testing.assert_allclose(found, expected[:6], atol=MOST_ERROR)
    body = {"input": given, "encoding_format": "base64", "dimensions": 128}
    answer = ask(engine, "/v1/embeddings", json.dumps(body)).json()
    found = np.stack([np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in answer["data"]])
    cut = expected[:6, :128] / np.linalg.norm(expected[:6, :128], axis=1, keepdims=True)
    np.testing.assert_allclose(found, cut, atol=MOST_ERROR)


def test_what_means_the_same_is_near_and_what_does_not_is_far(minilm):
    cat, kitten, tax = np.array(
        LLM(minilm).embed(
            ["A cat is sleeping on the sofa.", "A kitten naps on the couch.", "Taxes are due in April."], progress=False
        )
    )
    assert cat @ kitten > 0.6 > 0.2 > cat @ tax
