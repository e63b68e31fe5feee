"""Triton ops: CUDA devices, and the CPU through Triton's interpreter.

Importing this package does not import triton; a factory does. Kernels run on the current device.
"""

from __future__ import annotations

from ...protocols import AttentionOp, CacheWriteOp, LinearOp, RmsNormOp, RopeOp, SampleOp, SiluMulOp
from ..usable import triton_accepts as accepts
from ..usable import triton_probe as probe

__all__ = [
    "accepts",
    "make_attention",
    "make_cache_write",
    "make_linear",
    "make_rms_norm",
    "make_rope",
    "make_sample",
    "make_silu_mul",
    "probe",
]


def make_rms_norm(*, device: str, dtype: str, invariant: bool = False) -> RmsNormOp:
    from .norm import rms_norm

    return rms_norm


def make_rope(*, device: str, dtype: str, invariant: bool = False) -> RopeOp:
    from .rotary import rope

    return rope


def make_silu_mul(*, device: str, dtype: str, invariant: bool = False) -> SiluMulOp:
    from .activation import silu_mul

    return silu_mul


def make_linear(*, device: str, dtype: str, invariant: bool = False) -> LinearOp:
    from .linear import TritonLinear

    return TritonLinear(device=device, dtype=dtype)


def make_cache_write(*, device: str, dtype: str, invariant: bool = False) -> CacheWriteOp:
    from .cache import cache_write

    return cache_write


def make_attention(*, device: str, dtype: str, invariant: bool = False) -> AttentionOp:
    from .attention import PagedAttention

    return PagedAttention(device=device, invariant=invariant)


def make_sample(*, device: str, dtype: str, invariant: bool = False) -> SampleOp:
    from .sampling import sample

    return sample
