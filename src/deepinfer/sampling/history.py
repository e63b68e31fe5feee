"""Per-slot device state that changes with every token: occurrence counts and the last few tokens."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ..transfer import to_device

__all__ = ["NO_TOKEN", "RecentTokens", "TokenCounts"]

NO_TOKEN = -1


class TokenCounts:
    """How often each token was produced and whether the prompt holds it, for slots with penalties only.

    A compact pool: `rows` lines of the vocabulary's width, doubled when full. Owned by a `SamplingTable`.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._row_of: dict[int, int] = {}
        self._free: list[int] = []
        #: i32 [rows, V] occurrences in the output.
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        #: bool [rows, V] tokens of the prompt.
        self.in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)

    def __contains__(self, slot: int) -> bool:
        return slot in self._row_of

    def row(self, slot: int) -> int:
        """Line of the pool that belongs to `slot`."""
        return self._row_of[slot]

    def admit(self, slot: int, prompt: NDArray[np.int32], output: NDArray[np.int32]) -> None:
        if not self._free:
            self._grow()
        row = self._row_of[slot] = self._free.pop()
        device, vocab_size = self.counts.device, self.counts.shape[1]
        counts = np.bincount(output, minlength=vocab_size).astype(np.int32)
        self.counts[row] = to_device(counts, device)
        self.in_prompt[row] = to_device(np.bincount(prompt, minlength=vocab_size) > 0, device)

    def release(self, slot: int) -> None:
        row = self._row_of.pop(slot, None)
        if row is not None:
            self._free.append(row)

    def record(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """rows i64 [n] of the pool, tokens i64 [n]; `NO_TOKEN` counts nothing."""
        amount = (tokens >= 0).to(torch.int32)
        self.counts.index_put_((rows, tokens.clamp(min=0)), amount, accumulate=True)

    def _grow(self) -> None:
        old = len(self.counts)
        new = max(4, old)
        self.counts = torch.cat([self.counts, self.counts.new_zeros(new, self.counts.shape[1])])
        self.in_prompt = torch.cat([self.in_prompt, self.in_prompt.new_zeros(new, self.counts.shape[1])])
        self._free.extend(range(old + new - 1, old - 1, -1))


class RecentTokens:
    """The last tokens each slot produced, for slots that watch for sequences. Owned by a `SamplingTable`."""

    def __init__(self, device: torch.device) -> None:
        self._watching: set[int] = set()
        #: i64 [slots, L], latest last, `NO_TOKEN` where nothing was produced yet.
        self.tails = torch.full((1, 1), NO_TOKEN, dtype=torch.int64, device=device)

    def __contains__(self, slot: int) -> bool:
        return slot in self._watching

    def admit(self, slot: int, length: int, output: NDArray[np.int32]) -> None:
        """Watch the last `length` tokens of `slot`, which produced `output` so far."""
        slots, width = self.tails.shape
        grown = (max(width, length) - width, 0, 0, max(slots, slot + 1) - slots)
        if any(grown):
            self.tails = torch.nn.functional.pad(self.tails, grown, value=NO_TOKEN)
        self._watching.add(slot)
        tail = output[-length:].astype(np.int64)
        self.tails[slot] = NO_TOKEN
        if len(tail):
            self.tails[slot, -len(tail) :] = to_device(tail, self.tails.device)

    def release(self, slot: int) -> None:
        self._watching.discard(slot)

    def record(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """slots i64 [n], tokens i64 [n]; `NO_TOKEN` leaves the line as it is."""
        tails = self.tails[slots]
        shifted = torch.cat([tails[:, 1:], tokens[:, None]], dim=1)
        self.tails[slots] = torch.where(tokens[:, None] >= 0, shifted, tails)
