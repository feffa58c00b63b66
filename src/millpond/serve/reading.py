"""Objects in the lists of a body, read one by one so that an error says where it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from millpond.errors import InvalidRequestError, shown
from millpond.serve.errors import validation_body
from millpond.serve.protocol import MAX_MESSAGES, Body

B = TypeVar("B", bound=Body)


def read_object(model: type[B], value: Any, path: str) -> B:
    """A model's object at a path of the body. Raises InvalidRequestError naming the field by its whole path."""
    try:
        return model.model_validate(value)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{path}.{error}", f"{path}.{error.param}") from None
    except ValidationError as error:
        first = error.errors()[0]
        described = validation_body([{**first, "loc": ("body", path, *first["loc"])}])["error"]
        raise InvalidRequestError(described["message"], described["param"]) from None


def read_typed(models: Mapping[str, type[B]], value: Any, path: str) -> B:
    """An object of the model that its type names; there are few, and others are refused by their own name."""
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{path} must be an object, got {shown(value)}", path)
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in models:
        known = " or ".join(map(repr, models))
        raise InvalidRequestError(f"{path}.type is {shown(kind)}; only {known} is supported here", f"{path}.type")
    return read_object(models[kind], value, path)


def read_content(models: Mapping[str, type[B]], content: Any, path: str) -> str | list[B]:
    """A text, or a list of at least one part."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        got = "null" if content is None else shown(content)
        raise InvalidRequestError(f"{path} must be a string or a list of at least one part, got {got}", path)
    check_count(content, path)
    return [read_typed(models, part, f"{path}[{index}]") for index, part in enumerate(content)]


def check_count(items: list[Any], path: str) -> None:
    if len(items) > MAX_MESSAGES:
        raise InvalidRequestError(f"{path} may hold at most {MAX_MESSAGES} items, got {len(items)}", path)
