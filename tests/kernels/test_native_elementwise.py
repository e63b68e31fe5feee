"""Compiled norm, rotary positions, activation, cache write; probe; and the published contract of every op."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepinfer.errors import ConfigError, PartUnavailable
from deepinfer.kernels import native
from deepinfer.kernels.native import lib
from deepinfer.testing import check_op
from deepinfer.testing.paged import Sequence, make_paged_batch

needs_library = pytest.mark.skipif(native.probe() is not None, reason=str(native.probe()))
OPS = ("rms_norm", "rope", "silu_mul", "linear", "cache_write", "attention", "sample")


def make(name: str):
    return getattr(native, f"make_{name}")(device="cpu", dtype="float32")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@needs_library
@pytest.mark.parametrize("name", OPS)
def test_contract(name: str) -> None:
    check_op(name, make(name), invariant=True)


@needs_library
@pytest.mark.parametrize("width", [1, 7, 31, 32, 33, 576])
def test_norm_against_float64(width: int) -> None:
    x, residual, weight = normal(70, width), normal(70, width, seed=1), normal(width, seed=2)
    out, total = make("rms_norm")(x, weight, eps=1e-5, residual=residual)
    assert torch.equal(total, x + residual)
    wide = total.double()
    exact = wide * (wide.square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight
    assert torch.allclose(out.double(), exact, rtol=2e-6, atol=1e-7)
    assert make("rms_norm")(x, weight, eps=1e-5)[1] is x


@needs_library
@pytest.mark.parametrize("width", [2, 8, 20, 64, 66])
def test_rope_against_complex_rotation(width: int) -> None:
    q, k, pos = normal(9, 4, width), normal(9, 2, width, seed=1), torch.randint(0, 50, (9,), dtype=torch.int32)
    angle = normal(50, width // 2, seed=2)
    turned = make("rope")(q, k, pos, cos_sin=torch.cat((angle.cos(), angle.sin()), 1))
    for x, y in zip((q, k), turned, strict=True):
        low, high = x.double().chunk(2, -1)
        z = torch.complex(low, high) * torch.polar(torch.ones(1).double(), angle[pos.long()].double())[:, None]
        assert torch.allclose(y.double(), torch.cat((z.real, z.imag), -1), atol=1e-6)


@needs_library
def test_silu_at_extremes() -> None:
    gate = torch.tensor([[-1e30, -200.0, -88.0, -1.0, 0.0, 1.0, 88.0, 1e30, torch.nan, -0.0]])
    out = make("silu_mul")(torch.cat((gate, torch.full_like(gate, 2.0)), 1))
    expected = torch.nn.functional.silu(gate.double()) * 2
    assert torch.allclose(out.double(), expected, rtol=1e-6, atol=1e-35, equal_nan=True)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_cache_write_rounds_as_torch(dtype: torch.dtype) -> None:
    batch = make_paged_batch([Sequence(20, 33), Sequence(1, 17)], num_heads=2, num_kv_heads=2, width=24, page_tokens=8)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 65519.0, 65520.0, 1e-7, -0.0, 3.0001])
    batch.k[0, 0, :8] = special
    pools = [torch.full(batch.k_pool.shape, 7.0, dtype=dtype) for _ in range(2)]
    make("cache_write")(batch.k, batch.v, *pools, batch.page_table, batch.rows)
    expected = [torch.full(batch.k_pool.shape, 7.0, dtype=dtype) for _ in range(2)]
    slots = batch.rows.slot_ids[batch.rows.row_of.long()].long()
    pages = batch.page_table[slots, batch.rows.pos.long() // 8].long()
    for pool, x in zip(expected, (batch.k, batch.v), strict=True):
        pool[pages, batch.rows.pos.long() % 8] = x.to(dtype)
    for ours, theirs in zip(pools, expected, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


@needs_library
def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ConfigError, match="float64"):
        make("silu_mul")(torch.zeros(2, 4, dtype=torch.float64))


def test_accepts_says_what_it_cannot_do() -> None:
    assert native.accepts(dtype="float32", head_dim=64, invariant=True, weight_format="q4_1") is None
    assert "bfloat16" in (native.accepts(dtype="bfloat16") or "")
    assert "head width 68" in (native.accepts(head_dim=68) or "")
    assert native.accepts(head_dim=264) is not None


def test_probe_without_a_library(tmp_path: Path) -> None:
    assert "no C compiler" in (native.probe(tmp_path) or "")
    with pytest.raises(PartUnavailable, match="no C compiler"):
        lib.load_library(tmp_path)


def test_probing_imports_neither_torch_nor_the_library() -> None:
    code = (
        "import sys; from deepinfer.kernels import native; native.probe(); native.accepts();"
        "assert 'torch' not in sys.modules and 'ctypes' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
