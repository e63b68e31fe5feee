"""Taking in a settled step: tokens, stops, failures."""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

from ..errors import NumericalError, StepFailed
from ..plan import Plan, RowStatus, StepResult
from ..types import FinishReason
from .events import StepEvents
from .ledger import Ledger
from .sequence import Sequence

__all__ = ["Settler"]

Int32 = NDArray[np.int32]
Index = NDArray[np.intp]


class Settler:
    """Brings results into one ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def settle(self, plan: Plan, result: StepResult) -> StepEvents:
        """Rows of sequences that have left since the plan was made give nothing."""
        ledger, table = self._ledger, self._ledger.table
        ledger.retire(plan.step)
        slots = plan.slots.astype(np.intp)
        owners = table.owner[slots]
        if np.count_nonzero(result.status):
            self._settle_failures(result, owners)
        if np.count_nonzero(result.num_out) < len(plan.emits):
            self._settle_silent(plan, result, owners)
        self._settle_chunks(plan, slots, owners)
        rows, tokens, counts = self._settle_tokens(plan, result, slots)
        finished, ledger.ended = ledger.ended, []
        return StepEvents(plan, result, owners, rows, tokens, counts, finished)

    def _settle_tokens(self, plan: Plan, result: StepResult, slots: Index) -> tuple[Int32, Int32, Int32]:
        table = self._ledger.table
        rows, tokens, counts = plan.emits, result.tokens, result.num_out
        alive = table.live[slots]
        num_dropped = plan.num_rows - int(np.count_nonzero(alive))
        self._ledger.counters.dropped_rows += num_dropped
        if num_dropped or len(rows) < plan.num_rows:
            rows = rows[alive[rows]]
            slots, tokens, counts = slots[rows], tokens[rows], counts[rows]
        if self._ledger.limits.num_drafts == 0:
            counts = self._append_one(slots, tokens[:, 0])
        else:
            most = np.where(rows < plan.num_verify, plan.q_max[rows], 1)
            counts = self._append_runs(slots, tokens, counts, most)
        return rows, tokens, counts

    def _append_one(self, slots: Index, tokens: Int32) -> Int32:
        table = self._ledger.table
        index = table.out[slots]
        table.write_tokens(slots, index, tokens)
        out = index + 1
        table.out[slots] = out
        hit = (table.stops[0][slots] == tokens) if len(table.stops) == 1 else (table.stops[:, slots] == tokens).any(0)
        at = (hit | (out >= table.limit[slots])).nonzero()[0]
        if len(at):
            hit = hit[at] & (out[at] > table.min_out[slots[at]])
            ended = hit | (out[at] >= table.limit[slots[at]])
            self._end(slots[at][ended], tokens[at][ended], hit[ended])
        return np.ones(len(slots), np.int32)

    def _append_runs(self, slots: Index, tokens: Int32, counts: Int32, most: Int32) -> Int32:
        """Runs of accepted tokens; what lies behind a stop or the limit is dropped."""
        table = self._ledger.table
        index, column = table.out[slots], np.arange(tokens.shape[1], dtype=np.int32)
        hit = (table.stops[:, slots, None] == tokens).any(0)
        hit &= (column < counts[:, None]) & (index[:, None] + column >= table.min_out[slots][:, None])
        stop_at = np.where(hit.any(1), hit.argmax(1), tokens.shape[1])
        kept = np.minimum(np.minimum(counts, stop_at + 1), table.limit[slots] - index).astype(np.int32)
        row, col = np.nonzero(column < kept[:, None])
        table.write_tokens(slots[row], index[row] + col.astype(np.int32), tokens[row, col])
        table.out[slots] = index + kept
        table.out_lo[slots] += kept - 1
        table.out_hi[slots] -= most - kept
        stopped = stop_at < kept
        at = np.flatnonzero(stopped | (table.out[slots] >= table.limit[slots]))
        self._end(slots[at], tokens[at, kept[at] - 1], stopped[at])
        return kept

    def _end(self, slots: Index, last: Int32, stopped: NDArray[np.bool_]) -> None:
        owners = self._ledger.table.sequences(slots)
        for sequence, token_id, stop in zip(owners, last.tolist(), stopped.tolist(), strict=True):
            if stop:
                self._ledger.end(sequence, FinishReason.STOP, stop_reason=token_id)
            else:
                self._ledger.end(sequence, FinishReason.LENGTH)

    def _settle_chunks(self, plan: Plan, slots: Index, owners: NDArray[np.object_]) -> None:
        ledger, table = self._ledger, self._ledger.table
        for row in range(plan.num_verify, plan.num_rows):
            slot, sequence = int(slots[row]), owners[row]
            if sequence is None or not table.live[slot]:
                continue
            end = int(plan.k_max[row])
            table.settled[slot] = end
            done = end >= table.target[slot]
            # doubling keeps the cost of publishing a long prompt linear in its length
            if done or end // table.page_tokens >= 2 * table.published[slot]:
                ledger.publish(slot)
            if end >= sequence.prompt_len and not sequence.prompt_settled:
                sequence.prompt_settled = True
                ledger.queue.release_children(sequence)
            if done and sequence.suspect:
                sequence.suspect = False
                ledger.suspects.discard(sequence)

    def _settle_failures(self, result: StepResult, owners: NDArray[np.object_]) -> None:
        failed = np.flatnonzero(result.status == RowStatus.FAILED)
        if len(failed):
            self._ledger.counters.failed_steps += 1
        for row in np.flatnonzero(result.status).tolist():
            sequence = cast(Sequence | None, owners[row])
            if sequence is None:
                continue
            if result.status[row] == RowStatus.NAN:
                self._ledger.end(sequence, FinishReason.ERROR, error=_numerical_error(sequence))
            elif len(failed) == 1:
                self._ledger.end(sequence, FinishReason.ERROR, error=_step_failed(sequence, result.failure))
            else:
                # any of them may be to blame: each has to prove itself alone
                sequence.suspect = True
                self._ledger.suspects.add(sequence)
                self._ledger.preempt(sequence)

    def _settle_silent(self, plan: Plan, result: StepResult, owners: NDArray[np.object_]) -> None:
        """An OK row that gives no token would never end."""
        for row in plan.emits[result.num_out[plan.emits] < 1].tolist():
            sequence = cast(Sequence | None, owners[row])
            if sequence is not None and sequence.slot and result.status[row] == RowStatus.OK:
                self._ledger.end(sequence, FinishReason.ERROR, error=_silent_row(sequence))


def _silent_row(sequence: Sequence) -> StepFailed:
    return StepFailed(
        f"request {sequence.request.request_id}: the executor gave no token for a row that samples one; "
        f"every OK row of `Plan.emits` needs at least one"
    )


def _numerical_error(sequence: Sequence) -> NumericalError:
    return NumericalError(
        f"request {sequence.request.request_id}: the logits for output token {sequence.num_outputs} hold NaN; "
        f"check the weights, or compute in a wider dtype"
    )


def _step_failed(sequence: Sequence, failure: BaseException | None) -> StepFailed:
    error = StepFailed(
        f"request {sequence.request.request_id}: the model raised {failure!r} with this request alone in the step, "
        f"after {sequence.num_outputs} output tokens"
    )
    error.__cause__ = failure
    return error
