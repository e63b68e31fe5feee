"""Prompt logprobs: what the model thought of the tokens it was given."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np
import torch

from ..plan import Plan, PromptScores
from ..protocols import Model
from ..sampling import SamplingTable, top_logprobs
from ..transfer import to_device, to_host
from .history import History

__all__ = ["RowScores", "score_prompt_rows"]

#: Positions turned into logits at once: bounds memory at 64 vocabularies whatever the chunk.
POSITIONS_AT_ONCE = 64


@attrs.frozen(eq=False)
class RowScores:
    """Scores of one chunk row on their way to the host."""

    row: int
    start: int
    token_ids: np.ndarray
    #: [L], then [L, K].
    raw: torch.Tensor
    top_ids: torch.Tensor
    top_raw: torch.Tensor

    def read(self) -> PromptScores:
        """Once the event of the step has come."""
        ids = self.top_ids.numpy().astype(np.int32)
        return PromptScores(self.row, self.start, self.token_ids, self.raw.numpy(), ids, self.top_raw.numpy())


def score_prompt_rows(
    plan: Plan, hidden: torch.Tensor, model: Model, table: SamplingTable, histories: Mapping[int, History]
) -> tuple[RowScores, ...]:
    """Scores of the plan's `scored` rows; `hidden` [sum of their q, M] in that order."""
    scores, offset = [], 0
    for row in plan.scored.tolist():
        q_len, start, slot = int(plan.q_max[row]), int(plan.chunk_start[row]), int(plan.slots[row])
        targets = histories[slot].prompt_ids[start + 1 : start + q_len + 1]
        states = hidden[offset : offset + len(targets)]
        offset += q_len
        if len(targets):
            scores.append(_score(row, start + 1, targets, states, model, table.num_prompt_logprobs(slot)))
    return tuple(scores)


def _score(row: int, start: int, targets: np.ndarray, states: torch.Tensor, model: Model, num_top: int) -> RowScores:
    raw, ids, values = [], [], []
    for low in range(0, len(targets), POSITIONS_AT_ONCE):
        logits = model.logits(states[low : low + POSITIONS_AT_ONCE])
        wanted = to_device(targets[low : low + POSITIONS_AT_ONCE], logits.device).long()
        chosen, top_ids, top_raw = top_logprobs(logits, wanted, num_top)
        raw.append(chosen)
        ids.append(top_ids)
        values.append(top_raw)
    return RowScores(row, start, targets, *(to_host(torch.cat(parts)) for parts in (raw, ids, values)))
