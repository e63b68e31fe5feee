"""Shared by the tests of this folder: a plain sample op and short ways to fill a table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from deepinfer.kernels.noise import gumbel, gumbel_row
from deepinfer.plan import Admission
from deepinfer.sampling import SampleOut, Sampler, SamplingTable, TokenMasks
from deepinfer.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
INF = float("inf")


def gumbel_sample(
    logits: torch.Tensor,
    *,
    greedy: torch.Tensor,
    seed: torch.Tensor,
    sample_index: torch.Tensor,
    pos: torch.Tensor,
    purpose: int,
    token_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    if token_ids is None:
        noise = gumbel_row(seed, sample_index, pos, vocab_size=logits.shape[1], purpose=purpose)
        return (logits + noise.masked_fill(greedy[:, None], 0.0)).argmax(-1)
    assert (token_ids.diff(dim=1) > 0).all(), "candidates must come in ascending order"
    noise = gumbel(seed, sample_index, pos, token_ids, purpose=purpose)
    best = (logits + noise.masked_fill(greedy[:, None], 0.0)).argmax(-1, keepdim=True)
    return token_ids.gather(1, best)[:, 0]


def admission(
    slot: int,
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
    seed: int = 0,
    sample_index: int = 0,
) -> Admission:
    return Admission(
        slot=slot,
        token_ids=np.array([*prompt, *output], np.int32),
        prompt_len=len(prompt),
        params=params,
        seed=params.seed if params.seed is not None else seed,
        sample_index=sample_index,
    )


class Rig:
    """A sampler and a table whose slots 1, 2, ... hold the given parameters."""

    def __init__(self, vocab_size: int, *params: SamplingParams, eos_ids: Sequence[int] = (), **fields) -> None:
        self.table = SamplingTable(len(params) + 1, vocab_size=vocab_size, eos_ids=eos_ids)
        self.sampler = Sampler(gumbel_sample, vocab_size=vocab_size)
        for slot, p in enumerate(params, start=1):
            self.table.admit(admission(slot, p, **{"seed": slot, **fields}))

    def __call__(
        self,
        logits: torch.Tensor | Sequence[Sequence[float]],
        *,
        slots: Sequence[int] | None = None,
        pos: int | Sequence[int] = 1,
        masks: TokenMasks | None = None,
    ) -> SampleOut:
        logits = torch.as_tensor(logits, dtype=torch.float32)
        slots = list(range(1, len(logits) + 1)) if slots is None else list(slots)
        positions = torch.tensor([pos] * len(slots) if isinstance(pos, int) else list(pos), dtype=torch.int32)
        return self.sampler(logits, table=self.table, slots=np.array(slots, np.int32), pos=positions, masks=masks)

    def draws(self, logits: torch.Tensor, count: int, *, slot: int = 1, start: int = 1) -> torch.Tensor:
        """`count` tokens of one row of logits at consecutive positions."""
        rows = logits.expand(count, -1)
        return self(rows, slots=[slot] * count, pos=range(start, start + count)).tokens
