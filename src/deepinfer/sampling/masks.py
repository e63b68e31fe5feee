"""Edits that forbid tokens: each sets logits to -inf, so their order does not matter.

An edit is made for the rows of one batch that need it and acts in place on `work` f32 [A, V]; `pos` i32 [A] is
the absolute position of the token being sampled in each row.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from ..transfer import to_device
from .history import RecentTokens
from .options import SlotOptions

__all__ = ["AllowedTokens", "BadWords", "StopBan", "TokenMasks", "apply_token_masks"]

#: A row of `work` and what its slot asked for.
Rows = Sequence[tuple[int, int, SlotOptions]]

_ANY = -2


def index(values: Sequence[int] | Sequence[tuple[int, ...]], device: torch.device) -> torch.Tensor:
    """int64 index tensor on `device`."""
    return to_device(np.asarray(values, np.int64), device)


def floats(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """float32 tensor on `device`."""
    return to_device(np.asarray(values, np.float32), device)


@attrs.frozen(eq=False)
class TokenMasks:
    """Packed masks of M rows of a batch: bit j of word i says whether token 32 i + j may follow."""

    #: i32 [M, ceil(V / 32)] on the device of the logits; further bits are ignored.
    bits: torch.Tensor
    #: i32 [M] rows of the logits they belong to, all different.
    rows: NDArray[np.int32]


def apply_token_masks(work: torch.Tensor, bits: torch.Tensor, rows: torch.Tensor) -> None:
    """Forbid in `work[rows]` every token whose bit is 0."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    forbidden = ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, : work.shape[1]] == 0
    work[rows] = work[rows].masked_fill_(forbidden, -torch.inf)


@attrs.frozen(eq=False)
class AllowedTokens:
    """Forbids everything but a list."""

    rows: torch.Tensor
    #: i64 [E] row and token of every entry.
    row_of: torch.Tensor
    token_ids: torch.Tensor

    @classmethod
    def of(cls, rows: Rows, device: torch.device) -> AllowedTokens | None:
        lists = [(row, o.params.allowed_tokens) for row, _, o in rows if o.params.allowed_tokens is not None]
        if not lists:
            return None
        pairs = [(row, token) for row, tokens in lists for token in tokens]
        return cls(index([row for row, _ in lists], device), *index(pairs, device).unbind(1))

    def __call__(self, work: torch.Tensor, pos: torch.Tensor) -> None:
        kept = work[self.row_of, self.token_ids]
        work.index_fill_(0, self.rows, -torch.inf)
        work[self.row_of, self.token_ids] = kept


@attrs.frozen(eq=False)
class StopBan:
    """Forbids stop ids until `min_tokens` are out."""

    row_of: torch.Tensor
    token_ids: torch.Tensor
    #: i64 [E] first position at which the token may be sampled.
    until: torch.Tensor

    @classmethod
    def of(cls, rows: Rows, device: torch.device) -> StopBan | None:
        entries = [
            (row, token, o.prompt_len + o.params.min_tokens)
            for row, _, o in rows
            if o.params.min_tokens
            for token in dict.fromkeys(o.stop_ids)
        ]
        return cls(*index(entries, device).unbind(1)) if entries else None

    def __call__(self, work: torch.Tensor, pos: torch.Tensor) -> None:
        _forbid(work, self.row_of, self.token_ids, pos[self.row_of] < self.until)


@attrs.frozen(eq=False)
class BadWords:
    """Forbids the last token of a sequence whose other tokens were just produced."""

    row_of: torch.Tensor
    slot_of: torch.Tensor
    #: i64 [E, L] tokens before the last, right-aligned; -2 stands for any.
    before: torch.Tensor
    last: torch.Tensor
    recent: RecentTokens

    @classmethod
    def of(cls, rows: Rows, recent: RecentTokens, device: torch.device) -> BadWords | None:
        words = [(row, slot if slot in recent else 0, word) for row, slot, o in rows for word in o.bad_words]
        if not words:
            return None
        width = max(len(word) for _, _, word in words) - 1
        before = np.full((len(words), width), _ANY, np.int64)
        for line, (_, _, word) in zip(before, words, strict=True):
            line[width + 1 - len(word) :] = word[:-1]
        heads = index([(row, slot, word[-1]) for row, slot, word in words], device)
        row_of, slot_of, last = heads.unbind(1)
        return cls(row_of, slot_of, to_device(before, device), last, recent)

    def __call__(self, work: torch.Tensor, pos: torch.Tensor) -> None:
        width = self.before.shape[1]
        tails = self.recent.tails
        seen = tails[self.slot_of, tails.shape[1] - width :]
        hit = ((seen == self.before) | (self.before == _ANY)).all(-1)
        _forbid(work, self.row_of, self.last, hit)


def _forbid(work: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, when: torch.Tensor) -> None:
    # Adding keeps entries that name one token twice from undoing each other.
    ban = torch.zeros_like(when, dtype=work.dtype).masked_fill_(when, -torch.inf)
    work.index_put_((rows, ids), ban, accumulate=True)
