"""Every way a sequence can end besides being done: each hits that sequence alone."""

from __future__ import annotations

import pytest

from deepinfer.errors import DeepInferError, NumericalError, RequestError, StepFailed, UnsupportedOption
from deepinfer.plan import RowStatus
from deepinfer.schedulers import SequenceState
from deepinfer.types import FinishReason


class Gate:
    def __init__(self):
        self.done, self.error, self.cancelled = False, None, False

    def cancel(self):
        self.cancelled = True


class BrokenGate:
    @property
    def done(self):
        raise OSError("store gone")

    error = None

    def cancel(self):
        raise OSError("still gone")


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_cancelling_works_in_any_state(world, lag, after):
    w = world(lag=lag, max_rows=2, budget=8)
    first = w.submit(range(20), max_tokens=20, request_id="a")
    rest = [w.submit(range(5), max_tokens=3) for _ in range(3)]
    family = w.submit(range(6), max_tokens=9, n=3, request_id="f")
    for _ in range(after):
        w.step()
    w.scheduler.cancel("a")
    w.scheduler.cancel("f")
    w.scheduler.cancel("unknown")
    w.run()
    w.check_idle()
    assert {s.finish_reason for s in [first, *family]} == {FinishReason.CANCELLED}
    for sequence in rest:
        w.check_undisturbed(sequence)


def test_an_end_without_a_step_is_reported_too(world):
    w = world()
    gate = Gate()
    waiting = w.submit([1, 2], gates=(gate,))
    w.step()
    w.scheduler.cancel(waiting.request.request_id)
    assert w.scheduler.has_work
    (events,) = w.step()
    assert events.finished == [waiting] and events.plan.num_rows == 0 and list(events.emitted()) == []
    assert gate.cancelled and w.loop.idle


def test_finish_drops_what_is_in_flight_and_is_not_reported(world):
    w = world(lag=1)
    sequence, other = w.submit([1, 2], max_tokens=30), w.submit([3], max_tokens=5)
    for _ in range(5):
        w.step()
    settled = sequence.output_ids.tolist()
    assert w.scheduler.finish(sequence, FinishReason.STOP, stop_reason="###")
    assert not w.scheduler.finish(sequence, FinishReason.LENGTH)
    w.run()
    assert sequence.finish_reason is FinishReason.STOP and sequence.stop_reason == "###"
    assert sequence.output_ids.tolist() == settled == w.streamed[sequence]
    assert w.finished == [other]


@pytest.mark.parametrize("lag", [0, 1])
def test_deadlines_end_waiting_and_running_sequences(world, lag):
    w = world(lag=lag, max_rows=1)
    running = w.submit([1], max_tokens=100, deadline_s=5.5)
    waiting = w.submit([2], max_tokens=100, deadline_s=3.0)
    gated = w.submit([3], deadline_s=2.0, gates=(Gate(),))
    in_time = w.submit([4], max_tokens=3, deadline_s=500.0)
    ended = {}
    while not w.loop.idle:
        for event in w.step():
            ended.update(dict.fromkeys(event.finished, w.now))
    w.check_idle()
    assert [s.finish_reason for s in (running, waiting, gated)] == [FinishReason.DEADLINE] * 3
    assert (ended[gated], ended[waiting], ended[running]) == (2.0, 3.0, 6.0)
    assert running.output_ids.tolist() == w.toy(running, len(running.output_ids)).tolist()
    w.check_undisturbed(in_time)


def test_a_gate_holds_its_own_sequence_back_only(world):
    w = world(max_rows=1)
    gate = Gate()
    held = w.submit([1], max_tokens=2, gates=(gate,))
    other = w.submit([2], max_tokens=2)
    for _ in range(3):
        w.step()
    assert held.state is SequenceState.WAITING and other.finished
    assert w.scheduler.num_waiting == 1
    gate.done = True
    w.run()
    w.check_idle()
    w.check_undisturbed(held)
    assert not gate.cancelled


@pytest.mark.parametrize("error, expected", [(ValueError("bad"), RequestError), (UnsupportedOption("no"), None)])
def test_a_failed_gate_ends_its_own_request(world, error, expected):
    w = world()
    gate, second = Gate(), Gate()
    gate.done, gate.error = True, error
    failed = w.submit([1], gates=(gate, second))
    broken = w.submit([2], gates=(BrokenGate(),))
    fine = w.submit([3])
    w.run()
    w.check_idle()
    assert failed.finish_reason is broken.finish_reason is FinishReason.ERROR
    if expected is None:
        assert failed.error is error
    else:
        assert type(failed.error) is expected and failed.error.__cause__ is error
    assert isinstance(broken.error, DeepInferError) and isinstance(broken.error.__cause__, OSError)
    assert second.cancelled
    w.check_undisturbed(fine)


