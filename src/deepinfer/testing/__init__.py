"""The contract kit: checks that a part keeps the promises the rest of the library builds on.

    from deepinfer.testing import check_op
    check_op("op.attention", "mine", device="cpu", dtype="float32", invariant=True)

Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .check import check_op
    from .hook_calls import HookCalls, counting_hook_calls
    from .invariance import assert_batch_invariant
    from .paged import PagedBatch, Sequence, make_paged_batch
    from .report import CaseResult, OpReport

__all__ = [
    "CaseResult",
    "HookCalls",
    "OpReport",
    "PagedBatch",
    "Sequence",
    "assert_batch_invariant",
    "check_op",
    "counting_hook_calls",
    "make_paged_batch",
]

_HOMES = {
    "CaseResult": "report",
    "HookCalls": "hook_calls",
    "OpReport": "report",
    "PagedBatch": "paged",
    "Sequence": "paged",
    "assert_batch_invariant": "invariance",
    "check_op": "check",
    "counting_hook_calls": "hook_calls",
    "make_paged_batch": "paged",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
