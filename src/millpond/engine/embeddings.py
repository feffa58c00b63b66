"""Embeddings: what is asked of the engine for one, and what of the vector is given to who asked."""

from __future__ import annotations

import math
import struct

from millpond.core.sampling import SamplingParams

FLOAT_BYTES = 4


def embedding_params(cache_salt: str | None = None) -> SamplingParams:
    """One token is as cheap as none: the last position is computed anyway."""
    return SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, embedding=True, cache_salt=cache_salt)


def shortened(embedding: bytes, dimensions: int | None) -> bytes:
    """An embedding, little-endian float32, cut to its first dimensions and then of length 1 again; None keeps all."""
    if dimensions is None:
        return embedding
    values = struct.unpack_from(f"<{dimensions}f", embedding)
    length = math.hypot(*values) or 1.0
    return struct.pack(f"<{dimensions}f", *(value / length for value in values))


def numbers_of(embedding: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(embedding) // FLOAT_BYTES}f", embedding))