def at_length(first_token, length, status):
    """Rows of prompts that begin with `first_token` fail from `length` keys on."""

    def fault(admission, k_len):
        hit = admission.token_ids[0] == first_token and k_len >= length
        return status if hit else RowStatus.OK

    return fault


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_nan_ends_its_own_sequence(world, lag, num_drafts):
    w = world(lag=lag, num_drafts=num_drafts, fault=at_length(90, 12, RowStatus.NAN))
    good = [w.submit([i, 2, 3], max_tokens=20) for i in range(4)]
    bad = w.submit([90, 2, 3], max_tokens=20)
    w.run()
    w.check_idle()
    assert isinstance(bad.error, NumericalError)
    assert 0 < len(bad.output_ids) <= 9
    assert bad.output_ids.tolist() == w.toy(bad, len(bad.output_ids)).tolist()
    for sequence in good:
        w.check_undisturbed(sequence)
        assert sequence.num_preemptions == 0


def test_siblings_of_a_sample_that_fails_in_its_prompt_go_on(world):
    def fault(admission, k_len):
        return RowStatus.NAN if admission.sample_index == 0 else RowStatus.OK

    w = world(fault=fault, budget=4)
    first, *rest = w.submit(range(10), max_tokens=4, n=3)
    w.run()
    w.check_idle()
    assert isinstance(first.error, NumericalError)
    for sequence in rest:
        w.check_undisturbed(sequence)


@pytest.mark.parametrize("fails_at, offered", [(9, 0), (20, 12)])
def test_keys_a_failed_request_computed_are_not_offered_to_others(world, fails_at, offered):
    """Neither those of the prompt that failed nor those of outputs before a failure."""
    w = world(fault=at_length(90, fails_at, RowStatus.NAN), page_tokens=4)
    bad = w.submit([90, *range(12)], max_tokens=20)
    w.run()
    assert isinstance(bad.error, NumericalError)
    again = w.submit([*bad.prompt_ids, *w.toy(bad, 20)], max_tokens=2)
    w.step()
    assert again.num_cached_tokens == offered
    w.run()
    w.check_idle()


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("raise_in", ["launch", "finish", "settle"])
@pytest.mark.parametrize("length", [3, 12])
def test_one_request_that_makes_the_model_raise_takes_no_other_with_it(world, lag, raise_in, length):
    w = world(lag=lag, raise_in=raise_in, fault=at_length(91, length, RowStatus.FAILED))
    good = [w.submit([i, 2, 3], max_tokens=20) for i in range(5)]
    bad = w.submit([91, 2, 3], max_tokens=20)
    w.run()
    w.check_idle()
    assert isinstance(bad.error, StepFailed)
    assert isinstance(bad.error.__cause__, RuntimeError) and "injected" in str(bad.error.__cause__)
    for sequence in good:
        w.check_undisturbed(sequence)
        assert not sequence.suspect
    # all together, then the culprit alone; a failure seen late finds the next step already running
    assert w.scheduler.counters.failed_steps == 2 + (lag == 1 and raise_in == "settle")


def test_suspects_run_alone_once_and_together_again_afterwards(world):
    w = world(fault=at_length(91, 8, RowStatus.FAILED))
    good = [w.submit([i, 2, 3], max_tokens=20) for i in range(3)]
    w.submit([91, 2, 3], max_tokens=20)
    late = None
    while not w.scheduler.counters.failed_steps:
        w.step()
    start = len(w.plans)
    late = w.submit([5, 5], max_tokens=4)
    w.run()
    w.check_idle()
    rows = [plan.num_rows for plan in w.plans[start:]]
    assert rows[:4] == [1, 1, 1, 1] and max(rows[4:]) == 4
    for sequence in [*good, late]:
        w.check_undisturbed(sequence)


def test_two_poisonous_requests_are_both_found(world):
    w = world(fault=at_length(91, 6, RowStatus.FAILED), lag=1)
    bad = [w.submit([91, i], max_tokens=9) for i in range(2)]
    good = [w.submit([i], max_tokens=9) for i in range(2)]
    w.run()
    w.check_idle()
    assert all(isinstance(sequence.error, StepFailed) for sequence in bad)
    for sequence in good:
        w.check_undisturbed(sequence)


def test_suspects_are_found_under_memory_pressure(world):
    w = world(num_pages=14, page_tokens=4, max_len=50, lag=1, budget=16, fault=at_length(91, 20, RowStatus.FAILED))
    good = [w.submit(range(i, i + 12), max_tokens=20) for i in range(5)]
    bad = w.submit([91, *range(8)], max_tokens=25)
    w.run()
    w.check_idle()
    assert isinstance(bad.error, StepFailed)
    for sequence in good:
        w.check_undisturbed(sequence)


def test_an_executor_that_gives_no_token_cannot_hang_a_request(world):
    w = world()
    sequence = w.submit([1, 2], max_tokens=5)
    finish = w.executor.finish

    def silent(pending, masks):
        finish(pending, masks)
        pending.num_out[:] = 0

    w.executor.finish = silent
    w.run()
    assert isinstance(sequence.error, StepFailed) and "no token" in str(sequence.error)
