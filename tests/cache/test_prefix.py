"""Prefix index: rules of a hit, reasons of a miss, and exact agreement with a page-by-page model."""

from __future__ import annotations

import random

import numpy as np
import pytest

from deepinfer.cache import MissReason, PagePool, PrefixIndex
from deepinfer.errors import CacheError, LeaseError


def tokens(*values):
    return np.array(values, np.int32)


def make(num_pages=64, page_tokens=2):
    pool = PagePool(num_pages, page_tokens=page_tokens)
    return pool, PrefixIndex(pool)


def fill(pool, index, ids, **space):
    pages = pool.allocate(len(ids) // pool.page_tokens)
    done = index.insert(ids, pages, **space)
    pool.release(pages)
    return pages, done


def test_whole_pages_only_and_one_token_left():
    pool, index = make()
    pages, _ = fill(pool, index, tokens(1, 2, 3, 4, 5))
    for prompt, num_hit in [((1,), 0), ((1, 2), 0), ((1, 2, 3), 1), ((1, 2, 3, 4), 1), ((1, 2, 3, 4, 5), 2)]:
        hit = index.match(tokens(*prompt))
        assert hit.num_tokens == num_hit * 2
        assert hit.page_ids.tolist() == pages[:num_hit].tolist()
        assert hit.reason is MissReason.ALIGNMENT
    assert index.match(tokens()).num_tokens == 0


def test_a_hit_ends_where_tokens_differ():
    pool, index = make()
    pages, _ = fill(pool, index, tokens(*range(20)))
    for first_other in range(20):
        prompt = np.arange(22, dtype=np.int32)
        prompt[first_other:] += 1000
        assert index.match(prompt).page_ids.tolist() == pages[: first_other // 2].tolist()
        index.check()


def test_duplicates_are_reported_and_the_first_page_stays():
    pool, index = make()
    old, _ = fill(pool, index, tokens(1, 2, 3, 4))
    new = pool.allocate(3)
    done = index.insert(tokens(1, 2, 3, 4, 5, 6), new)
    assert done.duplicates.tolist() == new[:2].tolist()
    assert done.added.tolist() == new[2:].tolist()
    assert done.page_ids.tolist() == [*old, new[2]]
    pool.release(new)
    assert len(index) == 3
    assert index.match(tokens(1, 2, 3, 4, 5, 6, 7)).page_ids.tolist() == [*old, new[2]]


def test_salts_and_extra_keys_never_meet():
    pool, index = make()
    spaces = [("a", ("b",)), ("ab", ()), ("", ("a", "b")), ("", ("ab",)), ("a", ("", "b")), ("a\x00", ("b",)), ("", ())]
    owner = {}
    for salt, extra in spaces:
        pages, done = fill(pool, index, tokens(1, 2, 3, 4), salt=salt, extra_keys=extra)
        assert done.duplicates.size == 0
        owner[salt, extra] = pages.tolist()
    for salt, extra in spaces:
        assert (
            index.match(tokens(1, 2, 3, 4, 5), salt=salt, extra_keys=list(extra)).page_ids.tolist()
            == owner[salt, extra]
        )


def test_reasons():
    pool, index = make()
    fill(pool, index, tokens(1, 2, 3, 4), salt="a")
    fill(pool, index, tokens(7, 8), salt="a")
    assert index.match(tokens(1, 2, 9), salt="a").reason is MissReason.ALIGNMENT
    assert index.match(tokens(1, 2, 9, 9, 9), salt="a").reason is MissReason.COLD
    assert index.match(tokens(5, 5, 5), salt="a").reason is MissReason.COLD
    assert index.match(tokens(1, 2, 3), salt="b").reason is MissReason.SALT
    assert index.evict(1) == 1
    assert index.match(tokens(1, 2, 3, 4, 5), salt="a").reason is MissReason.EVICTED
    assert index.match(tokens(1, 2, 3, 5, 5), salt="a").reason is MissReason.COLD
    assert index.evict(2) == 2
    assert index.match(tokens(1, 2, 3), salt="a").reason is MissReason.EVICTED
    assert index.match(tokens(1, 2, 3), salt="b").reason is MissReason.COLD
    assert sum(index.misses.values()) == index.num_queries == 8
    assert sum(index.missed_tokens.values()) + index.hit_tokens == index.query_tokens


def test_a_page_evicted_before_its_run_was_split_is_still_told_from_a_cold_one():
    pool, index = make()
    fill(pool, index, tokens(1, 2, 3, 4, 5, 6))
    index.evict(1)
    index.match(tokens(1, 2, 9))
    fill(pool, index, tokens(1, 2, 3, 4, 7, 7))
    index.match(tokens(1, 2, 3, 4, 9))
    assert index.match(tokens(1, 2, 3, 4, 5, 6, 7)).reason is MissReason.EVICTED


def test_eviction_takes_the_oldest_leaf_from_its_tail():
    pool, index = make()
    left, _ = fill(pool, index, tokens(1, 2, 3, 4, 5, 6))
    right, _ = fill(pool, index, tokens(1, 2, 3, 4, 8, 8, 9, 9))
    index.match(tokens(1, 2, 3, 4, 5, 6, 0))
    order = []
    for _ in range(5):
        before = {p for p in range(1, 64) if pool.is_adopted(np.array([p], np.int32))[0]}
        assert index.evict(1) == 1
        index.check()
        after = {p for p in range(1, 64) if pool.is_adopted(np.array([p], np.int32))[0]}
        order += before - after
    assert order == [right[3], right[2], left[2], left[1], left[0]]
    assert index.evict(1) == 0


def test_held_leaves_are_passed_over():
    pool, index = make()
    held, _ = fill(pool, index, tokens(1, 2, 3, 4))
    idle, _ = fill(pool, index, tokens(5, 6, 7, 8))
    pool.retain(held)
    assert index.evict(10) == 2
    assert pool.num_free == 61
    assert index.match(tokens(1, 2, 3, 4, 5)).num_tokens == 4
    assert len(idle) == 2


def test_idle_pages_before_held_ones_can_be_had():
    pool, index = make()
    fill(pool, index, tokens(1, 2, 3, 4))
    own = pool.allocate(4)
    index.insert(tokens(1, 2, 3, 4, 5, 6, 7, 8), own)
    assert pool.num_idle == 2
    assert index.evict(2) == 2
    index.check()
    assert len(index) == 0
    assert (index.num_evicted, index.num_dropped) == (2, 2)
    pool.release(own)
    assert pool.num_free == 63


def test_inserting_needs_held_and_new_pages():
    pool, index = make()
    pages = pool.allocate(2)
    with pytest.raises(CacheError, match="1 pages were offered for 2"):
        index.insert(tokens(1, 2, 3, 4), pages[:1])
    with pytest.raises(LeaseError, match="free"):
        index.insert(tokens(1, 2), np.array([50], np.int32))
    with pytest.raises(LeaseError, match="each page once"):
        index.insert(tokens(1, 2, 3, 4), pages[[0, 0]])
    index.insert(tokens(1, 2, 3, 4), pages)
    with pytest.raises(LeaseError, match="index already"):
        index.insert(tokens(9, 9), pages)
    index.check()
    pool.check()
    assert len(index) == 2


@pytest.mark.parametrize("bad", [np.zeros((2, 2), np.int32), np.zeros(3), np.array([1, 2, 2**31])])
def test_bad_tokens(bad):
    _, index = make()
    with pytest.raises(CacheError):
        index.match(bad)


def test_wide_tokens_do_not_wrap_round():
    pool, index = make()
    fill(pool, index, tokens(1, 2, 3, 4))
    with pytest.raises(CacheError):
        index.match(np.array([1 + 2**32, 2, 3], np.int64))
    assert index.match(np.array([1, 2, 3], np.int64)).num_tokens == 2


def test_extra_keys_must_not_be_one_text():
    _, index = make()
    with pytest.raises(CacheError, match="'lora'"):
        index.match(tokens(1, 2, 3), extra_keys="lora")


def test_clear_forgets_prefixes_and_frees_idle_pages():
    pool, index = make()
    pages, _ = fill(pool, index, tokens(1, 2, 3, 4))
    pool.retain(pages[:1])
    index.clear()
    assert (len(index), pool.num_free) == (0, 62)
    index.check()
    assert index.match(tokens(1, 2, 3)).num_tokens == 0
    assert index.evict(1) == 0


def test_results_do_not_alias_the_index_or_the_caller():
    pool, index = make()
    pages = pool.allocate(2)
    done = index.insert(tokens(1, 2, 3, 4), pages)
    expected = pages.tolist()
    pages[:] = 0
    index.match(tokens(1, 2, 3, 4, 5)).page_ids[:] = 0
    done.page_ids[:] = 0
    assert index.match(tokens(1, 2, 3, 4, 5)).page_ids.tolist() == expected


class Model:
    """The index page by page: a prefix (namespace, tokens) to its page and when it was used."""

    def __init__(self, page_tokens):
        self.page_tokens = page_tokens
        self.pages = {}
        self.used = {}
        self.now = 0

    def prefixes(self, space, ids, num_pages):
        return [(space, tuple(ids[: (i + 1) * self.page_tokens])) for i in range(num_pages)]

    def match(self, space, ids):
        self.now += 1
        found = []
        for prefix in self.prefixes(space, ids, max(len(ids) - 1, 0) // self.page_tokens):
            if prefix not in self.pages:
                break
            self.used[prefix] = self.now
            found.append(self.pages[prefix])
        return found

    def insert(self, space, ids, pages):
        self.now += 1
        duplicates = []
        for prefix, page in zip(self.prefixes(space, ids, len(ids) // self.page_tokens), pages, strict=False):
            self.used[prefix] = self.now
            if self.pages.setdefault(prefix, page) != page:
                duplicates.append(page)
        return duplicates

    def evict(self):
        """Drop the leaf that was used longest ago; leaves are never of equal age, for one walk has one end."""
        parents = {(space, ids[: -self.page_tokens]) for space, ids in self.pages}
        leaf = min((p for p in self.pages if p not in parents), key=self.used.__getitem__)
        del self.used[leaf]
        return self.pages.pop(leaf)


def drive(seed, num_steps):
    rng = random.Random(seed)
    page_tokens = rng.choice([1, 2, 3])
    pool, index = make(rng.choice([12, 40, 150]), page_tokens)
    index._tree.append_limit = rng.choice([1, 4, 256])
    model = Model(page_tokens)
    spaces = [("", ()), ("a", ()), ("", ("a",))]
    recent = [[]]
    for number in range(num_steps):
        space = rng.choices(spaces, [6, 2, 1])[0]
        base = rng.choice(recent)
        ids = base[: rng.randrange(0, len(base) + 1)] + [rng.randrange(3) for _ in range(rng.choice([0, 1, 3, 30]))]
        recent = [*recent[-8:], ids]
        if rng.random() < 0.5:
            assert index.match(tokens(*ids), salt=space[0], extra_keys=space[1]).page_ids.tolist() == model.match(
                space, ids
            )
        else:
            count = len(ids) // page_tokens
            if count >= pool.num_pages:
                continue
            while pool.num_free < count:
                free = pool.num_free
                num = rng.randint(1, count - free)
                assert index.evict(num) == num
                gone = {model.evict() for _ in range(num)}
                assert all(not pool.is_adopted(np.array([p], np.int32))[0] for p in gone)
            pages = pool.allocate(count)
            done = index.insert(tokens(*ids), pages, salt=space[0], extra_keys=space[1])
            assert done.duplicates.tolist() == model.insert(space, ids, pages.tolist())
            assert done.page_ids.tolist() == [model.pages[p] for p in model.prefixes(space, ids, count)]
            pool.release(pages)
        assert len(index) == len(model.pages) == pool.num_idle
        if number % 10 == 0:
            index.check()
            pool.check()
    assert index.num_evicted > 0


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_match_the_model(seed):
    drive(seed, 250)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_many_random_operations_match_the_model(seed):
    drive(100 + seed, 2_500)
