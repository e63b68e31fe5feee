"""Compiled paged attention: against a float64 softmax, with poisoned memory, and bit by bit."""

from __future__ import annotations

import itertools

import pytest
import torch

from deepinfer.kernels import native
from deepinfer.testing.paged import PagedBatch, Sequence, make_paged_batch

from ..threads import torch_threads

pytestmark = pytest.mark.skipif(native.probe() is not None, reason=str(native.probe()))


@pytest.fixture
def attention():
    return native.make_attention(device="cpu", dtype="float32")


def run(attention, batch: PagedBatch, scale: float = 0.125) -> torch.Tensor:
    return attention(batch.q, batch.k_pool, batch.v_pool, batch.page_table, batch.rows, scale=scale)


def exact(batch: PagedBatch, scale: float = 0.125) -> torch.Tensor:
    """Softmax in float64 over the keys of each token."""
    out, rows = torch.zeros(batch.q.shape, dtype=torch.float64), batch.rows
    page_tokens, kv_heads = batch.k_pool.shape[1:3]
    for t in range(len(batch.q)):
        count = int(rows.pos[t]) + 1
        at = torch.arange(count)
        pages = batch.page_table[int(rows.slot_ids[int(rows.row_of[t])]), at // page_tokens].long()
        k, v = (pool[pages, at % page_tokens].double() for pool in (batch.k_pool, batch.v_pool))
        group = batch.q.shape[1] // kv_heads
        for h in range(batch.q.shape[1]):
            weights = torch.softmax(k[:, h // group] @ batch.q[t, h].double() * scale, 0)
            out[t, h] = weights @ v[:, h // group]
    return out


def batch_of(*sequences: tuple[int, int], **options) -> PagedBatch:
    shape = {"num_heads": 9, "num_kv_heads": 3, "width": 64, "page_tokens": 16} | options
    return make_paged_batch([Sequence(q, k, ident=i) for i, (q, k) in enumerate(sequences)], **shape)


@pytest.mark.parametrize("page_tokens", [1, 3, 16, 32, 64])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"), [(9, 3, 64), (4, 4, 32), (6, 1, 128), (40, 2, 80), (3, 1, 256)]
)
def test_against_float64(attention, page_tokens: int, heads: int, kv_heads: int, width: int) -> None:
    batch = batch_of(
        (1, 1), (1, 16), (1, 17), (0, 9), (5, 5), (33, 40), (1, 65), (8, 64), (2, 33),
        num_heads=heads, num_kv_heads=kv_heads, width=width, page_tokens=page_tokens,
    )  # fmt: skip
    assert (run(attention, batch) - exact(batch)).abs().max() < 3e-6


def test_long_context_and_large_scores(attention) -> None:
    batch = batch_of((1, 1500), (70, 300))
    for scale in (0.125, 2.0, 40.0):
        # A score is off by its own size times 2**-24 a few times over, a weight by that much in proportion.
        assert (run(attention, batch, scale) - exact(batch, scale)).abs().max() < 3e-6 + 2e-6 * scale


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_pools_equal_their_widened_values(attention, dtype: torch.dtype) -> None:
    batch = batch_of((1, 50), (20, 70))
    narrow = [pool.to(dtype) for pool in (batch.k_pool, batch.v_pool)]
    wide = [pool.float() for pool in narrow]
    outs = [attention(batch.q, *pools, batch.page_table, batch.rows, scale=0.1) for pools in (narrow, wide)]
    assert torch.equal(*outs)


def test_a_token_gives_the_same_bits_alone_in_chunks_and_in_a_prefill(attention) -> None:
    length = 150
    results: dict[int, torch.Tensor] = {}
    for threads, chunk in itertools.product((1, 2), (1, 2, 7, 8, 9, 32, 64, length)):
        for first in range(0, length, chunk):
            last = min(first + chunk, length)
            batch = batch_of((last - first, last), seed=chunk)
            with torch_threads(threads):
                rows = run(attention, batch)
            for t, row in enumerate(rows, start=first):
                assert torch.equal(results.setdefault(t, row.clone()), row), (threads, chunk, t)


def test_company_does_not_matter(attention) -> None:
    alone = {
        i: run(attention, make_paged_batch([Sequence(q, k, ident=i)], **SHAPE)) for i, (q, k) in enumerate(COMPANY)
    }
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0], [3, 1, 4]):
        batch = make_paged_batch([Sequence(*COMPANY[i], ident=i) for i in order], **SHAPE, seed=len(order))
        out, first = run(attention, batch), 0
        for i in order:
            count = COMPANY[i][0]
            assert torch.equal(out[first : first + count], alone[i]), i
            first += count


COMPANY = [(1, 33), (40, 40), (1, 1), (3, 90), (17, 64)]
SHAPE = {"num_heads": 9, "num_kv_heads": 3, "width": 64, "page_tokens": 16}


def test_later_keys_of_the_row_have_no_influence(attention) -> None:
    """NaN in the keys and values of position 20 reaches exactly the tokens from 20 on."""
    batch = batch_of((40, 40))
    clean = run(attention, batch)
    page = int(batch.page_table[int(batch.rows.slot_ids[0]), 1])
    for pool in (batch.k_pool, batch.v_pool):
        poisoned = batch_of((40, 40))
        (poisoned.k_pool if pool is batch.k_pool else poisoned.v_pool)[page, 4] = torch.nan
        out = run(attention, poisoned)
        assert torch.equal(out[:20], clean[:20])
        assert out[20:].isnan().all()


def test_nan_in_a_query_stays_in_its_head(attention) -> None:
    batch = batch_of((3, 40), (1, 40))
    clean = run(attention, batch)
    batch.q[1, 4] = torch.nan
    out = run(attention, batch)
    assert out[1, 4].isnan().all()
    out[1, 4] = clean[1, 4]
    assert torch.equal(out, clean)


def test_tokens_of_no_row_become_zero(attention) -> None:
    batch = batch_of((2, 20), (1, 5))
    padded = torch.cat((batch.q, torch.full((4, 9, 64), torch.nan)))
    out = attention(padded, batch.k_pool, batch.v_pool, batch.page_table, batch.rows, scale=0.125)
    assert torch.equal(out[:3], run(attention, batch))
    assert not out[3:].any()


def test_strided_queries(attention) -> None:
    batch = batch_of((5, 20), (1, 9))
    fused = torch.randn(6, 15, 64)
    fused[:, :9] = batch.q
    strided = attention(fused[:, :9], batch.k_pool, batch.v_pool, batch.page_table, batch.rows, scale=0.125)
    assert torch.equal(strided, run(attention, batch))
