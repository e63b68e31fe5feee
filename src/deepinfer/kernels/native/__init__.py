"""Compiled kernels for x86-64 CPUs with AVX2: float32 activations; float, 8-bit or 4-bit weights.

The C sources are in `csrc/`, one file an op family. Importing this package loads neither torch nor the library:
a factory does, when it is called.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .probe import accepts, probe

if TYPE_CHECKING:
    from .layer import make_decoder_layer
    from .ops import (
        make_attention,
        make_cache_write,
        make_linear,
        make_rms_norm,
        make_rope,
        make_sample,
        make_silu_mul,
    )

__all__ = [
    "accepts",
    "make_attention",
    "make_cache_write",
    "make_decoder_layer",
    "make_linear",
    "make_rms_norm",
    "make_rope",
    "make_sample",
    "make_silu_mul",
    "probe",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        home = ".layer" if name == "make_decoder_layer" else ".ops"
        return getattr(importlib.import_module(home, __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
