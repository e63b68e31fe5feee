"""Keys and values into their pages, one token a program. Specification: `kernels/reference.py::cache_write`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from ...layers.batch import RowSet

__all__ = ["cache_write"]


@triton.jit
def _cache_write(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_pool_ptr: tl.tensor,
    v_pool_ptr: tl.tensor,
    table_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    row_of_ptr: tl.tensor,
    pos_ptr: tl.tensor,
    stride_k: tl.tensor,
    stride_k_head: tl.tensor,
    stride_v: tl.tensor,
    stride_v_head: tl.tensor,
    stride_k_page: tl.tensor,
    stride_k_line: tl.tensor,
    stride_k_pool_head: tl.tensor,
    stride_v_page: tl.tensor,
    stride_v_line: tl.tensor,
    stride_v_pool_head: tl.tensor,
    stride_table: tl.tensor,
    size: tl.tensor,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    pos = tl.load(pos_ptr + token)
    slot = tl.load(slots_ptr + tl.load(row_of_ptr + token)).to(tl.int64)
    page = tl.load(table_ptr + slot * stride_table + pos // PAGE).to(tl.int64)
    line = pos % PAGE
    i = tl.arange(0, BLOCK)
    inside = i < size
    head, d = i // WIDTH, i % WIDTH
    k = tl.load(k_ptr + token * stride_k + head * stride_k_head + d, mask=inside)
    v = tl.load(v_ptr + token * stride_v + head * stride_v_head + d, mask=inside)
    k_place = k_pool_ptr + page * stride_k_page + line * stride_k_line + head * stride_k_pool_head + d
    v_place = v_pool_ptr + page * stride_v_page + line * stride_v_line + head * stride_v_pool_head + d
    tl.store(k_place, k.to(k_pool_ptr.dtype.element_ty), mask=inside)
    tl.store(v_place, v.to(v_pool_ptr.dtype.element_ty), mask=inside)


def cache_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    rows: RowSet,
) -> None:
    """k, v [T, G, D] into pools [P, Z, G, D] (elements of a head adjacent) at each token's page and line."""
    num_tokens, num_kv_heads, width = k.shape
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    size = num_kv_heads * width
    if num_tokens:
        _cache_write[(num_tokens,)](
            k,
            v,
            k_pool,
            v_pool,
            page_table,
            rows.slot_ids,
            rows.row_of,
            rows.pos,
            *k.stride()[:2],
            *v.stride()[:2],
            *k_pool.stride()[:3],
            *v_pool.stride()[:3],
            page_table.stride(0),
            size,
            WIDTH=width,
            PAGE=k_pool.shape[1],
            BLOCK=triton.next_power_of_2(size),
            num_warps=4,
        )
