"""Batch-invariant attention on the CPU: one order of sums for decode, chunks and whole prompts.

Keys are taken in tiles of `TILE` counted from key 0 and merged in that order (online softmax), so a token's
result depends on its query and its keys alone. A tile that a token does not see changes nothing: weights are
exactly 0, the rescaling factor exactly 1. Specification: `kernels/reference.py::attention`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .fixed_rows import multiply, rows_agree

if TYPE_CHECKING:
    from ...layers.batch import RowSet

__all__ = ["TILE", "TiledAttention"]

#: Keys of a tile.
TILE = 128
#: Tokens of a chunk row that share a pass over the tiles: later ones would only see masked tiles.
QUERIES = 64


class TiledAttention:
    """Attention op whose rows are the same bits in any batch. Keeps one flag per head width; not thread-safe."""

    def __init__(self) -> None:
        self._fixed: dict[int, bool] = {}

    def __call__(
        self,
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
        num_kv_heads, n = k_pool.shape[2], rows.num_decode
        group = q.shape[1] // num_kv_heads
        grouped = q.reshape(q.shape[0], num_kv_heads, group, q.shape[2]).float() * scale
        spans = [(0, n, 0, n)] if n else []
        offsets = rows.cu_q.tolist()
        for r in range(n, len(offsets) - 1):
            starts = range(offsets[r], offsets[r + 1], QUERIES)
            spans += [(first, min(first + QUERIES, offsets[r + 1]), r, r + 1) for first in starts]
        for first, last, row, end in spans:
            table = page_table[rows.slot_ids[row:end].long()].long()
            # [B, G, L * h, D]: decode rows are B lines of one token, a chunk is one line of L tokens.
            query = grouped[first:last].unflatten(0, (end - row, -1)).transpose(1, 2).flatten(2, 3)
            pos = rows.pos[first:last].view(end - row, -1)
            mixed = self._mix(query, (k_pool, v_pool), table, pos)
            shape = (end - row, num_kv_heads, pos.shape[1], -1, q.shape[2])
            out[first:last] = mixed.view(shape).transpose(1, 2).reshape(last - first, *q.shape[1:]).to(q.dtype)
        return out

    def _mix(
        self,
        query: torch.Tensor,
        pools: tuple[torch.Tensor, torch.Tensor],
        table: torch.Tensor,
        pos: torch.Tensor,
    ) -> torch.Tensor:
        """query f32 [B, G, L * h, D], table [B, pages], pos [B, L] -> [B, G, L * h, D]."""
        batch, num_kv_heads, num_queries, width = query.shape
        fixed = self._needs_blocks(width)
        query = query.flatten(0, 1)
        pos = pos.repeat_interleave(num_queries // pos.shape[1], dim=1)
        high = query.new_full((*query.shape[:2], 1), -torch.inf)
        total, mixed = torch.zeros_like(high), torch.zeros_like(query)
        for first in range(0, int(pos.max()) + 1, TILE):
            keys, values, where = _tile(pools, table, first, pos.amax(dim=1))
            scores = multiply(query, lambda x, k=keys: torch.bmm(x, k.transpose(1, 2)), fixed=fixed)
            hidden = (where > pos[:, :, None])[:, None].expand(-1, num_kv_heads, -1, -1).flatten(0, 1)
            scores = scores.masked_fill(hidden, -torch.inf)
            best = torch.maximum(high, scores.amax(dim=-1, keepdim=True))
            weights, shrink = torch.exp(scores - best), torch.exp(high - best)
            total = total * shrink + weights.sum(dim=-1, keepdim=True)
            mixed = mixed * shrink + multiply(weights, lambda x, v=values: torch.bmm(x, v), fixed=fixed)
            high = best
        return (mixed / total).unflatten(0, (batch, num_kv_heads))

    def _needs_blocks(self, width: int) -> bool:
        if width not in self._fixed:
            keys = torch.randn(3, TILE, width, generator=torch.Generator().manual_seed(21))
            into, out_of = (lambda x: torch.bmm(x, keys.transpose(1, 2))), (lambda x: torch.bmm(x, keys))
            agree = rows_agree(into, (3, width), dtype=torch.float32)
            self._fixed[width] = not (agree and rows_agree(out_of, (3, TILE), dtype=torch.float32))
        return self._fixed[width]


def _tile(
    pools: tuple[torch.Tensor, torch.Tensor], table: torch.Tensor, first: int, last_pos: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values f32 [B * G, TILE, D] from key `first` on, zeros past `last_pos` [B]; their numbers [TILE]."""
    page_tokens = pools[0].shape[1]
    where = torch.arange(first, first + TILE)
    stale = where > last_pos[:, None]
    page = (where // page_tokens).clamp(max=table.shape[1] - 1)
    place = (table[:, page], (where % page_tokens).expand(len(table), -1))
    keys, values = (
        pool[place].float().masked_fill_(stale[:, :, None, None], 0).transpose(1, 2).flatten(0, 1) for pool in pools
    )
    return keys, values, where
