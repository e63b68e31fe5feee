"""Random fleets of requests under everything that can happen to them at once."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.plan import RowStatus
from deepinfer.schedulers import FairShare, Fcfs, Priority, ShortestPrompt
from deepinfer.types import FinishReason, SamplingParams

POLICIES = [Fcfs, ShortestPrompt, lambda: Priority(ageing=0.1), lambda: FairShare(weights={"u0": 3.0})]
#: First prompt tokens that make the toy device fail.
NAN_TOKEN, RAISE_TOKEN = 90, 91


class Gate:
    """Opens, or fails, after some polls."""

    def __init__(self, polls, error=None):
        self.polls, self.failure, self.cancelled = polls, error, False

    @property
    def done(self):
        self.polls -= 1
        return self.polls < 0

    @property
    def error(self):
        return self.failure

    def cancel(self):
        self.cancelled = True


def poison(admission, k_len):
    """Requests that start with a poison token fail once they are ten tokens past their prompt's middle."""
    if k_len >= admission.prompt_len // 2 + 10:
        return {NAN_TOKEN: RowStatus.NAN, RAISE_TOKEN: RowStatus.FAILED}.get(admission.token_ids[0], RowStatus.OK)
    return RowStatus.OK


def random_world(rng, world):
    page_tokens = int(rng.choice([1, 2, 4, 8]))
    max_len = int(rng.choice([40, 64, 100]))
    num_drafts = int(rng.choice([0, 0, 1, 3]))
    smallest = -(-max_len // page_tokens) // 2 + 2
    return world(
        num_pages=int(rng.integers(smallest, 6 * smallest)),
        page_tokens=page_tokens,
        max_rows=int(rng.integers(1, 12)),
        budget=int(rng.integers(1 + num_drafts, 80)),
        max_len=max_len,
        lag=int(rng.integers(2)),
        num_drafts=num_drafts,
        policy=POLICIES[rng.integers(len(POLICIES))](),
        prefix_caching=bool(rng.random() < 0.8),
        max_chunk=[None, 1, 5][rng.integers(3)],
        reserve=[0.0, 0.01, 0.1][rng.integers(3)],
        fault=poison,
        raise_in=["launch", "finish", "settle"][rng.integers(3)],
    )


def random_prompt(rng, w, stems):
    room = min(w.scheduler.limits.max_len, (w.book.num_pages - 1) * w.book.page_tokens + 1) - 1
    stem = stems[rng.integers(len(stems))][: rng.integers(0, 30)]
    prompt = np.concatenate([stem, rng.integers(0, 90, rng.integers(1, 30))])[:room]
    if rng.random() < 0.06:
        prompt[0] = rng.choice([NAN_TOKEN, RAISE_TOKEN])
    return prompt.astype(np.int32)


def submit_random(rng, w, stems):
    prompt = random_prompt(rng, w, stems)
    n = int(rng.choice([1, 1, 1, 2, 4]))
    stop_ids = tuple(rng.integers(0, 97, rng.choice([0, 0, 1, 4])).tolist())
    max_tokens = int(rng.integers(1, 40))
    min_tokens = int(rng.integers(0, max_tokens + 1)) if rng.random() < 0.3 else 0
    gate = Gate(int(rng.integers(0, 6)), RuntimeError("no grammar") if rng.random() < 0.2 else None)
    scored = 0 if rng.random() < 0.1 else None
    w.submit(
        prompt,
        max_tokens=max_tokens,
        n=n,
        stop_ids=stop_ids,
        min_tokens=min_tokens,
        params=SamplingParams(max_tokens=max_tokens, n=n, prompt_logprobs=scored),
        gates=(gate,) if rng.random() < 0.1 else (),
        deadline_s=float(rng.integers(1, 60)) if rng.random() < 0.1 else None,
        priority=int(rng.integers(3)),
        user=f"u{rng.integers(3)}",
        salt=["", "tenant"][rng.random() < 0.1],
    )


def run_fleet(seed, num_requests, world):
    """Submit, step and cancel in random order, then check every sequence."""
    rng = np.random.default_rng(seed)
    w = random_world(rng, world)
    stems = [rng.integers(0, 90, 40) for _ in range(3)]
    left = num_requests
    while left or not w.loop.idle:
        if left and rng.random() < 0.5:
            submit_random(rng, w, stems)
            left -= 1
        if rng.random() < 0.03:
            w.scheduler.cancel(w.sequences[rng.integers(len(w.sequences))].request.request_id if w.sequences else "?")
        if rng.random() < 0.02 and w.sequences:
            finish_by_hand(w, w.sequences[rng.integers(len(w.sequences))])
        w.step()
        assert w.now < 20_000, f"seed {seed}: no end in sight"
    w.check_idle()
    for sequence in w.sequences:
        check_sequence(w, sequence)
    return w


def finish_by_hand(w, sequence):
    """What an engine does that saw a stop string."""
    if w.scheduler.finish(sequence, FinishReason.STOP, stop_reason="text"):
        w.finished.append(sequence)


def check_sequence(w, sequence):
    reason, tokens = w.expected(sequence)
    got = sequence.output_ids.tolist()
    assert got == tokens[: len(got)], sequence
    if sequence.finish_reason is FinishReason.LENGTH or (
        sequence.finish_reason is FinishReason.STOP and sequence.stop_reason != "text"
    ):
        assert (sequence.finish_reason, got) == (reason, tokens), sequence
    first = sequence.prompt_ids[0]
    if sequence.finish_reason is FinishReason.ERROR and not sequence.gates:
        assert first in (NAN_TOKEN, RAISE_TOKEN), (sequence, sequence.error)
    if first in (NAN_TOKEN, RAISE_TOKEN):
        # nobody gets past the point at which the device fails
        assert sequence.prompt_len + len(got) <= max(sequence.prompt_len, sequence.prompt_len // 2 + 10) + 3


@pytest.mark.parametrize("seed", range(10))
def test_a_random_fleet_comes_to_its_ends(seed, world):
    run_fleet(seed, 25, world)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_many_random_fleets_come_to_their_ends(seed, world):
    run_fleet(seed, 20, world)


def test_the_fleets_do_exercise_what_they_claim(world):
    """Guards the test itself: without preemptions, forks and failures it would prove little."""
    totals = {"preemptions": 0, "forks": 0, "failed_steps": 0, "cached_tokens": 0, "dropped_rows": 0}
    reasons = set()
    for seed in range(20, 26):
        counters = run_fleet(seed, 15, world).scheduler.counters
        for name in totals:
            totals[name] += getattr(counters, name)
        reasons |= set(counters.finished)
    assert all(count > 0 for count in totals.values()), totals
    assert reasons == {reason.value for reason in FinishReason}
