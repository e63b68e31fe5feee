"""Log-probabilities to report, with the same bits alone and in any batch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .rowwise import log_normalizer, top_by_value

__all__ = ["Scores", "top_logprobs"]

#: Rows scored at a time, which bounds the working memory to a few times this many rows of logits.
_ROWS = 64


class Scores(NamedTuple):
    """Log-probabilities of N chosen tokens and of the K likeliest ones."""

    #: f32 [N]
    raw: torch.Tensor
    #: i64 [N, K], likeliest first, lower id among equals.
    top_ids: torch.Tensor
    #: f32 [N, K]
    top_raw: torch.Tensor


def top_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Scores:
    """Score one token a row. logits f32 [N, V], token_ids i64 [N]; K = min(num_top, V), 0 gives [N, 0].

    For prompt logprobs, row i holds the logits that predict prompt token i + 1, and `token_ids` those tokens.
    """
    pairs = zip(logits.split(_ROWS), token_ids.split(_ROWS), strict=True)
    parts = [_score(part, ids, num_top) for part, ids in pairs]
    return Scores(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _score(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Scores:
    total = log_normalizer(logits)
    values, ids = top_by_value(logits, num_top) if num_top else (logits[:, :0], token_ids[:, None][:, :0])
    return Scores(logits.gather(1, token_ids[:, None])[:, 0] - total, ids, values - total[:, None])
