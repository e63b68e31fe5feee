"""A composition as data: which parts, by which names, with which numbers. Goes to JSON and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..protocols import LogitsTransform, Observer
    from ..registry import Registry
    from .engine import Engine

__all__ = ["Composition"]


def _at_least(low: int) -> Callable[[object, attrs.Attribute, int | None], None]:
    def check(_instance: object, attribute: attrs.Attribute, value: int | None) -> None:
        if value is not None and (not isinstance(value, int) or value < low):
            raise ConfigError(f"{attribute.name} is {value!r}; expected an integer >= {low}")

    return check


@attrs.frozen(kw_only=True)
class Composition:
    """Everything that is needed to build the default engine again. Immutable.

    >>> Composition.from_dict(Composition(model="folder").to_dict()) == Composition(model="folder")
    True
    """

    #: HF folder, .gguf file, hub id, or "smollm2" for the demo model.
    model: str
    #: Registered accelerator (cpu, nvidia, ascend, a plugin's); None takes the best one available.
    accelerator: str | None = None
    #: Type of activations; None takes the accelerator's default.
    dtype: str | None = None
    #: auto, float32, bfloat16, float16, q4_0, q4_1, q8_0 or int8; see `models.LoadOptions`.
    weights: str = "auto"
    #: Type of keys and values in their pages; None takes `dtype`. On the CPU float16 and bfloat16 halve their traffic.
    cache_dtype: str | None = None
    #: Bitwise batch invariance.
    invariant: bool = False
    page_tokens: int = attrs.field(default=16, validator=_at_least(1))
    #: Tokens of KV cache; None takes what `max_rows` sequences of `max_len` need, at most `cache_bytes`.
    cache_tokens: int | None = attrs.field(default=None, validator=_at_least(1))
    cache_bytes: int = attrs.field(default=2**31, validator=_at_least(1))
    #: Sequences in a step at most.
    max_rows: int = attrs.field(default=64, validator=_at_least(1))
    #: Tokens in a step at most (decode tokens first, prompt chunks with the rest).
    max_tokens_per_step: int = attrs.field(default=512, validator=_at_least(1))
    #: Longest prompt and output; None takes the model's context.
    max_len: int | None = attrs.field(default=None, validator=_at_least(2))
    policy: str = "fcfs"
    policy_options: Mapping[str, Any] = attrs.field(factory=dict, converter=dict)
    prefix_caching: bool = True
    lag: int = attrs.field(default=0, validator=attrs.validators.in_((0, 1)))
    seed: int | None = None
    #: Op kind to implementation name, such as {"op.attention": "reference"}.
    want: Mapping[str, str] = attrs.field(factory=dict, converter=dict)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Composition:
        """Raises ConfigError naming fields that do not exist."""
        known = {field.name for field in attrs.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"a composition has no field {', '.join(unknown)}; it has {', '.join(sorted(known))}")
        if "model" not in values:
            raise ConfigError("a composition needs the field model")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return attrs.asdict(self)

    @classmethod
    def load(cls, path: str | Path) -> Composition:
        return cls.from_dict(json.loads(Path(path).read_text()))

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    def build(
        self,
        *,
        registry: Registry | None = None,
        observers: Iterable[Observer] = (),
        transforms: Sequence[LogitsTransform] = (),
        progress: bool = False,
    ) -> Engine:
        """Load the model and compose the engine, see `compose`."""
        from .compose import compose

        return compose(self, registry=registry, observers=observers, transforms=transforms, progress=progress)
