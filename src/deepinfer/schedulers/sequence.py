"""One continuation of one prompt, from its submission to its end."""

from __future__ import annotations

import enum
from typing import Any, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from ..types import FinishReason, Request

__all__ = ["OutputStore", "Sequence", "SequenceState", "Ticket"]

Int32 = NDArray[np.int32]


class SequenceState(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    """It holds a slot."""
    FINISHED = "finished"


class Ticket(Protocol):
    """Something outside the scheduler that a sequence waits for (a load, a compiled grammar, a hand-over)."""

    @property
    def done(self) -> bool:
        """Polled before each step; must not block."""
        ...

    @property
    def error(self) -> BaseException | None:
        """Why it failed, once done."""
        ...

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        ...


class OutputStore(Protocol):
    """Where the output tokens of a running sequence are."""

    def output_ids(self, slot: int) -> Int32: ...
    def num_outputs(self, slot: int) -> int: ...


def _no_ids() -> Int32:
    return np.zeros(0, np.int32)


@attrs.define(eq=False, on_setattr=attrs.setters.NO_OP)
class Sequence:
    """One sample of a request. Made by the caller, owned by the scheduler it is added to.

    It is also what a `Policy` looks at (`request`, `prompt_len`, `arrival_s`, `arrival_index`).
    """

    request: Request = attrs.field(repr=lambda request: repr(request.request_id))
    #: [P] i32, never changed.
    prompt_ids: Int32 = attrs.field(kw_only=True, repr=False)
    sample_index: int = attrs.field(kw_only=True, default=0)
    #: 64-bit noise key.
    seed: int = attrs.field(kw_only=True, default=0, repr=False)
    #: Ids that end it; they stay in `output_ids`.
    stop_ids: tuple[int, ...] = attrs.field(kw_only=True, default=(), converter=tuple, repr=False)
    max_tokens: int = attrs.field(kw_only=True)
    #: Stop ids do not count before this many tokens are out.
    min_tokens: int = attrs.field(kw_only=True, default=0, repr=False)
    #: Seconds on the clock that `plan` is given.
    arrival_s: float = attrs.field(kw_only=True, default=0.0)
    #: It becomes eligible when all of them are done.
    gates: tuple[Ticket, ...] = attrs.field(kw_only=True, default=(), converter=tuple, repr=False)
    #: Sample 0 of the same request: this one waits until its prompt is computed and then shares it.
    parent: Sequence | None = attrs.field(kw_only=True, default=None, repr=False)

    state: SequenceState = attrs.field(init=False, default=SequenceState.WAITING)
    finish_reason: FinishReason | None = attrs.field(init=False, default=None)
    #: The stop id, or the stop string that the caller of `Scheduler.finish` saw.
    stop_reason: str | int | None = attrs.field(init=False, default=None)
    error: BaseException | None = attrs.field(init=False, default=None, repr=False)
    #: Prompt tokens that were not computed because their keys were there at the first admission.
    num_cached_tokens: int = attrs.field(init=False, default=0, repr=False)
    num_preemptions: int = attrs.field(init=False, default=0, repr=False)
    #: When it first got a slot.
    admitted_s: float | None = attrs.field(init=False, default=None, repr=False)
    #: Line of the sequence table while running, else 0.
    slot: int = attrs.field(init=False, default=0)
    #: -1 until added.
    arrival_index: int = attrs.field(init=False, default=-1, repr=False)
    #: (policy key, arrival index): the smallest is admitted first and preempted last.
    order: tuple[Any, int] = attrs.field(init=False, default=(0, 0), repr=False)
    #: Whether every key of its prompt has been computed once.
    prompt_settled: bool = attrs.field(init=False, default=False, repr=False)
    #: It was in a step that failed as a whole and now has to run alone once.
    suspect: bool = attrs.field(init=False, default=False, repr=False)
    _store: OutputStore | None = attrs.field(init=False, default=None, repr=False)
    _outputs: Int32 = attrs.field(init=False, factory=_no_ids, repr=False)

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_ids)

    @property
    def finished(self) -> bool:
        return self.state is SequenceState.FINISHED

    @property
    def num_outputs(self) -> int:
        """Settled output tokens."""
        return len(self._outputs) if self._store is None else self._store.num_outputs(self.slot)

    @property
    def output_ids(self) -> Int32:
        """[num_outputs] i32 settled output tokens; a copy while running, read-only afterwards."""
        return self._outputs if self._store is None else self._store.output_ids(self.slot)

    @property
    def token_ids(self) -> Int32:
        """Prompt and settled output, [prompt_len + num_outputs] i32, a copy."""
        return np.concatenate([self.prompt_ids, self.output_ids])

    def enter(self, store: OutputStore, slot: int) -> None:
        """It takes a slot (called by the scheduler)."""
        self.state, self.slot, self._store = SequenceState.RUNNING, slot, store

    def leave(self) -> None:
        """It gives up its slot and keeps its outputs (called by the scheduler)."""
        outputs = self.output_ids
        outputs.setflags(write=False)
        self._outputs, self._store = outputs, None
        self.state, self.slot = SequenceState.WAITING, 0
