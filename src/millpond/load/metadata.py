"""Typed access to the metadata of a model file: a key that is missing, of another kind or out of range is an error
that names the key, what was expected and what is there."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, overload

from millpond.errors import ModelFileError

Metadata = Mapping[str, Any]


def require_int(metadata: Metadata, key: str, *, low: int | None = None, high: int | None = None) -> int:
    """The integer at `key`, with low <= value <= high where given."""
    value = _require(metadata, key)
    if type(value) is not int:
        raise _mismatch(key, "an integer", value)
    if low is not None and value < low:
        raise ModelFileError(f"metadata {key!r} must be at least {low}, got {value}")
    if high is not None and value > high:
        raise ModelFileError(f"metadata {key!r} must be at most {high}, got {value}")
    return value


@overload
def optional_int(
    metadata: Metadata, key: str, default: int, *, low: int | None = ..., high: int | None = ...
) -> int: ...
@overload
def optional_int(
    metadata: Metadata, key: str, default: None = ..., *, low: int | None = ..., high: int | None = ...
) -> int | None: ...
def optional_int(
    metadata: Metadata, key: str, default: int | None = None, *, low: int | None = None, high: int | None = None
) -> int | None:
    """As require_int, and `default` where the key is not there."""
    return require_int(metadata, key, low=low, high=high) if key in metadata else default


def require_float(metadata: Metadata, key: str, *, above: float | None = None) -> float:
    """The finite number at `key`, as a float; greater than `above` where given. An integer is taken as a number."""
    value = _require(metadata, key)
    if type(value) not in (int, float):
        raise _mismatch(key, "a number", value)
    if not isfinite(value):
        raise ModelFileError(f"metadata {key!r} must be finite, got {value}")
    if above is not None and value <= above:
        raise ModelFileError(f"metadata {key!r} must be above {above:g}, got {value:g}")
    return float(value)


@overload
def optional_float(metadata: Metadata, key: str, default: float, *, above: float | None = ...) -> float: ...
@overload
def optional_float(metadata: Metadata, key: str, default: None = ..., *, above: float | None = ...) -> float | None: ...
def optional_float(
    metadata: Metadata, key: str, default: float | None = None, *, above: float | None = None
) -> float | None:
    """As require_float, and `default` where the key is not there."""
    return require_float(metadata, key, above=above) if key in metadata else default


def require_str(metadata: Metadata, key: str) -> str:
    """The text at `key`."""
    value = _require(metadata, key)
    if not isinstance(value, str):
        raise _mismatch(key, "a string", value)
    return value


def optional_str(metadata: Metadata, key: str) -> str | None:
    """As require_str, and None where the key is not there."""
    return require_str(metadata, key) if key in metadata else None


def _require(metadata: Metadata, key: str) -> Any:  # its callers are what gives it a type
    if key not in metadata:
        raise ModelFileError(f"the metadata has no {key!r}, which this kind of model needs")
    return metadata[key]


def _mismatch(key: str, expected: str, value: object) -> ModelFileError:
    got = f"an array of {len(value)}" if isinstance(value, list) else f"{type(value).__name__} {str(value)[:80]!r}"
    return ModelFileError(f"metadata {key!r} must be {expected}, got {got}")
