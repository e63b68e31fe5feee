"""A Jinja environment for templates nobody has read: bounded in time, memory and reach.

Templates come with downloaded checkpoints and run on every request, so they are treated as hostile. Jinja's own
sandbox keeps them from Python's internals, but not from `'a' * 10**10`, nested loops or a list that doubles until
its `repr` needs years. Two ways of bounding that were weighed. A disposable process with resource limits bounds
anything, but costs a process start (or a pool to look after) and does not work everywhere a library is imported.
This module bounds the language instead, which is small: every operation that makes a string or a container is
either absent or announces its size before it runs, and whatever runs for long checks a clock.

* `Budget`: characters made (containers count by element) and CPU seconds of the calling thread; neither depends
  on what else the machine does, no thread or signal is involved, nothing is left behind.
* The syntax tree is rewritten, so that loops, comparisons, `~`, slices and container literals go through the budget.
* Operators, filters, methods and callables are allow lists; results of filters are lists, never chains of generators.
* Containers are measured deeply when made, so that nothing can be exponentially larger than what built it.
"""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.lexer import Token, TokenStream
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace, pass_context, pass_environment
from jinja2.visitor import NodeTransformer

from .sandbox_sizes import (
    ELEMENT_CHARS,
    STR_METHODS,
    TemplateLimit,
    compare_chars,
    deep_size,
    format_chars,
    method_chars,
    text_chars,
)

__all__ = ["Budget", "ChatEnvironment", "TemplateLimit", "chat_environment"]

MAX_TOKENS = 20_000
MAX_INT_BITS = 4096
#: Ops between two looks at the clock; one op takes well under 10 ms.
CLOCK_STRIDE = 16

OTHER_METHODS: Mapping[type, frozenset[str]] = {
    dict: frozenset({"get", "items", "keys", "values", "copy"}),
    list: frozenset({"index", "count", "copy"}),
    tuple: frozenset({"index", "count"}),
    float: frozenset({"is_integer"}),
    LoopContext: frozenset({"cycle", "changed"}),
    Cycler: frozenset({"next", "reset"}),
}
CALLABLE_OBJECTS = (Macro, LoopContext, BlockReference, Joiner, Undefined)


