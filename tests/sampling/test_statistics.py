"""Goodness of fit through the real sampler at the 99.9 % level. Seeds are fixed: the verdict never changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from deepinfer.sampling import filter_logits
from deepinfer.types import SamplingParams

from .support import Rig

SCALES = [pytest.param(1), pytest.param(10, marks=pytest.mark.slow)]
LEVEL = 1e-3


def fits(counts: np.ndarray, probability: np.ndarray) -> bool:
    """Chi-square with cells of fewer than five expected draws joined, after checking impossible ones."""
    assert counts[probability == 0].sum() == 0
    order = np.argsort(-probability)
    counts, expected = counts[order], probability[order] * counts.sum()
    cells = np.minimum(np.cumsum(expected) // 5, expected.sum() // 5 - 1).astype(int)
    observed = np.bincount(cells, counts)
    wanted = np.bincount(cells, expected)
    used = wanted > 0
    return stats.chisquare(observed[used], wanted[used] * counts.sum() / wanted[used].sum()).pvalue > LEVEL


CASES = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(top_k=4),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=1.7, min_p=0.02, top_k=9, top_p=0.9),
]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("params", CASES)
def test_small_vocabulary(params, scale):
    logits = torch.randn(13, generator=torch.Generator().manual_seed(5)) * 1.5
    draws = Rig(13, params).draws(logits, 4000 * scale)
    kept = filter_logits(logits[None] / params.temperature, min_p=params.min_p, top_k=params.top_k, top_p=params.top_p)
    assert fits(np.bincount(draws, minlength=13), torch.softmax(kept[0].double(), -1).numpy())


@pytest.mark.parametrize("scale", SCALES)
def test_equal_logits_are_uniform(scale):
    draws = Rig(37, SamplingParams()).draws(torch.full((37,), -4.0), 4000 * scale)
    assert fits(np.bincount(draws, minlength=37), np.full(37, 1 / 37))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=600)])
def test_large_vocabulary(params, scale):
    vocab_size, count = 50_257, 120 * scale
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(6)) * 2.5
    rig = Rig(vocab_size, params)
    parts = [rig.draws(logits, 8, start=1 + start) for start in range(0, count, 8)]
    counts = np.bincount(torch.cat(parts), minlength=vocab_size)
    kept = filter_logits(logits[None], top_k=params.top_k, top_p=params.top_p)
    assert fits(counts, torch.softmax(kept[0].double(), -1).numpy())


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("part", ["seed", "sample", "position"])
def test_seeds_samples_and_positions_are_independent(part, scale):
    """Draws that differ in one part of the key, as two-way tables of eight seeds whose statistics add up."""
    count, logits = 500 * scale, torch.tensor([0.5, 0.0, -0.5, 0.2])
    statistic, freedom = 0.0, 0
    for seed in range(8):
        base = Rig(4, SamplingParams(seed=seed)).draws(logits, count)
        params = SamplingParams(seed=seed + (part == "seed"))
        other = Rig(4, params, sample_index=int(part == "sample")).draws(logits, count, start=1 + (part == "position"))
        table = np.bincount(base * 4 + other, minlength=16).reshape(4, 4)
        found = stats.chi2_contingency(table)
        statistic, freedom = statistic + found.statistic, freedom + found.dof
    assert stats.chi2.sf(statistic, freedom) > LEVEL


def test_a_fit_of_the_wrong_law_is_noticed():
    draws = Rig(13, SamplingParams()).draws(torch.linspace(0, 1, 13), 4000)
    assert not fits(np.bincount(draws, minlength=13), np.full(13, 1 / 13))
