"""Slots and pages: admission, prefix hits, forks, preemption."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.errors import ConfigError, ContextLengthExceeded, InvalidRequest, OutOfPages
from deepinfer.plan import Move
from deepinfer.schedulers import Priority, Sequence, SequenceState
from deepinfer.types import FinishReason, Request, SamplingParams


def test_decode_rows_come_first_and_chunks_take_what_is_left(world):
    w = world(budget=10, max_rows=4)
    first = w.submit(range(3), max_tokens=20)
    w.step()
    w.submit(range(25), max_tokens=2)
    w.step()
    plan = w.plans[-1]
    assert plan.num_verify == 1 and plan.slots[0] == first.slot
    assert plan.q_max.tolist() == [1, 9]
    assert plan.emits.tolist() == [0]
    assert plan.chunk_ids.tolist() == list(range(9))
    w.step()
    assert w.plans[-1].chunk_start.tolist() == [-1, 9]
    w.step()
    assert w.plans[-1].q_max.tolist() == [1, 7] and w.plans[-1].emits.tolist() == [0, 1]
    w.run()
    w.check_idle()


def test_pages_are_taken_chunk_by_chunk(world):
    w = world(budget=8, page_tokens=4)
    w.submit(range(30), max_tokens=2)
    held = []
    for _ in range(4):
        w.step()
        held.append(w.book.stats().pages.num_held)
    assert held == [2, 4, 6, 8]
    w.run()
    w.check_idle()


def test_a_cached_prefix_is_not_computed_again(world):
    w = world()
    first = w.submit(range(20), max_tokens=3)
    w.run()
    second = w.submit([*range(16), 50, 51], max_tokens=3)
    other_tenant = w.submit(range(20), max_tokens=3, salt="tenant")
    w.run()
    w.check_idle()
    assert (first.num_cached_tokens, second.num_cached_tokens, other_tenant.num_cached_tokens) == (0, 16, 0)
    assert w.plans[3].chunk_start.tolist() == [16, 0]
    for sequence in w.sequences:
        w.check_undisturbed(sequence)


def test_a_whole_prompt_in_the_cache_leaves_one_token_to_compute(world):
    w = world(page_tokens=4)
    w.submit(range(16), max_tokens=8)
    w.run()
    again = w.submit(range(16), max_tokens=8)
    w.run()
    w.check_idle()
    assert again.num_cached_tokens == 12
    w.check_undisturbed(again)


def test_prompt_logprobs_compute_every_position_of_the_first_sample(world):
    w = world(budget=8)
    w.submit(range(12), max_tokens=2)
    w.run()
    params = SamplingParams(max_tokens=2, prompt_logprobs=0, n=2)
    scored = w.submit(range(12), max_tokens=2, n=2, params=params)
    start = len(w.plans)
    w.run()
    w.check_idle()
    rows = [(plan, row) for plan in w.plans[start:] for row in plan.scored.tolist()]
    spans = [(int(plan.chunk_start[row]), int(plan.q_max[row])) for plan, row in rows]
    assert spans == [(0, 8), (8, 4)]
    assert scored[0].num_cached_tokens == 0 and scored[1].num_cached_tokens == 11


@pytest.mark.parametrize("prompt_len", [1, 2, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("lag", [0, 1])
def test_samples_share_whole_prompt_pages_and_copy_the_tail(world, prompt_len, lag):
    w = world(page_tokens=4, lag=lag, prefix_caching=False)
    samples = w.submit(range(prompt_len), max_tokens=9, n=3)
    w.step()
    assert [s.state for s in samples] == [SequenceState.RUNNING, SequenceState.WAITING, SequenceState.WAITING]
    w.step()
    if lag:
        w.step()
    plan = w.plans[-1]
    assert len(plan.admissions) == 2
    shared, rest = divmod(prompt_len - 1, 4)
    pages = {int(slot): [] for slot in plan.slots}
    for earlier in w.plans:
        for slot, index, page in earlier.page_delta.tolist():
            assert index == len(pages[slot])
            pages[slot].append(page)
    parent, *children = (pages[s.slot] for s in samples)
    for child in children:
        assert child[:shared] == parent[:shared]
        assert child[shared] != parent[shared]
    assert list(plan.moves) == ([Move(parent[shared], child[shared]) for child in children] if rest else [])
    assert plan.chunk_start[plan.num_verify :].tolist() == [prompt_len - 1] * 2
    w.run()
    w.check_idle()
    assert w.scheduler.counters.forks == 2
    assert len({tuple(s.output_ids) for s in samples}) == 3
    for sample in samples:
        w.check_undisturbed(sample)


def test_samples_of_a_parent_that_ended_start_on_their_own(world):
    w = world(max_rows=1, page_tokens=4, prefix_caching=False)
    samples = w.submit(range(6), max_tokens=1, n=3)
    w.run()
    w.check_idle()
    assert w.scheduler.counters.forks == 0
    for sample in samples:
        w.check_undisturbed(sample)


def test_the_source_of_a_copy_outlives_its_owner(world):
    """The parent ends while the step that copies its tail page is in flight."""
    w = world(page_tokens=4, lag=1, prefix_caching=False, num_pages=8, max_rows=3, budget=32)
    parent, child = w.submit(range(6), max_tokens=20, n=2)
    w.step()
    w.step()
    w.step()
    plan = w.plans[-1]
    assert len(plan.moves) == 1
    w.finished.append(parent)
    assert w.scheduler.finish(parent, FinishReason.CANCELLED)
    assert w.book.pool.state(plan.moves[0].src).value == "fenced"
    w.submit(range(12), max_tokens=2)
    w.run()
    w.check_idle()
    w.check_undisturbed(child)


def test_the_last_in_order_is_preempted_and_comes_back_with_its_tokens(world):
    w = world(num_pages=13, page_tokens=4, max_len=60, prefix_caching=False)
    first = w.submit(range(10), max_tokens=30)
    second = w.submit(range(10, 20), max_tokens=30)
    while not w.scheduler.num_preemptions:
        w.step()
    assert second.state is SequenceState.WAITING and first.state is SequenceState.RUNNING
    kept = second.output_ids.tolist()
    assert kept and kept == w.toy(second)[: len(kept)].tolist()
    w.run()
    w.check_idle()
    assert first.num_preemptions == 0 and second.num_preemptions == 1
    back = next(a for plan in w.plans for a in plan.admissions if a.prompt_len == 10 and len(a.token_ids) > 10)
    assert back.token_ids.tolist() == [*second.prompt_ids, *kept]
    for sequence in w.sequences:
        w.check_undisturbed(sequence)


def test_only_what_is_needed_is_preempted(world):
    """A row with room on its page runs on while another gives up its pages."""
    w = world(num_pages=8, page_tokens=4, max_len=60, prefix_caching=False, max_rows=3, reserve=0.0)
    tight = w.submit(range(8), max_tokens=8)
    roomy = w.submit(range(9), max_tokens=3)
    last = w.submit(range(5), max_tokens=8)
    w.step()
    w.step()
    assert last.num_preemptions == 1 and roomy.num_preemptions == tight.num_preemptions == 0
    assert set(w.plans[-1].slots.tolist()) == {tight.slot, roomy.slot}
    w.run()
    w.check_idle()
    for sequence in w.sequences:
        w.check_undisturbed(sequence)


def test_at_lag_one_a_needy_row_waits_for_fenced_pages_instead_of_driving_out_more(world):
    w = world(num_pages=10, page_tokens=4, max_len=60, prefix_caching=False, lag=1, max_rows=4, reserve=0.0)
    for start in (0, 10, 20):
        w.submit(range(start, start + 10), max_tokens=20)
    while not w.scheduler.num_preemptions:
        w.step()
    assert w.scheduler.num_preemptions == 1
    w.run()
    w.check_idle()
    for sequence in w.sequences:
        w.check_undisturbed(sequence)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("max_chunk", [None, 4])
def test_preemption_does_not_thrash(world, lag, max_chunk):
    """With room for two of six, recomputation stays a fraction of the work."""
    w = world(num_pages=22, page_tokens=4, max_len=60, lag=lag, prefix_caching=False, max_rows=6, max_chunk=max_chunk)
    for start in range(6):
        w.submit(range(start * 10, start * 10 + 10), max_tokens=30)
    w.run()
    w.check_idle()
    counters = w.scheduler.counters
    assert counters.preemptions > 0
    assert counters.chunk_tokens < 4 * 60 + 6 * 40
    for sequence in w.sequences:
        w.check_undisturbed(sequence)


def test_nothing_is_admitted_while_a_running_row_goes_without(world):
    w = world(num_pages=13, page_tokens=4, max_len=40, max_chunk=8, prefix_caching=False, reserve=0.0)
    w.submit(range(5), max_tokens=9)
    prompt = w.submit(range(16), max_tokens=2)
    w.step()
    held = w.book.allocate(w.book.num_free - 1)
    late = w.submit([1], max_tokens=1)
    w.step()
    # one page is free, the prompt needs two; the newcomer would do with one
    assert w.book.num_free == 1 and late.admitted_s is None
    w.book.release(held)
    w.run()
    w.check_idle()
    assert w.scheduler.num_preemptions == 0
    for sequence in (prompt, late):
        w.check_undisturbed(sequence)


def test_a_later_sequence_sits_out_rather_than_drive_out_an_earlier_one(world):
    w = world(num_pages=6, page_tokens=4, max_len=21, prefix_caching=False, reserve=0.0)
    first = w.submit(range(9), max_tokens=3)
    second = w.submit(range(8), max_tokens=9)
    w.step()
    w.step()
    assert w.plans[-1].slots.tolist() == [first.slot]
    assert first.num_preemptions == second.num_preemptions == 0
    w.run()
    w.check_idle()
    w.check_undisturbed(first)
    w.check_undisturbed(second)


def test_a_chunk_may_drive_out_a_row_already_chosen_for_the_step(world):
    """An urgent prompt grows at the cost of a decoding row, which then is not in the plan."""
    w = world(
        num_pages=11, page_tokens=4, max_len=40, max_chunk=8, prefix_caching=False, reserve=0.0, policy=Priority()
    )
    low = w.submit(range(13), max_tokens=9)
    w.step()
    w.step()
    high = w.submit(range(24), max_tokens=2, priority=1)
    w.step()
    held = w.book.allocate(w.book.num_free)
    w.step()
    plan = w.plans[-1]
    assert low.num_preemptions == 1
    assert plan.slots.tolist() == [high.slot] and plan.num_verify == 0
    w.book.release(held)
    w.run()
    w.check_idle()
    w.check_undisturbed(low)
    w.check_undisturbed(high)


def test_what_cannot_fit_is_refused_at_submission(world):
    w = world(num_pages=5, page_tokens=4, max_len=100)
    w.submit(range(16), max_tokens=1)
    with pytest.raises(ContextLengthExceeded, match=r"17 tokens.*100.*cache 16"):
        w.submit(range(17), max_tokens=1)
    with pytest.raises(ContextLengthExceeded, match="10 tokens"):
        world(max_len=10).submit(range(10), max_tokens=1)
    with pytest.raises(InvalidRequest, match="empty"):
        w.submit([], max_tokens=1)
    with pytest.raises(InvalidRequest, match="added before"):
        w.scheduler.add(w.sequences[0])
    request = Request(request_id="x", prompt_ids=(1,))
    lonely = Sequence(request, prompt_ids=np.ones(1, np.int32), max_tokens=1)
    child = Sequence(request, prompt_ids=np.ones(1, np.int32), max_tokens=1, parent=lonely)
    with pytest.raises(InvalidRequest, match="parent"):
        w.scheduler.add(child)
    w.run()
    w.check_idle()


def test_pages_held_elsewhere_end_a_request_instead_of_hanging_it(world):
    w = world(num_pages=9, page_tokens=4, max_len=64)
    held = w.book.allocate(6)
    prompt_too_long = w.submit(range(12), max_tokens=3)
    output_too_long = w.submit(range(4), max_tokens=20)
    w.run()
    assert prompt_too_long.finish_reason is FinishReason.ERROR
    assert isinstance(prompt_too_long.error, OutOfPages)
    assert output_too_long.finish_reason is FinishReason.LENGTH
    assert output_too_long.output_ids.tolist() == w.toy(output_too_long, 5).tolist()
    w.book.release(held)
    w.check_idle()


def test_prompts_that_outgrow_a_pool_held_elsewhere_end_too(world):
    w = world(num_pages=9, page_tokens=4, max_len=64, budget=8)
    held = w.book.allocate(4)
    sequence = w.submit(range(30), max_tokens=3)
    w.run()
    assert isinstance(sequence.error, OutOfPages)
    w.book.release(held)
    w.check_idle()


@pytest.mark.parametrize(
    "bad",
    [{"max_rows": 0}, {"budget": 0}, {"max_len": 1}, {"num_drafts": -1}, {"max_chunk": 0}, {"reserve": 1.0}],
)
def test_bad_bounds_are_refused(world, bad):
    with pytest.raises(ConfigError, match=r"expected"):
        world(**bad)


def test_fewer_rows_run_than_asked_for_when_a_step_has_no_token_for_each(world):
    w = world(max_rows=8, budget=3)
    for _ in range(6):
        w.submit([1, 2], max_tokens=4)
    w.run()
    w.check_idle()
    assert max(plan.num_rows for plan in w.plans) == 3
    assert max(plan.num_tokens for plan in w.plans) <= 3


def test_config_is_plain_data(world):
    import json

    w = world(policy=Priority(ageing=0.5), max_chunk=7)
    config = json.loads(json.dumps(w.scheduler.config()))
    assert config["policy"] == {"name": "priority", "ageing": 0.5}
    assert config["max_chunk"] == 7 and config["reserve"] == 0.01


def test_long_outputs_and_page_tables_grow(world):
    w = world(num_pages=600, page_tokens=1, max_len=500, max_rows=2)
    a, b = w.submit([1], max_tokens=400), w.submit([2], max_tokens=150, stop_ids=tuple(range(1000, 1020)))
    w.run()
    w.check_idle()
    w.check_undisturbed(a)
    w.check_undisturbed(b)
