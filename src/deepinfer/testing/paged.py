"""Batches of ragged rows over scattered pages, poisoned wherever no op may look."""

from __future__ import annotations

import attrs
import torch

from ..layers.batch import RowSet

__all__ = ["PagedBatch", "Sequence", "make_paged_batch"]


@attrs.frozen
class Sequence:
    """Part of a sequence in a batch: `num_new` tokens that end at position `k_len - 1`. 0 new: an empty row."""

    num_new: int
    k_len: int
    #: Fixes the keys, values and queries: the same ident has the same ones in any batch.
    ident: int = 0


@attrs.frozen(eq=False)
class PagedBatch:
    """Inputs of attention and cache writes. Letters as in `deepinfer.protocols`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    #: Hold the keys and values of every position below k_len; NaN everywhere else.
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    page_table: torch.Tensor
    rows: RowSet

    def to(self, device: str, dtype: torch.dtype) -> PagedBatch:
        """The same batch on another device, its values in another dtype."""
        values = {name: getattr(self, name).to(device, dtype) for name in ("q", "k", "v", "k_pool", "v_pool")}
        names = ("slot_ids", "cu_q", "pos", "row_of", "k_len")
        rows = attrs.evolve(self.rows, **{name: getattr(self.rows, name).to(device) for name in names})
        return PagedBatch(**values, page_table=self.page_table.to(device), rows=rows)


def make_paged_batch(
    sequences: list[Sequence],
    *,
    num_heads: int,
    num_kv_heads: int,
    width: int,
    page_tokens: int,
    num_decode: int = 0,
    slack: int = 0,
    seed: int = 0,
    context: int | None = None,
) -> PagedBatch:
    """A float32 batch on the CPU. Pages are scattered by `seed`, and so are slots; unused table entries point to
    a page full of NaN.

    Args:
        sequences: rows, in order; the first `num_decode` have one new token each.
        num_heads: H.
        num_kv_heads: G.
        width: D.
        page_tokens: Z.
        num_decode: rows that the batch declares as decode rows.
        slack: how much `max_q` and `max_k` overstate.
        seed: of the places (never of the values).
        context: positions that the page table has room for; None: as many as needed.
    """
    places = torch.Generator().manual_seed(seed)
    longest = max([s.k_len for s in sequences] + [1])
    pages_each = -(-max(longest + slack, context or 0) // page_tokens)
    num_slots, used = len(sequences) + 2, [-(-s.k_len // page_tokens) for s in sequences]
    num_pages = sum(used) + 3
    order = (torch.randperm(num_pages - 2, generator=places) + 1).tolist()
    slots = (torch.randperm(num_slots - 1, generator=places)[: len(sequences)] + 1).tolist()
    table = torch.full((num_slots, pages_each), num_pages - 1, dtype=torch.int32)
    pools = [torch.full((num_pages, page_tokens, num_kv_heads, width), torch.nan) for _ in range(2)]
    new = [tuple(torch.empty(0, heads, width) for heads in (num_heads, num_kv_heads, num_kv_heads))]
    for sequence, slot, count in zip(sequences, slots, used, strict=True):
        table[slot, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        q, k, v = _values(sequence, num_heads, num_kv_heads, width)
        for pool, x in zip(pools, (k, v), strict=True):
            pos = torch.arange(sequence.k_len)
            pool[table[slot, pos // page_tokens].long(), pos % page_tokens] = x
        new.append(tuple(x[sequence.k_len - sequence.num_new :] for x in (q, k, v)))
    q, k, v = (torch.cat(parts) for parts in zip(*new, strict=True))
    rows = _rows(sequences, slots, num_decode=num_decode, slack=slack)
    return PagedBatch(q=q, k=k, v=v, k_pool=pools[0], v_pool=pools[1], page_table=table, rows=rows)


def _values(
    sequence: Sequence, num_heads: int, num_kv_heads: int, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of positions 0 ... k_len - 1; a longer sequence of the same ident starts with the same values."""
    made = []
    for which, heads in enumerate((num_heads, num_kv_heads, num_kv_heads)):
        source = torch.Generator().manual_seed(1000 * sequence.ident + which)
        # Drawn in one go, so a prefix of a longer draw: normal_ fills blocks of 16, hence the rounding up.
        length = -(-sequence.k_len // 16) * 16
        values = torch.rand((length, heads, width), generator=source)[: sequence.k_len]
        made.append((values - 0.5) * (4 if which < 2 else 2))
    return made[0], made[1], made[2]


def _rows(sequences: list[Sequence], slots: list[int], *, num_decode: int, slack: int) -> RowSet:
    lengths = torch.tensor([s.num_new for s in sequences], dtype=torch.int64)
    assert all(s.num_new == 1 for s in sequences[:num_decode]), "decode rows have one new token"
    cu_q = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).to(torch.int32)
    positions = [torch.arange(s.k_len - s.num_new, s.k_len) for s in sequences]
    return RowSet(
        slot_ids=torch.tensor(slots, dtype=torch.int32),
        cu_q=cu_q,
        pos=torch.cat([torch.zeros(0, dtype=torch.int64), *positions]).to(torch.int32),
        row_of=torch.arange(len(sequences)).repeat_interleave(lengths).to(torch.int32),
        k_len=torch.tensor([s.k_len for s in sequences], dtype=torch.int32),
        max_q=max([s.num_new for s in sequences] + [0]) + slack,
        max_k=max([s.k_len for s in sequences] + [0]) + slack,
        num_decode=num_decode,
    )
