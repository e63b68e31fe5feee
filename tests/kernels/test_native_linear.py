"""Compiled linear layers: against float64, against a plain emulation of the quantised arithmetic, and bit by bit."""

from __future__ import annotations

import pytest
import torch

from deepinfer.errors import ConfigError
from deepinfer.kernels import native
from deepinfer.kernels.quant import FORMATS, QuantTensor, quantize

from ..threads import torch_threads

pytestmark = pytest.mark.skipif(native.probe() is not None, reason=str(native.probe()))

SHAPES = [(48, 32), (17, 64), (130, 96), (96, 576), (64, 1536)]
COUNTS = [*range(1, 34), 64, 65, 97, 257]


@pytest.fixture
def linear():
    return native.make_linear(device="cpu", dtype="float32")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.contiguous().view(torch.int32), y.contiguous().view(torch.int32))


def quantised_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] -> whole numbers [T, K / 32, 32] and scales [T, K / 32], as the kernel's comment states them."""
    groups = x.view(x.shape[0], -1, 32)
    amax = groups.abs().amax(-1)
    inverse = torch.where(amax > 0, 127 / amax, 0.0)
    return (groups * inverse[..., None]).round(), amax / 127


def emulate(x: torch.Tensor, weight: QuantTensor) -> torch.Tensor:
    """The quantised product in float64: exact integer sums of a group, then the combination of groups."""
    q, s = (v.double() for v in quantised_rows(x))
    if weight.format == "int8":
        codes = weight.planes["values"].view(weight.shape[0], -1, 32).double()
        dots = torch.einsum("tgk,ngk->tng", q, codes)
        return (dots * s[:, None]).sum(-1) * weight.planes["scale"].double()
    d, m, codes = weight.block_parts()
    if weight.format == "q8_0":
        values = codes.contiguous().view(torch.int8).double()
    else:
        values = torch.cat((codes & 15, codes >> 4), dim=-1).double()
    low = {"q4_0": d.double() * -8, "q8_0": torch.zeros_like(d).double()}.get(weight.format)
    low = m.double() if low is None else low
    dots = torch.einsum("tgk,ngk->tng", q, values)
    return (dots * d.double() * s[:, None]).sum(-1) + torch.einsum("tg,ng->tn", s * q.sum(-1), low)


