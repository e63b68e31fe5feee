"""Tokens of a slot on the host: prompts for scoring, and what logits transforms look at."""

from __future__ import annotations

import attrs
import numpy as np

from ..plan import Admission

__all__ = ["History", "RowView"]


@attrs.frozen(eq=False)
class RowView:
    """What a `LogitsTransform` knows of a row."""

    request_id: str
    sample_index: int
    #: [P] i32, read-only.
    prompt_ids: np.ndarray
    #: [L] i32, the newest token included.
    output_ids: np.ndarray


@attrs.define(eq=False)
class History:
    """Token ids of one admitted sequence."""

    request_id: str
    sample_index: int
    prompt_ids: np.ndarray
    _outputs: list[int]

    @classmethod
    def of(cls, admission: Admission) -> History:
        prompt, outputs = np.split(admission.token_ids, [admission.prompt_len])
        return cls(admission.request_id, admission.sample_index, prompt, outputs.tolist())

    def append(self, token_id: int) -> None:
        self._outputs.append(token_id)

    def view(self) -> RowView:
        return RowView(self.request_id, self.sample_index, self.prompt_ids, np.asarray(self._outputs, np.int32))
