"""Masks, bias and penalties, against transformers' processors where it has one."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.types import SamplingParams

from .support import GREEDY, INF, Rig, admission

V = 24
TOKENS = st.lists(st.integers(0, V - 1), min_size=1, max_size=12)


def edited(rig: Rig, x: torch.Tensor, pos: int) -> torch.Tensor:
    """Logits of slot 1 after masks, bias and penalties."""
    rows = rig.table.batch_rows(np.array([1], np.int32))
    work = x.clone()
    for edit in (*rows.masks, *rows.shifts):
        edit(work, torch.tensor([pos], dtype=torch.int32))
    return work


def resumed(params: SamplingParams, prompt: list[int], output: list[int], **fields) -> Rig:
    rig = Rig(V, **fields)
    rig.table.admit(admission(1, params, prompt=prompt, output=output))
    return rig


@settings(deadline=None, max_examples=40)
@given(prompt=TOKENS, output=TOKENS, penalty=st.sampled_from([0.5, 1.1, 1.3, 2.0]))
def test_repetition_penalty_is_transformers(prompt, output, penalty):
    process = pytest.importorskip("transformers.generation.logits_process")
    x = torch.randn(1, V, generator=torch.Generator().manual_seed(len(prompt)))
    want = process.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), x.clone())
    rig = resumed(attrs.evolve(GREEDY, repetition_penalty=penalty), prompt, output)
    assert torch.equal(edited(rig, x, len(prompt + output)), want)


@settings(deadline=None, max_examples=40)
@given(output=TOKENS, words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=5))
def test_bad_words_are_transformers(output, words):
    process = pytest.importorskip("transformers.generation.logits_process")
    output = [token % 4 for token in output]
    x = torch.randn(1, V)
    want = process.NoBadWordsLogitsProcessor(words)(torch.tensor([[V - 1, *output]]), x.clone())
    rig = resumed(attrs.evolve(GREEDY, bad_words=tuple(map(tuple, words))), [V - 1], output)
    assert torch.equal(edited(rig, x, 1 + len(output)) == -INF, want == -INF)


def test_bad_words_look_at_the_output_only():
    rig = resumed(attrs.evolve(GREEDY, bad_words=((1, 2),)), [0, 1], [])
    assert not (edited(rig, torch.zeros(1, V), 2) == -INF).any()


@settings(deadline=None, max_examples=40)
@given(
    prompt=TOKENS,
    output=st.lists(st.integers(0, V - 1), max_size=12),
    frequency=st.sampled_from([0.0, 0.25, -0.5]),
    presence=st.sampled_from([0.0, 0.5, -1.0]),
)
def test_frequency_and_presence_count_the_output(prompt, output, frequency, presence):
    params = attrs.evolve(GREEDY, frequency_penalty=frequency, presence_penalty=presence)
    x = torch.randn(1, V)
    want = x[0].tolist()
    for token in set(output):
        want[token] -= frequency * output.count(token) + presence
    got = edited(resumed(params, prompt, output), x, 99)[0].tolist()
    assert got == pytest.approx(want, abs=1e-5)


def test_penalties_act_in_the_documented_order():
    params = attrs.evolve(
        GREEDY, logit_bias={1: 1.0}, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25
    )
    rig = resumed(params, [0], [1, 1, 2])
    got = edited(rig, torch.tensor([[4.0, 3.0, -1.0] + [1.0] * (V - 3)]), 4)[0].tolist()
    assert got[:4] == [2.0, (3.0 + 1.0) / 2 - 2 * 0.5 - 0.25, -1.0 * 2 - 0.5 - 0.25, 1.0]


@settings(deadline=None, max_examples=25)
@given(prompt=TOKENS, output=TOKENS)
def test_recording_equals_resuming(prompt, output):
    """A preempted sequence that comes back with its history goes on with the same state."""
    params = attrs.evolve(
        GREEDY, repetition_penalty=1.2, frequency_penalty=0.1, bad_words=((1, 2), (3, 4, 5), (0, 0, 0, 0))
    )
    live = resumed(params, prompt, [])
    for token in output:
        live.table.record(np.array([1, 0], np.int32), torch.tensor([token, 0]))
    live.table.record(np.array([1], np.int32), torch.tensor([-1]))
    back = resumed(params, prompt, output)
    x = torch.randn(1, V)
    assert torch.equal(edited(live, x, 9), edited(back, x, 9))


def test_stop_ids_wait_for_min_tokens():
    params = attrs.evolve(GREEDY, min_tokens=2, stop_token_ids=(5,), max_tokens=9)
    x = torch.zeros(1, V)
    rig = resumed(params, [0, 0, 0], [], eos_ids=(6, 5))
    assert [(edited(rig, x, pos) == -INF).nonzero()[:, 1].tolist() for pos in (3, 4, 5)] == [[5, 6], [5, 6], []]
    deaf = resumed(attrs.evolve(params, ignore_eos=True), [0, 0, 0], [], eos_ids=(6,))
    assert (edited(deaf, x, 3) == -INF).nonzero()[:, 1].tolist() == [5]


def test_allowed_tokens_and_bias():
    x = torch.randn(1, V)
    got = edited(resumed(attrs.evolve(GREEDY, allowed_tokens=(4, 2, 2), logit_bias={2: -INF, 3: 9.0}), [0], []), x, 1)
    assert (got > -INF).nonzero()[:, 1].tolist() == [4] and got[0, 4] == x[0, 4]


def test_rows_without_options_cost_no_state():
    rig = Rig(V, *[SamplingParams(top_k=3)] * 50)
    assert rig.table._counts.counts.shape[0] == 0
    rig.table.admit(admission(51, attrs.evolve(GREEDY, presence_penalty=1.0)))
    assert rig.table._counts.counts.shape[0] == 4
    assert rig.table.batch_rows(np.arange(1, 51, dtype=np.int32)).shifts == ()


def test_the_pool_grows_and_is_reused():
    rig = Rig(V)
    params = attrs.evolve(GREEDY, frequency_penalty=1.0)
    for slot in range(1, 8):
        rig.table.admit(admission(slot, params, output=[slot] * slot))
    assert rig.table._counts.counts.shape[0] == 8
    for slot in range(1, 8):
        rig.table.release(slot)
        rig.table.release(slot)
    for slot in range(1, 9):
        rig.table.admit(admission(slot, params, output=[slot]))
    assert rig.table._counts.counts.shape[0] == 8
    assert edited(rig, torch.zeros(1, V), 1)[0].nonzero().tolist() == [[1]]
