"""The page pool and the prefix index as one: what a scheduler asks for pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, LeaseError, OutOfPages
from ..plan import Move
from .pages import PagePool, PoolStats
from .prefix import MissReason, PrefixIndex, PrefixMatch

__all__ = ["CacheStats", "NullBook", "PagedBook"]

Int32 = NDArray[np.int32]


@attrs.frozen
class CacheStats:
    """Counts since the last reset."""

    #: `match` calls; a request that is looked up again after a preemption counts again.
    num_queries: int
    query_tokens: int
    hit_tokens: int
    #: Queries by why their hit was not longer; they add up to `num_queries`.
    misses: Mapping[MissReason, int]
    #: Tokens that were not hit; with `hit_tokens` they add up to `query_tokens`.
    missed_tokens: Mapping[MissReason, int]
    #: Pages in the index now.
    num_indexed: int
    num_evicted: int
    #: Pages in use that left the index because a page before them was evicted.
    num_dropped: int
    num_duplicates: int
    #: Allocations that were refused.
    num_refused: int
    pages: PoolStats

    @property
    def hit_rate(self) -> float:
        """Share of looked-up tokens that were cached; 0 before the first query."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0


class PagedBook:
    """Page bookkeeping of one pool with prefix caching (a `KVBook`). Owned by one thread.

    The index holds published pages beyond their requests and gives back the least recently used ones
    when `allocate` finds the free stack too short.

    num_pages: pages of the pool, page 0 (padding) included. page_tokens: tokens of a page.

    Raises:
        ConfigError: `num_pages` < 2 or `page_tokens` < 1.

    Example:
        >>> import numpy as np
        >>> book = PagedBook(8, page_tokens=4)
        >>> prompt = np.arange(9, dtype=np.int32)
        >>> pages = book.allocate(3)
        >>> book.publish(prompt, pages)
        >>> book.release(pages)
        >>> book.match(prompt).num_tokens
        8
    """

    def __init__(self, num_pages: int, *, page_tokens: int, prefix_caching: bool = True) -> None:
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.prefix_caching = prefix_caching
        self.pool = PagePool(num_pages, page_tokens=page_tokens)
        self.index = PrefixIndex(self.pool)
        self._num_duplicates = 0
        self._num_refused = 0

    @property
    def num_free(self) -> int:
        """Pages that `allocate` could give now, evicting cached ones. Fenced pages are not among them."""
        return self.pool.num_free + self.pool.num_idle

    def match(self, token_ids: Int32, *, salt: str = "", extra_keys: Sequence[str] = ()) -> PrefixMatch:
        """Longest cached whole-page prefix of `token_ids` [L] i32, its pages retained for the caller.

        At least one token is always left to compute.
        """
        if not self.prefix_caching:
            return self._no_match(len(token_ids))
        hit = self.index.match(token_ids, salt=salt, extra_keys=extra_keys)
        if hit.num_tokens:
            self.pool.retain_adopted(hit.page_ids)
        return hit

    def allocate(self, count: int) -> Int32 | None:
        """`count` fresh pages [count] i32 with one reference each, or None if there are not enough."""
        missing = count - self.pool.num_free
        if missing > 0:
            if missing > self.pool.num_idle:
                self._num_refused += 1
                return None
            self.index.evict(missing)
        return self.pool.allocate(count)

    def release(self, page_ids: Int32, *, after: int | None = None) -> None:
        """Give up one reference each; `after`: usable again only once that step is retired.

        Raises:
            LeaseError: a page is not held (double release), is padding or foreign; nothing has changed.
        """
        self.pool.release(page_ids, after=after)

    def retain(self, page_ids: Int32) -> None:
        """One more reference each.

        Raises:
            LeaseError: a page is neither held nor cached; nothing has changed.
        """
        self.pool.retain(page_ids)

    def publish(self, token_ids: Int32, page_ids: Int32, *, salt: str = "", extra_keys: Sequence[str] = ()) -> None:
        """Offer the whole pages of `token_ids` (settled, never written again) to later requests.

        Where the same prefix is cached already, that page stays and the offered one is the caller's
        alone: it becomes free when released.

        Raises:
            LeaseError: an added page is not held, or serves another prefix. CacheError: too few pages.
        """
        if self.prefix_caching:
            done = self.index.insert(token_ids, page_ids, salt=salt, extra_keys=extra_keys)
            self._num_duplicates += done.duplicates.size

    def retire(self, step: int) -> None:
        """Every step up to `step` has ended: pages released `after` it are free."""
        self.pool.retire(step)

    def fork(self, page_ids: Int32, length: int) -> tuple[Int32, Move | None]:
        """Pages for a second sequence with the same first `length` tokens.

        Whole pages are shared. A partial last page is copied: the returned move has to run before either
        sequence writes to it, and its source has to be held until then.

        Raises:
            OutOfPages: no page for the copy. LeaseError: a page is not held, or too few for `length`.
        """
        num_whole, rest = divmod(length, self.page_tokens)
        if len(page_ids) < num_whole + (rest > 0):
            raise LeaseError(f"{len(page_ids)} pages cannot hold the {length} tokens to fork")
        used = self.pool.require_held(page_ids[: num_whole + (rest > 0)]).astype(np.int32)
        if not rest:
            self.pool.retain(used)
            return used, None
        copy = self._allocate_copy(f"fork {length} tokens")
        self.pool.retain(used[:-1])
        move = Move(int(used[-1]), copy)
        used[-1] = copy
        return used, move

    def ensure_writable(self, page_ids: Int32, index: int, *, after: int | None = None) -> tuple[Int32, Move | None]:
        """Make page `page_ids[index]` safe to write: a page that others may read is replaced by a copy.

        Returns: `page_ids` (a changed copy if need be) and the move to run before the write. The
        reference to the old page is given up `after` that step.

        Raises:
            OutOfPages: no page for the copy. LeaseError: the page is not held. IndexError: there is no such index.
        """
        index = range(len(page_ids))[index]
        page = int(self.pool.require_held(page_ids[index : index + 1])[0])
        if not self.pool.is_shared(page):
            return page_ids, None
        copy = self._allocate_copy(f"write to page {page}, which is shared")
        changed = np.array(page_ids, dtype=np.int32)
        changed[index] = copy
        self.pool.release(np.array([page], np.int32), after=after)
        return changed, Move(page, copy)

    def forget(self) -> None:
        """Drop every cached prefix, as after a change of the weights; held pages stay with their holders."""
        self.index.clear()

    def reset(self) -> None:
        """As new: pages of all holders are taken back, prefixes and statistics forgotten."""
        self.pool.reset()
        self.index.reset()
        self._num_duplicates = 0
        self._num_refused = 0

    def stats(self) -> CacheStats:
        index = self.index
        return CacheStats(
            num_queries=index.num_queries,
            query_tokens=index.query_tokens,
            hit_tokens=index.hit_tokens,
            misses=dict(index.misses),
            missed_tokens=dict(index.missed_tokens),
            num_indexed=len(index),
            num_evicted=index.num_evicted,
            num_dropped=index.num_dropped,
            num_duplicates=self._num_duplicates,
            num_refused=self._num_refused,
            pages=self.pool.stats(),
        )

    def check(self) -> None:
        """Verify all invariants of pool and index; raises AssertionError. For tests: visits every page."""
        self.pool.check()
        self.index.check()

    def config(self) -> dict[str, Any]:
        return {
            "num_pages": self.num_pages,
            "page_tokens": self.page_tokens,
            "prefix_caching": self.prefix_caching,
        }

    def _no_match(self, num_tokens: int) -> PrefixMatch:
        self.index.count(num_tokens, 0, num_tokens, MissReason.DISABLED)
        return PrefixMatch(np.zeros(0, np.int32), 0, MissReason.DISABLED)

    def _allocate_copy(self, purpose: str) -> int:
        fresh = self.allocate(1)
        if fresh is None:
            raise OutOfPages(f"no page is free to {purpose}; {self.pool.num_free} of {self.num_pages - 1} are free")
        return int(fresh[0])


