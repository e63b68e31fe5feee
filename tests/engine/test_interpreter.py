"""The whole engine on Triton ops, on any machine: through Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

SCRIPT = Path(__file__).with_name("interpret_engine.py")


def test_tokens_through_all_triton_ops_equal_those_of_eager(tiny_llama_folder) -> None:
    command = [sys.executable, str(SCRIPT), str(tiny_llama_folder)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert [len(ids) for ids in found["eager"]] == [3, 3, 3]
    assert found["triton"] == found["eager"]
