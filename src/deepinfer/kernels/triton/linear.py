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
from triton.tools.tensor_descriptor import TensorDescriptor

from ..reference import dense

__all__ = ["PackedLinear", "TritonLinear"]


@triton.jit
def _place(
    num_rows: tl.tensor, num_out: tl.tensor, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """Tile row and column of this program: down panels of 8 tile rows, so that shared tiles stay in the cache."""
    num_down, num_across = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_out, BLOCK_N)
    panel = tl.program_id(0) // (8 * num_across)
    height = tl.minimum(num_down - panel * 8, 8)
    within = tl.program_id(0) % (8 * num_across)
    return panel * 8 + within % height, within // height


@triton.jit
def _store(
    out_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    sums: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    num_rows: tl.tensor,
    num_out: tl.tensor,
    HAS_BIAS: tl.constexpr,
) -> None:
    if HAS_BIAS:
        sums += tl.load(bias_ptr + n, mask=n < num_out, other=0.0).to(tl.float32)[None, :]
    place = out_ptr + m.to(tl.int64)[:, None] * num_out + n[None, :]
    tl.store(place, sums.to(out_ptr.dtype.element_ty), mask=(m < num_rows)[:, None] & (n < num_out)[None, :])


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
) -> None:
    down, across = _place(num_rows, num_out, BLOCK_M, BLOCK_N)
    m = down * BLOCK_M + tl.arange(0, BLOCK_M)
    n = across * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_line = x_ptr + m.to(tl.int64)[:, None] * stride_x + k[None, :]
    # Columns past the end read the first one again: never stored, and no mask on the wide side.
    weight_line = weight_ptr + tl.where(n < num_out, n, 0).to(tl.int64)[None, :] * stride_weight + k[:, None]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, num_in, BLOCK_K):
        if EVEN_K:
            x, weight = tl.load(x_line, mask=(m < num_rows)[:, None], other=0.0), tl.load(weight_line)
        else:
            x = tl.load(x_line, mask=(m < num_rows)[:, None] & (start + k < num_in)[None, :], other=0.0)
            weight = tl.load(weight_line, mask=(start + k < num_in)[:, None], other=0.0)
        sums = tl.dot(x, weight, sums, input_precision="ieee")
        x_line += BLOCK_K
        weight_line += BLOCK_K
    _store(out_ptr, bias_ptr, sums, m, n, num_rows, num_out, HAS_BIAS)


@triton.jit
def _linear_by_blocks(
    x_block: tl.tensor,
    weight_block: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_out: tl.tensor,
    num_in: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """The same sums; whole tiles come through the copy engine of Hopper, which fills up with zeros at the edges."""
    down, across = _place(num_rows, num_out, BLOCK_M, BLOCK_N)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, num_in, BLOCK_K):
        x = x_block.load([down * BLOCK_M, start])
        weight = weight_block.load([across * BLOCK_N, start])
        sums = tl.dot(x, weight.T, sums)
    m = down * BLOCK_M + tl.arange(0, BLOCK_M)
    n = across * BLOCK_N + tl.arange(0, BLOCK_N)
    _store(out_ptr, bias_ptr, sums, m, n, num_rows, num_out, HAS_BIAS)


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


#: Widest first. On compute capability 9.0 all of them give the same bits, through either kernel
#: (`tests/kernels/test_triton.py` compares them there), so the number of rows may choose.
TILES = (
    _Tiles(128, 256, 64, 8, 3),
    _Tiles(128, 128, 64, 4, 4),
    _Tiles(64, 128, 64, 4, 5),
    _Tiles(64, 64, 128, 4, 4),
    _Tiles(64, 32, 128, 4, 5),
)
#: Elsewhere one shape serves every number of rows.
ANY_DEVICE, FLOAT32 = TILES[3], _Tiles(32, 32, 32, 4, 2)


class TritonLinear:
    """Linear op, batch-invariant always. Quantised weights are expanded when packed."""

    def __init__(self, *, device: str, dtype: str) -> None:
        self._device, self._dtype = torch.device(device), getattr(torch, dtype)
        on_gpu = self._device.type == "cuda"
        self._hopper = on_gpu and torch.cuda.get_device_capability(device) == (9, 0)
        self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1

    def pack(self, weight: Any, bias: torch.Tensor | None = None) -> PackedLinear:
        """weight: float [N, K] or a `QuantTensor`; bias [N] or None."""
        weight = dense(weight).to(self._device, self._dtype).contiguous()
        return PackedLinear(weight=weight, bias=None if bias is None else bias.to(self._device, self._dtype))

    def __call__(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """x [T, K] -> [T, N]."""
        x = x if x.stride(1) == 1 else x.contiguous()
        tiles = self._tiles(x.shape[0], packed.weight.shape[0])
        blocks = tiles.block_m == 128 and all(_aligned(t) for t in (x, packed.weight))
        return self._multiply(x, packed, tiles, blocks=blocks)

    def _tiles(self, num_rows: int, num_out: int) -> _Tiles:
        """The widest tiles that still give (nearly) every multiprocessor one."""
        if self._dtype == torch.float32:
            return FLOAT32
        if not self._hopper:
            return ANY_DEVICE
        for tiles in TILES:
            count = triton.cdiv(num_rows, tiles.block_m) * triton.cdiv(num_out, tiles.block_n)
            if count >= 0.9 * self._num_sms and (num_rows > 64 or tiles.block_m == 64):
                return tiles
        return TILES[-1]

    def _multiply(self, x: torch.Tensor, packed: PackedLinear, tiles: _Tiles, *, blocks: bool) -> torch.Tensor:
        weight, bias = packed.weight, packed.bias
        num_rows, (num_out, num_in) = x.shape[0], weight.shape
        out = torch.empty((num_rows, num_out), dtype=x.dtype, device=x.device)
        if not num_rows:
            return out
        grid = (triton.cdiv(num_rows, tiles.block_m) * triton.cdiv(num_out, tiles.block_n),)
        rest = (weight if bias is None else bias, out, num_rows, num_out)
        constants: dict[str, Any] = {
            "num_in": num_in,
            "HAS_BIAS": bias is not None,
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "BLOCK_K": tiles.block_k,
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
        }
        if blocks:
            x_block = TensorDescriptor.from_tensor(x, [tiles.block_m, tiles.block_k])
            weight_block = TensorDescriptor.from_tensor(weight, [tiles.block_n, tiles.block_k])
            _linear_by_blocks[grid](x_block, weight_block, *rest, **constants)
        else:
            even = num_in % tiles.block_k == 0
            _linear[grid](x, weight, *rest, x.stride(0), weight.stride(0), EVEN_K=even, **constants)
        return out


def _aligned(x: torch.Tensor) -> bool:
    """Whether the copy engine can read x: 16-byte steps."""
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0
