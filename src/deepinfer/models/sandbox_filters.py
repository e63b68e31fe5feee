"""Jinja's filters for chat templates, each one paid for out of the budget.

Left out are those that have no place in a prompt or no simple bound: forceescape, pprint, random, striptags,
urlencode, urlize, wordwrap, xmlattr.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from types import GeneratorType
from typing import Any

from jinja2.filters import FILTERS, do_join
from jinja2.runtime import Context
from jinja2.utils import pass_context

from .sandbox import chat_environment
from .sandbox_sizes import ELEMENT_CHARS, compare_chars, format_chars, json_chars, replace_chars, text_chars, whole

__all__ = ["chat_filters"]

#: Filters whose outcome is no larger than a few times their input.
PLAIN = (
    *("abs", "attr", "capitalize", "count", "d", "default", "e", "escape", "filesizeformat", "first", "float", "int"),
    *("items", "last", "length", "lower", "map", "reject", "rejectattr", "reverse", "safe", "select", "selectattr"),
    *("title", "trim", "truncate", "upper", "wordcount"),
)
#: Filters that compare the elements with each other.
COMPARING = ("dictsort", "groupby", "max", "min", "sort", "unique")

ESCAPE_GROWTH = 6


def chat_filters() -> dict[str, Callable[..., Any]]:
    """Name to filter, for `ChatEnvironment`."""
    bounds: dict[str, Callable[..., int]] = dict.fromkeys(PLAIN, _plain_chars) | {
        **dict.fromkeys(COMPARING, _comparing_chars),
        "batch": _batch_chars,
        "center": _center_chars,
        "format": _format_chars,
        "indent": _indent_chars,
        "list": _list_chars,
        "replace": _replace_chars,
        "round": _round_chars,
        "slice": _slice_chars,
        "string": text_chars,
    }
    filters = {name: _bounded(FILTERS[name], chars) for name, chars in bounds.items()}
    return filters | {"join": _join, "sum": _sum, "tojson": _tojson}


def _bounded(function: Callable[..., Any], chars: Callable[..., int]) -> Callable[..., Any]:
    # Set by Jinja's `pass_*` decorators.
    passes = getattr(getattr(function, "jinja_pass_arg", None), "name", "")

    @wraps(function)
    def run(context: Context, *args: Any, **kwargs: Any) -> Any:
        environment = chat_environment(context)
        environment.budget.spend(chars(*args, **kwargs))
        first = {
            "context": (context,),
            "eval_context": (context.eval_ctx,),
            "environment": (environment,),
        }.get(passes, ())
        value = function(*first, *args, **kwargs)
        # Chains of generators could grow without anything being made; a list is made at once and paid for.
        return environment.made(list(environment.looped(value)) if isinstance(value, GeneratorType) else value)

    # `wraps` copies the mark of what the original wants passed; this wrapper wants the context.
    return pass_context(run)


def _plain_chars(value: Any = None, *_args: Any, **_kwargs: Any) -> int:
    if isinstance(value, str):
        return ESCAPE_GROWTH * len(value)
    return ELEMENT_CHARS * len(value) if isinstance(value, (list, tuple, dict, range)) else 0


def _comparing_chars(value: Any = None, *_args: Any, **_kwargs: Any) -> int:
    return _plain_chars(value) + 8 * compare_chars(value)


def _list_chars(value: Any) -> int:
    return ELEMENT_CHARS * len(value) if hasattr(value, "__len__") else 0


def _batch_chars(_value: Any, linecount: Any, _fill_with: Any = None) -> int:
    return ELEMENT_CHARS * whole(linecount, limit=100_000, what="a batch")


def _slice_chars(_value: Any, slices: Any, _fill_with: Any = None) -> int:
    return ELEMENT_CHARS * whole(slices, limit=10_000, what="a number of slices")


def _center_chars(value: Any, width: Any = 80) -> int:
    return max(text_chars(value), whole(width, limit=1_000_000, what="a text width"))


def _format_chars(value: Any, *args: Any, **kwargs: Any) -> int:
    return format_chars(
        str(value) if isinstance(value, (str, int, float)) else "", (*args, *kwargs.values()), percent=True
    )


def _indent_chars(value: Any, width: Any = 4, first: bool = False, blank: bool = False) -> int:
    step = len(width) if isinstance(width, str) else whole(width, limit=1_000_000, what="an indentation")
    text = value if isinstance(value, str) else ""
    return text_chars(value) + (len(text.splitlines()) + 1) * max(step, 0)


def _replace_chars(value: Any, old: Any, new: Any, count: Any = None) -> int:
    text = value if isinstance(value, str) else ""
    return text_chars(value) + ESCAPE_GROWTH * replace_chars(text, old, new, count)


def _round_chars(_value: Any, precision: Any = 0, _method: Any = "common") -> int:
    return whole(precision, limit=100, what="a precision")


@pass_context
def _join(context: Context, value: Any, d: Any = "", attribute: Any = None) -> str:
    environment = chat_environment(context)
    if attribute is not None:
        value = environment.call_filter("map", value, [], {"attribute": attribute}, context=context)
    parts = list(environment.looped(value))
    chars = sum(map(text_chars, parts)) + text_chars(d) * len(parts)
    environment.budget.spend(chars * (ESCAPE_GROWTH if hasattr(d, "__html__") else 1))
    return environment.made(do_join(context.eval_ctx, parts, d))


@pass_context
def _sum(context: Context, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    environment = chat_environment(context)
    if attribute is not None:
        iterable = environment.call_filter("map", iterable, [], {"attribute": attribute}, context=context)
    for value in environment.looped(iterable):
        start = environment.call_binop(context, "+", start, value)
    return start


@pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which no model was trained on."""
    environment = chat_environment(context)
    step = len(indent) if isinstance(indent, str) else whole(indent or 0, limit=1000, what="an indentation")
    glue = sum(map(text_chars, separators)) if separators else 0
    environment.budget.spend(json_chars(value, step=step, glue=glue))
    return environment.made(
        json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    )
