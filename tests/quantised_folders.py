"""Tiny checkpoints as AWQ, GPTQ and compressed-tensors write them, with the float32 weights that they stand for.

The layouts are written down here once more, value by value, apart from the code that is tested.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gguf_writer import quantize
from tiny_models import tiny_model

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight columns is in a word's lowest 4 bits, the next, ...
DTYPES = {"float32": "F32", "float16": "F16", "int32": "I32", "int64": "I64", "int8": "I8"}


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """A safetensors file; uint16 is bfloat16."""
    header, data = {}, b""
    for name, values in arrays.items():
        raw = np.ascontiguousarray(values).tobytes()
        dtype = "BF16" if values.dtype == np.uint16 else DTYPES[values.dtype.name]
        header[name] = {"dtype": dtype, "shape": values.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def pack_words(codes: np.ndarray, bits: int, order=None) -> np.ndarray:
    """Along the last axis, 32 // bits codes to an int32, the first in the lowest bits, or in the given order."""
    each = 32 // bits
    order = range(each) if order is None else order
    *lead, count = codes.shape
    padded = np.zeros((*lead, -(-count // each) * each), np.uint64)
    padded[..., :count] = codes
    words = np.zeros((*padded.shape[:-1], padded.shape[-1] // each), np.uint64)
    for place, source in enumerate(order):
        words |= padded[..., source::each] << np.uint64(place * bits)
    return words.astype(np.uint32).view(np.int32)


@dataclass
class Quantised:
    """codes [N, K], scale and zero [N, G]: w = scale * (code - zero), as float64 products rounded once."""

    codes: np.ndarray
    scale: np.ndarray
    zero: np.ndarray

    @property
    def group(self) -> int:
        return self.codes.shape[1] // self.scale.shape[1]

    def values(self) -> np.ndarray:
        scale, zero = (np.repeat(each.astype(np.float64), self.group, axis=1) for each in (self.scale, self.zero))
        return (scale * (self.codes - zero)).astype(np.float32)


def random_quantised(rng, rows: int, depth: int, bits: int, group: int, symmetric: bool) -> Quantised:
    groups = depth // (group if group > 0 else depth)
    codes = rng.integers(1 if bits == 8 else 0, 1 << bits, (rows, depth))
    size = 2 / (1 << bits) / depth**0.5
    scale = (size * rng.uniform(0.5, 2, (rows, groups))).astype(np.float16)
    middle = 1 << bits - 1
    zero = np.full(scale.shape, middle) if symmetric else rng.integers(1, 1 << bits, scale.shape)
    return Quantised(codes, scale, zero)


def gptq(weight: Quantised, *, minus: int = 1, order: np.ndarray | None = None) -> dict[str, np.ndarray]:
    natural = np.arange(weight.codes.shape[1]) // weight.group
    return {
        "qweight": np.ascontiguousarray(pack_words(weight.codes, 4).T),
        "qzeros": pack_words(weight.zero.T - minus, 4),
        "scales": np.ascontiguousarray(weight.scale.T),
        "g_idx": (natural if order is None else order).astype(np.int32),
    }


def awq(weight: Quantised) -> dict[str, np.ndarray]:
    return {
        "qweight": pack_words(weight.codes.T, 4, AWQ_ORDER),
        "qzeros": pack_words(weight.zero.T, 4, AWQ_ORDER),
        "scales": np.ascontiguousarray(weight.scale.T),
    }


def packed_rows(weight: Quantised, bits: int, symmetric: bool) -> dict[str, np.ndarray]:
    parts = {
        "weight_packed": pack_words(weight.codes, bits),
        "weight_scale": weight.scale,
        "weight_shape": np.array(weight.codes.shape, np.int64),
    }
    if not symmetric:
        parts["weight_zero_point"] = np.ascontiguousarray(pack_words(weight.zero.T, bits).T)
    return parts


def int8(weight: Quantised) -> dict[str, np.ndarray]:
    return {"weight": (weight.codes - 128).astype(np.int8), "weight_scale": weight.scale}


def compressed_config(form: str, bits: int, group: int, symmetric: bool = True, **changes: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if group > 0 else "channel"}
    weights |= {"group_size": group if group > 0 else None, "dynamic": False, "actorder": None, "observer": "minmax"}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    groups = {"weights": weights, "input_activations": inputs if form == "int-quantized" else None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {**groups, "output_activations": None, "targets": ["Linear"]}},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        **changes,
    }


@dataclass
class Checkpoint:
    """One way to quantise: config is its quantization_config, pack gives a weight's parts."""

    config: dict[str, Any]
    pack: Any
    bits: int = 4
    group: int = 64
    symmetric: bool = False
    kind: str = "llama"
    hidden: int = 128
    ffn: int = 128
    vocab: int | None = None
    extra: dict[str, np.ndarray] = field(default_factory=dict)

    def write(self, folder: Path, plain: Path | None = None) -> Path:
        """The quantised folder, and a plain one of the same weights in float32."""
        rng, model = np.random.default_rng(5), tiny_model(self.kind, hidden=self.hidden)
        model.arrays["model.embed_tokens.weight"] = rng.standard_normal((self.vocab or 267, self.hidden), np.float32)
        arrays, values = {}, {}
        for name, array in model.arrays.items():
            if array.ndim == 2 and ".layers." in name:
                weight = random_quantised(rng, *self._wide(array.shape), self.bits, self.group, self.symmetric)
                base = name.removesuffix("weight")
                arrays |= {base + end: part for end, part in self.pack(weight).items()}
                values[name] = weight.values()
            elif name != "lm_head.weight":
                half = np.frombuffer(quantize(array, "BF16").data, np.uint16).reshape(array.shape)
                arrays[name] = half
                values[name] = (half.astype(np.uint32) << 16).view(np.float32)
        config = {**model.config, "intermediate_size": self.ffn, "tie_word_embeddings": True}
        for target, found, about in (
            (folder, {**arrays, **self.extra}, {**config, "quantization_config": self.config}),
            (plain, values, config),
        ):
            if target is not None:
                target.mkdir(parents=True, exist_ok=True)
                write_arrays(target / "model.safetensors", found)
                (target / "config.json").write_text(json.dumps(about))
        return folder

    def _wide(self, shape: tuple[int, int]) -> tuple[int, int]:
        """With another FFN than tiny_models', whose 96 is no whole groups of 64."""
        return tuple({96: self.ffn, 192: 2 * self.ffn}.get(each, each) for each in shape)
