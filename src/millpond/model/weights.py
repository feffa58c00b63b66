"""A GGUF file's tensors as packed weights, each by its own type; names, shapes and types are checked first."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millpond.errors import ModelFileError
from millpond.kernels.matmul import BF16, F32_WEIGHTS, UNIT
from millpond.kernels.pack import Packed, pack_affine, pack_float, side_by_side
from millpond.load.dequantize import dequantize, to_affine
from millpond.load.gguf import GGUFFile, GGUFTensor
from millpond.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """layers[i] = [q k v, o, gate up, down]; norms: float32 [2 * layers + 1, hidden].

    rope_factors, float32 [head_dim / 2] where the file has them, divide the rotation's frequencies.
    """

    embedding: Packed
    head: Packed
    layers: tuple[tuple[Packed, ...], ...]
    norms: NDArray[np.float32]
    rope_factors: NDArray[np.float32] | None

    @property
    def kinds(self) -> frozenset[int]:
        """The kinds of tile that the model needs."""
        layers = (each for layer in self.layers for each in layer)
        return frozenset(each.kind for each in (self.embedding, self.head, *layers))


def load_weights(file: GGUFFile, config: ModelConfig, dtype: str) -> LlamaWeights:
    """Pack every weight: affine where the tensor is quantised and bfloat16 where it is not, or all float32.

    Raises ModelFileError naming the tensor that is missing, unknown, or not of the shape that the figures ask for.
    """
    shapes = expected_shapes(config)
    check_tensors(file, shapes, config)
    tensors = file.tensors
    layers = [_load_layer(file, config, f"blk.{i}.", dtype) for i in range(config.num_layers)]
    embedding = _pack([tensors["token_embd.weight"]], dtype)
    head = _pack([tensors["output.weight"]], dtype) if "output.weight" in tensors else embedding
    names = [f"blk.{i}.{name}" for i in range(config.num_layers) for name in ("attn_norm.weight", "ffn_norm.weight")]
    norms = np.stack([dequantize(tensors[name]) for name in [*names, "output_norm.weight"]])
    factors = dequantize(tensors["rope_freqs.weight"]) if "rope_freqs.weight" in tensors else None
    own = [embedding] if head is embedding else [embedding, head]
    placed = side_by_side([each for layer in layers for each in layer] + own)
    placed_layers = tuple(tuple(placed[4 * i : 4 * i + 4]) for i in range(config.num_layers))
    return LlamaWeights(placed[4 * config.num_layers], placed[-1], placed_layers, norms, factors)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape (rows, depth) of every tensor that the model needs."""
    hidden, q, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config.vocab_size, hidden),
        "output_norm.weight": (hidden,),
    }
    for i in range(config.num_layers):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (hidden,),
            f"blk.{i}.attn_q.weight": (q, hidden),
            f"blk.{i}.attn_k.weight": (kv, hidden),
            f"blk.{i}.attn_v.weight": (kv, hidden),
            f"blk.{i}.attn_output.weight": (hidden, q),
            f"blk.{i}.ffn_norm.weight": (hidden,),
            f"blk.{i}.ffn_gate.weight": (config.ffn_size, hidden),
            f"blk.{i}.ffn_up.weight": (config.ffn_size, hidden),
            f"blk.{i}.ffn_down.weight": (hidden, config.ffn_size),
        }
    return shapes


def check_tensors(file: GGUFFile, shapes: dict[str, tuple[int, ...]], config: ModelConfig) -> None:
    """Refuse a file in which a tensor is missing, has another shape, or would have no effect here."""
    optional = {"output.weight": (config.vocab_size, config.hidden_size), "rope_freqs.weight": (config.head_dim // 2,)}
    for name, shape in {**shapes, **optional}.items():
        if name not in file.tensors:
            if name in optional:
                continue
            raise ModelFileError(f"{file.path.name}: tensor {name!r} is missing")
        found = file.tensors[name].shape
        if found != shape:
            raise ModelFileError(f"{file.path.name}: tensor {name!r} has shape {found}, expected {shape}")
    unknown = sorted(set(file.tensors) - set(shapes) - set(optional))
    if unknown:
        raise ModelFileError(f"{file.path.name}: tensor {unknown[0]!r} is not part of a plain Llama model")


def _load_layer(file: GGUFFile, config: ModelConfig, prefix: str, dtype: str) -> tuple[Packed, Packed, Packed, Packed]:
    def tensor(name: str) -> GGUFTensor:
        return file.tensors[f"{prefix}{name}.weight"]

    q, k = (head_order(heads, config.head_dim) for heads in (config.num_heads, config.num_kv_heads))
    qkv = np.concatenate([q, len(q) + k, len(q) + len(k) + np.arange(len(k))])
    return (
        _pack([tensor("attn_q"), tensor("attn_k"), tensor("attn_v")], dtype, qkv),
        _pack([tensor("attn_output")], dtype),
        _pack([tensor("ffn_gate"), tensor("ffn_up")], dtype, unit_order(config.ffn_size)),
        _pack([tensor("ffn_down")], dtype),
    )


def head_order(heads: int, head_dim: int) -> NDArray[np.int64]:
    """Rows of q or k as the rotation wants them: a GGUF of this architecture interleaves the two halves of a head."""
    return np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def unit_order(ffn_size: int) -> NDArray[np.int64]:
    """Rows of gate and up (stacked) in units of two tiles of each, the last filled up with zeros (-1)."""
    tiles = np.pad(np.arange(ffn_size), (0, -ffn_size % UNIT), constant_values=-1).reshape(-1, 1, UNIT)
    return np.concatenate([tiles, np.where(tiles < 0, -1, tiles + ffn_size)], axis=1).reshape(-1)


def _pack(tensors: Sequence[GGUFTensor], dtype: str, order: NDArray[np.int64] | None = None) -> Packed:
    """One linear layer out of tensors stacked by rows, then put in order: affine where all are quantised, else
    bfloat16; float32 on request, and where quantised tensors stand among others (bfloat16 would round them)."""
    affine = [None if dtype == "float32" else to_affine(each) for each in tensors]
    parts = [each for each in affine if each is not None]
    if len(parts) == len(tensors):
        columns = [_take(group, order) for group in zip(*((a.codes, a.scale, a.offset) for a in parts), strict=True)]
        return pack_affine(*columns, bits=max(each.bits for each in parts))
    return pack_float(
        _take([dequantize(t) for t in tensors], order), F32_WEIGHTS if dtype == "float32" or parts else BF16
    )


def _take(parts: Sequence[NDArray[np.generic]], order: NDArray[np.int64] | None) -> NDArray[np.generic]:
    rows = np.concatenate(parts)
    if order is None:
        return rows
    taken = rows[order]
    taken[order < 0] = 0
    return taken
