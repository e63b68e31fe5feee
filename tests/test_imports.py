"""What importing costs and touches: little, and nothing."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import deepinfer

ROOT = Path(deepinfer.__file__).parent
HEAVY = ("torch", "numpy", "triton", "lark", "transformers", "jinja2", "tokenizers", "safetensors", "pluggy", "attrs")
MODULES = sorted(
    ".".join(["deepinfer", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
    if path.parent != ROOT or not path.stem.startswith("__")
)
TOP_LEVEL = [name for name in MODULES if name.count(".") == 1]
#: Layer 0 and the bookkeeping packages: numpy at most. `transfer` is about tensors and nothing else.
WITHOUT_TORCH = [
    *(name for name in TOP_LEVEL if (ROOT / f"{name.partition('.')[2]}.py").exists() and name != "deepinfer.transfer"),
    "deepinfer.cache",
    "deepinfer.cli",
    "deepinfer.schedulers",
]


def run(code: str) -> dict:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def loaded(name: str) -> set[str]:
    return set(run(f"import json, sys; import {name}; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"))


def test_the_root_loads_nothing_heavy():
    assert loaded("deepinfer") == set()


def test_the_root_is_imported_within_60_ms():
    code = (
        "import json, time; start = time.perf_counter(); import deepinfer; "
        "print(json.dumps({'ms': (time.perf_counter() - start) * 1000}))"
    )
    assert min(run(code)["ms"] for _ in range(7)) < 60


def test_the_root_changes_nothing_in_the_process():
    code = """
import json, os, signal, sys, threading, warnings
def state():
    tasks = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else threading.active_count()
    handler = str(signal.getsignal(signal.SIGINT))
    return [dict(os.environ), tasks, list(sys.path), len(warnings.filters), handler, os.getcwd()]
before = state()
import deepinfer
print(json.dumps({"same": before == state()}))
"""
    assert run(code)["same"]


def test_importing_every_module_changes_no_setting_of_torch_or_the_process():
    code = f"""
import importlib, json, logging, os, torch
import tokenizers  # sets nothing itself, but is not ours to blame
def state():
    return [
        dict(os.environ), torch.get_num_threads(), torch.get_num_interop_threads(), str(torch.get_default_dtype()),
        torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
        torch.initial_seed(), torch.cuda.is_initialized(), len(logging.getLogger().handlers),
    ]
before = state()
for name in {MODULES!r}:
    importlib.import_module(name)
after = state()
print(json.dumps({{"before": before, "after": after}}))
"""
    states = run(code)
    assert states["before"] == states["after"]


@pytest.mark.parametrize("name", TOP_LEVEL)
def test_each_part_can_be_imported_alone(name):
    found = loaded(name)
    if name in WITHOUT_TORCH:
        assert "torch" not in found
    assert not found & {"triton", "lark", "transformers"}


def test_every_exported_name_is_there():
    for name in deepinfer.__all__:
        assert getattr(deepinfer, name) is not None, name
    assert set(deepinfer.__all__) <= set(dir(deepinfer))
    assert len(set(deepinfer.__all__)) == len(deepinfer.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Enigne'"):
        _ = deepinfer.Enigne


def test_type_checkers_see_what_is_exported():
    tree = ast.parse((ROOT / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.name for node in block.body for alias in node.names}
    assert seen == set(deepinfer.__all__) - {"__version__"}
    assert set(deepinfer._HOMES) == {n for n in seen if not (ROOT / n).is_dir() and not (ROOT / f"{n}.py").exists()}


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_exports(name):
    module = importlib.import_module(name)
    assert hasattr(module, "__all__")
    assert [each for each in module.__all__ if not hasattr(module, each)] == []


def test_pluggy_is_called_in_one_place():
    """Parts are looked up when something is composed; nothing else may get near a hook."""
    using = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            if any(name.split(".")[0] == "pluggy" for name in names):
                using.add(path.relative_to(ROOT).as_posix())
    assert using == {"hooks.py", "discovery.py", "testing/hook_calls.py"}


def test_only_the_loader_reads_our_environment_variables():
    reading = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("DEEPINFER_")
    }
    assert reading <= {"environment.py"}
