"""Everything replaceable, by kind and name.

    registry = default_registry()
    registry.register(Record("op.attention", "mine", my_factory, devices="cpu", priority=200))
    registry.prefer("op.linear", "eager")
    attention = registry.resolve("op.attention", device="cpu", dtype="float32", invariant=True)
    print(registry.explain("op.attention", need={"device": "cpu"}))

Parts are resolved when something is composed, never while it runs.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from . import __version__
from . import builtin as own_parts
from .discovery import BROKEN, Plugin, broken_record, collect_records, installed_plugins
from .environment import load_environment
from .errors import NameClash, PartUnavailable, UnknownPart
from .explanation import Explanation, Rejection, last_line
from .record import Record, load

__all__ = ["Explanation", "Record", "Registry", "Rejection", "default_registry"]

#: Distribution of what was registered in this process.
LOCAL = "local"


class Registry:
    """Records by kind and name. Plugins are found on first use.

    Owned by whoever makes it; two registries share nothing. Registering and collecting are thread-safe.

    Args:
        plugins: entry points or distributions to load; None: every installed one, `()`: none.
        builtin: also offer what this library brings.
    """

    def __init__(self, *, plugins: Sequence[str] | None = None, builtin: bool = True) -> None:
        self._allow = None if plugins is None else tuple(plugins)
        self._builtin = builtin
        self._records: dict[tuple[str, str, str], Record] = {}
        self._preferences: dict[str, tuple[str, ...]] = {}
        self._collected = False
        self._lock = threading.RLock()

    def collect(self) -> None:
        """Find plugins and ask each for its records, once; later calls do nothing."""
        with self._lock:
            if self._collected:
                return
            # Set first: a hook that looks into this registry sees what is there so far.
            self._collected = True
            plugins, missing = installed_plugins(self._allow)
            own = [Plugin("builtin", f"deepinfer {__version__}", lambda: own_parts)] if self._builtin else []
            for record in [*collect_records([*own, *plugins]), *missing]:
                self._add(record)

    def register(self, record: Record) -> None:
        """Add a part of this process; the same kind and name registered here before is replaced."""
        with self._lock:
            record = record if record.origin else attrs.evolve(record, origin=LOCAL)
            self._records[record.kind, record.name, record.dist] = record

    def prefer(self, kind: str, name: str) -> None:
        """Pick `name` over any priority where it can be used; the latest call comes first.

        Args:
            kind: kind it is about.
            name: `"name"`, or `"distribution:name"` to settle a name clash.
        """
        with self._lock:
            earlier = self._preferences.get(kind, ())
            self._preferences[kind] = (name, *(other for other in earlier if other != name))

    def kinds(self) -> tuple[str, ...]:
        """Kinds that something is registered for, sorted."""
        return tuple(sorted({record.kind for record in self.records()}))

    def records(self, kind: str | None = None) -> tuple[Record, ...]:
        """Records of one kind or all, by kind, then best first, available or not."""
        self.collect()
        with self._lock:
            chosen = [record for record in self._records.values() if kind is None or record.kind == kind]
        return tuple(sorted(chosen, key=self._rank))

    def select(self, kind: str, *, name: str | None = None, need: Mapping[str, Any] | None = None) -> Record:
        """The record to use: preferred, then highest priority, then first by name.

        Args:
            kind: what is looked for.
            name: this one and no other; `"distribution:name"` where two distributions share the name.
            need: what it must serve, see `Record.why_not`.

        Raises:
            UnknownPart: nothing of that kind or name is registered.
            PartUnavailable: the named one, or every one, cannot serve the need here.
            NameClash: two distributions registered the same name and no preference picks one.
        """
        need = {} if need is None else need
        if name is not None:
            return self._named(kind, name, need)
        ranked = self._known(kind)
        self._refuse_clash(ranked)
        reasons = []
        for record in ranked:
            reason = record.why_not(need)
            if reason is None:
                return record
            reasons.append(f"{record.name} ({record.origin}): {last_line(reason)}")
        raise PartUnavailable(
            f"no {kind} can serve {_spell(need)}:\n  "
            + "\n  ".join(reasons)
            + "\nInstall what is missing or register another part; see docs/plugins.md."
        )

    def resolve(
        self, kind: str, *, name: str | None = None, need: Mapping[str, Any] | None = None, **keywords: Any
    ) -> Any:
        """A fresh part: `create(select(kind, ...), **keywords)`. Without `need` the keywords are the need.

        Raises:
            RegistryError: see `select` and `create`.
        """
        return self.create(self.select(kind, name=name, need=keywords if need is None else need), **keywords)

    def create(self, record: Record, **keywords: Any) -> Any:
        """Import the factory of `record` and call it; errors of the factory itself pass through.

        Raises:
            PartUnavailable: the factory cannot be imported.
        """
        try:
            factory = load(record.factory)
        except (Exception, SystemExit) as error:
            raise PartUnavailable(
                f"{record} cannot be imported from {record.factory!r}: {type(error).__name__}: {error}; "
                f"repair {record.dist or 'it'} or prefer another part"
            ) from error
        return factory(**keywords)

    def explain(self, kind: str, need: Mapping[str, Any] | None = None) -> Explanation:
        """What `select` would pick, and why not each of the others.

        Raises:
            UnknownPart: nothing of that kind is registered.
        """
        need = {} if need is None else need
        ranked = self._known(kind)
        reasons = [(record, record.why_not(need)) for record in ranked]
        error = None
        try:
            self._refuse_clash(ranked)
        except NameClash as clash:
            error = str(clash)
        usable = [record for record, reason in reasons if reason is None]
        picked = usable[0] if usable and error is None else None
        rejected = tuple(
            Rejection(record, error or self._why_behind(record, picked) if reason is None else reason)
            for record, reason in reasons
            if record is not picked
        )
        return Explanation(kind, need, picked, rejected, error)

    def config(self) -> dict[str, Any]:
        """JSON-able description of what is registered and preferred."""
        preferences = {kind: list(names) for kind, names in sorted(self._preferences.items())}
        return {"records": [record.config() for record in self.records()], "preferences": preferences}

    def _add(self, record: Record) -> None:
        key = record.kind, record.name, record.dist
        if key in self._records and self._records[key].origin != LOCAL:
            reason = f"{record.dist} registers {record.kind} {record.name!r} twice; keep one"
            record = broken_record(f"{record.name}-twice", record.origin, reason)
            key = record.kind, record.name, record.dist
        self._records[key] = record

    def _known(self, kind: str) -> tuple[Record, ...]:
        """Records of a kind, best first, less those that a settled clash passes over."""
        ranked = self.records(kind)
        if not ranked:
            raise UnknownPart(f"nothing of kind {kind!r} is registered; known kinds: {', '.join(self.kinds())}")
        for name in self._preferences.get(kind, ()):
            chosen = _called(ranked, name)
            if not chosen:
                raise UnknownPart(f"{kind} {name!r} is preferred but not registered; {_offer(ranked)}")
            if ":" in name:
                ranked = tuple(r for r in ranked if r.name != chosen[0].name or r in chosen)
        return ranked

    def _named(self, kind: str, name: str, need: Mapping[str, Any]) -> Record:
        broken = _called(self.records(BROKEN), name) or [r for r in self.records(BROKEN) if r.dist == name]
        try:
            chosen = _called(self._known(kind), name) or _called(self.records(kind), name)
        except UnknownPart:
            if not broken:
                raise
            chosen = []
        if not chosen and not broken:
            raise UnknownPart(f"no {kind} is called {name!r}; {_offer(self.records(kind))}{self._hint()}")
        record = (chosen or broken)[0]
        self._refuse_clash(chosen)
        reason = record.why_not(need)
        if reason is not None:
            raise PartUnavailable(f"{record} cannot serve {_spell(need)}: {reason}")
        return record

    def _hint(self) -> str:
        broken = self.records(BROKEN)
        names = ", ".join(sorted(record.name for record in broken))
        return f"; plugins that failed to load: {names} (see `deepinfer plugins`)" if broken else ""

    def _refuse_clash(self, records: Iterable[Record]) -> None:
        records = list(records)
        for name, count in Counter(record.name for record in records).items():
            if count > 1:
                same = [record for record in records if record.name == name]
                origins = " and ".join(sorted(record.origin for record in same))
                raise NameClash(
                    f"{same[0].kind} {name!r} is registered by {origins}; uninstall one, or pick one with "
                    f"registry.prefer({same[0].kind!r}, '{same[0].dist}:{name}')"
                )

    def _rank(self, record: Record) -> tuple[str, int, int, str, str]:
        return record.kind, self._preference(record), -record.priority, record.name, record.dist

    def _preference(self, record: Record) -> int:
        names = self._preferences.get(record.kind, ())
        places = [i for i, name in enumerate(names) if name in (record.name, f"{record.dist}:{record.name}")]
        return places[0] if places else len(names)

    def _why_behind(self, record: Record, picked: Record | None) -> str:
        if picked is None:
            return "nothing is picked"
        if self._preference(picked) < self._preference(record):
            return f"available, but {picked.name} is preferred"
        if picked.priority > record.priority:
            return f"available, but {picked.name} has priority {picked.priority}, this one {record.priority}"
        return f"available with the same priority, but {picked.name} comes first by name"


@functools.cache
def default_registry() -> Registry:
    """The registry that parts use when they are given none: everything installed.

    Made on the first call, which reads `DEEPINFER_PLUGINS` (see `deepinfer.environment`).
    """
    return Registry(plugins=load_environment().plugins)


def _called(records: Iterable[Record], name: str) -> list[Record]:
    return [record for record in records if name in (record.name, f"{record.dist}:{record.name}")]


def _offer(records: Iterable[Record]) -> str:
    names = sorted({record.name for record in records})
    return f"known: {', '.join(names)}" if names else "nothing of that kind is registered"


def _spell(need: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in need.items()) or "any need"
