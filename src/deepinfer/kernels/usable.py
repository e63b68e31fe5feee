"""Which implementations can serve a need: the answers behind the records. Imports nothing heavy."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

__all__ = ["eager_accepts", "interpreting", "triton_accepts", "triton_probe"]

MAX_HEAD_DIM = 256
#: Device nodes without which no driver can be there (NVIDIA, under Windows, AMD): spares the import of torch.
GPU_NODES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


def eager_accepts(*, device: str = "cpu", invariant: bool = False, **_need: Any) -> str | None:
    """Torch promises nothing about rows on accelerators."""
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
    **_need: Any,
) -> str | None:
    """Head widths from 16 to 256, pages of a power of two tokens; no bfloat16 in the interpreter."""
    if device.partition(":")[0] == "cpu" and not interpreting():
        return "on the CPU it needs TRITON_INTERPRET=1"
    if interpreting() and dtype == "bfloat16":
        return "the interpreter multiplies bfloat16 wrongly"
    if not 16 <= head_dim <= MAX_HEAD_DIM or head_dim % 2:
        return f"head width {head_dim} is not an even number from 16 to {MAX_HEAD_DIM}"
    if page_tokens < 1 or page_tokens & (page_tokens - 1):
        return f"pages of {page_tokens} tokens; expected a power of two"
    return None
