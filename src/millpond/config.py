"""EngineConfig, ServerConfig and LoadLimits: every setting, validated once; the only place that holds defaults."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, SupportsFloat

from millpond.errors import ConfigError

DTYPES = ("auto", "float32")
KV_DTYPES = ("auto", "int8")
QUANTIZE = ("off", "q8", "q4")
SPECULATIVE = ("off", "ngram")
POLICIES = ("fcfs", "priority", "fair")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
MOST_WEIGHT = 1000
PREFIX_DIR_BYTES = 4 * 2**30
AUTO: Final = "auto"
MOST_BATCHED_TOKENS = 1 << 20  # a step has scratch for so many rows


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Sizes of the pool that are None are filled in by build.py from the memory there is.

    dtype "auto" runs the checkpoint's own types through the fast kernels, "float32" computes everything
    in float32. quantize "q8" or "q4" packs the matrices of a checkpoint that is not quantised in 8 bits, or its layers'
    in 4, as they are loaded. kv_dtype "int8" keeps keys and values in 8 bits, a little more than half of what "auto"
    takes, which is bfloat16. watermark is the share of the pool held back from newcomers, or "auto" for what
    core/reserve.py chooses as the engine runs; watermark_blocks, where given, is that reserve in blocks and wins.
    kv_memory is in bytes; num_blocks wins over it. threads None means the cores that this process may use.
    itl_target, in milliseconds, bounds the prompts in a step to what keeps it about as short while others decode.
    prefix_cache keeps the K/V of full blocks findable until the memory is wanted, for requests that begin alike;
    prefix_dir is a folder that keeps it across restarts, prefix_dir_size bytes of it at most: 4 GiB unless told.
    speculative "ngram" tries up to speculative_tokens guesses a step for each request, looked up in its own text.
    policy says who goes first (core/policies.py); tenant_weights are those that are not 1, for "fair".
    """

    dtype: str = "auto"
    kv_dtype: str = "auto"
    quantize: str = "off"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    itl_target: float | None = None
    block_size: int = 16
    num_blocks: int | None = None
    kv_memory: int | None = None
    watermark: float | Literal["auto"] = 0.01
    watermark_blocks: int | None = None
    threads: int | None = None
    isa: str = "auto"
    prefix_cache: bool = True
    prefix_dir: Path | None = None
    prefix_dir_size: int | None = None
    speculative: str = "off"
    speculative_tokens: int = 8
    policy: str = "fcfs"
    tenant_weights: tuple[tuple[str, float], ...] = ()
    seed: int = 0
    audit: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.kv_dtype not in KV_DTYPES:
            raise ConfigError(f"kv_dtype must be one of {', '.join(KV_DTYPES)}, got {self.kv_dtype!r}")
        if self.quantize not in QUANTIZE:
            raise ConfigError(f"quantize must be one of {', '.join(QUANTIZE)}, got {self.quantize!r}")
        if self.quantize != "off" and self.dtype == "float32":
            raise ConfigError(
                f"quantize {self.quantize} would round what dtype float32 keeps exact; choose one of the two"
            )
        if self.kv_dtype == "int8" and self.dtype == "float32":
            raise ConfigError("kv_dtype int8 would round what dtype float32 keeps exact; choose one of the two")
        if self.speculative not in SPECULATIVE:
            raise ConfigError(f"speculative must be one of {', '.join(SPECULATIVE)}, got {self.speculative!r}")
        self._check_policy()
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "speculative_tokens"):
            _check_int(name, getattr(self, name), 1)
        for name in ("max_model_len", "num_blocks", "kv_memory", "threads", "prefix_dir_size"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 1)
        if self.itl_target is not None:
            _check_above_zero("itl_target", self.itl_target, "milliseconds")
        if self.watermark_blocks is not None:
            _check_int("watermark_blocks", self.watermark_blocks, 0)
        _check_int("seed", self.seed, None)
        for name in ("prefix_cache", "audit"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        self._check_prefix_dir()
        if self.max_num_batched_tokens > MOST_BATCHED_TOKENS:
            raise ConfigError(
                f"max_num_batched_tokens must be at most {MOST_BATCHED_TOKENS}, got {self.max_num_batched_tokens}"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), or some of the requests could never run together"
            )
        if self.watermark != AUTO and not (
            isinstance(self.watermark, SupportsFloat) and 0.0 <= float(self.watermark) < 1.0
        ):
            raise ConfigError(f"watermark must be at least 0 and below 1, or {AUTO}, got {self.watermark!r}")

    def _check_prefix_dir(self) -> None:
        if isinstance(self.prefix_dir, str) and self.prefix_dir.strip():
            object.__setattr__(self, "prefix_dir", Path(self.prefix_dir))
        if self.prefix_dir is not None and not isinstance(self.prefix_dir, Path):
            raise ConfigError(f"prefix_dir must be a path, got {self.prefix_dir!r}")
        if self.prefix_dir is not None and not self.prefix_cache:
            raise ConfigError(
                "prefix_dir keeps what the prefix cache has, but prefix_cache is off: turn it on, or give no prefix_dir"
            )
        if self.prefix_dir_size is not None and self.prefix_dir is None:
            raise ConfigError(
                "prefix_dir_size bounds a folder that is not named: name one with prefix_dir, or leave it out"
            )

    @property
    def chooses_reserve(self) -> bool:
        """Whether the reserve is chosen as the engine runs."""
        return self.watermark == AUTO and self.watermark_blocks is None

    def _check_policy(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        if self.tenant_weights and self.policy != "fair":
            raise ConfigError(
                f"tenant_weights count with the policy fair, and it is {self.policy}: set policy to fair, or leave "
                "tenant_weights out"
            )
        for tenant, weight in self.tenant_weights:
            is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not is_number or not 1 / MOST_WEIGHT <= weight <= MOST_WEIGHT:
                raise ConfigError(
                    f"tenant_weights must be from {1 / MOST_WEIGHT:g} to {MOST_WEIGHT}, got {weight!r} for {tenant!r}"
                )

    @property
    def kv_type(self) -> str:
        """What keys and values are kept in."""
        if self.kv_dtype == "int8":
            return "int8"
        return "float32" if self.dtype == "float32" else "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the HTTP server around an engine.

    Without api_keys every route is open. cors_origins are those of pages that may ask from a browser, "*" for all.
    tls_key None means that the key is in tls_cert. max_body_bytes bounds a request's body. drain_timeout is how many
    seconds running answers have to end by themselves after a stop signal. log_prompts puts the bodies of requests into
    the log. A request that takes slow_request seconds says in its log line what it waited for. otlp_endpoint is the URL
    of a collector of traces. strict refuses fields of a request that nobody knows, which otherwise are named in the
    header X-Millpond-Warning.
    """

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    cors_origins: tuple[str, ...] = ()
    tls_cert: Path | None = None
    tls_key: Path | None = None
    max_body_bytes: int = 32 * 2**20
    drain_timeout: float = 30.0
    log_level: str = "info"
    log_prompts: bool = False
    slow_request: float = 10.0
    otlp_endpoint: str | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        for number, key in enumerate(self.api_keys, 1):
            # The key itself stays out of the message: it would end up in a log.
            if not re.fullmatch(r"[!-~]+", key):
                raise ConfigError(
                    f"API key {number} of {len(self.api_keys)} is empty, or not of visible ASCII characters"
                )
        for origin in self.cors_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+", origin):
                raise ConfigError(f"a CORS origin is '*' or scheme://host[:port], got {origin!r}")
        if self.tls_key is not None and self.tls_cert is None:
            raise ConfigError("a TLS key is of no use without its certificate; give tls_cert too")
        _check_int("max_body_bytes", self.max_body_bytes, 1)
        for name in ("drain_timeout", "slow_request"):
            seconds = getattr(self, name)
            if not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
                raise ConfigError(f"{name} must be at least 0 seconds, got {seconds!r}")
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(f"log_level must be one of {', '.join(LOG_LEVELS)}, got {self.log_level!r}")
        if self.otlp_endpoint is not None and not re.fullmatch(r"https?://[^/\s]+\S*", self.otlp_endpoint):
            raise ConfigError(f"otlp_endpoint must be an http or https URL, got {self.otlp_endpoint!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLimits:
    """What a server takes on. Times are seconds; None is no limit of its own.

    max_waiting_requests bounds the requests that wait beside those that have a slot, max_waiting_tokens the tokens of
    their prompts. request_timeout bounds a request in all, and is the most that it may ask for itself; queue_timeout
    bounds its wait for the first step. A step that takes longer than stuck_after makes the engine unhealthy. Once
    max_unread_outputs of one request wait for a client that does not read, its answer is ended.
    """

    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 262_144
    request_timeout: float | None = None
    queue_timeout: float | None = None
    stuck_after: float = 60.0
    max_unread_outputs: int = 1024

    def __post_init__(self) -> None:
        _check_int("max_waiting_requests", self.max_waiting_requests, 0)
        _check_int("max_waiting_tokens", self.max_waiting_tokens, 0)
        _check_int("max_unread_outputs", self.max_unread_outputs, 1)
        for name in ("request_timeout", "queue_timeout", "stuck_after"):
            if (seconds := getattr(self, name)) is not None:
                _check_above_zero(name, seconds, "seconds")


def _check_above_zero(name: str, value: object, unit: str) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0.0 < value < math.inf:  # type: ignore[operator]
        raise ConfigError(f"{name} must be a number of {unit} above 0, got {value!r}")


def _check_int(name: str, value: object, low: int | None) -> None:
    bound = "" if low is None else f" of at least {low}"
    if not isinstance(value, int) or isinstance(value, bool) or (low is not None and value < low):
        raise ConfigError(f"{name} must be an integer{bound}, got {value!r}")