@pytest.mark.parametrize(("num_out", "num_in"), [*SHAPES, (5, 7), (33, 801)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_float_weights_against_float64(linear, num_out: int, num_in: int, dtype: torch.dtype) -> None:
    weight, bias, x = normal(num_out, num_in).to(dtype), normal(num_out, seed=1), normal(131, num_in, seed=2)
    for extra in (None, bias):
        packed = linear.pack(weight, extra)
        for rows in (1, 2, 5, 6, 7, 131):
            exact = x[:rows].double() @ weight.double().T + (0 if extra is None else bias.double())
            assert (linear(x[:rows], packed) - exact).abs().max() <= 2e-6 * num_in**0.5 * 3


@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
@pytest.mark.parametrize("format", FORMATS)
def test_quantised_weights_against_emulation(linear, num_out: int, num_in: int, format: str) -> None:
    weight = quantize(normal(num_out, num_in), format=format)
    bias, x = normal(num_out, seed=1), normal(67, num_in, seed=2) * torch.logspace(-3, 3, 67)[:, None]
    x[3] = 0
    x[4, 32:] = 0
    expected = emulate(x, weight)
    for extra in (None, bias):
        packed = linear.pack(weight, extra)
        for rows in (1, 3, 4, 7, 8, 67):
            exact = expected[:rows] + (0 if extra is None else bias.double())
            size = (x[:rows].double().norm(dim=1) * weight.dequantize().double().norm(dim=1).max())[:, None] + 1
            assert ((linear(x[:rows], packed) - exact).abs() <= 1e-6 * size).all()


@pytest.mark.parametrize("format", FORMATS)
def test_extreme_codes_do_not_saturate(linear, format: str) -> None:
    """Largest products everywhere: int16 sums would overflow first here."""
    for sign in (1.0, -1.0):
        weight = quantize(torch.full((16, 64), sign), format=format)
        if format == "q4_1":
            blocks = weight.planes["blocks"].clone()
            blocks.view(16, 2, 20)[..., 4:] = 255
            weight = QuantTensor.from_blocks(blocks, format=format)
        if format == "q8_0":
            blocks = weight.planes["blocks"].clone()
            blocks.view(16, 2, 34)[..., 2:] = 128
            weight = QuantTensor.from_blocks(blocks, format=format)
        x = torch.full((9, 64), -3.0)
        expected = emulate(x, weight)
        assert torch.allclose(linear(x, linear.pack(weight)).double(), expected, rtol=1e-5)


def test_quantised_result_is_near_the_float_one(linear) -> None:
    weight, x = normal(256, 576) / 24, normal(50, 576, seed=3)
    exact = x @ weight.T
    for format, limit in {"q8_0": 0.012, "int8": 0.015, "q4_1": 0.09, "q4_0": 0.11}.items():
        error = (linear(x, linear.pack(quantize(weight, format=format))) - exact).norm() / exact.norm()
        assert error < limit, (format, float(error))


@pytest.mark.parametrize("what", ["float32", "bfloat16", *FORMATS])
@pytest.mark.parametrize(("num_out", "num_in"), [(130, 96), (96, 576), (200, 864)])
def test_rows_are_bitwise_the_same_in_any_batch(linear, what: str, num_out: int, num_in: int) -> None:
    weight = normal(num_out, num_in)
    packed = linear.pack(
        quantize(weight, format=what) if what in FORMATS else weight.to(getattr(torch, what)), weight[:, 0]
    )
    x = normal(257, num_in, seed=1)
    with torch_threads(1):
        whole = linear(x, packed)
    for threads in (1, 2, 3):
        with torch_threads(threads):
            for count in COUNTS:
                for offset in {0, 1, 5, 257 - count}:
                    if offset + count <= 257:
                        rows = slice(offset, offset + count)
                        assert same_bits(linear(x[rows], packed), whole[rows]), (threads, count, offset)


@pytest.mark.parametrize("what", ["float32", *FORMATS])
def test_outputs_do_not_depend_on_their_neighbours(linear, num_threads: int, what: str) -> None:
    """Packing some rows of a weight gives the bits of those rows of the whole."""
    weight, x = normal(160, 96), normal(11, 96, seed=1)
    whole = linear(x, linear.pack(quantize(weight, format=what) if what in FORMATS else weight))
    part = weight[37:90].clone()
    some = linear(x, linear.pack(quantize(part, format=what) if what in FORMATS else part))
    assert same_bits(some, whole[:, 37:90])


@pytest.mark.parametrize("what", ["float32", "q4_1"])
def test_strided_rows_and_empty_batches(linear, what: str) -> None:
    weight, wide = normal(40, 64), normal(9, 100)
    packed = linear.pack(quantize(weight, format=what) if what in FORMATS else weight)
    assert same_bits(linear(wide[:, 8:72], packed), linear(wide[:, 8:72].contiguous(), packed))
    assert same_bits(
        linear(wide.T[:9, :9].repeat(1, 8)[:, :64], packed), linear(wide.T[:9, :9].repeat(1, 8)[:, :64].clone(), packed)
    )
    assert linear(wide[:0, :64], packed).shape == (0, 40)


@pytest.mark.parametrize("what", ["float32", *FORMATS])
def test_nan_fills_its_row_and_no_other(linear, what: str) -> None:
    """A row that went wrong must stay recognisable: 8-bit integers could hide it."""
    weight, x = normal(40, 96), normal(9, 96)
    packed = linear.pack(quantize(weight, format=what) if what in FORMATS else weight)
    clean = linear(x, packed)
    for column in (0, 9, 17, 31, 95):
        bad = x.clone()
        bad[4, column] = torch.nan
        out = linear(bad, packed)
        assert out[4].isnan().all()
        out[4] = clean[4]
        assert same_bits(out, clean)
        bad[4, column] = torch.inf
        assert not linear(bad, packed)[4].isfinite().any()


@pytest.mark.parametrize("format", FORMATS)
def test_tiny_activations_give_tiny_results(linear, format: str) -> None:
    packed = linear.pack(quantize(normal(40, 96), format=format))
    for size in (1e-30, 1e-36, 1e-39, 1e-44):
        assert linear(normal(3, 96) * size, packed).abs().max() <= 300 * size + 1e-33


def test_packing_keeps_nothing_and_refuses_the_wrong(linear) -> None:
    weight = normal(16, 32)
    packed, x = linear.pack(weight), normal(2, 32)
    before = linear(x, packed)
    weight.zero_()
    assert same_bits(linear(x, packed), before)
    with pytest.raises(ConfigError, match=r"\[2, 31\]"):
        linear(x[:, :31], packed)
    with pytest.raises(ConfigError, match="float64"):
        linear(x.double(), packed)
    with pytest.raises(ConfigError, match="int64"):
        linear.pack(torch.zeros(4, 4, dtype=torch.int64))


def test_packed_size_is_that_of_the_format(linear) -> None:
    weight = normal(64, 320)
    bits = {f: linear.pack(quantize(weight, format=f)) for f in FORMATS}
    assert {f: (p.quants.nbytes + p.scales.nbytes) * 8 / weight.numel() for f, p in bits.items()} == {
        "q4_0": 5.0,
        "q4_1": 5.0,
        "q8_0": 8.5,
        "int8": 8.1,
    }
