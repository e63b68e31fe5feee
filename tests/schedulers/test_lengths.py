"""Lengths are upper bounds until a step is settled; what stops late is dropped."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from deepinfer.types import FinishReason


def traced(w):
    """Record (plan, true keys of each row, tokens given) of every step."""
    steps = []
    settle = w.executor.settle

    def settled(pending):
        result = settle(pending)
        steps.append((pending.plan, pending.k_len, result.num_out))
        return result

    w.executor.settle = settled
    return steps


def spied(owner, name):
    """Positional arguments of every call of a method from now on."""
    calls, method = [], getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: (calls.append(args), method(*args, **kwargs))[1])
    return calls


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_the_true_length_is_the_planned_one_less_what_was_rejected(world, lag, num_drafts):
    w = world(lag=lag, num_drafts=num_drafts, max_rows=6, num_pages=300, max_len=200, budget=40)
    steps = traced(w)
    for index in range(12):
        w.submit(range(index + 1), max_tokens=30 + index)
    w.run()
    w.check_idle()
    checked = rejected_at_all = 0
    before = {}
    for plan, k_len, num_out in steps:
        rejected = {}
        for row in range(plan.num_rows):
            slot = int(plan.slots[row])
            # the shortest sequence needs 30 keys: from there on rows may be capped by their limit
            if row < plan.num_verify and lag == 1 and slot in before and plan.k_max[row] < 30:
                assert k_len[row] == plan.k_max[row] - before[slot]
                checked += 1
                rejected_at_all += before[slot] > 0
            assert k_len[row] <= plan.k_max[row]
            rejected[slot] = int(plan.q_max[row] - num_out[row]) if row < plan.num_verify else 0
        before = rejected
    assert lag == 0 or checked > 50
    assert lag == 0 or (rejected_at_all > 10) == (num_drafts > 0)


def test_carried_rows_bring_no_token_and_fresh_rows_bring_theirs(world):
    w = world(lag=1)
    sequence = w.submit([5, 6, 7], max_tokens=4)
    w.run()
    first, *rest = w.plans
    assert first.chunk_ids.tolist() == [5, 6, 7]
    assert first.chunk_start.tolist() == [0]
    assert [plan.num_verify for plan in w.plans] == [0, 1, 1, 1]
    assert all(len(plan.chunk_ids) == 0 and plan.chunk_start.tolist() == [-1] for plan in rest)
    assert [int(plan.k_max[0]) for plan in w.plans] == [3, 4, 5, 6]
    w.check_undisturbed(sequence)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_sequence_that_stops_gives_nothing_in_the_step_after(world, num_drafts):
    """Its pages stay out of reach until that step is over."""
    w = world(lag=1, num_drafts=num_drafts, num_pages=5, page_tokens=4, max_rows=2, budget=16, max_len=64)
    prompt = [1, 2, 3]
    tokens = w.toy(w.submit(prompt, max_tokens=1, request_id="same"), 12).tolist()
    w.run()
    stop = next(t for i, t in enumerate(tokens) if i >= 4 and t not in tokens[:i])
    w.plans.clear()
    stopped = w.submit(prompt, max_tokens=12, stop_ids=(stop,), request_id="same")
    while not stopped.finished:
        w.step()
    in_flight = w.plans[-1]
    pages = {int(p) for plan in w.plans for p in plan.page_delta[:, 2]}
    assert stopped.finish_reason is FinishReason.STOP and stopped.output_ids[-1] == stop
    assert stopped.slot == 0 and len(in_flight.slots) == 1
    # more than is free: the newcomer has to wait for the fenced pages
    w.submit(range(13), max_tokens=1)
    before = len(w.plans)
    events = w.loop.step()
    assert len(w.plans) == before, "nothing can be planned before the dropped step is over"
    assert [e.plan.step for e in events] == [in_flight.step]
    assert events[0].rows.tolist() == [] and events[0].finished == []
    w.loop.step()
    reused = {int(p) for p in w.plans[-1].page_delta[:, 2]}
    assert reused & pages
    w.run()
    assert w.executor.violations == []


def test_flush_settles_the_last_step_exactly_once(world):
    w = world(lag=1)
    w.submit([1, 2], max_tokens=50)
    for _ in range(4):
        w.step()
    assert not w.loop.idle
    events = w.loop.flush()
    assert [e.plan.step for e in events] == [4]
    assert w.loop.flush() == []
    assert w.scheduler.counters.steps == 4
    w._record(events)
    w.run()
    w.check_idle()
    w.check_undisturbed(w.sequences[0])


def test_a_stop_inside_an_accepted_run_cuts_it(world):
    """The keys that count as computed are those of the tokens really kept."""
    cut = 0
    for index in range(40):
        w = world(num_drafts=3, num_pages=100, max_len=100)
        alone = w.toy(w.submit([index, 1], max_tokens=30), 30).tolist()
        stop = alone[9]
        w.scheduler.cancel("r0")
        sequence = w.submit([index, 1], max_tokens=30, stop_ids=(stop,), request_id="r0")
        steps = traced(w)
        published = spied(w.book, "publish")
        w.run()
        w.check_idle()
        w.check_undisturbed(sequence)
        given = sum(int(num_out.sum()) for _, _, num_out in steps)
        cut += given > len(sequence.output_ids)
        total = sequence.prompt_len + len(sequence.output_ids)
        assert all(len(token_ids) <= total - 1 for token_ids, _ in published)
    assert cut > 5


@pytest.mark.parametrize("min_tokens", [0, 3, 8])
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_stop_ids_do_not_count_before_min_tokens(world, min_tokens, num_drafts):
    w = world(num_drafts=num_drafts, max_len=100)
    stops = tuple(range(0, 97, 2))
    sequences = [w.submit([i], max_tokens=10, stop_ids=stops, min_tokens=min_tokens) for i in range(8)]
    w.run()
    w.check_idle()
    for sequence in sequences:
        w.check_undisturbed(sequence)
        assert len(sequence.output_ids) > min_tokens


def outputs_of(w, seed=3):
    rng = np.random.default_rng(seed)
    for index in range(14):
        n = 2 if index % 5 == 0 else 1
        prompt = np.concatenate([np.arange(index % 3 * 6), rng.integers(0, 97, rng.integers(1, 30))])
        w.submit(prompt, max_tokens=int(rng.integers(1, 30)), n=n, stop_ids=(int(rng.integers(97)),))
    w.run()
    w.check_idle()
    return [(s.finish_reason, s.output_ids.tolist()) for s in w.sequences]


def test_tokens_do_not_depend_on_lag_drafts_chunks_rows_or_pages(world):
    expected = outputs_of(world(num_pages=400, prefix_caching=False))
    variants = [
        {"lag": 1},
        {"num_drafts": 1},
        {"num_drafts": 3, "lag": 1},
        {"max_chunk": 1},
        {"max_chunk": 3, "lag": 1},
        {"budget": 9, "max_rows": 8},
        {"max_rows": 1, "budget": 5},
        {"num_pages": 17, "lag": 1},
        {"num_pages": 17, "num_drafts": 3, "lag": 1, "budget": 40},
        {"num_pages": 90, "page_tokens": 1},
    ]
    for variant in variants:
        assert outputs_of(world(**variant)) == expected, variant


def test_rows_whose_allowance_is_in_flight_are_not_planned_again(world):
    w = world(lag=1)
    w.submit([1, 2, 3], max_tokens=5)
    w.run()
    assert [plan.num_rows for plan in w.plans] == [1] * 5
    assert w.scheduler.counters.dropped_rows == 0


def test_no_row_drafts_more_than_its_sequence_may_still_give(world):
    w = world(num_drafts=3)
    sequence = w.submit([1, 2, 3], max_tokens=17)
    left = []
    while not w.loop.idle:
        before = sequence.max_tokens - sequence.num_outputs
        w.step()
        left.append((before, int(w.plans[-1].q_max[0])))
    assert all(planned == min(4, before) for before, planned in left[1:])
    assert {planned for _, planned in left[1:]} > {4}


def test_the_context_ends_a_sequence(world):
    w = world(max_len=20)
    sequence = w.submit(range(15), max_tokens=100)
    w.run()
    assert sequence.finish_reason is FinishReason.LENGTH and len(sequence.output_ids) == 5
    w.check_undisturbed(sequence)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_pool_that_one_sequence_fills_ends_it_at_the_same_token(world, lag, num_drafts):
    w = world(num_pages=6, page_tokens=4, max_len=500, lag=lag, num_drafts=num_drafts)
    lengths = [w.submit(range(prompt_len), max_tokens=400) for prompt_len in (1, 9, 20)]
    w.run()
    w.check_idle()
    for sequence in lengths:
        assert sequence.prompt_len + len(sequence.output_ids) == 21
        w.check_undisturbed(sequence)


def test_python_calls_per_step_do_not_grow_with_rows(world):
    """No Python loop over running rows in plan or commit."""

    def calls(num_rows):
        w = world(max_rows=num_rows, budget=4 * num_rows, num_pages=40 * num_rows, max_len=64)
        for _ in range(num_rows):
            w.submit([1, 2, 3], max_tokens=50)
        for _ in range(3):
            w.step()
        counts = []
        for _ in range(8):
            count = [0]

            def count_call(_frame, event, _arg, count=count):
                count[0] += event == "call"

            sys.setprofile(count_call)
            plan = w.scheduler.plan(0.0)
            sys.setprofile(None)
            pending = w.executor.launch(plan)
            w.executor.finish(pending, None)
            result = w.executor.settle(pending)
            sys.setprofile(count_call)
            events = w.scheduler.commit(plan, result, 0.0)
            sys.setprofile(None)
            assert len(events.rows) == num_rows
            counts.append(count[0])
        return counts

    assert calls(4) == calls(400)
