"""A backend with one op. This module is imported on every start, so it imports nothing heavy."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from deepinfer.hooks import Record, hookimpl


def probe() -> str | None:
    return None if importlib.util.find_spec("torch") else "torch is not installed"


def accepts(*, invariant: bool = False, **_need: Any) -> str | None:
    return "its sums have no fixed order, so it cannot serve invariant mode" if invariant else None


@hookimpl
def deepinfer_records() -> Iterator[Record]:
    yield Record(
        "op.rms_norm",
        "example",
        "deepinfer_example_backend.norm:make_rms_norm",
        devices="cpu",
        dtypes="float32",
        priority=200,
        probe=probe,
        accepts=accepts,
    )
