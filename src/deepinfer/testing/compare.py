"""Comparisons with a tolerance a row, or bit by bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

__all__ = ["TOLERANCES", "row_error", "same_bits", "unchanged", "widened"]

#: Largest ‖out - ref‖ / ‖ref‖ of any row, by dtype. One rounding of each result costs 2**-9 (bfloat16) at most;
#: a wrong key, head or row costs tens of percent.
TOLERANCES = {torch.float32: 3e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


def widened(x: torch.Tensor) -> torch.Tensor:
    """The same values in float64 on the CPU, for the reference."""
    return x.detach().to("cpu", torch.float64)


def row_error(out: torch.Tensor, ref: torch.Tensor, *, what: str, tolerance: float) -> float:
    """Largest relative error of any row of `out` [T, ...] against float64 `ref`.

    Raises:
        AssertionError: another shape, a NaN, or an error above the tolerance; the message names the row.
    """
    assert out.shape == ref.shape, f"{what}: the result has shape {tuple(out.shape)}; expected {tuple(ref.shape)}"
    if not out.numel():
        return 0.0
    wide, exact = widened(out).flatten(1), ref.flatten(1)
    bad = (~wide.isfinite()).any(dim=1).nonzero()
    assert not len(bad), f"{what}: row {int(bad[0])} of {len(wide)} holds NaN or infinity; expected finite numbers"
    errors = (wide - exact).norm(dim=1) / exact.norm(dim=1).clamp_min(1e-30)
    worst = int(errors.argmax())
    error = float(errors[worst])
    assert error <= tolerance, (
        f"{what}: row {worst} of {len(wide)} is off by {error:.2e} of its norm; expected at most {tolerance:.0e} "
        f"(first numbers {wide[worst, :3].tolist()}, reference {exact[worst, :3].tolist()})"
    )
    return error


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Equal shape, dtype and bytes; NaN equals NaN."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    return torch.equal(x.flatten().contiguous().view(torch.uint8), y.flatten().contiguous().view(torch.uint8))


@contextmanager
def unchanged(tensors: Sequence[torch.Tensor], *, what: str) -> Iterator[None]:
    """Checks that the block leaves the tensors as they were.

    Raises:
        AssertionError: one of them changed.
    """
    before = [x.clone() for x in tensors]
    yield
    for number, (x, copy) in enumerate(zip(tensors, before, strict=True)):
        assert same_bits(x, copy), f"{what}: input {number} was changed; an op must leave its inputs alone"
