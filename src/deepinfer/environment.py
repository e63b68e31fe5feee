"""The optional loader of environment variables. Nothing else in the library reads one at run time.

| variable | meaning |
|---|---|
| `DEEPINFER_ACCELERATOR` | name of the accelerator to use, such as `nvidia`; unset: the best that is available |
| `DEEPINFER_HF_MODEL_DIR` | checkpoint to load where a command names none |
| `DEEPINFER_PLUGINS` | comma-separated plugins to load, by entry point or distribution; empty: none; unset: all |
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import attrs

__all__ = ["Settings", "load_environment"]


@attrs.frozen(kw_only=True)
class Settings:
    """What the environment asks for."""

    accelerator: str | None = None
    hf_model_dir: Path | None = None
    #: None: every installed plugin.
    plugins: tuple[str, ...] | None = None


def load_environment(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the variables above from `environ` (the process environment if None)."""
    source = os.environ if environ is None else environ
    listed = source.get("DEEPINFER_PLUGINS")
    folder = source.get("DEEPINFER_HF_MODEL_DIR", "").strip()
    return Settings(
        accelerator=source.get("DEEPINFER_ACCELERATOR", "").strip() or None,
        hf_model_dir=Path(folder).expanduser() if folder else None,
        plugins=None if listed is None else tuple(name.strip() for name in listed.split(",") if name.strip()),
    )
