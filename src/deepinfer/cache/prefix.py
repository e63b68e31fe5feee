"""Which pages hold which prefix: lookup, insertion and least-recently-used eviction."""

from __future__ import annotations

import enum
import heapq
from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from ..errors import CacheError
from .pages import PagePool
from .radix import ID_BYTES, TOKEN_BYTES, Namespace, RadixTree, Run, namespace

__all__ = ["Insertion", "MissReason", "PrefixIndex", "PrefixMatch"]

Int32 = NDArray[np.int32]

NO_PAGES = np.zeros(0, np.int32)
NO_PAGES.flags.writeable = False


class MissReason(enum.StrEnum):
    """Why a hit was not longer. For operators: telling a tenant would tell of the others' prompts."""

    ALIGNMENT = "alignment"
    """All whole pages were hit; the rest is the last partial page or the one token left to compute."""
    COLD = "cold"
    """The next page was never cached after this prefix (or so long ago that it is forgotten)."""
    EVICTED = "evicted"
    """The next page was cached and had to make room."""
    SALT = "salt"
    """The first page is cached, but under another salt or other extra keys."""
    DISABLED = "disabled"
    """Prefix caching is off."""


@attrs.frozen(eq=False)
class PrefixMatch:
    """Cached pages of a prefix: `page_ids` [n] i32, `num_tokens` = n * page_tokens."""

    page_ids: Int32
    num_tokens: int
    #: Why it ends there.
    reason: MissReason


@attrs.frozen(eq=False)
class Insertion:
    """What an insertion of n pages did."""

    #: [n] i32 the page that serves each position from now on.
    page_ids: Int32
    #: Offered pages that the index now holds: the last ones of `page_ids`.
    added: Int32
    #: Offered pages it did not take, because another page with the same prefix was there first.
    duplicates: Int32


