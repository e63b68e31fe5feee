"""Argmax and Gumbel-max. Specification: `kernels/reference.py::sample`."""

from __future__ import annotations

import torch

from ...protocols import SampleOp
from ..noise import gumbel, gumbel_row

__all__ = ["make_sample", "sample"]

#: Rows that get their noise together: enough to amortise calls, few enough to stay near the caches.
ROWS = 8


def sample(
    logits: torch.Tensor,
    *,
    greedy: torch.Tensor,
    seed: torch.Tensor,
    sample_index: torch.Tensor,
    pos: torch.Tensor,
    purpose: int,
    token_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """logits f32 [N, K], greedy bool [N], token_ids i64 [N, K] or None -> ids i64 [N]."""
    if logits.device.type == "cpu":
        columns = logits.argmax(dim=-1)
        for noisy in (~greedy).nonzero()[:, 0].split(ROWS):
            ids = None if token_ids is None else token_ids[noisy]
            some = (seed[noisy], sample_index[noisy], pos[noisy])
            columns[noisy] = (logits[noisy] + _noise(some, purpose, logits.shape[1], ids)).argmax(dim=-1)
    else:
        noise = _noise((seed, sample_index, pos), purpose, logits.shape[1], token_ids)
        columns = (logits + noise.masked_fill_(greedy[:, None], 0)).argmax(dim=-1)
    return columns if token_ids is None else token_ids.gather(1, columns[:, None])[:, 0]


def _noise(
    keys: tuple[torch.Tensor, torch.Tensor, torch.Tensor], purpose: int, width: int, token_ids: torch.Tensor | None
) -> torch.Tensor:
    if token_ids is not None:
        return gumbel(*keys, token_ids, purpose=purpose)
    return gumbel_row(*keys, vocab_size=width, purpose=purpose)


def make_sample(*, device: str, dtype: str, invariant: bool = False) -> SampleOp:
    return sample
