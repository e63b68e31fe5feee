"""What any reader of files owes a damaged one: a typed error that names it, soon and in little memory."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path

from deepinfer.errors import DeepInferError


def write_damaged(path: Path, valid: bytes, *, flips: Iterable[tuple[int, int]], length: int | None) -> Path:
    """`valid` with some bytes replaced (place, value), cut to `length`."""
    raw = bytearray(valid)
    for at, value in flips:
        raw[at] = value
    path.write_bytes(raw[:length])
    return path


def check_reader(read: Callable[[Path], object], path: Path, *, most_bytes: int) -> None:
    """`read` returns or raises a DeepInferError that names the file, within a second of CPU time."""
    tracemalloc.start()
    begin = time.thread_time()
    try:
        read(path)
    except DeepInferError as error:
        assert str(path) in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert time.thread_time() - begin < 1
    assert peak < most_bytes
