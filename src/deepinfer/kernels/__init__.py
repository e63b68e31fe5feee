"""Ops: contracts, binding, and implementations (reference, eager, native, triton)."""

from __future__ import annotations

from .ops import OPS, OpContract, Ops, bind_ops

__all__ = ["OPS", "OpContract", "Ops", "bind_ops"]
