"""Runs plans on a model: device state per slot, batches, forward, sampling.

The executor owns the true token and length of every carried row, indexed by slot; plans name slots and give
upper bounds. `launch` and `finish` only enqueue work on an accelerator; `settle` is the one wait.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch

from ..errors import ConfigError
from ..layers.batch import Batch, RowSet
from ..layers.kv import KVPool
from ..plan import Plan, RowStatus, StepResult
from ..protocols import Model
from ..sampling import SampleOut, Sampler, SamplingTable
from ..transfer import record_event, to_device, to_device_together
from .history import History
from .scoring import RowScores, score_prompt_rows

__all__ = ["ModelExecutor", "SlotState"]


@attrs.frozen(eq=False)
class SlotState:
    """Per-slot device state. S slots; slot 0 and page 0 are padding."""

    #: [S] i64 newest token, whose keys are not yet computed.
    last_token: torch.Tensor
    #: [S] i32 known tokens, the newest included.
    length: torch.Tensor
    #: [S, max pages] i32
    page_table: torch.Tensor

    @classmethod
    def empty(cls, num_slots: int, max_pages: int, device: str) -> SlotState:
        return cls(
            torch.zeros(num_slots, dtype=torch.int64, device=device),
            torch.zeros(num_slots, dtype=torch.int32, device=device),
            torch.zeros(num_slots, max_pages, dtype=torch.int32, device=device),
        )


@attrs.define(eq=False)
class _Pending:
    """A launched step, until it is settled."""

    plan: Plan
    started_s: float
    batch: Batch
    #: [N] i64 `plan.emits` on the device.
    emits: torch.Tensor
    hidden: torch.Tensor
    #: On the host once `ready` has come.
    out: SampleOut | None = None
    scores: tuple[RowScores, ...] = ()
    ready: torch.Event | None = None


class ModelExecutor:
    """Executes plans with one model, one KV pool and one sampler. Not thread-safe; owned by one `StepLoop`.

    Args:
        model: anything with the `Model` protocol.
        kv: the tensors behind the pages that the scheduler's book counts.
        sampler: chooses tokens; its table holds the per-slot sampling state.
        max_rows: sequences that can hold a slot at once.
        max_len: longest sequence (prompt and output) in tokens.
        eos_ids: masked while a request has fewer than `min_tokens`.
    """

    def __init__(
        self,
        model: Model,
        kv: KVPool,
        sampler: Sampler,
        *,
        max_rows: int,
        max_len: int,
        eos_ids: Sequence[int] = (),
    ) -> None:
        if max_len > model.context_len:
            raise ConfigError(f"max_len is {max_len}; the model was loaded for {model.context_len} tokens")
        self.model = model
        self.kv = kv
        self.sampler = sampler
        self.device = model.device
        max_pages = -(-max_len // kv.page_tokens)
        self.slots = SlotState.empty(max_rows + 1, max_pages, self.device)
        self.table = SamplingTable(max_rows + 1, vocab_size=model.vocab_size, device=self.device, eos_ids=eos_ids)
        self._histories: dict[int, History] = {}

    @torch.inference_mode()
    def launch(self, plan: Plan) -> _Pending:
        started = time.perf_counter()
        self._admit(plan)
        batch, emits = self._batch(plan)
        return _Pending(plan, started, batch, emits, self.model.forward(batch, self.kv))

    @torch.inference_mode()
    def finish(self, pending: _Pending, masks: Any | None) -> None:
        plan = pending.plan
        if len(plan.emits):
            pending.out = self._sample(pending, masks).to_host()
        if len(plan.scored):
            states = pending.hidden[len(plan.emits) :]
            pending.scores = score_prompt_rows(plan, states, self.model, self.table, self._histories)
        pending.ready = record_event(self.device)

    def _sample(self, pending: _Pending, masks: Any | None) -> SampleOut:
        """Tokens of the emitting rows; they become the newest tokens of their slots."""
        plan = pending.plan
        slots, rows = plan.slots[plan.emits], pending.batch.rows
        pos = rows.k_len[pending.emits]
        logits = self.model.logits(pending.hidden[: len(slots)])
        views = [self._histories[slot].view() for slot in slots.tolist()] if self.sampler.transforms else ()
        out = self.sampler(logits, table=self.table, slots=slots, pos=pos, masks=masks, views=views)
        self.table.record(slots, out.tokens)
        device_slots = rows.slot_ids[pending.emits].long()
        self.slots.last_token[device_slots] = out.tokens
        self.slots.length[device_slots] = pos + 1
        if self.sampler.transforms:
            for slot, token_id in zip(slots.tolist(), out.tokens.tolist(), strict=True):
                self._histories[slot].append(token_id)
        return out

    def settle(self, pending: _Pending) -> StepResult:
        if pending.ready is not None:
            pending.ready.synchronize()
        plan = pending.plan
        tokens = np.full((plan.num_rows, 1), -1, np.int32)
        num_out = np.zeros(plan.num_rows, np.int32)
        status = np.zeros(plan.num_rows, np.uint8)
        logprobs = None
        if pending.out is not None:
            bad = pending.out.bad.numpy()
            tokens[plan.emits, 0] = np.where(bad, -1, pending.out.tokens.numpy())
            num_out[plan.emits] = ~bad
            status[plan.emits[bad]] = RowStatus.NAN
            logprobs = pending.out.top_logprobs(plan.emits)
        scores = tuple(row.read() for row in pending.scores)
        seconds = time.perf_counter() - pending.started_s
        return StepResult(plan.step, tokens, num_out, status, logprobs, scores, seconds=seconds)

    def config(self) -> dict[str, Any]:
        return {
            "max_rows": len(self.slots.length) - 1,
            "page_tokens": self.kv.page_tokens,
            "num_pages": self.kv.num_pages,
        }

    def _admit(self, plan: Plan) -> None:
        for admission in plan.admissions:
            self.table.admit(admission)
            self._histories[admission.slot] = History.of(admission)
        if len(plan.page_delta):
            slot, index, page = to_device(plan.page_delta.T, self.device)
            self.slots.page_table[slot.long(), index.long()] = page
        self.kv.copy_pages(plan.moves)

    def _batch(self, plan: Plan) -> tuple[Batch, torch.Tensor]:
        """The plan on the device, and its emitting rows. Carried rows take token and length from the slots."""
        num_carried = plan.num_verify
        q_len = plan.q_max
        cu_q = np.zeros(plan.num_rows + 1, np.int32)
        np.cumsum(q_len, out=cu_q[1:])
        row_of = np.repeat(np.arange(plan.num_rows, dtype=np.int32), q_len)
        chunk_pos = _chunk_positions(plan.chunk_start[num_carried:], q_len[num_carried:])
        arrays = (
            plan.slots, cu_q, row_of, plan.k_max[num_carried:], plan.chunk_ids, chunk_pos, _logit_rows(plan, cu_q),
            plan.emits,
        )  # fmt: skip
        sent = to_device_together(arrays, self.device)
        slot_ids, offsets, row_of, chunk_k, chunk_ids, chunk_pos, logit_rows, emits = sent
        carried = slot_ids[:num_carried].long()
        k_len = torch.cat([self.slots.length[carried], chunk_k])
        tokens = torch.cat([self.slots.last_token[carried], chunk_ids.long()])
        rows = RowSet(
            slot_ids=slot_ids,
            cu_q=offsets,
            pos=torch.cat([k_len[:num_carried] - 1, chunk_pos]),
            row_of=row_of,
            k_len=k_len,
            max_q=int(q_len.max(initial=0)),
            max_k=int(plan.k_max.max(initial=0)),
            num_decode=num_carried,
        )
        return Batch(tokens, self.slots.page_table, rows, logit_rows.long()), emits.long()


def _chunk_positions(start: np.ndarray, q_len: np.ndarray) -> np.ndarray:
    """[Tc] i32 positions of chunk tokens: start, start + 1, ... of each row."""
    first = np.cumsum(q_len) - q_len
    return (np.arange(q_len.sum()) + np.repeat(start - first, q_len)).astype(np.int32)


def _logit_rows(plan: Plan, cu_q: np.ndarray) -> np.ndarray:
    """[N] i32 token numbers that become logits: the last of every emitting row, then all of every scored row."""
    offsets = cu_q.tolist()
    last = cu_q[plan.emits + 1] - 1
    scored = [np.arange(offsets[r], offsets[r + 1], dtype=np.int32) for r in plan.scored.tolist()]
    return np.concatenate([last, *scored]) if scored else last
