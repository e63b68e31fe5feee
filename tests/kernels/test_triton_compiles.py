"""Kernels compile for Hopper and Blackwell, no GPU needed; the matrix kernels use Hopper's matrix unit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

SCRIPT = Path(__file__).with_name("compile_kernels.py")


def compiled(capability: int, names: str = "") -> dict[str, dict]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), str(capability), names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check_hopper(kernels: dict[str, dict], *matrix: str) -> None:
    for name in matrix:
        assert kernels[name]["wgmma"], f"{name} misses Hopper's matrix unit"
    assert max(kernel["shared"] for kernel in kernels.values()) <= 227 * 1024


def test_the_main_kernels_on_hopper():
    kernels = compiled(90, "invariant prefill,linear 64 x 64,scan False")
    assert len(kernels) == 3
    check_hopper(kernels, "invariant prefill", "linear 64 x 64")


@pytest.mark.slow
def test_every_kernel_on_hopper():
    kernels = compiled(90)
    assert len(kernels) > 18
    check_hopper(kernels, "prefill", "invariant prefill", "invariant decode", "linear 128 x 256", "linear 64 x 32")


@pytest.mark.slow
def test_every_kernel_on_blackwell():
    assert len(compiled(100)) > 18
