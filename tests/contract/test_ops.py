"""Every implementation that is registered and usable here keeps the contract of its op."""

import pytest

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


pytestmark = pytest.mark.usefixtures("one_thread")


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
