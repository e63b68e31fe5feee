"""Contract cases of sampling: every id must be the reference's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..kernels import reference
from .compare import unchanged
from .report import CaseResult

__all__ = ["check_sample"]

#: Rows and columns.
SIZES = ((0, 10), (1, 1), (3, 2107), (3, 7), (9, 1003), (2, 9001))


def check_sample(
    op: Callable[..., Any], *, device: str, dtype: torch.dtype, invariant: bool, quick: bool = False
) -> list[CaseResult]:
    """Logits are float32 whatever `dtype` says; ids are exact, hence invariant."""
    results = []
    for count, width in SIZES[:3] if quick else SIZES:
        for listed in (False, True):
            for strided in (False, True):
                what = f"sample [{count}, {width}]{' of listed ids' if listed else ''}{' strided' if strided else ''}"
                _same_ids(op, _inputs(count, width, listed=listed, strided=strided), device, what)
                results.append(CaseResult(what, 0.0))
    _same_ids(op, _edges(), device, "sample, ties and -inf")
    results.append(CaseResult("sample, ties and -inf", 0.0))
    return results


def _inputs(count: int, width: int, *, listed: bool, strided: bool) -> dict[str, Any]:
    source = torch.Generator().manual_seed(100 * count + width)
    logits = torch.randn((count, width + (13 if strided else 0)), generator=source) * 3
    wide = torch.rand((count, 3 * width), generator=source).argsort(dim=1)[:, :width].sort(dim=1)[0]
    return {
        "logits": logits[:, 5 : 5 + width] if strided else logits,
        "greedy": torch.arange(count) % 3 == 1,
        "seed": torch.randint(-(2**62), 2**62, (count,), generator=source),
        "sample_index": torch.arange(count, dtype=torch.int32) % 4,
        "pos": torch.randint(0, 2**20, (count,), generator=source).to(torch.int32),
        "purpose": 0,
        "token_ids": wide if listed else None,
    }


def _edges() -> dict[str, Any]:
    inputs = _inputs(8, 5000, listed=False, strided=False)
    logits = inputs["logits"]
    logits[:2] = 1.0
    logits[2, [4000, 17, 2500]] = 50.0
    logits[3] = -torch.inf
    logits[4] = -torch.inf
    logits[4, 4711] = -3.0
    logits[5, :4990] = -torch.inf
    logits[6, [4999, 4998]] = 40.0
    inputs["greedy"] = torch.tensor([True, False, True, True, False, False, True, False])
    return inputs | {"purpose": 3}


def _same_ids(op: Callable[..., Any], inputs: dict[str, Any], device: str, what: str) -> None:
    moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    if inputs["logits"].stride(0) != inputs["logits"].shape[1] and len(inputs["logits"]):
        # Moving made the view dense again.
        base = torch.cat((moved["logits"], moved["logits"]), dim=1)
        moved["logits"] = base[:, : inputs["logits"].shape[1]]
    tensors = [x for x in moved.values() if isinstance(x, torch.Tensor)]
    with unchanged(tensors, what=what):
        out = op(moved.pop("logits"), **moved)
    exact = reference.sample(inputs["logits"], **{k: x for k, x in inputs.items() if k != "logits"})
    assert out.dtype == torch.int64, f"{what}: ids are {out.dtype}; expected int64"
    wrong = (out.cpu() != exact).nonzero().flatten().tolist() if out.shape == exact.shape else ["shape"]
    assert not wrong, (
        f"{what}: rows {wrong[:5]} give {out.cpu()[:8].tolist()}; expected {exact[:8].tolist()} "
        "(argmax of logits plus kernels.noise.gumbel, lowest column on ties)"
    )
