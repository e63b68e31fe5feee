"""Loading the compiled library."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch

from ...errors import PartUnavailable
from .probe import find_library, probe

__all__ = ["ELEMENT_TYPES", "WEIGHT_FORMATS", "load_library"]

#: In step with the enum in common.h.
ELEMENT_TYPES: Final = MappingProxyType({torch.float32: 0, torch.float16: 1, torch.bfloat16: 2})
#: In step with the enum in linear_q.c; q4_0 is stored as q4_1 with minimum -8 d.
WEIGHT_FORMATS: Final = MappingProxyType({"q4_0": 0, "q4_1": 0, "q8_0": 1, "int8": 2})

_P, _N, _I, _F = c_void_p, c_int64, c_int, c_float
#: C function to its argument types and whether it reports lack of memory.
_FUNCTIONS: Final = MappingProxyType(
    {
        "linear_float": ((_P, _N, _P, _I, _P, _P, _N, _N, _N, _I), False),
        "pack_float": ((_P, _I, _P, _N, _N, _I), False),
        "linear_quant": ((_P, _N, _P, _P, _I, _P, _P, _N, _N, _N, _I), True),
        "rms_norm": ((_P, _N, _P, _N, _P, _P, _P, _N, _N, _F, _I), False),
        "rope": ((_P, _N, _P, _N, _P, _P, _P, _P, _N, _N, _N, _N, _I), False),
        "silu_mul": ((_P, _N, _P, _N, _N, _I), False),
        "cache_write": ((_P, _N, _P, _N, _P, _P, _I, _P, _N, _P, _P, _P, _N, _N, _N, _I), False),
        "sample": ((_P, _N, _P, _P, _P, _P, _I, _P, _N, _P, _N, _N, _I), False),
        "layer": ((*(_P,) * 8, _I, _P, _N, *(_P,) * 4, _N, _N, _N, _I), True),
        "attention": ((_P, _N, _P, _P, _I, _P, _N, _P, _P, _P, _P, _N, _N, _N, _N, _N, _N, _F, _I), True),
    }
)


def load_library(folder: Path | None = None) -> ctypes.CDLL:
    """The library with its argument types set; functions are called `deepinfer_<name>`.

    Raises:
        PartUnavailable: not compiled, of another system, or a CPU without AVX2, FMA and F16C.
    """
    reason = probe(folder)
    path = find_library(folder)
    if reason is not None or path is None:
        raise PartUnavailable(f"native kernels cannot be used: {reason}. Use the eager ones")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise PartUnavailable(
            f"native kernels cannot be loaded ({error}); install again, or use the eager ones"
        ) from error
    if not library.deepinfer_cpu_ok():
        raise PartUnavailable("native kernels need a CPU with AVX2, FMA and F16C. Use the eager ones")
    for name, (arguments, can_fail) in _FUNCTIONS.items():
        function = getattr(library, f"deepinfer_{name}")
        function.argtypes = arguments
        function.restype = c_int if can_fail else None
    library.deepinfer_layer_work.argtypes, library.deepinfer_layer_work.restype = (_P,), _N
    return library
