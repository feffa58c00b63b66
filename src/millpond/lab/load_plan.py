"""How a workload is sent to a server that speaks the OpenAI API."""

from __future__ import annotations

import math
from dataclasses import dataclass

from millpond.errors import ConfigError

ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
PROMPTS = ("auto", "ids", "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """model None is the first that the server names, concurrency None is by the clock, timeout in seconds a request.

    shared_prefix tokens stand in front of every prompt, beside its own: those of one of prefix_groups, which is drawn.
    Raises ConfigError naming the command's option.
    """

    model: str | None = None
    endpoint: str = "completions"
    prompts: str = "auto"
    ignore_eos: bool = False
    concurrency: int | None = None
    shared_prefix: int = 0
    prefix_groups: int = 1
    seed: int = 0
    timeout: float = 600.0

    def __post_init__(self) -> None:
        for option, value, choices in (("endpoint", self.endpoint, tuple(ROUTES)), ("prompts", self.prompts, PROMPTS)):
            if value not in choices:
                raise ConfigError(f"--{option} must be one of {', '.join(choices)}, got {value!r}")
        if self.endpoint == "chat" and self.prompts == "ids":
            raise ConfigError("a chat has no token ids: take --prompts text, or --endpoint completions")
        if not 0.0 < self.timeout < math.inf:
            raise ConfigError(f"--timeout must be above 0 seconds and finite, got {self.timeout:g}")
        if self.prefix_groups > 1 and not self.shared_prefix:
            raise ConfigError(f"{self.prefix_groups} groups (--prefix-groups) of no tokens: give a --shared-prefix")

    @property
    def route(self) -> str:
        return ROUTES[self.endpoint]
