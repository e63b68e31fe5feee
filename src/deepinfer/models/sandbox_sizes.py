"""How large the outcome of a template operation will be, asked before it runs.

Sizes are in characters and are upper bounds; a container's element counts as `ELEMENT_CHARS`.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import Macro, Undefined

__all__ = [
    "ELEMENT_CHARS",
    "STR_METHODS",
    "TemplateLimit",
    "compare_chars",
    "deep_size",
    "format_chars",
    "json_chars",
    "method_chars",
    "replace_chars",
    "text_chars",
    "whole",
]

ELEMENT_CHARS = 32
MAX_ELEMENTS, MAX_DEPTH = 200_000, 100
#: Of a number or a name as text.
SHORT_CHARS = 64
#: Upper- and lower-casing triples at most.
CASE_GROWTH = 3

STR_METHODS = frozenset(
    {
        *("capitalize", "casefold", "center", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii"),
        *("isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "ljust", "lower"),
        *("lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rjust", "rpartition"),
        *("rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper", "zfill"),
    }
)

_WIDTHS = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(?:\*|\d{4,}|\d*\.(?:\*|\d{4,}))")


class TemplateLimit(Exception):
    """A rendering would pass its budget. Not a subclass of what filters catch."""


def deep_size(value: Any) -> int:
    """Elements of a container and of all it holds, each time it holds it.

    Raises:
        TemplateLimit: too many, or nested too deep.
    """
    return _walk(value)[0]


def text_chars(value: Any) -> int:
    """Upper bound of `len(str(value))`.

    Raises:
        TemplateLimit: the value is a container that is too large.
        SecurityError: it is of a type that templates have no business to print.
    """
    if isinstance(value, str):
        return len(value)
    if value is None or isinstance(value, (bool, float, Undefined, Macro, range)):
        return SHORT_CHARS
    if isinstance(value, int):
        return SHORT_CHARS + value.bit_length()
    if _is_container(value):
        elements, chars, _ = _walk(value)
        return SHORT_CHARS * elements + 10 * chars
    raise SecurityError(f"{type(value).__name__} objects cannot be turned into text")


def _is_container(value: Any) -> bool:
    return isinstance(value, (list, tuple, dict, set, frozenset, type({}.items()), type({}.keys()), type({}.values())))


def compare_chars(value: Any) -> int:
    """Work of comparing a container with another, in characters made."""
    return _walk(value)[1] // 8 if _is_container(value) else 0


def json_chars(value: Any, *, step: int, glue: int) -> int:
    """Length of JSON text with `step` characters of indentation a level and `glue` characters of separators."""
    elements, chars, depth = _walk(value)
    return elements * (SHORT_CHARS + glue + max(step, 0) * (depth + 1)) + 6 * chars


def _walk(value: Any) -> tuple[int, int, int]:
    """(elements, characters of strings, levels), counting shared ones every time."""
    elements = chars = levels = 0
    stack: list[tuple[Any, int]] = [(value, 0)]
    while stack:
        here, depth = stack.pop()
        elements, levels = elements + 1, max(levels, depth)
        if elements > MAX_ELEMENTS or depth > MAX_DEPTH:
            raise TemplateLimit(f"it makes a container of more than {MAX_ELEMENTS} elements or {MAX_DEPTH} levels")
        if isinstance(here, str):
            chars += len(here)
        elif isinstance(here, int):
            chars += here.bit_length() // 3
        elif _is_container(here):
            if len(here) > MAX_ELEMENTS:
                raise TemplateLimit(f"it makes a container of {len(here)} elements (limit {MAX_ELEMENTS})")
            parts: Iterable[Any] = (*here.keys(), *here.values()) if isinstance(here, dict) else here
            stack.extend((part, depth + 1) for part in parts)
    return elements, chars, levels


def whole(value: Any, *, limit: int, what: str) -> int:
    """`value` as an integer no larger than `limit` (either sign).

    Raises:
        TemplateLimit: it is larger or no integer.
    """
    if not isinstance(value, int) or abs(value) > limit:
        raise TemplateLimit(
            f"{what} is {str(value)[:20] if isinstance(value, (int, str)) else type(value).__name__}; limit {limit}"
        )
    return value


def format_chars(template: str, args: Iterable[Any], *, percent: bool = False) -> int:
    """Length of a formatted string: each field may show any argument.

    Raises:
        TemplateLimit: a field has a width of more than three digits or takes it from an argument.
    """
    shown = sum(map(text_chars, args)) + SHORT_CHARS
    if percent:
        if _WIDTHS.search(template):
            raise TemplateLimit("a format asks for a width of more than three digits")
        return len(template) + template.count("%") * (shown + 999)
    fields = list(string.Formatter().parse(template))
    if any(spec and ("{" in spec or re.search(r"\d{4,}", spec)) for _, _, spec, _ in fields):
        raise TemplateLimit("a format asks for a width of more than three digits or computes it")
    # A representation (`!r`) writes up to ten characters for one.
    return len(template) + len(fields) * (10 * shown + 999)


def replace_chars(text: str, old: Any, new: Any, count: Any = -1) -> int:
    """Length of `text.replace(old, new, count)`."""
    if not isinstance(old, str) or not isinstance(new, str):
        return len(text) + text_chars(old) + text_chars(new)
    times = text.count(old) if old else len(text) + 1
    if isinstance(count, int) and count >= 0:
        times = min(times, count)
    return len(text) + times * max(len(new) - len(old), 0)


def method_chars(text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Size of what `text.name(*args)` makes; what it returns is counted again afterwards."""
    if name in ("center", "ljust", "rjust", "zfill"):
        return max(len(text), whole(args[0], limit=1_000_000, what="a text width") if args else 0)
    if name == "replace":
        return replace_chars(text, *(*args, "", "")[:2], *args[2:3])
    if name == "join":
        return _join_chars(text, args)
    if name in ("split", "rsplit", "splitlines"):
        return ELEMENT_CHARS * _pieces(text, name, (*args, *kwargs.values()))
    return CASE_GROWTH * len(text)


def _join_chars(glue: str, args: tuple[Any, ...]) -> int:
    parts = args[0] if args and (isinstance(args[0], str) or _is_container(args[0])) else ()
    return sum(len(p) if isinstance(p, str) else SHORT_CHARS for p in parts) + len(glue) * len(parts)


def _pieces(text: str, name: str, args: tuple[Any, ...]) -> int:
    if name == "splitlines":
        return len(text)
    separator = next((a for a in args if isinstance(a, str)), None)
    return text.count(separator) + 1 if separator else len(text) // 2 + 1
