"""Linear layers through torch. Specification: `kernels/reference.py::Linear`."""

from __future__ import annotations

from typing import Any

import attrs
import torch
import torch.nn.functional as F

from ...protocols import LinearOp
from .fixed_rows import multiply, rows_agree
from .int8 import Int8Weight, int8_available, int8_linear, pack_int8

__all__ = ["Linear", "PackedLinear", "make_linear"]


@attrs.frozen(eq=False)
class PackedLinear:
    """A packed weight [N, K]: a float matrix, or 8-bit."""

    weight: torch.Tensor | Int8Weight
    bias: torch.Tensor | None
    #: Products always get the same number of rows (see `fixed_rows`).
    fixed: bool = False


class Linear:
    """Linear op. With `invariant` (CPU only) a row's result does not depend on the other rows.

    Keeps what it found out about each weight shape; not thread-safe while packing.
    """

    def __init__(self, *, device: str, dtype: str, invariant: bool = False) -> None:
        self._device = torch.device(device)
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._invariant = invariant
        self._agrees: dict[tuple[int, ...], bool] = {}

    def pack(self, weight: Any, bias: torch.Tensor | None = None) -> PackedLinear:
        """weight: float [N, K], or a `QuantTensor` of that shape: 8-bit on the CPU, expanded elsewhere."""
        bias = None if bias is None else bias.to(self._device, self._dtype)
        if not isinstance(weight, torch.Tensor):
            weight = weight.dequantize()
            if self._device.type == "cpu" and int8_available():
                return PackedLinear(weight=pack_int8(weight), bias=bias)
        weight = weight.to(self._device, self._dtype)
        return PackedLinear(weight=weight, bias=bias, fixed=self._invariant and not self._rows_agree(weight))

    def __call__(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """x [T, K] -> [T, N]."""
        weight, bias = packed.weight, packed.bias
        if isinstance(weight, Int8Weight):
            out = int8_linear(x, weight)
            return (out if bias is None else out.add_(bias)).to(x.dtype)
        if not self._invariant:
            return F.linear(x, weight, bias)
        return multiply(x, lambda rows: F.linear(rows, weight, bias), fixed=packed.fixed)

    def _rows_agree(self, weight: torch.Tensor) -> bool:
        shape = tuple(weight.shape)
        if shape not in self._agrees:
            self._agrees[shape] = rows_agree(lambda x: F.linear(x, weight), shape[1:], dtype=weight.dtype)
        return self._agrees[shape]


def make_linear(*, device: str, dtype: str, invariant: bool = False) -> LinearOp:
    return Linear(device=device, dtype=dtype, invariant=invariant)
