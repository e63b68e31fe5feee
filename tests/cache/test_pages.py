"""Page pool: unit rules, misuse, and random operations against a plain model."""

from __future__ import annotations

import random

import numpy as np
import pytest

from deepinfer.cache import PagePool, PageState
from deepinfer.errors import ConfigError, LeaseError


def ids(*pages):
    return np.array(pages, np.int32)


def test_page_zero_is_never_handed_out_and_all_others_are():
    pool = PagePool(9, page_tokens=4)
    assert sorted(pool.allocate(8).tolist()) == list(range(1, 9))
    assert pool.allocate(1) is None
    assert pool.allocate(0).tolist() == []
    pool.check()


def test_allocate_is_all_or_nothing():
    pool = PagePool(5, page_tokens=4)
    assert pool.allocate(5) is None
    assert pool.num_free == 4
    assert pool.allocate(4).dtype == np.int32


def test_reuse_is_last_in_first_out_and_tail_first():
    pool = PagePool(20, page_tokens=4)
    first, second = pool.allocate(4), pool.allocate(3)
    pool.release(first)
    pool.release(second)
    again = pool.allocate(7)
    assert again.tolist() == second[::-1].tolist() + first[::-1].tolist()


def test_fenced_pages_wait_for_their_step():
    pool = PagePool(4, page_tokens=4)
    pages = pool.allocate(3)
    pool.release(pages[:2], after=7)
    pool.release(pages[2:], after=9)
    assert pool.allocate(1) is None
    assert {pool.state(int(p)) for p in pages} == {PageState.FENCED}
    pool.retire(6)
    assert pool.num_free == 0
    pool.retire(7)
    assert sorted(pool.allocate(2).tolist()) == sorted(pages[:2].tolist())
    pool.retire(100)
    assert pool.num_free == 1
    pool.check()


def test_release_after_a_retired_step_is_immediate():
    pool = PagePool(4, page_tokens=4)
    pool.retire(5)
    pool.release(pool.allocate(3), after=5)
    assert pool.num_free == 3


def test_retiring_an_older_step_changes_nothing():
    pool = PagePool(4, page_tokens=4)
    pool.retire(5)
    pool.retire(2)
    pool.release(pool.allocate(1), after=6)
    assert pool.num_free == 2
    pool.retire(3)
    assert pool.num_free == 2


def test_a_shared_page_outlives_one_holder():
    pool = PagePool(4, page_tokens=4)
    page = pool.allocate(1)
    pool.retain(page)
    pool.release(page)
    assert pool.state(int(page[0])) is PageState.HELD
    pool.release(page, after=1)
    assert pool.state(int(page[0])) is PageState.FENCED
    pool.retire(1)
    assert pool.state(int(page[0])) is PageState.FREE


def test_a_page_named_twice_loses_two_references():
    pool = PagePool(200, page_tokens=4)
    pages = pool.allocate(100)
    pool.retain(pages)
    pool.release(np.concatenate([pages, pages]))
    assert pool.num_free == 199
    pool.check()


@pytest.mark.parametrize("after", [None, 3])
@pytest.mark.parametrize("count", [1, 2, 70])
def test_double_free_names_page_and_state_and_changes_nothing(after, count):
    pool = PagePool(200, page_tokens=4)
    pages, others = pool.allocate(count), pool.allocate(count)
    pool.release(pages)
    before = pool.stats()
    with pytest.raises(LeaseError, match=rf"page {pages[0]} was released.* while free"):
        pool.release(np.concatenate([others, pages[:1]]), after=after)
    assert pool.stats() == before
    pool.check()
    pool.release(others)


@pytest.mark.parametrize("count", [1, 70])
def test_double_free_within_one_call(count):
    pool = PagePool(100, page_tokens=4)
    pages = pool.allocate(count)
    with pytest.raises(LeaseError, match=f"page {pages[0]} was released while held"):
        pool.release(np.concatenate([pages, pages[:1]]))
    pool.check()
    assert pool.num_free == 99 - count


def test_fenced_reference_cannot_be_given_up_again_or_revived():
    pool = PagePool(4, page_tokens=4)
    page = pool.allocate(1)
    pool.release(page, after=3)
    for misuse in (pool.release, pool.retain, pool.require_held, lambda p: pool.release(p, after=4)):
        with pytest.raises(LeaseError, match="while fenced"):
            misuse(page)
        pool.check()
    pool.retire(3)
    assert pool.num_free == 3


