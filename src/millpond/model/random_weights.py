"""Models of known shapes with random weights, packed as a file's would be: to time a model that is not here."""

import numpy as np

from millpond.kernels.matmul import F32_WEIGHTS, MOST_OUTLIERS, STEP_BITS, U4, U8, ZERO_CODE
from millpond.kernels.pack import Form, Packed, empty_room, side_by_side, size_side_by_side
from millpond.model.config import ModelConfig
from millpond.model.rope import Rope
from millpond.model.weights import ModelWeights, unit_order

SHAPES = {
    "smollm2-135m": ModelConfig(
        architecture="llama",
        num_layers=30,
        hidden_size=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        ffn_size=1536,
        vocab_size=49152,
        context_length=8192,
        norm_epsilon=1e-5,
        ropes=(Rope(100000.0),),
    ),
    "llama-1b": ModelConfig(  # Llama 3.2 1B
        architecture="llama",
        num_layers=16,
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        ffn_size=8192,
        vocab_size=128256,
        context_length=131072,
        norm_epsilon=1e-5,
        ropes=(Rope(500000.0),),
    ),
}


def random_weights(config: ModelConfig, dtype: str, seed: int = 0) -> ModelWeights:
    """4-bit layers and an 8-bit embedding that is the head, too, or all float32; the same for the same seed.

    Each layer's outputs are about as large as its inputs. Integer layers have as many outlier channels as any layer of
    a real model.
    """
    rng, forms = np.random.Generator(np.random.SFC64(seed)), layer_forms(config, dtype)
    room = empty_room(size_side_by_side(forms))
    packed = side_by_side(forms, room)
    for each in packed:
        fill(each, rng)
    integers = [each for each in packed if each.kind <= U8]
    return ModelWeights(
        embedding=packed[-1],
        head=packed[-1],
        layers=tuple(tuple(packed[4 * i : 4 * i + 4]) for i in range(config.num_layers)),
        norms=np.ones((2 * config.num_layers + 1, config.hidden_size), np.float32),
        rope_factors=None,
        room=room,
        outliers=tuple(np.sort(rng.choice(each.depth, MOST_OUTLIERS, replace=False)) for each in integers),
    )


def random_weights_bytes(config: ModelConfig, dtype: str) -> int:
    """The memory that random_weights takes for its layers."""
    return size_side_by_side(layer_forms(config, dtype))


def layer_forms(config: ModelConfig, dtype: str) -> list[Form]:
    """Of every packed layer: q k v, o, gate up and down of each, and the embedding."""
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    four, eight = (F32_WEIGHTS, F32_WEIGHTS) if dtype == "float32" else (U4, U8)
    layer = [
        Form(four, heads + 2 * config.num_kv_heads * config.head_dim, hidden),
        Form(four, hidden, heads),
        Form(four, len(unit_order(config.ffn_size)), hidden),
        Form(four, hidden, config.ffn_size),
    ]
    return layer * config.num_layers + [Form(eight, config.vocab_size, hidden)]


def fill(layer: Packed, rng: np.random.Generator) -> None:
    """Weights of mean 0 and variance 1 / depth, and a scale for each group within a quarter of what that asks for."""
    if layer.outliers is None:
        layer.weights[...] = rng.standard_normal(layer.weights.shape, np.float32) / np.float32(layer.depth**0.5)
        return
    parts = layer.weights
    if layer.kind == U4:
        step = 14
        parts["nibbles"] = rng.integers(0, 1 << 32, parts["nibbles"].shape, np.uint32)
        parts["steps"], parts["bases"] = step << STEP_BITS, ZERO_CODE - 15 * step // 2
        deviation = step * (255 / 12) ** 0.5  # of nibbles that are all as likely
    else:
        parts["codes"] = rng.integers(1, 256, (*parts["codes"].shape, 4), np.uint8).view(np.uint32)[..., 0]
        parts["unused"] = 0
        deviation = (254 * 256 / 12) ** 0.5
    parts["scales"] = rng.uniform(0.75, 1.25, parts["scales"].shape) / (deviation * layer.depth**0.5)
    layer.outliers[...] = rng.standard_normal(layer.outliers.shape, np.float32) / np.float32(layer.depth**0.5)
