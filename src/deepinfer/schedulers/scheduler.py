"""Continuous batching: which sequences run in the next step, and what its outcome means for them."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import ConfigError, ContextLengthExceeded, DeepInferError, InvalidRequest, RequestError
from ..plan import Plan, StepResult
from ..protocols import KVBook, Policy
from ..types import FinishReason
from .chunks import ChunkPlanner
from .decode import choose_decode
from .draft import PlanDraft
from .events import StepEvents
from .ledger import Ledger
from .limits import Counters, StepLimits
from .policies import Fcfs
from .preemption import PageGrants
from .sequence import Sequence
from .settling import Settler

__all__ = ["Scheduler"]


class Scheduler:
    """Plans steps over the pages of one book. One thread at a time; sequences added to it are its own.

    A step holds every sequence past its prompt and, in what is left of the token budget, chunks of
    prompts in policy order. `plan` may be called before the outcome of the plan before is known; lengths
    are upper bounds until then. Plans are committed in the order they were made.

    Args:
        book: pages; nobody else allocates from it while sequences run.
        policy: order of admission; first come, first served by default.
        max_rows: sequences that run at once; fewer do if `max_tokens_per_step` has no token for each.
        max_tokens_per_step: query tokens of a step.
        max_len: longest prompt and output together; outputs are cut there (and where one sequence would
            fill the whole pool) with `FinishReason.LENGTH`.
        max_chunk: longest piece of a prompt in one step.
        num_drafts: draft tokens that a carried row verifies.
        reserve: share of the pool that admissions leave free beside running sequences.

    Raises:
        ConfigError: a bound is too small.
    """

    def __init__(
        self,
        book: KVBook,
        *,
        policy: Policy | None = None,
        max_rows: int,
        max_tokens_per_step: int,
        max_len: int,
        max_chunk: int | None = None,
        num_drafts: int = 0,
        reserve: float = 0.01,
    ) -> None:
        if not 0.0 <= reserve < 1.0:
            raise ConfigError(f"reserve is {reserve}; expected a share of the pool in [0, 1)")
        self.book = book
        self.policy = Fcfs() if policy is None else policy
        self.limits = StepLimits(
            max_rows=max_rows,
            max_tokens_per_step=max_tokens_per_step,
            max_len=max_len,
            max_chunk=max_chunk,
            num_drafts=num_drafts,
            reserve_pages=int(reserve * book.num_pages),
        )
        self._reserve = reserve
        self._ledger = Ledger(book, self.limits)
        self._chunks = ChunkPlanner(self._ledger)
        self._settler = Settler(self._ledger)
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._num_added = 0

    # --- sequences ------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Submit a sequence.

        Raises:
            InvalidRequest: its prompt is empty, it was added before, or its parent was not.
            ContextLengthExceeded: its prompt leaves no room for a token in the context or in the pool.
        """
        self._check(sequence)
        ledger, request = self._ledger, sequence.request
        sequence.arrival_index = self._num_added
        self._num_added += 1
        sequence.order = (self.policy.key(sequence), sequence.arrival_index)
        ledger.by_request.setdefault(request.request_id, []).append(sequence)
        if request.deadline_s is not None:
            deadline = sequence.arrival_s + request.deadline_s
            heapq.heappush(self._deadlines, (deadline, sequence.arrival_index, sequence))
        ledger.queue.push(sequence)

    def cancel(self, request_id: str) -> None:
        """End all sequences of a request with `FinishReason.CANCELLED`; an unknown id is ignored.

        The next events report them.
        """
        for sequence in list(self._ledger.by_request.get(request_id, ())):
            self._ledger.end(sequence, FinishReason.CANCELLED)

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        stop_reason: str | int | None = None,
        error: BaseException | None = None,
    ) -> bool:
        """End a sequence for a reason that the caller saw; what it has in flight is dropped.

        Returns False, and changes nothing, if it had ended already. Events do not report it.
        """
        if sequence.finished:
            return False
        self._ledger.end(sequence, reason, stop_reason=stop_reason, error=error, report=False)
        return True

    # --- steps ----------------------------------------------------------------------------------

    def plan(self, now: float) -> Plan | None:
        """The next step, or None if nothing can run before a step in flight is committed or a gate opens."""
        ledger = self._ledger
        ledger.reclaim_slots()
        self._expire(now)
        for sequence, error in ledger.queue.poll():
            ledger.end(sequence, FinishReason.ERROR, error=_gate_error(sequence, error))
        draft = self._draft(now)
        plan = None if draft is None else draft.build(ledger.planned_step + 1, ledger.table)
        if plan is None or draft is None:
            return None
        ledger.planned_step = plan.step
        for move in plan.moves:
            ledger.release_pages(np.asarray([move.src], np.int32))
        ledger.counters.steps += 1
        verify = plan.q_max[: plan.num_verify]
        ledger.counters.decode_tokens += int(verify.sum()) if self.limits.num_drafts else plan.num_verify
        for sequence in self._chunks.newly_admitted:
            self.policy.admitted(sequence)
        self._chunks.newly_admitted.clear()
        return plan

    def commit(self, plan: Plan, result: StepResult, now: float) -> StepEvents:
        """Take in the outcome of the oldest plan that is not yet committed.

        Raises:
            ConfigError: another plan comes first, or the result is of another step.
        """
        expected = self._ledger.retired_step + 1
        if plan.step != expected or result.step != expected:
            raise ConfigError(
                f"plan {plan.step} was committed with the result of step {result.step}; expected step {expected}: "
                f"commit every plan once, in the order they were made"
            )
        return self._settler.settle(plan, result)

    def take_ended(self) -> list[Sequence]:
        """Sequences that have ended (cancelled, expired, ...) and were not in any events yet."""
        ended, self._ledger.ended = self._ledger.ended, []
        return ended

    # --- state ----------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a sequence is unfinished or an end unreported."""
        return bool(self._ledger.by_request) or bool(self._ledger.ended)

    @property
    def num_waiting(self) -> int:
        return self._ledger.queue.num_waiting

    @property
    def num_running(self) -> int:
        return self._ledger.num_running

    @property
    def num_preemptions(self) -> int:
        return self._ledger.counters.preemptions

    @property
    def counters(self) -> Counters:
        """Live; copy what should not change."""
        return self._ledger.counters

    @property
    def last_step(self) -> int:
        """Number of the last plan made; steps count from 1."""
        return self._ledger.planned_step

    def config(self) -> Mapping[str, Any]:
        limits = self.limits
        return {
            "policy": dict(self.policy.config()),
            "max_rows": limits.max_rows,
            "max_tokens_per_step": limits.max_tokens_per_step,
            "max_len": limits.max_len,
            "max_chunk": limits.max_chunk,
            "num_drafts": limits.num_drafts,
            "reserve": self._reserve,
        }

    # --- inside ---------------------------------------------------------------------------------

    def _draft(self, now: float) -> PlanDraft | None:
        ledger = self._ledger
        grants = PageGrants(ledger)
        if ledger.suspects:
            suspect = min(ledger.suspects, key=lambda sequence: sequence.order)
            if suspect.slot and ledger.table.chunk_in_flight(suspect.slot):
                return None
            alone = self._chunks.probe(suspect, grants, now=now)
            if alone is not None:
                return alone
        draft = PlanDraft(decode=choose_decode(ledger, grants))
        if ledger.prefilling or ledger.queue.num_waiting:
            assert draft.decode is not None
            budget = self.limits.max_tokens_per_step - _num_query_tokens(draft)
            self._chunks.fill(draft, grants, budget, now=now, admit=not ledger.suspects)
        return draft

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            sequence = heapq.heappop(self._deadlines)[2]
            if not sequence.finished:
                self._ledger.end(sequence, FinishReason.DEADLINE)

    def _check(self, sequence: Sequence) -> None:
        name, length = sequence.request.request_id, sequence.prompt_len
        if length == 0:
            raise InvalidRequest(f"request {name}: the prompt is empty; give at least one token")
        if sequence.arrival_index >= 0:
            raise InvalidRequest(f"request {name}: this sequence was added before; make a new one")
        if sequence.parent is not None and sequence.parent.arrival_index < 0:
            raise InvalidRequest(f"request {name}: add the parent (sample 0) before its siblings")
        if self._ledger.max_outputs(sequence) < 1:
            room = self._ledger.page_limit * self.book.page_tokens
            raise ContextLengthExceeded(
                f"request {name}: the prompt has {length} tokens; the context holds {self.limits.max_len} with at "
                f"least one generated token, the cache {room}. Shorten it or compose with more of either"
            )


def _num_query_tokens(draft: PlanDraft) -> int:
    rows = draft.decode
    if rows is None:
        return 0
    return int(np.count_nonzero(rows.mask)) if rows.q_max is None else int(rows.q_max[rows.mask].sum())


def _gate_error(sequence: Sequence, cause: BaseException) -> DeepInferError:
    if isinstance(cause, DeepInferError):
        return cause
    error = RequestError(f"request {sequence.request.request_id}: what it waited for failed: {cause!r}")
    error.__cause__ = cause
    return error
