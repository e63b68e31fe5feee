"""Leases: deadlines, fences and double ends on an injected clock."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.cache import LeaseTable, PagePool
from deepinfer.errors import LeaseError


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def parts():
    clock, pool = Clock(), PagePool(10, page_tokens=4)
    return clock, pool, LeaseTable(pool, clock=clock)


def test_pages_outlive_the_sequence_until_the_lease_ends(parts):
    _, pool, table = parts
    pages = pool.allocate(3)
    lease = table.grant(pages, holder="transfer 1", ttl_s=5)
    pool.release(pages)
    assert pool.num_free == 6
    assert table.holders(int(pages[0])) == ("transfer 1",)
    table.end(lease)
    assert pool.num_free == 9
    assert len(table) == 0


def test_sweep_ends_only_what_is_late(parts):
    clock, pool, table = parts
    pages = pool.allocate(4)
    early = table.grant(pages[:2], holder="a", ttl_s=1)
    late = table.grant(pages[2:], holder="b", ttl_s=2)
    pool.release(pages)
    assert table.sweep() == ()
    clock.now_s = 1.0
    assert [lease.id for lease in table.sweep()] == [early.id]
    assert (pool.num_free, table.num_expired) == (7, 1)
    with pytest.raises(LeaseError, match="lease 1 of 'a' has ended"):
        table.end(early)
    assert pool.num_free == 7
    table.end(late)
    assert pool.num_free == 9


def test_renew_moves_the_deadline(parts):
    clock, pool, table = parts
    lease = table.grant(pool.allocate(1), holder="a", ttl_s=1)
    clock.now_s = 0.9
    assert table.renew(lease, ttl_s=1).deadline_s == pytest.approx(1.9)
    clock.now_s = 1.5
    assert table.sweep() == ()
    clock.now_s = 1.9
    assert len(table.sweep()) == 1
    with pytest.raises(LeaseError):
        table.renew(lease, ttl_s=1)


def test_expired_pages_wait_for_the_fences_of_the_lease(parts):
    clock, pool, table = parts
    pages = pool.allocate(2)
    table.grant(pages, holder="load", ttl_s=1, fences=(4, 6))
    pool.release(pages)
    clock.now_s = 2
    table.sweep()
    pool.retire(5)
    assert pool.num_free == 7
    pool.retire(6)
    assert pool.num_free == 9
    pool.check()


def test_refused_grants_leave_nothing_behind(parts):
    _, pool, table = parts
    with pytest.raises(LeaseError, match="ttl_s"):
        table.grant(pool.allocate(1), holder="a", ttl_s=0)
    with pytest.raises(LeaseError, match="free"):
        table.grant(np.array([5], np.int32), holder="a", ttl_s=1)
    assert len(table) == 0
