"""Our sampling inside somebody else's generation loop."""

from __future__ import annotations

import numpy as np
import torch

from ..errors import NumericalError
from ..plan import Admission
from ..types import SamplingParams
from .sampler import Sampler
from .table import SamplingTable

__all__ = ["SamplingProcessor"]


class SamplingProcessor:
    """A logits processor for `transformers`' `generate` that leaves one token a row: the one we sample.

    With `do_sample=False` the loop then takes exactly that token, so every option of `SamplingParams` but
    `max_tokens`, `stop` and `n` (which end or multiply sequences) acts as in the engine. Row i of the batch draws
    with sample index i. One object serves one call of `generate` at a time; the next prompt starts it anew.

    seed: used where `params.seed` is None. attention_mask [B, L] of the prompts: padding on the left is then not
    part of them, so that a row's tokens do not depend on the length of its batch mates.

    Raises (when called):
        NumericalError: a row's logits hold NaN, or its masks leave nothing.

    >>> model.generate(**inputs, logits_processor=[SamplingProcessor(params, sampler)])  # doctest: +SKIP
    """

    def __init__(
        self,
        params: SamplingParams,
        sampler: Sampler,
        *,
        seed: int = 0,
        eos_ids: tuple[int, ...] = (),
        attention_mask: torch.Tensor | None = None,
    ) -> None:
        self._params = params
        self._sampler = sampler
        self._seed = seed if params.seed is None else params.seed
        self._eos_ids = eos_ids
        self._attention_mask = attention_mask
        self._table: SamplingTable | None = None
        self._padding = torch.zeros(0, dtype=torch.int64)
        self._seen = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """input_ids i64 [B, L], scores f32 [B, V] -> -inf everywhere but 0 at the sampled token."""
        batch, length = input_ids.shape
        slots = np.arange(1, batch + 1, dtype=np.int32)
        if self._table is None or length != self._seen + 1:
            self._table = self._start(input_ids, scores)
        else:
            self._table.record(slots, input_ids[:, -1])
        self._seen = length
        pos = (length - self._padding).to(torch.int32)
        out = self._sampler(scores.float(), table=self._table, slots=slots, pos=pos)
        if bool(out.bad.any()):
            row = int(out.bad.nonzero()[0, 0])
            raise NumericalError(f"row {row} at position {int(pos[row])} has NaN logits or nothing left to sample")
        return torch.full_like(scores, -torch.inf).scatter_(1, out.tokens[:, None], 0.0)

    def _start(self, input_ids: torch.Tensor, scores: torch.Tensor) -> SamplingTable:
        batch, length = input_ids.shape
        real = torch.ones_like(input_ids) if self._attention_mask is None else self._attention_mask
        self._padding = length - real.sum(-1)
        table = SamplingTable(batch + 1, vocab_size=scores.shape[1], device=scores.device, eos_ids=self._eos_ids)
        for row in range(batch):
            prompt = input_ids[row, int(self._padding[row]) :].cpu().numpy().astype(np.int32)
            admission = Admission(
                slot=row + 1,
                token_ids=prompt,
                prompt_len=len(prompt),
                params=self._params,
                seed=self._seed,
                sample_index=row,
            )
            table.admit(admission)
        return table
