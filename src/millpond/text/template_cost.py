"""Whether a chat template takes no longer than its messages are long, by what it is made of."""

from __future__ import annotations

from jinja2 import nodes

from millpond.text.template_sandbox import Sandbox

# All that a cheap template may hold beside plain texts, names, conditions and single loops.
_METHODS = frozenset({
    "endswith", "get", "items", "keys", "lstrip", "removeprefix", "removesuffix", "rstrip", "split", "splitlines",
    "startswith", "strip", "values",
})  # fmt: skip
_FUNCTIONS = frozenset({"namespace", "raise_exception", "strftime_now"})
_FILTERS = frozenset({
    "capitalize", "count", "d", "default", "first", "items", "last", "length", "list", "lower", "map", "reject",
    "rejectattr", "select", "selectattr", "string", "tojson", "trim", "upper",
})  # fmt: skip
_COSTLY = (
    nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.Block, nodes.Mul, nodes.Pow, nodes.Include, nodes.Import,
    nodes.FromImport, nodes.Extends,
)  # fmt: skip
# What a loop could make longer with every turn, where it carries the result to the next.
_GROWING = (nodes.Concat, nodes.List, nodes.Tuple, nodes.Dict, nodes.Mod)
_NOT_GROWING = frozenset({"count", "d", "default", "first", "last", "length", "trim"})


def is_cheap(source: str) -> bool:
    """An allow-list: no loop in a loop, nothing that calls itself, no text that a loop makes longer."""
    tree = Sandbox().parse(source)
    if any(tree.find(kind) for kind in _COSTLY):
        return False
    if not all(map(_is_cheap_call, tree.find_all(nodes.Call))):
        return False
    if not all(map(_is_cheap_filter, tree.find_all(nodes.Filter))):
        return False
    if not all(map(_is_number, (each.right for each in tree.find_all(nodes.Mod)))):
        return False
    return not any(loop.recursive or _has_loop(loop) or _grows(loop) for loop in tree.find_all(nodes.For))


def _is_cheap_call(call: nodes.Call) -> bool:
    if call.dyn_args or call.dyn_kwargs:
        return False
    if isinstance(call.node, nodes.Getattr):
        return call.node.attr in _METHODS
    return isinstance(call.node, nodes.Name) and call.node.name in _FUNCTIONS


def _is_cheap_filter(each: nodes.Filter) -> bool:
    if each.name == "map" and each.args:  # map(name of a filter, its arguments)
        named = each.args[0]
        return isinstance(named, nodes.Const) and named.value in _FILTERS
    if each.name == "tojson":
        return all(isinstance(given, nodes.Const) for given in [*each.args, *(pair.value for pair in each.kwargs)])
    return each.name in _FILTERS and not each.dyn_args and not each.dyn_kwargs


def _has_loop(loop: nodes.For) -> bool:
    return any(part.find(nodes.For) or isinstance(part, nodes.For) for part in [*loop.body, *loop.else_])


def _grows(loop: nodes.For) -> bool:
    carried = [each for each in loop.find_all(nodes.Assign) if isinstance(each.target, nodes.NSRef)]
    if any(isinstance(each.target, nodes.NSRef) for each in loop.find_all(nodes.AssignBlock)):
        return True
    return any(_is_growing(each.node) for each in carried)


def _is_growing(value: nodes.Node) -> bool:
    parts = [value, *value.find_all(nodes.Expr)]
    sums = [each for each in parts if isinstance(each, nodes.Add)]
    if any(isinstance(each, _GROWING) or (isinstance(each, nodes.Call) and _makes(each)) for each in parts):
        return True
    if any(each.name not in _NOT_GROWING for each in parts if isinstance(each, nodes.Filter)):
        return True
    return not all(_is_number(each.left) or _is_number(each.right) for each in sums)


def _makes(call: nodes.Call) -> bool:
    """Whether a call, of the cheap ones, makes something around what it is given."""
    return isinstance(call.node, nodes.Name)


def _is_number(node: nodes.Expr) -> bool:
    return isinstance(node, nodes.Const) and isinstance(node.value, int | float)
