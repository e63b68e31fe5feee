"""Which page is whose: reference counts, the free stack and the fences of one page pool."""

from __future__ import annotations

import enum
import heapq
from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, LeaseError

__all__ = ["PagePool", "PageState", "PoolStats"]

Int32 = NDArray[np.int32]
Index = NDArray[np.intp]
# A typed scalar keeps `ufunc.at` on its fast path: 8 ns an entry instead of 90.
ONE = np.int32(1)
INT32, UINT32, INTP = np.dtype(np.int32), np.dtype(np.uint32), np.dtype(np.intp)
# Up to here a Python set is faster than three vector operations.
SMALL = 48


class PageState(enum.StrEnum):
    """Where a page is; every page is in exactly one state."""

    PADDING = "padding"
    FREE = "free"
    HELD = "held"
    FENCED = "fenced"
    """Released by every holder, but a step that may touch it has not been retired."""
    CACHED = "cached"
    """Nobody holds it but the prefix index: it can be evicted."""


@attrs.frozen
class PoolStats:
    """Pages by state (they add up to `num_pages`) and what has passed through."""

    num_pages: int
    num_free: int
    num_held: int
    num_fenced: int
    num_cached: int
    num_allocated: int
    """Pages handed out since the last reset."""


class PagePool:
    """Reference counts of `num_pages` pages of `page_tokens` tokens. Owned by one thread.

    Page 0 is padding and never handed out, so that `num_pages - 1` pages can be used and `num_pages` is
    the first extent of the tensors behind the pool. A page is free when nobody holds a reference, no
    step it was released `after` is in flight and the prefix index has not adopted it. Freed pages are
    reused last in, first out; of one release the last page (a sequence's tail) comes first.

    Every call checks all of its pages first; an error names a page with its state and changes nothing.

    Raises:
        ConfigError: `num_pages` < 2 or `page_tokens` < 1.
    """

    def __init__(self, num_pages: int, *, page_tokens: int) -> None:
        if not 2 <= num_pages < 2**31:
            raise ConfigError(f"num_pages is {num_pages}; expected 2 to 2**31 - 1 (page 0 is padding)")
        if page_tokens < 1:
            raise ConfigError(f"page_tokens is {page_tokens}; expected at least 1")
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self._ramp = np.arange(num_pages, dtype=np.int32)
        self._ramp.flags.writeable = False
        self.reset()

    def reset(self) -> None:
        """Everything free, as new: references, fences and adoptions are forgotten."""
        self._refs = np.zeros(self.num_pages, np.int32)
        self._fenced = np.zeros(self.num_pages, np.int32)
        self._adopted = np.zeros(self.num_pages, np.bool_)
        self._scratch = np.zeros(self.num_pages, np.int32)
        self._stack = self._ramp[:0:-1].copy()
        self._top = self.num_pages - 1
        self._num_idle = 0
        self._retired = -1
        self._fences: list[tuple[int, int, Index]] = []
        self._num_fences = 0
        self._num_allocated = 0

    @property
    def num_free(self) -> int:
        """Pages on the free stack."""
        return self._top

    @property
    def num_idle(self) -> int:
        """Pages that only the prefix index holds."""
        return self._num_idle

    @property
    def num_adopted(self) -> int:
        """Pages in the prefix index. Cost: one pass over all pages."""
        return int(np.count_nonzero(self._adopted))

    @property
    def refs(self) -> Int32:
        """[P] i32 references of holders, fenced ones included; the adoption by the index is not one."""
        view = self._refs.view()
        view.flags.writeable = False
        return view

    def allocate(self, count: int) -> Int32 | None:
        """`count` pages [count] i32 with one reference each, or None if fewer are free."""
        if count < 0:
            raise LeaseError(f"asked for {count} pages; expected 0 or more")
        if count > self._top:
            return None
        self._top -= count
        self._num_allocated += count
        pages = self._stack[self._top : self._top + count][::-1].copy()
        self._refs[pages.astype(np.intp)] = 1
        return pages

    def retain(self, page_ids: Int32 | Sequence[int]) -> None:
        """One more reference each, to pages that somebody holds or the index has adopted.

        Raises:
            LeaseError: a page is free, fenced, padding or not of this pool.
        """
        idx, refs = self._locate(page_ids)
        held = refs - self._fenced.take(idx) if self._fences else refs
        if np.count_nonzero(held) < idx.size:
            self._revive(idx[held == 0])
        np.add.at(self._refs, idx, ONE)

    def retain_adopted(self, page_ids: Int32) -> None:
        """`retain` for what the prefix index found: pages that are adopted and all different, unchecked."""
        idx = page_ids.astype(np.intp)
        refs = self._refs.take(idx)
        self._num_idle -= idx.size - int(np.count_nonzero(refs))
        refs += ONE
        self._refs[idx] = refs

    def release(self, page_ids: Int32 | Sequence[int], *, after: int | None = None) -> None:
        """Give up one reference each (a page named twice loses two).

        `after`: the last launched step that may touch the pages; the reference counts on until that step
        is retired.

        Raises:
            LeaseError: a page has fewer references than are given up, is padding or not of this pool.
        """
        idx, refs = self._locate(page_ids)
        if after is not None and after > self._retired:
            self._fence(idx, after)
        else:
            self._give_up(idx, refs)

    def retire(self, step: int) -> None:
        """Every step up to `step` has ended: references given up `after` them are gone."""
        self._retired = max(self._retired, step)
        due: list[Index] = []
        while self._fences and self._fences[0][0] <= self._retired:
            due.append(heapq.heappop(self._fences)[2])
        if due:
            idx = np.concatenate(due)
            np.subtract.at(self._fenced, idx, ONE)
            self._give_up(idx, self._refs.take(idx))

    def adopt(self, page_ids: Int32) -> None:
        """The prefix index takes a share in pages that are held; they outlive their holders from now on.

        Raises:
            LeaseError: a page is not held, is adopted already or is named twice; nothing has changed.
        """
        idx = self.require_held(page_ids, deed="published")
        again = self._adopted.take(idx)
        if np.count_nonzero(again):
            page = int(idx[again][0])
            raise LeaseError(f"page {page} is in the prefix index already; publish a page under one prefix only")
        if not self._all_differ(idx):
            raise LeaseError(f"pages {idx.tolist()} were adopted together; expected each page once")
        self._adopted[idx] = True

    def disown(self, page_ids: Int32) -> int:
        """The prefix index lets go of adopted pages; returns how many became free.

        Raises:
            LeaseError: a page is not adopted.
        """
        idx, refs = self._locate(page_ids)
        known = self._adopted.take(idx)
        if not known.all():
            raise self._misuse(int(idx[~known][0]), "dropped from the prefix index", "a page that is in it")
        self._adopted[idx] = False
        idle = idx[refs == 0]
        self._num_idle -= idle.size
        self._push(idle)
        return idle.size

    def require_held(self, page_ids: Int32 | Sequence[int], *, deed: str = "used") -> Index:
        """The pages as [n] intp, if each has a reference that is not fenced.

        Raises:
            LeaseError: one has none.
        """
        idx, refs = self._locate(page_ids)
        held = refs - self._fenced.take(idx) if self._fences else refs
        if np.count_nonzero(held) < idx.size:
            raise self._misuse(int(idx[held == 0][0]), deed, "a page that the caller holds")
        return idx

    def is_shared(self, page_id: int) -> bool:
        """Whether somebody besides one holder may read the page."""
        return bool(self._refs[page_id] > 1 or self._adopted[page_id])

    def is_adopted(self, page_ids: Int32) -> NDArray[np.bool_]:
        """[n] whether each page is in the prefix index."""
        return self._adopted.take(page_ids)

    def state(self, page_id: int) -> PageState:
        """State of one page of this pool."""
        if page_id == 0:
            return PageState.PADDING
        refs = int(self._refs[page_id])
        if refs > self._fenced[page_id]:
            return PageState.HELD
        if refs:
            return PageState.FENCED
        return PageState.CACHED if self._adopted[page_id] else PageState.FREE

    def stats(self) -> PoolStats:
        num_held = int(np.count_nonzero(self._refs > self._fenced))
        num_fenced = int(np.count_nonzero(self._refs)) - num_held
        return PoolStats(self.num_pages, self._top, num_held, num_fenced, self._num_idle, self._num_allocated)

    def check(self) -> None:
        """Verify every invariant of the pool; raises AssertionError. Cost: several passes over all pages."""
        free = self._stack[: self._top]
        assert np.unique(free).size == free.size, "a page is on the free stack twice"
        assert free.size == 0 or (free.min() > 0 and free.max() < self.num_pages), "free stack holds a foreign page"
        assert self._refs[0] == 0 and not self._adopted[0], "the padding page was used"
        assert self._refs.min() >= 0 and self._fenced.min() >= 0, "a count is negative"
        assert not self._refs[free].any() and not self._adopted[free].any(), "a page in use is on the free stack"
        used = (self._refs > 0) | self._adopted
        assert np.count_nonzero(used) + self._top == self.num_pages - 1, "a page was lost"
        assert np.count_nonzero((self._refs == 0) & self._adopted) == self._num_idle, "idle pages miscounted"
        assert (self._fenced <= self._refs).all(), "more references are fenced than there are"
        pending = np.concatenate([f[2] for f in self._fences] or [np.zeros(0, np.intp)])
        assert (np.bincount(pending, minlength=self.num_pages) == self._fenced).all(), "fences miscounted"
        assert all(step > self._retired for step, _, _ in self._fences), "an ended fence was left"

    def _locate(self, page_ids: Int32 | Sequence[int]) -> tuple[Index, Int32]:
        """The pages as [n] intp and their references, after checking that they are of this pool."""
        ids = page_ids
        if not isinstance(ids, np.ndarray) or ids.dtype != INT32:
            ids = self._as_int32(ids)
        # Negative ids become huge here, so that one bounds check catches both ends.
        idx = ids.view(UINT32).astype(INTP)
        try:
            return idx, self._refs.take(idx)
        except IndexError:
            page = int(ids[(ids < 0) | (ids >= self.num_pages)][0])
        raise self._foreign(page)

    def _as_int32(self, page_ids: Sequence[int] | NDArray[np.generic]) -> Int32:
        ids = np.asarray(page_ids)
        if ids.size == 0:
            return np.zeros(0, np.int32)
        if ids.dtype.kind not in "iu":
            raise LeaseError(f"page ids are of type {ids.dtype}; expected integers")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.num_pages:
            raise self._foreign(low if low < 0 else high)
        return ids.astype(np.int32)

    def _give_up(self, idx: Index, refs: Int32) -> None:
        differ = self._all_differ(idx)
        if differ:
            left = refs - ONE
            self._refs[idx] = left
        else:
            np.subtract.at(self._refs, idx, ONE)
            left = self._refs.take(idx)
        # Nothing left anywhere is the common case, and then nothing can be negative or fenced.
        if np.count_nonzero(left):
            spare = left - self._fenced.take(idx) if self._fences else left
            if spare.min() < 0:
                np.add.at(self._refs, idx, ONE)
                raise self._misuse(int(idx[spare < 0][0]), "released", "a page that the caller holds")
            idx = idx[left == 0]
        elif self._fences and np.count_nonzero(self._fenced.take(idx)):
            self._refs[idx] = refs
            page = int(idx[self._fenced.take(idx) > 0][0])
            raise self._misuse(page, "released", "a page that the caller holds")
        self._end(idx if differ else self._distinct(idx))

    def _end(self, idx: Index) -> None:
        """The last references to these pages are gone: free them, or leave them to the index."""
        adopted = self._adopted.take(idx)
        num_idle = int(np.count_nonzero(adopted))
        if num_idle:
            self._num_idle += num_idle
            idx = idx[~adopted]
        self._push(idx)

    def _fence(self, idx: Index, step: int) -> None:
        np.add.at(self._fenced, idx, ONE)
        spare = self._refs.take(idx) - self._fenced.take(idx)
        if idx.size and spare.min() < 0:
            np.subtract.at(self._fenced, idx, ONE)
            raise self._misuse(int(idx[spare < 0][0]), f"released after step {step}", "a page that the caller holds")
        # The running number keeps releases of one step in order and arrays out of the comparison.
        self._num_fences += 1
        heapq.heappush(self._fences, (step, self._num_fences, idx))

    def _revive(self, unheld: Index) -> None:
        adopted = self._adopted.take(unheld)
        if not adopted.all():
            raise self._misuse(int(unheld[~adopted][0]), "retained", "a page that is held or cached")
        self._num_idle -= self._distinct(unheld[self._refs.take(unheld) == 0]).size

    def _all_differ(self, idx: Index) -> bool:
        """Whether no page is named twice; cheaper than sorting."""
        count = idx.size
        if count <= SMALL:
            return count < 2 or len(set(idx.tolist())) == count
        if count >= self.num_pages:
            return False
        order = self._ramp[:count]
        self._scratch[idx] = order
        return self._scratch.take(idx).tobytes() == order.tobytes()

    def _distinct(self, idx: Index) -> Index:
        """`idx` without repeats, in order."""
        if self._all_differ(idx):
            return idx
        _, first = np.unique(idx, return_index=True)
        return idx[np.sort(first)]

    def _push(self, idx: Index) -> None:
        self._stack[self._top : self._top + idx.size] = idx
        self._top += idx.size

    def _misuse(self, page: int, deed: str, expected: str) -> LeaseError:
        refs, fenced = int(self._refs[page]), int(self._fenced[page])
        return LeaseError(
            f"page {page} was {deed} while {self.state(page)} (references {refs - fenced}, fenced {fenced}); "
            f"expected {expected}; look for a second release or a stale page table"
        )

    def _foreign(self, page: int) -> LeaseError:
        return LeaseError(
            f"page {page} is not of this pool (foreign); expected 1 to {self.num_pages - 1}; "
            "use pages only with the pool that handed them out"
        )
