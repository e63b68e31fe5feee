"""Who holds which slot and which pages, and the steps that must end before they change hands."""

from __future__ import annotations

import heapq
from collections import deque

import numpy as np
from numpy.typing import NDArray

from ..errors import OutOfPages
from ..protocols import KVBook
from ..types import FinishReason
from .limits import Counters, StepLimits
from .sequence import Sequence, SequenceState
from .table import SequenceTable
from .waiting import WaitingQueue

__all__ = ["Ledger"]

Int32 = NDArray[np.int32]


class Ledger:
    """Holdings of all sequences of one scheduler, and the only place where they change.

    Steps are numbered from 1. What a sequence gives up while a planned step has not been settled is fenced:
    the book keeps the pages, the ledger the slot, until the last planned step is retired.
    """

    def __init__(self, book: KVBook, limits: StepLimits) -> None:
        self.book = book
        self.limits = limits
        self.table = SequenceTable(max_rows=limits.max_rows, page_tokens=book.page_tokens, num_drafts=limits.num_drafts)
        self.queue = WaitingQueue()
        self.counters = Counters()
        #: Running sequences with prompt left to plan, by slot.
        self.prefilling: dict[int, Sequence] = {}
        #: Unfinished sequences that have to run alone.
        self.suspects: set[Sequence] = set()
        self.by_request: dict[str, list[Sequence]] = {}
        #: Ended and not yet reported.
        self.ended: list[Sequence] = []
        self.planned_step = 0
        self.retired_step = 0
        self.num_running = 0
        self._free_slots = list(range(1, limits.usable_rows + 1))
        self._fenced_slots: deque[tuple[int, int]] = deque()
        self._fenced_pages: deque[tuple[int, int]] = deque()
        self.num_fenced_pages = 0

    # --- fences ---------------------------------------------------------------------------------

    @property
    def fence(self) -> int | None:
        """The last step in flight."""
        return self.planned_step if self.planned_step > self.retired_step else None

    def retire(self, step: int) -> None:
        """`step` has been settled: what was fenced by it or an earlier one is free."""
        self.retired_step = step
        self.book.retire(step)
        while self._fenced_pages and self._fenced_pages[0][0] <= step:
            self.num_fenced_pages -= self._fenced_pages.popleft()[1]

    def reclaim_slots(self) -> None:
        """Before a plan: slots whose last step is retired can be taken again.

        Not sooner, so that one plan never names a slot for two sequences.
        """
        while self._fenced_slots and self._fenced_slots[0][0] <= self.retired_step:
            heapq.heappush(self._free_slots, self._fenced_slots.popleft()[1])

    def release_pages(self, page_ids: Int32) -> None:
        fence = self.fence
        self.book.release(page_ids, after=fence)
        if fence is not None:
            self._fenced_pages.append((fence, len(page_ids)))
            self.num_fenced_pages += len(page_ids)

    # --- holdings -------------------------------------------------------------------------------

    @property
    def has_slot(self) -> bool:
        return bool(self._free_slots)

    @property
    def page_limit(self) -> int:
        """Pages one sequence can have at most."""
        return self.book.num_pages - 1

    def pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.book.page_tokens)

    def max_outputs(self, sequence: Sequence) -> int:
        """Output tokens it may have: by its own limit, the context, and a pool that it has to itself.

        The last token needs no page, for its keys are never computed.
        """
        most = min(self.limits.max_len, self.page_limit * self.book.page_tokens + 1)
        return min(sequence.max_tokens, most - sequence.prompt_len)

    def admit(self, sequence: Sequence, *, start: int, page_ids: Int32) -> int:
        """The sequence takes a slot with the pages of its first `start` tokens; returns the slot."""
        slot = heapq.heappop(self._free_slots)
        self.queue.pop(sequence)
        self.table.occupy(slot, sequence, limit=self.max_outputs(sequence), start=start, page_ids=page_ids)
        self.prefilling[slot] = sequence
        self.num_running += 1
        self.counters.admissions += 1
        return slot

    def publish(self, slot: int) -> None:
        """Offer the slot's whole settled pages to the prefix index."""
        table, sequence = self.table, self.table.owner[slot]
        count = table.num_keys(slot) // self.book.page_tokens
        if count > table.published[slot]:
            request = sequence.request
            ids = sequence.token_ids[: count * self.book.page_tokens]
            pages = table.pages[slot, :count].copy()
            self.book.publish(ids, pages, salt=request.salt, extra_keys=request.extra_keys)
            table.published[slot] = count

    def preempt(self, sequence: Sequence) -> None:
        """The sequence gives up slot and pages and waits again; what it has in flight is dropped."""
        self._vacate(sequence, publish=True)
        sequence.num_preemptions += 1
        self.counters.preemptions += 1
        self.queue.push(sequence)

    def end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        stop_reason: str | int | None = None,
        error: BaseException | None = None,
        report: bool = True,
    ) -> None:
        """The sequence ends, wherever it is. `report=False`: the caller knows."""
        assert not sequence.finished, "a sequence ends once"
        if sequence.state is SequenceState.RUNNING:
            self._vacate(sequence, publish=reason is not FinishReason.ERROR)
        else:
            self.queue.forget(sequence)
        sequence.state = SequenceState.FINISHED
        sequence.finish_reason, sequence.stop_reason, sequence.error = reason, stop_reason, error
        self.queue.release_children(sequence)
        self.suspects.discard(sequence)
        self.counters.finished[reason.value] = self.counters.finished.get(reason.value, 0) + 1
        self._forget_request(sequence)
        if report:
            self.ended.append(sequence)

    def end_stranded(self, sequence: Sequence) -> None:
        """It has the scheduler to itself and still cannot get a page: somebody else holds the pool."""
        if sequence.num_outputs:
            self.end(sequence, FinishReason.LENGTH)
            return
        error = OutOfPages(
            f"request {sequence.request.request_id}: only {self.book.num_free} of {self.page_limit} pages can be had "
            f"and no running sequence holds the others; release what was taken from the book elsewhere"
        )
        self.end(sequence, FinishReason.ERROR, error=error)

    def _vacate(self, sequence: Sequence, *, publish: bool) -> None:
        slot = sequence.slot
        if publish:
            self.publish(slot)
        self.release_pages(self.table.page_ids(slot))
        self.table.vacate(slot)
        self.prefilling.pop(slot, None)
        self.num_running -= 1
        self._fenced_slots.append((self.planned_step, slot))

    def _forget_request(self, sequence: Sequence) -> None:
        request_id = sequence.request.request_id
        siblings = self.by_request[request_id]
        siblings.remove(sequence)
        if not siblings:
            del self.by_request[request_id]
