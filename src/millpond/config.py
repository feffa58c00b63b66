"""EngineConfig: every setting of the engine, validated once; the only place that holds defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import SupportsFloat

from millpond.errors import ConfigError

DTYPES = ("auto", "float32")
KV_DTYPES = ("auto", "int8")
SPECULATIVE = ("off", "ngram")
MOST_BATCHED_TOKENS = 1 << 20  # a step has scratch for so many rows


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Sizes of the pool that are None are filled in by build.py from the memory there is.

    dtype "auto" runs the checkpoint's own types through the fast kernels, "float32" computes everything
    in float32. kv_dtype "int8" keeps keys and values in 8 bits, a little more than half of what "auto" takes, which is
    bfloat16. watermark is the share of the pool held back from newcomers; watermark_blocks, where given, is that
    reserve in blocks and wins. kv_memory is in bytes; num_blocks wins over it. threads None means the cores that this
    process may use.
    prefix_cache keeps the K/V of full blocks findable until the memory is wanted, for requests that begin alike.
    speculative "ngram" tries up to speculative_tokens guesses a step for each request, looked up in its own text.
    """

    dtype: str = "auto"
    kv_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    block_size: int = 16
    num_blocks: int | None = None
    kv_memory: int | None = None
    watermark: float = 0.01
    watermark_blocks: int | None = None
    threads: int | None = None
    isa: str = "auto"
    prefix_cache: bool = True
    speculative: str = "off"
    speculative_tokens: int = 8
    seed: int = 0
    audit: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.kv_dtype not in KV_DTYPES:
            raise ConfigError(f"kv_dtype must be one of {', '.join(KV_DTYPES)}, got {self.kv_dtype!r}")
        if self.kv_dtype == "int8" and self.dtype == "float32":
            raise ConfigError("kv_dtype int8 would round what dtype float32 keeps exact; choose one of the two")
        if self.speculative not in SPECULATIVE:
            raise ConfigError(f"speculative must be one of {', '.join(SPECULATIVE)}, got {self.speculative!r}")
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "speculative_tokens"):
            _check_int(name, getattr(self, name), 1)
        for name in ("max_model_len", "num_blocks", "kv_memory", "threads"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 1)
        if self.watermark_blocks is not None:
            _check_int("watermark_blocks", self.watermark_blocks, 0)
        _check_int("seed", self.seed, None)
        for name in ("prefix_cache", "audit"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.max_num_batched_tokens > MOST_BATCHED_TOKENS:
            raise ConfigError(
                f"max_num_batched_tokens must be at most {MOST_BATCHED_TOKENS}, got {self.max_num_batched_tokens}"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), or some of the requests could never run together"
            )
        if not isinstance(self.watermark, SupportsFloat) or not 0.0 <= float(self.watermark) < 1.0:
            raise ConfigError(f"watermark must be at least 0 and below 1, got {self.watermark!r}")

    @property
    def kv_type(self) -> str:
        """What keys and values are kept in."""
        if self.kv_dtype == "int8":
            return "int8"
        return "float32" if self.dtype == "float32" else "bfloat16"


def _check_int(name: str, value: object, low: int | None) -> None:
    bound = "" if low is None else f" of at least {low}"
    if not isinstance(value, int) or isinstance(value, bool) or (low is not None and value < low):
        raise ConfigError(f"{name} must be an integer{bound}, got {value!r}")
