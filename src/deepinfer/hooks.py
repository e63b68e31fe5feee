"""The one hook of this library, and the markers a plugin needs.

A plugin is a distribution with an entry point in the group `deepinfer` that names a light module. It is asked
once a process, when a registry collects; nothing calls a hook after that.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import pluggy

from .record import API_VERSION, SUPPORTED_APIS, Record

__all__ = ["API_VERSION", "ENTRY_POINT_GROUP", "SUPPORTED_APIS", "Record", "deepinfer_records", "hookimpl", "hookspec"]

#: Entry-point group in which plugins are found.
ENTRY_POINT_GROUP: Final = "deepinfer"

hookspec: Final = pluggy.HookspecMarker("deepinfer")
hookimpl: Final = pluggy.HookimplMarker("deepinfer")


@hookspec
def deepinfer_records() -> Iterable[Record]:  # pyright: ignore[reportReturnType]
    """Yield a record for each part this plugin brings."""
