"""Prompt chunks of a step: running prompts and new admissions, merged in policy order."""

from __future__ import annotations

from .admission import Admitter, needs_scores
from .draft import Chunk, PlanDraft
from .ledger import Ledger
from .preemption import PageGrants
from .sequence import Sequence

__all__ = ["ChunkPlanner"]


class ChunkPlanner:
    """Fills what a step has left with pieces of prompts."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._admitter = Admitter(ledger)
        self.newly_admitted: list[Sequence] = []

    def fill(self, draft: PlanDraft, grants: PageGrants, budget: int, *, now: float, admit: bool) -> None:
        """Append chunks of up to `budget` tokens. `admit=False`: only of sequences that have a slot."""
        running = sorted(
            (sequence for sequence in self._ledger.prefilling.values() if not sequence.suspect),
            key=lambda sequence: sequence.order,
            reverse=True,
        )
        while budget > 0:
            head = self._head(grants) if admit else None
            if head is not None and (not running or head.order < running[-1].order):
                taken = self._admit(head, budget, draft, now)
                admit = taken > 0
            elif running:
                taken = self._continue(running.pop(), budget, draft, grants)
            else:
                break
            budget -= taken

    def probe(self, sequence: Sequence, grants: PageGrants, *, now: float) -> PlanDraft | None:
        """A step for one suspect alone, or None if it cannot run now."""
        draft = PlanDraft()
        budget = self._ledger.limits.max_tokens_per_step
        if sequence.slot:
            taken = self._continue(sequence, budget, draft, grants)
        else:
            taken = self._admit(sequence, budget, draft, now) if self._ledger.has_slot else 0
        return draft if taken else None

    def _head(self, grants: PageGrants) -> Sequence | None:
        if grants.refused or not self._ledger.has_slot:
            return None
        return self._ledger.queue.peek()

    def _admit(self, sequence: Sequence, budget: int, draft: PlanDraft, now: float) -> int:
        first = sequence.admitted_s is None
        taken = self._admitter.admit(sequence, budget, draft, now=now)
        if taken:
            if first:
                self.newly_admitted.append(sequence)
            self._planned(draft.chunks[-1])
        return taken

    def _continue(self, sequence: Sequence, budget: int, draft: PlanDraft, grants: PageGrants) -> int:
        ledger, table, slot = self._ledger, self._ledger.table, sequence.slot
        if not slot:  # preempted for an earlier one
            return 0
        start, target = int(table.planned[slot]), int(table.target[slot])
        count = ledger.limits.chunk(target - start, budget)
        if not grants.grant(sequence, ledger.pages_of(start + count) - int(table.num_pages[slot])):
            return 0
        chunk_ids = sequence.token_ids[start : start + count]
        draft.chunks.append(Chunk(slot, start, chunk_ids, start + count == target, needs_scores(sequence)))
        self._planned(draft.chunks[-1])
        return count

    def _planned(self, chunk: Chunk) -> None:
        self._ledger.counters.chunk_tokens += len(chunk.token_ids)
        if chunk.emits:
            del self._ledger.prefilling[chunk.slot]
