"""Sampling state of every slot, and the plan of a batch derived from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..plan import Admission
from ..transfer import to_device
from ..types import SamplingParams
from .history import RecentTokens, TokenCounts
from .options import SlotOptions, check_params
from .rows import BatchRows

__all__ = ["SamplingTable"]

_PADDING = SlotOptions(SamplingParams(temperature=0.0), seed=0, sample_index=0, prompt_len=0, stop_ids=())


class SamplingTable:
    """What the sampler knows of each slot. Owned by one executor; not thread-safe.

    Options live on the host; what changes with every token (penalty counts, recent tokens) lives on the device,
    for the slots that need it only, and grows as they come. Slot 0 is padding: its rows are plain greedy.

    num_slots: slots to expect, a hint. eos_ids: end-of-sequence ids of the model, stop ids unless `ignore_eos`.
    """

    def __init__(
        self, num_slots: int, *, vocab_size: int, device: torch.device | str = "cpu", eos_ids: Sequence[int] = ()
    ) -> None:
        self.num_slots = num_slots
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.eos_ids = tuple(eos_ids)
        self._options: dict[int, SlotOptions] = {0: _PADDING}
        self._counts = TokenCounts(vocab_size, self.device)
        self._recent = RecentTokens(self.device)
        self._planned: tuple[bytes, BatchRows] | None = None
        self._watched: tuple[bytes, tuple[torch.Tensor, ...]] | None = None

    def admit(self, admission: Admission) -> None:
        """A sequence takes its slot; produced tokens of a resumed one count as if recorded one by one.

        Raises:
            InvalidRequest, UnsupportedOption: see `check_params`.
        """
        params, slot = admission.params, admission.slot
        assert slot > 0, "slot 0 is padding"
        check_params(params, self.vocab_size)
        self.release(slot)
        eos_ids = () if params.ignore_eos else self.eos_ids
        options = SlotOptions(
            params=params,
            seed=int(np.uint64(admission.seed).astype(np.int64)),
            sample_index=admission.sample_index,
            prompt_len=admission.prompt_len,
            stop_ids=(*params.stop_token_ids, *eos_ids),
        )
        self._options[slot] = options
        prompt, output = np.split(admission.token_ids, [admission.prompt_len])
        if options.has_penalties:
            self._counts.admit(slot, prompt, output)
        longest = max(map(len, options.bad_words), default=0)
        if longest > 1:
            self._recent.admit(slot, longest - 1, output)

    def release(self, slot: int) -> None:
        """The slot is free; releasing a free slot does nothing."""
        if slot and self._options.pop(slot, None) is not None:
            self._counts.release(slot)
            self._recent.release(slot)
        self._planned = self._watched = None

    def record(self, slots: NDArray[np.int32], tokens: torch.Tensor) -> None:
        """Row i of slot `slots[i]` produced `tokens[i]` (i64 [N] on the device; -1: nothing)."""
        key = slots.tobytes()
        if self._watched is None or self._watched[0] != key:
            self._watched = key, self._watch(slots)
        rows, lines, tail_rows, tail_slots = self._watched[1]
        if len(rows):
            self._counts.record(lines, tokens[rows])
        if len(tail_rows):
            self._recent.record(tail_slots, tokens[tail_rows])

    def batch_rows(self, slots: NDArray[np.int32], *, edited: NDArray[np.int32] | None = None) -> BatchRows:
        """Plan of a batch whose row i samples for slot `slots[i]`; a slot may have several rows.

        edited: rows whose logits somebody else will edit. Kept until a slot is admitted or released.
        """
        key = slots.tobytes() + b"|" + (b"" if edited is None else edited.tobytes())
        if self._planned is None or self._planned[0] != key:
            options = [self._options[slot] for slot in slots.tolist()]
            plan = BatchRows.of(slots, options, edited=edited, counts=self._counts, recent=self._recent)
            self._planned = key, plan
        return self._planned[1]

    def num_prompt_logprobs(self, slot: int) -> int:
        """Alternatives to report per prompt position (0 if none were asked for)."""
        return self._options[slot].params.prompt_logprobs or 0

    def config(self) -> Mapping[str, Any]:
        return {"num_slots": self.num_slots, "vocab_size": self.vocab_size, "eos_ids": list(self.eos_ids)}

    def _watch(self, slots: NDArray[np.int32]) -> tuple[torch.Tensor, ...]:
        counted = [(row, self._counts.row(slot)) for row, slot in enumerate(slots.tolist()) if slot in self._counts]
        tailed = [(row, slot) for row, slot in enumerate(slots.tolist()) if slot in self._recent]
        columns = [np.array(pairs, np.int64).reshape(-1, 2).T.copy() for pairs in (counted, tailed)]
        return tuple(to_device(column, self.device) for pair in columns for column in pair)
