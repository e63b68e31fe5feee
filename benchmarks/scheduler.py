"""Host time of a scheduling step, beside a scheduler that keeps its sequences as a list of objects.

Both plan and commit the same decode steps over the same page pool: R running sequences, one token each. The
baseline is the plain design of small engines: a deque of sequence objects, a Python list of pages for each,
loops over rows. It makes the arrays that an executor needs (slots, lengths, new pages), as the table does.

    python benchmarks/scheduler.py [--json]
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from deepinfer.bench.scheduler import (
    MAX_TOKENS,
    PAGE_TOKENS,
    STEPS,
    STOP_IDS,
    StepTimes,
    pages_for,
    prompt_ids,
    summary,
    time_steps,
)
from deepinfer.cache import NullBook, PagedBook


class ListedSequence:
    """A sequence as a list of tokens and a list of pages."""

    def __init__(self, slot: int, prompt: list[int], max_tokens: int, stop_ids: tuple[int, ...]) -> None:
        self.slot = slot
        self.tokens = list(prompt)
        self.prompt_len = len(prompt)
        self.max_tokens = max_tokens
        self.stop_ids = frozenset(stop_ids)
        self.pages: list[int] = []


class ListScheduler:
    """Decode steps of a scheduler that loops over sequence objects."""

    def __init__(self, num_pages: int) -> None:
        self.free: deque[int] = deque(range(1, num_pages))
        self.running: deque[ListedSequence] = deque()

    def add(self, sequence: ListedSequence) -> None:
        needed = -(-len(sequence.tokens) // PAGE_TOKENS)
        sequence.pages = [self.free.popleft() for _ in range(needed)]
        self.running.append(sequence)

    def plan(self) -> tuple[list[ListedSequence], Any]:
        scheduled: list[ListedSequence] = []
        slots: list[int] = []
        lengths: list[int] = []
        delta: list[tuple[int, int, int]] = []
        while self.running:
            sequence = self.running.popleft()
            length = len(sequence.tokens)
            while len(sequence.pages) * PAGE_TOKENS < length:
                if not self.free:
                    self.preempt(self.running.pop() if self.running else sequence)
                    continue
                page = self.free.popleft()
                delta.append((sequence.slot, len(sequence.pages), page))
                sequence.pages.append(page)
            scheduled.append(sequence)
            slots.append(sequence.slot)
            lengths.append(length)
        self.running.extend(scheduled)
        arrays = (np.asarray(slots, np.int32), np.asarray(lengths, np.int32), np.asarray(delta, np.int32))
        return scheduled, arrays

    def preempt(self, sequence: ListedSequence) -> None:
        self.free.extend(sequence.pages)
        sequence.pages = []

    def commit(self, scheduled: list[ListedSequence], tokens: np.ndarray) -> list[ListedSequence]:
        finished = []
        for sequence, token in zip(scheduled, tokens.tolist(), strict=True):
            sequence.tokens.append(token)
            if token in sequence.stop_ids or len(sequence.tokens) - sequence.prompt_len >= sequence.max_tokens:
                finished.append(sequence)
        for sequence in finished:
            self.preempt(sequence)
            self.running.remove(sequence)
        return finished


def time_list(num_pages: int, num_rows: int) -> StepTimes:
    """Times of the baseline's decode steps."""
    scheduler = ListScheduler(num_pages)
    for index in range(num_rows):
        scheduler.add(ListedSequence(index + 1, prompt_ids(index).tolist(), MAX_TOKENS, STOP_IDS))
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        scheduled, (slots, _, _) = scheduler.plan()
        planned = time.perf_counter()
        tokens = np.full(len(slots), 7, np.int32)
        ready = time.perf_counter()
        scheduler.commit(scheduled, tokens)
        times.append((planned - began, time.perf_counter() - ready))
    return times


def run(*, rows: tuple[int, ...] = (256, 4096)) -> dict[str, Any]:
    """Figures by number of running sequences.

    `ratio` is the baseline's time over the table's with a real pool, of 10th percentiles: what the code
    costs, rather than what else the machine was doing.
    """
    figures: dict[str, Any] = {}
    for num_rows in rows:
        num_pages = pages_for(num_rows)
        cases: dict[str, Callable[[], StepTimes]] = {
            "null_book": lambda r=num_rows, p=num_pages: time_steps(NullBook(p, page_tokens=PAGE_TOKENS), r),
            "paged_book": lambda r=num_rows, p=num_pages: time_steps(PagedBook(p, page_tokens=PAGE_TOKENS), r),
            "list_baseline": lambda r=num_rows, p=num_pages: time_list(p, r),
        }
        figures[str(num_rows)] = {name: summary(measure()) for name, measure in cases.items()}
        baseline, table = (figures[str(num_rows)][name]["step_p10_ms"] for name in ("list_baseline", "paged_book"))
        figures[str(num_rows)]["ratio"] = round(baseline / table, 2)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    figures = run()
    if parser.parse_args().json:
        print(json.dumps(figures, indent=2))
        return
    for num_rows, cases in figures.items():
        print(f"{num_rows} running sequences (median ms)")
        for name in ("null_book", "paged_book", "list_baseline"):
            case = cases[name]
            print(
                f"  {name:14} plan {case['plan_ms']:.3f}  commit {case['commit_ms']:.3f}  "
                f"step {case['step_ms']:.3f}  p10 {case['step_p10_ms']:.3f}  p95 {case['step_p95_ms']:.3f}"
            )
        print(f"  baseline / paged_book {cases['ratio']:.2f} (p10)")


if __name__ == "__main__":
    main()
