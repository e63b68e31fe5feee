"""`check_op`: does an implementation keep the contract of its op?"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from ..errors import ConfigError, PartUnavailable
from ..registry import Registry, default_registry
from .compare import TOLERANCES
from .dense_ops import check_linear, check_rms_norm, check_rope, check_silu_mul
from .paged_ops import check_attention, check_cache_write
from .report import CaseResult, OpReport
from .sample_op import check_sample

__all__ = ["check_op"]

Check = Callable[..., list[CaseResult]]

_CHECKS: Final[Mapping[str, Check]] = MappingProxyType(
    {
        "op.rms_norm": check_rms_norm,
        "op.rope": check_rope,
        "op.silu_mul": check_silu_mul,
        "op.linear": check_linear,
        "op.cache_write": check_cache_write,
        "op.attention": check_attention,
        "op.sample": check_sample,
    }
)


def check_op(
    kind: str,
    implementation: Any,
    *,
    device: Any = "cpu",
    dtype: Any = "float32",
    invariant: bool = False,
    quick: bool = False,
    registry: Registry | None = None,
) -> OpReport:
    """Compares an op with the reference over ragged, strided, poisoned and scattered inputs.

    Args:
        kind: "op.attention" or "attention", ...
        implementation: name of a registered implementation, a factory (it takes `device` and `dtype`), or the op.
        device: where it is checked.
        dtype: of what it is given: float32, float16 or bfloat16.
        invariant: also demand that rows do not depend, bit for bit, on the rest of the batch.
        quick: fewer sizes of the same cases, for implementations that are slow (an interpreter).
        registry: where the name is looked up; None: the default one.

    Raises:
        AssertionError: the contract is broken; the message says which clause and where.
        ConfigError: no such op or dtype.
        RegistryError: no such implementation, or not here.
    """
    kind = kind if kind.startswith("op.") else f"op.{kind}"
    device, dtype = str(device), str(dtype).removeprefix("torch.")
    element = getattr(torch, dtype, None)
    if kind not in _CHECKS:
        raise ConfigError(f"no contract for {kind!r}; expected one of {', '.join(_CHECKS)}")
    if element not in TOLERANCES:
        raise ConfigError(f"dtype is {dtype!r}; expected float32, float16 or bfloat16")
    keywords = {"device": device, "dtype": dtype, "invariant": invariant}
    name, op = _make(kind, implementation, keywords, registry)
    cases = _CHECKS[kind](op, device=device, dtype=element, invariant=invariant, quick=quick)
    return OpReport(kind, name, device, dtype, invariant, tuple(cases))


def _make(kind: str, implementation: Any, keywords: dict[str, Any], registry: Registry | None) -> tuple[str, Any]:
    if isinstance(implementation, str):
        registry = default_registry() if registry is None else registry
        return implementation, registry.resolve(kind, name=implementation, **keywords)
    if not callable(implementation):
        raise PartUnavailable(f"{implementation!r} is neither a name nor callable; expected one of them")
    name = getattr(implementation, "__name__", type(implementation).__name__)
    return name, implementation(**keywords) if _is_factory(implementation) else implementation


def _is_factory(implementation: Callable[..., Any]) -> bool:
    return {"device", "dtype"} <= set(inspect.signature(implementation).parameters)
