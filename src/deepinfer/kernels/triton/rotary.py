"""Rotary positions of queries and keys in one launch. Specification: `kernels/reference.py::rope`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["rope"]

#: Heads a program turns at once.
HEADS = 16


@triton.jit
def _turn(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride_head: tl.tensor,
    num_heads: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """Turns the heads of one token; cos, sin f32 [1, BLOCK]."""
    i = tl.arange(0, BLOCK)[None, :]
    for first in range(0, num_heads, HEADS):
        head = first + tl.arange(0, HEADS)[:, None]
        inside = (head < num_heads) & (i < HALF)
        source, target = x_ptr + head * stride_head + i, out_ptr + head * (2 * HALF) + i
        low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
        tl.store(target, (low * cos - high * sin).to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(target + HALF, (high * cos + low * sin).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rope(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    q_out_ptr: tl.tensor,
    k_out_ptr: tl.tensor,
    pos_ptr: tl.tensor,
    table_ptr: tl.tensor,
    stride_q: tl.tensor,
    stride_q_head: tl.tensor,
    stride_k: tl.tensor,
    stride_k_head: tl.tensor,
    num_heads: tl.tensor,
    num_kv_heads: tl.tensor,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)[None, :]
    line = table_ptr + tl.load(pos_ptr + token).to(tl.int64) * (2 * HALF) + i
    cos = tl.load(line, mask=i < HALF, other=0.0)
    sin = tl.load(line + HALF, mask=i < HALF, other=0.0)
    q_out = q_out_ptr + token * num_heads * 2 * HALF
    k_out = k_out_ptr + token * num_kv_heads * 2 * HALF
    _turn(q_ptr + token * stride_q, q_out, stride_q_head, num_heads, cos, sin, HALF, BLOCK, HEADS)
    _turn(k_ptr + token * stride_k, k_out, stride_k_head, num_kv_heads, cos, sin, HALF, BLOCK, HEADS)


def rope(
    q: torch.Tensor, k: torch.Tensor, pos: torch.Tensor, *, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, H, D], k [T, G, D], pos i32 [T], cos_sin f32 [context, D] -> rotated q, k."""
    num_tokens, num_heads, width = q.shape
    q, k = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k))
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if num_tokens:
        _rope[(num_tokens,)](
            q,
            k,
            q_out,
            k_out,
            pos,
            cos_sin.contiguous(),
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            num_heads,
            k.shape[1],
            HALF=width // 2,
            BLOCK=triton.next_power_of_2(width // 2),
            HEADS=HEADS,
            num_warps=4,
        )
    return q_out, k_out
