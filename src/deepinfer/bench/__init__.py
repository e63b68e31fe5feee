"""Measurements of this library on this machine; `benchmarks/` in the repository adds the peers."""

from __future__ import annotations

from . import latency, throughput

__all__ = ["latency", "throughput"]
