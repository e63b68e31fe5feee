"""A pre-norm decoder layer: grouped-query attention and a gated MLP, both made of ops.

Weights are packed once, when a layer is built; nothing here knows which backend an op came from.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from ..kernels.ops import Ops
from .batch import Batch
from .kv import KVPool

__all__ = ["Attention", "DecoderLayer", "GatedMlp"]


@attrs.frozen(eq=False)
class Attention:
    """Causal grouped-query attention over pages. H query heads, G key/value heads of width D."""

    ops: Ops
    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    #: Packed [(H + 2G) D, M] and [M, H D].
    qkv: Any
    out: Any
    #: f32 [context, D], see `layers.rope`.
    cos_sin: torch.Tensor
    scale: float

    def __call__(self, x: torch.Tensor, batch: Batch, kv: KVPool) -> torch.Tensor:
        """x [T, M] -> [T, M]; writes this step's keys and values before it reads."""
        q, k, v = self._project(x)
        q, k = self.ops.rope(q, k, batch.rows.pos, cos_sin=self.cos_sin)
        k_pool, v_pool = kv.layer(self.layer)
        self.ops.cache_write(k, v, k_pool, v_pool, batch.page_table, batch.rows)
        mixed = self.ops.attention(q, k_pool, v_pool, batch.page_table, batch.rows, scale=self.scale)
        return self.ops.linear(mixed.view(x.shape[0], self.num_heads * self.head_dim), self.out)

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        groups = self.num_kv_heads
        heads = self.ops.linear(x, self.qkv).view(x.shape[0], self.num_heads + 2 * groups, self.head_dim)
        return heads[:, : self.num_heads], heads[:, self.num_heads : -groups], heads[:, -groups:]


@attrs.frozen(eq=False)
class GatedMlp:
    """down(silu(gate(x)) * up(x)) with gate and up in one weight [2F, M]."""

    ops: Ops
    gate_up: Any
    down: Any

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.linear(self.ops.silu_mul(self.ops.linear(x, self.gate_up)), self.down)


@attrs.frozen(eq=False)
class DecoderLayer:
    """Norm, attention, norm, MLP; the residual travels beside and is added inside the norms."""

    ops: Ops
    eps: float
    attention_norm: torch.Tensor
    attention: Attention
    mlp_norm: torch.Tensor
    mlp: GatedMlp

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: Batch, kv: KVPool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, M] (output of the layer before), residual [T, M] -> the same pair after this layer."""
        normed, residual = self.ops.rms_norm(x, self.attention_norm, eps=self.eps, residual=residual)
        mixed = self.attention(normed, batch, kv)
        normed, residual = self.ops.rms_norm(mixed, self.mlp_norm, eps=self.eps, residual=residual)
        return self.mlp(normed), residual
