"""The compiled kernels as ops: one thin call each, a few microseconds at most.

Outputs are allocated by torch, everything else is a pointer. Rows with contiguous lines are read where they lie. Every
op is batch-invariant by construction (see csrc/common.h), so `invariant` changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...errors import ConfigError
from .lib import ELEMENT_TYPES, load_library
from .linear import NativeLinear

if TYPE_CHECKING:
    from ...layers.batch import RowSet
    from ...protocols import AttentionOp, CacheWriteOp, LinearOp, RmsNormOp, RopeOp, SampleOp, SiluMulOp

__all__ = [
    "make_attention",
    "make_cache_write",
    "make_linear",
    "make_rms_norm",
    "make_rope",
    "make_sample",
    "make_silu_mul",
]

FLOAT32 = torch.float32


def _lines(x: torch.Tensor) -> torch.Tensor:
    """x float32 with contiguous lines (all but the first dimension)."""
    if x.dtype is not FLOAT32:
        raise ConfigError(f"native ops compute in float32, got {x.dtype}; bind ops for that dtype")
    if x.is_contiguous() or (x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2])):
        return x
    return x.contiguous()


def make_rms_norm(*, device: str, dtype: str, invariant: bool = False) -> RmsNormOp:
    call, num_threads = load_library().deepinfer_rms_norm, torch.get_num_threads

    def rms_norm(
        x: torch.Tensor, weight: torch.Tensor, *, eps: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [T, M], weight [M] -> (normed [T, M], x + residual [T, M], or x itself)."""
        lines, (rows, width) = _lines(x), x.shape
        out, scale = torch.empty_like(lines), _lines(weight)
        stride = lines.stride(0)
        if residual is None:
            call(
                lines.data_ptr(), stride, None, 0, scale.data_ptr(), out.data_ptr(), None, rows, width, eps,
                num_threads(),
            )  # fmt: skip
            return out, x
        total, rest = torch.empty_like(out), _lines(residual)
        call(
            lines.data_ptr(), stride, rest.data_ptr(), rest.stride(0), scale.data_ptr(), out.data_ptr(),
            total.data_ptr(), rows, width, eps, num_threads(),
        )  # fmt: skip
        return out, total

    return rms_norm


def make_rope(*, device: str, dtype: str, invariant: bool = False) -> RopeOp:
    call, num_threads = load_library().deepinfer_rope, torch.get_num_threads

    def rope(
        q: torch.Tensor, k: torch.Tensor, pos: torch.Tensor, *, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [T, H, D], k [T, G, D], pos i32 [T], cos_sin f32 [context, D] -> both turned."""
        tokens, heads, width = q.shape
        kv_heads = k.shape[1]
        q, k = _lines(q), _lines(k)
        q_out, k_out = torch.empty_like(q), torch.empty_like(k)
        call(
            q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), pos.data_ptr(), cos_sin.data_ptr(), q_out.data_ptr(),
            k_out.data_ptr(), tokens, heads, kv_heads, width, num_threads(),
        )  # fmt: skip
        return q_out, k_out

    return rope


def make_silu_mul(*, device: str, dtype: str, invariant: bool = False) -> SiluMulOp:
    call, num_threads = load_library().deepinfer_silu_mul, torch.get_num_threads

    def silu_mul(x: torch.Tensor) -> torch.Tensor:
        """x [T, 2F], gate then up -> silu(gate) * up [T, F]."""
        x = _lines(x)
        rows, width = x.shape[0], x.shape[1] // 2
        out = x.new_empty((rows, width))
        call(x.data_ptr(), x.stride(0), out.data_ptr(), rows, width, num_threads())
        return out

    return silu_mul


def make_cache_write(*, device: str, dtype: str, invariant: bool = False) -> CacheWriteOp:
    call, num_threads = load_library().deepinfer_cache_write, torch.get_num_threads

    def cache_write(
        k: torch.Tensor,
        v: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        page_table: torch.Tensor,
        rows: RowSet,
    ) -> None:
        """k, v f32 [T, G, D] into pools [P, Z, G, D] of float32, float16 or bfloat16."""
        k, v = _lines(k), _lines(v)
        tokens, heads, width = k.shape
        call(
            k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), k_pool.data_ptr(), v_pool.data_ptr(),
            ELEMENT_TYPES[k_pool.dtype], page_table.data_ptr(), page_table.stride(0), rows.slot_ids.data_ptr(),
            rows.row_of.data_ptr(), rows.pos.data_ptr(), tokens, k_pool.shape[1], heads * width, num_threads(),
        )  # fmt: skip

    return cache_write


def make_attention(*, device: str, dtype: str, invariant: bool = False) -> AttentionOp:
    call, num_threads = load_library().deepinfer_attention, torch.get_num_threads

    def attention(
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        page_table: torch.Tensor,
        rows: RowSet,
        *,
        scale: float,
    ) -> torch.Tensor:
        """q f32 [T, H, D] over pools [P, Z, G, D] of float32, float16 or bfloat16 -> f32 [T, H, D]."""
        tokens, heads, width = q.shape
        q = _lines(q)
        out = torch.empty_like(q)
        slots, shape = rows.slot_ids, k_pool.shape
        failed = call(
            q.data_ptr(), q.stride(0), k_pool.data_ptr(), v_pool.data_ptr(), ELEMENT_TYPES[k_pool.dtype],
            page_table.data_ptr(), page_table.stride(0), slots.data_ptr(), rows.cu_q.data_ptr(), rows.pos.data_ptr(),
            out.data_ptr(), tokens, slots.shape[0], heads, shape[2], width, shape[1], scale, num_threads(),
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no memory for the attention of {tokens} tokens")
        return out

    return attention


def make_linear(*, device: str, dtype: str, invariant: bool = False) -> LinearOp:
    return NativeLinear(load_library(), torch.get_num_threads)


def make_sample(*, device: str, dtype: str, invariant: bool = False) -> SampleOp:
    call, num_threads = load_library().deepinfer_sample, torch.get_num_threads

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
        logits, keys = _lines(logits), [x.contiguous() for x in (greedy, seed, sample_index.int(), pos.int())]
        names = None if token_ids is None else token_ids.contiguous()
        ids = logits.new_empty(logits.shape[0], dtype=torch.int64)
        names_ptr, names_stride = (None, 0) if names is None else (names.data_ptr(), names.stride(0))
        call(
            logits.data_ptr(), logits.stride(0), *(x.data_ptr() for x in keys), purpose, names_ptr, names_stride,
            ids.data_ptr(), logits.shape[0], logits.shape[1], num_threads(),
        )  # fmt: skip
        return ids

    return sample
