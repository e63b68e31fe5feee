"""The order of a step: plan, launch, settle the step before, finish."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from ..errors import ConfigError
from ..plan import Plan, RowStatus, StepResult
from ..protocols import Executor
from .events import StepEvents
from .scheduler import Scheduler

__all__ = ["StepLoop"]


@attrs.define(eq=False)
class _OpenStep:
    """A plan that is not yet committed."""

    plan: Plan
    pending: Any = None
    failure: BaseException | None = None


class StepLoop:
    """Drives one scheduler and one executor. Owned by one thread.

    What the executor raises becomes the outcome of that step (every row FAILED) and never leaves the loop.
    `KeyboardInterrupt` and the like do; the interrupted step then counts as failed and is settled by the
    next call. An executor may have `abandon(pending)`, told when a step it launched will not be settled.

    Args:
        lag: 0 settles each step in the call that planned it. 1 plans and launches a step before the one
            before is settled, so that the device does not wait for the host; the tokens are the same.
        masks: asked for each plan after everything settled is known; its answer goes to `Executor.finish`.
        clock: seconds; on the same axis as `Sequence.arrival_s`.

    Raises:
        ConfigError: `lag` is neither 0 nor 1.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        lag: int = 0,
        masks: Callable[[Plan], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if lag not in (0, 1):
            raise ConfigError(f"lag is {lag}; expected 0 (settle at once) or 1 (one step later)")
        self.scheduler = scheduler
        self.executor = executor
        self.lag = lag
        self._masks = masks
        self._clock = clock
        self._open: deque[_OpenStep] = deque()
        # kept here so that an interrupted call loses none
        self._events: list[StepEvents] = []

    @property
    def idle(self) -> bool:
        """Nothing is in flight, nothing waits or runs, every end has been reported."""
        return not self._open and not self._events and not self.scheduler.has_work

    def step(self) -> list[StepEvents]:
        """Plan and start one step; returns the events of the steps that were settled meanwhile."""
        # only an interrupted call leaves more behind than the lag allows
        self._settle_until(self.lag)
        plan = self.scheduler.plan(self._clock())
        if plan is None:
            self._settle_until(0)
        else:
            step = _OpenStep(plan)
            self._open.append(step)
            self._guard(step, self._launch)
            self._settle_until(1)
            self._guard(step, self._finish)
            if self.lag == 0 or step.failure is not None:
                self._settle_until(0)
        return self._take_events()

    def flush(self) -> list[StepEvents]:
        """Settle what is in flight and plan nothing more."""
        self._settle_until(0)
        return self._take_events()

    def _settle_until(self, left: int) -> None:
        while len(self._open) > left:
            step = self._open[0]
            result = self._guard(step, self._settle)
            if result is None:
                result = _failed(step)
            self._open.popleft()
            self._events.append(self.scheduler.commit(step.plan, result, self._clock()))

    def _take_events(self) -> list[StepEvents]:
        events, self._events = self._events, []
        ended = self.scheduler.take_ended()
        if ended:
            events.append(StepEvents.between_steps(self.scheduler.last_step, ended))
        return events

    def _launch(self, step: _OpenStep) -> None:
        step.pending = self.executor.launch(step.plan)

    def _finish(self, step: _OpenStep) -> None:
        masks = None if self._masks is None else self._masks(step.plan)
        self.executor.finish(step.pending, masks)

    def _settle(self, step: _OpenStep) -> StepResult:
        return self.executor.settle(step.pending)

    def _guard(self, step: _OpenStep, call: Callable[[_OpenStep], StepResult | None]) -> StepResult | None:
        """Run one phase of a step unless an earlier one failed; what it raises becomes the step's failure."""
        if step.failure is not None:
            return None
        try:
            return call(step)
        except BaseException as failure:
            step.failure = failure
            abandon = getattr(self.executor, "abandon", None)
            if abandon is not None and step.pending is not None:
                abandon(step.pending)
            if not isinstance(failure, Exception):
                raise
            return None


def _failed(step: _OpenStep) -> StepResult:
    plan, num_rows = step.plan, step.plan.num_rows
    return StepResult(
        plan.step,
        np.full((num_rows, 1), -1, np.int32),
        np.zeros(num_rows, np.int32),
        np.full(num_rows, RowStatus.FAILED, np.uint8),
        failure=step.failure,
    )
