"""Gated activation. Specification: `kernels/reference.py::silu_mul`. Cost: reads 2F, writes F a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["silu_mul"]

BLOCK = 1024


@triton.jit
def _silu_mul(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride_x: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < width
    line = x_ptr + row * stride_x + col
    gate = tl.load(line, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(line + width, mask=inside, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * width + col, out.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2F], gate then up -> silu(gate) * up [T, F]."""
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if num_rows:
        _silu_mul[(num_rows, triton.cdiv(width, BLOCK))](x, out, x.stride(0), width, BLOCK=BLOCK, num_warps=4)
    return out
