"""Measurements of this library on this machine; `benchmarks/` in the repository adds the peers."""

from __future__ import annotations

from . import cache, latency, scheduler, throughput

__all__ = ["cache", "latency", "scheduler", "throughput"]
