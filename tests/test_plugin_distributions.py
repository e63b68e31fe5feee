"""Plugins as users install them: built as wheels, found by entry point in a fresh process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PLUGINS = Path(__file__).parent / "plugins"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """`site("name", ...)`: a folder with just these distributions installed."""
    work = tmp_path_factory.mktemp("plugins")
    made = {}

    def wheel(name: str) -> Path:
        if name not in made:
            source, wheels = work / "source" / name, work / "wheels" / name
            shutil.copytree(PLUGINS / name, source)
            command = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", wheels, source]
            subprocess.run(command, check=True, capture_output=True, text=True)
            (made[name],) = wheels.glob("*.whl")
        return made[name]

    def install(*names: str) -> Path:
        target = work / "-".join(("site", *names))
        if not target.exists():
            command = [*PIP, "install", "--no-deps", "--no-index", "--no-compile", "--target", target]
            subprocess.run([*command, *map(wheel, names)], check=True, capture_output=True, text=True)
        return target

    return install


def run(site: Path, code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    clean = {key: value for key, value in os.environ.items() if not key.startswith("DEEPINFER_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**clean, "PYTHONPATH": path, **environ},
    )


def answer(site: Path, code: str, **environ: str) -> dict:
    done = run(site, f"import json\nfrom deepinfer.registry import default_registry\n{code}", **environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


BIND = """
import sys
registry = default_registry()
registry.collect()
before = [name for name in sys.modules if name.startswith("deepinfer_example_backend.") or name == "torch"]
from deepinfer import bind_ops
ops = bind_ops(device="cpu", dtype="float32", head_dim=64, page_tokens=16, invariant=INVARIANT)
import torch
from deepinfer.kernels import reference
x, residual, weight = torch.randn(5, 33), torch.randn(5, 33), torch.randn(33)
error = max(
    float((a - b).abs().max())
    for a, b in zip(
        ops.rms_norm(x, weight, eps=1e-6, residual=residual), reference.rms_norm(x, weight, eps=1e-6, residual=residual)
    )
)
origins = {f"op.{op}": registry.select(f"op.{op}", name=name).origin for op, name in ops.names.items()}
print(json.dumps({"names": dict(ops.names), "before": before, "error": error, "origins": origins,
                  "module": ops.rms_norm.__module__}))
"""


def test_a_backend_with_one_op_is_used_for_it_and_every_other_op_falls_back(site):
    found = answer(site("deepinfer-example-backend"), BIND.replace("INVARIANT", "False"))
    assert found["names"]["rms_norm"] == "example"
    assert found["module"] == "deepinfer_example_backend.norm"
    assert found["origins"].pop("op.rms_norm") == "deepinfer-example-backend 0.2.0"
    assert len(found["origins"]) == 6
    assert {origin.split()[0] for origin in found["origins"].values()} == {"deepinfer"}
    assert found["before"] == []
    assert found["error"] < 1e-5


def test_it_steps_back_where_it_says_that_it_cannot_serve(site):
    found = answer(site("deepinfer-example-backend"), BIND.replace("INVARIANT", "True"))
    assert found["names"]["rms_norm"] != "example"
    assert "example" not in found["names"].values()


def test_its_op_keeps_the_published_contract(site):
    code = """
from deepinfer.testing import check_op
report = check_op("op.rms_norm", "example", device="cpu", dtype="float32")
print(json.dumps({"cases": len(report.cases), "implementation": report.implementation}))
"""
    found = answer(site("deepinfer-example-backend"), code)
    assert found["implementation"] == "example"
    assert found["cases"] >= 4


@pytest.mark.parametrize(
    ("plugins", "loaded"),
    [("", False), ("example", True), ("deepinfer-example-backend", True), ("broken", False), ("broken,example", True)],
)
def test_the_allow_list_decides_what_is_imported(site, plugins, loaded):
    code = "registry = default_registry(); names = [r.name for r in registry.records('op.rms_norm')]\nimport sys\n"
    code += "print(json.dumps({'names': names, 'imported': 'deepinfer_example_backend' in sys.modules}))"
    found = answer(site("deepinfer-example-backend", "deepinfer-broken"), code, DEEPINFER_PLUGINS=plugins)
    assert ("example" in found["names"]) is loaded
    assert found["imported"] is loaded


def test_a_broken_distribution_hurts_nobody_until_it_is_asked_for(site):
    code = """
from deepinfer.errors import PartUnavailable
registry = default_registry()
picked = registry.select("op.rms_norm", need={"device": "cpu", "dtype": "float32"}).name
try:
    registry.resolve("op.rms_norm", name="broken")
except PartUnavailable as error:
    told = str(error)
print(json.dumps({"picked": picked, "told": told, "origin": registry.records("plugin")[0].origin}))
"""
    found = answer(site("deepinfer-example-backend", "deepinfer-broken"), code)
    assert found["picked"] == "example"
    assert found["origin"] == "deepinfer-broken 1.4.0"
    assert "libxpu.so.7: cannot open shared object file" in found["told"]
    assert "Traceback" in found["told"]


def test_the_plugins_command_shows_both(site):
    code = "import sys; from deepinfer.cli.main import main; sys.exit(main(['plugins']))"
    done = run(site("deepinfer-example-backend", "deepinfer-broken"), code)
    assert done.returncode == 0, done.stderr
    (example,) = [line for line in done.stdout.splitlines() if " example " in line]
    assert "deepinfer-example-backend 0.2.0  available" in example
    (broken,) = [line for line in done.stdout.splitlines() if line.startswith("plugin ") and " broken " in line[:40]]
    assert broken.split()[4:9] == ["deepinfer-broken", "1.4.0", "no:", "ImportError:", "libxpu.so.7:"]


CLASH = """
from deepinfer.errors import NameClash
registry = default_registry()
PREFER
try:
    told, picked = "", registry.select("op.rms_norm", need={"device": "cpu"}).origin
except NameClash as error:
    told, picked = str(error), ""
print(json.dumps({"told": told, "picked": picked, "rope": registry.select("op.rope").name}))
"""


def test_two_distributions_with_one_name_are_an_error_that_names_both(site):
    both = site("deepinfer-example-backend", "deepinfer-rival")
    told = answer(both, CLASH.replace("PREFER", ""))["told"]
    assert "deepinfer-example-backend 0.2.0 and deepinfer-rival 0.0.3" in told
    for dist in ("deepinfer-rival 0.0.3", "deepinfer-example-backend 0.2.0"):
        prefer = f"registry.prefer('op.rms_norm', '{dist.split()[0]}:example')"
        assert answer(both, CLASH.replace("PREFER", prefer))["picked"] == dist
