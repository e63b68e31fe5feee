"""Root-mean-square norm of whole batches. Specification: `kernels/reference.py::rms_norm`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...protocols import RmsNormOp

__all__ = ["invariant_rms_norm", "make_rms_norm", "rms_norm"]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [T, M]; weight [M] -> (normed [T, M], x + residual [T, M])."""
    total = x if residual is None else x + residual
    if total.dtype in (torch.float32, torch.float64):
        return F.rms_norm(total, weight.shape, weight.to(total.dtype), eps), total
    return F.rms_norm(total.float(), weight.shape, weight.float(), eps).to(x.dtype), total


def invariant_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, its rows independent of T on the CPU: a lone row would be summed by several threads in parts."""
    if x.shape[0] != 1:
        return rms_norm(x, weight, eps=eps, residual=residual)
    pair = None if residual is None else residual.expand(2, -1)
    normed, total = rms_norm(x.repeat(2, 1), weight, eps=eps, residual=pair)
    return normed[:1], total[:1]


def make_rms_norm(*, device: str, dtype: str, invariant: bool = False) -> RmsNormOp:
    return invariant_rms_norm if invariant else rms_norm
