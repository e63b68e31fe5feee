"""Vectorised torch ops for any device: the fall-back where nothing better is compiled."""

from __future__ import annotations

from .activation import make_silu_mul
from .attention import make_attention
from .cache import make_cache_write
from .linear import Linear, make_linear
from .norm import make_rms_norm
from .rope import make_rope
from .sample import make_sample
from .tiles import TiledAttention

__all__ = [
    "Linear",
    "TiledAttention",
    "make_attention",
    "make_cache_write",
    "make_linear",
    "make_rms_norm",
    "make_rope",
    "make_sample",
    "make_silu_mul",
]
