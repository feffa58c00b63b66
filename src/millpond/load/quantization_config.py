"""The quantization_config of a config.json: which tensors together are a weight, and what they mean.

What it asks for is either mapped exactly to affine groups of 32, or refused with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millpond.errors import ModelFileError, shown
from millpond.load.affine import GROUP
from millpond.load.dequantize import FLOATS, Tensor
from millpond.load.ggml_types import GGMLType
from millpond.load.gguf import GGUFTensor
from millpond.load.integer_tensor import IntegerTensor, Layout

KEY = "quantization_config"


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a checkpoint is quantised. group_size: of inputs with one scale, 0 for all of a row. words, scales, zeros and
    order are what the names of tensors end with; zero is what is added to zeros, or is all of them."""

    layout: Layout
    bits: int
    group_size: int
    words: str
    scales: str
    zeros: str | None
    order: str
    zero: int
    shape: str | None = None

    @property
    def marker(self) -> str:
        """What only the name of a quantised weight's tensor ends with."""
        return self.scales if self.layout is Layout.BYTES else self.words


def read_scheme(config: Mapping[str, Any]) -> Scheme:
    """Raises ModelFileError for what has no exact affine form."""
    section = config[KEY]
    if not isinstance(section, dict):
        raise ModelFileError(f"{KEY!r} must be an object, got {shown(section)}")
    method = section.get("quant_method")
    readers = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed}
    if not isinstance(method, str) or method not in readers:
        raise _unsupported("quant_method", method, " or ".join(readers))
    return readers[method](section)


def quantised_weights(file: str, scheme: Scheme, tensors: Mapping[str, GGUFTensor]) -> dict[str, Tensor]:
    """The tensors with each quantised weight under its usual name, NAME.weight, in place of its parts. Raises
    ModelFileError for parts that do not fit, and where there are floats alone."""
    found: dict[str, Tensor] = dict(tensors)
    ends = (scheme.words, scheme.scales, scheme.zeros, scheme.order, scheme.shape)
    suffix = f".{scheme.marker}"
    quantised = [name for name in tensors if name.endswith(suffix)]
    if not quantised and all(each.type in FLOATS for each in tensors.values()):
        raise ModelFileError(
            f"{file}: its config.json has a {KEY}, but all {len(tensors)} tensors are floats, and no name ends with "
            f"{suffix}; take {KEY} out of config.json if the weights are as they should be"
        )
    for marked in quantised:
        base = marked.removesuffix(suffix)
        parts = {end: found.pop(f"{base}.{end}") for end in ends if end and f"{base}.{end}" in found}
        found[f"{base}.weight"] = _Reader(file, f"{base}.weight", scheme, parts).weight()
    return found