class PrefixIndex:
    """Pages by the tokens they and all pages before them hold. Owned by one thread.

    Tokens are compared, never only hashed. Only whole pages are kept, and if a page is in the index, so
    are all pages before it. Requests meet only within one salt and one tuple of extra keys.

    pool: whose pages these are. The index adopts what it enters and disowns what it drops; looking up
    retains nothing.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.page_tokens = pool.page_tokens
        self.reset()

    def reset(self) -> None:
        """Forget all prefixes and statistics; for a pool that was reset."""
        self._tree = RadixTree(page_tokens=self.page_tokens)
        self._clock = 0
        self._queue: list[tuple[int, int, Run]] = []
        self._num_queued = 0
        self._num_cached = 0
        # Two generations of fingerprints of evicted pages: bounded without a queue of its own.
        self._evicted: tuple[set[int], set[int]] = (set(), set())
        self.num_queries = 0
        self.query_tokens = 0
        self.hit_tokens = 0
        self.num_evicted = 0
        self.num_dropped = 0
        self.misses = dict.fromkeys(MissReason, 0)
        self.missed_tokens = dict.fromkeys(MissReason, 0)

    def __len__(self) -> int:
        """Pages in the index."""
        return self._num_cached

    def match(self, token_ids: Int32, *, salt: str = "", extra_keys: Sequence[str] = ()) -> PrefixMatch:
        """Longest cached prefix in whole pages that leaves at least one of `token_ids` [L] i32 to compute.

        The pages become the most recently used ones.
        Cost: one copy and one comparison of the tokens; no work per page but a few vector operations.
        """
        ids = self._tokens(token_ids)
        num_tokens = len(ids)
        whole = ids[: max(num_tokens - 1, 0) // self.page_tokens * self.page_tokens].tobytes()
        run, found, offset = self._walk(namespace(salt, extra_keys), whole)
        reason = MissReason.ALIGNMENT
        if offset < len(whole):
            reason = self._explain(run.lineage if run else namespace(salt, extra_keys), whole, offset)
        hit_tokens = offset // TOKEN_BYTES
        self.count(num_tokens, hit_tokens, len(whole) // TOKEN_BYTES, reason)
        return PrefixMatch(np.frombuffer(b"".join(found), np.int32).copy(), hit_tokens, reason)

    def insert(self, token_ids: Int32, page_ids: Int32, *, salt: str = "", extra_keys: Sequence[str] = ()) -> Insertion:
        """Enter the whole pages of `token_ids` [L] i32, held by the first pages of `page_ids`.

        A prefix that is there already keeps its pages; the offered ones are reported as duplicates.

        Raises:
            CacheError: fewer pages than whole pages of tokens.
            LeaseError: an added page is not held, or is in the index already; nothing has changed.
        """
        ids = self._tokens(token_ids)
        num_whole = len(ids) // self.page_tokens
        if len(page_ids) < num_whole:
            raise CacheError(f"{len(page_ids)} pages were offered for {num_whole} whole pages of tokens")
        offered = np.asarray(page_ids[:num_whole], np.int32)
        whole = ids[: num_whole * self.page_tokens].tobytes()
        space = namespace(salt, extra_keys)
        run, found, offset = self._walk(space, whole)
        depth = offset // self._tree.page_bytes
        added = offered[depth:]
        if added.size:
            self._pool.adopt(added)
            self._enqueue(self._tree.add(space, run, whole[offset:], added.tobytes(), self._clock))
            self._num_cached += added.size
        known = b"".join(found)
        if known == offered[:depth].tobytes():
            return Insertion(offered.copy(), added, NO_PAGES)
        pages = np.frombuffer(known + added.tobytes(), np.int32).copy()
        return Insertion(pages, added, offered[offered != pages])

    def evict(self, count: int) -> int:
        """Free `count` least recently used pages that nobody holds; returns how many, fewer if there are no more.

        Leaves go first and of a leaf its tail. Only if idle pages remain before pages in use (whose
        holder computed the prefix itself) are those in use dropped from the index as well, so that
        every idle page can be had.
        """
        refs = self._pool.refs
        self._clock += 1
        dropped: list[Int32] = []
        num_freed = 0
        while num_freed < count and self._queue:
            used, _, run = heapq.heappop(self._queue)
            run.queued = False
            if run.parent is None or run.children:
                continue
            if run.used > used:
                self._enqueue(run)
                continue
            num = _num_idle(run.page_ids()[::-1][: count - num_freed], refs)
            if num:
                dropped.append(self._cut(run, len(run.pages) // ID_BYTES - num))
                num_freed += num
                continue
            # In use counts as used now: the search ends when such a run comes round again.
            run.used = self._clock
            self._enqueue(run)
            if used == self._clock:
                break
        if num_freed < count:
            dropped += self._evict_before_held(count - num_freed, refs)
        return self._pool.disown(np.concatenate(dropped)) if dropped else 0

    def clear(self) -> None:
        """Drop every prefix; statistics stay."""
        pages = [run.page_ids() for run in self._tree.runs()]
        if pages:
            self._pool.disown(np.concatenate(pages))
        self._tree = RadixTree(page_tokens=self.page_tokens)
        self._queue.clear()
        self._num_cached = 0
        self._evicted = (set(), set())

    def count(self, num_tokens: int, hit_tokens: int, whole_tokens: int, reason: MissReason) -> None:
        """Enter one query of `num_tokens`, of which `whole_tokens` could have been hit, in the statistics."""
        self.num_queries += 1
        self.query_tokens += num_tokens
        self.hit_tokens += hit_tokens
        self.misses[reason] += 1
        self.missed_tokens[reason] += whole_tokens - hit_tokens
        self.missed_tokens[MissReason.ALIGNMENT] += num_tokens - whole_tokens

    def check(self) -> None:
        """Verify every invariant; raises AssertionError. Cost: visits every run."""
        self._tree.check()
        queued = {id(run) for _, _, run in self._queue}
        seen = [np.zeros(0, np.int32)]
        for run in self._tree.runs():
            seen.append(run.page_ids())
            assert run.queued == (id(run) in queued), "a run's mark and the eviction queue differ"
            assert run.queued or run.children, "a leaf is missing in the eviction queue"
        pages = np.concatenate(seen)
        assert np.unique(pages).size == pages.size == self._num_cached, "a page has two prefixes or is miscounted"
        assert self._pool.num_adopted == pages.size, "the pool knows of other cached pages"
        assert self._pool.is_adopted(pages).all(), "a cached page is not adopted"

    def _tokens(self, token_ids: Int32 | Sequence[int]) -> Int32:
        ids = np.asarray(token_ids)
        if ids.dtype == np.int32 and ids.ndim == 1:
            return ids
        if ids.size == 0:
            return np.zeros(0, np.int32)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise CacheError(f"token_ids is {ids.dtype}{list(ids.shape)}; expected one dimension of integers")
        if ids.min() < -(2**31) or ids.max() >= 2**31:
            raise CacheError(f"token_ids span {ids.min()} to {ids.max()}; expected 32-bit integers")
        return ids.astype(np.int32)

    def _walk(self, space: Namespace, whole: bytes) -> tuple[Run | None, list[bytes], int]:
        self._clock += 1
        root = self._tree.roots.get(space)
        return (None, [], 0) if root is None else self._tree.walk(root, whole, self._clock)

    def _enqueue(self, run: Run) -> None:
        if not run.queued:
            run.queued = True
            self._num_queued += 1
            heapq.heappush(self._queue, (run.used, self._num_queued, run))

    def _cut(self, run: Run, num_left: int) -> Int32:
        """Drop the pages of a leaf after its first `num_left`; returns them, tail first."""
        size = self._tree.page_bytes
        owner = run if num_left else run.parent
        assert owner is not None, "a root has no pages"
        next_page = run.tokens[num_left * size : (num_left + 1) * size]
        self._remember(hash((owner.lineage, run.start + num_left, next_page)))
        dropped = run.page_ids()[num_left:][::-1]
        self._num_cached -= dropped.size
        self.num_evicted += dropped.size
        leaf = self._tree.cut(run, num_left)
        if leaf is not None:
            self._enqueue(leaf)
        return dropped

    def _evict_before_held(self, count: int, refs: Int32) -> list[Int32]:
        """Drop idle pages that have pages in use after them, with everything after them."""
        dropped: list[Int32] = []
        for run in self._tree.runs():
            if count <= 0:
                break
            idle = refs[run.page_ids()] == 0
            if not idle.any():
                continue
            below = self._tree.subtree(run)[1:]
            cuts = [self._cut(other, 0) for other in reversed(below)]
            cuts.append(self._cut(run, int(idle.argmax())))
            pages = np.concatenate(cuts)
            num_idle = int(np.count_nonzero(refs[pages] == 0))
            self.num_evicted -= pages.size - num_idle
            self.num_dropped += pages.size - num_idle
            count -= num_idle
            dropped += cuts
        return dropped

    def _remember(self, fingerprint: int) -> None:
        young, _ = self._evicted
        young.add(fingerprint)
        if len(young) >= self._pool.num_pages:
            self._evicted = (set(), young)

    def _explain(self, lineage: object, whole: bytes, offset: int) -> MissReason:
        size = self._tree.page_bytes
        page = whole[offset : offset + size]
        fingerprint = hash((lineage, offset // size, page))
        if any(fingerprint in generation for generation in self._evicted):
            return MissReason.EVICTED
        if offset == 0 and page in self._tree.first_pages:
            return MissReason.SALT
        return MissReason.COLD


def _num_idle(pages: Int32, refs: Int32) -> int:
    """How many of the first pages nobody holds."""
    held = refs[pages] != 0
    return int(held.argmax()) if np.count_nonzero(held) else len(pages)
