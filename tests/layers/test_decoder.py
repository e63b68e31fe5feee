"""A decoder layer in one call gives the bits of its ops one by one."""

from __future__ import annotations

import pytest
import torch

from deepinfer.kernels import bind_ops, native
from deepinfer.kernels.quant import quantize
from deepinfer.layers.batch import Batch, RowSet
from deepinfer.layers.decoder import Attention, DecoderLayer, GatedMlp
from deepinfer.layers.kv import CacheSpec, KVPool, PagedGroup
from deepinfer.layers.rope import cos_sin_table

HIDDEN, HEADS, GROUPS, DIM, FFN = 96, 6, 2, 16, 160
FORMATS = ("float32", "bfloat16", "q4_1", "q8_0", "int8")


def make_layer(weight_format: str, *, bias: bool = False, **want: str) -> DecoderLayer:
    torch.manual_seed(0)
    ops = bind_ops(device="cpu", dtype="float32", head_dim=DIM, page_tokens=8, weight_format=weight_format, want=want)

    def pack(rows: int, width: int):
        weight = torch.randn(rows, width) / width**0.5
        stored = weight.to(getattr(torch, weight_format)) if hasattr(torch, weight_format) else None
        stored = quantize(weight, format=weight_format) if stored is None or weight_format == "int8" else stored
        return ops.linear.pack(stored, torch.randn(rows) if bias else None)

    qkv, out = pack((HEADS + 2 * GROUPS) * DIM, HIDDEN), pack(HIDDEN, HEADS * DIM)
    table = cos_sin_table(256, DIM, {})
    attention = Attention(ops, 0, HEADS, GROUPS, DIM, qkv, out, table, DIM**-0.5)
    mlp = GatedMlp(ops, pack(2 * FFN, HIDDEN), pack(HIDDEN, FFN))
    return DecoderLayer(ops, 1e-5, torch.rand(HIDDEN), attention, torch.rand(HIDDEN), mlp)


def batch(rows: RowSet, page_table: torch.Tensor) -> Batch:
    tokens = len(rows.pos)
    return Batch(torch.zeros(tokens, dtype=torch.int64), page_table, rows, torch.arange(tokens))


@pytest.mark.skipif(native.probe() is not None, reason=f"native kernels: {native.probe()}")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_one_call_equals_the_ops_bit_by_bit(weight_format: str, bias: bool) -> None:
    layer = make_layer(weight_format, bias=bias)
    fuse = layer.ops.decoder_layer
    assert fuse is not None
    fused = fuse(layer)
    spec = CacheSpec((PagedGroup("full", (0,), GROUPS, DIM),))
    pools = [KVPool(spec, num_pages=40, page_tokens=8, dtype=torch.float32) for _ in range(2)]
    page_table = (torch.randperm(36) + 1)[: 4 * 9].view(4, 9).to(torch.int32)
    for q_len, k_len, num_decode in (
        ([40, 3], [40, 3], 0),
        ([1, 1, 20], [41, 4, 20], 2),
        ([1], [42], 1),
        ([], [], 0),
    ):
        rows = RowSet.ragged(list(range(1, len(q_len) + 1)), q_len, k_len, num_decode=num_decode)
        x, rest = torch.randn(sum(q_len), HIDDEN), torch.randn(sum(q_len), HIDDEN)
        for residual in (None, rest):
            kept = x.clone()
            one_by_one = layer(x, residual, batch(rows, page_table), pools[0])
            at_once = fused(x, residual, batch(rows, page_table), pools[1])
            for a, b in zip(one_by_one, at_once, strict=True):
                assert torch.equal(a, b)
            assert torch.equal(x, kept)
            assert torch.equal(pools[0].layer(0)[0], pools[1].layer(0)[0])


def test_a_layer_of_mixed_implementations_is_not_fused() -> None:
    assert make_layer("float32", attention="eager").ops.decoder_layer is None
