"""What a text must be before it is a prompt."""

from __future__ import annotations

from millpond.errors import InvalidRequestError


def check_unicode(text: str, param: str | None = None) -> None:
    """Raise InvalidRequestError, naming the place, for half of a surrogate pair, which JSON lets through."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{param or 'the text'} holds half of a surrogate pair (U+{ord(text[error.start]):04X} at character "
            f"{error.start}), which is not valid Unicode",
            param,
        ) from None


def check_prompt_text(text: str, param: str) -> None:
    """Raise InvalidRequestError for text that no one means as a prompt: what is not Unicode, and U+0000."""
    check_unicode(text, param)
    place = text.find("\0")
    if place >= 0:
        raise InvalidRequestError(f"{param} holds U+0000 at character {place}; leave it out", param)
