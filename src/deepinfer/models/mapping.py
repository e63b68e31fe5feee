"""Maps files of weights into memory, so that opening costs no reading."""

from __future__ import annotations

import mmap
from pathlib import Path

from ..errors import CheckpointError, MalformedFile

__all__ = ["map_file"]


def map_file(path: Path) -> mmap.mmap:
    """The whole file as a private mapping: pages load on first touch, writes never reach the file.

    Raises:
        CheckpointError: it cannot be opened.
        MalformedFile: it is empty.
    """
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise MalformedFile(f"{path} is empty; the download was probably cut off, fetch it again")
            return _private(file.fileno())
    except OSError as error:
        raise CheckpointError(
            f"cannot open {path}: {error.strerror or error}; check the path and its rights"
        ) from error


def _private(fileno: int) -> mmap.mmap:
    # Copy-on-write instead of read-only: torch warns about tensors over read-only buffers. NORESERVE (named by
    # Python since 3.13) keeps a model larger than the free memory from being refused by the overcommit check.
    if hasattr(mmap, "MAP_PRIVATE"):
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        return mmap.mmap(fileno, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return mmap.mmap(fileno, 0, access=mmap.ACCESS_COPY)
