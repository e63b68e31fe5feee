"""Contract cases of the ops on pages: cache writes and attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from ..kernels import reference
from .compare import TOLERANCES, row_error, same_bits, unchanged, widened
from .invariance import assert_batch_invariant
from .paged import PagedBatch, Sequence, make_paged_batch
from .report import CaseResult

__all__ = ["check_attention", "check_cache_write"]

#: G, D, Z of cache writes.
WRITES = ((3, 80, 4), (2, 32, 16), (1, 64, 32))
#: H, G, D, Z of attention.
SHAPES = ((4, 2, 32, 16), (5, 1, 80, 8), (9, 3, 64, 16), (4, 4, 128, 64), (3, 1, 192, 4))


@attrs.frozen
class _Case:
    name: str
    #: (new tokens, keys) of each row.
    rows: tuple[tuple[int, int], ...]
    num_decode: int = 0
    slack: int = 0


def _cases(z: int) -> tuple[_Case, ...]:
    """Ragged edges for pages of z tokens."""
    return (
        _Case("no rows", ()),
        _Case("only empty rows", ((0, 3), (0, z))),
        _Case("one key", ((1, 1),), num_decode=1),
        _Case("decode at page edges", ((1, z), (1, z + 1), (1, 2 * z), (1, 3 * z - 1)), num_decode=4),
        _Case("whole prompts", ((z, z), (2 * z + 3, 2 * z + 3), (1, 1))),
        _Case("chunks that continue", ((3, 2 * z), (z, 2 * z + 1), (2, z + 1))),
        _Case("mixed with empty rows", ((1, 5), (1, z), (0, 7), (4, z + 2), (0, z), (1, z + 5), (0, 2)), num_decode=2),
        _Case("bounds too high", ((1, 2), (1, z + 3), (5, z + 6)), num_decode=2, slack=9),
        _Case("many decode rows", tuple((1, 1 + 5 * i % (2 * z)) for i in range(19)), num_decode=19),
        _Case("decode rows as chunks", ((1, 4), (1, z + 2))),
        _Case("long", ((1, 700), (18, 600)), num_decode=1),
    )


def check_cache_write(
    op: Callable[..., Any], *, device: str, dtype: torch.dtype, invariant: bool, quick: bool = False
) -> list[CaseResult]:
    results = []
    for num_kv_heads, width, page_tokens in WRITES[:1] if quick else WRITES:
        for case in _cases(page_tokens):
            what = f"cache_write, {case.name}, G={num_kv_heads} D={width} Z={page_tokens}"
            batch = _batch(case, (num_kv_heads, num_kv_heads, width, page_tokens), device, dtype)
            fused = torch.cat((batch.k, batch.v, batch.k), dim=1)
            k, v = fused[:, :num_kv_heads], fused[:, num_kv_heads : 2 * num_kv_heads]
            pools = [torch.full_like(pool, torch.nan) for pool in (batch.k_pool, batch.v_pool)]
            expected = [pool.cpu().clone() for pool in pools]
            cpu = batch.to("cpu", dtype)
            with unchanged((fused, batch.page_table), what=what):
                op(k, v, pools[0], pools[1], batch.page_table, batch.rows)
            reference.cache_write(k.cpu(), v.cpu(), expected[0], expected[1], cpu.page_table, cpu.rows)
            for pool, exact, name in zip(pools, expected, ("keys", "values"), strict=True):
                assert same_bits(pool.cpu(), exact), (
                    f"{what}: the pool of {name} differs from the reference at lines "
                    f"{_lines(pool.cpu(), exact)} (page, line); expected each token at its page, all else untouched"
                )
            results.append(CaseResult(what, 0.0))
    return results


def check_attention(
    op: Callable[..., Any], *, device: str, dtype: torch.dtype, invariant: bool, quick: bool = False
) -> list[CaseResult]:
    results = []
    for shape in SHAPES[:2] if quick else SHAPES:
        for case in _cases(shape[3]):
            if case.name == "long" and shape[2] > 64:
                continue
            num_heads, num_kv_heads, width, page_tokens = shape
            what = f"attention, {case.name}, H={num_heads} G={num_kv_heads} D={width} Z={page_tokens}"
            batch = _batch(case, shape, device, dtype)
            results.append(CaseResult(what, _attention_error(op, batch, what)))
    places = [_attend(op, _batch(_cases(16)[6], (4, 2, 32, 16), device, dtype, seed=seed)) for seed in (1, 2)]
    assert same_bits(*places), "attention: the result depends on which pages hold the keys; expected equal bits"
    results.append(CaseResult("attention, other pages", 0.0))
    if invariant:
        for shape in ((6, 2, 64, 16), (4, 1, 128, 32)):
            _attention_invariant(op, shape, device, dtype)
        results.append(CaseResult("attention invariance", 0.0))
    return results


def _attention_error(op: Callable[..., Any], batch: PagedBatch, what: str) -> float:
    tensors = (batch.q, batch.k_pool, batch.v_pool, batch.page_table, batch.rows.k_len, batch.rows.cu_q)
    with unchanged(tensors, what=what):
        out = _attend(op, batch)
    assert out.dtype == batch.q.dtype, f"{what}: the result is {out.dtype}; expected {batch.q.dtype}, as the queries"
    cpu = batch.to("cpu", torch.float64)
    exact = reference.attention(cpu.q, cpu.k_pool, cpu.v_pool, cpu.page_table, cpu.rows, scale=_scale(batch.q.shape[2]))
    return row_error(out, widened(exact), what=what, tolerance=TOLERANCES[batch.q.dtype])


def _attention_invariant(
    op: Callable[..., Any], shape: tuple[int, int, int, int], device: str, dtype: torch.dtype
) -> None:
    """Sequences of several lengths as whole prompts, in chunks, decoded, alone and together."""
    num_heads, num_kv_heads, width, page_tokens = shape
    lengths = {1: 150, 2: 33, 3: 1051, 4: 9}
    tails = [(ident, length - 1, length) for ident, length in lengths.items()]

    def compute(batch: tuple[int, tuple[tuple[int, int, int], ...]]) -> dict[Any, torch.Tensor]:
        num_decode, parts = batch
        made = make_paged_batch(
            [Sequence(end - start, end, ident) for ident, start, end in parts],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            width=width,
            page_tokens=page_tokens,
            num_decode=num_decode,
            seed=len(parts),
        ).to(device, dtype)
        out = _attend(op, made)
        items = [(ident, pos) for ident, start, end in parts for pos in range(start, end)]
        return dict(zip(items, out, strict=True))

    batches: list[tuple[int, tuple[tuple[int, int, int], ...]]] = [
        (0, ((1, 0, 150), (2, 0, 33), (4, 0, 9))),
        (0, ((3, 1010, 1051),)),
        (4, tuple(tails)),
        (2, (*tails[1:3], (1, 100, 150), (4, 3, 9))),
        (0, ((1, 0, 70), (2, 5, 33))),
        (0, ((1, 70, 150), (3, 1046, 1051), (2, 0, 5))),
        (0, ((3, 1049, 1051),)),
        *((1, (tail,)) for tail in tails),
        *((0, (tail,)) for tail in tails),
        (1, ((1, 64, 65),)),
        (3, ((3, 1023, 1024), (3, 1024, 1025), (3, 1050, 1051))),
        (0, ((1, 64, 66), (1, 30, 34))),
    ]
    assert_batch_invariant(compute, batches, what=f"attention H={num_heads} G={num_kv_heads} D={width}")


def _attend(op: Callable[..., Any], batch: PagedBatch) -> torch.Tensor:
    """Queries are a strided view, as a fused projection leaves them."""
    fused = torch.cat((batch.q, batch.k), dim=1)
    q = fused[:, : batch.q.shape[1]]
    return op(q, batch.k_pool, batch.v_pool, batch.page_table, batch.rows, scale=_scale(q.shape[2]))


def _batch(
    case: _Case, shape: tuple[int, int, int, int], device: str, dtype: torch.dtype, *, seed: int = 0
) -> PagedBatch:
    num_heads, num_kv_heads, width, page_tokens = shape
    sequences = [Sequence(num_new, k_len, ident) for ident, (num_new, k_len) in enumerate(case.rows)]
    return make_paged_batch(
        sequences,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        width=width,
        page_tokens=page_tokens,
        num_decode=case.num_decode,
        slack=case.slack,
        seed=seed,
    ).to(device, dtype)


def _scale(width: int) -> float:
    return width**-0.5


def _lines(pool: torch.Tensor, exact: torch.Tensor) -> str:
    view = (x.contiguous().view(torch.uint8).flatten(2) for x in (pool, exact))
    wrong = torch.ne(*view).any(dim=2).nonzero().tolist()
    return ", ".join(map(str, wrong[:4])) + (", ..." if len(wrong) > 4 else "")
