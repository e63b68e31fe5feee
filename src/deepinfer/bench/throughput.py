"""Many requests of mixed lengths at once: tokens per second, time to first token, time per output token."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import attrs

from ..engine import Composition
from ..types import Request, RequestOutput, SamplingParams

__all__ = ["LatencyObserver", "measure"]


@attrs.define
class LatencyObserver:
    """Collects when requests came and went; an `Observer`."""

    added_s: dict[str, float] = attrs.field(factory=dict)
    first_s: dict[str, float] = attrs.field(factory=dict)
    ended_s: dict[str, float] = attrs.field(factory=dict)
    num_tokens: dict[str, int] = attrs.field(factory=dict)

    def request_added(self, request: Request) -> None:
        self.added_s[request.request_id] = time.perf_counter()

    def step_done(self, plan: Any, result: Any) -> None:
        """Nothing a step says is needed here."""

    def request_grew(self, output: RequestOutput) -> None:
        self.first_s.setdefault(output.request_id, time.perf_counter())

    def request_finished(self, output: RequestOutput) -> None:
        self.request_grew(output)
        self.ended_s[output.request_id] = time.perf_counter()
        self.num_tokens[output.request_id] = len(output.token_ids)


def measure(composition: Composition, *, num_requests: int = 64, seed: int = 1) -> dict[str, Any]:
    """All requests arrive at once: prompts of 16 to 256 tokens, 8 to 64 new ones each (uniform, seeded)."""
    observer = LatencyObserver()
    engine = composition.build(observers=(observer,))
    draw = random.Random(seed)
    started = time.perf_counter()
    for _ in range(num_requests):
        prompt = [draw.randrange(10, engine.limits.vocab_size) for _ in range(draw.randint(16, 256))]
        params = SamplingParams(temperature=0, max_tokens=draw.randint(8, 64), ignore_eos=True)
        engine.add(prompt, params, stream=True)
    while engine.has_work:
        for output in engine.step():
            observer.request_grew(output)
    seconds = time.perf_counter() - started
    counters = engine.metrics.counters
    return {
        "requests": num_requests,
        "seconds": seconds,
        "prompt_tokens": counters["prompt_tokens_total"],
        "output_tokens": counters["generation_tokens_total"],
        "output_tokens_per_s": counters["generation_tokens_total"] / seconds,
        "total_tokens_per_s": (counters["generation_tokens_total"] + counters["prompt_tokens_total"]) / seconds,
        **_quantiles("ttft_s", [observer.first_s[k] - observer.added_s[k] for k in observer.added_s]),
        **_quantiles("tpot_s", _per_token(observer)),
    }


def _per_token(observer: LatencyObserver) -> list[float]:
    return [
        (observer.ended_s[k] - observer.first_s[k]) / (count - 1)
        for k, count in observer.num_tokens.items()
        if count > 1
    ]


def _quantiles(name: str, values: list[float]) -> dict[str, float]:
    values = sorted(values)
    return {
        f"{name}_mean": statistics.fmean(values),
        f"{name}_p50": values[len(values) // 2],
        f"{name}_p99": values[min(len(values) - 1, int(len(values) * 0.99))],
    }
