"""What the command line takes from the environment; nothing outside cli/ reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from millpond.config import LOG_LEVELS
from millpond.errors import ConfigError


@dataclass(slots=True)
class Settings:
    """Settings of one call of the command. debug is set by the global option --debug while arguments are read.

    cache_folder None means the user's own cache folder, kernels_folder None one below it. api_keys are those that a
    server of ours wants, None means that the environment has no say; openai_api_key is what the client commands show
    to servers.
    """

    cache_folder: Path | None = None
    kernels_folder: Path | None = None
    log_level: str = "info"
    debug: bool = False
    api_keys: tuple[str, ...] | None = field(default=None, repr=False)
    openai_api_key: str | None = field(default=None, repr=False)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Read MILLPOND_CACHE and NUMBA_CACHE_DIR (folders), MILLPOND_LOG_LEVEL, MILLPOND_API_KEYS and OPENAI_API_KEY;
        an empty value is no value."""
        folder = environment.get("MILLPOND_CACHE", "")
        level = environment.get("MILLPOND_LOG_LEVEL", "") or "info"
        if level.lower() not in LOG_LEVELS:
            raise ConfigError(f"MILLPOND_LOG_LEVEL must be one of {', '.join(LOG_LEVELS)}, got {level!r}")
        kernels = environment.get("NUMBA_CACHE_DIR", "")
        keys = environment.get("MILLPOND_API_KEYS", "")
        return cls(
            _folder(folder) if folder else None,
            Path(kernels) if kernels else None,
            log_level=level.lower(),
            api_keys=tuple(key.strip() for key in keys.split(",")) if keys else None,
            openai_api_key=environment.get("OPENAI_API_KEY", "") or None,
        )


def _folder(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(f"MILLPOND_CACHE is {text!r}, but there is no such user's home folder") from None
