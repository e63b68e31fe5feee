"""What eager ops promise beyond the contract: row invariance on the CPU and the 8-bit path."""

import pytest
import torch
import torch.nn.functional as F

from deepinfer.kernels import eager, usable
from deepinfer.kernels.eager import attention as module
from deepinfer.kernels.eager import fixed_rows, int8
from deepinfer.kernels.quant import quantize
from deepinfer.testing import Sequence, assert_batch_invariant, make_paged_batch


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows_of(compute, x):
    def run(numbers):
        return dict(zip(numbers, compute(x[numbers]), strict=True))

    every = list(range(len(x)))
    return assert_batch_invariant(run, [every, *([i] for i in every[:3]), *(every[i : 2 * i] for i in range(2, 19))])


def test_invariant_linear_at_every_small_count(num_threads):
    op = eager.Linear(device="cpu", dtype="float32", invariant=True)
    packed = op.pack(draw(96, 64, seed=1), draw(96, seed=2))
    assert rows_of(lambda x: op(x, packed), draw(120, 64)) > 100


def test_linear_keeps_fixed_blocks_where_row_counts_matter(monkeypatch):
    monkeypatch.setattr("deepinfer.kernels.eager.linear.rows_agree", lambda *_, **__: False)
    op = eager.Linear(device="cpu", dtype="float32", invariant=True)
    weight = draw(40, 64, seed=1)
    packed = op.pack(weight)
    assert packed.fixed
    sizes = []
    monkeypatch.setattr(F, "linear", lambda x, w, b: sizes.append(len(x)) or x @ w.T)
    x = draw(70, 64)
    assert torch.allclose(op(x, packed), x @ weight.T, atol=1e-4)
    assert sizes == [fixed_rows.BLOCK] * 3


def test_the_probe_notices_a_product_that_depends_on_the_count():
    weight = draw(8, 16)
    assert not fixed_rows.rows_agree(lambda x: x @ weight.T * (1 + 2**-20 * (len(x) % 7)), (16,), dtype=torch.float32)
    assert not fixed_rows.rows_agree(
        lambda x: (x @ weight.T).roll(1, 0).roll(-1, 0) + torch.arange(len(x))[:, None] * 1e-6,
        (16,),
        dtype=torch.float32,
    )


PADDING = [(0, 2, 0), (1, 2, 8), (9, 2, 16), (16, 2, 16), (17, 2, 17), (1, 1, 4), (7, 1, 8), (9, 1, 9), (1, 16, 64)]


@pytest.mark.parametrize(("rows", "threads", "wanted"), PADDING)
def test_padding_rule(rows, threads, wanted):
    assert fixed_rows.padded(rows, num_threads=threads) == wanted


@pytest.mark.parametrize("blocks", [False, True])
def test_tiled_attention_decodes_what_it_prefills(blocks, num_threads):
    op = eager.TiledAttention()
    if blocks:
        op._fixed[32] = True
    shape = {"num_heads": 6, "num_kv_heads": 2, "width": 32, "page_tokens": 16}

    def run(batch):
        num_decode, parts = batch
        sequences = [Sequence(end - start, end, ident) for ident, start, end in parts]
        made = make_paged_batch(sequences, num_decode=num_decode, **shape)
        out = op(made.q, made.k_pool, made.v_pool, made.page_table, made.rows, scale=0.2)
        return dict(zip([(i, p) for i, start, end in parts for p in range(start, end)], out, strict=True))

    whole = (0, ((1, 0, 260), (2, 0, 40)))
    singles = [(1, ((1, pos, pos + 1),)) for pos in (0, 127, 128, 129, 255, 256, 259)]
    mixed = (2, ((2, 39, 40), (1, 200, 201), (1, 130, 190), (2, 3, 5)))
    assert assert_batch_invariant(run, [whole, *singles, mixed]) == 7 + 64


def test_int8_keeps_clear_of_saturation():
    """u8 x s8 pairs are summed in 16 bits on AVX2: ones against ones is the worst case."""
    packed = int8.pack_int8(torch.ones(16, 512))
    out = int8.int8_linear(torch.ones(3, 512), packed)
    assert torch.allclose(out, torch.full((3, 16), 512.0), rtol=1e-5)
    mixed = int8.int8_linear(-torch.ones(3, 512), packed)
    assert torch.allclose(mixed, torch.full((3, 16), -512.0), rtol=0.01)


def test_int8_error_and_invariance(num_threads):
    if not int8.int8_available():
        pytest.skip("this torch has no x86 quantised engine")
    op = eager.Linear(device="cpu", dtype="float32")
    weight = quantize(draw(192, 576, seed=1), format="q8_0")
    packed = op.pack(weight)
    assert isinstance(packed.weight, int8.Int8Weight)
    x = draw(64, 576) * torch.logspace(-3, 3, 64)[:, None]
    exact = x @ weight.dequantize().T
    errors = (op(x, packed) - exact).norm(dim=1) / exact.norm(dim=1)
    assert errors.max() < 0.025
    rows_of(lambda rows: op(rows, packed), x)
    assert op(x[:0], packed).shape == (0, 192)
    assert torch.equal(op(torch.zeros(2, 576), packed), torch.zeros(2, 192))


def test_eager_refuses_invariance_off_the_cpu():
    assert usable.eager_accepts(device="cpu", invariant=True) is None
    assert usable.eager_accepts(device="cuda:1", invariant=False) is None
    assert "cuda:1" in (usable.eager_accepts(device="cuda:1", invariant=True) or "")


def test_padded_chunks_equal_row_by_row():
    """The path for devices whose lengths cannot be read cheaply, run on the CPU."""
    sequences = [Sequence(1, 9, 1), Sequence(4, 20, 2), Sequence(0, 5, 3), Sequence(17, 17, 4), Sequence(1, 33, 5)]
    batch = make_paged_batch(
        sequences, num_heads=4, num_kv_heads=2, width=32, page_tokens=8, num_decode=1, slack=3, context=64
    )
    outs = []
    for run in (module._chunks_padded, module._chunks_one_by_one):
        out = torch.zeros_like(batch.q)
        run(out, batch.q, (batch.k_pool, batch.v_pool), batch.page_table, batch.rows, 0.2)
        outs.append(out)
    assert outs[0][1:].isfinite().all()
    assert torch.allclose(*outs, atol=1e-5)
