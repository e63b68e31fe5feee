"""Gated activation. Specification: `kernels/reference.py::silu_mul`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...protocols import SiluMulOp

__all__ = ["make_silu_mul", "silu_mul"]


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2F], gate then up -> silu(gate) * up [T, F]."""
    gate, up = x.chunk(2, dim=-1)
    if x.dtype in (torch.float32, torch.float64):
        return F.silu(gate).mul_(up)
    return F.silu(gate.float()).mul_(up).to(x.dtype)


def make_silu_mul(*, device: str, dtype: str, invariant: bool = False) -> SiluMulOp:
    return silu_mul
