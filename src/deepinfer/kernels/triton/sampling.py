"""Argmax and Gumbel-max over the vocabulary. Specification: `kernels/reference.py::sample`.

The noise repeats `kernels/noise.py` operation by operation, with fused multiply-add switched off, so its bits
are those of every other backend. Cost: reads the logits once; about 70 integer and 40 float operations an id.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..noise import LN2_HI, LN2_LO, LOG_COEFFICIENTS

__all__ = ["noise_row", "sample"]

C0 = tl.constexpr(LOG_COEFFICIENTS[0])
C1 = tl.constexpr(LOG_COEFFICIENTS[1])
C2 = tl.constexpr(LOG_COEFFICIENTS[2])
C3 = tl.constexpr(LOG_COEFFICIENTS[3])
C4 = tl.constexpr(LOG_COEFFICIENTS[4])
C5 = tl.constexpr(LOG_COEFFICIENTS[5])
C6 = tl.constexpr(LOG_COEFFICIENTS[6])
C7 = tl.constexpr(LOG_COEFFICIENTS[7])
HIGH = tl.constexpr(LN2_HI)
LOW = tl.constexpr(LN2_LO)
NO_COLUMN = tl.constexpr(2**31 - 1)

#: Groups of four ids a program looks at.
GROUPS = 512


@triton.jit
def _philox(
    c0: tl.tensor, c1: tl.tensor, c2: tl.tensor, c3: tl.tensor, k0: tl.tensor, k1: tl.tensor
) -> tuple[tl.tensor, ...]:
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _split(x: tl.tensor) -> tuple[tl.tensor, ...]:
    bits = x.to(tl.int32, bitcast=True)
    k = (bits - 0x3F400000) >> 23
    return (bits - (k << 23)).to(tl.float32, bitcast=True) - 1.0, k.to(tl.float32)


@triton.jit
def _log1p_2k(f: tl.tensor, k: tl.tensor) -> tl.tensor:
    z = f * f
    y = f * C7 + C6
    y = y * f + C5
    y = y * f + C4
    y = y * f + C3
    y = y * f + C2
    y = y * f + C1
    y = y * f + C0
    y = y * f * z + k * LOW - z * 0.5
    return f + y + k * HIGH


@triton.jit
def _gumbel(word: tl.tensor) -> tl.tensor:
    low = word < 0x40000000
    small = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    f, k = _split(((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10)
    f, k = _split(-_log1p_2k(tl.where(low, -small, f), tl.where(low, 0.0, k)))
    return -_log1p_2k(f, k)


@triton.jit
def _row_noise(
    group: tl.tensor,
    seed_ptr: tl.tensor,
    index_ptr: tl.tensor,
    pos_ptr: tl.tensor,
    row: tl.tensor,
    PURPOSE: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Four words for each group of ids."""
    seed = tl.load(seed_ptr + row).to(tl.uint64, bitcast=True)
    return _philox(
        group,
        tl.load(pos_ptr + row).to(tl.uint32),
        tl.load(index_ptr + row).to(tl.uint32),
        tl.full((), PURPOSE, tl.uint32),
        (seed & 0xFFFFFFFF).to(tl.uint32),
        (seed >> 32).to(tl.uint32),
    )


@triton.jit
def _best(
    logits_ptr: tl.tensor, col: tl.tensor, width: tl.tensor, word: tl.tensor, noisy: tl.tensor
) -> tuple[tl.tensor, ...]:
    """Largest score of the columns `col` and the lowest column that has it."""
    inside = col < width
    scores = tl.load(logits_ptr + col, mask=inside, other=float("-inf"))
    if noisy:
        scores += _gumbel(word)
    best = tl.max(scores, axis=0)
    return best, tl.min(tl.where(inside & (scores == best), col, NO_COLUMN), axis=0)


@triton.jit
def _better(best: tl.tensor, column: tl.tensor, other: tl.tensor, other_column: tl.tensor) -> tuple[tl.tensor, ...]:
    wins = (other > best) | ((other == best) & (other_column < column))
    return tl.where(wins, other, best), tl.where(wins, other_column, column)


