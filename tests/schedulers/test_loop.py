"""The order of a step, and what happens when a phase of it raises."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.errors import ConfigError, StepFailed
from deepinfer.plan import StepResult
from deepinfer.protocols import Executor
from deepinfer.schedulers import FakeExecutor, StepLoop


def traced(w):
    """Names and step numbers of everything the loop does, in order."""
    trace = []

    def wrap(owner, name, step_of):
        method = getattr(owner, name)

        def call(*args):
            value = method(*args)
            trace.append((name, step_of(args, value)))
            return value

        setattr(owner, name, call)

    wrap(w.scheduler, "plan", lambda args, value: value and value.step)
    wrap(w.scheduler, "commit", lambda args, value: args[0].step)
    wrap(w.executor, "launch", lambda args, value: args[0].step)
    wrap(w.executor, "finish", lambda args, value: args[0].plan.step)
    wrap(w.executor, "settle", lambda args, value: args[0].plan.step)
    return trace


def test_order_without_lag(world):
    w = world()
    w.submit([1], max_tokens=2)
    trace = traced(w)
    w.step()
    assert trace == [("plan", 1), ("launch", 1), ("finish", 1), ("settle", 1), ("commit", 1)]


def test_order_with_lag(world):
    asked = []
    w = world(lag=1, masks=lambda plan: asked.append((plan.step, list(trace))))
    w.submit([1], max_tokens=2)
    trace = traced(w)
    w.step()
    assert trace == [("plan", 1), ("launch", 1), ("finish", 1)]
    trace.clear()
    w.step()
    assert trace == [("plan", 2), ("launch", 2), ("settle", 1), ("commit", 1), ("finish", 2)]
    # masks may depend on everything that was settled
    assert asked[1] == (2, trace[:4])
    trace.clear()
    w.step()
    assert trace == [("plan", None), ("settle", 2), ("commit", 2)]
    assert w.loop.idle


def test_masks_reach_the_executor(world):
    w = world(masks=lambda plan: ("masks of", plan.step))
    w.submit([1], max_tokens=1)
    seen = []
    w.executor.finish = lambda pending, masks, finish=w.executor.finish: (seen.append(masks), finish(pending, masks))
    w.step()
    assert seen == [("masks of", 1)]


def test_masks_that_raise_fail_the_step_not_the_loop(world):
    def masks(plan):
        raise KeyError("row 3")

    w = world(masks=masks)
    sequence = w.submit([1], max_tokens=1)
    w.run()
    assert isinstance(sequence.error, StepFailed) and isinstance(sequence.error.__cause__, KeyError)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("phase", ["launch", "finish", "settle"])
def test_an_interrupt_leaves_the_loop_but_not_in_pieces(world, lag, phase):
    w = world(lag=lag)
    sequences = [w.submit([i, 2, 3], max_tokens=10) for i in range(4)]
    for _ in range(3):
        w.step()
    method = getattr(w.executor, phase)

    def interrupted(*args):
        setattr(w.executor, phase, method)
        raise KeyboardInterrupt

    setattr(w.executor, phase, interrupted)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(3):
            w.step()
    w.run()
    w.check_idle()
    for sequence in sequences:
        w.check_undisturbed(sequence)


def test_abandon_is_told_about_steps_that_were_launched(world):
    w = world()
    w.submit([1], max_tokens=3)
    abandoned = []
    w.executor.abandon = lambda pending: abandoned.append(pending.plan.step)
    settle = w.executor.settle
    w.executor.settle = lambda pending: settle(pending) if pending.plan.step != 2 else 1 / 0
    w.run()
    assert abandoned == [2]


def test_an_executor_needs_no_more_than_the_protocol(world):
    class Plain:
        def launch(self, plan):
            return plan

        def finish(self, pending, masks):
            pass

        def settle(self, pending):
            if pending.step == 3:
                raise RuntimeError("device lost")
            count = np.zeros(pending.num_rows, np.int32)
            count[pending.emits] = 1
            tokens = np.where(count[:, None] > 0, 5, -1).astype(np.int32)
            return StepResult(pending.step, tokens, count, np.zeros(pending.num_rows, np.uint8))

    w = world()
    assert isinstance(Plain(), Executor) and isinstance(w.executor, Executor)
    w.loop = StepLoop(w.scheduler, Plain(), clock=lambda: w.now)
    doomed = w.submit([1], max_tokens=10)
    w.run()
    assert isinstance(doomed.error, StepFailed) and doomed.output_ids.tolist() == [5, 5]
    after = w.submit([1], max_tokens=3)
    w.run()
    assert after.output_ids.tolist() == [5, 5, 5]


def test_commits_out_of_order_are_refused(world):
    w = world()
    w.submit([1], max_tokens=5)
    first = w.scheduler.plan(0.0)
    second = w.scheduler.plan(0.0)
    assert second is not None
    pending = w.executor.launch(first)
    w.executor.finish(pending, None)
    result = w.executor.settle(pending)
    with pytest.raises(ConfigError, match="in the order"):
        w.scheduler.commit(second, result, 0.0)
    w.scheduler.commit(first, result, 0.0)
    with pytest.raises(ConfigError, match="expected step 2"):
        w.scheduler.commit(first, result, 0.0)


def test_lag_is_zero_or_one(world):
    w = world()
    with pytest.raises(ConfigError, match="lag is 2"):
        StepLoop(w.scheduler, w.executor, lag=2)


def test_two_loops_in_one_process_do_not_meet(world):
    a, b = world(lag=1), world(num_pages=20, num_drafts=1)
    for w in (a, b):
        for index in range(6):
            w.submit(range(index + 1), max_tokens=12)
    while not (a.loop.idle and b.loop.idle):
        a.step()
        b.step()
    for w in (a, b):
        w.check_idle()
        for sequence in w.sequences:
            w.check_undisturbed(sequence)


def test_latency_is_spent_in_settle():
    executor = FakeExecutor(num_pages=4, page_tokens=4, max_rows=1, max_len=12, latency_s=0.01)
    from deepinfer.cache import PagedBook
    from deepinfer.schedulers import Scheduler, Sequence
    from deepinfer.types import Request

    scheduler = Scheduler(PagedBook(4, page_tokens=4), max_rows=1, max_tokens_per_step=4, max_len=12)
    request = Request(request_id="a", prompt_ids=(1,))
    scheduler.add(Sequence(request, prompt_ids=np.ones(1, np.int32), max_tokens=1))
    (events,) = StepLoop(scheduler, executor).step()
    assert events.result.seconds >= 0.01
