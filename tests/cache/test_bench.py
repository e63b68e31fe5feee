"""The benchmark of the bookkeeping runs and its workloads do what their names say."""

from __future__ import annotations

import math

import numpy as np

from deepinfer.bench import cache


def test_every_figure_is_a_positive_number():
    figures = cache.measure(num_prompts=4, num_requests=30)
    assert len(figures) >= 15
    assert all(isinstance(v, float) and math.isfinite(v) and v > 0 for v in figures.values()), figures


def test_branching_prompts_share_whole_prefixes():
    prompts = cache.branching_prompts(200)
    assert {len(p) for p in prompts} == {2560}
    assert 32 < len({p[:2048].tobytes() for p in prompts}) <= 64
    assert len({p[2048:].tobytes() for p in prompts}) == 200


def test_best_takes_the_fastest_call_and_leaves_preparation_out():
    calls = []
    seconds = cache.best_s(lambda: calls.append("work"), passes=3, prepare=lambda: np.sort(np.random.rand(200_000)))
    assert calls == ["work"] * 3
    assert seconds < 0.001
