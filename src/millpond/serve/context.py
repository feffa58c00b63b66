"""What the routes share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from millpond.engine.async_engine import AsyncEngine
from millpond.errors import ModelNotFoundError
from millpond.serve.drain import Drain
from millpond.serve.intake import Intake


@dataclass(frozen=True, slots=True)
class ServeContext:
    """model_names are served names of the one model; the first is the one that answers carry."""

    engine: AsyncEngine
    model_names: tuple[str, ...]
    intake: Intake
    now: Callable[[], float]
    new_id: Callable[[], str]
    started: int
    drain: Drain

    def model_name(self, wanted: str | None) -> str:
        """The served name that a request asks for. Raises ModelNotFoundError."""
        if wanted is None:
            return self.model_names[0]
        if wanted not in self.model_names:
            served = ", ".join(self.model_names)
            raise ModelNotFoundError(f"there is no model {wanted[:100]!r} here; this server has {served}")
        return wanted
