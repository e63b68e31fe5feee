"""Copies between host and device that the host does not wait for.

A copy from or to pageable memory stops the host until the device has done it; from or to pinned memory it is queued
like a kernel. On the CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["record_event", "to_device", "to_device_together", "to_host"]

#: Elements. Compiled kernels are specialised by the alignment of their pointers: every array gets the best one.
ALIGNMENT = 64


def to_device(array: NDArray, device: torch.device | str) -> torch.Tensor:
    """`array` on `device`, in order with the work of the current stream. On the CPU it shares the array's memory."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    if torch.device(device).type == "cpu":
        return host
    if not host.numel():
        return torch.empty_like(host, device=device)
    return host.pin_memory().to(device, non_blocking=True)


def to_device_together(arrays: Sequence[NDArray], device: torch.device | str) -> list[torch.Tensor]:
    """Arrays of one dtype in a single copy, as many small copies cost more than their bytes."""
    if torch.device(device).type == "cpu":
        return [to_device(array, device) for array in arrays]
    sizes = [-(-array.size // ALIGNMENT) * ALIGNMENT for array in arrays]
    dtype = torch.from_numpy(arrays[0][:0]).dtype
    packed = torch.empty(sum(sizes), dtype=dtype, pin_memory=True)
    for array, part in zip(arrays, packed.split(sizes), strict=True):
        part.numpy()[: array.size] = array.reshape(-1)
    parts = packed.to(device, non_blocking=True).split(sizes)
    return [part[: array.size].view(array.shape) for array, part in zip(arrays, parts, strict=True)]


def to_host(x: torch.Tensor) -> torch.Tensor:
    """`x` on the host; what it holds counts only after an event recorded later has come."""
    if x.device.type == "cpu":
        return x
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)


def record_event(device: torch.device | str) -> torch.Event | None:
    """An event that comes when all work queued so far is done; None on the CPU, where nothing is queued."""
    if torch.device(device).type == "cpu":
        return None
    event = torch.Event(device)
    event.record()
    return event
