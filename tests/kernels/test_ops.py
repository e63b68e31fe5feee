"""Binding ops."""

import json

import pytest

from deepinfer.errors import ConfigError, PartUnavailable, RegistryError, UnknownPart
from deepinfer.kernels import OPS, bind_ops, reference
from deepinfer.kinds import OP_KINDS
from deepinfer.record import Record
from deepinfer.registry import Registry

NEED = {"device": "cpu", "dtype": "float32", "head_dim": 64, "page_tokens": 16}


def factory(*, device, dtype, invariant):
    return f"mine on {device}, {dtype}, {invariant}"


@pytest.fixture
def registry():
    return Registry(plugins=())


def test_the_table_covers_every_op():
    assert tuple(OPS) == OP_KINDS
    assert all(contract.protocol is not None and contract.shapes for contract in OPS.values())


def test_wanted_names_are_bound(registry):
    ops = bind_ops(**NEED, want={"attention": "reference", "op.linear": "eager"}, registry=registry)
    assert ops.attention is reference.attention
    assert (ops.names["attention"], ops.names["linear"]) == ("reference", "eager")
    again = json.loads(json.dumps(ops.config()))
    assert bind_ops(want=again["names"], registry=registry, **again["need"]).names == ops.names


def test_a_registered_part_wins_by_priority_and_gets_its_keywords(registry):
    registry.register(Record("op.sample", "mine", factory, priority=500))
    ops = bind_ops(device="cpu", dtype="torch.float32", head_dim=64, page_tokens=16, invariant=True, registry=registry)
    assert ops.sample == "mine on cpu, float32, True"
    assert ops.names["sample"] == "mine"


def test_refusals(registry):
    with pytest.raises(ConfigError, match="attnetion"):
        bind_ops(**NEED, want={"attnetion": "eager"}, registry=registry)
    with pytest.raises(UnknownPart, match="warp"):
        bind_ops(**NEED, want={"attention": "warp"}, registry=registry)
    with pytest.raises(PartUnavailable, match="triton"):
        bind_ops(**{**NEED, "head_dim": 512}, want={"attention": "triton"}, registry=registry)


def bundled(registry, kinds, *, refuse=()):
    for kind in kinds:
        accepts = (lambda **_: "not here") if kind in refuse else None
        registry.register(Record(kind, "paired", factory, priority=500, bundle="layout", accepts=accepts))


def test_a_bundle_is_taken_whole(registry):
    bundled(registry, ("op.cache_write", "op.attention"))
    registry.register(Record("op.cache_write", "loud", factory, priority=900))
    names = bind_ops(**NEED, registry=registry).names
    assert (names["cache_write"], names["attention"]) == ("paired", "paired")


def test_or_not_at_all(registry):
    bundled(registry, ("op.cache_write", "op.attention"), refuse=("op.cache_write",))
    names = bind_ops(**NEED, registry=registry).names
    assert "paired" not in names.values()
    with pytest.raises(PartUnavailable, match="layout"):
        bind_ops(**NEED, want={"attention": "paired"}, registry=registry)


def test_a_wanted_outsider_breaks_a_bundle(registry):
    bundled(registry, ("op.cache_write", "op.attention"))
    names = bind_ops(**NEED, want={"cache_write": "reference"}, registry=registry).names
    assert (names["cache_write"], names["attention"] == "paired") == ("reference", False)


def test_errors_are_registry_errors():
    with pytest.raises(RegistryError):
        bind_ops(**NEED, registry=Registry(plugins=(), builtin=False))