@triton.jit
def _scan(
    logits_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    greedy_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    index_ptr: tl.tensor,
    pos_ptr: tl.tensor,
    best_ptr: tl.tensor,
    column_ptr: tl.tensor,
    stride_logits: tl.tensor,
    stride_ids: tl.tensor,
    width: tl.tensor,
    HAS_IDS: tl.constexpr,
    PURPOSE: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    noisy = tl.load(greedy_ptr + row) == 0
    line = logits_ptr + row * stride_logits
    lane = block * GROUPS + tl.arange(0, GROUPS)
    best, column = float("-inf"), NO_COLUMN
    if HAS_IDS:
        for part in tl.static_range(4):
            col = block * GROUPS * 4 + part * GROUPS + tl.arange(0, GROUPS)
            token = tl.load(ids_ptr + row * stride_ids + col, mask=col < width, other=0).to(tl.uint32)
            word = token
            if noisy:
                w0, w1, w2, w3 = _row_noise(token >> 2, seed_ptr, index_ptr, pos_ptr, row, PURPOSE)
                low, high = tl.where((token & 1) == 0, w0, w1), tl.where((token & 1) == 0, w2, w3)
                word = tl.where((token & 2) == 0, low, high)
            other, place = _best(line, col, width, word, noisy)
            best, column = _better(best, column, other, place)
    else:
        group = lane.to(tl.uint32)
        w0, w1, w2, w3 = group, group, group, group
        if noisy:
            w0, w1, w2, w3 = _row_noise(group, seed_ptr, index_ptr, pos_ptr, row, PURPOSE)
        best, column = _best(line, lane * 4, width, w0, noisy)
        other, place = _best(line, lane * 4 + 1, width, w1, noisy)
        best, column = _better(best, column, other, place)
        other, place = _best(line, lane * 4 + 2, width, w2, noisy)
        best, column = _better(best, column, other, place)
        other, place = _best(line, lane * 4 + 3, width, w3, noisy)
        best, column = _better(best, column, other, place)
    tl.store(best_ptr + row * tl.num_programs(1) + block, best)
    tl.store(column_ptr + row * tl.num_programs(1) + block, column)


@triton.jit
def _choose(
    best_ptr: tl.tensor,
    column_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride_ids: tl.tensor,
    num_blocks: tl.tensor,
    HAS_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    inside = block < num_blocks
    best = tl.load(best_ptr + row * num_blocks + block, mask=inside, other=float("-inf"))
    column = tl.load(column_ptr + row * num_blocks + block, mask=inside, other=NO_COLUMN)
    chosen = tl.min(tl.where(best == tl.max(best, axis=0), column, NO_COLUMN), axis=0)
    chosen = tl.where(chosen == NO_COLUMN, 0, chosen).to(tl.int64)
    if HAS_IDS:
        chosen = tl.load(ids_ptr + row * stride_ids + chosen)
    tl.store(out_ptr + row, chosen)


@triton.jit
def _noise(
    seed_ptr: tl.tensor,
    index_ptr: tl.tensor,
    pos_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: tl.tensor,
    PURPOSE: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    w0, w1, w2, w3 = _row_noise(lane.to(tl.uint32), seed_ptr, index_ptr, pos_ptr, row, PURPOSE)
    line, col = out_ptr + row * width, lane * 4
    tl.store(line + col, _gumbel(w0), mask=col < width)
    tl.store(line + col + 1, _gumbel(w1), mask=col + 1 < width)
    tl.store(line + col + 2, _gumbel(w2), mask=col + 2 < width)
    tl.store(line + col + 3, _gumbel(w3), mask=col + 3 < width)


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
    num_rows, width = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    ids = logits if token_ids is None else token_ids if token_ids.stride(1) == 1 else token_ids.contiguous()
    num_blocks = triton.cdiv(width, 4 * GROUPS)
    best = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=logits.device)
    column = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=logits.device)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        _scan[(num_rows, num_blocks)](
            logits,
            ids,
            greedy.contiguous().view(torch.uint8),
            *_packed(seed, sample_index, pos),
            best,
            column,
            logits.stride(0),
            ids.stride(0),
            width,
            HAS_IDS=token_ids is not None,
            PURPOSE=purpose,
            GROUPS=GROUPS,
            num_warps=4,
            enable_fp_fusion=False,
        )
        block = triton.next_power_of_2(num_blocks)
        _choose[(num_rows,)](
            best, column, ids, out, ids.stride(0), num_blocks, HAS_IDS=token_ids is not None, BLOCK=block, num_warps=1
        )
    return out


def noise_row(
    seed: torch.Tensor, sample_index: torch.Tensor, pos: torch.Tensor, *, vocab_size: int, purpose: int = 0
) -> torch.Tensor:
    """The noise that `sample` adds, f32 [N, vocab_size]: the bits of `kernels.noise.gumbel_row`."""
    out = torch.empty((len(seed), vocab_size), dtype=torch.float32, device=seed.device)
    grid = (len(seed), triton.cdiv(vocab_size, 4 * GROUPS))
    keys = _packed(seed, sample_index, pos)
    options: dict[str, Any] = {"enable_fp_fusion": False, "num_warps": 4}
    _noise[grid](*keys, out, vocab_size, PURPOSE=purpose, GROUPS=GROUPS, **options)
    return out


def _packed(*keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(key.contiguous() for key in keys)
