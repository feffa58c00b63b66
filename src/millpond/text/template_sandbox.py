"""The sandbox of chat templates: jinja2's, with nothing in it that takes long without being charged for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.visitor import NodeTransformer

from millpond.text.template_budget import (
    MAX_WIDTH,
    Budget,
    Refusal,
    binop_size,
    check_width,
    flat_size,
    replaced_size,
)
from millpond.text.template_filters import BUDGET, charge_filters, charge_tests, counted

_DROPPED_GLOBALS = ("lipsum", "cycler", "joiner")
_WIDTHS = ("center", "ljust", "rjust", "zfill", "to_bytes", "expandtabs")


class Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox; a rendering's variables must hold its Budget as BUDGET. No constant is calculated ahead."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            finalize=_written,
            optimized=False,
        )
        for name in _DROPPED_GLOBALS:
            del self.globals[name]
        charge_filters(self.filters)
        charge_tests(cast(dict[str, Callable[..., Any]], self.tests))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget: Budget = context[BUDGET]
        budget.charge(binop_size(operator, left, right, budget))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget: Budget = __context[BUDGET]
        budget.take()
        if getattr(__obj, "__self__", None) is not None:
            args = tuple(list(counted(__context, each)) if isinstance(each, Iterator) else each for each in args)
            budget.charge(_method_size(budget, __obj, args, kwargs))
        elif not isinstance(__obj, Macro | LoopContext):  # those two only pass on what they are given
            budget.measured(args)
        result = super().call(__context, __obj, *args, **kwargs)
        budget.charge(0 if isinstance(result, range) else flat_size(result))
        return result

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # Markup's striptags takes time by the square of its length.
        return attr != "striptags" and super().is_safe_attribute(obj, attr, value)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple) and any(isinstance(each, tuple) for each in argument):
            raise Refusal("the chat template looks up a tuple of tuples, which is not supported")
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        return None if wrapped is None else _Format(self, value)

    def charged(self, source: str) -> nodes.Template:
        """The template's tree, with charges where the sandbox alone would not see the work."""
        tree: nodes.Template = _Charges().visit(self.parse(source))
        tree.set_environment(self)
        return tree


class _Format:
    """str.format or str.format_map of one text, with bounds."""

    __slots__ = ("_environment", "_method")

    def __init__(self, environment: Sandbox, method: Any) -> None:
        self._environment = environment
        self._method = method

    @pass_context
    def __call__(self, context: Context, *args: Any, **kwargs: Any) -> str:
        if self._method.__name__ == "format_map":
            (kwargs,), args = args, ()
        return _Formatter(self._environment, context[BUDGET]).vformat(self._method.__self__, args, kwargs)


class _Formatter(SandboxedFormatter):
    def __init__(self, environment: Sandbox, budget: Budget) -> None:
        super().__init__(environment)
        self._budget = budget
        self._size = 0

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._size += self._budget.measured(value)
        self._budget.check(self._size)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        check_width(format_spec)
        return super().format_field(value, format_spec)


def _method_size(budget: Budget, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """The size of what a method of a built-in type looks at and makes, at the most."""
    owner, name = method.__self__, method.__name__
    size = budget.measured([*args, *kwargs.values()]) + (0 if isinstance(owner, Mapping) else flat_size(owner))
    if name in _WIDTHS:
        width = max((each for each in [*args, *kwargs.values()] if isinstance(each, int)), default=8)
        if width > MAX_WIDTH:
            raise Refusal(f"the chat template formats to a width of {width}, more than {MAX_WIDTH}")
        return size + max(width, 0) * (owner.count("\t") if name == "expandtabs" else 1)
    if name == "replace" and len(args) > 1:
        return size + replaced_size(owner, *args[:2])
    if name == "join" and args:
        return size + len(owner) * len(args[0])
    return size * max(1, flat_size(owner)) if name == "translate" else size


@pass_context
def _written(context: Context, value: Any) -> Any:
    context[BUDGET].measured(value)
    return value


class _Charges(NodeTransformer):
    """Puts a charging filter around what the sandbox has no hook for."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        num_literal = sum(len(each.data) for each in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.iter = _filter(node.iter, "_counted", nodes.Const(num_literal))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filter(nodes.Tuple(node.nodes, "load", lineno=node.lineno), "_concatenated")

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.AssignBlock:
        self.generic_visit(node)
        node.filter = nodes.Filter(node.filter, "_made", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return _filter(node, "_made") if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        if not isinstance(node.expr, nodes.Const) or node.ops[0].op in ("in", "notin"):
            for each in node.ops:
                if not isinstance(each.expr, nodes.Const):
                    each.expr = _filter(each.expr, "_looked_into")
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _filter(node.key, "_looked_into")
        return node


def _filter(node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, list(args), [], None, None, lineno=node.lineno)


class _GenerationTag(Extension):
    """{% generation %}...{% endgeneration %} marks the assistant's words for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)
