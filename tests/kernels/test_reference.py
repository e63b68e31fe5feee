"""The reference ops against transformers' Llama modules, torch's own functions and exact enumeration."""

import math

import pytest
import torch
import torch.nn.functional as F

from deepinfer.kernels import noise, reference
from deepinfer.testing import Sequence, make_paged_batch

OPS = ("rms_norm", "rope", "silu_mul", "linear", "cache_write", "attention", "sample")


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_rms_norm_is_that_of_transformers():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama", reason="transformers is not installed")
    x, residual, weight = draw(5, 96), draw(5, 96, seed=1), draw(96, seed=2)
    module = llama.LlamaRMSNorm(96, eps=1e-5).double()
    module.weight.data = weight
    normed, total = reference.rms_norm(x, weight, eps=1e-5, residual=residual)
    assert torch.equal(total, x + residual)
    # It computes the scale in float32.
    assert torch.allclose(normed, module(total), rtol=1e-6, atol=1e-6)


def test_sum_is_rounded_before_the_norm_reads_it():
    x, residual = (draw(4, 64, seed=s, dtype=torch.bfloat16) for s in (1, 2))
    weight = draw(64, seed=3, dtype=torch.bfloat16)
    normed, total = reference.rms_norm(x, weight, eps=1e-5, residual=residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, reference.rms_norm(total, weight, eps=1e-5)[0])


def test_rope_is_that_of_transformers():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama", reason="transformers is not installed")
    q, k = draw(7, 4, 32), draw(7, 2, 32, seed=1)
    pos = torch.tensor([0, 5, 1, 99, 3, 3, 42], dtype=torch.int32)
    angles = torch.arange(100)[:, None] / 10000.0 ** (torch.arange(16) / 16)
    table = torch.cat((angles.cos(), angles.sin()), dim=1).double()
    doubled = torch.cat((angles, angles), dim=1).double()[pos.long()]
    turned = reference.rope(q, k, pos, cos_sin=table)
    heads_first = (x.transpose(0, 1)[None] for x in (q, k))
    theirs = llama.apply_rotary_pos_emb(*heads_first, doubled.cos()[None], doubled.sin()[None])
    for mine, other in zip(turned, theirs, strict=True):
        assert torch.allclose(mine, other[0].transpose(0, 1), atol=1e-6)


def test_silu_mul_and_linear_are_those_of_torch():
    x = draw(6, 40)
    assert torch.allclose(reference.silu_mul(x), F.silu(x[:, :20]) * x[:, 20:])
    op, weight, bias = reference.Linear(), draw(9, 40, seed=1), draw(9, seed=2)
    assert torch.allclose(op(x, op.pack(weight, bias)), F.linear(x, weight, bias))
    assert torch.allclose(op(x, op.pack(weight)), F.linear(x, weight))


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "width", "page_tokens"), [(4, 2, 32, 16), (3, 1, 20, 4)])
def test_attention_is_that_of_torch_on_dense_keys(num_heads, num_kv_heads, width, page_tokens):
    sequences = [Sequence(1, 37, 1), Sequence(0, 9, 2), Sequence(5, 20, 3), Sequence(16, 16, 4)]
    batch = make_paged_batch(
        sequences, num_heads=num_heads, num_kv_heads=num_kv_heads, width=width, page_tokens=page_tokens, num_decode=1
    ).to("cpu", torch.float64)
    out = reference.attention(batch.q, batch.k_pool, batch.v_pool, batch.page_table, batch.rows, scale=0.2)
    first = 0
    for slot, sequence in zip(batch.rows.slot_ids.tolist(), sequences, strict=True):
        last = first + sequence.num_new
        pages = batch.page_table[slot, : math.ceil(sequence.k_len / page_tokens)].long()
        keys, values = (p[pages].flatten(0, 1)[: sequence.k_len] for p in (batch.k_pool, batch.v_pool))
        assert torch.equal(keys[sequence.k_len - sequence.num_new :], batch.k[first:last])
        seen = torch.ones(sequence.num_new, sequence.k_len, dtype=torch.bool).tril(sequence.k_len - sequence.num_new)
        exact = F.scaled_dot_product_attention(
            batch.q[first:last].transpose(0, 1),
            keys.transpose(0, 1).repeat_interleave(num_heads // num_kv_heads, dim=0),
            values.transpose(0, 1).repeat_interleave(num_heads // num_kv_heads, dim=0),
            attn_mask=seen,
            scale=0.2,
        )
        assert torch.allclose(out[first:last], exact.transpose(0, 1))
        first = last


def test_cache_write_fills_exactly_the_lines_attention_reads():
    batch = make_paged_batch(
        [Sequence(1, 6, 1), Sequence(9, 9, 2), Sequence(0, 3, 3)],
        num_heads=1, num_kv_heads=2, width=8, page_tokens=4, num_decode=1,
    )  # fmt: skip
    pools = [torch.full_like(batch.k_pool, 7.0), torch.full_like(batch.v_pool, 7.0)]
    reference.cache_write(batch.k, batch.v, *pools, batch.page_table, batch.rows)
    for pool, filled, new in zip(pools, (batch.k_pool, batch.v_pool), (batch.k, batch.v), strict=True):
        written = (pool != 7.0).all(dim=-1).all(dim=-1)
        assert int(written.sum()) == len(new)
        assert torch.equal(pool[written], filled[written])


def test_sample_is_argmax_of_logits_and_noise():
    logits = draw(6, 50, dtype=torch.float32)
    keys = {
        "seed": torch.arange(6) * 7919 - 3,
        "sample_index": torch.zeros(6, dtype=torch.int32),
        "pos": torch.arange(6, dtype=torch.int32),
    }
    greedy = torch.tensor([True, False] * 3)
    ids = reference.sample(logits, greedy=greedy, purpose=0, **keys)
    noisy = logits + noise.gumbel_row(*keys.values(), vocab_size=50)
    assert ids.tolist() == torch.where(greedy, logits.argmax(1), noisy.argmax(1)).tolist()


def test_sample_follows_the_softmax():
    """Chi-squared over 1,500 seeds; the 99.99th percentile for 4 degrees of freedom is 23.5."""
    logits, count = torch.tensor([0.0, 1.0, -1.0, 0.5, -torch.inf, 2.0]), 1500
    same = torch.zeros(count, dtype=torch.int32)
    ids = reference.sample(
        logits.expand(count, -1), greedy=same.bool(), seed=torch.arange(count), sample_index=same, pos=same, purpose=0
    )
    expected = torch.softmax(logits, 0) * len(ids)
    found = torch.bincount(ids, minlength=6)
    assert found[4] == 0
    keep = expected > 0
    assert float(((found - expected)[keep] ** 2 / expected[keep]).sum()) < 23.5


@pytest.mark.parametrize("op", OPS)
def test_factories_take_the_keywords_of_their_kind(op):
    assert callable(getattr(reference, f"make_{op}")(device="cpu", dtype="float32", invariant=True))