class NullBook:
    """A `KVBook` that hands out page numbers from a counter and keeps nothing.

    For measuring a scheduler alone: pages are never short, references are not counted and pages of
    different sequences may coincide once the counter has gone round.
    """

    def __init__(self, num_pages: int, *, page_tokens: int) -> None:
        if num_pages < 2 or page_tokens < 1:
            raise ConfigError(f"num_pages is {num_pages}, page_tokens {page_tokens}; expected at least 2 and 1")
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self._next = 0

    @property
    def num_free(self) -> int:
        return self.num_pages - 1

    def match(self, token_ids: Int32, *, salt: str = "", extra_keys: Sequence[str] = ()) -> PrefixMatch:
        """Never finds anything."""
        return PrefixMatch(np.zeros(0, np.int32), 0, MissReason.DISABLED)

    def allocate(self, count: int) -> Int32 | None:
        """The next `count` numbers [count] i32 of 1 to num_pages - 1, going round."""
        if count >= self.num_pages:
            return None
        pages = np.arange(self._next, self._next + count, dtype=np.int64) % (self.num_pages - 1) + 1
        self._next = (self._next + count) % (self.num_pages - 1)
        return pages.astype(np.int32)

    def release(self, page_ids: Int32, *, after: int | None = None) -> None:
        """Does nothing."""

    def retain(self, page_ids: Int32) -> None:
        """Does nothing."""

    def publish(self, token_ids: Int32, page_ids: Int32, *, salt: str = "", extra_keys: Sequence[str] = ()) -> None:
        """Does nothing."""

    def retire(self, step: int) -> None:
        """Does nothing."""

    def config(self) -> dict[str, Any]:
        return {"num_pages": self.num_pages, "page_tokens": self.page_tokens}