class Budget:
    """What one rendering may still use. Owned by one rendering.

    Args:
        chars: characters that may be made in all, kept or not.
        seconds: CPU time of this thread from now on.
    """

    def __init__(self, *, chars: int, seconds: float) -> None:
        self.chars_left = chars
        self._ops = 0
        self._deadline = time.thread_time() + seconds
        self._seconds = seconds

    def spend(self, chars: int = 0) -> None:
        """Account for one operation that makes `chars` characters; call it before they are made.

        Raises:
            TemplateLimit: there is not that much left.
        """
        self.chars_left -= chars
        if self.chars_left < 0:
            raise TemplateLimit("it makes more text than a prompt could need")
        self._ops += 1
        if (self._ops % CLOCK_STRIDE == 0 or chars > 65_536) and time.thread_time() > self._deadline:
            raise TemplateLimit(f"it ran for more than {self._seconds:g} s of CPU time")


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and runs chat templates under a `Budget`. `budget` is set anew for every rendering.

    Functions that templates may call are named by `add_function`; everything else callable is refused.
    """

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})
    budget: Budget

    def __init__(self, filters: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _TokenLimit, _Generation],
            finalize=_finalize,
            cache_size=0,
        )
        self.budget = Budget(chars=1_000_000, seconds=1.0)
        marks = {"_loop": _loop, "_concat": _concat, "_made": _made, "_tick": _tick}
        self.filters = {**filters, **marks}
        self._functions: list[Callable[..., Any]] = []
        allowed = {"range": self.globals["range"], "dict": dict, "namespace": _TemplateNamespace}
        self.globals = {}
        for name, function in {**allowed, "cycler": Cycler, "joiner": Joiner}.items():
            self.add_function(name, function)

    def add_function(self, name: str, function: Callable[..., Any]) -> None:
        """Let templates call `function` by `name`."""
        self.globals[name] = function
        self._functions.append(function)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Rewriter().visit(super()._parse(source, name, filename))

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.budget.spend()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.budget.spend()
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.budget.spend(_binop_chars(operator, left, right))
        return self.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # The odd names are Jinja's: keyword arguments of templates must not collide with them.
        self = __self
        self.budget.spend(self._call_chars(__obj, args, kwargs))
        for value in (*args, *kwargs.values()):
            self.made(value)
        return self.made(super().call(__context, __obj, *args, **kwargs))

    def call_test(self, *args: Any, **kwargs: Any) -> Any:
        self.budget.spend()
        return super().call_test(*args, **kwargs)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        # Jinja waits until the value is used and prints nothing where it is only shown.
        raise SecurityError(f"the attribute {attribute!r} of {type(obj).__name__} objects is not offered to templates")

    def made(self, value: Any) -> Any:
        """Account for a value that an operation has made (containers deeply); returns it."""
        if isinstance(value, str):
            self.budget.spend(len(value))
        elif isinstance(value, (list, tuple, dict)):
            self.budget.spend(ELEMENT_CHARS * deep_size(value))
        return value

    def looped(self, values: Iterable[Any]) -> Iterator[Any]:
        """The same values, each one paid for."""
        for value in values:
            self.budget.spend(1)
            yield value

    def concat(self, parts: Iterable[str]) -> str:
        """Joins the output of macros and blocks."""
        held = list(parts)
        self.budget.spend(sum(map(len, held)))
        return "".join(held)

    def _call_chars(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        if isinstance(function, CALLABLE_OBJECTS) or any(function is known for known in self._functions):
            return 0
        if isinstance(function, (types.BuiltinMethodType, types.MethodType)):
            return _method_cost(function.__self__, function.__name__, args, kwargs)
        wrapped = getattr(function, "__wrapped__", None)
        if isinstance(function, types.FunctionType) and isinstance(wrapped, types.BuiltinMethodType):
            # What Jinja makes of `str.format`.
            return format_chars(str(wrapped.__self__), (*args, *kwargs.values()))
        raise SecurityError(f"{type(function).__name__} objects cannot be called")


def chat_environment(context: Context) -> ChatEnvironment:
    """The environment that a rendering runs in."""
    assert isinstance(context.environment, ChatEnvironment)
    return context.environment


def _method_cost(owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    if isinstance(owner, str) and name in STR_METHODS:
        return method_chars(owner, name, args, kwargs)
    for kind, names in OTHER_METHODS.items():
        if isinstance(owner, kind) and name in names:
            return compare_chars(owner) if name in ("index", "count") else 0
    raise SecurityError(f"the method {name!r} of {type(owner).__name__} objects is not offered to templates")


def _binop_chars(operator: str, left: Any, right: Any) -> int:
    if operator == "%" and isinstance(left, str):
        return format_chars(left, right if isinstance(right, tuple) else (right,), percent=True)
    if operator == "*" and isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    elif operator == "*":
        count, value = (left, right) if isinstance(left, int) else (right, left)
        if isinstance(count, int) and isinstance(value, (str, list, tuple)):
            return max(count, 0) * len(value) * (1 if isinstance(value, str) else ELEMENT_CHARS)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * max(right, 1))
    elif operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
        return (len(left) + len(right)) * (1 if isinstance(left, str) else ELEMENT_CHARS)
    return 0


def _check_bits(bits: int) -> None:
    if bits > MAX_INT_BITS:
        raise TemplateLimit(f"it computes a number of {bits} bits (limit {MAX_INT_BITS})")


@pass_environment
def _finalize(environment: ChatEnvironment, value: Any) -> Any:
    environment.budget.spend(text_chars(value))
    return value


# The marks that the rewriter leaves in a syntax tree. They take the context, which keeps Jinja from evaluating
# them while it compiles, when no rendering's budget exists yet.


@pass_context
def _loop(context: Context, values: Any) -> Any:
    return values if isinstance(values, Undefined) else chat_environment(context).looped(values)


@pass_context
def _concat(context: Context, *values: Any) -> str:
    chat_environment(context).budget.spend(sum(map(text_chars, values)))
    return "".join(map(str, values))


@pass_context
def _made(context: Context, value: Any) -> Any:
    return chat_environment(context).made(value)


@pass_context
def _tick(context: Context, value: Any) -> Any:
    chat_environment(context).budget.spend(compare_chars(value))
    return value


class _Rewriter(NodeTransformer):
    """Leads loops, comparisons, `~`, slices and container literals past the budget."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _mark(node.iter, "_loop")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _mark(node.nodes[0], "_concat", node.nodes[1:])

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        self.generic_visit(node)
        return _mark(node, "_made")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        self.generic_visit(node)
        return _mark(node, "_made")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return _mark(node, "_made") if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return _mark(node, "_made") if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Expr:
        self.generic_visit(node)
        node.expr = _mark(node.expr, "_tick")
        for operand in node.ops:
            operand.expr = _mark(operand.expr, "_tick")
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Expr:
        self.generic_visit(node)
        node.node = _mark(node.node, "_tick")
        return node


def _mark(value: nodes.Node, name: str, args: list[nodes.Expr] | None = None) -> nodes.Filter:
    assert isinstance(value, nodes.Expr)
    return nodes.Filter(value, name, args or [], [], None, None, lineno=value.lineno, environment=value.environment)


class _TokenLimit(Extension):
    """Bounds the time that compiling takes."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        for count, token in enumerate(stream):
            if count == MAX_TOKENS:
                raise TemplateSyntaxError(f"more than {MAX_TOKENS} tokens", token.lineno)
            yield token


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote, for training; here it only groups."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _TemplateNamespace(Namespace):
    """Keeps private names out, which attribute access would refuse to read anyway."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_public(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {str(name)[:40]!r}; names begin with a letter")
