"""Contract cases of the ops on token rows: norm, rotary positions, activation, linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..kernels import reference
from ..kernels.quant import quantize
from .compare import TOLERANCES, row_error, same_bits, unchanged, widened
from .invariance import assert_batch_invariant, row_batches
from .report import CaseResult

__all__ = ["check_linear", "check_rms_norm", "check_rope", "check_silu_mul"]

#: An op may compute with quantised weights in 8 bits (1.7 % on Gaussian data, more on a single short row).
QUANTISED_TOLERANCE = 0.06
#: Rows of the batches that the other batches are compared with.
MANY = 150
COUNTS = (0, 1, 2, 3, 17)
FEW_COUNTS = (0, 1, 5)
#: Head width, query heads, key/value heads.
HEADS = ((80, 5, 1), (32, 18, 2), (64, 9, 3), (128, 4, 4))
#: Outputs and inputs of a weight.
WEIGHTS = ((130, 100), (17, 40), (48, 32), (64, 576))


def check_rms_norm(
    op: Callable[..., Any], *, device: str, dtype: torch.dtype, invariant: bool, quick: bool = False
) -> list[CaseResult]:
    cases = []
    for count in FEW_COUNTS if quick else COUNTS:
        for width in (100,) if quick else (32, 100, 576):
            for strided in (False, True):
                what = f"rms_norm [{count}, {width}]{' strided' if strided else ''}"
                x, residual = (_draw(count, width, device, dtype, seed=s, strided=strided) for s in (1, 2))
                weight = _draw(1, width, device, dtype, seed=3)[0]
                for extra in (None, residual):
                    error = _rms_norm_error(op, x, weight, extra, what)
                    cases.append(CaseResult(f"{what}{'' if extra is None else ' with residual'}", error))
    loud = _draw(3, 64, device, dtype, seed=4) * 100
    loud[1] = 0
    cases.append(CaseResult("rms_norm of a zero row", _rms_norm_error(op, loud, loud[0] / 100, None, "zero row")))
    if invariant:
        x, weight = _draw(MANY, 576, device, dtype, seed=5), _draw(1, 576, device, dtype, seed=6)[0]
        _rows_invariant(lambda rows: op(rows, weight, eps=1e-5, residual=rows * 2)[0], x, "rms_norm")
        cases.append(CaseResult("rms_norm invariance", 0.0))
    return cases


def _rms_norm_error(
    op: Callable[..., Any], x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, what: str
) -> float:
    tensors = [x, weight] + ([] if residual is None else [residual])
    with unchanged(tensors, what=what):
        normed, total = op(x, weight, eps=1e-5, residual=residual)
    expected = x if residual is None else (widened(x) + widened(residual)).to(x.dtype).to(x.device)
    row_error(total, widened(expected), what=f"{what}, sum", tolerance=1e-30)
    assert normed.dtype == x.dtype, f"{what}: the result is {normed.dtype}; expected {x.dtype}, as the input"
    exact, _ = reference.rms_norm(widened(expected), widened(weight), eps=1e-5)
    return row_error(normed, exact, what=what, tolerance=TOLERANCES[x.dtype])


def check_rope(
    op: Callable[..., Any], *, device: str, dtype: torch.dtype, invariant: bool, quick: bool = False
) -> list[CaseResult]:
    cases = []
    for width, heads, kv_heads in HEADS[:2] if quick else HEADS:
        angles = torch.arange(300)[:, None] / 100.0 ** (torch.arange(width // 2) / (width // 2))
        table = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
        for count in FEW_COUNTS if quick else COUNTS:
            what = f"rope T={count} H={heads} G={kv_heads} D={width}"
            # One tensor holds queries, keys and values, as a fused projection leaves them.
            fused = _draw(count, (heads + 2 * kv_heads) * width, device, dtype, seed=7)
            q, k, _ = fused.view(count, heads + 2 * kv_heads, width).split((heads, kv_heads, kv_heads), dim=1)
            pos = torch.randint(0, 300, (count,), generator=torch.Generator().manual_seed(8)).to(device, torch.int32)
            with unchanged((fused, pos, table), what=what):
                turned = op(q, k, pos, cos_sin=table)
            exact = reference.rope(widened(q), widened(k), pos.cpu(), cos_sin=widened(table))
            errors = [
                row_error(x, y, what=f"{what}, {name}", tolerance=TOLERANCES[dtype])
                for x, y, name in zip(turned, exact, ("queries", "keys"), strict=True)
            ]
            cases.append(CaseResult(what, max(errors)))
    if invariant:
        x = _draw(MANY, 256, device, dtype, seed=9)
        pos = torch.arange(MANY, dtype=torch.int32, device=device)
        table = _draw(MANY, 64, device, torch.float32, seed=10)

        def turn(numbers: list[int]) -> dict[Any, torch.Tensor]:
            rows = x[numbers].view(-1, 4, 64)
            q, k = op(rows, rows[:, :1], pos[numbers], cos_sin=table)
            return {n: torch.cat((q[i], k[i])) for i, n in enumerate(numbers)}

        assert_batch_invariant(turn, row_batches(MANY), what="rope")
        cases.append(CaseResult("rope invariance", 0.0))
    return cases


def check_silu_mul(
    op: Callable[..., Any], *, device: str, dtype: torch.dtype, invariant: bool, quick: bool = False
) -> list[CaseResult]:
    cases = []
    for count in FEW_COUNTS if quick else COUNTS:
        for width in (75,) if quick else (16, 75, 1536):
            for strided in (False, True):
                what = f"silu_mul [{count}, {2 * width}]{' strided' if strided else ''}"
                x = _draw(count, 2 * width, device, dtype, seed=11, strided=strided) * 3
                with unchanged((x,), what=what):
                    out = op(x)
                error = row_error(out, reference.silu_mul(widened(x)), what=what, tolerance=TOLERANCES[dtype])
                cases.append(CaseResult(what, error))
    if invariant:
        _rows_invariant(op, _draw(MANY, 2 * 300, device, dtype, seed=12), "silu_mul")
        cases.append(CaseResult("silu_mul invariance", 0.0))
    return cases


def check_linear(op: Any, *, device: str, dtype: torch.dtype, invariant: bool, quick: bool = False) -> list[CaseResult]:
    cases = []
    for num_out, num_in in WEIGHTS[:2] if quick else WEIGHTS:
        weight = _draw(num_out, num_in, device, dtype, seed=13) / num_in**0.5
        bias = _draw(1, num_out, device, dtype, seed=14)[0]
        for extra in (None, bias):
            with unchanged((weight, bias), what="pack"):
                packed = op.pack(weight, extra)
            for count in (*FEW_COUNTS, 70) if quick else (*COUNTS, 64, 70, 300):
                for strided in (False, True):
                    what = f"linear [{count}, {num_in}] x [{num_out}, {num_in}]{' strided' if strided else ''}"
                    x = _draw(count, num_in, device, dtype, seed=15, strided=strided)
                    with unchanged((x,), what=what):
                        out = op(x, packed)
                    exact = widened(x) @ widened(weight).T + (0 if extra is None else widened(extra))
                    cases.append(CaseResult(what, row_error(out, exact, what=what, tolerance=TOLERANCES[dtype])))
    cases += [_quantised_linear(op, name, device, dtype) for name in ("q4_1", "q8_0", "int8")]
    if invariant:
        for num_out, num_in in ((48, 32), (130, 100), (96, 576)):
            packed = op.pack(_draw(num_out, num_in, device, dtype, seed=16))
            rows = _draw(300, num_in, device, dtype, seed=17)
            _rows_invariant(lambda x, p=packed: op(x, p), rows, f"linear [{num_out}, {num_in}]")
        cases.append(CaseResult("linear invariance", 0.0))
    return cases


def _quantised_linear(op: Any, name: str, device: str, dtype: torch.dtype) -> CaseResult:
    what = f"linear with {name} weight"
    weight = quantize(_draw(40, 96, "cpu", torch.float32, seed=18), format=name)
    bias, x = _draw(1, 40, device, dtype, seed=19)[0], _draw(7, 96, device, dtype, seed=20)
    exact = widened(x) @ widened(weight.dequantize()).T + widened(bias)
    with unchanged((x, bias, *weight.planes.values()), what=what):
        out = op(x, op.pack(weight, bias))
    return CaseResult(what, row_error(out, exact, what=what, tolerance=QUANTISED_TOLERANCE))


def _rows_invariant(compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, what: str) -> None:
    def run(numbers: list[int]) -> dict[Any, torch.Tensor]:
        out = compute(x[numbers])
        return {number: out[i] for i, number in enumerate(numbers)}

    assert_batch_invariant(run, row_batches(x.shape[0]), what=what)
    assert same_bits(compute(x), compute(x)), f"{what}: two runs of one batch differ; expected equal bits"


def _draw(count: int, width: int, device: str, dtype: torch.dtype, *, seed: int, strided: bool = False) -> torch.Tensor:
    """Normal numbers [count, width]; strided: a view whose lines lie further apart."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn((count, width + (24 if strided else 0)), generator=source).to(device, dtype)
    return x[:, 8 : 8 + width] if strided else x
