"""What every peer measures, in one way: prefill of 512 tokens, decode at batch 1, 8 and 32 after 128."""

from __future__ import annotations

import json
import random
import resource
import time
from collections.abc import Callable

PREFILL, CONTEXT, STEPS, BATCHES, REPEATS = 512, 128, 32, (1, 8, 32), 3


def prompts(count: int, length: int, seed: int = 1) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(10, 49_000) for _ in range(length)] for _ in range(count)]


def best_seconds(run: Callable[[], object], repeats: int = REPEATS) -> float:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def report(rates: dict[str, float]) -> None:
    rates["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(rates), flush=True)
