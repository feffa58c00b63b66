"""A chat template that a user gives in place of the model's own."""

from __future__ import annotations

import os
from pathlib import Path

from millpond.errors import ConfigError, shown

MAX_BYTES = 4 << 20
_SIGNS = ("{{", "{%")  # without one of them it would say the same whatever is asked


def read_template(given: str | os.PathLike[str]) -> str:
    """The template itself, or what is in the file of that name. Raises ConfigError where it is neither."""
    if not isinstance(given, str | os.PathLike):
        raise ConfigError(f"chat_template must be a template or the name of its file, got {shown(given)}")
    given = os.fspath(given)
    if any(sign in given for sign in _SIGNS):
        return given
    path = Path(given)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        text = raw.decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise ConfigError(
            f"the chat template {given[:100]!r} has neither {{{{ nor {{%, and is no file that can be read: {reason}"
        ) from error
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"the chat template {path.name} is longer than the {MAX_BYTES} bytes that it may have")
    if not any(sign in text for sign in _SIGNS):
        raise ConfigError(f"the file {path.name} is no chat template: it has neither {{{{ nor {{%")
    return text
