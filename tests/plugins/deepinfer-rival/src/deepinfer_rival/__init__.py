"""Takes the name of an op of deepinfer-example-backend."""

from __future__ import annotations

from collections.abc import Iterator

from deepinfer.hooks import Record, hookimpl


@hookimpl
def deepinfer_records() -> Iterator[Record]:
    yield Record("op.rms_norm", "example", "deepinfer.kernels.reference:make_rms_norm", devices="cpu", priority=300)
