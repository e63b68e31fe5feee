"""Session fixtures around real and tiny checkpoints, for the tests of several packages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from deepinfer.errors import ConfigError

from . import smollm2, tiny


@pytest.fixture(scope="session")
def tiny_llama_folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Name of each of `tiny.CASES` to a folder that transformers wrote."""
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("tiny-llama")
    return {name: tiny.build_tiny_llama(root / name, **options) for name, options in tiny.CASES.items()}


@pytest.fixture(scope="session")
def tiny_llama_folder(tiny_llama_folders: Mapping[str, Path]) -> Path:
    """One of them, for tests that need just a model."""
    return tiny_llama_folders["plain"]


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The demo model's GGUF file."""
    from deepinfer.models import find_demo_model

    try:
        return find_demo_model()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2_folder(smollm2_gguf: Path) -> Path:
    """The demo model as a Hugging Face folder in float32, converted without deepinfer's code."""
    pytest.importorskip("gguf")
    return smollm2.smollm2_folder(smollm2_gguf)
