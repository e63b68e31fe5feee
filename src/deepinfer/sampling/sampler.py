"""From logits to tokens.

The one order in which everything acts, per row:

    logits of the model          ── raw logprobs are of these
    1. logits transforms         of the composition, in the order given
    2. masks                     allowed_tokens, bad_words, stop ids before min_tokens, grammar: -inf
    3. logit_bias                added
    4. repetition_penalty        tokens of prompt and output: positive logits divided, negative multiplied
    5. frequency_penalty         subtracted per occurrence in the output
    6. presence_penalty          subtracted once for tokens of the output
    7. temperature               distances to the best logit divided by it
    8. min_p, top_k, top_p       each on what the one before left
                                 ── processed logprobs are of this distribution
    9. token                     temperature 0: argmax of step 6, lowest id on ties (its distribution is a point:
                                 processed logprob 0). Otherwise argmax of step 8 plus Gumbel noise of
                                 (seed, sample index, position, token): see `kernels.noise`
   10. forced_tokens             replace the token, not the logprobs

A row's outcome has the same bits alone and in any batch; no step modifies the logits passed in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from ..plan import TopLogprobs
from ..protocols import LogitsTransform, SampleOp
from ..transfer import to_host
from .filters import LEVELS, Survivors, drop_min_p, survivors
from .logprobs import top_logprobs
from .masks import TokenMasks, apply_token_masks
from .rows import BatchRows, FilterGroup
from .rowwise import first_argmax, log_normalizer
from .table import SamplingTable

__all__ = ["SampleOut", "Sampler"]

_SAMPLE = 0


@attrs.frozen(eq=False)
class SampleOut:
    """Outcome of N rows, on the device; M of them report logprobs, K alternatives each."""

    #: i64 [N]; 0 where `bad`, so that a row already in flight reads a valid id.
    tokens: torch.Tensor
    #: bool [N] logits held NaN or +inf, or nothing was left to sample.
    bad: torch.Tensor
    #: bool [N] the masks left nothing.
    empty: torch.Tensor
    #: i32 [M] on the host: rows that report (`logprobs` 0 reports the chosen token, None nothing).
    reported: NDArray[np.int32]
    #: f32 [M]
    raw: torch.Tensor
    processed: torch.Tensor
    #: i64, f32 [M, K]: K is the most any row asked for.
    top_ids: torch.Tensor
    top_raw: torch.Tensor

    def to_host(self) -> SampleOut:
        """The same on the host; from an accelerator the copies are asynchronous, so wait for its stream."""
        if self.tokens.device.type == "cpu":
            return self
        fields = {name: to_host(x) for name, x in attrs.asdict(self).items() if isinstance(x, torch.Tensor)}
        return attrs.evolve(self, **fields)

    def top_logprobs(self, row_numbers: NDArray[np.int32]) -> TopLogprobs | None:
        """Logprobs of a step, None if no row reports. Row i of the batch is row `row_numbers[i]` of the step."""
        if not len(self.reported):
            return None
        return TopLogprobs(
            rows=row_numbers[self.reported],
            raw=self.raw.numpy(),
            processed=self.processed.numpy(),
            top_ids=self.top_ids.numpy().astype(np.int32),
            top_raw=self.top_raw.numpy(),
        )


@attrs.frozen(eq=False)
class _Drawn:
    """Working logits of the active rows after step 8 and what was chosen from them."""

    work: torch.Tensor
    tokens: torch.Tensor
    empty: torch.Tensor
    found: tuple[tuple[torch.Tensor, Survivors], ...]


class Sampler:
    """Chooses one token a row. Holds no state of requests: that is in the `SamplingTable`.

    sample_op: draws from logits (kind `op.sample`). transforms: applied to every batch, step 1.
    """

    def __init__(self, sample_op: SampleOp, *, vocab_size: int, transforms: Sequence[LogitsTransform] = ()) -> None:
        self._sample_op = sample_op
        self.vocab_size = vocab_size
        self.transforms = tuple(transforms)

    def __call__(
        self,
        logits: torch.Tensor,
        *,
        table: SamplingTable,
        slots: NDArray[np.int32],
        pos: torch.Tensor,
        masks: TokenMasks | None = None,
        views: Sequence[Any] = (),
    ) -> SampleOut:
        """logits f32 [N, V]; slots i32 [N] on the host; pos i32 [N] absolute position of the sampled token.

        masks: grammar rows. views: N `engine.RowView` for the transforms. The caller records the tokens with
        `table.record`.
        """
        raw = logits
        if self.transforms:
            logits = self._transformed(logits, views)
        rows = table.batch_rows(np.asarray(slots, np.int32), edited=None if masks is None else masks.rows)
        best, argmax = first_argmax(logits)
        broken, empty, tokens, drawn = ~(best < torch.inf), best == -torch.inf, argmax, None
        if len(rows.active):
            drawn = self._draw(logits, best, rows, pos, masks)
            tokens = tokens.index_put((rows.active,), drawn.tokens)
            empty.index_put_((rows.active,), drawn.empty)
        chosen = tokens
        if rows.forced is not None:
            tokens, is_forced = rows.forced(tokens, pos)
            empty &= ~is_forced
        bad = broken | empty
        tokens = tokens.masked_fill(bad, 0)
        if not len(rows.reported):
            nothing = best[:0]
            return SampleOut(tokens, bad, empty, rows.reported, nothing, nothing, tokens[:0, None], nothing[:, None])
        scores = top_logprobs(raw[rows.reported_rows], tokens[rows.reported_rows], rows.num_top)
        processed = _processed(rows, drawn, chosen, tokens)[rows.reported_rows]
        return SampleOut(tokens, bad, empty, rows.reported, scores.raw, processed, scores.top_ids, scores.top_raw)

    def config(self) -> Mapping[str, Any]:
        transforms = [type(transform).__qualname__ for transform in self.transforms]
        return {"vocab_size": self.vocab_size, "transforms": transforms}

    def _transformed(self, logits: torch.Tensor, views: Sequence[Any]) -> torch.Tensor:
        logits = logits.clone()
        for transform in self.transforms:
            logits = transform(logits, views)
        return logits

    def _draw(
        self, logits: torch.Tensor, best: torch.Tensor, rows: BatchRows, pos: torch.Tensor, masks: TokenMasks | None
    ) -> _Drawn:
        work, peak = logits[rows.active], best[rows.active]
        if rows.masks or rows.shifts or masks is not None:
            _edit(work, rows, pos[rows.active], masks)
            peak = work.amax(-1)
        tokens = work.new_empty(len(work), dtype=torch.int64)
        if rows.num_random < len(work):
            tokens[rows.num_random :] = first_argmax(work[rows.num_random :])[1]
        found = []
        if rows.num_random:
            random_pos = pos[rows.active[: rows.num_random]]
            _temper(work[: rows.num_random], peak[: rows.num_random], rows)
            if len(rows.dense):
                tokens[rows.dense] = self._sample(work[rows.dense], rows, rows.dense, random_pos)
            for group in rows.filtered:
                for members, kept in _survivors(work, group):
                    tokens[members] = self._sample_survivors(kept, rows, members, random_pos)
                    found.append((members, kept))
        return _Drawn(work, tokens, peak == -torch.inf, tuple(found))

    def _sample_survivors(
        self, kept: Survivors, rows: BatchRows, members: torch.Tensor, pos: torch.Tensor
    ) -> torch.Tensor:
        width = kept.logits.shape[1]
        if kept.logits.device.type == "cpu":
            width = int(kept.num_kept.max())
        if 8 * width > self.vocab_size:
            full = kept.logits.new_full((len(members), self.vocab_size), -torch.inf)
            return self._sample(full.scatter_(1, kept.token_ids, kept.logits), rows, members, pos)
        values, ids = kept.by_id(width)
        return self._sample(values, rows, members, pos, token_ids=ids)

    def _sample(
        self,
        logits: torch.Tensor,
        rows: BatchRows,
        members: torch.Tensor,
        pos: torch.Tensor,
        token_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._sample_op(
            logits,
            greedy=torch.zeros_like(members, dtype=torch.bool),
            seed=rows.seed[members],
            sample_index=rows.sample_index[members],
            pos=pos[members],
            purpose=_SAMPLE,
            token_ids=token_ids,
        )


def _edit(work: torch.Tensor, rows: BatchRows, pos: torch.Tensor, masks: TokenMasks | None) -> None:
    for edit in rows.masks:
        edit(work, pos)
    if masks is not None:
        apply_token_masks(work, masks.bits, rows.masked)
    for edit in rows.shifts:
        edit(work, pos)


def _temper(work: torch.Tensor, peak: torch.Tensor, rows: BatchRows) -> None:
    # Distances to the best first: no temperature overflows, and the likeliest tokens keep the most bits.
    work.sub_(peak.masked_fill(peak == -torch.inf, 0.0)[:, None]).div_(rows.temperature)
    if len(rows.min_p_rows):
        work[rows.min_p_rows] = drop_min_p(work[rows.min_p_rows], rows.log_min_p)


def _survivors(work: torch.Tensor, group: FilterGroup) -> Iterator[tuple[torch.Tensor, Survivors]]:
    """Survivors of the group's rows; those that need more candidates come from a wider try."""
    members, top_k, top_p, width = group.rows, group.top_k, group.top_p, group.width
    while len(members):
        kept = survivors(work[members], top_k, top_p, width=width, capped=group.capped)
        if work.device.type != "cpu" or bool(kept.enough.all()):
            yield members, kept
            return
        done, left = kept.enough, ~kept.enough
        if bool(done.any()):
            yield members[done], kept.take(done)
        members, top_k, top_p = members[left], top_k[left], top_p[left]
        width = next((level for level in LEVELS if width < level < work.shape[1]), work.shape[1])


def _processed(rows: BatchRows, drawn: _Drawn | None, chosen: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """f32 [N] logprob of each token in the distribution of its row; rows that do not report hold anything."""
    # The distribution of a greedy row is a point.
    processed = torch.zeros(len(tokens), device=tokens.device).masked_fill_(chosen != tokens, -torch.inf)
    if drawn is None:
        return processed
    if len(rows.dense_reported):
        members = rows.active[rows.dense_reported]
        work = drawn.work[rows.dense_reported]
        at_token = work.gather(1, tokens[members][:, None])[:, 0]
        processed[members] = at_token - log_normalizer(work)
    for members, kept in drawn.found:
        processed[rows.active[members]] = kept.log_prob(tokens[rows.active[members]])
    return processed
