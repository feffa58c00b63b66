"""Tensors of random blocks of every type, with scales that a float16 can hold."""

import numpy as np

from millpond.load.dequantize import FLOATS, LAYOUTS
from millpond.load.ggml_types import BLOCKS, SUPPORTED, GGMLType
from millpond.load.gguf import GGUFTensor

# Where in their blocks the other types have float16 scales; MXFP4 has an exponent, IQ1_M a float16 in pieces.
HALVES = {
    GGMLType.Q2_K: (80, 82),
    GGMLType.Q3_K: (108,),
    GGMLType.Q4_K: (0, 2),
    GGMLType.Q5_K: (0, 2),
    GGMLType.Q6_K: (208,),
    GGMLType.TQ1_0: (52,),
    GGMLType.TQ2_0: (64,),
    **{kind: (0,) for kind in GGMLType if kind.name.startswith("IQ") and kind is not GGMLType.IQ1_M},
}
OTHERS = [kind for kind in SUPPORTED if kind not in LAYOUTS and kind not in FLOATS]


def random_scales(rng: np.random.Generator, count: int, largest: float) -> np.ndarray:
    """Of every size float16 has, subnormal ones too, up to `largest`, and 0."""
    size = np.exp2(rng.uniform(-25, np.log2(largest), count))
    return (size * rng.choice([-1.0, 0.0, 1.0], count)).astype(np.float16)


def random_tensor(kind: GGMLType, rows: int, columns: int, seed: int = 0, largest: float = 100.0) -> GGUFTensor:
    """Random bits for the codes, random scales and minima; as many columns as that, or whole blocks."""
    rng = np.random.default_rng(seed)
    columns = -(-columns // BLOCKS[kind][0]) * BLOCKS[kind][0]
    data = rng.integers(0, 256, rows * columns // BLOCKS[kind][0] * BLOCKS[kind][1], dtype=np.uint8)
    if kind in LAYOUTS:
        blocks = data.view(LAYOUTS[kind])
        for field in {"d", "m"} & set(blocks.dtype.names):
            blocks[field] = random_scales(rng, len(blocks), largest)
    elif kind is GGMLType.F16:
        data = rng.standard_normal(rows * columns).astype(np.float16).view(np.uint8)
    elif kind in FLOATS:
        data = rng.standard_normal(rows * columns).astype(np.float32).view(np.uint8)[: data.size]
        data.view(np.uint16)[:] &= 0xBFFF if kind is GGMLType.BF16 else 0xFFFF  # no infinity among the low halves
    else:
        blocks = data.reshape(-1, BLOCKS[kind][1])
        for place in HALVES.get(kind, ()):
            blocks[:, place : place + 2] = random_scales(rng, len(blocks), largest).view(np.uint8).reshape(-1, 2)
        if kind is GGMLType.MXFP4:
            blocks[:, 0] = rng.integers(100, 140, len(blocks))
        elif kind is GGMLType.IQ1_M:
            blocks[:, 55] &= 0xBF
    return GGUFTensor("w", (rows, columns), kind, data)
