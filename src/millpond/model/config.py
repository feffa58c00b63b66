"""A model's figures, whatever file they were read from (figures.py reads them)."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.errors import ModelFileError
from millpond.model.architecture import LLAMA_BLOCK, Block
from millpond.model.rope import Rope

NO_ROPE = -1


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Figures of one model. vocab_size counts the embedding's rows.

    ropes: its rotations; rope_of: which of them each layer has, or NO_ROPE; empty where all have the first.
    rotary_dims: of a head, how many dimensions turn; 0 for all. windows: how many positions, its own among them, a
    token of each layer attends to, 0 for all before it; empty where all layers do.
    attention_scale: what scores are multiplied by, 0 for 1 / sqrt(head_dim). score_cap, logit_cap: c in
    c * tanh(x / c), 0 for none. embedding_scale, residual_scale: factors of the embedding and of what a block adds;
    logit_scale divides the logits. num_experts: of each layer, 0 where the FFN is one; ffn_size is then that of each.
    interleaved: the file has the rows of q and k with the halves that turn together in turns. token_types: the rows of
    an encoder's table of them, of which every token has the first.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    context_length: int
    norm_epsilon: float
    ropes: tuple[Rope, ...] = (Rope(),)
    rope_of: tuple[int, ...] = ()
    rotary_dims: int = 0
    windows: tuple[int, ...] = ()
    block: Block = LLAMA_BLOCK
    attention_scale: float = 0.0
    score_cap: float = 0.0
    logit_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    num_experts: int = 0
    experts_used: int = 0
    normalise_experts: bool = False
    interleaved: bool = False
    token_types: int = 0

    @property
    def is_encoder(self) -> bool:
        """Whether every token of a prompt sees the whole prompt, and there is nothing to generate with."""
        return self.block.encoder

    @property
    def heads_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def turned_dims(self) -> int:
        """Of a head, how many dimensions turn."""
        return self.rotary_dims or self.head_dim

    @property
    def has_windows(self) -> bool:
        return any(self.windows)

    @property
    def has_branches(self) -> bool:
        """Whether what a block gives is changed before it is added."""
        return self.block.norms in ("after", "both") or self.residual_scale != 1 or self.num_experts > 0

    def check(self) -> None:
        """Raises ModelFileError for figures that fit no kernel or not each other."""
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ModelFileError(f"{self.num_heads} heads cannot share {self.num_kv_heads} K/V heads")
        if self.head_dim < 16 or self.head_dim % 16:
            raise ModelFileError(f"head_dim must be a multiple of 16, got {self.head_dim}")
        for name in ("hidden_size", "ffn_size"):
            if getattr(self, name) % 32:
                raise ModelFileError(f"{name} must be a multiple of 32, got {getattr(self, name)}")
        if self.num_heads * self.head_dim % 32:
            raise ModelFileError(f"heads * head_dim must be a multiple of 32, got {self.num_heads * self.head_dim}")
        if self.turned_dims % 2 or not 0 < self.turned_dims <= self.head_dim:
            raise ModelFileError(f"an even number of 2 to {self.head_dim} dimensions can turn, got {self.turned_dims}")
        for rope in self.ropes:
            for name in ("short", "long"):
                found, expected = len(getattr(rope, name)), self.turned_dims // 2
                if rope.scaling == "longrope" and found != expected:
                    raise ModelFileError(f"longrope's {name} factors must be {expected}, got {found}")
        if self.block.experts and not 0 < self.experts_used <= self.num_experts:
            raise ModelFileError(f"{self.experts_used} of {self.num_experts} experts cannot be used for a token")
