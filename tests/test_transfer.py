"""Copies between host and device."""

import numpy as np
import pytest
import torch

from deepinfer.transfer import record_event, to_device, to_device_together, to_host

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]
ARRAYS = [np.arange(n, dtype=np.int32).reshape(shape) for n, shape in ((3, -1), (0, -1), (64, (2, 32)), (130, -1))]


@pytest.mark.parametrize("device", DEVICES)
def test_there_and_back(device) -> None:
    alone = [to_device(array, device) for array in ARRAYS]
    together = to_device_together(ARRAYS, device)
    back = [(to_host(x), to_host(y)) for x, y in zip(alone, together, strict=True)]
    event = record_event(device)
    assert (event is None) == (device == "cpu")
    if event is not None:
        event.synchronize()
    for array, x, y, hosts in zip(ARRAYS, alone, together, back, strict=True):
        assert x.device.type == y.device.type == device
        assert x.dtype == y.dtype == torch.int32
        for host in hosts:
            assert host.shape == array.shape and np.array_equal(host.numpy(), array)


@pytest.mark.parametrize("device", DEVICES[1:])
def test_kernels_see_one_alignment_for_every_array(device) -> None:
    assert all(x.data_ptr() % 256 == 0 for x in to_device_together(ARRAYS, device))


def test_on_the_cpu_nothing_is_copied() -> None:
    array = np.arange(4)
    to_device(array, "cpu")[1] = 9
    assert array[1] == 9
    x = torch.zeros(3)
    assert to_host(x) is x


def test_strided_arrays_arrive_in_order() -> None:
    array = np.arange(6, dtype=np.int64).reshape(2, 3).T
    assert to_device(array, "cpu").tolist() == array.tolist()