@dataclass(frozen=True, slots=True)
class _Reader:
    """Makes a weight of its parts after a look at each one's type and shape."""

    file: str
    name: str
    scheme: Scheme
    parts: Mapping[str, Tensor]

    def weight(self) -> IntegerTensor:
        scheme, words = self.scheme, self._words(self.scheme.words)
        each = 32 // scheme.bits
        rows, depth = {
            Layout.GPTQ: lambda a, b: (b, a * each),
            Layout.AWQ: lambda a, b: (b * each, a),
            Layout.ROWS: lambda a, b: (a, b * each),
            Layout.BYTES: lambda a, b: (a, b),
        }[scheme.layout](*words.shape)
        if not rows or not depth:
            raise self._error(f"its codes are of shape {words.shape}, which holds no weight")
        group = scheme.group_size or depth
        if group % GROUP or depth % group:
            raise self._error(
                f"{depth} inputs in groups of {group}: what can be run is full groups of a multiple of {GROUP}"
            )
        groups, by_row = depth // group, scheme.layout in (Layout.ROWS, Layout.BYTES)
        scales = self._scales((rows, groups) if by_row else (groups, rows))
        zeros = None
        if scheme.zeros is not None:
            zeros = self._words(scheme.zeros, (-(-rows // each), groups) if by_row else (groups, -(-rows // each)))
        self._check_order(depth, group)
        self._check_shape((rows, depth))
        return IntegerTensor(
            self.name, (rows, depth), scheme.layout, scheme.bits, group, words, scales, zeros, scheme.zero
        )

    def _part(self, end: str) -> GGUFTensor:
        part = self.parts.get(end)
        if not isinstance(part, GGUFTensor):
            raise self._error(f"its tensor .{end} is missing")
        return part

    def _words(self, end: str, shape: tuple[int, ...] | None = None) -> NDArray[Any]:
        part, kind = self._part(end), GGMLType.I8 if self.scheme.layout is Layout.BYTES else GGMLType.I32
        wanted = "a matrix" if shape is None else f"of shape {shape}"
        if part.type is not kind or len(part.shape) != 2 or (shape is not None and part.shape != shape):
            raise self._error(f".{end} is {part.kind} of shape {part.shape}, and must be {kind.name} and {wanted}")
        dtype = np.dtype(np.int8) if kind is GGMLType.I8 else np.dtype("<u4")
        return part.data.view(dtype).reshape(part.shape)

    def _scales(self, shape: tuple[int, int]) -> NDArray[np.generic]:
        end = self.scheme.scales
        part = self._part(end)
        if part.type not in FLOATS or part.shape != shape:
            raise self._error(f".{end} is {part.kind} of shape {part.shape}, and must be floats of shape {shape}")
        return part.data.view(FLOATS[part.type]).reshape(shape)

    def _check_order(self, depth: int, group: int) -> None:
        """Refuse groups of inputs that are not neighbours."""
        if self.scheme.order not in self.parts:
            return
        part = self._part(self.scheme.order)
        if part.type is not GGMLType.I32 or part.shape != (depth,):
            raise self._error(
                f".{self.scheme.order} is {part.kind} of shape {part.shape}, and must be I32 of ({depth},)"
            )
        if not np.array_equal(part.data.view("<i4"), np.arange(depth) // group):
            raise self._error(
                f"its groups are not of {group} inputs that follow each other (.{self.scheme.order}; it was "
                "quantised in activation order, desc_act): take a checkpoint without"
            )

    def _check_shape(self, shape: tuple[int, int]) -> None:
        if self.scheme.shape is None:
            return
        part = self._part(self.scheme.shape)
        if part.type not in (GGMLType.I32, GGMLType.I64):
            raise self._error(f".{self.scheme.shape} is {part.kind}, and must be I64")
        found = tuple(part.data.view("<i4" if part.type is GGMLType.I32 else "<i8").tolist())
        if found != shape:
            raise self._error(f".{self.scheme.shape} is {found}, and by its codes it is {shape}")

    def _error(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.file}: tensor {self.name[:80]!r}: {what}")


def _gptq(section: Mapping[str, Any]) -> Scheme:
    form = section.get("checkpoint_format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise _unsupported("checkpoint_format", form, "gptq or gptq_v2")
    if section.get("dynamic"):
        raise _unsupported("dynamic", section["dynamic"], "one setting for all layers")
    bits = _one_of(section, "bits", (4,))
    zero = 1 if form == "gptq" else 0  # the first format stores one less
    return Scheme(Layout.GPTQ, bits, _group_size(section, "group_size"), "qweight", "scales", "qzeros", "g_idx", zero)


def _awq(section: Mapping[str, Any]) -> Scheme:
    version = str(section.get("version", "gemm")).lower()
    if version != "gemm":
        raise _unsupported("version", version, "gemm")
    if section.get("zero_point", True) is not True:
        raise _unsupported("zero_point", section["zero_point"], "true")
    bits = _one_of(section, "bits" if "bits" in section else "w_bit", (4,))
    size = _group_size(section, "group_size" if "group_size" in section else "q_group_size")
    return Scheme(Layout.AWQ, bits, size, "qweight", "scales", "qzeros", "g_idx", 0)


def _compressed(section: Mapping[str, Any]) -> Scheme:
    form = section.get("format")
    if form not in ("pack-quantized", "int-quantized"):
        raise _unsupported("format", form, "pack-quantized or int-quantized")
    for key in ("kv_cache_scheme", "transform_config"):
        if section.get(key):
            raise _unsupported(key, section[key], "none")
    sparsity = section.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise _unsupported("sparsity_config", sparsity, "dense")
    if section.get("quantization_status", "compressed") != "compressed":
        raise _unsupported("quantization_status", section["quantization_status"], "compressed")
    weights = _only_group(section)
    if weights.get("type", "int") != "int" or weights.get("strategy") not in ("channel", "group"):
        raise _unsupported("weights", weights, "int weights with a scale for each channel or group")
    size = _group_size(weights, "group_size") if weights["strategy"] == "group" else 0
    symmetric = weights.get("symmetric", True)
    if form == "int-quantized":
        if symmetric is not True:
            raise _unsupported("symmetric", symmetric, "true, for 8-bit weights")
        bits = _one_of(weights, "num_bits", (8,))
        return Scheme(Layout.BYTES, bits, size, "weight", "weight_scale", None, "weight_g_idx", 128)
    bits = _one_of(weights, "num_bits", (4, 8))
    zeros, zero = (None, 1 << bits - 1) if symmetric is True else ("weight_zero_point", 0)
    return Scheme(
        Layout.ROWS, bits, size, "weight_packed", "weight_scale", zeros, "weight_g_idx", zero, shape="weight_shape"
    )


def _only_group(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the only one of config_groups says of weights, once its activations have been looked at."""
    groups = section.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise _unsupported("config_groups", groups, "one group")
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise _unsupported("config_groups", groups, "a group with weights")
    inputs = group.get("input_activations")
    if inputs and not (
        isinstance(inputs, dict)
        and inputs.get("num_bits", 8) == 8
        and inputs.get("type", "int") == "int"
        and inputs.get("dynamic") is True
    ):
        # Measured anew for each row, as the kernels do in finer groups; other scales would give other answers.
        raise _unsupported("input_activations", inputs, "none, or dynamic 8-bit integers")
    if group.get("output_activations"):
        raise _unsupported("output_activations", group["output_activations"], "none")
    return weights


def _group_size(section: Mapping[str, Any], key: str) -> int:
    """0 for all inputs of a row."""
    size = section.get(key)
    if type(size) is not int or size == 0 or size < -1:
        raise _unsupported(key, size, f"-1, or a multiple of {GROUP}")
    return max(size, 0)


def _one_of(section: Mapping[str, Any], key: str, supported: tuple[int, ...]) -> int:
    value = section.get(key)
    if type(value) is not int or value not in supported:
        raise _unsupported(key, value, " or ".join(map(str, supported)))
    return value


def _unsupported(key: str, value: Any, supported: str) -> ModelFileError:
    return ModelFileError(f"{KEY}: {key!r} is {shown(value)}, which is not supported; supported: {supported}")
