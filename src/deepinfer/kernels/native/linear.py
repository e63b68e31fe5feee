"""Linear layers: weights are laid out once for the kernels in csrc/linear_f32.c and csrc/linear_q.c."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeAlias

import attrs
import torch

from ...errors import ConfigError
from ..quant import GROUP, QuantTensor
from .lib import ELEMENT_TYPES, WEIGHT_FORMATS

__all__ = ["NativeLinear", "PackedFloat", "PackedQuant", "pack_quant"]

#: Outputs that share a block of the quantised layout, one a 32-bit lane.
LANES = 8
#: Outputs that share a panel of the float layout.
PANEL = 16


@attrs.frozen(eq=False)
class PackedFloat:
    """A float weight [N, K] as panels [N / 16, K, 16] in its own type; outputs past N are zero."""

    panels: torch.Tensor = attrs.field(repr=False)
    bias: torch.Tensor | None = attrs.field(repr=False)
    num_out: int
    num_in: int
    panels_ptr: int
    bias_ptr: int | None
    element_type: int


@attrs.frozen(eq=False)
class PackedQuant:
    """A quantised weight [N, K] as blocks of 8 outputs, see csrc/linear_q.c; outputs past N are zero."""

    quants: torch.Tensor = attrs.field(repr=False)
    scales: torch.Tensor = attrs.field(repr=False)
    bias: torch.Tensor | None = attrs.field(repr=False)
    num_out: int
    num_in: int
    quants_ptr: int
    scales_ptr: int
    bias_ptr: int | None
    format_code: int


Packed: TypeAlias = PackedFloat | PackedQuant


@attrs.frozen(eq=False)
class NativeLinear:
    """`x @ weight.T + bias` in float32. Stateless: packed weights carry everything.

    Float weights keep their type (float32, float16, bfloat16) and are widened on the way, so a 16-bit weight is
    half the traffic of a decode step. With quantised weights, activations become 8 bits per row and group of 32.
    """

    library: ctypes.CDLL
    num_threads: Callable[[], int]

    def pack(self, weight: Any, bias: torch.Tensor | None = None) -> Packed:
        """weight float [N, K] or `QuantTensor`; bias float [N] or None. Nothing of `weight` is kept."""
        bias = None if bias is None else bias.to(torch.float32).contiguous()
        return pack_quant(weight, bias) if isinstance(weight, QuantTensor) else self._pack_float(weight, bias)

    def __call__(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        """x f32 [T, K] -> f32 [T, N]."""
        rows, width = x.shape
        if width != packed.num_in or x.dtype is not torch.float32:
            raise ConfigError(f"x is {x.dtype} [{rows}, {width}]; expected float32 [T, {packed.num_in}]")
        if x.stride(1) != 1:
            x = x.contiguous()
        num_out = packed.num_out
        out = x.new_empty((rows, num_out))
        if isinstance(packed, PackedQuant):
            failed = self.library.deepinfer_linear_quant(
                x.data_ptr(), x.stride(0), packed.quants_ptr, packed.scales_ptr, packed.format_code, packed.bias_ptr,
                out.data_ptr(), rows, num_out, width, self.num_threads(),
            )  # fmt: skip
            if failed:
                raise MemoryError(f"no memory for the quantised copy of x [{rows}, {width}]")
            return out
        self.library.deepinfer_linear_float(
            x.data_ptr(), x.stride(0), packed.panels_ptr, packed.element_type, packed.bias_ptr, out.data_ptr(), rows,
            num_out, width, self.num_threads(),
        )  # fmt: skip
        return out

    def _pack_float(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedFloat:
        if weight.dtype not in ELEMENT_TYPES:
            raise ConfigError(f"weight is {weight.dtype}; expected float32, float16, bfloat16 or a QuantTensor")
        weight, (num_out, num_in) = weight.contiguous(), weight.shape
        panels = torch.empty((-(-num_out // PANEL), num_in, PANEL), dtype=weight.dtype)
        code = ELEMENT_TYPES[weight.dtype]
        self.library.deepinfer_pack_float(
            weight.data_ptr(), code, panels.data_ptr(), num_out, num_in, self.num_threads()
        )
        bias_ptr = None if bias is None else bias.data_ptr()
        return PackedFloat(panels, bias, num_out, num_in, panels.data_ptr(), bias_ptr, code)


def pack_quant(weight: QuantTensor, bias: torch.Tensor | None) -> PackedQuant:
    """Reorder codes and scales; no value changes.

    Raises:
        ConfigError: a q4_0 scale is so large that its minimum, -8 times it, exceeds half precision.
    """
    num_out, num_in = weight.shape
    if weight.format == "int8":
        codes = weight.planes["values"].view(num_out, num_in // GROUP, GROUP).view(torch.uint8)
        scales = _pad_rows(weight.planes["scale"])
    else:
        d, m, codes = weight.block_parts()
        if weight.format == "q4_0":
            m = d * -8
            if not m.isfinite().all():
                raise ConfigError(f"a q4_0 scale is {float(d.abs().max())}; expected at most 8188")
        scales = _lanes_last(d if m is None else torch.stack((d, m), dim=2))
    words = codes.contiguous().view(torch.int32)
    quants = _lanes_last(words)
    bias_ptr = None if bias is None else bias.data_ptr()
    return PackedQuant(
        quants, scales, bias, num_out, num_in, quants.data_ptr(), scales.data_ptr(), bias_ptr,
        WEIGHT_FORMATS[weight.format],
    )  # fmt: skip


def _pad_rows(x: torch.Tensor) -> torch.Tensor:
    """x [N, ...] with zero rows up to a multiple of 8."""
    missing = -x.shape[0] % LANES
    return torch.cat((x, x.new_zeros((missing, *x.shape[1:])))) if missing else x.contiguous()


def _lanes_last(x: torch.Tensor) -> torch.Tensor:
    """x [N, ...] -> [N / 8, ..., 8], contiguous."""
    x = _pad_rows(x)
    return x.view(x.shape[0] // LANES, LANES, *x.shape[1:]).movedim(1, -1).contiguous()
