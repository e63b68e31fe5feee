"""Why a part was picked, and why each of the others was not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from .record import Record

__all__ = ["Explanation", "Rejection", "last_line"]


def last_line(reason: str) -> str:
    """The line of a reason that says most: of a traceback, the error."""
    return reason.strip().splitlines()[-1] if reason.strip() else reason


@attrs.frozen
class Rejection:
    """A record that was not picked, and why."""

    record: Record
    reason: str


@attrs.frozen
class Explanation:
    """What would be picked for a kind and a need, and why everything else would not."""

    kind: str
    need: Mapping[str, Any]
    picked: Record | None
    rejected: tuple[Rejection, ...]
    #: Why nothing can be picked although something is available (a name clash).
    error: str | None = None

    def __str__(self) -> str:
        asked = ", ".join(f"{key}={value}" for key, value in self.need.items())
        lines = [f"{self.kind} ({asked or 'any need'})"]
        if self.picked is None:
            lines.append(f"  nothing: {self.error or 'no record can serve this'}")
        else:
            lines.append(f"  picked {self.picked.name} (priority {self.picked.priority}, {self.picked.origin})")
        lines += [f"  not {r.record.name} ({r.record.origin}): {last_line(r.reason)}" for r in self.rejected]
        return "\n".join(lines)

    def config(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "kind": self.kind,
            "need": {key: str(value) for key, value in self.need.items()},
            "picked": None if self.picked is None else self.picked.config(),
            "rejected": [{**r.record.config(), "reason": r.reason} for r in self.rejected],
            "error": self.error,
        }
