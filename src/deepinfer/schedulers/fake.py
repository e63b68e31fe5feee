"""An executor without a model: real page tables, real pages, toy tokens. For tests and simulations."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import attrs
import numpy as np
from numpy.typing import NDArray

from ..plan import Admission, Plan, RowStatus, StepResult
from .toy import ToyModel, mix, toy_continuation

__all__ = ["FakeExecutor", "FakeStep", "toy_continuation"]

Int32 = NDArray[np.int32]
Index = NDArray[np.intp]
#: (admission of the row's slot, keys visible to its last query) -> what happens to the row.
Fault = Callable[[Admission, int], RowStatus]


@attrs.define(eq=False)
class FakeStep:
    """A launched step."""

    plan: Plan
    #: [R] keys visible to the last query, by the true length.
    k_len: Int32
    #: [R, n + 1], -1 pads.
    tokens: Int32
    num_out: Int32
    status: NDArray[np.uint8]
    #: [R, pages] that a row reads or writes; 0 pads.
    touched: Int32
    started_s: float


class FakeExecutor:
    """Stores tokens where a model stores keys and reads them back through page tables.

    A page that is shared wrongly, reused too early, not copied or not written therefore shows in the tokens,
    which must equal `toy_continuation`. With drafts, a carried row verifies a guess of which a pseudo-random
    prefix is right; keys of wrong guesses are written too, as a model does.

    Args:
        num_pages: of the book.
        page_tokens: of the book.
        max_rows: of the scheduler.
        max_len: longest sequence.
        num_drafts: of the scheduler.
        latency_s: wall time of a step, spent in `settle`.
        fault: decides over each row; a FAILED row makes the whole step raise in the phase `raise_in`.

    Attributes:
        violations: contract breaches seen so far, as text; tests expect none.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_tokens: int,
        max_rows: int,
        max_len: int,
        vocab_size: int = 97,
        num_drafts: int = 0,
        latency_s: float = 0.0,
        fault: Fault | None = None,
        raise_in: Literal["launch", "finish", "settle"] = "launch",
    ) -> None:
        width = -(-max_len // page_tokens)
        self.model = ToyModel(vocab_size=vocab_size, max_len=width * page_tokens)
        self.num_drafts = num_drafts
        self.latency_s = latency_s
        self.violations: list[str] = []
        self._fault = fault
        self._raise_in = raise_in
        self._pages = np.full((num_pages, page_tokens), -1, np.int32)
        self._page_table = np.zeros((max_rows + 1, width), np.int32)
        self._length = np.zeros(max_rows + 1, np.int32)
        self._last_token = np.zeros(max_rows + 1, np.int32)
        self._noise = np.zeros(max_rows + 1, np.uint64)
        self._admission: list[Admission | None] = [None] * (max_rows + 1)
        self._unsettled: list[FakeStep] = []

    # --- the Executor protocol ------------------------------------------------------------------

    def launch(self, plan: Plan) -> FakeStep:
        started = time.perf_counter()
        self._apply(plan)
        slots = plan.slots.astype(np.intp)
        carried = np.arange(plan.num_rows) < plan.num_verify
        first = np.where(carried, self._length[slots] - 1, plan.chunk_start)
        q_len = np.where(carried, np.minimum(plan.q_max, plan.k_max - first), plan.q_max)
        k_len = (first + q_len).astype(np.int32)
        num_pages = -(-k_len // self._pages.shape[1])
        columns = np.arange(int(num_pages.max(initial=0)))
        touched = np.where(columns < num_pages[:, None], self._page_table[slots][:, : len(columns)], 0)
        step = FakeStep(plan, k_len, *self._blank(plan), touched, started)
        self._check_pages(step, first, num_pages)
        self._unsettled.append(step)
        self._judge(step)
        self._raise_if("launch", step)
        self._write_chunks(plan, slots)
        self._compute(step, slots, q_len)
        return step

    def finish(self, pending: FakeStep, masks: object | None) -> None:
        self._raise_if("finish", pending)
        emits = pending.plan.emits
        slots, count = pending.plan.slots[emits], pending.num_out[emits]
        self._last_token[slots] = np.where(count > 0, pending.tokens[emits, count - 1], self._last_token[slots])
        carried = emits < pending.plan.num_verify
        self._length[slots] = np.where(carried, self._length[slots], pending.k_len[emits]) + count

    def settle(self, pending: FakeStep) -> StepResult:
        self._raise_if("settle", pending)
        left = self.latency_s - (time.perf_counter() - pending.started_s)
        if left > 0:
            time.sleep(left)
        self._unsettled.remove(pending)
        seconds = time.perf_counter() - pending.started_s
        return StepResult(pending.plan.step, pending.tokens, pending.num_out, pending.status, seconds=seconds)

    def abandon(self, pending: FakeStep) -> None:
        if pending in self._unsettled:
            self._unsettled.remove(pending)

    # --- the device -----------------------------------------------------------------------------

    def _apply(self, plan: Plan) -> None:
        for admission in plan.admissions:
            slot = admission.slot
            self._admission[slot] = admission
            self._noise[slot] = self.model.noise(admission.seed, admission.sample_index)
            self._length[slot] = self._page_table[slot] = 0
        slot, index, page = plan.page_delta.T
        self._page_table[slot, index] = page
        for move in plan.moves:
            self._pages[move.dst] = self._pages[move.src]

    def _blank(self, plan: Plan) -> tuple[Int32, Int32, NDArray[np.uint8]]:
        shape = (plan.num_rows, self.num_drafts + 1)
        return np.full(shape, -1, np.int32), np.zeros(plan.num_rows, np.int32), np.zeros(plan.num_rows, np.uint8)

    def _write_chunks(self, plan: Plan, slots: Index) -> None:
        q_len = plan.q_max[plan.num_verify :]
        offset = np.arange(q_len.sum()) - np.repeat(np.cumsum(q_len) - q_len, q_len)
        owner = np.repeat(slots[plan.num_verify :], q_len)
        self._write(owner, np.repeat(plan.chunk_start[plan.num_verify :], q_len) + offset, plan.chunk_ids)

    def _write(self, slots: Index, positions: NDArray[np.integer], tokens: Int32) -> None:
        page_tokens = self._pages.shape[1]
        self._pages[self._page_table[slots, positions // page_tokens], positions % page_tokens] = tokens

    def _compute(self, step: FakeStep, slots: Index, q_len: Int32) -> None:
        """Verify guesses of carried rows, one depth after the other; chunk rows end at depth 0."""
        num_carried = step.plan.num_verify
        # a row whose sequence has reached its limit in the step before is empty and gives nothing
        running = slots[:num_carried][q_len[:num_carried] > 0]
        self._write(running, self._length[running] - 1, self._last_token[running])
        hashes = self._prefix_hashes(step)
        accepted = self._accepted(hashes, q_len, num_carried)
        emits = np.zeros(len(slots), np.bool_)
        emits[step.plan.emits] = True
        for depth in range(self.num_drafts + 1):
            tokens = self.model.next_tokens(hashes, self._noise[slots])
            rows = np.flatnonzero(emits & (depth < accepted))
            step.tokens[rows, depth] = tokens[rows]
            guessed = np.flatnonzero(depth < q_len[:num_carried] - 1)
            wrong = depth + 1 >= accepted[guessed]
            guess = np.where(wrong, (tokens[guessed] + 1) % self.model.vocab_size, tokens[guessed]).astype(np.int32)
            positions = self._length[slots[guessed]] + depth
            self._write(slots[guessed], positions, guess)
            hashes[guessed] += self.model.terms(guess, positions)
        step.num_out[:] = np.where(emits & (step.status == RowStatus.OK), accepted, 0)

    def _accepted(self, hashes: NDArray[np.uint64], q_len: Int32, num_carried: int) -> Int32:
        """[R] tokens that each row gives: of a carried row 1 to q, by its prefix."""
        accepted = np.ones(len(q_len), np.int32)
        q = q_len[:num_carried].astype(np.uint64)
        draw = (mix(hashes[:num_carried] + np.uint64(1)) % np.maximum(q, np.uint64(1))).astype(np.int32) + 1
        accepted[:num_carried] = np.where(q > 0, draw, 0)
        return accepted

    def _prefix_hashes(self, step: FakeStep) -> NDArray[np.uint64]:
        """Hash of each row's tokens before its guesses, as its pages have them."""
        k_len, num_carried = step.k_len.copy(), step.plan.num_verify
        k_len[:num_carried] = np.minimum(self._length[step.plan.slots[:num_carried]], k_len[:num_carried])
        tokens = self._pages[step.touched].reshape(len(k_len), -1)
        positions = np.arange(tokens.shape[1])
        terms = self.model.terms(tokens, positions)
        return np.where(positions < k_len[:, None], terms, np.uint64(0)).sum(1, dtype=np.uint64)

    # --- faults and breaches --------------------------------------------------------------------

    def _judge(self, step: FakeStep) -> None:
        if self._fault is None:
            return
        for row, slot in enumerate(step.plan.slots.tolist()):
            admission = self._admission[slot]
            assert admission is not None, "a row names a slot that nobody was admitted to"
            step.status[row] = self._fault(admission, int(step.k_len[row]))

    def _raise_if(self, phase: str, step: FakeStep) -> None:
        if phase == self._raise_in and (step.status == RowStatus.FAILED).any():
            self.abandon(step)
            raise RuntimeError(f"injected fault in {phase} of step {step.plan.step}")

    def _check_pages(self, step: FakeStep, first: Int32, num_pages: Int32) -> None:
        """No page that a row writes may be touched by another row of this or an unsettled step."""
        plan, page_tokens = step.plan, self._pages.shape[1]
        if len(np.unique(plan.slots)) < plan.num_rows or not plan.slots.all():
            self.violations.append(f"step {plan.step}: slots {plan.slots.tolist()} repeat or hold 0")
        if (num_pages * page_tokens < plan.k_max).any() and (plan.k_max < step.k_len).any():
            self.violations.append(f"step {plan.step}: true lengths exceed upper bounds")
        columns = np.arange(step.touched.shape[1])
        used = columns < num_pages[:, None]
        if not step.touched[used].all():
            self.violations.append(f"step {plan.step}: a row uses the padding page")
        written = used & (columns >= (first // page_tokens)[:, None])
        writer = {int(page): int(slot) for page, slot in zip(*_pairs(step.touched, written, plan.slots), strict=True)}
        for other in (step, *self._unsettled):
            for page, slot in zip(*_pairs(other.touched, other.touched > 0, other.plan.slots), strict=True):
                if writer.get(int(page), slot) != slot:
                    self.violations.append(
                        f"step {plan.step}: slot {writer[int(page)]} writes page {page}, which slot {slot} "
                        f"has in step {other.plan.step}"
                    )


def _pairs(touched: Int32, mask: NDArray[np.bool_], slots: Int32) -> tuple[Int32, Int32]:
    row, column = np.nonzero(mask)
    return touched[row, column], slots[row]