@pytest.mark.parametrize("page", [-1, 4, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("call", ["release", "retain", "adopt", "disown", "require_held"])
def test_foreign_pages_are_refused(page, call):
    pool = PagePool(4, page_tokens=4)
    with pytest.raises(LeaseError, match=f"page {page} .*foreign"):
        getattr(pool, call)(ids(page))


@pytest.mark.parametrize("page", [2**32 + 1, 2**63 - 1, -(2**40)])
def test_wide_ids_do_not_wrap_round(page):
    pool = PagePool(4, page_tokens=4)
    pool.allocate(3)
    with pytest.raises(LeaseError, match="foreign"):
        pool.release(np.array([page], np.int64))


def test_ids_must_be_integers():
    pool = PagePool(4, page_tokens=4)
    pool.allocate(3)
    with pytest.raises(LeaseError, match="float64"):
        pool.release(np.array([1.0]))
    pool.release([1, 2])
    assert pool.num_free == 2


@pytest.mark.parametrize("call", ["release", "retain", "adopt", "disown"])
def test_padding_page_is_refused(call):
    pool = PagePool(4, page_tokens=4)
    with pytest.raises(LeaseError, match=r"page 0 was .* while padding"):
        getattr(pool, call)(ids(0))
    pool.check()


def test_empty_calls_do_nothing():
    pool = PagePool(4, page_tokens=4)
    for call in (pool.release, pool.retain, pool.adopt, pool.disown):
        call(ids())
    pool.release([], after=3)
    pool.retire(3)
    pool.check()


def test_adopted_pages_outlive_their_holders():
    pool = PagePool(5, page_tokens=4)
    pages = pool.allocate(2)
    pool.adopt(pages)
    pool.release(pages, after=2)
    assert (pool.num_free, pool.num_idle) == (2, 0)
    pool.retire(2)
    assert (pool.num_free, pool.num_idle) == (2, 2)
    pool.retain(pages[:1])
    assert pool.num_idle == 1
    assert pool.disown(pages) == 1
    assert (pool.num_free, pool.num_idle) == (3, 0)
    pool.check()


def test_adopting_twice_is_refused():
    pool = PagePool(100, page_tokens=4)
    pages = pool.allocate(60)
    with pytest.raises(LeaseError, match="each page once"):
        pool.adopt(np.concatenate([pages, pages]))
    pool.adopt(pages)
    with pytest.raises(LeaseError, match="index already"):
        pool.adopt(pages[-1:])
    pool.check()


@pytest.mark.parametrize("kwargs", [{"num_pages": 1, "page_tokens": 4}, {"num_pages": 4, "page_tokens": 0}])
def test_bad_sizes(kwargs):
    with pytest.raises(ConfigError):
        PagePool(kwargs["num_pages"], page_tokens=kwargs["page_tokens"])


def test_negative_allocation():
    with pytest.raises(LeaseError, match="-1"):
        PagePool(4, page_tokens=4).allocate(-1)


class Model:
    """The pool as dictionaries and sets."""

    def __init__(self, num_pages):
        self.num_pages = num_pages
        self.refs = dict.fromkeys(range(1, num_pages), 0)
        self.fences = []
        self.adopted = set()
        self.retired = -1

    def held(self, page):
        return self.refs[page] - sum(pages.count(page) for _, pages in self.fences)

    def free(self):
        return {p for p, n in self.refs.items() if not n and p not in self.adopted}

    def idle(self):
        return {p for p, n in self.refs.items() if not n and p in self.adopted}

    def retire(self, step):
        self.retired = max(step, self.retired)
        for _, pages in [f for f in self.fences if f[0] <= self.retired]:
            for page in pages:
                self.refs[page] -= 1
        self.fences = [f for f in self.fences if f[0] > self.retired]


def step(rng, pool, model):
    """One random operation, legal or not, on both."""
    deed = rng.choice(["allocate", "retain", "release", "release", "fence", "retire", "adopt", "disown"])
    pages = [rng.randrange(0, model.num_pages) for _ in range(rng.choice([0, 1, 2, 5, 60]))]
    if rng.random() < 0.7:
        pages = [p for p in dict.fromkeys(pages) if p and (model.held(p) or deed == "disown")]
    if deed in ("release", "fence") and rng.random() < 0.5:
        pages = [p for p in pages if p for _ in range(rng.randint(1, max(1, model.held(p))))]
        rng.shuffle(pages)
    known = all(pages)
    if deed == "allocate":
        count = rng.randrange(0, 12)
        got = pool.allocate(count)
        assert (got is None) == (count > len(model.free()))
        for page in [] if got is None else got.tolist():
            assert page in model.free()
            model.refs[page] = 1
    elif deed == "retain":
        legal = known and all(model.held(p) > 0 or p in model.adopted for p in pages)
        if attempt(legal, pool.retain, pages):
            for page in pages:
                model.refs[page] += 1
    elif deed in ("release", "fence"):
        legal = known and all(model.held(p) >= pages.count(p) for p in pages)
        after = rng.randrange(model.retired - 1, model.retired + 5) if deed == "fence" else None
        if attempt(legal, lambda p: pool.release(p, after=after), pages):
            if after is not None and after > model.retired:
                model.fences.append((after, pages))
            else:
                for page in pages:
                    model.refs[page] -= 1
    elif deed == "retire":
        when = model.retired + rng.randrange(-1, 3)
        pool.retire(when)
        model.retire(when)
    elif deed == "adopt":
        legal = known and len(set(pages)) == len(pages)
        legal = legal and all(model.held(p) > 0 and p not in model.adopted for p in pages)
        if attempt(legal, pool.adopt, pages):
            model.adopted.update(pages)
    else:
        pages = list(dict.fromkeys(pages))
        if attempt(known and set(pages) <= model.adopted, pool.disown, pages):
            model.adopted.difference_update(pages)


def attempt(legal, call, pages):
    if legal:
        call(np.array(pages, np.int32))
    else:
        with pytest.raises(LeaseError):
            call(np.array(pages, np.int32))
    return legal


def drive(seed, num_steps):
    rng = random.Random(seed)
    num_pages = rng.choice([2, 5, 40, 120])
    pool, model = PagePool(num_pages, page_tokens=4), Model(num_pages)
    for _ in range(num_steps):
        step(rng, pool, model)
        pool.check()
        assert pool.refs.tolist() == [0, *model.refs.values()]
        assert (pool.num_free, pool.num_idle) == (len(model.free()), len(model.idle()))
        stats = pool.stats()
        assert stats.num_held == sum(model.held(p) > 0 for p in model.refs)
        assert stats.num_free + stats.num_held + stats.num_fenced + stats.num_cached == num_pages - 1


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_match_the_model(seed):
    drive(seed, 250)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_many_random_operations_match_the_model(seed):
    drive(100 + seed, 2_500)
