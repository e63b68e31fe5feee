"""A plan in the making."""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from ..plan import Admission, Move, Plan
from .sequence import Sequence
from .table import SequenceTable

__all__ = ["Chunk", "DecodeRows", "PlanDraft"]

Int32 = NDArray[np.int32]


@attrs.frozen(eq=False)
class DecodeRows:
    """Carried rows of a step, over the whole sequence table."""

    #: [S] bool
    mask: NDArray[np.bool_]
    #: [S] i32 keys visible to the last query, where masked.
    k_max: Int32
    #: [S] i32 query tokens, where masked; None for one each.
    q_max: Int32 | None


@attrs.frozen(eq=False)
class Chunk:
    """A piece of a prompt."""

    slot: int
    start: int
    #: [q] i32
    token_ids: Int32
    #: It is the last one, so that its end is sampled from.
    emits: bool
    scored: bool


@attrs.define(eq=False)
class PlanDraft:
    """Rows of the step being planned."""

    decode: DecodeRows | None = None
    chunks: list[Chunk] = attrs.field(factory=list)
    moves: list[Move] = attrs.field(factory=list)
    admissions: list[Admission] = attrs.field(factory=list)

    def admit(self, sequence: Sequence) -> None:
        self.admissions.append(
            Admission(
                sequence.slot,
                sequence.token_ids,
                sequence.prompt_len,
                sequence.request.params,
                sequence.seed,
                sequence.sample_index,
                sequence.request.request_id,
            )
        )

    def build(self, step: int, table: SequenceTable) -> Plan | None:
        """The plan, or None if nothing runs; the table expects its tokens from here on."""
        slots, q_max, k_max = self._carried(table)
        num_verify = len(slots)
        if not num_verify and not self.chunks:
            return None
        if not self.chunks:
            start = np.full(num_verify, -1, np.int32)
            emits = np.arange(num_verify, dtype=np.int32)
            delta = table.take_page_delta()
            return Plan(step, slots, q_max, k_max, num_verify, _ints([]), start, emits, delta)
        return self._with_chunks(step, table, slots, q_max, k_max)

    def _carried(self, table: SequenceTable) -> tuple[Int32, Int32, Int32]:
        if self.decode is None:
            return _ints([]), _ints([]), _ints([])
        # a row may have been preempted for a chunk after it was chosen
        mask = self.decode.mask & table.decoding
        slots = mask.nonzero()[0]
        table.expect_tokens(mask, self.decode.q_max)
        q_max = np.ones(len(slots), np.int32) if self.decode.q_max is None else self.decode.q_max[slots]
        return slots.astype(np.int32), q_max, self.decode.k_max[slots]

    def _with_chunks(self, step: int, table: SequenceTable, slots: Int32, q_max: Int32, k_max: Int32) -> Plan:
        num_verify, chunks = len(slots), self.chunks
        q_chunk = _ints([len(chunk.token_ids) for chunk in chunks])
        start = _ints([chunk.start for chunk in chunks])
        for chunk in chunks:
            table.planned[chunk.slot] = chunk.start + len(chunk.token_ids)
            if chunk.emits:
                table.expect_first(chunk.slot)
        last = [num_verify + i for i, chunk in enumerate(chunks) if chunk.emits]
        return Plan(
            step,
            np.concatenate([slots, _ints([chunk.slot for chunk in chunks])]),
            np.concatenate([q_max, q_chunk]),
            np.concatenate([k_max, start + q_chunk]),
            num_verify,
            np.concatenate([chunk.token_ids for chunk in chunks]),
            np.concatenate([np.full(num_verify, -1, np.int32), start]),
            np.concatenate([np.arange(num_verify, dtype=np.int32), _ints(last)]),
            table.take_page_delta(),
            tuple(self.moves),
            tuple(self.admissions),
            _ints([num_verify + i for i, chunk in enumerate(chunks) if chunk.scored]),
        )


def _ints(values: list[int]) -> Int32:
    return np.asarray(values, np.int32)
