"""Keys and values into their pages. Specification: `kernels/reference.py::cache_write`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...protocols import CacheWriteOp

if TYPE_CHECKING:
    from ...layers.batch import RowSet

__all__ = ["cache_write", "make_cache_write"]


def cache_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    rows: RowSet,
) -> None:
    """k, v [T, G, D] into pools [P, Z, G, D] at each token's page and line."""
    page_tokens = k_pool.shape[1]
    slots = rows.slot_ids.index_select(0, rows.row_of).long()
    pos = rows.pos.long()
    where = (page_table[slots, pos // page_tokens].long(), pos % page_tokens)
    k_pool.index_put_(where, k.to(k_pool.dtype))
    v_pool.index_put_(where, v.to(v_pool.dtype))


def make_cache_write(*, device: str, dtype: str, invariant: bool = False) -> CacheWriteOp:
    return cache_write
