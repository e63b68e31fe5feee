"""One tiny model for the tests of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_llama_folder(tiny_llama_folders: Mapping[str, Path]) -> Path:
    return tiny_llama_folders["plain"]
