"""Rotary positions: a base, how it is scaled to longer texts, and the table of cosines and sines.

The formulas are those of Hugging Face transformers (modeling_rope_utils.py), yarn's from arXiv 2309.00071, longrope's
from arXiv 2402.13753. Where a scaling depends on how long the text is, the longest that may be run decides: a position
then turns alike however the text is cut up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, log, pi, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millpond.errors import ModelFileError, shown
from millpond.model.fields import Fields

SCALINGS = ("none", "linear", "dynamic", "yarn", "llama3", "longrope")
GGUF_SCALINGS = ("none", "linear", "yarn", "longrope")  # llama3's factors are a tensor there
# Other spellings, in config.json.
SPELLINGS = {"default": "none", "su": "longrope"}
WAVES = 2 * pi


@dataclass(frozen=True, slots=True)
class Rope:
    """One way to turn positions: theta, and a scaling of SCALINGS with its figures. original_length: of the texts that
    the model was made with, before scaling; amplitude: what cosines and sines are multiplied by, None for the usual;
    short, long: longrope's divisors of the frequencies."""

    theta: float = 10000.0
    scaling: str = "none"
    factor: float = 1.0
    original_length: int = 0
    low: float = 1.0  # llama3's low_freq_factor, yarn's beta_slow
    high: float = 1.0  # llama3's high_freq_factor, yarn's beta_fast
    amplitude: float | None = None
    truncate: bool = True
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()

    def frequencies(self, dims: int, max_model_len: int, factors: NDArray[np.float32] | None) -> NDArray[np.float64]:
        """Radians a position for each of dims / 2 pairs. factors, of a GGUF, divide them."""
        half = dims // 2
        exponents = (np.arange(half, dtype=np.float32) / np.float32(half)).astype(np.float64)
        theta = self._stretched(dims, max_model_len) if self.scaling == "dynamic" else self.theta
        plain: NDArray[np.float64] = theta**-exponents
        if self.scaling == "linear":
            plain = plain / self.factor
        elif self.scaling == "yarn":
            plain = self._yarn(plain, dims)
        elif self.scaling == "llama3":
            plain = self._llama3(plain)
        elif self.scaling == "longrope":
            divisors = self.long if max_model_len > self.original_length else self.short
            plain = plain / np.array(divisors, np.float32)
        return plain if factors is None else plain / factors

    @property
    def scale(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.amplitude is not None:
            return self.amplitude
        if self.scaling == "yarn" and self.factor > 1:
            return 0.1 * log(self.factor) + 1
        if self.scaling == "longrope" and self.factor > 1:
            return sqrt(1 + log(self.factor) / log(self.original_length))
        return 1.0

    def _stretched(self, dims: int, max_model_len: int) -> float:
        longest = max(max_model_len, self.original_length)
        ratio: float = (self.factor * longest / self.original_length - (self.factor - 1)) ** (dims / (dims - 2))
        return self.theta * ratio

    def _yarn(self, plain: NDArray[np.float64], dims: int) -> NDArray[np.float64]:
        """Pairs that turn often stay, those that turn slowly are scaled, with a ramp between."""

        def pair(turns: float) -> float:
            return dims * log(self.original_length / (turns * WAVES)) / (2 * log(self.theta))

        first, last = pair(self.high), pair(self.low)
        if self.truncate:
            first, last = floor(first), ceil(last)
        first, last = max(first, 0), min(last, dims - 1)
        ramp = np.clip((np.arange(dims // 2) - first) / max(last - first, 0.001), 0, 1)
        return plain / self.factor * ramp + plain * (1 - ramp)

    def _llama3(self, plain: NDArray[np.float64]) -> NDArray[np.float64]:
        turns = self.original_length * plain / WAVES
        kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return plain / self.factor * (1 - kept) + plain * kept


def tables(
    ropes: Sequence[Rope | None], dims: int, head_dim: int, positions: int, factors: NDArray[np.float32] | None
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines, float32 [ropes, positions, head_dim / 2]. None turns nothing, and no rotation turns the pairs
    behind the first dims / 2."""
    shape = (len(ropes), positions, head_dim // 2)
    cosine, sine = np.ones(shape, np.float32), np.zeros(shape, np.float32)
    for table, rope in enumerate(ropes):
        if rope is None:
            continue
        frequencies = rope.frequencies(dims, positions, factors)
        # frequency and angle are rounded to float32 as in the reference implementation: at position 200 an exact angle
        # alone would move the logits by half of the tolerance
        angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies.astype(np.float32)
        angles, scale = angles.astype(np.float64), np.float32(rope.scale)
        cosine[table, :, : dims // 2] = np.cos(angles).astype(np.float32) * scale
        sine[table, :, : dims // 2] = np.sin(angles).astype(np.float32) * scale
    return cosine, sine


def read_rope(fields: Fields, theta: float = 10000.0) -> Rope:
    """The rotation of a model that has one. theta: what the file may leave out."""
    return _read_gguf(fields, theta) if fields.is_gguf else read_parameters(_parameters(fields), fields, theta)


def _read_gguf(fields: Fields, theta: float) -> Rope:
    rope = Rope(fields.number("rope.freq_base", theta, above=0.0))
    kind = fields.text("rope.scaling.type") or "none"
    if kind == "none":
        scale = fields.number("rope.scale_linear", 1.0, above=0.0)
        return rope if scale == 1 else replace(rope, scaling="linear", factor=scale)
    if kind not in GGUF_SCALINGS:
        raise ModelFileError(f"rope scaling {kind!r} is not supported; supported: {', '.join(GGUF_SCALINGS)}")
    if kind == "longrope":  # what it needs besides is in tensors
        original = fields.integer("rope.scaling.original_context_length", low=1)
        amplitude = fields.number("rope.scaling.attn_factor", above=0.0)
        return replace(rope, scaling=kind, original_length=original, amplitude=amplitude)
    rope = replace(rope, scaling=kind, factor=fields.number("rope.scaling.factor", above=0.0))
    if kind == "linear":
        return rope
    rope = replace(
        rope,
        original_length=fields.integer("rope.scaling.original_context_length", low=1),
        low=fields.number("rope.scaling.yarn_beta_slow", 1.0, above=0.0),
        high=fields.number("rope.scaling.yarn_beta_fast", 32.0, above=0.0),
    )
    return replace(rope, amplitude=rope.scale * fields.number("rope.scaling.attn_factor", 1.0, above=0.0))


def _parameters(fields: Fields) -> Mapping[str, Any]:
    """rope_parameters of newer files, or rope_theta and rope_scaling of older ones."""
    for name in ("rope_parameters", "rope_scaling"):
        found = fields.value(name, {})
        if not isinstance(found, Mapping):
            raise fields.error(name, found, "an object")
        if found:
            return {"rope_theta": fields.value("rope_theta"), **found}
    return {"rope_theta": fields.value("rope_theta")}


def read_parameters(found: Mapping[str, Any], fields: Fields, theta: float = 10000.0) -> Rope:
    """A rotation as config.json writes it, in one object."""
    given = Fields({key: value for key, value in found.items() if value is not None}, None)
    rope = Rope(given.number("rope_theta", theta, above=0.0))
    kind = given.text("rope_type") or given.text("type") or "none"
    kind = SPELLINGS.get(kind, kind)
    if kind not in SCALINGS:
        raise ModelFileError(f"rope scaling {kind!r} is not supported; supported: {', '.join(SCALINGS)}")
    if kind == "none":
        return rope
    longest = fields.integer("context_length", low=1)
    original = given.integer(
        "original_max_position_embeddings", fields.integer("original_max_position_embeddings", longest, low=1), low=1
    )
    if kind == "dynamic":  # scales what is longer than the model's texts, which is what context_length says
        original = longest
    usual = longest / original if kind == "longrope" else None
    rope = replace(rope, scaling=kind, factor=given.number("factor", usual, above=0.0), original_length=original)
    if kind == "llama3":
        low, high = given.number("low_freq_factor", above=0.0), given.number("high_freq_factor", above=0.0)
        if high <= low:
            raise ModelFileError(f"'high_freq_factor' must be above 'low_freq_factor', {low:g}, got {high:g}")
        return replace(rope, low=low, high=high)
    amplitude = given.number("attention_factor", above=0.0) if given.has("attention_factor") else None
    if kind == "yarn":
        low, high = given.number("beta_slow", 1.0, above=0.0), given.number("beta_fast", 32.0, above=0.0)
        for name in ("mscale", "mscale_all_dim"):
            given.only(name, None)
        return replace(rope, low=low, high=high, amplitude=amplitude, truncate=given.flag("truncate", True))
    if kind == "longrope":
        return replace(
            rope, amplitude=amplitude, short=_divisors(given, "short_factor"), long=_divisors(given, "long_factor")
        )
    return rope


def _divisors(given: Fields, name: str) -> tuple[float, ...]:
    found = given.value(name)
    if not isinstance(found, list) or not all(type(each) in (int, float) and each > 0 for each in found):
        raise ModelFileError(f"{name!r} must be a list of numbers above 0, got {shown(found)}")
    return tuple(map(float, found))
