"""Settings of every test run."""

from __future__ import annotations

import os

from hypothesis import settings

from .models.fixtures import smollm2_folder, smollm2_gguf, tiny_llama_folder, tiny_llama_folders
from .threads import num_threads, one_thread

__all__ = ["num_threads", "one_thread", "smollm2_folder", "smollm2_gguf", "tiny_llama_folder", "tiny_llama_folders"]

# The same examples on every run of `make test`; `make test-all` draws fresh ones, ten times as many.
settings.register_profile("seeded", deadline=None, derandomize=True, max_examples=50, print_blob=True)
settings.register_profile("full", deadline=None, max_examples=500, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "seeded"))
