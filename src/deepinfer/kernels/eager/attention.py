"""Attention over pages with torch's fused attention. Specification: `kernels/reference.py::attention`.

Decode rows are one batched call over gathered pages. Chunk rows run one by one where lengths can be read
for free (CPU), and padded to the longest elsewhere, so that the device is never waited for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ...protocols import AttentionOp
from .tiles import TiledAttention

if TYPE_CHECKING:
    from ...layers.batch import RowSet

__all__ = ["attention", "make_attention"]


def attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    rows: RowSet,
    *,
    scale: float,
) -> torch.Tensor:
    """q [T, H, D] over pools [P, Z, G, D], causal by absolute position -> [T, H, D]."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    n = rows.num_decode
    pools = (k_pool, v_pool)
    if n:
        out[:n] = _decode(q[:n], pools, page_table[rows.slot_ids[:n].long()], rows, scale)
    if n < q.shape[0]:
        run = _chunks_one_by_one if q.device.type == "cpu" else _chunks_padded
        run(out, q, pools, page_table, rows, scale)
    return out


def _decode(
    q: torch.Tensor, pools: tuple[torch.Tensor, torch.Tensor], table: torch.Tensor, rows: RowSet, scale: float
) -> torch.Tensor:
    n, num_heads, width = q.shape
    k_len = rows.k_len[:n]
    max_k = int(k_len.max()) if q.device.type == "cpu" else rows.max_k
    keys, values = _gather(pools, table, max_k, k_len)
    # The heads of a group stand in for query positions, so no key is repeated.
    grouped = q.view(n, keys.shape[1], -1, width) if q.is_contiguous() else q.reshape(n, keys.shape[1], -1, width)
    mask = torch.arange(keys.shape[2], device=q.device) < k_len[:, None]
    mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask[:, None, None], scale=scale)
    return mixed.reshape(n, num_heads, width)


def _chunks_one_by_one(
    out: torch.Tensor,
    q: torch.Tensor,
    pools: tuple[torch.Tensor, torch.Tensor],
    page_table: torch.Tensor,
    rows: RowSet,
    scale: float,
) -> None:
    offsets, lengths, slots = rows.cu_q.tolist(), rows.k_len.tolist(), rows.slot_ids.long()
    for r in range(rows.num_decode, len(lengths)):
        first, last, num_keys = offsets[r], offsets[r + 1], lengths[r]
        if first == last:
            continue
        keys, values = _gather(pools, page_table[slots[r : r + 1]], num_keys, rows.k_len[r : r + 1])
        query = q[first:last].transpose(0, 1)[None]
        whole = last - first == num_keys
        seen = torch.arange(num_keys) <= rows.pos[first:last, None]
        mixed = F.scaled_dot_product_attention(
            query,
            keys[:, :, :num_keys],
            values[:, :, :num_keys],
            attn_mask=None if whole else seen[None, None],
            is_causal=whole,
            scale=scale,
            enable_gqa=True,
        )
        out[first:last] = mixed[0].transpose(0, 1)


def _chunks_padded(
    out: torch.Tensor,
    q: torch.Tensor,
    pools: tuple[torch.Tensor, torch.Tensor],
    page_table: torch.Tensor,
    rows: RowSet,
    scale: float,
) -> None:
    n = rows.num_decode
    k_len, starts = rows.k_len[n:], rows.cu_q[n:-1].long()
    keys, values = _gather(pools, page_table[rows.slot_ids[n:].long()], rows.max_k, k_len)
    steps = torch.arange(rows.max_q, device=q.device)
    tokens = (starts[:, None] + steps).clamp_(max=q.shape[0] - 1)
    seen = torch.arange(keys.shape[2], device=q.device) <= rows.pos[tokens][:, :, None]
    mixed = F.scaled_dot_product_attention(
        q[tokens].transpose(1, 2), keys, values, attn_mask=seen[:, None], scale=scale, enable_gqa=True
    )
    row = rows.row_of[n:].long() - n
    step = torch.arange(n, q.shape[0], device=q.device) - starts[row]
    out[n:] = mixed[row, :, step]


def _gather(
    pools: tuple[torch.Tensor, torch.Tensor], table: torch.Tensor, max_k: int, k_len: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages of each line of `table` [B, pages] -> keys, values [B, G, K, D], K whole pages; zeros past k_len."""
    page_tokens = pools[0].shape[1]
    page_ids = table[:, : -(-max_k // page_tokens)].long()
    # Whatever an unwritten line holds (NaN times a zero weight is NaN), it must not reach the sums.
    stale = torch.arange(page_ids.shape[1] * page_tokens, device=table.device) >= k_len[:, None]
    keys, values = (pool[page_ids].flatten(1, 2).masked_fill_(stale[:, :, None, None], 0) for pool in pools)
    return keys.transpose(1, 2), values.transpose(1, 2)


def make_attention(*, device: str, dtype: str, invariant: bool = False) -> AttentionOp:
    return TiledAttention() if invariant else attention
