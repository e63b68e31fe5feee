"""What a scheduler tells an executor to do in one step, and what comes back. numpy only."""

from __future__ import annotations

import enum

import attrs
import numpy as np
from numpy.typing import NDArray

from .types import SamplingParams

__all__ = ["Admission", "Move", "Plan", "PromptScores", "RowStatus", "StepResult", "TopLogprobs"]

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]


class RowStatus(enum.IntEnum):
    """Outcome of one row of a step."""

    OK = 0
    NAN = 1
    """The row's logits held NaN: its request ends with `NumericalError`."""
    FAILED = 2
    """The model raised: the rows of that step end with `StepFailed`."""


@attrs.frozen(eq=False)
class Admission:
    """A sequence takes a slot: everything the executor needs to fill the slot's device state."""

    slot: int
    #: Prompt and already produced tokens (after a preemption), [L] i32; a private copy.
    token_ids: Int32
    prompt_len: int
    params: SamplingParams
    #: 64-bit noise key of the request; with `sample_index` and position it fixes every draw.
    seed: int
    sample_index: int
    request_id: str = ""


@attrs.frozen
class Move:
    """Copy page `src` to page `dst` (all layers) before the forward."""

    src: int
    dst: int


@attrs.frozen(eq=False)
class Plan:
    """One step, made by a scheduler. R rows, Tc chunk tokens, W page-table writes.

    Rows are ordered: first the `num_verify` carried (decode) rows, whose token and true length live
    on the device, then prompt chunks. Lengths are upper bounds; the device never exceeds them.
    """

    step: int
    #: [R] i32 slot of each row, all different; slot 0 is padding and never appears.
    slots: Int32
    #: [R] i32 query tokens of each row (upper bound for carried rows).
    q_max: Int32
    #: [R] i32 keys visible to the row's last query (upper bound).
    k_max: Int32
    num_verify: int
    #: [Tc] i32 token ids of all chunk rows, one row after the other.
    chunk_ids: Int32
    #: [R] i32 position of a chunk row's first token; -1 for carried rows.
    chunk_start: Int32
    #: [N] i32 row numbers that sample a token, ascending.
    emits: Int32
    #: [W, 3] i32 (slot, index in the slot's page table, page id) to write before the forward.
    page_delta: Int32
    moves: tuple[Move, ...] = ()
    admissions: tuple[Admission, ...] = ()
    #: [B] i32 chunk row numbers whose positions are all scored (prompt logprobs).
    scored: Int32 = attrs.field(factory=lambda: np.zeros(0, np.int32))

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return int(self.q_max.sum())


@attrs.frozen(eq=False)
class TopLogprobs:
    """Logprobs of the emitting rows of a step: N rows, K alternatives."""

    #: [N] row number of each entry.
    rows: Int32
    raw: Float32
    processed: Float32
    #: [N, K] ids and raw logprobs of the likeliest tokens, best first.
    top_ids: Int32
    top_raw: Float32


@attrs.frozen(eq=False)
class PromptScores:
    """Logprobs of the prompt tokens of one chunk row: entry i scores the token at `start + i`."""

    row: int
    start: int
    token_ids: Int32
    raw: Float32
    top_ids: Int32
    top_raw: Float32


@attrs.frozen(eq=False)
class StepResult:
    """Outcome of a step, on the host. Row order is that of the plan."""

    step: int
    #: [R, n + 1] i32 new tokens, -1 pads.
    tokens: Int32
    #: [R] i32 how many of them count (0 for rows that do not emit).
    num_out: Int32
    #: [R] u8 `RowStatus`.
    status: NDArray[np.uint8]
    logprobs: TopLogprobs | None = None
    prompt_scores: tuple[PromptScores, ...] = ()
    #: What the model raised, if `status` holds FAILED.
    failure: BaseException | None = None
    #: Wall seconds from launch to settle.
    seconds: float = 0.0
