"""Accelerators: the best that is there, or the one named, or why not."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from deepinfer import accelerator
from deepinfer.accelerator import TorchAccelerator, choose_accelerator
from deepinfer.errors import PartUnavailable, UnknownPart
from deepinfer.record import Record
from deepinfer.registry import Registry


@pytest.fixture
def registry():
    return Registry(plugins=())


def test_a_plugins_accelerator_is_chosen_by_priority_and_the_cpu_is_always_there(registry):
    xpu = TorchAccelerator("xpu", "xpu", "float16")
    registry.register(Record("accelerator", "xpu", lambda: xpu, priority=1000))
    assert choose_accelerator(registry=registry) is xpu
    assert choose_accelerator("cpu", registry=registry) == TorchAccelerator("cpu", "cpu", "float32")


def test_an_unknown_accelerator_lists_the_known(registry):
    with pytest.raises(UnknownPart, match="known: ascend, cpu, nvidia"):
        choose_accelerator("nvida", registry=registry)


def test_without_a_driver_there_is_no_nvidia_and_the_cpu_is_chosen(registry, monkeypatch, tmp_path):
    monkeypatch.setattr(accelerator, "NVIDIA_NODES", (str(tmp_path / "nvidiactl"),))
    with pytest.raises(PartUnavailable, match="no NVIDIA driver is loaded"):
        choose_accelerator("nvidia", registry=registry)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built with CUDA")
def test_a_driver_is_not_enough_when_torch_is_built_without_cuda(monkeypatch, tmp_path):
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(accelerator, "NVIDIA_NODES", (str(tmp_path / "nvidiactl"),))
    assert "built without CUDA" in accelerator.why_no_nvidia()


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch-npu is installed")
def test_without_torch_npu_there_is_no_ascend_and_the_extra_is_named(registry):
    with pytest.raises(PartUnavailable, match=r"deepinfer\[ascend\]"):
        choose_accelerator("ascend", registry=registry)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_an_nvidia_gpu_computes_in_the_type_it_names(registry):
    chosen = choose_accelerator(registry=registry)
    assert (chosen.name, chosen.device) == ("nvidia", "cuda")
    x = torch.ones(64, 64, device=chosen.device, dtype=getattr(torch, chosen.dtype))
    assert float((x @ x)[0, 0]) == 64
