"""Which checkpoint, tokenizer and chat formats fit: the answers behind the records. Imports nothing heavy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

__all__ = ["jinja_accepts", "not_a_folder", "not_a_hub_id", "not_gguf", "tokenizer_is_gguf", "tokenizer_is_hf"]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def not_a_folder(*, path: Any = None, **_need: Any) -> str | None:
    return None if path is None or Path(path).is_dir() else f"{path} is no folder"


def not_gguf(*, path: Any = None, **_need: Any) -> str | None:
    fits = path is None or (Path(path).is_file() and Path(path).suffix == ".gguf")
    return None if fits else f"{path} is no .gguf file"


def not_a_hub_id(*, path: Any = None, **_need: Any) -> str | None:
    if path is None or (_HUB_ID.fullmatch(str(path)) and not Path(path).exists()):
        return None
    return f"{path} is here, or not of the form owner/name"


def tokenizer_is_hf(*, checkpoint: Any = None, **_need: Any) -> str | None:
    return _is_format("hf", checkpoint)


def tokenizer_is_gguf(*, checkpoint: Any = None, **_need: Any) -> str | None:
    return _is_format("gguf", checkpoint)


def jinja_accepts(*, checkpoint: Any = None, **_need: Any) -> str | None:
    if checkpoint is None or checkpoint.chat_template is not None:
        return None
    return f"{checkpoint.path} brings no chat template (a base model)"


def _is_format(name: str, checkpoint: Any) -> str | None:
    if checkpoint is None or checkpoint.format == name:
        return None
    return f"the checkpoint's format is {checkpoint.format!r}, not {name!r}"
