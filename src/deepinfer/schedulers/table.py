"""Running sequences as arrays with one entry a slot, so that a step costs no Python per row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .sequence import Sequence

__all__ = ["SequenceTable"]

Int32 = NDArray[np.int32]
Index = NDArray[np.intp]


class SequenceTable:
    """The running sequences: S = max_rows + 1 slots, slot 0 is padding. Owned by one scheduler.

    Three output counts bracket what is known: `out` is settled; `out_lo` and `out_hi` add what the steps
    in flight will give at least and at most. Without drafts the two are one array.
    """

    def __init__(self, *, max_rows: int, page_tokens: int, num_drafts: int) -> None:
        size = max_rows + 1
        self.page_tokens = page_tokens
        #: [S] object
        self.owner = np.full(size, None, object)
        self.live = np.zeros(size, np.bool_)
        #: The last prompt chunk has been planned: one row a step from here on.
        self.decoding = np.zeros(size, np.bool_)
        self.prompt_len = np.zeros(size, np.int32)
        self.out = np.zeros(size, np.int32)
        self.out_lo = np.zeros(size, np.int32)
        self.out_hi = self.out_lo if num_drafts == 0 else np.zeros(size, np.int32)
        #: Most output tokens it may have.
        self.limit = np.zeros(size, np.int32)
        self.min_out = np.zeros(size, np.int32)
        #: Tokens to be computed in chunks: the prompt, and after a preemption what was already produced.
        self.target = np.zeros(size, np.int32)
        #: Tokens whose chunks have been planned, and settled.
        self.planned = np.zeros(size, np.int32)
        self.settled = np.zeros(size, np.int32)
        #: Whole pages offered to the prefix index.
        self.published = np.zeros(size, np.int32)
        self.num_pages = np.zeros(size, np.int32)
        #: num_pages as the executor knows it, and in tokens.
        self.synced = np.zeros(size, np.int32)
        self.capacity = np.zeros(size, np.int32)
        #: [S, W] i32, grows by doubling.
        self.pages = np.zeros((size, 8), np.int32)
        #: [S, C] i32 output tokens, grows by doubling.
        self.tokens = np.zeros((size, 64), np.int32)
        #: [K, S] i32, -1 fills.
        self.stops = np.full((1, size), -1, np.int32)

    # --- one slot -------------------------------------------------------------------------------

    def occupy(self, slot: int, sequence: Sequence, *, limit: int, start: int, page_ids: Int32) -> None:
        """`sequence` takes `slot`; the keys of its first `start` tokens lie in `page_ids`."""
        outputs = sequence.output_ids
        num_out = len(outputs)
        self.owner[slot] = sequence
        self.live[slot], self.decoding[slot] = True, False
        self.prompt_len[slot] = sequence.prompt_len
        self.out[slot] = self.out_lo[slot] = self.out_hi[slot] = num_out
        self.limit[slot] = limit
        self.min_out[slot] = sequence.min_tokens
        self.target[slot] = sequence.prompt_len + num_out
        self.planned[slot] = self.settled[slot] = start
        self.published[slot] = len(page_ids)
        self.num_pages[slot] = self.synced[slot] = self.capacity[slot] = 0
        self.append_pages(slot, page_ids)
        self._set_stops(slot, sequence.stop_ids)
        self._widen_tokens(num_out)
        self.tokens[slot, :num_out] = outputs
        sequence.enter(self, slot)

    def vacate(self, slot: int) -> None:
        """The slot's sequence leaves with its outputs."""
        sequence: Sequence = self.owner[slot]
        sequence.leave()
        self.owner[slot] = None
        self.live[slot] = self.decoding[slot] = False
        self.num_pages[slot] = self.synced[slot] = self.capacity[slot] = 0

    def append_pages(self, slot: int, page_ids: Int32) -> None:
        old = int(self.num_pages[slot])
        new = old + len(page_ids)
        self._widen_pages(new)
        self.pages[slot, old:new] = page_ids
        self.num_pages[slot] = new
        self.capacity[slot] = new * self.page_tokens

    def page_ids(self, slot: int) -> Int32:
        """[num_pages] i32, a copy."""
        return self.pages[slot, : self.num_pages[slot]].copy()

    def output_ids(self, slot: int) -> Int32:
        """[out] i32 settled output tokens, a copy."""
        return self.tokens[slot, : self.out[slot]].copy()

    def num_outputs(self, slot: int) -> int:
        return int(self.out[slot])

    def num_keys(self, slot: int) -> int:
        """Tokens whose keys are computed and settled; the newest token has none yet."""
        settled = int(self.settled[slot])
        if settled < self.target[slot]:
            return settled
        return max(settled, int(self.prompt_len[slot] + self.out[slot]) - 1)

    def chunk_in_flight(self, slot: int) -> bool:
        return bool(self.planned[slot] != self.settled[slot] or self.out_lo[slot] != self.out[slot])

    def sequences(self, slots: Index) -> list[Sequence]:
        """The running sequences of `slots`."""
        return self.owner[slots].tolist()

    # --- many slots -----------------------------------------------------------------------------

    def append_pages_many(self, slots: Index, counts: Int32, page_ids: Int32) -> None:
        """Give `counts[i]` of `page_ids` to `slots[i]`, in order."""
        self._widen_pages(int((self.num_pages[slots] + counts).max(initial=0)))
        owner, index = _ragged(slots, self.num_pages[slots], counts)
        self.pages[owner, index] = page_ids
        self.num_pages[slots] += counts
        self.capacity[slots] = self.num_pages[slots] * self.page_tokens

    def take_page_delta(self) -> Int32:
        """[W, 3] i32 (slot, index, page) entries that the executor does not know yet; now it does."""
        slots = (self.num_pages != self.synced).nonzero()[0]
        if not len(slots):
            return np.zeros((0, 3), np.int32)
        owner, index = _ragged(slots, self.synced[slots], self.num_pages[slots] - self.synced[slots])
        self.synced[slots] = self.num_pages[slots]
        delta = np.empty((len(owner), 3), np.int32)
        delta[:, 0], delta[:, 1], delta[:, 2] = owner, index, self.pages[owner, index]
        return delta

    def expect_tokens(self, mask: NDArray[np.bool_], most: Int32 | None) -> None:
        """The masked rows go into a step: each gives 1 to `most` tokens (one where `most` is None)."""
        self.out_lo += mask
        if most is not None:
            self.out_hi += np.where(mask, most, 0)

    def expect_first(self, slot: int) -> None:
        """The slot's last chunk goes into a step and gives one token."""
        self.decoding[slot] = True
        self.out_lo[slot] += 1
        if self.out_hi is not self.out_lo:
            self.out_hi[slot] += 1

    def write_tokens(self, slots: Index, index: Int32, tokens: Int32) -> None:
        """tokens[i] becomes output number `index[i]` of `slots[i]`."""
        try:
            self.tokens[slots, index] = tokens
        except IndexError:  # checked by numpy anyway, and before anything is written
            self._widen_tokens(int(index.max()) + 1)
            self.tokens[slots, index] = tokens

    # --- growth ---------------------------------------------------------------------------------

    def _widen_pages(self, width: int) -> None:
        if width > self.pages.shape[1]:
            self.pages = _widened(self.pages, width)

    def _widen_tokens(self, width: int) -> None:
        if width > self.tokens.shape[1]:
            self.tokens = _widened(self.tokens, width)

    def _set_stops(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        missing = len(stop_ids) - len(self.stops)
        if missing > 0:
            more = np.full((missing, self.stops.shape[1]), -1, np.int32)
            self.stops = np.concatenate([self.stops, more])
        self.stops[:, slot] = -1
        self.stops[: len(stop_ids), slot] = stop_ids


def _widened(array: Int32, width: int) -> Int32:
    wide = np.zeros((array.shape[0], max(width, 2 * array.shape[1])), np.int32)
    wide[:, : array.shape[1]] = array
    return wide


def _ragged(slots: Index, start: Int32, counts: Int32) -> tuple[Index, Int32]:
    """Each slot `counts` times, with start, start + 1, ... beside it."""
    total = int(counts.sum())
    if total == len(counts) and (not total or counts.min() == 1):  # one each, as almost always in decode
        return slots, start
    offset = np.arange(total, dtype=np.int32) - np.repeat(np.cumsum(counts, dtype=np.int32) - counts, counts)
    return np.repeat(slots, counts), np.repeat(start, counts) + offset
