"""Matrix products on the CPU whose rows do not depend on how many rows there are.

A BLAS picks its inner loops by the number of rows, so a row multiplied alone may differ in its last bits from
the same row in a batch. With at least 8 rows a thread and a multiple of 4 a thread the loops were found to
stay the same (measured: every count from 1 to 700, one and two threads, AVX2). That is a property of one
BLAS on one machine, so it is probed for each shape; where it fails, every product gets exactly `BLOCK` rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

__all__ = ["BLOCK", "multiply", "padded", "rows_agree"]

#: Rows of a product where the number of rows matters.
BLOCK = 32

Product = Callable[[torch.Tensor], torch.Tensor]


def padded(num_rows: int, *, num_threads: int) -> int:
    """Rows to compute for `num_rows` wanted ones."""
    if num_rows >= 8 * num_threads:
        return num_rows
    step = 4 * num_threads
    return -(-num_rows // step) * step


def multiply(x: torch.Tensor, product: Product, *, fixed: bool) -> torch.Tensor:
    """`product(x)` for x [..., T, K] -> [..., T, N], each row the same at every T and place.

    product maps [..., T', K] to [..., T', N] for any T'; `fixed`: T' is always `BLOCK`.
    """
    num_rows = x.shape[-2]
    wanted = -(-num_rows // BLOCK) * BLOCK if fixed else padded(num_rows, num_threads=torch.get_num_threads())
    full = x if wanted == num_rows else F.pad(x, (0, 0, 0, wanted - num_rows))
    if not fixed or wanted == 0:
        return product(full)[..., :num_rows, :]
    blocks = [product(block) for block in full.split(BLOCK, dim=-2)]
    return torch.cat(blocks, dim=-2)[..., :num_rows, :]


def rows_agree(product: Product, shape: tuple[int, ...], *, dtype: torch.dtype, num_rows: int = 160) -> bool:
    """Whether `multiply(fixed=False)` gives one row the same bits in batches of every tried size and place.

    shape: of one operand, [..., K]; rows are inserted before the last dimension.
    """
    source = torch.Generator().manual_seed(20)
    x = torch.randn((*shape[:-1], num_rows, shape[-1]), generator=source, dtype=torch.float32).to(dtype)
    whole = product(x)
    small = 8 * torch.get_num_threads()
    counts = sorted({*range(1, small + 4), *range(small, num_rows, 29)})
    for place, count in enumerate(counts):
        first = min(place * 5, num_rows - count)
        part = x[..., first : first + count, :]
        if not torch.equal(multiply(part, product, fixed=False), whole[..., first : first + count, :]):
            return False
    return True
