"""Which tensors a model's file must hold, by their names in a GGUF, and their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from millpond.errors import ModelFileError
from millpond.load.dequantize import Tensor
from millpond.load.ggml_types import SUPPORTED
from millpond.load.gguf import GGUFTensor
from millpond.model.config import ModelConfig

BEFORE, AFTER = ("attn_norm", "ffn_norm"), ("post_attention_norm", "post_ffw_norm")
SUMS = ("attn_output_norm", "layer_output_norm")
EMBEDDED = "token_embd_norm"  # an encoder's


@dataclass(frozen=True, slots=True)
class LayerNames:
    """The tensors of one layer that are matrices, in the order in which they are packed; ffns: of each expert, or of
    the only FFN, those of gate and up, and down."""

    qkv: tuple[str, ...]
    out: str
    router: str | None
    ffns: tuple[tuple[tuple[str, ...], str], ...]


def tensor_names(config: ModelConfig, layer: int) -> LayerNames:
    """The names of a layer's matrices; an expert's are behind its number, as split_experts leaves them."""
    block, blk = config.block, f"blk.{layer}"
    experts = [f".{expert}" for expert in range(config.num_experts)] if block.experts else [""]
    gate_up = ("up",) if block.fused or block.encoder else ("gate", "up")
    return LayerNames(
        qkv=tuple(f"{blk}.attn_{name}.weight" for name in (("qkv",) if block.fused else "qkv")),
        out=f"{blk}.attn_output.weight",
        router=f"{blk}.ffn_gate_inp.weight" if block.experts else None,
        ffns=tuple(
            (tuple(f"{blk}.ffn_{name}{which}.weight" for name in gate_up), f"{blk}.ffn_down{which}.weight")
            for which in experts
        ),
    )


def split_experts(tensors: Mapping[str, Tensor], config: ModelConfig) -> Mapping[str, Tensor]:
    """A GGUF has the matrices of all experts in one tensor of three dimensions: each under a name of its own."""
    if not config.block.experts:
        return tensors
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith("_exps.weight")]:
        whole = found.pop(name)
        if len(whole.shape) != 3 or whole.shape[0] != config.num_experts:
            raise ModelFileError(f"tensor {name!r} has shape {whole.shape}, expected {config.num_experts} experts")
        for expert, data in enumerate(whole.data.reshape(config.num_experts, -1)):
            own = name.replace("_exps", f".{expert}")
            found[own] = replace(whole, shape=whole.shape[1:], data=data)
    return found


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape (rows, depth) of every tensor that the model needs."""
    hidden, q, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = {"q": q, "k": kv, "v": kv, "qkv": q + 2 * kv}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (config.vocab_size, hidden)}
    shapes |= _encoder_shapes(config) if config.is_encoder else {"output_norm.weight": (hidden,)}
    for i in range(config.num_layers):
        names, block = tensor_names(config, i), config.block
        shapes |= {f"blk.{i}.{name}.weight": (hidden,) for name in BEFORE if block.norms in ("before", "both")}
        shapes |= {f"blk.{i}.{name}.weight": (hidden,) for name in AFTER if block.norms in ("after", "both")}
        shapes |= {name: (rows[name.split("_")[1].split(".")[0]], hidden) for name in names.qkv}
        shapes[names.out] = (hidden, q)
        if block.qkv_bias:
            shapes |= {f"blk.{i}.attn_{name}.bias": (rows[name],) for name in "qkv"}
        if block.query_key_norm != "none":
            wide = block.query_key_norm == "all heads"
            shapes |= {f"blk.{i}.attn_{name}_norm.weight": (rows[name] if wide else config.head_dim,) for name in "qk"}
        if names.router:
            shapes[names.router] = (config.num_experts, hidden)
        for gate_up, down in names.ffns:
            rows_each = config.ffn_size * (2 if block.fused else 1)
            shapes |= dict.fromkeys(gate_up, (rows_each, hidden))
            shapes[down] = (hidden, config.ffn_size)
    return shapes


def _encoder_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """What an encoder has beside its matrices: tables, norms with biases, and the biases of linear layers."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "position_embd.weight": (config.context_length, hidden),
        "token_types.weight": (config.token_types, hidden),
    }
    layers = [f"blk.{i}." for i in range(config.num_layers)]
    for norm in [EMBEDDED, *(f"{blk}{name}" for blk in layers for name in SUMS)]:
        shapes |= {f"{norm}.{part}": (hidden,) for part in ("weight", "bias")}
    for blk in layers:
        shapes |= {f"{blk}{name}.bias": (hidden,) for name in ("attn_output", "ffn_down")}
        shapes[f"{blk}ffn_up.bias"] = (config.ffn_size,)
    return shapes


def check_tensors(file: str, tensors: Mapping[str, Tensor], config: ModelConfig) -> None:
    """Refuse a file in which a tensor is missing, has another shape, or would have no effect here."""
    shapes = expected_shapes(config)
    ropes = ("freqs", "factors_short", "factors_long")
    optional: dict[str, tuple[int, ...]] = {f"rope_{name}.weight": (config.turned_dims // 2,) for name in ropes}
    optional["output.weight"] = (config.vocab_size, config.hidden_size)
    if config.is_encoder:
        optional = {}
    for name, shape in {**shapes, **optional}.items():
        if name not in tensors:
            if name in optional:
                continue
            raise ModelFileError(f"{file}: tensor {name!r} is missing")
        found = tensors[name].shape
        if found != shape:
            raise ModelFileError(f"{file}: tensor {name!r} has shape {found}, expected {shape}")
        if isinstance(tensors[name], GGUFTensor) and tensors[name].type not in SUPPORTED:
            raise ModelFileError(
                f"{file}: tensor {name!r} is of type {tensors[name].kind}, which without a quantization_config that "
                "says what it means is no type of weights"
            )
    unknown = sorted(set(tensors) - set(shapes) - set(optional))
    if unknown:
        raise ModelFileError(f"{file}: tensor {unknown[0]!r} is not part of a plain {config.architecture} model")
