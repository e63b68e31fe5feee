"""Stop strings on streamed text: nothing at or behind a stop is ever let through."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopMatcher"]


class StopMatcher:
    """Holds back text that may still become a stop string. One per completion.

    >>> stop = StopMatcher(["END"])
    >>> stop.push("good E"), stop.push("N"), stop.push("D bad")
    ('good ', '', '')
    >>> stop.hit
    'END'
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        #: The stop string that was met; text pushed afterwards is swallowed.
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """Text that is safe to show now. The earliest stop wins; at one place the one listed first."""
        if self.hit is not None:
            return ""
        held = self._held + text
        found = [(at, stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            at, self.hit = min(found, key=lambda pair: pair[0])
            self._held = ""
            return held[:at]
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """What was held back, once the completion has ended otherwise."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
