"""Residual add and root-mean-square norm, one row a program. Specification: `kernels/reference.py::rms_norm`.

Cost: reads x and the residual once, writes the sum and the normed row once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["rms_norm"]


@triton.jit
def _rms_norm(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    total_ptr: tl.tensor,
    stride_x: tl.tensor,
    stride_residual: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = col < width
    h = tl.load(x_ptr + row * stride_x + col, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        h += tl.load(residual_ptr + row * stride_residual + col, mask=inside, other=0.0).to(tl.float32)
        total = h.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * width + col, total, mask=inside)
        h = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(h * h, axis=0) / width + eps)
    weight = tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32)
    normed = h * scale * weight
    tl.store(normed_ptr + row * width + col, normed.to(normed_ptr.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [T, M]; weight [M] -> (normed [T, M], x + residual [T, M])."""
    num_rows, width = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    normed = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(normed)
    block = triton.next_power_of_2(width)
    if num_rows:
        _rms_norm[(num_rows,)](
            x,
            x if residual is None else residual,
            weight,
            normed,
            total,
            x.stride(0),
            x.stride(0) if residual is None else residual.stride(0),
            width,
            eps,
            HAS_RESIDUAL=residual is not None,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )
    return normed, total
