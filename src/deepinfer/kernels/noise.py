"""Counter-based sampling noise with identical bits on every backend.

The token sampled at a position is `argmax(logits + gumbel)` over the vocabulary. The noise is a pure
function of (seed, sample index, absolute position, purpose, round, token id): nothing is stored, nothing
depends on the batch, and any implementation that repeats the operations below gets the same bits.
`tests/sampling/golden_noise.json` holds vectors to check one with.

Word of a token. Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)
of counter and key

    c0 = token_id >> 2    c1 = position    c2 = sample_index    c3 = purpose | round << 8
    k0 = seed & 0xFFFFFFFF                 k1 = seed >> 32

yields four 32-bit words; the token's is number `token_id & 3`, called r. One round is

    p0 = 0xD2511F53 * c0 (64 bits)         p1 = 0xCD9E8D57 * c2 (64 bits)
    c0, c1, c2, c3 = hi(p1) ^ c1 ^ k0, lo(p1), hi(p0) ^ c3 ^ k1, lo(p0)

and between two rounds k0 += 0x9E3779B9, k1 += 0xBB67AE85 (mod 2**32).

Word to noise. All arithmetic is float32, every operation rounded on its own to nearest even: **no fused
multiply-add** (C: `-ffp-contract=off`; Triton: `enable_fp_fusion=False`). In order:

    split(x): i = bits(x) as int32;  k = (i - 0x3F400000) >> 23 (arithmetic);  m = float(bits i - (k << 23))
              f = m - 1                       so that x = 2**k * (1 + f), f in [-0.25, 0.5)
    log1p_2k(f, k):                           log(2**k * (1 + f))
              z = f * f
              y = C7;  y = y * f + C6;  y = y * f + C5;  ...;  y = y * f + C0
              y = y * f;  y = y * z;  y = y + k * LN2_LO;  y = y - 0.5 * z;  y = f + y;  y = y + k * LN2_HI
    log(x)  = log1p_2k(split(x))
    e:        if r < 2**30:  k = 0;  f = -((float(r) + 0.5) * 2**-32)
              else:          (f, k) = split((float(~r) + 0.5) * 2**-32)
              e = -log1p_2k(f, k)             standard exponential
    gumbel  = -log(e)

`float(r)` converts the unsigned 32-bit word, rounding to nearest even; `~r` is `0xFFFFFFFF - r`. The two
branches meet where both hold 0.75. Small e decide who wins, so they carry full relative precision: e goes
down to 2**-33 (about 1.2e-10) in steps of 2**-32 and a token of probability 1e-8 comes up once in 1e8 draws.
The noise lies in [-3.14, 22.88]; it is never infinite or NaN.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = [
    "LN2_HI",
    "LN2_LO",
    "LOG_COEFFICIENTS",
    "Purpose",
    "exponential",
    "gumbel",
    "gumbel_row",
    "philox",
    "portable_log",
]

Array = TypeVar("Array", torch.Tensor, NDArray)

#: C0 ... C7 of log1p(f) = f - f**2 / 2 + f**3 * (C0 + C1 f + ... + C7 f**7) on [-0.25, 0.5]: a minimax fit of
#: the relative error (0.08 units of 2**-24), each rounded to float32. The logarithm is within 0.9 ulp.
LOG_COEFFICIENTS: Final = tuple(
    float.fromhex(text)
    for text in (
        "0x1.5555a4p-2",
        "-0x1.00004ap-2",
        "0x1.99699ep-3",
        "-0x1.54ed96p-3",
        "0x1.28807ap-3",
        "-0x1.0d98f2p-3",
        "0x1.acf4bap-4",
        "-0x1.71e354p-5",
    )
)
#: ln 2 in two parts; the high one has nine bits, so `k * LN2_HI` is exact.
LN2_HI: Final = 0.693359375
LN2_LO: Final = float.fromhex("-0x1.bd0106p-13")

_MASK: Final = 0xFFFFFFFF
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
_SPLIT: Final = 0x3F400000
_TWO_M32: Final = 2.0**-32


class Purpose:
    """What a draw is for; draws of different purposes are independent."""

    SAMPLE: Final = 0
    ACCEPT: Final = 1
    RESIDUAL: Final = 2
    DRAFT: Final = 3


def philox(
    c0: Array, c1: Array, c2: Array, c3: Array, k0: Array, k1: Array, *, num_rounds: int = 10
) -> tuple[Array, Array, Array, Array]:
    """Four words of Philox4x32. int64 tensors or numpy arrays holding 32-bit values, broadcast together."""
    # A 64-bit product wraps into the sign, yet its two halves come out right once masked.
    for step in range(num_rounds):
        if step:
            k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
    return c0, c1, c2, c3


def portable_log(x: Array) -> Array:
    """Natural logarithm of positive normal float32, within 0.9 ulp, with the same bits everywhere."""
    return _log1p_2k(*_split(x))


def exponential(words: Array) -> Array:
    """Standard exponential of 32-bit words (int64) -> float32 of that shape, in [2**-33, 22.88]."""
    low = words < 2**30
    small = (_f32(words) + 0.5) * _TWO_M32
    f, k = _split((_f32(words ^ _MASK) + 0.5) * _TWO_M32)
    return -_log1p_2k(_where(low, -small, f), _where(low, k * 0, k))


def gumbel(
    seed: torch.Tensor,
    sample_index: torch.Tensor,
    pos: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    purpose: int = Purpose.SAMPLE,
    round_index: int = 0,
) -> torch.Tensor:
    """Noise of chosen tokens.

    seed i64 [N] (the 64 bits), sample_index, pos integer [N], token_ids integer [K] or [N, K] -> f32 [N, K].
    """
    ids = token_ids.to(torch.int64)
    words = _words(seed, sample_index, pos, ids >> 2, purpose=purpose, round_index=round_index)
    word = ids & 3
    low = torch.where(word == 0, words[0], words[1])
    high = torch.where(word == 2, words[2], words[3])
    return -portable_log(exponential(torch.where(word < 2, low, high)))


def gumbel_row(
    seed: torch.Tensor,
    sample_index: torch.Tensor,
    pos: torch.Tensor,
    *,
    vocab_size: int,
    purpose: int = Purpose.SAMPLE,
    round_index: int = 0,
) -> torch.Tensor:
    """Noise of the whole vocabulary -> f32 [N, vocab_size]; equals `gumbel` at ids 0, 1, 2, ...

    One Philox call serves four neighbouring ids, a quarter of the cost of `gumbel`.
    """
    groups = torch.arange((vocab_size + 3) // 4, device=seed.device)
    words = _words(seed, sample_index, pos, groups, purpose=purpose, round_index=round_index)
    return -portable_log(exponential(torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]))


def _words(
    seed: torch.Tensor,
    sample_index: torch.Tensor,
    pos: torch.Tensor,
    groups: torch.Tensor,
    *,
    purpose: int,
    round_index: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    key, c1, c2 = (x.to(torch.int64)[:, None] for x in (seed, pos, sample_index))
    c0 = groups.expand(len(key), -1)
    c3 = torch.full_like(key, purpose | round_index << 8)
    return philox(c0, c1, c2 & _MASK, c3, key & _MASK, (key >> 32) & _MASK)


def _split(x: Array) -> tuple[Array, Array]:
    as_int, as_float = (torch.int32, torch.float32) if isinstance(x, torch.Tensor) else (np.int32, np.float32)
    bits = cast(Any, x).view(as_int)
    k = (bits - _SPLIT) >> 23
    return (bits - (k << 23)).view(as_float) - 1.0, _f32(k)


def _log1p_2k(f: Array, k: Array) -> Array:
    z = f * f
    y = f * LOG_COEFFICIENTS[-1] + LOG_COEFFICIENTS[-2]
    for coefficient in LOG_COEFFICIENTS[-3::-1]:
        y = y * f + coefficient
    y = y * f * z + k * LN2_LO - z * 0.5
    return f + y + k * LN2_HI


def _f32(x: Array) -> Array:
    return x.to(torch.float32) if isinstance(x, torch.Tensor) else x.astype(np.float32)


def _where(condition: Array, x: Array, y: Array) -> Array:
    if isinstance(condition, torch.Tensor):
        return torch.where(condition, cast(torch.Tensor, x), cast(torch.Tensor, y))
    return np.where(condition, x, y)
