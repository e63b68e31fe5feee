"""Everything registered by this library exists, loads and is what its kind says."""

from __future__ import annotations

import inspect

import pytest

from deepinfer.environment import Settings, load_environment
from deepinfer.errors import PartUnavailable
from deepinfer.kinds import KINDS, OP_KINDS
from deepinfer.record import load
from deepinfer.registry import Registry
from deepinfer.testing import counting_hook_calls

RECORDS = Registry(plugins=()).records()
CPU = {"device": "cpu", "dtype": "float32", "invariant": False}


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: f"{r.kind}-{r.name}")
def test_every_target_can_be_imported_and_called(record):
    for target in (record.factory, record.probe, record.accepts):
        if target is not None:
            assert isinstance(target, str)
            assert callable(load(target))


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: f"{r.kind}-{r.name}")
def test_every_factory_takes_the_keywords_of_its_kind(record):
    keywords = dict.fromkeys(KINDS[record.kind].keywords)
    inspect.signature(load(record.factory)).bind(**keywords)


@pytest.mark.parametrize("record", [r for r in RECORDS if r.kind in OP_KINDS], ids=lambda r: f"{r.kind}-{r.name}")
def test_what_an_op_factory_makes_offers_the_protocol(record):
    registry = Registry(plugins=())
    if record.why_not(CPU) is not None:
        with pytest.raises(PartUnavailable):
            registry.select(record.kind, name=record.name, need=CPU)
        return
    op = registry.create(record, **CPU)
    assert callable(op)
    assert record.kind != "op.linear" or callable(op.pack)


@pytest.mark.parametrize("kind", [kind for kind, row in KINDS.items() if row.check is not None])
def test_every_contract_check_named_by_a_kind_exists(kind):
    assert callable(load(KINDS[kind].check))


def test_hook_calls_are_counted_across_registries():
    with counting_hook_calls() as calls:
        first, second = Registry(plugins=()), Registry(plugins=())
        assert len(calls) == 0
        first.collect()
        second.collect()
        assert calls.names == ["deepinfer_records"] * 2
        for _ in range(10):
            first.resolve("accelerator", name="cpu")
        assert len(calls) == 2
    third = Registry(plugins=())
    third.collect()
    assert len(calls) == 2


def test_the_environment_is_read_when_asked_and_empty_means_none(tmp_path):
    assert load_environment({}) == Settings(accelerator=None, hf_model_dir=None, plugins=None)
    assert load_environment({"DEEPINFER_PLUGINS": ""}).plugins == ()
    assert load_environment({"DEEPINFER_PLUGINS": " a, b ,"}).plugins == ("a", "b")
    found = load_environment({"DEEPINFER_ACCELERATOR": "nvidia", "DEEPINFER_HF_MODEL_DIR": str(tmp_path)})
    assert (found.accelerator, found.hf_model_dir) == ("nvidia", tmp_path)


@pytest.mark.parametrize(("invariant", "linear"), [(False, "eager"), (True, "triton")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_products_are_the_vendors_unless_invariant(monkeypatch, dtype, invariant, linear):
    monkeypatch.setattr("deepinfer.kernels.usable.triton_probe", lambda: None)
    registry = Registry(plugins=())
    need = {"device": "cuda", "dtype": dtype, "invariant": invariant, "head_dim": 64, "page_tokens": 16}
    names = {kind: registry.select(kind, need=need).name for kind in OP_KINDS}
    assert names == dict.fromkeys(OP_KINDS, "triton") | {"op.linear": linear}
