"""Chat messages as clients send them, checked and brought into the one shape that chat templates understand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from millpond.errors import InvalidRequestError, shown
from millpond.text.checks import check_unicode

ROLES = ("system", "developer", "user", "assistant", "tool")
PART_SEPARATOR = "\n"


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages whose content is a string; the given ones are not changed.

    Content may be a string or a list of {"type": "text", "text": ...} parts, which are joined by a newline. It may
    be null or absent, and is then empty, only where an assistant's message calls tools; the arguments of those
    calls, JSON in a string, become objects. Other keys pass through. InvalidRequestError names `messages[i]...`.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequestError(f"messages must be a list, got {type(messages).__name__}", "messages")
    if not messages:
        raise InvalidRequestError("messages must hold at least one message", "messages")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _message(path: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{path} must be an object, got {type(message).__name__}", path)
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequestError(f"{path}.role must be one of {', '.join(ROLES)}, got {shown(role)}", f"{path}.role")
    result = {key: value for key, value in message.items() if value is not None}
    if "tool_calls" in result:
        result["tool_calls"] = _tool_calls(f"{path}.tool_calls", result["tool_calls"])
    may_be_empty = role == "assistant" and "tool_calls" in result
    result["content"] = _content(f"{path}.content", message.get("content"), may_be_empty)
    return result


def _content(path: str, content: object, may_be_empty: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_be_empty:
        return ""
    if not isinstance(content, list | tuple) or not content:
        got = "null" if content is None else f"an empty {type(content).__name__}" if not content else shown(content)
        raise InvalidRequestError(f"{path} must be a string or a list of text parts, got {got}", path)
    return PART_SEPARATOR.join(_text(f"{path}[{index}]", part) for index, part in enumerate(content))


def _text(path: str, part: object) -> str:
    if not isinstance(part, Mapping):
        raise InvalidRequestError(f"{path} must be an object, got {type(part).__name__}", path)
    if part.get("type") != "text":
        raise InvalidRequestError(f"{path}.type is {shown(part.get('type'))}; only 'text' is supported", f"{path}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{path}.text must be a string, got {type(text).__name__}", f"{path}.text")
    check_unicode(text, f"{path}.text")
    return text


def _tool_calls(path: str, calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple) or not calls:
        raise InvalidRequestError(f"{path} must be a list of at least one call", path)
    return [_tool_call(f"{path}[{index}]", call) for index, call in enumerate(calls)]


def _tool_call(path: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise InvalidRequestError(f"{path} must be an object with a function", path)
    if not isinstance(function.get("name"), str):
        name = f"{path}.function.name"
        raise InvalidRequestError(f"{name} must be a string, got {shown(function.get('name'))}", name)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _arguments(f"{path}.function.arguments", arguments)
    elif arguments is not None and not isinstance(arguments, Mapping):
        name = f"{path}.function.arguments"
        raise InvalidRequestError(f"{name} must be a JSON object in a string, got {shown(arguments)}", name)
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(path: str, text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise InvalidRequestError(f"{path} is not valid JSON: {error}", path) from None
    if not isinstance(arguments, dict):
        raise InvalidRequestError(f"{path} must be a JSON object, got {type(arguments).__name__}", path)
    return arguments
