"""Counting hook calls: what is composed once must not ask plugins again while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pluggy

__all__ = ["HookCalls", "counting_hook_calls"]


class HookCalls:
    """Names of the hooks called so far, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __len__(self) -> int:
        return len(self.names)


@contextlib.contextmanager
def counting_hook_calls(prefix: str = "deepinfer_") -> Iterator[HookCalls]:
    """Count pluggy calls of hooks whose name starts with `prefix`, by any registry in this process.

        with counting_hook_calls() as calls:
            for _ in range(10):
                engine.step()
        assert len(calls) == 0

    Not for concurrent use: it replaces the call of pluggy's `HookCaller` meanwhile.
    """
    calls = HookCalls()
    original = pluggy.HookCaller.__call__

    def counted(caller: pluggy.HookCaller, **keywords: Any) -> Any:
        if caller.name.startswith(prefix):
            calls.names.append(caller.name)
        return original(caller, **keywords)

    with mock.patch.object(pluggy.HookCaller, "__call__", counted):
        yield calls
