"""What an architecture says of itself: its names in files, how its layer differs from Llama's, where its figures are.

A Llama layer is hidden += out(attend(rotate(qkv(norm(hidden))))), then hidden += down(silu(gate) * up) of norm(hidden).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from millpond.model.fields import Fields

if TYPE_CHECKING:
    from millpond.model.config import ModelConfig

# The names of tensors: a GGUF's, which are ours, and Hugging Face's. Those of a layer are behind "blk.3." and
# "layers.3."; Hugging Face's of the inner model may have "model." in front.
WHOLE_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class Block:
    """How a layer differs from Llama's.

    norms: of what attention and the FFN take ("before"), of what they give ("after"), of both, or of their sums with
    the hidden state ("sums", LayerNorms with biases, and one of the embedding).
    qkv_bias: q, k and v have biases. query_key_norm: of each head's queries and keys, or of all heads' at once, before
    they are rotated. activation: of the gate. fused: q, k and v are one tensor, and so are gate and up. experts: the
    FFN is a choice among several. encoder: BERT's layer, in which every token sees the whole prompt; its FFN has no
    gate, all its linear layers have biases, and positions are rows of a table that are added to the embedding.
    """

    norms: Literal["before", "after", "both", "sums"] = "before"
    qkv_bias: bool = False
    query_key_norm: Literal["none", "each head", "all heads"] = "none"
    activation: Literal["silu", "gelu", "exact gelu"] = "silu"
    fused: bool = False
    experts: bool = False
    encoder: bool = False


LLAMA_BLOCK = Block()


def _nothing(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture. title: for people; gguf, hugging_face: its general.architecture and its model_type.

    figures: what else the file says of it, as changes to a config whose sizes and rotation are read.
    only: keys of config.json and the values that are supported, the first where the key is missing.
    interleaved: a GGUF holds the rows of q and k with the two halves that turn together in turns.
    norm_shift: what is added to a norm's weights of Hugging Face (a GGUF has the sum).
    layer_names: where Hugging Face's names of a layer's tensors are others than Llama's; whole_names: its names of
    those that are not a layer's; outer, layers: what may be in front of all names, and is in front of a layer's number.
    idle: what Hugging Face's names of tensors begin with that have no part in what is computed here.
    """

    title: str
    gguf: str | None
    hugging_face: str | None
    block: Block = LLAMA_BLOCK
    figures: Callable[[Fields, ModelConfig], dict[str, Any]] = _nothing
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: MappingProxyType({}))
    interleaved: bool = False
    norm_shift: float = 0.0
    layer_names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    whole_names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType(WHOLE_NAMES))
    outer: str = "model."
    layers: str = "layers"
    idle: tuple[str, ...] = ()

    def hugging_face_names(self) -> dict[str, str]:
        """Our name of a layer's tensor -> Hugging Face's."""
        return {**LAYER_NAMES, **self.layer_names}


SILU = {"hidden_act": ("silu",)}
NO_BIAS = {"attention_bias": (False,), "mlp_bias": (False,)}


def windows_of(fields: Fields, config: ModelConfig, slides: Callable[[int], bool]) -> tuple[int, ...]:
    """Each layer's window, 0 for all positions. slides: which layers have one where the file has no list of them."""
    size = fields.integer("window", 0, low=0)
    kinds = fields.value("layer_types")
    if kinds is None:
        return tuple(size if slides(i) else 0 for i in range(config.num_layers))
    known = {"full_attention": 0, "sliding_attention": size}
    if not isinstance(kinds, list) or len(kinds) != config.num_layers or any(each not in known for each in kinds):
        raise fields.error("layer_types", kinds, f"a list of {config.num_layers}, each {' or '.join(known)}")
    if "sliding_attention" in kinds and not size:
        raise fields.error("window", size, "the window of the layers that have one, at least 1")
    return tuple(known[each] for each in kinds)
