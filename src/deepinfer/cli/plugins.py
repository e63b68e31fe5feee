"""`deepinfer plugins`: every registered part, where it came from and whether it can be used here."""

from __future__ import annotations

import argparse
import json

from ..discovery import BROKEN
from ..errors import UnknownPart
from ..explanation import last_line
from ..record import Record
from ..registry import default_registry
from .table import table

__all__ = ["register", "run"]


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("plugins", help="list every part, its origin and whether it can be used here")
    parser.add_argument("--kind", help="only this kind, such as op.attention")
    parser.add_argument("--json", action="store_true", help="machine-readable, with full tracebacks")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    registry = default_registry()
    records = registry.records(args.kind)
    if args.kind is not None and not records:
        raise UnknownPart(f"nothing of kind {args.kind!r} is registered; known kinds: {', '.join(registry.kinds())}")
    reasons = [record.why_not({}) for record in records]
    if args.json:
        parts = [
            {**record.config(), "available": reason is None, "reason": reason}
            for record, reason in zip(records, reasons, strict=True)
        ]
        print(json.dumps(parts, indent=2))
        return 0
    rows = [_row(record, reason) for record, reason in zip(records, reasons, strict=True)]
    print(table(("kind", "name", "devices", "priority", "origin", "status"), rows))
    for record, reason in zip(records, reasons, strict=True):
        if record.kind == BROKEN and reason is not None:
            print(f"\n{reason.rstrip()}")
    return 0


def _row(record: Record, reason: str | None) -> tuple[str, ...]:
    status = "available" if reason is None else f"no: {last_line(reason)}"
    devices = ",".join(record.devices) or "any"
    return record.kind, record.name, devices, str(record.priority), record.origin, status
