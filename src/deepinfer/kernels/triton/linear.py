"""Linear layers whose rows do not depend on the batch. Specification: `kernels/reference.py::Linear`.

Each output is one chain of float32 sums over K in steps of 16: no split of K, and tiles of any height use the
same matrix instruction, so a row has the same bits at every batch size. Float32 uses plain multiply-adds (no
TF32). Cost: reads x and the weight once per tile row and column; 2 * T * N * K operations.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
import triton
import triton.language as tl

from ..reference import dense

__all__ = ["PackedLinear", "TritonLinear"]


@triton.jit
def _linear(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_out: tl.tensor,
    stride_x: tl.tensor,
    stride_weight: tl.tensor,
    num_in: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PANEL: tl.constexpr,
) -> None:
    # Programs walk down panels of PANEL tile rows, so that the tiles they share stay in the cache.
    num_down, num_across = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_out, BLOCK_N)
    panel = tl.program_id(0) // (PANEL * num_across)
    height = tl.minimum(num_down - panel * PANEL, PANEL)
    within = tl.program_id(0) % (PANEL * num_across)
    down, across = panel * PANEL + within % height, within // height
    m = down * BLOCK_M + tl.arange(0, BLOCK_M)
    n = across * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows and columns past the end read the first ones again: cheaper than a mask, and never stored.
    x_line = x_ptr + tl.where(m < num_rows, m, 0).to(tl.int64)[:, None] * stride_x + k[None, :]
    weight_line = weight_ptr + tl.where(n < num_out, n, 0).to(tl.int64)[None, :] * stride_weight + k[:, None]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, num_in, BLOCK_K):
        if EVEN_K:
            x, weight = tl.load(x_line), tl.load(weight_line)
        else:
            x = tl.load(x_line, mask=(start + k < num_in)[None, :], other=0.0)
            weight = tl.load(weight_line, mask=(start + k < num_in)[:, None], other=0.0)
        sums = tl.dot(x, weight, sums, input_precision="ieee")
        x_line += BLOCK_K
        weight_line += BLOCK_K
    if HAS_BIAS:
        sums += tl.load(bias_ptr + n, mask=n < num_out, other=0.0).to(tl.float32)[None, :]
    place = out_ptr + m.to(tl.int64)[:, None] * num_out + n[None, :]
    tl.store(place, sums.to(out_ptr.dtype.element_ty), mask=(m < num_rows)[:, None] & (n < num_out)[None, :])


@attrs.frozen(eq=False)
class PackedLinear:
    """A weight [N, K] with contiguous lines, and its bias [N]."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@attrs.frozen
class _Tiles:
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


#: Tiles for few rows (weights stream past, narrow columns fill the device) and for many. On compute capability
#: 9.0 all three give the same bits (`tests/kernels/test_triton.py` compares them there).
FEW, SOME, MANY = _Tiles(64, 32, 128, 4, 5), _Tiles(64, 64, 128, 4, 4), _Tiles(128, 256, 64, 8, 3)
FLOAT32 = _Tiles(32, 32, 32, 4, 2)


class TritonLinear:
    """Linear op, batch-invariant always. Quantised weights are expanded when packed."""

    def __init__(self, *, device: str, dtype: str) -> None:
        self._device, self._dtype = torch.device(device), getattr(torch, dtype)
        on_gpu = self._device.type == "cuda"
        self._several_tiles = on_gpu and torch.cuda.get_device_capability(device) == (9, 0)

    def pack(self, weight: Any, bias: torch.Tensor | None = None) -> PackedLinear:
        """weight: float [N, K] or a `QuantTensor`; bias [N] or None."""
        weight = dense(weight).to(self._device, self._dtype).contiguous()
        return PackedLinear(weight=weight, bias=None if bias is None else bias.to(self._device, self._dtype))

    def __call__(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """x [T, K] -> [T, N]."""
        return self._multiply(x, packed, self._tiles(x.shape[0]))

    def _tiles(self, num_rows: int) -> _Tiles:
        if self._dtype == torch.float32:
            return FLOAT32
        if not self._several_tiles:
            return SOME
        return FEW if num_rows <= 64 else SOME if num_rows <= 256 else MANY

    def _multiply(self, x: torch.Tensor, packed: PackedLinear, tiles: _Tiles) -> torch.Tensor:
        weight, bias = packed.weight, packed.bias
        x = x if x.stride(1) == 1 else x.contiguous()
        num_rows, (num_out, num_in) = x.shape[0], weight.shape
        out = torch.empty((num_rows, num_out), dtype=x.dtype, device=x.device)
        if num_rows:
            grid = (triton.cdiv(num_rows, tiles.block_m) * triton.cdiv(num_out, tiles.block_n),)
            _linear[grid](
                x, weight, weight if bias is None else bias, out, num_rows, num_out, x.stride(0), weight.stride(0),
                num_in=num_in, HAS_BIAS=bias is not None, EVEN_K=num_in % tiles.block_k == 0, BLOCK_M=tiles.block_m,
                BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, PANEL=8, num_warps=tiles.num_warps,
                num_stages=tiles.num_stages,
            )  # fmt: skip
        return out
