"""Edits that shift logits: bias, then repetition, frequency and presence penalties."""

from __future__ import annotations

import attrs
import numpy as np
import torch

from .history import TokenCounts
from .masks import Rows, index

__all__ = ["LogitBias", "Penalties", "penalize"]


@attrs.frozen(eq=False)
class LogitBias:
    """Adds a value to chosen logits."""

    row_of: torch.Tensor
    token_ids: torch.Tensor
    #: f32 [E]
    values: torch.Tensor

    @classmethod
    def of(cls, rows: Rows, device: torch.device) -> LogitBias | None:
        entries = [(row, token, bias) for row, _, o in rows for token, bias in o.params.logit_bias.items()]
        if not entries:
            return None
        row_of, token_ids = index([entry[:2] for entry in entries], device).unbind(1)
        values = torch.as_tensor(np.array([bias for _, _, bias in entries], np.float32), device=device)
        return cls(row_of, token_ids, values)

    def __call__(self, work: torch.Tensor, pos: torch.Tensor) -> None:
        work.index_put_((self.row_of, self.token_ids), self.values, accumulate=True)


@attrs.frozen(eq=False)
class Penalties:
    """The three penalties of the rows that have any."""

    rows: torch.Tensor
    #: i64 [n] lines of `history`.
    lines: torch.Tensor
    #: f32 [3, n, 1] repetition, frequency, presence.
    strengths: torch.Tensor
    history: TokenCounts

    @classmethod
    def of(cls, rows: Rows, history: TokenCounts, device: torch.device) -> Penalties | None:
        found = [(row, history.row(slot), o.params) for row, slot, o in rows if o.has_penalties]
        if not found:
            return None
        strengths = np.array(
            [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for _, _, p in found], np.float32
        )
        row_of, lines = index([entry[:2] for entry in found], device).unbind(1)
        return cls(row_of, lines, torch.from_numpy(strengths.T.copy()).to(device)[:, :, None], history)

    def __call__(self, work: torch.Tensor, pos: torch.Tensor) -> None:
        counts, in_prompt = self.history.counts[self.lines], self.history.in_prompt[self.lines]
        repetition, frequency, presence = self.strengths
        work[self.rows] = penalize(
            work[self.rows], counts, in_prompt, repetition=repetition, frequency=frequency, presence=presence
        )


def penalize(
    logits: torch.Tensor,
    counts: torch.Tensor,
    in_prompt: torch.Tensor,
    *,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> torch.Tensor:
    """Penalised copy of logits f32 [n, V].

    counts i32 [n, V] occurrences in the output, in_prompt bool [n, V]; strengths f32 [n, 1]. Neutral strengths
    (1, 0, 0) return the logits bit for bit.
    """
    produced = counts > 0
    scaled = torch.where(logits < 0, logits * repetition, logits / repetition)
    logits = torch.where(produced | in_prompt, scaled, logits)
    return logits - frequency * counts - presence * produced
