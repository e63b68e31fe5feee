"""The book as an engine uses it: simulated sequences over simulated memory, and the rules one by one."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest

from deepinfer.cache import LeaseTable, MissReason, NullBook, PagedBook
from deepinfer.errors import CacheError, ConfigError, LeaseError, OutOfPages
from deepinfer.plan import Move


def prompt(n, start=0):
    return np.arange(start, start + n, dtype=np.int32)


def publish_and_release(book, ids, **space):
    pages = book.allocate(-(-len(ids) // book.page_tokens))
    book.publish(ids, pages, **space)
    book.release(pages)
    return pages


def test_a_hit_is_retained_for_the_caller():
    book = PagedBook(6, page_tokens=4)
    pages = publish_and_release(book, prompt(8))
    hit = book.match(prompt(9))
    assert (hit.page_ids.tolist(), hit.num_tokens) == (pages.tolist(), 8)
    assert book.num_free == 3
    assert book.allocate(4) is None
    assert book.allocate(3) is not None
    book.release(hit.page_ids)
    assert book.num_free == 2
    book.check()


def test_allocation_evicts_only_what_it_needs():
    book = PagedBook(6, page_tokens=4)
    publish_and_release(book, prompt(12))
    assert book.num_free == 5
    got = book.allocate(3)
    assert len(got) == 3
    assert book.match(prompt(13)).num_tokens == 8
    assert book.stats().num_evicted == 1


def test_num_free_is_what_allocate_gives_and_excludes_fences():
    book = PagedBook(8, page_tokens=4)
    pages = book.allocate(4)
    book.publish(prompt(8), pages)
    book.release(pages, after=3)
    assert book.num_free == 3
    assert book.allocate(4) is None
    book.retire(3)
    assert book.num_free == 7
    assert len(book.allocate(7)) == 7
    book.check()


def test_a_cached_page_in_flight_is_not_evicted():
    book = PagedBook(3, page_tokens=4)
    publish_and_release(book, prompt(8))
    book.release(book.match(prompt(9)).page_ids, after=1)
    assert book.allocate(1) is None
    book.retire(1)
    assert len(book.allocate(2)) == 2


def test_duplicates_become_free_when_released():
    book = PagedBook(8, page_tokens=4)
    first = book.allocate(2)
    second = book.allocate(2)
    book.publish(prompt(8), first)
    book.publish(prompt(8), second)
    book.release(first)
    book.release(second)
    assert book.match(prompt(9)).page_ids.tolist() == first.tolist()
    assert book.stats().num_duplicates == 2
    assert book.pool.num_free == 5


def test_publishing_again_adds_only_what_is_new():
    book = PagedBook(8, page_tokens=4)
    pages = book.allocate(3)
    for length in (3, 4, 7, 8, 12):
        book.publish(prompt(length), pages)
        assert book.stats().num_indexed == length // 4
    book.check()


def test_publish_refuses_pages_of_others():
    book = PagedBook(8, page_tokens=4)
    pages = book.allocate(2)
    book.release(pages)
    with pytest.raises(LeaseError, match="published while free"):
        book.publish(prompt(8), pages)
    with pytest.raises(CacheError):
        book.publish(prompt(8), pages[:1])
    book.check()


def test_fork_shares_whole_pages_and_copies_the_tail():
    book = PagedBook(10, page_tokens=4)
    pages = book.allocate(3)
    forked, move = book.fork(pages, 10)
    assert forked[:2].tolist() == pages[:2].tolist()
    assert move == Move(int(pages[2]), int(forked[2]))
    assert book.num_free == 5
    whole, none = book.fork(pages, 8)
    assert (whole.tolist(), none) == (pages[:2].tolist(), None)
    for held in (pages, forked, whole):
        book.release(held)
    assert book.num_free == 9
    book.check()


def test_fork_without_room_changes_nothing():
    book = PagedBook(3, page_tokens=4)
    pages = book.allocate(2)
    with pytest.raises(OutOfPages):
        book.fork(pages, 5)
    with pytest.raises(LeaseError, match="2 pages cannot hold"):
        book.fork(pages, 9)
    book.release(pages)
    assert book.num_free == 2


def test_only_pages_that_others_read_are_copied_before_a_write():
    book = PagedBook(10, page_tokens=4)
    pages = book.allocate(2)
    same, move = book.ensure_writable(pages, 1)
    assert same is pages
    assert move is None
    book.retain(pages)
    changed, move = book.ensure_writable(pages, -1, after=5)
    assert move == Move(int(pages[1]), int(changed[1]))
    assert changed[0] == pages[0] and changed[1] != pages[1]
    with pytest.raises(IndexError):
        book.ensure_writable(pages, 2)


def test_published_pages_are_never_writable():
    book = PagedBook(10, page_tokens=4)
    pages = book.allocate(1)
    book.publish(prompt(4), pages)
    changed, move = book.ensure_writable(pages, 0)
    assert move is not None
    book.release(changed)
    assert book.match(prompt(5)).page_ids.tolist() == pages.tolist()


def test_prefix_caching_can_be_off():
    book = PagedBook(6, page_tokens=4, prefix_caching=False)
    publish_and_release(book, prompt(8))
    hit = book.match(prompt(9))
    assert (hit.num_tokens, hit.reason) == (0, MissReason.DISABLED)
    assert book.stats().missed_tokens[MissReason.DISABLED] == 9
    assert book.pool.num_free == 5


def test_statistics_add_up():
    book = PagedBook(12, page_tokens=4)
    publish_and_release(book, prompt(8), salt="a")
    held = book.match(prompt(9), salt="a")
    book.match(prompt(9), salt="b")
    book.match(prompt(9, 50), salt="a")
    assert book.allocate(99) is None
    stats = book.stats()
    assert (stats.num_queries, stats.query_tokens, stats.hit_tokens, stats.num_refused) == (3, 27, 8, 1)
    assert stats.misses[MissReason.SALT] == stats.misses[MissReason.COLD] == stats.misses[MissReason.ALIGNMENT] == 1
    assert stats.hit_rate == pytest.approx(8 / 27)
    assert sum(stats.missed_tokens.values()) == 19
    assert (stats.pages.num_held, stats.pages.num_free) == (len(held.page_ids), 9)


def test_forget_and_reset():
    book = PagedBook(6, page_tokens=4)
    held = book.allocate(1)
    publish_and_release(book, prompt(8))
    book.forget()
    assert book.match(prompt(9)).num_tokens == 0
    book.release(held)
    publish_and_release(book, prompt(8))
    book.allocate(2)
    book.reset()
    assert (book.num_free, book.stats().num_queries, book.stats().num_indexed) == (5, 0, 0)
    book.check()


def test_config_makes_the_same_book_again():
    book = PagedBook(6, page_tokens=4, prefix_caching=False)
    assert PagedBook(**book.config()).config() == book.config()
    null = NullBook(6, page_tokens=4)
    assert NullBook(**null.config()).config() == null.config()


def test_null_book_counts_round_and_never_runs_short():
    book = NullBook(5, page_tokens=4)
    assert [book.allocate(3).tolist() for _ in range(3)] == [[1, 2, 3], [4, 1, 2], [3, 4, 1]]
    assert book.allocate(5) is None
    assert book.num_free == 4
    assert book.match(prompt(9)).num_tokens == 0
    with pytest.raises(ConfigError):
        NullBook(1, page_tokens=4)


def test_metadata_is_small_for_long_runs():
    book = PagedBook(4097, page_tokens=16)
    pages = book.allocate(4096)
    book.publish(prompt(65536), pages)
    index = book.index
    (run,) = index._tree.runs()
    num_bytes = sum(map(sys.getsizeof, (run.tokens, run.pages, run.children)))
    assert num_bytes / 4096 < 16 * 4 + 8


class Sequence:
    def __init__(self, space, ids, pages, num_written):
        self.space = space
        self.ids = ids
        self.pages = pages
        self.num_written = num_written


class Machine:
    """Sequences over a book and over the memory behind it: every page remembers what was written to it.

    A step in flight keeps a copy of what it reads; at its end the memory has to be unchanged.
    """

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.num_pages = self.rng.choice([14, 40, 90])
        self.page_tokens = self.rng.choice([1, 2, 4])
        self.book = PagedBook(self.num_pages, page_tokens=self.page_tokens)
        self.leases = LeaseTable(self.book.pool, clock=lambda: float(self.step))
        self.memory = {}
        self.live = []
        self.on_lease = []
        self.in_flight = []
        self.history = [[]]
        self.step = 0

    def write(self, sequence, until):
        """Compute keys for positions up to `until`, as a forward would."""
        for pos in range(sequence.num_written, until):
            place = int(sequence.pages[pos // self.page_tokens]), pos % self.page_tokens
            assert place[0] != 0
            assert self.book.pool.refs[place[0]] == 1, "a shared page was written"
            self.memory[place] = (sequence.space, tuple(sequence.ids[: pos + 1]))
        sequence.num_written = until

    def verify(self, sequence):
        for pos in range(sequence.num_written):
            place = int(sequence.pages[pos // self.page_tokens]), pos % self.page_tokens
            assert self.memory[place] == (sequence.space, tuple(sequence.ids[: pos + 1])), "foreign or stale keys"

    def admit(self):
        rng = self.rng
        space = rng.choice([("", ()), ("tenant", ()), ("", ("tenant",))])
        base = rng.choice(self.history)
        ids = base[: rng.randrange(len(base) + 1)] + [rng.randrange(2) for _ in range(rng.randint(1, 20))]
        salt, extra = space
        hit = self.book.match(np.array(ids, np.int32), salt=salt, extra_keys=extra)
        assert hit.num_tokens < len(ids)
        need = -(-len(ids) // self.page_tokens) - len(hit.page_ids)
        fresh = self.allocate(need)
        if fresh is None:
            self.book.release(hit.page_ids)
            return
        sequence = Sequence(space, ids, np.concatenate([hit.page_ids, fresh]), hit.num_tokens)
        self.verify(sequence)
        self.write(sequence, len(ids))
        self.live.append(sequence)
        self.history = [*self.history[-6:], ids]

    def allocate(self, count):
        expected = self.book.num_free
        pages = self.book.allocate(count)
        assert (pages is None) == (count > expected)
        return pages

    def grow(self):
        sequence = self.rng.choice(self.live)
        if len(sequence.ids) == len(sequence.pages) * self.page_tokens:
            fresh = self.allocate(1)
            if fresh is None:
                return
            sequence.pages = np.concatenate([sequence.pages, fresh])
        sequence.ids = [*sequence.ids, self.rng.randrange(2)]
        index = (len(sequence.ids) - 1) // self.page_tokens
        if self.book.num_free == 0 and self.book.pool.is_shared(int(sequence.pages[index])):
            with pytest.raises(OutOfPages):
                self.book.ensure_writable(sequence.pages, index)
            sequence.ids = sequence.ids[:-1]
            return
        sequence.pages, move = self.book.ensure_writable(sequence.pages, index)
        self.copy(move)
        self.write(sequence, len(sequence.ids))

    def copy(self, move):
        if move is not None:
            for offset in range(self.page_tokens):
                if (move.src, offset) in self.memory:
                    self.memory[move.dst, offset] = self.memory[move.src, offset]

    def publish(self):
        sequence = self.rng.choice(self.live)
        salt, extra = sequence.space
        self.book.publish(np.array(sequence.ids, np.int32), sequence.pages, salt=salt, extra_keys=extra)

    def fork(self):
        parent = self.rng.choice(self.live)
        length = self.rng.randint(1, len(parent.ids))
        if length % self.page_tokens and self.book.num_free == 0:
            with pytest.raises(OutOfPages):
                self.book.fork(parent.pages, length)
            return
        pages, move = self.book.fork(parent.pages, length)
        self.copy(move)
        self.live.append(Sequence(parent.space, parent.ids[:length], pages, length))

    def finish(self):
        sequence = self.live.pop(self.rng.randrange(len(self.live)))
        if self.rng.random() < 0.5:
            self.book.release(sequence.pages)
        else:
            self.in_flight.append((self.step, self.read(sequence)))
            self.book.release(sequence.pages, after=self.step)

    def read(self, sequence):
        pages = set(sequence.pages.tolist())
        return {place: content for place, content in self.memory.items() if place[0] in pages}

    def lease(self):
        sequence = self.rng.choice(self.live)
        lease = self.leases.grant(sequence.pages, holder="transfer", ttl_s=self.rng.randint(1, 3))
        whole = {int(p) for p in sequence.pages[: len(sequence.ids) // self.page_tokens]}
        self.on_lease.append((lease, {k: v for k, v in self.memory.items() if k[0] in whole}))

    def end_lease(self):
        lease, content = self.on_lease.pop()
        assert content.items() <= self.memory.items(), "a leased page was written"
        self.leases.end(lease)

    def retire(self):
        step = self.step
        self.step += 1
        for launched, content in self.in_flight:
            assert content.items() <= self.memory.items(), f"a page was reused before step {launched} ended"
        ended = {lease.id for lease in self.leases.sweep()}
        self.on_lease = [pair for pair in self.on_lease if pair[0].id not in ended]
        self.in_flight = [f for f in self.in_flight if f[0] > step]
        self.book.retire(step)

    def act(self):
        rng = self.rng
        deeds = [self.admit, self.retire]
        if self.live:
            deeds += [self.grow] * 3 + [self.publish] * 2 + [self.finish] * 2 + [self.fork, self.lease]
        if self.on_lease:
            deeds.append(self.end_lease)
        rng.choice(deeds)()

    def drain(self):
        while self.live:
            self.finish()
        while self.on_lease:
            self.end_lease()
        self.retire()
        assert self.book.num_free == self.num_pages - 1, "a page was lost"
        assert len(self.book.allocate(self.num_pages - 1)) == self.num_pages - 1
        self.book.check()
        assert len(self.book.index) == 0


def drive(seed, num_steps):
    machine = Machine(seed)
    for number in range(num_steps):
        machine.act()
        if number % 5 == 0:
            machine.book.check()
            for sequence in machine.live:
                machine.verify(sequence)
    machine.drain()
    stats = machine.book.stats()
    assert stats.hit_tokens > 0
    assert stats.num_evicted > 0
    assert sum(stats.misses.values()) == stats.num_queries


@pytest.mark.parametrize("seed", range(5))
def test_sequences_never_see_foreign_keys(seed):
    drive(seed, 400)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_many_sequences_never_see_foreign_keys(seed):
    drive(100 + seed, 2_000)
