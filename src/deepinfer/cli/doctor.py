"""`deepinfer doctor`: what this machine offers, what would be picked, and why not the rest."""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..accelerator import choose_accelerator
from ..discovery import BROKEN
from ..environment import load_environment
from ..errors import DeepInferError
from ..kinds import KINDS, OP_KINDS
from ..registry import Registry, default_registry

if TYPE_CHECKING:
    from ..protocols import Accelerator

__all__ = ["examine", "register", "run"]

PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "jinja2", "pluggy", "triton", "torch-npu")


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("doctor", help="say what works here, what would be picked and why not the rest")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    report = examine(default_registry())
    print(json.dumps(report, indent=2) if args.json else _render(report))
    return 1 if report["problems"] else 0


def examine(registry: Registry) -> dict[str, Any]:
    """JSON-able report; `problems` is empty when an engine can be composed."""
    accelerator, problems = _accelerator(registry)
    need = {} if accelerator is None else {"device": accelerator.device, "dtype": accelerator.dtype}
    picks = []
    for kind in sorted({*KINDS, *registry.kinds()} - {BROKEN}):
        pick, problem = _pick(registry, kind, need if kind in OP_KINDS else {})
        picks.append(pick)
        problems += [problem] if problem and kind in KINDS else []
    broken = [{"name": r.name, "origin": r.origin, "reason": r.why_not({})} for r in registry.records(BROKEN)]
    return {
        "deepinfer": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "hardware": _hardware(),
        "accelerator": None if accelerator is None else {**need, "name": accelerator.name},
        "native": _native(registry),
        "kinds": picks,
        "broken_plugins": broken,
        "problems": problems,
    }


def _accelerator(registry: Registry) -> tuple[Accelerator | None, list[str]]:
    try:
        return choose_accelerator(load_environment().accelerator, registry=registry), []
    except DeepInferError as error:
        return None, [f"accelerator: {error}"]


def _pick(registry: Registry, kind: str, need: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """What is picked for a kind; ops are also made, which shows that they load."""
    if kind not in registry.kinds():
        return _nothing(kind, need, "nothing is registered"), f"{kind}: nothing is registered"
    if kind in KINDS and KINDS[kind].by_content:
        return _by_content(registry, kind)
    explanation = registry.explain(kind, need)
    if explanation.picked is None:
        return explanation.config(), f"{kind}: {explanation.error or 'nothing registered can be used here'}"
    try:
        if kind in OP_KINDS and need:
            registry.create(explanation.picked, **need, invariant=False)
    except Exception as error:
        return explanation.config(), f"{kind}: {explanation.picked.name} fails: {type(error).__name__}: {error}"
    return explanation.config(), None


def _by_content(registry: Registry, kind: str) -> tuple[dict[str, Any], str | None]:
    """A checkpoint picks among these, so all that work are of interest."""
    reasons = [(record, record.why_not({})) for record in registry.records(kind)]
    pick = _nothing(kind, {}, None)
    pick["available"] = [record.config() for record, reason in reasons if reason is None]
    pick["rejected"] = [{**record.config(), "reason": reason} for record, reason in reasons if reason]
    return pick, None if pick["available"] else f"{kind}: nothing registered can be used here"


def _nothing(kind: str, need: dict[str, Any], error: str | None) -> dict[str, Any]:
    return {"kind": kind, "need": need, "picked": None, "rejected": [], "error": error}


def _native(registry: Registry) -> dict[str, Any]:
    """Whether the compiled CPU library is there: the probe of the first part called native."""
    found = [record for record in registry.records() if record.name == "native"]
    reason = found[0].why_not({}) if found else "no part called native is registered"
    return {"available": reason is None, "reason": reason}


def _hardware() -> dict[str, Any]:
    try:
        import torch
    except ImportError as error:
        return {"cores": os.cpu_count(), "error": f"torch cannot be imported: {error}"}
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_features": _cpu_features(),
        "threads": torch.get_num_threads(),
        "gpus": gpus,
    }


def _cpu_features() -> list[str]:
    """Vector and matrix extensions that kernels care about, from the kernel's list where there is one."""
    wanted = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimd", "sve")
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    except OSError:
        return []
    return [name for name in wanted if name in flags.split()]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _render(report: dict[str, Any]) -> str:
    hardware = ", ".join(f"{key} {_plain(value)}" for key, value in report["hardware"].items())
    packages = ", ".join(f"{name} {found or 'no'}" for name, found in report["packages"].items())
    chosen, native = report["accelerator"], report["native"]
    lines = [
        f"deepinfer {report['deepinfer']}, python {report['python']}, {report['system']}",
        f"packages: {packages}",
        f"hardware: {hardware}",
        "accelerator: " + ("none" if chosen is None else f"{chosen['name']} ({chosen['device']}, {chosen['dtype']})"),
        "native library: " + ("compiled" if native["available"] else f"not available: {native['reason']}"),
        "",
        *(line for pick in report["kinds"] for line in _render_pick(pick)),
        *(f"broken plugin {b['name']} ({b['origin']}):\n{b['reason']}" for b in report["broken_plugins"]),
        *(f"problem: {problem}" for problem in report["problems"]),
        "" if report["problems"] else "ok: an engine can be composed here",
    ]
    return "\n".join(lines).rstrip()


def _render_pick(pick: dict[str, Any]) -> list[str]:
    chosen = pick.get("available") or [pick["picked"]] * (pick["picked"] is not None)
    first = f"{pick['kind']}: " + (", ".join(f"{c['name']} ({c['origin']})" for c in chosen) or "nothing")
    return [first, *(f"    not {r['name']}: {str(r['reason']).strip().splitlines()[-1]}" for r in pick["rejected"])]


def _plain(value: object) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
