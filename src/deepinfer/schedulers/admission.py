"""Giving a slot to a waiting sequence: what is already cached, what it shares, which pages it gets."""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from ..errors import OutOfPages
from ..plan import Move
from ..types import FinishReason
from .draft import Chunk, PlanDraft
from .ledger import Ledger
from .sequence import Sequence, SequenceState

__all__ = ["Admitter", "needs_scores"]

Int32 = NDArray[np.int32]


def needs_scores(sequence: Sequence) -> bool:
    """Whether every prompt position has to be computed, for its logprobs. Sample 0 speaks for its siblings."""
    wanted = sequence.request.params.prompt_logprobs is not None
    return wanted and sequence.parent is None and not sequence.prompt_settled


@attrs.frozen(eq=False)
class _Start:
    """Where a sequence begins to compute: `page_ids` hold the keys of `num_tokens` tokens, retained."""

    page_ids: Int32
    num_tokens: int
    #: The parent's page that the first new page starts as a copy of.
    copy_from: int | None = None


class Admitter:
    """Admits waiting sequences into one ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._blocked: tuple[Sequence | None, int] = (None, -1)

    def admit(self, sequence: Sequence, budget: int, draft: PlanDraft, *, now: float) -> int:
        """Tokens of the first chunk of `sequence`, which then runs; 0 if it does not fit yet."""
        ledger = self._ledger
        if self._still_blocked(sequence):
            return 0
        token_ids = sequence.token_ids
        start = self._start(sequence, token_ids)
        count = ledger.limits.chunk(len(token_ids) - start.num_tokens, budget)
        pages = self._first_pages(sequence, start, count, len(token_ids))
        if pages is None:
            ledger.book.release(start.page_ids)
            self._refuse(sequence)
            return 0
        self._enter(sequence, start, pages, draft, now)
        end = start.num_tokens + count
        chunk_ids = token_ids[start.num_tokens : end]
        draft.chunks.append(
            Chunk(sequence.slot, start.num_tokens, chunk_ids, end == len(token_ids), needs_scores(sequence))
        )
        return count

    def _start(self, sequence: Sequence, token_ids: Int32) -> _Start:
        parent = sequence.parent
        if needs_scores(sequence):
            return _Start(np.zeros(0, np.int32), 0)
        if parent is not None and self._can_fork(parent) and not sequence.num_outputs:
            return self._fork(parent)
        request = sequence.request
        hit = self._ledger.book.match(token_ids, salt=request.salt, extra_keys=request.extra_keys)
        return _Start(np.asarray(hit.page_ids, np.int32), hit.num_tokens)

    def _can_fork(self, parent: Sequence) -> bool:
        """The parent's prompt is computed in the pages it has now (not merely before a preemption)."""
        running = parent.state is SequenceState.RUNNING
        return running and self._ledger.table.num_keys(parent.slot) >= parent.prompt_len

    def _fork(self, parent: Sequence) -> _Start:
        """All of the parent's prompt but its last token, whose page the child writes and so has to own."""
        num_tokens = parent.prompt_len - 1
        count, rest = divmod(num_tokens, self._ledger.book.page_tokens)
        pages = self._ledger.table.pages[parent.slot]
        shared = pages[:count].copy()
        self._ledger.book.retain(shared)
        return _Start(shared, num_tokens, int(pages[count]) if rest else None)

    def _first_pages(self, sequence: Sequence, start: _Start, count: int, length: int) -> Int32 | None:
        """Pages of the first chunk, if the book has them and enough to go on.

        A sequence that was preempted before comes back only when all it has computed fits again: otherwise
        it would be driven out by the same neighbours at once.
        """
        ledger = self._ledger
        needed = ledger.pages_of(start.num_tokens + count) - len(start.page_ids)
        if ledger.num_running:
            known = ledger.pages_of(length + 1) if sequence.num_preemptions else 0
            wanted = max(needed, known - len(start.page_ids)) + ledger.limits.reserve_pages
            if ledger.book.num_free < wanted:
                return None
        return ledger.book.allocate(needed)

    def _enter(self, sequence: Sequence, start: _Start, pages: Int32, draft: PlanDraft, now: float) -> None:
        ledger = self._ledger
        slot = ledger.admit(sequence, start=start.num_tokens, page_ids=start.page_ids)
        ledger.table.append_pages(slot, pages)
        draft.admit(sequence)
        if sequence.admitted_s is None:
            sequence.admitted_s = now
            sequence.num_cached_tokens = min(start.num_tokens, sequence.prompt_len)
            ledger.counters.cached_tokens += sequence.num_cached_tokens
        if start.copy_from is not None:
            # the source stays until the step that reads it is over, whatever happens to the parent
            ledger.book.retain(np.asarray([start.copy_from], np.int32))
            draft.moves.append(Move(start.copy_from, int(pages[0])))
        ledger.counters.forks += sequence.parent is not None and start.num_tokens == sequence.prompt_len - 1

    def _still_blocked(self, sequence: Sequence) -> bool:
        """It did not fit before and no page has come free since: spare the book another search."""
        blocked, num_free = self._blocked
        return blocked is sequence and self._ledger.num_running > 0 and self._ledger.book.num_free <= num_free

    def _refuse(self, sequence: Sequence) -> None:
        ledger = self._ledger
        self._blocked = (sequence, ledger.book.num_free)
        if ledger.num_running == 0 and ledger.fence is None:
            error = OutOfPages(
                f"request {sequence.request.request_id}: nothing runs, yet only {ledger.book.num_free} of "
                f"{ledger.page_limit} pages can be had; release what was taken from the book elsewhere"
            )
            ledger.end(sequence, FinishReason.ERROR, error=error)
