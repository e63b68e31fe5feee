"""`deepinfer plugins` and `deepinfer doctor`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import deepinfer
from deepinfer.cli import doctor, plugins
from deepinfer.cli.main import main
from deepinfer.discovery import broken_record
from deepinfer.kinds import KINDS
from deepinfer.record import Record
from deepinfer.registry import Registry


@pytest.fixture
def registry(monkeypatch):
    """What the commands look into, with one part from a plugin and one plugin that is broken."""
    registry = Registry(plugins=())
    registry.register(Record("op.rope", "xpu", dict, devices="xpu", priority=7, origin="deepinfer-xpu 0.3"))
    registry.register(
        broken_record("bad", "deepinfer-bad 2.0", "Traceback (most recent call last):\nImportError: libx")
    )
    monkeypatch.setattr(plugins, "default_registry", lambda: registry)
    monkeypatch.setattr(doctor, "default_registry", lambda: registry)
    return registry


def test_plugins_lists_every_part_with_origin_and_status(registry, capsys):
    assert main(["plugins"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["kind", "name", "devices", "priority", "origin", "status"]
    (xpu,) = [line.split() for line in lines if " xpu " in line]
    assert xpu == ["op.rope", "xpu", "xpu", "7", "deepinfer-xpu", "0.3", "available"]
    (bad,) = [line for line in lines if "deepinfer-bad" in line]
    assert bad.split()[-3:] == ["no:", "ImportError:", "libx"]
    assert "Traceback (most recent call last):" in lines
    assert sum(line.startswith("op.attention ") for line in lines) == 4


def test_plugins_as_json_carries_every_field_and_the_whole_reason(registry, capsys):
    assert main(["plugins", "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)
    assert len(parts) == len(registry.records())
    (bad,) = [part for part in parts if part["origin"] == "deepinfer-bad 2.0"]
    assert bad["available"] is False
    assert bad["reason"].startswith("Traceback")
    (rope,) = [part for part in parts if part["kind"] == "op.rope" and part["name"] == "reference"]
    assert rope["available"] is True
    assert rope["factory"].startswith("deepinfer.kernels.reference:")


def test_plugins_of_one_kind(registry, capsys):
    assert main(["plugins", "--kind", "op.rope", "--json"]) == 0
    assert {part["kind"] for part in json.loads(capsys.readouterr().out)} == {"op.rope"}
    assert main(["plugins", "--kind", "op.nothing"]) == 1
    assert "'op.nothing' is registered; known kinds: accelerator," in capsys.readouterr().err


def test_doctor_explains_every_kind_and_succeeds_where_an_engine_can_be_composed(registry, capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == []
    assert report["deepinfer"] == deepinfer.__version__
    assert report["python"] == ".".join(map(str, sys.version_info[:3]))
    assert report["hardware"]["threads"] >= 1
    assert isinstance(report["native"]["available"], bool)
    assert {pick["kind"] for pick in report["kinds"]} == set(KINDS)
    (rope,) = [pick for pick in report["kinds"] if pick["kind"] == "op.rope"]
    others = {rejected["name"]: rejected["reason"] for rejected in rope["rejected"]}
    assert rope["picked"]["name"] not in others
    assert {*others, rope["picked"]["name"]} == {"reference", "eager", "native", "triton", "xpu"}
    assert "not on cpu" in others["xpu"]
    assert report["broken_plugins"] == [
        {"name": "bad", "origin": "deepinfer-bad 2.0", "reason": registry.records("plugin")[0].why_not({})}
    ]


def test_doctor_as_text_ends_with_the_verdict(registry, capsys):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "ok: an engine can be composed here"
    assert any(line.startswith("    not xpu: it runs on xpu, not on ") for line in lines)


def test_doctor_fails_where_a_kind_has_nothing(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "default_registry", lambda: Registry(builtin=False, plugins=()))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "problem: op.attention: nothing is registered" in out
    assert "ok:" not in out


def test_doctor_notices_an_op_that_is_picked_but_does_not_load(registry, capsys):
    registry.register(Record("op.rope", "dud", "deepinfer_no_such_module:rope", priority=10_000))
    assert main(["doctor"]) == 1
    assert "problem: op.rope: dud fails: PartUnavailable" in capsys.readouterr().out


def test_an_accelerator_that_cannot_be_used_is_a_problem(registry, capsys, monkeypatch):
    monkeypatch.setenv("DEEPINFER_ACCELERATOR", "warp")
    assert main(["doctor"]) == 1
    assert (
        "problem: accelerator: no accelerator is called 'warp'; known: ascend, cpu, nvidia" in capsys.readouterr().out
    )


def test_the_module_runs_as_the_command_and_wrong_usage_is_2():
    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "deepinfer", *arguments], capture_output=True, text=True, check=False
        )

    assert run("--version").stdout.strip() == f"deepinfer {deepinfer.__version__}"
    assert run().returncode == 2
    assert run("doctor", "--nonsense").returncode == 2


def test_a_reader_that_leaves_early_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m deepinfer plugins --json | head -c 10",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.startswith("[")


def test_listing_the_parts_does_not_load_torch():
    code = (
        "import sys\nfrom deepinfer.cli.main import main\n"
        "main(['plugins', '--kind', 'scheduler.policy'])\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
