"""A GGUF file's tensors as packed weights, each by its own type; names, shapes and types are checked first."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from millpond.errors import ModelFileError
from millpond.kernels.matmul import BF16, F32_WEIGHTS, GROUP, U4, U8, UNIT
from millpond.kernels.pack import Form, Packed, empty_room, pack_affine, pack_float, side_by_side, size_side_by_side
from millpond.load.dequantize import affine_bits, dequantize, dequantize_channels, to_affine
from millpond.load.gguf import GGUFFile, GGUFTensor
from millpond.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """layers[i] = [q k v, o, gate up, down]; norms: float32 [2 * layers + 1, hidden].

    rope_factors, float32 [head_dim / 2] where the file has them, divide the rotation's frequencies. room is the run of
    memory that all packed layers lie in. outliers: the channels of each integer layer, in order, where they are known;
    where they are not, exact has for each of them a function of channels that gives their weights in the file, float32
    [columns, channels].
    """

    embedding: Packed
    head: Packed
    layers: tuple[tuple[Packed, ...], ...]
    norms: NDArray[np.float32]
    rope_factors: NDArray[np.float32] | None
    room: NDArray[np.uint8]
    outliers: tuple[NDArray[np.int64], ...] | None = None
    exact: tuple[Callable[[NDArray[np.int64]], NDArray[np.float32]], ...] = ()

    @property
    def packed(self) -> list[Packed]:
        """Every layer that is held, in the order in which they lie in the room."""
        layers = [each for layer in self.layers for each in layer]
        return [*layers, self.embedding] if self.head is self.embedding else [*layers, self.embedding, self.head]

    @property
    def integer_layers(self) -> list[Packed]:
        """Those that outlier channels are taken out of, in order: an embedding that is not the head meets no inputs."""
        layers = [each for layer in self.layers for each in layer]
        return [each for each in [*layers, self.head] if each.kind <= U8]

    @property
    def kinds(self) -> frozenset[int]:
        """The kinds of tile that the model needs."""
        return frozenset(each.kind for each in self.packed)


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear layer of a file: its tensors stacked by rows, then put in an order (-1: a row of zeros)."""

    tensors: tuple[GGUFTensor, ...]
    order: NDArray[np.int64] | None = None

    def form(self, dtype: str) -> Form:
        """Integers where all tensors are quantised, else bfloat16; float32 on request, where quantised tensors stand
        among others (bfloat16 would round them), and where rows are not whole groups."""
        bits = [affine_bits(each.type) for each in self.tensors]
        quantised = [each for each in bits if each is not None]
        rows, depth = sum(each.shape[0] for each in self.tensors), self.tensors[0].shape[1]
        columns = rows if self.order is None else len(self.order)
        if dtype == "float32" or 0 < len(quantised) < len(bits) or (quantised and depth % GROUP):
            return Form(F32_WEIGHTS, columns, depth)
        return Form((U4 if max(quantised) == 4 else U8) if quantised else BF16, columns, depth)

    def pack(self, form: Form) -> Packed:
        """The layer in that form."""
        if form.kind in (BF16, F32_WEIGHTS):
            return pack_float(_take([dequantize(each) for each in self.tensors], self.order), form.kind)
        parts = [each for each in map(to_affine, self.tensors) if each is not None]
        groups = zip(*((a.codes, a.scale, a.offset) for a in parts), strict=True)
        columns = [_take(group, self.order) for group in groups]
        try:
            return pack_affine(*columns, bits=4 if form.kind == U4 else 8)
        except ValueError as error:
            raise ModelFileError(f"tensor {self.tensors[0].name!r}: {error}") from error

    def channels(self, channels: NDArray[np.int64]) -> NDArray[np.float32]:
        """The exact weights of some input channels, float32 [columns, channels]."""
        return _take([dequantize_channels(each, channels) for each in self.tensors], self.order)


def load_weights(file: GGUFFile, config: ModelConfig, dtype: str) -> LlamaWeights:
    """Pack every weight: integers where the tensor is quantised and bfloat16 where it is not, or all float32.

    Raises ModelFileError naming the tensor that is missing, unknown, or not of the shape that the figures ask for.
    """
    linears = linear_layers(file, config)
    forms = [each.form(dtype) for each in linears]
    weights = assemble(file, config, forms, empty_room(size_side_by_side(forms)))
    for place, linear, form in zip(weights.packed, linears, forms, strict=True):
        place.copy_from(linear.pack(form))
    made_from = {id(place): linear for place, linear in zip(weights.packed, linears, strict=True)}
    return replace(weights, exact=tuple(made_from[id(each)].channels for each in weights.integer_layers))


def assemble(file: GGUFFile, config: ModelConfig, forms: Sequence[Form], room: NDArray[np.uint8]) -> LlamaWeights:
    """The weights over a run of memory that holds, or is to hold, layers of these forms."""
    tensors = file.tensors
    packed = side_by_side(forms, room)
    names = [f"blk.{i}.{name}" for i in range(config.num_layers) for name in ("attn_norm.weight", "ffn_norm.weight")]
    return LlamaWeights(
        embedding=packed[4 * config.num_layers],
        head=packed[-1],
        layers=tuple(tuple(packed[4 * i : 4 * i + 4]) for i in range(config.num_layers)),
        norms=np.stack([dequantize(tensors[name]) for name in [*names, "output_norm.weight"]]),
        rope_factors=dequantize(tensors["rope_freqs.weight"]) if "rope_freqs.weight" in tensors else None,
        room=room,
    )


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


def linear_layers(file: GGUFFile, config: ModelConfig) -> list[Linear]:
    """All linear layers of a checked file: four for each layer, the embedding, and the head where it is another one."""
    check_tensors(file, expected_shapes(config), config)
    tensors = file.tensors
    q, k = (head_order(heads, config.head_dim) for heads in (config.num_heads, config.num_kv_heads))
    qkv_order = np.concatenate([q, len(q) + k, len(q) + len(k) + np.arange(len(k))])
    gate_up_order = unit_order(config.ffn_size)
    linears = []
    for i in range(config.num_layers):
        qkv = tuple(tensors[f"blk.{i}.attn_{name}.weight"] for name in "qkv")
        gate_up = tuple(tensors[f"blk.{i}.ffn_{name}.weight"] for name in ("gate", "up"))
        linears += [
            Linear(qkv, qkv_order),
            Linear((tensors[f"blk.{i}.attn_output.weight"],)),
            Linear(gate_up, gate_up_order),
            Linear((tensors[f"blk.{i}.ffn_down.weight"],)),
        ]
    tables = [tensors[name] for name in ("token_embd.weight", "output.weight") if name in tensors]
    return linears + [Linear((each,)) for each in tables]


def head_order(heads: int, head_dim: int) -> NDArray[np.int64]:
    """Rows of q or k as the rotation wants them: a GGUF of this architecture interleaves the two halves of a head."""
    return np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def unit_order(ffn_size: int) -> NDArray[np.int64]:
    """Rows of gate and up (stacked) in units of two tiles of each, the last filled up with zeros (-1)."""
    tiles = np.pad(np.arange(ffn_size), (0, -ffn_size % UNIT), constant_values=-1).reshape(-1, 1, UNIT)
    return np.concatenate([tiles, np.where(tiles < 0, -1, tiles + ffn_size)], axis=1).reshape(-1)


def _take(parts: Sequence[NDArray[np.generic]], order: NDArray[np.int64] | None) -> NDArray[np.generic]:
    rows = np.concatenate(parts)
    if order is None:
        return rows
    taken = rows[order]
    taken[order < 0] = 0
    return taken
