"""Which tokens stay: min-p, then top-k, then top-p, each on the distribution the one before left.

Reference, for one row with probabilities in descending order (lower id first among equals):

    min-p   keep q with  p[q] >= min_p * max(p)
    top-k   keep the first k
    top-p   keep q while the probability before q is below top_p of what is left: the smallest set that
            reaches top_p, the token that crosses it included, never empty
"""

from __future__ import annotations

import attrs
import torch

from .rowwise import fold_sum, prefix_sum, top_by_value

__all__ = ["LEVELS", "Survivors", "drop_min_p", "filter_logits", "survivors"]

#: Candidates to look at before falling back to more, and last to the whole vocabulary.
LEVELS = (64, 1024)


@attrs.frozen(eq=False)
class Survivors:
    """The K likeliest tokens of n rows, likeliest first; those dropped by a filter hold -inf."""

    #: f32 [n, K]
    logits: torch.Tensor
    #: i64 [n, K]
    token_ids: torch.Tensor
    #: i64 [n] how many stay (the first ones).
    num_kept: torch.Tensor
    #: bool [n]: False where K was too small to tell, so that more must be looked at.
    enough: torch.Tensor

    def take(self, rows: torch.Tensor) -> Survivors:
        return Survivors(self.logits[rows], self.token_ids[rows], self.num_kept[rows], self.enough[rows])

    def by_id(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits, ids) of the first `width` candidates, ids ascending."""
        ids, order = self.token_ids[:, :width].sort(dim=-1)
        return self.logits[:, :width].gather(1, order), ids

    def log_prob(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Log-probability of one token a row among the survivors, i64 [n] -> f32 [n]; -inf if dropped."""
        peak = self.logits[:, 0]
        total = fold_sum((self.logits - peak[:, None]).exp())
        chosen = self.logits.masked_fill(self.token_ids != token_ids[:, None], -torch.inf).amax(-1)
        return chosen - peak - total.log()


def drop_min_p(logits: torch.Tensor, log_min_p: torch.Tensor) -> torch.Tensor:
    """-inf for tokens less likely than min_p times the likeliest. logits [n, V], log_min_p f32 [n] (-inf: off)."""
    floor = logits.amax(-1) + log_min_p
    return logits.masked_fill(logits < floor[:, None], -torch.inf)


def survivors(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, *, width: int, capped: bool = False
) -> Survivors:
    """Top-k and top-p over the `width` likeliest tokens.

    logits f32 [n, V]; top_k i64 [n], V or more keeps all; top_p f32 [n]. capped: no top_k exceeds `width`, which
    saves a pass over the vocabulary. Where `enough` is True the result
    has the same bits for every `width`.
    """
    values, ids = top_by_value(logits, width)
    width = values.shape[1]
    peak = values[:, :1].clamp(min=torch.finfo(torch.float32).min)
    place = torch.arange(width, device=logits.device)
    in_k = place < top_k[:, None]
    weight = (values - peak).exp_().masked_fill_(~in_k, 0.0)
    total = fold_sum(weight)
    known = top_k <= width
    if not capped and width < logits.shape[1]:
        total = torch.where(known, total, fold_sum((logits - peak).exp_()))
    before = torch.nn.functional.pad(prefix_sum(weight)[:, :-1], (1, 0))
    keep = in_k & ((before < (top_p * total)[:, None]) | (top_p >= 1.0)[:, None])
    num_kept = keep.sum(-1).clamp_(min=1)
    enough = known | (num_kept < width) | (width == logits.shape[1])
    return Survivors(values.masked_fill(place >= num_kept[:, None], -torch.inf), ids, num_kept, enough)


def filter_logits(logits: torch.Tensor, *, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """Logits [N, V] with everything that does not stay at -inf; the input is not modified.

    >>> filter_logits(torch.tensor([[1.0, 3.0, 3.0]]), top_k=1)
    tensor([[-inf, 3., -inf]])
    """
    rows, vocab_size = logits.shape
    kept = drop_min_p(logits, torch.full((rows,), min_p, device=logits.device).log())
    if not top_k and top_p >= 1.0:
        return kept
    k = torch.full((rows,), min(top_k, vocab_size) or vocab_size, device=logits.device)
    found = survivors(kept, k, torch.full((rows,), top_p, device=logits.device), width=vocab_size)
    return torch.full_like(logits, -torch.inf).scatter_(1, found.token_ids, found.logits)
