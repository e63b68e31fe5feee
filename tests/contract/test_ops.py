"""Every implementation that is registered and usable here keeps the contract of its op."""

import pytest
import torch

from deepinfer.kinds import OP_KINDS
from deepinfer.registry import Registry
from deepinfer.testing import check_op

REGISTRY = Registry(plugins=())
CASES = [
    (kind, record.name, dtype, invariant)
    for kind in OP_KINDS
    for record in REGISTRY.records(kind)
    for dtype in ("float32", "bfloat16")
    for invariant in (False, True)
    if record.why_not({"device": "cpu", "dtype": dtype, "invariant": invariant}) is None
]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_something_is_checked():
    assert {name for _, name, _, _ in CASES} >= {"reference", "eager"}
    assert {kind for kind, _, _, _ in CASES} == set(OP_KINDS)


@pytest.mark.parametrize(("kind", "name", "dtype", "invariant"), CASES)
def test_quick(kind, name, dtype, invariant):
    check_op(kind, name, dtype=dtype, invariant=invariant, quick=True, registry=REGISTRY)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name", "dtype", "invariant"), CASES)
def test_full(kind, name, dtype, invariant):
    check_op(kind, name, dtype=dtype, invariant=invariant, registry=REGISTRY)
