"""The specification of every op: readable loops, one row at a time.

Each function computes in float32 (float64 for float64 inputs) and rounds once, at the end, to the dtype of
its input. A row's result is computed from that row alone, so these ops are batch-invariant by construction.
Shape letters are those of `deepinfer.protocols`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .noise import gumbel

if TYPE_CHECKING:
    from ..layers.batch import RowSet
    from ..protocols import AttentionOp, CacheWriteOp, LinearOp, RmsNormOp, RopeOp, SampleOp, SiluMulOp

__all__ = [
    "Linear",
    "attention",
    "cache_write",
    "dense",
    "make_attention",
    "make_cache_write",
    "make_linear",
    "make_rms_norm",
    "make_rope",
    "make_sample",
    "make_silu_mul",
    "rms_norm",
    "rope",
    "sample",
    "silu_mul",
]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`y = h / sqrt(mean(h**2) + eps) * weight` of `h = x + residual`, which is rounded to x's dtype first.

    x, residual [T, M]; weight [M] -> (y [T, M], h [T, M]); without a residual h may be x itself.
    """
    total = x if residual is None else (_wide(x) + _wide(residual)).to(x.dtype)
    normed = torch.empty_like(total)
    for t in range(total.shape[0]):
        h = _wide(total[t])
        scale = torch.rsqrt((h * h).mean() + eps)
        normed[t] = (h * scale * _wide(weight)).to(x.dtype)
    return normed, total


def rope(
    q: torch.Tensor, k: torch.Tensor, pos: torch.Tensor, *, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates element i and i + D/2 of each head by the angle of the token's position.

    q [T, H, D], k [T, G, D], pos i32 [T], cos_sin f32 [context, D] (D/2 cosines, then D/2 sines).
    """
    half = q.shape[-1] // 2
    turned = []
    for x in (q, k):
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for t in range(x.shape[0]):
            cos, sin = _wide(cos_sin[int(pos[t])]).split(half)
            low, high = _wide(x[t]).split(half, dim=-1)
            y[t] = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
        turned.append(y)
    return turned[0], turned[1]


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2F], gate then up -> `gate / (1 + exp(-gate)) * up` [T, F]."""
    out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)
    for t in range(x.shape[0]):
        gate, up = _wide(x[t]).chunk(2)
        out[t] = (gate / (1 + torch.exp(-gate)) * up).to(x.dtype)
    return out


def cache_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    rows: RowSet,
) -> None:
    """Token t of row r goes to page `page_table[slot_ids[r], pos[t] // Z]`, line `pos[t] % Z`.

    k, v [T, G, D]; pools [P, Z, G, D]; page_table i32 [S, max pages].
    """
    page_tokens = k_pool.shape[1]
    for t in range(k.shape[0]):
        slot, pos = int(rows.slot_ids[int(rows.row_of[t])]), int(rows.pos[t])
        page, line = int(page_table[slot, pos // page_tokens]), pos % page_tokens
        k_pool[page, line] = k[t]
        v_pool[page, line] = v[t]


def attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    rows: RowSet,
    *,
    scale: float,
) -> torch.Tensor:
    """Token t of row r sees keys 0 ... pos[t] of its row: `softmax(scale * q k) v`, heads in groups of H / G.

    q [T, H, D]; pools [P, Z, G, D]; page_table i32 [S, max pages] -> [T, H, D]. Lines of pages past a row's
    last key are never used, whatever they hold.
    """
    page_tokens, num_kv_heads = k_pool.shape[1:3]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for r, slot in enumerate(rows.slot_ids.tolist()):
        page_ids = page_table[slot, : -(-int(rows.k_len[r]) // page_tokens)].long()
        keys, values = (_wide(pool[page_ids].flatten(0, 1)) for pool in (k_pool, v_pool))
        for t in range(int(rows.cu_q[r]), int(rows.cu_q[r + 1])):
            seen = slice(int(rows.pos[t]) + 1)
            heads = _wide(q[t]).chunk(num_kv_heads)
            mixed = [_mix(heads[g], keys[seen, g], values[seen, g], scale) for g in range(num_kv_heads)]
            out[t] = torch.cat(mixed).to(q.dtype)
    return out


def _mix(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """One group of heads: q [h, D], keys, values [K, D] -> [h, D]."""
    return torch.softmax(q @ keys.T * scale, dim=-1) @ values


class Linear:
    """`x @ weight.T + bias`, row by row. Quantised weights are expanded when packed. Stateless."""

    def pack(self, weight: Any, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """weight [N, K], bias [N] or None."""
        return dense(weight), bias

    def __call__(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        """x [T, K] -> [T, N]."""
        weight, bias = packed
        out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
        for t in range(x.shape[0]):
            row = _wide(weight) @ _wide(x[t])
            out[t] = (row if bias is None else row + _wide(bias)).to(x.dtype)
        return out


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
    """Column of the largest `logits + gumbel`, the lowest one on ties; no noise on greedy rows.

    logits f32 [N, K]; greedy bool [N]; seed i64 [N]; sample_index, pos i32 [N]; token_ids i64 [N, K] names
    the columns (their own numbers if None) -> i64 [N]. A row without any number above -inf gives its first
    column, a row holding NaN any of its columns.
    """
    out = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    columns = torch.arange(logits.shape[1], device=logits.device)
    for n in range(logits.shape[0]):
        ids = columns if token_ids is None else token_ids[n]
        scores = logits[n]
        if not greedy[n]:
            one = slice(n, n + 1)
            scores = scores + gumbel(seed[one], sample_index[one], pos[one], ids, purpose=purpose)[0]
        best = (scores == scores.max()).nonzero()
        out[n] = ids[int(best[0]) if len(best) else 0]
    return out


def dense(weight: Any) -> torch.Tensor:
    """The float matrix [N, K] of a weight, expanding a `kernels.quant.QuantTensor`."""
    return weight if isinstance(weight, torch.Tensor) else weight.dequantize()


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def make_rms_norm(*, device: str, dtype: str, invariant: bool = False) -> RmsNormOp:
    return rms_norm


def make_rope(*, device: str, dtype: str, invariant: bool = False) -> RopeOp:
    return rope


def make_silu_mul(*, device: str, dtype: str, invariant: bool = False) -> SiluMulOp:
    return silu_mul


def make_linear(*, device: str, dtype: str, invariant: bool = False) -> LinearOp:
    return Linear()


def make_cache_write(*, device: str, dtype: str, invariant: bool = False) -> CacheWriteOp:
    return cache_write


def make_attention(*, device: str, dtype: str, invariant: bool = False) -> AttentionOp:
    return attention


def make_sample(*, device: str, dtype: str, invariant: bool = False) -> SampleOp:
    return sample
