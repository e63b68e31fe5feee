"""Rotary positions. Specification: `kernels/reference.py::rope`."""

from __future__ import annotations

import torch

from ...protocols import RopeOp

__all__ = ["make_rope", "rope"]


def rope(
    q: torch.Tensor, k: torch.Tensor, pos: torch.Tensor, *, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, H, D], k [T, G, D], pos i32 [T], cos_sin f32 [context, D] -> rotated q, k."""
    cos, sin = cos_sin.index_select(0, pos)[:, None].chunk(2, dim=-1)
    return _turn(q, cos, sin), _turn(k, cos, sin)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half = cos.shape[-1]
    out[..., :half] = low * cos - high * sin
    out[..., half:] = high * cos + low * sin
    return out


def make_rope(*, device: str, dtype: str, invariant: bool = False) -> RopeOp:
    return rope
