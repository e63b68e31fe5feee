"""docs/plugins.md covers every hook and kind, and its examples run."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import pluggy

from deepinfer import hooks
from deepinfer.discovery import Plugin, collect_records
from deepinfer.kinds import KINDS
from deepinfer.record import Record

PAGE = (Path(__file__).parents[1] / "docs" / "plugins.md").read_text(encoding="utf-8")


def hook_names() -> list[str]:
    manager = pluggy.PluginManager("deepinfer")
    manager.add_hookspecs(hooks)
    return [name for name in vars(manager.hook) if name.startswith("deepinfer_")]


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def test_every_hook_has_a_heading_and_an_example():
    assert hook_names() == ["deepinfer_records"]
    for name in hook_names():
        (section,) = re.findall(rf"^### Hook `{name}`\n(.*?)(?=^##|\Z)", PAGE, flags=re.DOTALL | re.MULTILINE)
        assert re.search(rf"```python\n.*@hookimpl\ndef {name}\(", section, flags=re.DOTALL)


def test_every_field_of_a_record_and_every_kind_is_described():
    for field in attrs.fields(Record):
        assert f"| `{field.name}` |" in PAGE
    for kind, row in KINDS.items():
        (line,) = [line for line in PAGE.splitlines() if line.startswith("|") and f"`{kind}`" in line.split("|")[1]]
        assert all(f"`{word}`" in line for word in (*row.keywords, *(row.need if kind.startswith("op.") else ())))


def test_the_examples_run():
    namespace: dict = {}
    for code in examples():
        exec(compile(code, "docs/plugins.md", "exec"), namespace)
    assert type(namespace["policy"]).__name__ == "LongestPrompt"
    assert len(namespace["explanation"].rejected) == 3


def test_the_backend_example_is_a_plugin():
    (code,) = [code for code in examples() if "@hookimpl" in code]

    class Module:
        pass

    namespace: dict = {}
    exec(compile(code, "docs/plugins.md", "exec"), namespace)
    Module.deepinfer_records = staticmethod(namespace["deepinfer_records"])
    records = collect_records([Plugin("xpu", "deepinfer-xpu 0.1.0", lambda: Module)])
    assert [record.kind for record in records] == ["accelerator", "op.attention"]
    assert records[1].why_not({"device": "xpu"}) == "xpu_runtime is not installed"
    assert namespace["accepts"](head_dim=80) == "head width 80 is not 64 or 128"
