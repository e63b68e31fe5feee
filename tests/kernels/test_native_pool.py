"""The kernels' own threads: as many as torch says, one job at a time, none lost after a fork."""

from __future__ import annotations

import subprocess
import sys

import pytest

from deepinfer.kernels import native

needs_library = pytest.mark.skipif(native.probe() is not None, reason=f"native kernels: {native.probe()}")

SETUP = """
import os, threading, torch
from deepinfer.kernels import native
linear = native.make_linear(device="cpu", dtype="float32")
torch.manual_seed(0)
x, w = torch.randn(300, 512), torch.randn(512, 512)
packed = linear.pack(w)
def count():
    "Workers of the kernels."
    names = [open(f"/proc/self/task/{t}/comm").read().strip() for t in os.listdir("/proc/self/task")]
    return names.count("deepinfer")
"""


def run(code: str) -> None:
    command = [sys.executable, "-c", SETUP + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@needs_library
def test_threads_are_as_many_as_torch_says() -> None:
    run("""
linear(x, linear.pack(w))
before = count()
torch.set_num_threads(before + 3)
linear(x, packed)
assert count() == before + 2, (before, count())
torch.set_num_threads(1)
[linear(x, packed) for _ in range(20)]
assert count() == before + 2, "none are added"
""")


@needs_library
def test_callers_at_the_same_time_get_the_same_bits() -> None:
    run("""
torch.set_num_threads(3)
expected = linear(x, packed)
wrong = []
def many():
    for _ in range(200):
        if not torch.equal(linear(x, packed), expected):
            wrong.append(1)
callers = [threading.Thread(target=many) for _ in range(4)]
[c.start() for c in callers]; [c.join() for c in callers]
assert not wrong
""")


@needs_library
def test_a_forked_child_computes_with_workers_of_its_own() -> None:
    run("""
torch.set_num_threads(3)
expected = linear(x, packed)
for _ in range(5):
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(linear(x, packed), expected) and count() == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0
assert torch.equal(linear(x, packed), expected)
""")
