"""Checks Triton ops in Triton's interpreter: `interpret_ops.py DTYPES OPS QUICK`; prints JSON.

Run by test_triton.py in a process of its own: the interpreter is chosen by TRITON_INTERPRET when kernels are defined.
"""

import functools
import json
import sys
from collections.abc import Callable

import torch

from deepinfer.kernels import noise, triton
from deepinfer.kernels.triton import sampling
from deepinfer.kernels.triton.attention import PagedAttention
from deepinfer.testing import check_op
from deepinfer.testing.paged_ops import check_attention


def outcome(check: Callable[[], object]) -> str:
    try:
        return str(check())
    except AssertionError as error:
        return f"FAILED {error}"


def fixed_splits() -> str:
    """The merge of invariant mode; bits are only comparable on a GPU."""
    op = PagedAttention(device="cpu", invariant=True)
    cases = check_attention(op, device="cpu", dtype=torch.float32, invariant=False, quick=True)
    return f"{len(cases)} cases"


def equal_noise() -> str:
    seed, pos = torch.tensor([1, -7, 2**61 + 9]), torch.tensor([5, 0, 10**6], dtype=torch.int32)
    index = torch.tensor([0, 3, 1], dtype=torch.int32)
    mine = sampling.noise_row(seed, index, pos, vocab_size=3001, purpose=2)
    assert torch.equal(mine, noise.gumbel_row(seed, index, pos, vocab_size=3001, purpose=2)), "other noise bits"
    return "equal"


def main(dtypes: list[str], ops: list[str], quick: bool) -> None:
    torch.set_num_threads(1)
    found = {}
    for dtype in dtypes:
        for op in ops:
            check = functools.partial(check_op, op, getattr(triton, f"make_{op}"), dtype=dtype, quick=quick)
            found[f"{op} {dtype}"] = outcome(check)
    found |= {"attention, fixed splits": outcome(fixed_splits), "noise": outcome(equal_noise)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1].split(","), sys.argv[2].split(","), sys.argv[3] == "1")
