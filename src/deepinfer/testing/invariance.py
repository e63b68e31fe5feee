"""Batch invariance: an item's result is the same bits whatever it is computed with."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch

from .compare import same_bits

__all__ = ["assert_batch_invariant", "row_batches"]


def assert_batch_invariant(
    compute: Callable[[Any], Mapping[Hashable, torch.Tensor]], batches: Iterable[Any], *, what: str = "op"
) -> int:
    """Computes every batch and compares, bit by bit, the results of items that occur in several.

    Args:
        compute: batch -> {item: its result}. What names an item (a row number, a sequence and position) is yours.
        batches: descriptions of batches in the form that `compute` takes.
        what: name used in the message.

    Returns:
        how many comparisons were made.

    Raises:
        AssertionError: an item's bits differ between two batches, or no item occurred twice.
    """
    seen: dict[Hashable, tuple[torch.Tensor, Any]] = {}
    compared = 0
    for batch in batches:
        for item, result in compute(batch).items():
            if item not in seen:
                seen[item] = result.clone(), batch
                continue
            first, earlier = seen[item]
            compared += 1
            assert same_bits(first, result), (
                f"{what}: the result of {item!r} depends on its batch: batches {_short(earlier)} and {_short(batch)} "
                f"differ by up to {_distance(first, result):.1e}; expected equal bits"
            )
    assert compared, f"{what}: no item occurred in two batches, so nothing was compared; give overlapping batches"
    return compared


def row_batches(num_rows: int, *, seed: int = 0) -> list[list[int]]:
    """Batches of row numbers that overlap in every way that has broken invariance: alone, few, odd counts, all,
    reversed, shifted."""
    source = torch.Generator().manual_seed(seed)
    every = list(range(num_rows))
    batches = [every, every[::-1], every[1:], *([row] for row in every[:4])]
    counts = [count for count in (2, 3, 5, 7, 8, 9, 12, 15, 16, 17, 31, 33, 64, 65, 129) if count < num_rows]
    return batches + [torch.randperm(num_rows, generator=source)[:count].tolist() for count in counts]


def _short(batch: Any) -> str:
    text = repr(batch)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _distance(x: torch.Tensor, y: torch.Tensor) -> float:
    if x.shape != y.shape:
        return float("inf")
    return float((x.double() - y.double()).abs().max())
