"""Device types that models are loaded on. torch is imported only when one is chosen or might be present."""

from __future__ import annotations

import importlib.util
import os

import attrs

from .protocols import Accelerator
from .registry import Registry, default_registry

__all__ = [
    "TorchAccelerator",
    "ascend",
    "choose_accelerator",
    "cpu",
    "nvidia",
    "why_no_ascend",
    "why_no_nvidia",
]

#: Device nodes without which the driver cannot be there (the second under Windows).
NVIDIA_NODES = ("/dev/nvidiactl", "/dev/dxg")
ASCEND_NODES = ("/dev/davinci_manager",)


@attrs.frozen
class TorchAccelerator:
    """A device type of torch."""

    name: str
    #: torch device type, such as `cuda`.
    device: str
    #: Element type of activations where the user names none.
    dtype: str
    #: Product name, for reports.
    product: str = ""


def choose_accelerator(name: str | None = None, *, registry: Registry | None = None) -> Accelerator:
    """The accelerator called `name`, or the best that is available; the CPU always is.

    Raises:
        UnknownPart: no accelerator is called so.
        PartUnavailable: it cannot be used here; the message says why.
    """
    return (registry or default_registry()).resolve("accelerator", name=name)


def cpu() -> TorchAccelerator:
    return TorchAccelerator("cpu", "cpu", "float32")


def nvidia() -> TorchAccelerator:
    """The current CUDA device; bfloat16 where it computes in it (compute capability 8.0 and newer)."""
    import torch

    major, _minor = torch.cuda.get_device_capability()
    return TorchAccelerator("nvidia", "cuda", "bfloat16" if major >= 8 else "float16", torch.cuda.get_device_name())


def ascend() -> TorchAccelerator:
    import torch
    import torch_npu  # pyright: ignore[reportMissingImports]  # noqa: F401  (adds torch.npu)

    return TorchAccelerator("ascend", "npu", "bfloat16", torch.npu.get_device_name())  # pyright: ignore[reportAttributeAccessIssue]


def why_no_nvidia() -> str | None:
    """None if torch can compute on an NVIDIA GPU here."""
    if not any(map(os.path.exists, NVIDIA_NODES)):
        return "no NVIDIA driver is loaded"
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install a CUDA build"
    return None if torch.cuda.is_available() else "torch.cuda finds no usable GPU"


def why_no_ascend() -> str | None:
    """None if torch can compute on an Ascend NPU here."""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch-npu is not installed; pip install 'deepinfer[ascend]'"
    if not any(map(os.path.exists, ASCEND_NODES)):
        return "no Ascend driver is loaded"
    import torch
    import torch_npu  # pyright: ignore[reportMissingImports]  # noqa: F401

    return None if torch.npu.is_available() else "torch.npu finds no usable device"  # pyright: ignore[reportAttributeAccessIssue]
