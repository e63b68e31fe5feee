"""A record: one implementation of one kind of part, described without importing it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

import attrs

from .errors import ConfigError

__all__ = ["API_VERSION", "SUPPORTED_APIS", "Factory", "Record", "load"]

#: What a record of this release promises; see docs/plugins.md.
API_VERSION: Final = 1
#: Record versions that this release can still use.
SUPPORTED_APIS: Final = frozenset({1})

#: `"module:attribute"`, imported when first needed, or the callable itself.
Factory: TypeAlias = str | Callable[..., Any]

_KIND = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def load(target: Factory) -> Callable[..., Any]:
    """The callable that `target` is or names.

    Raises:
        ImportError: the module cannot be imported.
        AttributeError: the module has no such attribute.
    """
    if not isinstance(target, str):
        return target
    module, _, path = target.partition(":")
    found: Any = importlib.import_module(module)
    for attribute in path.split("."):
        found = getattr(found, attribute)
    return found


def _matches(pattern: re.Pattern[str], example: str) -> Callable[[object, attrs.Attribute, object], None]:
    def check(_instance: object, attribute: attrs.Attribute, value: object) -> None:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise ConfigError(f"{attribute.name} of a record is {value!r}; expected a name such as {example!r}")

    return check


def _target(_instance: object, attribute: attrs.Attribute, value: object) -> None:
    if not callable(value) and not (isinstance(value, str) and _TARGET.fullmatch(value)):
        raise ConfigError(
            f"{attribute.name} of a record is {value!r}; expected 'module:attribute' (absolute) or a callable"
        )


def _integer(_instance: object, attribute: attrs.Attribute, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{attribute.name} of a record is {value!r}; expected an integer")


def _text(_instance: object, attribute: attrs.Attribute, value: object) -> None:
    if not isinstance(value, str):
        raise ConfigError(f"{attribute.name} of a record is {value!r}; expected a string")


def _words(_instance: object, attribute: attrs.Attribute, value: tuple[object, ...]) -> None:
    for word in value:
        if not isinstance(word, str) or not word:
            raise ConfigError(f"{attribute.name} of a record holds {word!r}; expected names such as 'cpu' or 'float32'")


def _tuple(value: str | Iterable[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


_optional_target = attrs.validators.optional(_target)


@attrs.frozen
class Record:
    """One implementation of a kind. Immutable and checked when made; a plugin yields these.

    Raises:
        ConfigError: a field is not of its form; the message names it.
    """

    #: What it is an implementation of, such as `op.attention`; the built-in kinds are in `deepinfer.kinds`.
    kind: str = attrs.field(validator=_matches(_KIND, "op.attention"))
    #: Its own name within the kind, such as `triton`.
    name: str = attrs.field(validator=_matches(_NAME, "triton"))
    #: Called with the keywords of the kind.
    factory: Factory = attrs.field(validator=_target)
    #: Device types it runs on, such as `cpu` or `cuda`; empty: any.
    devices: tuple[str, ...] = attrs.field(default=(), converter=_tuple, validator=_words, kw_only=True)
    #: Element types it computes in, such as `float32`; empty: any.
    dtypes: tuple[str, ...] = attrs.field(default=(), converter=_tuple, validator=_words, kw_only=True)
    #: The largest wins among those that can be used; the built-in fast paths have 100.
    priority: int = attrs.field(default=0, validator=_integer, kw_only=True)
    #: `probe() -> None | str`: why it cannot be used on this machine. Cheap: no heavy import.
    probe: Factory | None = attrs.field(default=None, validator=_optional_target, kw_only=True)
    #: `accepts(**need) -> None | str`: why it cannot serve this need (a head width, a page size, ...).
    accepts: Factory | None = attrs.field(default=None, validator=_optional_target, kw_only=True)
    #: Ops with the same word share a private layout and are taken together or not at all.
    bundle: str | None = attrs.field(default=None, validator=attrs.validators.optional(_text), kw_only=True)
    #: `API_VERSION` of the release it was written for.
    api: int = attrs.field(default=API_VERSION, validator=_integer, kw_only=True)
    #: Distribution and version it came from; the registry fills this in.
    origin: str = attrs.field(default="", validator=_text, kw_only=True)

    @property
    def dist(self) -> str:
        """Distribution it came from, without the version."""
        return self.origin.partition(" ")[0]

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} of {self.origin or 'unknown origin'}"

    def why_not(self, need: Mapping[str, Any]) -> str | None:
        """None if it can serve `need` here, or the reason why not. Never raises.

        Args:
            need: `device` ("cuda:0" counts as "cuda") and `dtype` are compared with the record's own; everything
                goes to `accepts`.
        """
        if self.api not in SUPPORTED_APIS:
            spoken = ", ".join(str(version) for version in sorted(SUPPORTED_APIS))
            return f"it is written for record api {self.api}, this release speaks {spoken}; install a matching release"
        return self._outside(need) or self._ask("probe", self.probe, {}) or self._ask("accepts", self.accepts, need)

    def _outside(self, need: Mapping[str, Any]) -> str | None:
        device, dtype = need.get("device"), need.get("dtype")
        if device is not None and self.devices and str(device).partition(":")[0] not in self.devices:
            return f"it runs on {', '.join(self.devices)}, not on {device}"
        if dtype is not None and self.dtypes and str(dtype).removeprefix("torch.") not in self.dtypes:
            return f"it computes in {', '.join(self.dtypes)}, not in {dtype}"
        return None

    def _ask(self, role: str, question: Factory | None, need: Mapping[str, Any]) -> str | None:
        if question is None:
            return None
        try:
            answer = load(question)(**need)
        except (Exception, SystemExit) as error:
            return f"its {role} raised {type(error).__name__}: {error}"
        return None if answer is None else str(answer)

    def config(self) -> dict[str, Any]:
        """JSON-able description."""
        factory = self.factory
        named = factory if isinstance(factory, str) else f"{factory.__module__}:{getattr(factory, '__qualname__', '?')}"
        return {
            "kind": self.kind,
            "name": self.name,
            "origin": self.origin,
            "factory": named,
            "devices": list(self.devices),
            "dtypes": list(self.dtypes),
            "priority": self.priority,
            "bundle": self.bundle,
            "api": self.api,
        }
