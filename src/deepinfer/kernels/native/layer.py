"""A whole decoder layer as one call into the library, see csrc/layer.c."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import torch

from ...errors import ConfigError
from .lib import ELEMENT_TYPES, load_library
from .linear import Packed, PackedQuant

if TYPE_CHECKING:
    from ...layers.batch import Batch
    from ...layers.decoder import DecoderLayer
    from ...layers.kv import KVPool
    from ...protocols import FusedDecoderLayerOp

__all__ = ["NativeDecoderLayer", "make_decoder_layer"]


class _Weight(ctypes.Structure):
    """In step with csrc/layer.c."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("format", ctypes.c_int),
    )

    @classmethod
    def of(cls, packed: Packed) -> _Weight:
        if isinstance(packed, PackedQuant):
            codes, scales, code = packed.quants_ptr, packed.scales_ptr, packed.format_code
        else:
            codes, scales, code = packed.panels_ptr, None, packed.element_type
        return cls(codes, scales, packed.bias_ptr, packed.num_out, packed.num_in, code)


class _Layer(ctypes.Structure):
    """In step with csrc/layer.c."""

    _fields_ = (
        *((name, _Weight) for name in ("qkv", "out", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm", "cos_sin")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim")),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )

    @classmethod
    def of(cls, layer: DecoderLayer) -> _Layer:
        attention, mlp = layer.attention, layer.mlp
        weights = (attention.qkv, attention.out, mlp.gate_up, mlp.down)
        tables = (layer.attention_norm, layer.mlp_norm, attention.cos_sin)
        sizes = (attention.num_heads, attention.num_kv_heads, attention.head_dim)
        pointers = (table.data_ptr() for table in tables)
        return cls(*map(_Weight.of, weights), *pointers, *sizes, layer.eps, attention.scale)


@attrs.frozen(eq=False)
class NativeDecoderLayer:
    """Runs a `DecoderLayer` whose ops are all native; same bits, one call. Immutable, shares the layer's tensors."""

    layer: DecoderLayer
    _struct: _Layer
    _work_width: int
    _call: Callable[..., int]

    @classmethod
    def of(cls, layer: DecoderLayer) -> NativeDecoderLayer:
        library = load_library()
        struct = _Layer.of(layer)
        return cls(layer, struct, library.deepinfer_layer_work(ctypes.addressof(struct)), library.deepinfer_layer)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: Batch, kv: KVPool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual f32 [T, M], contiguous -> the same pair after this layer."""
        if x.dtype is not torch.float32 or not x.is_contiguous():
            raise ConfigError(f"x is {x.dtype} with strides {x.stride()}; expected contiguous float32")
        k_pool, v_pool = kv.layer(self.layer.attention.layer)
        rows, table, tokens = batch.rows, batch.page_table, x.shape[0]
        y, total = torch.empty_like(x), torch.empty_like(x)
        work = x.new_empty(tokens * self._work_width)
        failed = self._call(
            ctypes.addressof(self._struct), x.data_ptr(), None if residual is None else residual.data_ptr(),
            y.data_ptr(), total.data_ptr(), work.data_ptr(), k_pool.data_ptr(), v_pool.data_ptr(),
            ELEMENT_TYPES[k_pool.dtype], table.data_ptr(), table.stride(0), rows.slot_ids.data_ptr(),
            rows.cu_q.data_ptr(), rows.row_of.data_ptr(), rows.pos.data_ptr(), tokens, rows.slot_ids.shape[0],
            k_pool.shape[1], torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no memory for a layer over {tokens} tokens")
        return y, total


def make_decoder_layer(*, device: str, dtype: str, invariant: bool = False) -> FusedDecoderLayerOp:
    return NativeDecoderLayer.of
