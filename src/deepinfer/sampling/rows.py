"""The rows of one batch sorted by what each needs, so that none pays for another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from ..transfer import to_device
from .filters import LEVELS
from .history import NO_TOKEN, RecentTokens, TokenCounts
from .masks import AllowedTokens, BadWords, Rows, StopBan, floats, index
from .options import SlotOptions
from .penalties import LogitBias, Penalties

__all__ = ["BatchRows", "Edit", "FilterGroup", "ForcedTokens"]


class Edit(Protocol):
    """Changes `work` f32 [A, V] in place."""

    def __call__(self, work: torch.Tensor, pos: torch.Tensor) -> None: ...


@attrs.frozen(eq=False)
class FilterGroup:
    """Random rows whose top-k and top-p are tried on `width` candidates first."""

    width: int
    #: Whether no `top_k` exceeds `width`.
    capped: bool
    #: i64 [n] rows of the working logits.
    rows: torch.Tensor
    #: i64 [n]; the vocabulary size where there is no limit.
    top_k: torch.Tensor
    #: f32 [n]
    top_p: torch.Tensor


@attrs.frozen(eq=False)
class ForcedTokens:
    """Tokens that are not sampled but given, for the first positions of a completion."""

    #: i64 [n] rows of the batch.
    rows: torch.Tensor
    #: i64 [n, F], padded with `NO_TOKEN`.
    token_ids: torch.Tensor
    #: i64 [n] position of the first one.
    start: torch.Tensor

    def __call__(self, tokens: torch.Tensor, pos: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens with forced ones in place, bool [N] which are forced)."""
        offset = pos[self.rows] - self.start
        width = self.token_ids.shape[1]
        given = self.token_ids.gather(1, offset.clamp(0, width - 1)[:, None])[:, 0]
        holds = (offset >= 0) & (offset < width) & (given != NO_TOKEN)
        is_forced = torch.zeros_like(tokens, dtype=torch.bool).index_put_((self.rows,), holds)
        return tokens.index_put((self.rows,), torch.where(holds, given, tokens[self.rows])), is_forced


@attrs.frozen(eq=False)
class BatchRows:
    """N rows of a batch. `active` ones are copied into working logits [A, V]: first the R random, then the
    greedy ones with edits. Every other row is a plain argmax."""

    #: i64 [A] rows of the batch.
    active: torch.Tensor
    num_random: int
    #: What forbids tokens, then what shifts logits, in order.
    masks: tuple[Edit, ...]
    shifts: tuple[Edit, ...]
    #: i64 rows of the working logits that the caller's own masks belong to.
    masked: torch.Tensor
    #: f32 [R, 1], i64 [R], i32 [R]
    temperature: torch.Tensor
    seed: torch.Tensor
    sample_index: torch.Tensor
    #: Rows of the working logits with min-p, and its logarithm.
    min_p_rows: torch.Tensor
    log_min_p: torch.Tensor
    #: i64 random rows without top-k or top-p, and those of them that report logprobs.
    dense: torch.Tensor
    dense_reported: torch.Tensor
    filtered: tuple[FilterGroup, ...]
    forced: ForcedTokens | None
    #: i32 [M] rows of the batch that report logprobs (host and device), and how many alternatives at most.
    reported: NDArray[np.int32]
    reported_rows: torch.Tensor
    num_top: int

    @classmethod
    def of(
        cls,
        slots: NDArray[np.int32],
        options: Sequence[SlotOptions],
        *,
        edited: NDArray[np.int32] | None,
        counts: TokenCounts,
        recent: RecentTokens,
    ) -> BatchRows:
        device, vocab_size = counts.counts.device, counts.counts.shape[1]
        touched = set() if edited is None else set(edited.tolist())
        random = [row for row, o in enumerate(options) if not o.greedy]
        greedy = [row for row, o in enumerate(options) if o.greedy and (o.edits_logits or row in touched)]
        active = random + greedy
        local = {row: place for place, row in enumerate(active)}
        editing: Rows = [(local[row], int(slots[row]), options[row]) for row in active if options[row].edits_logits]
        drawn = [options[row] for row in random]
        dense = [i for i, o in enumerate(drawn) if not _filters(o, vocab_size)]
        with_min_p = [i for i, o in enumerate(drawn) if o.params.min_p > 0.0]
        reported = [row for row, o in enumerate(options) if o.params.logprobs is not None]
        return cls(
            active=index(active, device),
            num_random=len(random),
            masks=_present(
                AllowedTokens.of(editing, device), BadWords.of(editing, recent, device), StopBan.of(editing, device)
            ),
            shifts=_present(LogitBias.of(editing, device), Penalties.of(editing, counts, device)),
            masked=index([] if edited is None else [local[row] for row in edited.tolist()], device),
            temperature=floats([o.params.temperature for o in drawn], device)[:, None],
            seed=index([o.seed for o in drawn], device),
            sample_index=index([o.sample_index for o in drawn], device).to(torch.int32),
            min_p_rows=index(with_min_p, device),
            log_min_p=floats([np.log(drawn[i].params.min_p) for i in with_min_p], device),
            dense=index(dense, device),
            dense_reported=index([i for i in dense if drawn[i].params.logprobs is not None], device),
            filtered=_filter_groups(drawn, vocab_size, device),
            forced=_forced(options, device),
            reported=np.array(reported, np.int32),
            reported_rows=index(reported, device),
            num_top=max((options[row].params.logprobs or 0 for row in reported), default=0),
        )


def _present(*edits: Edit | None) -> tuple[Edit, ...]:
    return tuple(edit for edit in edits if edit is not None)


def _filters(options: SlotOptions, vocab_size: int) -> bool:
    return 0 < options.params.top_k < vocab_size or options.params.top_p < 1.0


def _filter_groups(drawn: Sequence[SlotOptions], vocab_size: int, device: torch.device) -> tuple[FilterGroup, ...]:
    by_kind: dict[tuple[int, bool], list[int]] = {}
    for row, options in enumerate(drawn):
        if _filters(options, vocab_size):
            top_k = options.params.top_k
            width = _first_width(top_k, vocab_size, device)
            by_kind.setdefault((width, 0 < top_k <= width), []).append(row)
    groups = []
    for (width, capped), rows in sorted(by_kind.items()):
        params = [drawn[row].params for row in rows]
        top_k = [min(p.top_k, vocab_size) or vocab_size for p in params]
        top_p = floats([p.top_p for p in params], device)
        groups.append(FilterGroup(width, capped, index(rows, device), index(top_k, device), top_p))
    return tuple(groups)


def _first_width(top_k: int, vocab_size: int, device: torch.device) -> int:
    # Whether a width sufficed can be asked only where asking does not wait for a device.
    if not top_k and device.type != "cpu":
        return vocab_size
    return next((level for level in LEVELS if top_k <= level < vocab_size), vocab_size)


def _forced(options: Sequence[SlotOptions], device: torch.device) -> ForcedTokens | None:
    found = [(row, o) for row, o in enumerate(options) if o.params.forced_tokens]
    if not found:
        return None
    width = max(len(o.params.forced_tokens) for _, o in found)
    table = np.full((len(found), width), NO_TOKEN, np.int64)
    for line, (_, o) in zip(table, found, strict=True):
        line[: len(o.params.forced_tokens)] = o.params.forced_tokens
    rows = index([row for row, _ in found], device)
    start = index([o.prompt_len for _, o in found], device)
    return ForcedTokens(rows, to_device(table, device), start)
