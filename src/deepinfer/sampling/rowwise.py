"""Sums, orders and maxima along a row whose bits depend on nothing but the row.

Library reductions pick their summation order from the shape of the whole batch, so a row would change with
its batch mates. Here sums run in one tree of elementwise additions, and orders come from unique integer keys.
"""

from __future__ import annotations

import torch

__all__ = ["first_argmax", "fold_sum", "log_normalizer", "prefix_sum", "top_by_value"]

_BLOCK = 64
_MAX_ID = 2**31 - 1


def fold_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last axis, f32 [N, W] -> [N]: a binary tree over the row padded with zeros to a power of two.

    Trailing zeros change no bit, so the same values in a wider array have the same sum.
    """
    width = x.shape[-1]
    while width > 1:
        half = 1 << ((width - 1).bit_length() - 1)
        folded = x[..., :half].clone()
        folded[..., : width - half] += x[..., half:]
        x, width = folded, half
    return x[..., 0]


def prefix_sum(x: torch.Tensor) -> torch.Tensor:
    """Running sum over the last axis; entry j is a fixed tree over entries 0 to j, whatever the width."""
    shift = 1
    while shift < x.shape[-1]:
        shifted = x.clone()
        shifted[..., shift:] += x[..., :-shift]
        x, shift = shifted, shift * 2
    return x


def log_normalizer(logits: torch.Tensor, row_max: torch.Tensor | None = None) -> torch.Tensor:
    """log of the sum of exponentials, [N, V] -> [N]; -inf for a row of -inf."""
    peak = logits.amax(-1) if row_max is None else row_max
    base = peak.masked_fill(peak == -torch.inf, 0.0)
    return fold_sum((logits - base[:, None]).exp_()).log_() + base


def first_argmax(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest value and its lowest column, [N, V] -> values [N], ids i64 [N]; NaN beats every number.

    Blocks first: the vectorised block maximum is many times faster than an argmax over the row.
    """
    width = x.shape[-1]
    if width < 4 * _BLOCK:
        ids = x.argmax(-1, keepdim=True)
    else:
        block = _block_max(x).argmax(-1, keepdim=True)
        columns = block * _BLOCK + torch.arange(_BLOCK, device=x.device)
        inner = x.gather(1, columns.clamp_(max=width - 1)).argmax(-1, keepdim=True)
        ids = columns.gather(1, inner)
    return x.gather(1, ids)[:, 0], ids[:, 0]


def top_by_value(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest of each row, largest first, lower column first among equals.

    f32 [N, V] -> values [N, count], ids i64 [N, count]. -0.0 equals +0.0.
    """
    width = x.shape[-1]
    count = min(count, width)
    if 4 * count * _BLOCK > width:
        return _top(x, torch.arange(width, device=x.device).expand_as(x), count)
    # Each of the `count` first blocks, ordered by maximum, holds an element that precedes all of a later block.
    peaks = _block_max(x)
    blocks = _top(peaks, torch.arange(peaks.shape[1], device=x.device).expand_as(peaks), count)[1]
    ids = (blocks[:, :, None] * _BLOCK + torch.arange(_BLOCK, device=x.device)).flatten(1)
    values = x.gather(1, ids.clamp(max=width - 1)).masked_fill_(ids >= width, -torch.inf)
    return _top(values, ids, count)


def _block_max(x: torch.Tensor) -> torch.Tensor:
    whole = x.shape[-1] // _BLOCK * _BLOCK
    peaks = x[:, :whole].unflatten(1, (-1, _BLOCK)).amax(-1)
    if whole == x.shape[-1]:
        return peaks
    return torch.cat([peaks, x[:, whole:].amax(-1, keepdim=True)], dim=1)


def _top(values: torch.Tensor, ids: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    # Adding 0.0 turns -0.0 into +0.0; flipping the low bits of negative floats makes their bits ordered.
    bits = (values + 0.0).view(torch.int32)
    bits = bits ^ ((bits >> 31) & _MAX_ID)
    keys = (bits.to(torch.int64) << 32) | (_MAX_ID - ids)
    best = keys.sort(dim=-1, descending=True)[0] if count == keys.shape[-1] else keys.topk(count)[0]
    chosen = _MAX_ID - (best & _MAX_ID)
    bits = (best >> 32).to(torch.int32)
    return (bits ^ ((bits >> 31) & _MAX_ID)).view(torch.float32), chosen
