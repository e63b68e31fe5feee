from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from deepinfer.sampling import filter_logits
from deepinfer.sampling.filters import survivors

from .support import INF

LOGITS = hnp.arrays(
    np.float32,
    st.integers(1, 40),
    elements=st.one_of(
        st.sampled_from([-np.inf, -3.0, -0.0, 0.0, 1.0, 2.0]), st.floats(-20, 20, width=32, allow_subnormal=False)
    ),
).filter(lambda row: np.isfinite(row).any())


def model(row: np.ndarray, *, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> list[int]:
    """Survivors in plain float64, likeliest first."""
    row = row.astype(np.float64)
    probability = np.exp(row - row.max())
    kept = [i for i in range(len(row)) if probability[i] > 0 and probability[i] >= min_p * (1 if min_p else 0)]
    kept.sort(key=lambda i: (-row[i], i))
    kept = kept[: top_k or None]
    total, before, out = math.fsum(probability[kept]), 0.0, []
    for i in kept:
        if out and before >= top_p * total:
            break
        out.append(i)
        before += probability[i]
    return out


def survivors_of(row: np.ndarray, **filters) -> list[int]:
    kept = filter_logits(torch.from_numpy(row)[None], **filters)[0].numpy()
    ids = [i for i in range(len(row)) if kept[i] > -np.inf]
    assert (kept[ids] == row[ids]).all()
    return sorted(ids, key=lambda i: (-row[i], i))


FILTERS = st.fixed_dictionaries(
    {
        "min_p": st.sampled_from([0.0, 0.01, 0.3, 1.0]),
        "top_k": st.sampled_from([0, 1, 2, 5, 39, 1000]),
        "top_p": st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    }
)


@settings(deadline=None, max_examples=300)
@given(row=LOGITS, filters=FILTERS)
def test_filters_match_a_float64_model(row, filters):
    """Exactly, but where a sum ends within float32 rounding of the limit: there either side is right."""
    got = survivors_of(row, **filters)
    slack = 4e-6
    fewer = model(
        row, min_p=filters["min_p"] * (1 + slack), top_k=filters["top_k"], top_p=filters["top_p"] * (1 - slack)
    )
    more = model(
        row,
        min_p=filters["min_p"] * (1 - slack),
        top_k=filters["top_k"],
        top_p=min(1.0, filters["top_p"] * (1 + slack)),
    )
    # exp underflows to zero probability below about -103: such tokens may stay, they are never sampled.
    got = [i for i in got if i in more or row[i] > row.max() - 80]
    assert more[: len(got)] == got
    assert len(fewer) <= len(got) <= len(more)


@settings(deadline=None, max_examples=100)
@given(row=LOGITS, top_k=st.integers(0, 45), min_p=st.sampled_from([0.0, 0.2, 1.0]))
def test_top_k_and_min_p_twice_is_once(row, top_k, min_p):
    once = filter_logits(torch.from_numpy(row)[None], top_k=top_k, min_p=min_p)
    assert torch.equal(filter_logits(once, top_k=top_k, min_p=min_p), once)


@settings(deadline=None, max_examples=100)
@given(row=LOGITS, top_p=st.sampled_from([0.05, 0.3, 0.7, 0.95]))
def test_top_p_is_minimal_and_its_members_dominate(row, top_p):
    kept = survivors_of(row, top_p=top_p)
    probability = np.exp(row.astype(np.float64) - row.max())
    probability /= probability.sum()
    mass = probability[kept].sum()
    assert mass >= top_p - 1e-6
    assert mass - probability[kept[-1]] < top_p + 1e-6
    dropped = sorted(set(range(len(row))) - set(kept))
    assert all(row[i] <= row[kept[-1]] for i in dropped)
    assert all(i > kept[-1] for i in dropped if row[i] == row[kept[-1]])


def test_ties_go_to_the_lower_id():
    row = np.array([1.0, 2.0, 2.0, -0.0, 0.0, 2.0], np.float32)
    assert survivors_of(row, top_k=2) == [1, 2]
    assert survivors_of(row, top_k=5) == [1, 2, 5, 0, 3]
    assert survivors_of(np.zeros(8, np.float32), top_p=0.5) == [0, 1, 2, 3]


def test_the_token_that_crosses_top_p_stays():
    row = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    assert survivors_of(row, top_p=0.6) == [0, 1]
    assert survivors_of(row, top_p=0.81) == [0, 1, 2]
    assert survivors_of(row, top_p=1e-45) == [0]


def test_edges():
    row = np.array([0.5, -np.inf, 1.5], np.float32)
    assert survivors_of(row, top_k=99) == [2, 0]
    assert survivors_of(row, min_p=1.0) == [2]
    empty = torch.full((2, 5), -INF)
    assert torch.equal(filter_logits(empty, top_k=2, top_p=0.5, min_p=0.1), empty)


def test_input_is_not_modified():
    x = torch.randn(3, 50)
    before = x.clone()
    filter_logits(x, min_p=0.1, top_k=7, top_p=0.5)
    assert torch.equal(x, before)


@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0])
def test_few_candidates_give_the_bits_of_the_full_sort(spread):
    torch.manual_seed(2)
    x = torch.randn(6, 6000) * spread
    x[1] = x[1].round()
    top_k = torch.tensor([6000, 6000, 40, 6000, 64, 3])
    top_p = torch.tensor([0.9, 0.5, 1.0, 0.2, 0.9, 0.7])
    full = survivors(x, top_k, top_p, width=6000)
    assert full.enough.all()
    for width in (64, 1024):
        part = survivors(x, top_k, top_p, width=width)
        assert part.enough[[2, 4, 5]].all()
        for row in part.enough.nonzero()[:, 0].tolist():
            kept = int(part.num_kept[row])
            assert kept == full.num_kept[row]
            assert torch.equal(part.token_ids[row, :kept], full.token_ids[row, :kept])
            assert torch.equal(part.logits[row, :kept], full.logits[row, :kept])
            token = part.token_ids[row, kept - 1 : kept]
            at = torch.tensor([row])
            assert torch.equal(part.take(at).log_prob(token), full.take(at).log_prob(token))
        # A row is declared settled only if the full sort agrees; the others kept more than was looked at.
        assert (full.num_kept[~part.enough] >= width).all()


def test_survivor_logprobs_are_the_renormalised_softmax():
    torch.manual_seed(3)
    x = torch.randn(1, 200) * 2
    kept = survivors(x, torch.tensor([30]), torch.tensor([0.8]), width=64)
    count = int(kept.num_kept)
    ids = kept.token_ids[0, :count]
    want = torch.log_softmax(x[0, ids].double(), -1)
    for i, token in enumerate(ids):
        assert kept.log_prob(token[None]).item() == pytest.approx(want[i].item(), abs=2e-6)
    assert kept.log_prob(kept.token_ids[:, count]).item() == -INF
