"""A file's tensors as packed weights, each by its own type; names, shapes and types are checked first."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from millpond.errors import ConfigError, ModelFileError
from millpond.kernels.matmul import BF16, F32_WEIGHTS, GROUP, U4, U8, UNIT
from millpond.kernels.pack import (
    Form,
    Packed,
    empty_room,
    pieces,
    put_affine,
    put_values,
    side_by_side,
    size_side_by_side,
)
from millpond.load.affine import GROUP as AFFINE_GROUP
from millpond.load.affine import AffineWeights
from millpond.load.dequantize import (
    Tensor,
    code_bits,
    dequantize,
    dequantize_channels,
    forget_tensor,
    has_affine,
    take_rows,
    to_affine,
)
from millpond.load.progress import Progress, ignore
from millpond.model.checkpoint import ModelFile
from millpond.model.config import ModelConfig
from millpond.model.quantize import quantize_4_bit
from millpond.model.tensors import AFTER, BEFORE, EMBEDDED, SUMS, check_tensors, split_experts, tensor_names

TOLD_BYTES = 4 << 20  # packed between two words of progress


def nothing() -> NDArray[np.float32]:
    """What a model does not have."""
    return np.zeros((0, 0), np.float32)


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """layers[i] = [q k v, o, gate up, down], or with experts [q k v, o, router, and gate up, down of each].

    norms: float32 [2 * layers + 1, hidden], of what attention and the FFN take, and the last; after, of what they give,
    [2 * layers, hidden]. biases: of q k v, [layers, columns]. query_key_norms: as wide as q and k of all heads.
    An encoder's norms are those of the embedding and of the sums behind it; norm_biases and sum_biases, which are added
    to the sums before, are as many (the first of these is 0); up_biases: [layers, ffn_size]; positions: what is added
    to an embedding, [context_length, hidden]. Where a model has none they are empty.

    rope_factors, float32 [dims / 2] where the file has them, divide the rotation's frequencies. room is the run of
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
    after: NDArray[np.float32] = field(default_factory=nothing)
    biases: NDArray[np.float32] = field(default_factory=nothing)
    query_key_norms: NDArray[np.float32] = field(default_factory=nothing)
    norm_biases: NDArray[np.float32] = field(default_factory=nothing)
    sum_biases: NDArray[np.float32] = field(default_factory=nothing)
    up_biases: NDArray[np.float32] = field(default_factory=nothing)
    positions: NDArray[np.float32] = field(default_factory=nothing)
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
    """One linear layer of a file: its tensors stacked by rows, then put in an order (-1: a row of zeros); in float32
    where it must be exact. is_table: the embedding or the head, which keeps 8 bits where others get 4."""

    tensors: tuple[Tensor, ...]
    order: NDArray[np.int64] | None = None
    exact: bool = False
    is_table: bool = False

    def form(self, dtype: str, quantize: str = "off") -> Form:
        """Integers where all tensors are quantised or are to be, else bfloat16; float32 on request, where quantised
        tensors stand among others (bfloat16 would round them), and where rows are not whole groups."""
        bits = [code_bits(each) for each in self.tensors]
        quantised = [each for each in bits if each is not None]
        rows, depth = sum(each.shape[0] for each in self.tensors), self.tensors[0].shape[1]
        columns = rows if self.order is None else len(self.order)
        if self.exact or dtype == "float32" or 0 < len(quantised) < len(bits) or (quantised and depth % GROUP):
            return Form(F32_WEIGHTS, columns, depth)
        if not quantised and quantize != "off" and depth % GROUP == 0:
            return Form(U4 if quantize == "q4" and not self.is_table else U8, columns, depth)
        return Form((U4 if max(quantised) == 4 else U8) if quantised else BF16, columns, depth)

    def pack_into(self, layer: Packed) -> Iterator[int]:
        """Pack the weights into a layer of that form, some rows after some rows; gives how many bytes of it are new."""
        affine = layer.kind <= U8 and all(has_affine(each) for each in self.tensors)
        order = self._order
        for piece in pieces(layer.columns, layer.depth):
            first, rows = piece.start, order[piece]
            try:
                if affine or layer.kind == U4:
                    weights = self._affine(rows) if affine else quantize_4_bit(self._values(rows))
                    put_affine(layer, first, weights.codes, weights.scale, weights.offset)
                else:
                    put_values(layer, first, self._values(rows))
            except ValueError as error:
                raise ModelFileError(f"tensor {self.tensors[0].name!r}: {error}") from error
            yield layer.weights.nbytes * len(rows) // layer.columns

    def channels(self, channels: NDArray[np.int64]) -> NDArray[np.float32]:
        """The exact weights of some input channels, float32 [columns, channels]."""
        return _take([dequantize_channels(each, channels) for each in self.tensors], self.order)

    @property
    def _order(self) -> NDArray[np.int64]:
        return np.arange(sum(each.shape[0] for each in self.tensors)) if self.order is None else self.order

    def _parts(self, rows: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.bool_], Tensor]]:
        """Of each tensor that some of these rows are in, which of them, and those."""
        start = 0
        for tensor in self.tensors:
            own = (rows >= start) & (rows < start + tensor.shape[0])
            if own.any():
                yield own, take_rows(tensor, rows[own] - start)
            start += tensor.shape[0]

    def _values(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        values = np.zeros((len(rows), self.tensors[0].shape[1]), np.float32)
        for own, tensor in self._parts(rows):
            values[own] = dequantize(tensor)
        return values

    def _affine(self, rows: NDArray[np.int64]) -> AffineWeights:
        depth, bits = self.tensors[0].shape[1], 4
        codes = np.zeros((len(rows), depth), np.uint8)
        scale, offset = np.zeros((2, len(rows), depth // AFFINE_GROUP), np.float32)
        for own, tensor in self._parts(rows):
            part = to_affine(tensor)
            codes[own], scale[own], offset[own], bits = part.codes, part.scale, part.offset, max(bits, part.bits)
        return AffineWeights(codes, scale, offset, bits)


def load_weights(
    file: ModelFile, config: ModelConfig, dtype: str, quantize: str = "off", progress: Progress = ignore
) -> ModelWeights:
    """Pack every weight: integers where the tensor is quantised or is to be, bfloat16 where not, or all float32.

    In memory are the packed weights and, of the file, what is read of one layer. progress hears of the packed bytes.
    Raises ModelFileError naming the tensor that is missing, unknown, or not of the shape that the figures ask for, and
    ConfigError where a checkpoint that is to be quantised is so already.
    """
    linears = linear_layers(file, config)
    forms = layer_forms(file, linears, dtype, quantize)
    weights = assemble(file, config, forms, empty_room(size_side_by_side(forms)))
    done, told = 0, -TOLD_BYTES
    for place, linear in zip(weights.packed, linears, strict=True):
        for num_bytes in linear.pack_into(place):
            done += num_bytes
            if done - told >= TOLD_BYTES:
                told = done
                progress(done, weights.room.nbytes, f"packing {file.path.name}")
        for tensor in linear.tensors:
            forget_tensor(tensor)
    made_from = {id(place): linear for place, linear in zip(weights.packed, linears, strict=True)}
    return replace(weights, exact=tuple(made_from[id(each)].channels for each in weights.integer_layers))


def layer_forms(file: ModelFile, linears: Sequence[Linear], dtype: str, quantize: str) -> list[Form]:
    """The form of each layer; refuses to quantise what is quantised."""
    for tensor in (each for linear in linears for each in linear.tensors if quantize != "off"):
        if code_bits(tensor) is not None:
            raise ConfigError(
                f"quantize {quantize} is for checkpoints that are not quantised, and in {file.path.name} tensor "
                f"{tensor.name!r} is of type {tensor.kind}; leave quantize off"
            )
    return [each.form(dtype, quantize) for each in linears]


def assemble(file: ModelFile, config: ModelConfig, forms: Sequence[Form], room: NDArray[np.uint8]) -> ModelWeights:
    """The weights over a run of memory that holds, or is to hold, layers of these forms."""
    packed, each = side_by_side(forms, room), linears_each(config)
    factors = file.tensors.get("rope_freqs.weight")
    return ModelWeights(
        embedding=packed[each * config.num_layers],
        head=packed[-1],
        layers=tuple(tuple(packed[each * i : each * (i + 1)]) for i in range(config.num_layers)),
        norms=_norms(file, config),
        rope_factors=None if factors is None else dequantize(factors),
        room=room,
        after=_stacked(file, config, AFTER) if config.block.norms in ("after", "both") else nothing(),
        biases=_biases(file, config) if config.block.qkv_bias else nothing(),
        query_key_norms=nothing() if config.block.query_key_norm == "none" else _query_key_norms(file, config),
        **_encoder_parts(file, config),
    )


def linears_each(config: ModelConfig) -> int:
    """How many linear layers each of the model's layers has."""
    return 3 + 2 * config.num_experts if config.block.experts else 4


def _stacked(file: ModelFile, config: ModelConfig, names: Sequence[str], part: str = "weight") -> NDArray[np.float32]:
    tensors = [file.tensors[f"blk.{i}.{name}.{part}"] for i in range(config.num_layers) for name in names]
    return np.stack([dequantize(each) for each in tensors])


def _norms(file: ModelFile, config: ModelConfig, part: str = "weight") -> NDArray[np.float32]:
    if config.block.norms == "sums":
        first = dequantize(file.tensors[f"{EMBEDDED}.{part}"])
        return np.concatenate([first[None], _stacked(file, config, SUMS, part)])
    last = dequantize(file.tensors["output_norm.weight"]) / np.float32(config.logit_scale)
    if config.block.norms == "after":
        before = np.ones((2 * config.num_layers, config.hidden_size), np.float32)
    else:
        before = _stacked(file, config, BEFORE)
    return np.concatenate([before, last[None]])


def _biases(file: ModelFile, config: ModelConfig) -> NDArray[np.float32]:
    order = qkv_order(config)
    parts = [[dequantize(file.tensors[f"blk.{i}.attn_{n}.bias"]) for n in "qkv"] for i in range(config.num_layers)]
    return np.stack([np.concatenate(each)[order] for each in parts])


def _encoder_parts(file: ModelFile, config: ModelConfig) -> dict[str, NDArray[np.float32]]:
    if not config.is_encoder:
        return {}
    sums = _stacked(file, config, ("attn_output", "ffn_down"), "bias")
    positions, types = (dequantize(file.tensors[f"{name}.weight"]) for name in ("position_embd", "token_types"))
    return {
        "norm_biases": _norms(file, config, "bias"),
        "sum_biases": np.concatenate([np.zeros_like(sums[:1]), sums]),
        "up_biases": _stacked(file, config, ("ffn_up",), "bias"),
        "positions": positions + types[0],
    }


def _query_key_norms(file: ModelFile, config: ModelConfig) -> NDArray[np.float32]:
    """In the order of the rows of q and k; those of a head once for each head."""
    heads, dims = (config.num_heads, config.num_kv_heads), head_order(config)
    rows = []
    for i in range(config.num_layers):
        gains = [dequantize(file.tensors[f"blk.{i}.attn_{name}_norm.weight"]) for name in "qk"]
        if config.block.query_key_norm == "each head":
            gains = [np.tile(gain, count) for gain, count in zip(gains, heads, strict=True)]
        rows.append(np.concatenate([gain.reshape(-1, config.head_dim)[:, dims].reshape(-1) for gain in gains]))
    return np.stack(rows)


def linear_layers(file: ModelFile, config: ModelConfig) -> list[Linear]:
    """All linear layers of a checked file: those of each layer, the embedding, and the head where it is another one."""
    tensors = split_experts(file.tensors, config)
    check_tensors(file.path.name, tensors, config)
    qkv, gate_up = qkv_order(config), unit_order(config.ffn_size, has_gate=not config.is_encoder)
    linears = []
    for i in range(config.num_layers):
        names = tensor_names(config, i)
        linears += [
            Linear(tuple(tensors[name] for name in names.qkv), qkv),
            Linear((tensors[names.out],)),
            *([Linear((tensors[names.router],), exact=True)] if names.router else []),
        ]
        for gate_up_names, down in names.ffns:
            linears += [Linear(tuple(tensors[name] for name in gate_up_names), gate_up), Linear((tensors[down],))]
    tables = [tensors[name] for name in ("token_embd.weight", "output.weight") if name in tensors]
    return linears + [Linear((each,), is_table=True) for each in tables]


def qkv_order(config: ModelConfig) -> NDArray[np.int64]:
    """The file's rows of q, k and v, stacked, as the rotation wants them."""
    dims, dim = head_order(config), config.head_dim
    turned = config.num_heads + config.num_kv_heads
    rows = (np.arange(turned)[:, None] * dim + dims).reshape(-1)
    return np.concatenate([rows, turned * dim + np.arange(config.num_kv_heads * dim)])


def head_order(config: ModelConfig) -> NDArray[np.int64]:
    """A head's dimensions with those that turn together half a head apart, and those that do not turn last in each
    half: queries and keys in the same other order have the same products."""
    turned, dims = config.turned_dims, np.arange(config.head_dim)
    pairs = dims[:turned].reshape(-1, 2).T if config.interleaved else dims[:turned].reshape(2, -1)
    return np.concatenate([pairs, dims[turned:].reshape(2, -1)], axis=1).reshape(-1)


def unit_order(ffn_size: int, has_gate: bool = True) -> NDArray[np.int64]:
    """Rows of gate and up (stacked) in units of UNIT of each, the last filled up with zeros (-1); without a gate the
    rows of up alone."""
    tiles = np.pad(np.arange(ffn_size), (0, -ffn_size % UNIT), constant_values=-1).reshape(-1, 1, UNIT)
    if not has_gate:
        return tiles.reshape(-1)
    return np.concatenate([tiles, np.where(tiles < 0, -1, tiles + ffn_size)], axis=1).reshape(-1)


def _take(parts: Sequence[NDArray[np.generic]], order: NDArray[np.int64] | None) -> NDArray[np.generic]:
    rows = np.concatenate(parts)
    if order is None:
        return rows
    taken = rows[order]
    taken[order < 0] = 0
    return taken
