"""Speed of the page bookkeeping: thread CPU time, best of several passes, pages of 16 tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cache import KeyChain, PagedBook, PagePool

__all__ = ["PAGE_TOKENS", "best_s", "branching_prompts", "measure", "random_prompts"]

PAGE_TOKENS = 16
LONG, SHORT = 8192, 256
NUM_PREFIXES = 64

Int32 = NDArray[np.int32]


def best_s(work: Callable[[], object], *, passes: int = 5, prepare: Callable[[], object] | None = None) -> float:
    """Thread CPU seconds of the fastest call; `prepare` runs before each and is not counted."""
    best = float("inf")
    for _ in range(passes):
        if prepare is not None:
            prepare()
        start = time.thread_time()
        work()
        best = min(best, time.thread_time() - start)
    return best


def random_prompts(num_prompts: int, length: int, *, seed: int = 0) -> list[Int32]:
    """Prompts [length] i32 that share nothing."""
    return list(np.random.default_rng(seed).integers(0, 50_000, (num_prompts, length), dtype=np.int32))


def branching_prompts(num_requests: int, *, seed: int = 0) -> list[Int32]:
    """Prompts of 64 shared prefixes (2048 tokens) with suffixes of their own (512 tokens), shuffled."""
    rng = np.random.default_rng(seed)
    prefixes = rng.integers(0, 50_000, (NUM_PREFIXES, 2048), dtype=np.int32)
    suffixes = rng.integers(0, 50_000, (num_requests, 512), dtype=np.int32)
    chosen = rng.integers(0, NUM_PREFIXES, num_requests)
    return [np.concatenate([prefixes[i], tail]) for i, tail in zip(chosen, suffixes, strict=True)]


def measure(*, num_prompts: int = 100, num_requests: int = 2000) -> dict[str, Any]:
    """Operations per second by name."""
    return {
        **_allocation(),
        **_lookups("long", random_prompts(num_prompts, LONG)),
        **_lookups("short", random_prompts(10 * num_prompts, SHORT)),
        **_growth(random_prompts(4, LONG)),
        "branching_requests_per_s": _branching(branching_prompts(num_requests)),
        **_eviction(random_prompts(num_prompts, LONG)),
        "key_pages_per_s": _keys(random_prompts(1, LONG)[0]),
    }


def admit(book: PagedBook, prompt: Int32) -> Int32:
    """Pages for all of a prompt, cached ones first."""
    hit = book.match(prompt)
    fresh = book.allocate(-(-len(prompt) // PAGE_TOKENS) - len(hit.page_ids))
    assert fresh is not None, "the workloads fit their pools"
    return np.concatenate([hit.page_ids, fresh]) if hit.num_tokens else fresh


def serve(book: PagedBook, prompt: Int32) -> None:
    """A request's life: admitted, published, gone."""
    pages = admit(book, prompt)
    book.publish(prompt, pages)
    book.release(pages)


def room_for(prompts: list[Int32]) -> int:
    """Pages of a pool that holds all of them at once."""
    return sum(-(-len(p) // PAGE_TOKENS) for p in prompts) + len(prompts) + 1


def _allocation() -> dict[str, float]:
    pool = PagePool(200_000, page_tokens=PAGE_TOKENS)
    count, repeats = LONG // PAGE_TOKENS, 200

    def cycle() -> None:
        for _ in range(repeats):
            pages = pool.allocate(count)
            assert pages is not None, "the pool is larger"
            pool.release(pages)

    def allocate_only() -> None:
        for _ in range(8):
            pool.allocate(4096)

    cycle_s = best_s(cycle) / repeats
    return {
        "alloc_free_pages_per_s": count / cycle_s,
        "alloc_4096_us": best_s(allocate_only, passes=20, prepare=pool.reset) / 8 * 1e6,
    }


def _lookups(name: str, prompts: list[Int32]) -> dict[str, float]:
    book = PagedBook(room_for(prompts), page_tokens=PAGE_TOKENS)
    num_pages = len(prompts[0]) // PAGE_TOKENS
    held: list[Int32] = []

    def fill() -> None:
        book.reset()
        held[:] = [admit(book, prompt) for prompt in prompts]

    def publish() -> None:
        for prompt, pages in zip(prompts, held, strict=True):
            book.publish(prompt, pages)

    def match() -> None:
        for prompt in prompts:
            book.index.match(prompt)

    def readmit() -> None:
        for prompt in prompts:
            book.release(admit(book, prompt))

    insert_s = best_s(publish, prepare=fill) / len(prompts)
    for pages in held:
        book.release(pages)
    match_s = best_s(match) / len(prompts)
    readmit_s = best_s(readmit) / len(prompts)
    # The last page is never hit: one token has to be left.
    return {
        f"insert_{name}_pages_per_s": num_pages / insert_s,
        f"match_{name}_pages_per_s": (num_pages - 1) / match_s,
        f"match_{name}_us": match_s * 1e6,
        f"readmit_{name}_pages_per_s": num_pages / readmit_s,
        f"readmit_{name}_us": readmit_s * 1e6,
    }


def _growth(prompts: list[Int32]) -> dict[str, float]:
    """Publishing page by page, as generation does."""
    book = PagedBook(room_for(prompts), page_tokens=PAGE_TOKENS)
    held = [admit(book, prompt) for prompt in prompts]

    def grow() -> None:
        for end in range(PAGE_TOKENS, LONG + 1, PAGE_TOKENS):
            for prompt, pages in zip(prompts, held, strict=True):
                book.publish(prompt[:end], pages)

    seconds = best_s(grow, passes=3, prepare=book.forget)
    return {"publish_grown_page_us": seconds / (len(prompts) * LONG // PAGE_TOKENS) * 1e6}


def _branching(prompts: list[Int32]) -> float:
    book = PagedBook(room_for(prompts), page_tokens=PAGE_TOKENS)

    def work() -> None:
        for prompt in prompts:
            serve(book, prompt)

    return len(prompts) / best_s(work, passes=3, prepare=book.reset)


def _eviction(prompts: list[Int32]) -> dict[str, float]:
    """Admission where every page has to be evicted first."""
    half = len(prompts) // 2
    book = PagedBook(room_for(prompts[:half]), page_tokens=PAGE_TOKENS)

    def fill() -> None:
        book.reset()
        for prompt in prompts[:half]:
            serve(book, prompt)

    def churn() -> None:
        for prompt in prompts[half:]:
            serve(book, prompt)

    num_pages = sum(len(p) // PAGE_TOKENS for p in prompts[half:])
    return {"serve_evicting_pages_per_s": num_pages / best_s(churn, passes=3, prepare=fill)}


def _keys(prompt: Int32) -> float:
    chain = KeyChain(page_tokens=PAGE_TOKENS)
    return len(prompt) // PAGE_TOKENS / best_s(lambda: chain.keys(prompt), passes=30)
