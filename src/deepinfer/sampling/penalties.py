"""Edits that shift logits: bias, then repetition, frequency and presence penalties."""

from __future__ import annotations

import attrs
import torch

from .history import TokenCounts
from .masks import Rows, floats, index

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
        return cls(row_of, token_ids, floats([bias for _, _, bias in entries], device))

    def __call__(self, work: torch.Tensor, pos: torch.Tensor) -> None:
        work.index_put_((self.row_of, self.token_ids), self.values, accumulate=True)


@attrs.frozen(eq=False)
class Penalties:
    """The three penalties of the rows that have any."""

    rows: torch.Tensor
    #: i64 [n] lines of `history`.
    lines: torch.Tensor
    #: f32 [n, 1] each; None where every row is neutral.
    repetition: torch.Tensor | None
    frequency: torch.Tensor | None
    presence: torch.Tensor | None
    history: TokenCounts

    @classmethod
    def of(cls, rows: Rows, history: TokenCounts, device: torch.device) -> Penalties | None:
        found = [(row, history.row(slot), o.params) for row, slot, o in rows if o.has_penalties]
        if not found:
            return None
        row_of, lines = index([entry[:2] for entry in found], device).unbind(1)
        params = [entry[2] for entry in found]
        return cls(
            row_of,
            lines,
            _strengths([p.repetition_penalty for p in params], 1.0, device),
            _strengths([p.frequency_penalty for p in params], 0.0, device),
            _strengths([p.presence_penalty for p in params], 0.0, device),
            history,
        )

    def __call__(self, work: torch.Tensor, pos: torch.Tensor) -> None:
        work[self.rows] = penalize(
            work[self.rows],
            self.history.counts[self.lines],
            None if self.repetition is None else self.history.in_prompt[self.lines],
            repetition=self.repetition,
            frequency=self.frequency,
            presence=self.presence,
        )


def penalize(
    logits: torch.Tensor,
    counts: torch.Tensor,
    in_prompt: torch.Tensor | None = None,
    *,
    repetition: torch.Tensor | None = None,
    frequency: torch.Tensor | None = None,
    presence: torch.Tensor | None = None,
) -> torch.Tensor:
    """Penalised copy of logits f32 [n, V].

    counts i32 [n, V] occurrences in the output, in_prompt bool [n, V]; strengths f32 [n, 1]. A neutral strength
    (1, 0, 0) gives the same bits as None.
    """
    produced = counts > 0
    if repetition is not None:
        seen = produced if in_prompt is None else produced | in_prompt
        scaled = torch.where(logits < 0, logits * repetition, logits / repetition)
        logits = torch.where(seen, scaled, logits)
    if frequency is not None:
        logits = logits - frequency * counts
    return logits if presence is None else logits - presence * produced


def _strengths(values: list[float], neutral: float, device: torch.device) -> torch.Tensor | None:
    if all(value == neutral for value in values):
        return None
    return floats(values, device)[:, None]
