"""Vectorised torch ops for any device: the fall-back where nothing better is compiled."""

from __future__ import annotations

from .activation import make_silu_mul, silu_mul
from .attention import attention, make_attention
from .cache import cache_write, make_cache_write
from .linear import Linear, PackedLinear, make_linear
from .norm import make_rms_norm, rms_norm
from .rope import make_rope, rope
from .sample import make_sample, sample
from .tiles import TiledAttention

__all__ = [
    "Linear",
    "PackedLinear",
    "TiledAttention",
    "attention",
    "cache_write",
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
