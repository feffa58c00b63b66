"""The filters and tests of chat templates, charged for what they are given and what they make."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import pass_context
from jinja2.runtime import Context, str_join

from millpond.text.marks import ESCAPED
from millpond.text.template_budget import (
    COPIED,
    ITEM,
    MAX_WIDTH,
    WORKED,
    Budget,
    Refusal,
    flat_size,
    formatted_size,
    replaced_size,
)

BUDGET = "_budget"  # the variable of a rendering that holds its Budget

# Nothing for prompts: they write HTML or for people, some in quadratic time.
_DROPPED = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
# As quick with a long value as with a short one.
_FREE = ("abs", "attr", "count", "d", "default", "first", "items", "last", "length", "random")
_LAZY = ("map", "reject", "rejectattr", "select", "selectattr")
_QUICK = ("capitalize", "join", "list", "lower", "replace", "reverse", "safe", "string", "trim", "upper")
_COMPARING = (
    "in", "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan", "<=", "le",
)  # fmt: skip


def charge_filters(filters: dict[str, Callable[..., Any]]) -> None:
    """Put a charged filter in the place of each that may take long, and drop those that no prompt needs."""
    for name in _DROPPED:
        del filters[name]
    filters["tojson"] = _to_json
    for name in filters.keys() - set(_FREE):
        filters[name] = _charged(name, filters[name])
    filters.update(_counted=counted, _concatenated=concatenated, _made=made, _looked_into=looked_into)


def charge_tests(tests: dict[str, Callable[..., Any]]) -> None:
    """The same for the tests that look into values. A test of a test's or a filter's name is none of them."""

    def charged(test: Callable[..., Any]) -> Callable[..., Any]:
        @pass_context
        def run(context: Context, *args: Any) -> Any:
            budget: Budget = context[BUDGET]
            budget.measured(args[1])  # to compare them takes no longer than the shorter one is long
            return test(*args)

        return run

    for name in _COMPARING:
        tests[name] = charged(tests[name])


def _charged(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    wants = getattr(run, "jinja_pass_arg", None)
    rate = COPIED if name in _QUICK else WORKED

    @pass_context
    def charged(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget: Budget = context[BUDGET]
        if name in _LAZY:
            value = counted(context, value) if value else value
        else:
            value = list(counted(context, value)) if isinstance(value, Iterator) else value
            size = budget.measured([value, *args, *kwargs.values()], rate)
            budget.charge(_GROWTH[name](budget, size, value, *args, **kwargs) if name in _GROWTH else 0)
        given: dict[str | None, list[Any]] = {None: [], "context": [context], "eval_context": [context.eval_ctx]}
        first = given.get(wants.name if wants else None, [context.environment])
        result = run(*first, value, *args, **kwargs)
        if isinstance(result, Iterator):
            return result if name in _LAZY else counted(context, result)
        budget.charge(flat_size(result))
        return result

    return charged


@pass_context
def counted(context: Context, items: Iterable[Any], num_literal: int = 0) -> Iterator[Any]:
    """The items, each a step. num_literal are the characters of the template that each writes."""
    budget: Budget = context[BUDGET]
    for item in items:
        budget.take(1 + num_literal // COPIED)
        yield item


@pass_context
def concatenated(context: Context, values: tuple[Any, ...]) -> str:
    budget: Budget = context[BUDGET]
    budget.check(budget.measured(values))
    return str_join(values)


@pass_context
def made(context: Context, value: Any) -> Any:
    """A value that has just been copied."""
    context[BUDGET].charge(flat_size(value))
    return value


@pass_context
def looked_into(context: Context, value: Any) -> Any:
    """A value that is about to be compared, written or hashed, with all that it holds."""
    context[BUDGET].measured(value)
    return value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes < and > for HTML, which a model was never trained on."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return ESCAPED.sub(lambda match: chr(int(match[1], 16)), text) if ensure_ascii else text


def _width(width: Any) -> int:
    """How much a width, a number or the text itself, adds. Refusal for one that is too large."""
    size = len(width) if isinstance(width, str) else width if isinstance(width, int) else 0
    if abs(size) > MAX_WIDTH:
        raise Refusal(f"the chat template formats to a width of {size}, more than {MAX_WIDTH}")
    return max(size, 0)


def _center(budget: Budget, size: int, value: Any, width: Any = 80) -> int:
    return _width(width)


def _indent(budget: Budget, size: int, value: Any, width: Any = 4, *args: Any, **kwargs: Any) -> int:
    return (str(value).count("\n") + 1) * _width(width)


def _replace(budget: Budget, size: int, value: Any, old: Any, new: Any, *args: Any, **kwargs: Any) -> int:
    return replaced_size(value, old, new)


def _join(budget: Budget, size: int, value: Any, d: Any = "", *args: Any, **kwargs: Any) -> int:
    return flat_size(value) // ITEM * budget.measured(d) if not isinstance(value, str) else len(value) * len(str(d))


def _format(budget: Budget, size: int, value: Any, *args: Any, **kwargs: Any) -> int:
    return formatted_size(str(value), kwargs or args, budget)


def _json(budget: Budget, size: int, value: Any, *args: Any, indent: Any = None, **kwargs: Any) -> int:
    return size * _width(args[1] if len(args) > 1 else indent)


def _lists(budget: Budget, size: int, value: Any, count: Any, *args: Any, **kwargs: Any) -> int:
    return ITEM * _width(count)


def _round(budget: Budget, size: int, value: Any, precision: Any = 0, *args: Any, **kwargs: Any) -> int:
    return _width(precision)


def _sum(budget: Budget, size: int, value: Any, attribute: Any = None, start: Any = 0) -> int:
    if not isinstance(start, int | float):  # each list that is added copies all before it
        budget.take(size * len(value) // COPIED)
    return 0


# What a filter makes beyond the length of what it is given, at the most.
_GROWTH: dict[str, Callable[..., int]] = {
    "center": _center, "indent": _indent, "replace": _replace, "join": _join, "format": _format,
    "tojson": _json, "batch": _lists, "slice": _lists, "round": _round, "sum": _sum,
}  # fmt: skip
