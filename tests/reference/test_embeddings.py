"""Embeddings in the way of Qwen3-Embedding, held to transformers on a tiny random model of that shape."""

from __future__ import annotations

import json
from importlib import import_module

import numpy as np
import pytest

from millpond.build import build_engine
from millpond.config import EngineConfig
from millpond.core.sampling import SamplingParams
from tiny_models import TINY, tiny_model, write_safetensors
from tiny_tokenizers import write_tiny_tokenizer

pytestmark = [pytest.mark.reference, pytest.mark.slow]

SIZES = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 32, "num_blocks": 24, "threads": 1}
PROMPTS = [np.random.default_rng(count).integers(3, 260, count).tolist() for count in (1, 7, 31, 75)]
EMBEDDED = SamplingParams(max_tokens=1, temperature=0, embedding=True)


def expected_of(folder) -> np.ndarray:
    """The last token's hidden state of the inner model, which is behind its last norm, of length 1."""
    torch, transformers = import_module("torch"), import_module("transformers")
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = model.eval().to(torch.float64)
    with torch.inference_mode():
        hidden = torch.stack([model(torch.tensor([each])).last_hidden_state[0, -1] for each in PROMPTS])
        return torch.nn.functional.normalize(hidden, dim=1).numpy()


def embeddings_of(path) -> np.ndarray:
    engine = build_engine(str(path), EngineConfig(**SIZES))
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, EMBEDDED)
    found = {}
    while engine.has_unfinished:
        found |= {output.request_id: output.embedding for output in engine.step()}
    return np.stack([np.frombuffer(found[str(number)], "<f4") for number in range(len(PROMPTS))])


@pytest.mark.parametrize("name", ["qwen3", "llama, llama3", "gemma3", "olmo2"])
def test_a_gguf_gives_the_embeddings_of_transformers(name, tmp_path):
    tiny = tiny_model(**TINY[name])
    expected = expected_of(tiny.write_folder(tmp_path / "folder"))
    tiny.gguf["pooling_type"] = 3
    np.testing.assert_allclose(embeddings_of(tiny.write_gguf(tmp_path / "tiny.gguf")), expected, atol=1e-5)


def test_a_folder_of_the_inner_model_alone_gives_the_embeddings_of_transformers(tmp_path):
    """So the weights of Qwen3-Embedding are named: without "model." in front."""
    tiny = tiny_model(**TINY["qwen3"])
    folder = tiny.write_folder(tmp_path / "folder")
    expected = expected_of(folder)
    arrays = {name.removeprefix("model."): values for name, values in tiny.arrays.items() if name != "lm_head.weight"}
    (folder / "config.json").write_text(json.dumps({**tiny.config, "tie_word_embeddings": True}))
    write_safetensors(folder / "model.safetensors", arrays)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    write_tiny_tokenizer(folder)
    np.testing.assert_allclose(embeddings_of(folder), expected, atol=1e-5)
