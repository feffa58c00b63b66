"""What completions and chat do alike around the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from millpond.engine.async_engine import AsyncEngine
from millpond.engine.call import EngineRequest
from millpond.errors import InvalidRequestError


def admissible(engine: AsyncEngine, request: EngineRequest) -> None:
    """All that can be checked before the status line: a dead engine, and what the request asks for."""
    engine.check_alive()
    engine.limits.check(request.prompt_token_ids, request.sampling)


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Let an InvalidRequestError name the field as the caller wrote it and not as the engine calls it."""
    try:
        yield
    except InvalidRequestError as error:
        param = names.get(error.param or "")
        if param is None:
            raise
        raise InvalidRequestError(str(error), param) from error


def with_usage(chunk: dict[str, Any], include_usage: bool) -> dict[str, Any]:
    """Where totals were asked for, every chunk but the last says that it carries none."""
    return {**chunk, "usage": None} if include_usage else chunk
