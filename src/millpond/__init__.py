"""millpond: a language model engine and OpenAI-compatible server. Importing it does not import numba."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from millpond.version import __version__

if TYPE_CHECKING:
    from millpond.config import EngineConfig
    from millpond.core.sampling import SamplingParams
    from millpond.engine.engine import Engine
    from millpond.llm import LLM

__all__ = ["LLM", "Engine", "EngineConfig", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "millpond.llm",
    "Engine": "millpond.engine.engine",
    "EngineConfig": "millpond.config",
    "SamplingParams": "millpond.core.sampling",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for, so that `import millpond` stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module 'millpond' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
