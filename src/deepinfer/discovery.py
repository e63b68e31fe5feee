"""Finding plugins and asking each for its records, so that one broken plugin spoils nothing for the others."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import entry_points
from typing import Any, Final, NoReturn

import attrs
import pluggy

from . import hooks
from .errors import PartUnavailable
from .record import Record

__all__ = ["BROKEN", "Plugin", "broken_record", "collect_records", "installed_plugins"]

#: Kind of the record that stands for a plugin that could not be asked.
BROKEN: Final = "plugin"


@attrs.frozen
class Plugin:
    """Something that may hold hook implementations, not imported yet."""

    name: str
    #: Distribution and version.
    origin: str
    load: Callable[[], object]

    @property
    def dist(self) -> str:
        return self.origin.partition(" ")[0]


def installed_plugins(allow: Sequence[str] | None = None) -> tuple[list[Plugin], list[Record]]:
    """Plugins among the installed distributions, by name.

    Args:
        allow: entry points or distributions to load; None loads all. What is not listed is not imported.

    Returns:
        The plugins, and a record for each listed name that no installed plugin has.
    """
    found = []
    for entry in entry_points(group=hooks.ENTRY_POINT_GROUP):
        origin = "unknown 0" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
        found.append(Plugin(entry.name, origin, entry.load))
    found.sort(key=lambda plugin: (plugin.dist, plugin.name))
    if allow is None:
        return found, []
    known = {name for plugin in found for name in (plugin.name, plugin.dist)}
    missing = [
        broken_record(name, "", f"plugin {name!r} is on the allow list but not installed; known: {sorted(known)}")
        for name in allow
        if name not in known
    ]
    return [plugin for plugin in found if plugin.name in allow or plugin.dist in allow], missing


def collect_records(plugins: Sequence[Plugin]) -> list[Record]:
    """Records of all plugins, each asked once; a plugin that fails gives one record that says so."""
    manager = pluggy.PluginManager("deepinfer")
    manager.add_hookspecs(hooks)
    records: list[Record] = []
    for plugin in plugins:
        try:
            records.extend(_ask(manager, plugin))
        except (Exception, SystemExit) as error:
            reason = f"plugin {plugin.name!r} of {plugin.origin} is broken:\n"
            records.append(
                broken_record(plugin.name, plugin.origin, reason + "".join(traceback.format_exception(error)))
            )
    return records


def _ask(manager: pluggy.PluginManager, plugin: Plugin) -> list[Record]:
    """Records of one plugin, all or none."""
    loaded = plugin.load()
    others = manager.get_plugins()
    manager.register(loaded, name=f"{plugin.dist}:{plugin.name}")
    try:
        manager.check_pending()
        if not manager.get_hookcallers(loaded):
            raise TypeError(f"{loaded!r} has no deepinfer_records marked with deepinfer.hooks.hookimpl")
        caller = manager.subset_hook_caller("deepinfer_records", remove_plugins=others)
        return list(_checked(caller(), plugin.origin))
    finally:
        manager.unregister(loaded)


def _checked(answers: Sequence[Any], origin: str) -> Iterator[Record]:
    seen = set()
    for record in (record for answer in answers for record in answer):
        if not isinstance(record, Record):
            raise TypeError(f"deepinfer_records yielded {record!r}; expected deepinfer.hooks.Record")
        if (record.kind, record.name) in seen:
            raise ValueError(f"deepinfer_records yielded {record.kind} {record.name!r} twice")
        seen.add((record.kind, record.name))
        yield attrs.evolve(record, origin=origin)


def broken_record(name: str, origin: str, reason: str) -> Record:
    """A record that is never available, for the reason given."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", name).strip("._-") or "unnamed"
    return Record(BROKEN, plain, partial(_refuse, reason), probe=partial(_answer, reason), origin=origin)


def _answer(reason: str) -> str:
    return reason


def _refuse(reason: str, **_keywords: Any) -> NoReturn:
    raise PartUnavailable(reason)
