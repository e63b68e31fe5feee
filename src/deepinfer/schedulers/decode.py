"""The carried rows of a step: every sequence past its prompt whose allowance is not yet in flight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .draft import DecodeRows
from .ledger import Ledger
from .preemption import PageGrants
from .table import SequenceTable

__all__ = ["choose_decode"]

Int32 = NDArray[np.int32]


def choose_decode(ledger: Ledger, grants: PageGrants) -> DecodeRows:
    """All rows that can take a token, with pages for the most keys they may need."""
    table, num_drafts = ledger.table, ledger.limits.num_drafts
    mask = table.decoding & (table.out_lo < table.limit)
    if num_drafts:
        base, k_max, q_max = _with_drafts(table, num_drafts)
    else:
        k_max, q_max = table.prompt_len + table.out_lo, None
        base = k_max
    short = mask & (k_max > table.capacity)
    if np.count_nonzero(short) and not _grow_all(ledger, np.flatnonzero(short), k_max):
        _grow_in_order(ledger, grants, np.flatnonzero(short), mask, base, k_max)
        mask &= table.decoding
    return DecodeRows(mask, k_max, q_max)


def _with_drafts(table: SequenceTable, num_drafts: int) -> tuple[Int32, Int32, Int32]:
    """Longest length, keys and query tokens of each row.

    No row drafts beyond its last allowed token, and none has more keys than that token's predecessor needs:
    the device uses min(q_max, k_max + 1 - true length) query tokens. That is 0 only for a row whose sequence
    has reached its limit in the step before.
    """
    drafts = np.minimum(table.limit - table.out_lo - 1, num_drafts)
    last = table.prompt_len + table.limit - 1
    base = np.minimum(table.prompt_len + table.out_hi, last)
    return base, np.minimum(base + drafts, last), drafts + 1


def _grow_all(ledger: Ledger, slots: NDArray[np.intp], k_max: Int32) -> bool:
    """The usual case: the book has pages for everybody."""
    table = ledger.table
    tokens = table.page_tokens
    counts = (k_max[slots] - table.capacity[slots] + (tokens - 1)) // tokens
    page_ids = ledger.book.allocate(int(counts.sum()))
    if page_ids is None:
        return False
    table.append_pages_many(slots, counts, page_ids)
    return True


def _grow_in_order(
    ledger: Ledger, grants: PageGrants, slots: NDArray[np.intp], mask: NDArray[np.bool_], base: Int32, k_max: Int32
) -> None:
    """Pages in policy order; drafts are given up before anybody is preempted for them."""
    table = ledger.table
    needy = sorted(table.sequences(slots), key=lambda sequence: sequence.order)
    for sequence in needy:
        slot = sequence.slot
        if not slot:  # preempted for an earlier one
            continue
        if grants.grant(sequence, ledger.pages_of(int(base[slot] - table.capacity[slot]))):
            k_max[slot] = min(k_max[slot], table.capacity[slot])
        else:
            mask[slot] = False
