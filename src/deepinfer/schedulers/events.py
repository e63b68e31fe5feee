"""What one settled step has changed."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np
from numpy.typing import NDArray

from ..plan import Plan, StepResult
from .sequence import Sequence

__all__ = ["StepEvents"]

Int32 = NDArray[np.int32]


@attrs.frozen(eq=False)
class StepEvents:
    """New tokens and ended sequences of one step. Rows of sequences that had left are absent."""

    plan: Plan
    result: StepResult
    #: [R] object: the `Sequence` of each row, None where it had left before the step was settled.
    owners: NDArray[np.object_]
    #: [E] i32 rows that gave tokens, ascending.
    rows: Int32
    #: [E, n + 1] i32; the first `counts[i]` of line i count, those behind a stop do not.
    tokens: Int32
    #: [E] i32, at least 1.
    counts: Int32
    #: Sequences that have ended since the last events, by whatever reason; each appears once in its life.
    #: Those that the caller itself ended with `Scheduler.finish` do not appear.
    finished: list[Sequence]

    @property
    def sequences(self) -> list[Sequence]:
        """[E] the sequences that `rows` belong to."""
        return self.owners[self.rows].tolist()

    def sequence_of_row(self, row: int) -> Sequence | None:
        return self.owners[row]

    def emitted(self) -> Iterator[tuple[Sequence, int, list[int]]]:
        """(sequence, row, its new tokens in order)."""
        counts = self.counts.tolist()
        for sequence, row, tokens, count in zip(
            self.sequences, self.rows.tolist(), self.tokens.tolist(), counts, strict=True
        ):
            yield sequence, row, tokens[:count]

    @property
    def num_tokens(self) -> int:
        """New tokens of all rows together."""
        return int(self.counts.sum())

    @classmethod
    def between_steps(cls, step: int, finished: list[Sequence]) -> StepEvents:
        """Sequences that ended while no step was there to report them: plan and result have no rows."""
        none = np.zeros(0, np.int32)
        width_one = np.zeros((0, 1), np.int32)
        plan = Plan(step, none, none, none, 0, none, none, none, np.zeros((0, 3), np.int32))
        result = StepResult(step, width_one, none, np.zeros(0, np.uint8))
        return cls(plan, result, np.zeros(0, object), none, width_one, none, finished)
