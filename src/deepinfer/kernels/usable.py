"""Which implementations can serve a need: the answers behind the records. Imports nothing heavy."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

__all__ = ["eager_accepts", "interpreting", "reference_accepts", "triton_accepts", "triton_probe"]

MAX_HEAD_DIM = 256
#: Device nodes without which no driver can be there (NVIDIA, under Windows, AMD): spares the import of torch.
GPU_NODES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


def reference_accepts(*, dtype: str = "float32", cache_dtype: str | None = None, **_need: Any) -> str | None:
    """Keys and values are kept in the type of the activations."""
    if cache_dtype not in (None, dtype):
        return f"it keeps keys and values in the type of activations, {dtype}, not in {cache_dtype}"
    return None


def eager_accepts(*, device: str = "cpu", invariant: bool = False, **need: Any) -> str | None:
    """Torch promises nothing about rows on accelerators."""
    reason = reference_accepts(**need)
    if reason is not None:
        return reason
    if invariant and device.partition(":")[0] != "cpu":
        return f"torch on {device} chooses the order of sums by the batch; invariant mode needs another implementation"
    return None


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_probe() -> str | None:
    """Triton must be installed, with a GPU or with its interpreter switched on."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install deepinfer[nvidia]"
    if interpreting():
        return None
    no_gpu = "no GPU; set TRITON_INTERPRET=1 to run the kernels on the CPU"
    if not any(map(os.path.exists, GPU_NODES)):
        return no_gpu
    import torch

    return None if torch.cuda.is_available() else no_gpu


def triton_accepts(
    *,
    device: str = "cuda",
    dtype: str = "float32",
    head_dim: int = 64,
    page_tokens: int = 16,
    cache_dtype: str | None = None,
    **_need: Any,
) -> str | None:
    """Head widths from 16 to 256, pages of a power of two tokens; no bfloat16 in the interpreter."""
    if device.partition(":")[0] == "cpu" and not interpreting():
        return "on the CPU it needs TRITON_INTERPRET=1"
    reason = reference_accepts(dtype=dtype, cache_dtype=cache_dtype)
    if reason is not None:
        return reason
    if interpreting() and dtype == "bfloat16":
        return "the interpreter multiplies bfloat16 wrongly"
    if not 16 <= head_dim <= MAX_HEAD_DIM or head_dim % 2:
        return f"head width {head_dim} is not an even number from 16 to {MAX_HEAD_DIM}"
    if page_tokens < 1 or page_tokens & (page_tokens - 1):
        return f"pages of {page_tokens} tokens; expected a power of two"
    return None
