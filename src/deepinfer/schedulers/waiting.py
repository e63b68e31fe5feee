"""Sequences that wait for a slot: by policy order, behind gates, or for a sibling's prompt."""

from __future__ import annotations

import contextlib
import heapq
from typing import Any

from .sequence import Sequence, SequenceState, Ticket

__all__ = ["WaitingQueue"]

Entry = tuple[tuple[Any, int], Sequence]
#: Ended entries are dropped when they surface; beyond this many the heap is rebuilt without them.
STALE_ENTRIES = 64


class WaitingQueue:
    """Waiting sequences, smallest policy order first. Owned by one scheduler.

    A sequence waits behind its gates, for its parent's prompt, or in the heap. Suspects are counted here and
    kept by the ledger, which picks them itself.
    """

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._gated: list[Sequence] = []
        self._children: dict[Sequence, list[Sequence]] = {}
        self._num_stale = 0
        self.num_waiting = 0

    def push(self, sequence: Sequence) -> None:
        """A sequence starts to wait, for the first time or again after a preemption."""
        self.num_waiting += 1
        if sequence.gates:
            self._gated.append(sequence)
        elif not sequence.suspect:
            self._place(sequence)

    def poll(self) -> list[tuple[Sequence, BaseException]]:
        """Let sequences with open gates pass; returns those with a failed gate, which stay the caller's to end."""
        if not self._gated:
            return []
        still, failed = [], []
        for sequence in self._gated:
            if sequence.state is not SequenceState.WAITING:
                continue
            ready, error = _gate_state(sequence.gates)
            if error is not None:
                failed.append((sequence, error))
            elif ready:
                sequence.gates = ()
                self._place(sequence)
            else:
                still.append(sequence)
        self._gated = still
        return failed

    def release_children(self, parent: Sequence) -> None:
        """The parent's prompt is computed, or the parent has ended: its siblings wait no longer."""
        for child in self._children.pop(parent, ()):
            if child.state is SequenceState.WAITING:
                self._place(child)

    def peek(self) -> Sequence | None:
        """The first in order, suspects apart."""
        while self._heap:
            sequence = self._heap[0][1]
            if sequence.state is SequenceState.WAITING:
                return sequence
            heapq.heappop(self._heap)
            self._num_stale = max(self._num_stale - 1, 0)
        return None

    def pop(self, sequence: Sequence) -> None:
        """The head, or a suspect, got a slot."""
        self.num_waiting -= 1
        if not sequence.suspect:
            _, head = heapq.heappop(self._heap)
            assert head is sequence, "only the head can be popped"

    def forget(self, sequence: Sequence) -> None:
        """A waiting sequence has ended; its heap entry goes when it surfaces."""
        self.num_waiting -= 1
        for gate in sequence.gates:
            with contextlib.suppress(Exception):  # nobody waits for it any more, so nobody cares
                gate.cancel()
        self._num_stale += 1
        if self._num_stale > STALE_ENTRIES and 2 * self._num_stale > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1].state is SequenceState.WAITING]
            heapq.heapify(self._heap)
            self._num_stale = 0

    def _place(self, sequence: Sequence) -> None:
        parent = sequence.parent
        if parent is None or parent.finished or parent.prompt_settled:
            heapq.heappush(self._heap, (sequence.order, sequence))
        else:
            self._children.setdefault(parent, []).append(sequence)


def _gate_state(gates: tuple[Ticket, ...]) -> tuple[bool, BaseException | None]:
    """Whether all are done, and what the first failed one failed with."""
    ready = True
    for gate in gates:
        try:
            done = gate.done
            error = gate.error if done else None
        except Exception as raised:  # a broken ticket ends its own request, not the step
            return False, raised
        if error is not None:
            return False, error
        ready = ready and done
    return ready, None
