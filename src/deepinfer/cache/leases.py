"""Leases: pages held by somebody outside the engine, who may vanish."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from ..errors import LeaseError
from .pages import PagePool

__all__ = ["Lease", "LeaseTable"]


@attrs.frozen(eq=False)
class Lease:
    """References to pages, held until ended or until `deadline_s`."""

    id: int
    #: [n] i32
    page_ids: NDArray[np.int32]
    #: Who holds it, for messages.
    holder: str
    #: On the table's clock.
    deadline_s: float
    #: Steps that must be retired before the pages return.
    fences: tuple[int, ...] = ()


class LeaseTable:
    """Leases on one pool. Owned by the pool's thread.

    clock: seconds, monotonic; tests pass their own.
    """

    def __init__(self, pool: PagePool, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._clock = clock
        self._leases: dict[int, Lease] = {}
        self._next_id = 1
        self._num_expired = 0

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def num_expired(self) -> int:
        """Leases that ended because their deadline passed."""
        return self._num_expired

    def grant(
        self, page_ids: NDArray[np.int32] | Sequence[int], *, holder: str, ttl_s: float, fences: Sequence[int] = ()
    ) -> Lease:
        """Retain the pages for `holder` for at most `ttl_s` seconds.

        Raises:
            LeaseError: a page cannot be retained, or `ttl_s` is not positive.
        """
        if not ttl_s > 0:
            raise LeaseError(f"lease for {holder!r} has ttl_s {ttl_s}; expected more than 0 seconds")
        self._pool.retain(page_ids)
        lease = Lease(self._next_id, np.array(page_ids, dtype=np.int32), holder, self._clock() + ttl_s, tuple(fences))
        self._next_id += 1
        self._leases[lease.id] = lease
        return lease

    def renew(self, lease: Lease, *, ttl_s: float) -> Lease:
        """The same lease with `ttl_s` seconds from now.

        Raises:
            LeaseError: it has ended.
        """
        held = self._require(lease)
        renewed = attrs.evolve(held, deadline_s=self._clock() + ttl_s)
        self._leases[lease.id] = renewed
        return renewed

    def end(self, lease: Lease, *, after: int | None = None) -> None:
        """Give the pages back once its fences (and `after`) are retired.

        Raises:
            LeaseError: it has ended, by an earlier call or by its deadline.
        """
        held = self._require(lease)
        steps = held.fences if after is None else (*held.fences, after)
        self._pool.release(held.page_ids, after=max(steps, default=None))
        del self._leases[lease.id]

    def sweep(self) -> tuple[Lease, ...]:
        """End the leases whose deadline has passed and return them."""
        now = self._clock()
        late = tuple(lease for lease in self._leases.values() if lease.deadline_s <= now)
        for lease in late:
            self.end(lease)
        self._num_expired += len(late)
        return late

    def holders(self, page_id: int) -> tuple[str, ...]:
        """Who has the page on lease."""
        return tuple(lease.holder for lease in self._leases.values() if page_id in lease.page_ids)

    def clear(self) -> None:
        """Forget all leases without touching the pool (after the pool's own reset)."""
        self._leases.clear()
        self._num_expired = 0

    def _require(self, lease: Lease) -> Lease:
        held = self._leases.get(lease.id)
        if held is None:
            raise LeaseError(
                f"lease {lease.id} of {lease.holder!r} has ended already (deadline {lease.deadline_s:.3f} s, "
                f"now {self._clock():.3f} s); expected a lease in force; end it once, renew it before its deadline"
            )
        return held
