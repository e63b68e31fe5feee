"""Quantised weights, against the gguf package and against plain arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepinfer.errors import ConfigError
from deepinfer.kernels.quant import BLOCK_BYTES, FORMATS, QuantTensor, cat, quantize

gguf = pytest.importorskip("gguf")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_blocks(format: str, num_rows: int, width: int, *, seed: int = 0) -> torch.Tensor:
    """Any bytes as codes, moderate numbers as scales."""
    source = np.random.default_rng(seed)
    blocks = source.integers(0, 256, (num_rows, width // 32, BLOCK_BYTES[format]), dtype=np.uint8)
    heads = 2 if format == "q4_1" else 1
    scales = source.normal(size=(num_rows, width // 32, heads)).astype(np.float16)
    blocks[..., : 2 * heads] = scales.view(np.uint8)
    return torch.from_numpy(blocks.reshape(num_rows, -1))


def theirs(format: str):
    return getattr(gguf.GGMLQuantizationType, format.upper())


@pytest.mark.parametrize("format", BLOCK_BYTES)
def test_dequantize_equals_gguf(format: str) -> None:
    blocks = random_blocks(format, 7, 96)
    ours = QuantTensor.from_blocks(blocks, format=format)
    assert ours.shape == (7, 96)
    expected = gguf.quants.dequantize(blocks.numpy(), theirs(format))
    assert np.array_equal(ours.dequantize().numpy(), expected)


@pytest.mark.parametrize("format", BLOCK_BYTES)
def test_quantize_equals_gguf(format: str) -> None:
    weight = normal(33, 160) * torch.linspace(0.01, 30, 33)[:, None]
    weight[3, :32] = 0
    weight[4, 32:64] = -1.5
    expected = gguf.quants.quantize(weight.numpy(), theirs(format))
    assert np.array_equal(quantize(weight, format=format).planes["blocks"].numpy(), expected)


@pytest.mark.parametrize(("format", "steps"), [("q4_0", 8), ("q4_1", 15), ("q8_0", 127), ("int8", 127)])
def test_error_is_within_half_a_step(format: str, steps: int) -> None:
    weight = normal(40, 256, seed=1)
    groups = weight.view(40, 1, 256) if format == "int8" else weight.view(40, 8, 32)
    span = groups.amax(-1) - groups.amin(-1) if format == "q4_1" else groups.abs().amax(-1)
    error = (quantize(weight, format=format).dequantize() - weight).view(groups.shape).abs().amax(-1)
    # Codes clipped at 15 miss by a whole step in q4_0; scales are rounded to half precision.
    step = span / steps * (2 if format == "q4_0" else 1)
    assert (error <= step * 0.5 + span * 2e-3).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quantize_reads_other_float_types(dtype: torch.dtype) -> None:
    weight = normal(5, 64).to(dtype)
    for format in FORMATS:
        a, b = quantize(weight, format=format), quantize(weight.float(), format=format)
        assert all(torch.equal(a.planes[name], b.planes[name]) for name in a.planes)


@pytest.mark.parametrize("format", FORMATS)
def test_rows_move_whole(format: str) -> None:
    weight = quantize(normal(12, 64), format=format)
    order = torch.tensor([3, 3, 11, 0])
    dense = weight.dequantize()
    assert torch.equal(weight.gather(order), dense[order])
    assert torch.equal(weight.gather(order.int()), dense[order])
    assert torch.equal(weight.take_rows(order).dequantize(), dense[order])
    assert weight.gather(torch.zeros(0, dtype=torch.int64)).shape == (0, 64)


@pytest.mark.parametrize("format", FORMATS)
def test_cat_keeps_values(format: str) -> None:
    parts = [quantize(normal(n, 96, seed=n), format=format) for n in (3, 5, 1)]
    joined = cat(parts)
    assert joined.shape == (9, 96)
    assert torch.equal(joined.dequantize(), torch.cat([p.dequantize() for p in parts]))
    assert joined.nbytes == sum(p.nbytes for p in parts)


def test_bytes_per_weight() -> None:
    weight = normal(64, 320)
    sizes = {format: quantize(weight, format=format).nbytes * 8 / weight.numel() for format in FORMATS}
    assert sizes == {"q4_0": 4.5, "q4_1": 5.0, "q8_0": 8.5, "int8": 8.1}


def test_zero_rows_stay_zero() -> None:
    for format in FORMATS:
        assert not quantize(torch.zeros(2, 32), format=format).dequantize().any()


def test_blocks_are_not_copied() -> None:
    blocks = random_blocks("q8_0", 4, 64)
    assert QuantTensor.from_blocks(blocks, format="q8_0").planes["blocks"].data_ptr() == blocks.data_ptr()


def test_refusals_name_what_was_found() -> None:
    with pytest.raises(ConfigError, match="'q5_k'"):
        quantize(normal(2, 32), format="q5_k")
    with pytest.raises(ConfigError, match="33 values"):
        quantize(normal(2, 33), format="int8")
    with pytest.raises(ConfigError, match="one format"):
        cat([quantize(normal(2, 32), format="q8_0"), quantize(normal(2, 32), format="int8")])
    with pytest.raises(ConfigError, match="one format"):
        cat([])
    with pytest.raises(ConfigError, match="35 bytes"):
        QuantTensor.from_blocks(torch.zeros(2, 35, dtype=torch.uint8), format="q8_0")
    with pytest.raises(ConfigError, match="expected"):
        QuantTensor("q8_0", (2, 64), {"blocks": torch.zeros(2, 34, dtype=torch.uint8)})
