"""Who is served first. A policy gives each sequence one key when it is submitted; the smallest goes first.

A key that never changes keeps the waiting queue a heap. Ageing needs no changing key either: adding
`rate * arrival` orders two entries at every moment as if both had aged alike.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from ..protocols import WaitingView

__all__ = ["FairShare", "Fcfs", "Priority", "ShortestPrompt"]


class Fcfs:
    """First come, first served."""

    def key(self, entry: WaitingView) -> float:
        return entry.arrival_s

    def admitted(self, entry: WaitingView) -> None:
        pass

    def config(self) -> Mapping[str, Any]:
        return {"name": "fcfs"}


class ShortestPrompt:
    """Short prompts first, but a second of waiting makes a prompt as good as one `ageing` tokens shorter.

    A prompt of L tokens is overtaken only by those that arrive within L / ageing seconds after it.

    Raises:
        ConfigError: `ageing` is not a number of at least 0 (0 lets long prompts starve).
    """

    def __init__(self, *, ageing: float = 512.0) -> None:
        if not 0.0 <= ageing < math.inf:
            raise ConfigError(f"ageing is {ageing}; expected tokens per second, at least 0")
        self.ageing = ageing

    def key(self, entry: WaitingView) -> float:
        return entry.prompt_len + self.ageing * entry.arrival_s

    def admitted(self, entry: WaitingView) -> None:
        pass

    def config(self) -> Mapping[str, Any]:
        return {"name": "shortest-prompt", "ageing": self.ageing}


class Priority:
    """Larger `Request.priority` first, earlier arrival among equals.

    Strict by default: a steady stream of urgent requests starves the others. With `ageing` > 0 a second of
    waiting is worth that many priority levels, so that nothing waits for ever.

    Raises:
        ConfigError: `ageing` is not a number of at least 0.
    """

    def __init__(self, *, ageing: float = 0.0) -> None:
        if not 0.0 <= ageing < math.inf:
            raise ConfigError(f"ageing is {ageing}; expected priority levels per second, at least 0")
        self.ageing = ageing

    def key(self, entry: WaitingView) -> tuple[float, float]:
        return (self.ageing * entry.arrival_s - entry.request.priority, entry.arrival_s)

    def admitted(self, entry: WaitingView) -> None:
        pass

    def config(self) -> Mapping[str, Any]:
        return {"name": "priority", "ageing": self.ageing}


class FairShare:
    """Equal shares of the machine for `Request.user`s with work to do, by start-time fair queueing.

    A request costs its prompt plus `output_cost` times its `max_tokens`. It is tagged with the later of the
    virtual time and its user's last finish tag; the user's finish tag moves on by cost / weight. Virtual time is
    the largest tag admitted, so that an idle user saves up nothing (Goyal, Vin, Cheng 1996).

    Args:
        weights: share of a user against others; users not named have 1.
        output_cost: price of one token of `max_tokens`, in prompt tokens.

    Raises:
        ConfigError: a weight is not positive, or `output_cost` negative.
    """

    def __init__(self, *, weights: Mapping[str, float] | None = None, output_cost: float = 1.0) -> None:
        self.weights = dict(weights or {})
        for user, weight in self.weights.items():
            if not 0.0 < weight < math.inf:
                raise ConfigError(f"weight of user {user!r} is {weight}; expected a positive number")
        if not 0.0 <= output_cost < math.inf:
            raise ConfigError(f"output_cost is {output_cost}; expected at least 0")
        self.output_cost = output_cost
        self._now = 0.0
        self._finish: dict[str, float] = {}
        self._tags: weakref.WeakKeyDictionary[WaitingView, float] = weakref.WeakKeyDictionary()

    def key(self, entry: WaitingView) -> float:
        user = entry.request.user
        tag = max(self._now, self._finish.get(user, 0.0))
        cost = entry.prompt_len + self.output_cost * entry.request.params.max_tokens
        self._finish[user] = tag + cost / self.weights.get(user, 1.0)
        self._tags[entry] = tag
        return tag

    def admitted(self, entry: WaitingView) -> None:
        tag = self._tags.pop(entry, self._now)
        if tag > self._now:
            self._now = tag
            # a user whose last tag has passed is as good as one never seen
            if len(self._finish) > 1024:
                self._finish = {user: finish for user, finish in self._finish.items() if finish > tag}

    def config(self) -> Mapping[str, Any]:
        return {"name": "fair-share", "weights": dict(self.weights), "output_cost": self.output_cost}
