"""The demo model's real vocabulary, and a tiny one that has all 256 bytes and every type of token."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millpond.text.tokenizer import Tokenizer
from millpond.text.vocabulary import BYTE_OF

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    return json.loads((HERE / "golden_smollm2.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def smollm2_metadata() -> dict[str, Any]:
    """The tokenizer metadata of SmolLM2-135M-Instruct; the tokens left out of the file are the merges put together."""
    metadata = json.loads(lzma.decompress((HERE / "smollm2_tokenizer.json.xz").read_bytes()))
    made = [merge.replace(" ", "") for merge in metadata["tokenizer.ggml.merges"]]
    metadata["tokenizer.ggml.tokens"] += made
    metadata["tokenizer.ggml.token_type"] += [1] * len(made)
    return metadata


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_metadata)


def metadata_of(**changes: Any) -> dict[str, Any]:
    """Ids 0-255 are the bytes, 256-259 the merges up to "hello", 260 <s>, 261 </s>, 262 a user-defined token, 263 an
    unused one, 264 a byte token. A change of None takes the key away; keys are without `tokenizer.ggml.`."""
    spelled = sorted(BYTE_OF, key=BYTE_OF.__getitem__)
    tokens = [*spelled, "he", "ll", "hell", "hello", "<s>", "</s>", "<tag x>", "[PAD7]", "<0xE9>"]
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [1] * 260 + [3, 3, 4, 5, 6],
        "merges": ["h e", "l l", "he ll", "hell o"],
        "bos_token_id": 260,
        "eos_token_id": 261,
        "add_bos_token": True,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


@pytest.fixture(scope="session")
def tiny_metadata() -> Callable[..., dict[str, Any]]:
    return metadata_of


@pytest.fixture(scope="session")
def tiny() -> Tokenizer:
    return Tokenizer.from_gguf(metadata_of())
