"""Pages for running sequences, taken from later ones when the pool is empty."""

from __future__ import annotations

from .ledger import Ledger
from .sequence import Sequence

__all__ = ["PageGrants"]


class PageGrants:
    """Gives pages during the planning of one step.

    If the book has none, the running sequence with the largest order gives up its own and is recomputed
    later; only sequences that come after the one in need are asked. Pages fenced by a step in flight count
    as on their way: then the needy row sits out this step instead of driving out another sequence.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._promised = 0
        self._victims: list[Sequence] | None = None
        #: Whether a running sequence went without: then nothing may be admitted.
        self.refused = False

    def grant(self, sequence: Sequence, count: int) -> bool:
        """Append `count` pages to the running `sequence`; False if it has to sit out this step."""
        if count <= 0:
            return True
        ledger = self._ledger
        while (page_ids := ledger.book.allocate(count)) is None:
            if ledger.num_fenced_pages - self._promised >= count:
                break
            victim = self._next_victim(sequence)
            if victim is None:
                break
            ledger.preempt(victim)
        if page_ids is not None:
            ledger.table.append_pages(sequence.slot, page_ids)
            return True
        self._promised += count
        self.refused = True
        if ledger.num_running == 1 and ledger.fence is None:
            ledger.end_stranded(sequence)
        return False

    def _next_victim(self, sequence: Sequence) -> Sequence | None:
        if self._victims is None:
            running = self._ledger.table.owner[self._ledger.table.live].tolist()
            self._victims = sorted(running, key=lambda entry: entry.order)
        while self._victims and not self._victims[-1].slot:
            self._victims.pop()
        if not self._victims or self._victims[-1].order <= sequence.order:
            return None
        return self._victims.pop()
