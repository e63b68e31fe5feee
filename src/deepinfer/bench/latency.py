"""Prefill and decode rates of a whole engine: scheduler, paging and sampler included."""

from __future__ import annotations

import random
import resource
import statistics
import sys
import time
from typing import Any

from ..engine import Composition, Engine
from ..types import SamplingParams

__all__ = ["measure"]


def measure(
    composition: Composition,
    *,
    prompt_len: int = 512,
    batches: tuple[int, ...] = (1, 8, 32),
    context_len: int = 128,
    steps: int = 32,
    repeats: int = 3,
) -> dict[str, Any]:
    """Tokens per second (wall): `prefill` of one prompt, `decode_bN` for each batch; peak memory of the process.

    Random tokens, greedy, end-of-sequence ignored. Decode is timed over `steps` whole engine steps after every
    sequence has `context_len` tokens; best and median of `repeats`.
    """
    started = time.perf_counter()
    engine = composition.build()
    figures: dict[str, Any] = {"load_s": time.perf_counter() - started}
    draw = random.Random(1)
    _decode(engine, draw, 1, 16, 2)  # warm-up
    figures.update(_summary("prefill", [prompt_len / _prefill(engine, draw, prompt_len) for _ in range(repeats)]))
    for batch in batches:
        rates = [batch * steps / _decode(engine, draw, batch, context_len, steps) for _ in range(repeats)]
        figures.update(_summary(f"decode_b{batch}", rates))
    figures["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
    return figures


_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


def _summary(name: str, rates: list[float]) -> dict[str, float]:
    return {f"{name}_tokens_per_s": max(rates), f"{name}_median_tokens_per_s": statistics.median(rates)}


def _prompt(draw: random.Random, length: int, vocab_size: int) -> list[int]:
    return [draw.randrange(10, vocab_size) for _ in range(length)]


def _prefill(engine: Engine, draw: random.Random, length: int) -> float:
    """Seconds from submission to the only token."""
    prompt = _prompt(draw, length, engine.limits.vocab_size)
    started = time.perf_counter()
    engine.add(prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    while engine.has_work:
        _step(engine)
    return time.perf_counter() - started


def _step(engine: Engine) -> None:
    """One step; a figure over failed requests would mean nothing."""
    for output in engine.step():
        if output.error is not None:
            raise output.error


def _decode(engine: Engine, draw: random.Random, batch: int, context_len: int, steps: int) -> float:
    """Seconds of `steps` steps in which `batch` sequences get one token each."""
    params = SamplingParams(temperature=0, max_tokens=steps + 2, ignore_eos=True)
    for _ in range(batch):
        engine.add(_prompt(draw, context_len, engine.limits.vocab_size), params)
    metrics = engine.metrics.counters
    wanted = metrics["prompt_tokens_total"] + batch * context_len
    while metrics["prompt_tokens_total"] < wanted:
        _step(engine)
    before, started = metrics["generation_tokens_total"], time.perf_counter()
    while metrics["generation_tokens_total"] < before + batch * steps and engine.has_work:
        _step(engine)
    seconds = time.perf_counter() - started
    scale = batch * steps / (metrics["generation_tokens_total"] - before)
    while engine.has_work:
        _step(engine)
    return seconds * scale
