"""Whether the compiled kernels can be used here, and for what. Imports nothing heavy."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any, Final

__all__ = ["accepts", "find_library", "probe"]

NEEDED_FLAGS: Final = ("avx2", "fma", "f16c")
MAX_HEAD_DIM: Final = 256


def find_library(folder: Path | None = None) -> Path | None:
    """The compiled library beside this file (or in `folder`), if it was built."""
    return next(iter(sorted((folder or Path(__file__).parent).glob("_native*.so"))), None)


def probe(folder: Path | None = None) -> str | None:
    """Why the compiled kernels cannot be used on this machine, or None."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"written for x86-64, this is {platform.machine()}"
    if find_library(folder) is None:
        return "not compiled: no C compiler when installed (install gcc, then reinstall deepinfer)"
    missing = sorted(set(NEEDED_FLAGS) - _cpu_flags())
    return f"this CPU lacks {', '.join(missing)}" if missing else None


def accepts(*, dtype: str = "float32", head_dim: int = 64, **_need: Any) -> str | None:
    """Activations in float32; head widths in whole vectors of 8 up to 256. Rows never depend on the batch."""
    if dtype != "float32":
        return f"activations in {dtype}; the compiled kernels compute in float32 only"
    if head_dim % 8 or not 0 < head_dim <= MAX_HEAD_DIM:
        return f"head width {head_dim} is no multiple of 8 up to {MAX_HEAD_DIM}"
    return None


def _cpu_flags(path: str = "/proc/cpuinfo") -> set[str]:
    """What the kernel reports; where it cannot be read the library itself is asked when it is loaded."""
    try:
        with open(path) as lines:
            return set(next(line for line in lines if line.startswith("flags")).split())
    except (OSError, StopIteration):
        return set(NEEDED_FLAGS)
