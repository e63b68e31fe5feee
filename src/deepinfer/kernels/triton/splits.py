"""Merging the partial results of attention over splits of the keys.

A partial result is (high, total, mixed): the largest score (base 2), the sum of weights relative to it and the
weighted sum of values. Merging in order is a chain of explicit multiply-adds, the same in both callers, so that
decode rows (a second pass) and prompts (inside their program) get the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["add_split", "merge_splits"]


@triton.jit
def add_split(
    high: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    part_high: tl.tensor,
    part_total: tl.tensor,
    part_mixed: tl.tensor,
) -> tuple[tl.tensor, ...]:
    """One partial result [M], [M], [M, D] onto another."""
    best = tl.maximum(high, part_high)
    level = tl.where(best == float("-inf"), 0.0, best)
    keep, gain = tl.exp2(high - level), tl.exp2(part_high - level)
    total = tl.fma(part_total, gain, total * keep)
    gain_column, kept = tl.broadcast_to(gain[:, None], mixed.shape), mixed * keep[:, None]
    return best, total, tl.fma(part_mixed, gain_column, kept)


@triton.jit
def _merge(
    part_ptr: tl.tensor,
    stat_ptr: tl.tensor,
    out_ptr: tl.tensor,
    pos_ptr: tl.tensor,
    num_splits: tl.tensor,
    split_keys: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    place = token * tl.num_programs(1) + tl.program_id(1)
    d = tl.arange(0, BLOCK_D)[None, :]
    one = tl.arange(0, 1)
    high = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    mixed = tl.zeros((1, BLOCK_D), tl.float32)
    seen = tl.load(pos_ptr + token) // split_keys + 1
    for split in tl.range(0, seen, loop_unroll_factor=4):
        slot = place * num_splits + split
        part_high, part_total = tl.load(stat_ptr + slot * 2 + one), tl.load(stat_ptr + slot * 2 + 1 + one)
        part_mixed = tl.load(part_ptr + slot * WIDTH + d, mask=d < WIDTH, other=0.0)
        high, total, mixed = add_split(high, total, mixed, part_high, part_total, part_mixed)
    out = (mixed / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place * WIDTH + d, out, mask=d < WIDTH)


def merge_splits(
    part: torch.Tensor,
    stat: torch.Tensor,
    out: torch.Tensor,
    pos: torch.Tensor,
    *,
    num_tokens: int,
    num_splits: int,
    split_keys: int,
) -> None:
    """part f32 [T, H, splits, D], stat f32 [T, H, splits, 2] into out [T, H, D], split after split."""
    width = out.shape[2]
    block = triton.next_power_of_2(width)
    _merge[(num_tokens, out.shape[1])](
        part, stat, out, pos, num_splits, split_keys, WIDTH=width, BLOCK_D=block, num_warps=1
    )
