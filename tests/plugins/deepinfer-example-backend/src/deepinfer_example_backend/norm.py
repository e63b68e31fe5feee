"""Root-mean-square norm through torch's own function. Imported only when it is chosen."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from deepinfer.protocols import RmsNormOp


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x if residual is None else x + residual
    return F.rms_norm(total, weight.shape, weight, eps), total


def make_rms_norm(*, device: str, dtype: str, invariant: bool) -> RmsNormOp:
    return rms_norm
