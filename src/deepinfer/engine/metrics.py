"""Counters of an engine in Prometheus' text format. Names follow vLLM's stems with the prefix `deepinfer_`."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Mapping

__all__ = ["EngineMetrics", "Histogram"]

SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

GAUGES = {
    "num_requests_running": "Sequences that hold a slot.",
    "num_requests_waiting": "Sequences that wait for one.",
    "kv_cache_usage_perc": "Share of pages in use, 0 to 1.",
}
COUNTERS = {
    "prompt_tokens_total": "Prompt tokens of requests whose prefill ended.",
    "generation_tokens_total": "Tokens generated.",
    "prefix_cache_queries_total": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits_total": "Prompt tokens found there.",
    "num_preemptions_total": "Sequences set back to be computed again.",
    "steps_total": "Steps run.",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": "Arrival to first token.",
    "inter_token_latency_seconds": "Between two tokens of a sequence.",
    "e2e_request_latency_seconds": "Arrival to end.",
    "request_queue_time_seconds": "Arrival to first slot.",
    "request_prefill_time_seconds": "First slot to first token.",
    "request_decode_time_seconds": "First token to end.",
}


class Histogram:
    """Cumulative buckets of seconds, as Prometheus wants them."""

    def __init__(self, bounds: Iterable[float] = SECONDS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def lines(self, name: str, labels: str) -> list[str]:
        rows, seen = [], 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            seen += count
            rows.append(f'{name}_bucket{{{labels},le="{bound}"}} {seen}')
        return [*rows, f"{name}_sum{{{labels}}} {self.total:.9g}", f"{name}_count{{{labels}}} {seen}"]


class EngineMetrics:
    """Gauges, counters and histograms of one engine. Updated once a step and once a finished request."""

    def __init__(self, model_name: str = "") -> None:
        self.model_name = model_name
        self.gauges = dict.fromkeys(GAUGES, 0.0)
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.histograms = {name: Histogram() for name in HISTOGRAMS}
        self.finished: Counter[str] = Counter()

    def snapshot(self) -> Mapping[str, float]:
        """All gauges and counters by name."""
        return {**self.gauges, **self.counters, "request_success_total": sum(self.finished.values())}

    def render(self) -> str:
        """Prometheus exposition text."""
        label = self.model_name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        labels = f'model_name="{label}"'
        out: list[str] = []
        for kind, table, help_of in (("gauge", self.gauges, GAUGES), ("counter", self.counters, COUNTERS)):
            for name, value in table.items():
                out += _head(name, kind, help_of[name])
                out.append(f"deepinfer_{name}{{{labels}}} {value:.9g}")
        out += _head("request_success_total", "counter", "Requests that ended, by reason.")
        for reason, count in sorted(self.finished.items()):
            out.append(f'deepinfer_request_success_total{{{labels},finished_reason="{reason}"}} {count}')
        for name, histogram in self.histograms.items():
            out += _head(name, "histogram", HISTOGRAMS[name])
            out += histogram.lines(f"deepinfer_{name}", labels)
        return "\n".join(out) + "\n"


def _head(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP deepinfer_{name} {text}", f"# TYPE deepinfer_{name} {kind}"]
