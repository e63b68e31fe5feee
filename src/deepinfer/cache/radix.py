"""A radix tree over whole pages of tokens: runs of pages, compared byte by byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import CacheError

__all__ = ["Namespace", "RadixTree", "Run", "namespace"]

Int32 = NDArray[np.int32]
#: Salt and extra keys. A tuple compares field by field, so that no two namespaces run together.
Namespace = tuple[str, tuple[str, ...]]

ID_BYTES = 4
TOKEN_BYTES = 4


def namespace(salt: str, extra_keys: Sequence[str]) -> Namespace:
    """Key of the tree that requests with this salt and these extra keys share."""
    if isinstance(extra_keys, str):
        raise CacheError(f"extra_keys is the text {extra_keys!r}; expected a sequence of texts")
    return salt, tuple(extra_keys)


class Run:
    """Consecutive pages that were cached together: one node, whatever their number.

    Tokens and page ids are kept as bytes: they compare with memcmp, slice without views that would keep
    evicted pages alive, and join without per-page objects.
    """

    __slots__ = ("children", "lineage", "pages", "parent", "queued", "start", "tokens", "used")

    def __init__(self, parent: Run | None, start: int, tokens: bytes, pages: bytes, lineage: object, used: int) -> None:
        self.parent = parent
        #: Pages between the root and this run.
        self.start = start
        self.tokens = tokens
        self.pages = pages
        #: By the tokens of their first page.
        self.children: dict[bytes, Run] = {}
        #: Names the path of tokens it is on; halves of a split share it, a root has its namespace.
        self.lineage = lineage
        #: When all of its pages were last used; no page of a run is used without the others.
        self.used = used
        #: Whether the eviction queue has an entry for it.
        self.queued = False

    @property
    def end(self) -> int:
        """Pages between the root and the end of this run."""
        return self.start + len(self.pages) // ID_BYTES

    def page_ids(self) -> Int32:
        """[n] i32, read-only."""
        return np.frombuffer(self.pages, np.int32)


class RadixTree:
    """One tree of runs for each namespace.

    page_tokens: tokens of a page. append_limit: pages up to which a leaf run grows in place when more
    pages follow (a longer one would be copied too often); beyond it they become a child.
    """

    def __init__(self, *, page_tokens: int, append_limit: int = 256) -> None:
        self.page_bytes = page_tokens * TOKEN_BYTES
        self.append_limit = append_limit
        self.roots: dict[Namespace, Run] = {}
        #: First pages of all namespaces and in how many each occurs.
        self.first_pages: dict[bytes, int] = {}
        self._num_runs = 0

    def walk(self, root: Run, tokens: bytes, now: int) -> tuple[Run, list[bytes], int]:
        """Longest cached prefix of `tokens` (whole pages), marked as used at `now`.

        A run that is left midway is split there.
        Returns: the run whose end it reaches, the page ids of the way as bytes, its tokens in bytes.
        """
        run, found, offset = root, [], 0
        size = self.page_bytes
        while offset < len(tokens):
            child = run.children.get(tokens[offset : offset + size])
            if child is None:
                break
            run = child
            if not tokens.startswith(run.tokens, offset):
                run = self._split(run, self._common_pages(run.tokens, tokens, offset))
            run.used = now
            found.append(run.pages)
            offset += len(run.tokens)
        return run, found, offset

    def add(self, space: Namespace, run: Run | None, tokens: bytes, pages: bytes, now: int) -> Run:
        """Append pages to the run where `walk` ended (None: no such namespace yet); returns the run that has them."""
        if run is None:
            run = self.roots[space] = Run(None, 0, b"", b"", space, now)
        grown = len(run.pages) + len(pages)
        if run.parent is not None and not run.children and grown <= self.append_limit * ID_BYTES:
            run.tokens += tokens
            run.pages += pages
            return run
        self._num_runs += 1
        child = Run(run, run.end, tokens, pages, self._num_runs, now)
        key = tokens[: self.page_bytes]
        run.children[key] = child
        if run.parent is None:
            self.first_pages[key] = self.first_pages.get(key, 0) + 1
        return child

    def cut(self, run: Run, num_left: int) -> Run | None:
        """Shorten a leaf to its first `num_left` pages; returns the run that is a leaf now, if any."""
        assert not run.children, "only leaves are cut"
        if num_left:
            run.tokens = run.tokens[: num_left * self.page_bytes]
            run.pages = run.pages[: num_left * ID_BYTES]
            return run
        parent = run.parent
        assert parent is not None, "a root has no pages"
        key = run.tokens[: self.page_bytes]
        del parent.children[key]
        run.parent = None
        if parent.parent is not None:
            return None if parent.children else parent
        self._forget_first_page(key)
        if not parent.children:
            del self.roots[parent.lineage]  # type: ignore[arg-type]  # a root's lineage is its namespace
        return None

    def runs(self) -> Iterator[Run]:
        """All runs, a parent before its children."""
        stack = list(self.roots.values())
        while stack:
            run = stack.pop()
            stack.extend(run.children.values())
            if run.parent is not None:
                yield run

    def subtree(self, run: Run) -> list[Run]:
        """`run` and everything below it, a parent before its children."""
        found = [run]
        for below in found:
            found.extend(below.children.values())
        return found

    def check(self) -> None:
        """Verify the shape of the tree; raises AssertionError."""
        first: dict[bytes, int] = {}
        for space, root in self.roots.items():
            assert root.lineage == space and root.parent is None and not root.pages, "damaged root"
            assert root.children, "a namespace without pages was kept"
            for key in root.children:
                first[key] = first.get(key, 0) + 1
        assert first == self.first_pages, "first pages miscounted"
        for run in self.runs():
            num_pages = len(run.pages) // ID_BYTES
            assert num_pages and len(run.tokens) == num_pages * self.page_bytes, "tokens and pages of a run differ"
            parent = run.parent
            assert parent is not None and parent.end == run.start, "a run starts where its parent does not end"
            assert parent.children.get(run.tokens[: self.page_bytes]) is run, "a run is under another key"

    def _common_pages(self, run_tokens: bytes, tokens: bytes, offset: int) -> int:
        """Whole pages that `run_tokens` and `tokens[offset:]` share, where the first does not cover the other."""
        left = len(tokens) - offset
        if left < len(run_tokens) and run_tokens.startswith(tokens[offset:]):
            return left // self.page_bytes
        count = min(left, len(run_tokens)) // TOKEN_BYTES
        differ = np.frombuffer(run_tokens, np.int32, count) != np.frombuffer(tokens, np.int32, count, offset)
        return int(differ.argmax()) * TOKEN_BYTES // self.page_bytes

    def _split(self, run: Run, at: int) -> Run:
        """Put the first `at` pages into a run of their own, the parent of the rest; returns it."""
        parent = run.parent
        assert parent is not None and 0 < at < run.end - run.start, "a split needs both sides"
        tokens, pages = run.tokens[: at * self.page_bytes], run.pages[: at * ID_BYTES]
        head = Run(parent, run.start, tokens, pages, run.lineage, run.used)
        parent.children[run.tokens[: self.page_bytes]] = head
        # The tail keeps its identity: it is the leaf that the eviction queue knows.
        run.tokens = run.tokens[at * self.page_bytes :]
        run.pages = run.pages[at * ID_BYTES :]
        run.parent = head
        run.start += at
        head.children[run.tokens[: self.page_bytes]] = run
        return head

    def _forget_first_page(self, key: bytes) -> None:
        left = self.first_pages[key] - 1
        if left:
            self.first_pages[key] = left
        else:
            del self.first_pages[key]
