"""Host time of a decode step of the scheduler alone: R running sequences, one token each, no model."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from ..cache import NullBook, PagedBook
from ..plan import Plan, StepResult
from ..protocols import KVBook
from ..schedulers import Scheduler, Sequence
from ..types import Request, SamplingParams

__all__ = [
    "MAX_TOKENS",
    "PAGE_TOKENS",
    "PROMPT_LEN",
    "STEPS",
    "STOP_IDS",
    "StepTimes",
    "measure",
    "pages_for",
    "prompt_ids",
    "summary",
    "time_steps",
]

PAGE_TOKENS = 16
PROMPT_LEN = 64
MAX_TOKENS = 100_000
STEPS = 300
STOP_IDS = (2, 3)

#: (plan, commit) seconds of each step.
StepTimes = list[tuple[float, float]]


def measure(*, rows: tuple[int, ...] = (256, 4096), steps: int = STEPS) -> dict[str, float]:
    """Milliseconds by book, number of running sequences and figure, as in `paged_256_step_ms`."""
    figures: dict[str, float] = {}
    for num_rows in rows:
        num_pages = pages_for(num_rows, steps=steps)
        books = {
            "null": NullBook(num_pages, page_tokens=PAGE_TOKENS),
            "paged": PagedBook(num_pages, page_tokens=PAGE_TOKENS),
        }
        for name, book in books.items():
            found = summary(time_steps(book, num_rows, steps=steps))
            figures.update({f"{name}_{num_rows}_{figure}": value for figure, value in found.items()})
    return figures


def pages_for(num_rows: int, *, steps: int = STEPS) -> int:
    """Pages of a pool in which no sequence has to be set back."""
    return num_rows * (-(-(PROMPT_LEN + steps + 2) // PAGE_TOKENS) + 1) + 1


def prompt_ids(index: int) -> np.ndarray:
    """Prompt [PROMPT_LEN] i32 of the sequence with this number."""
    return np.random.default_rng(index).integers(10, 1000, PROMPT_LEN).astype(np.int32)


def time_steps(book: KVBook, num_rows: int, *, steps: int = STEPS) -> StepTimes:
    """Times of decode steps in which every sequence gets one token."""
    scheduler = _running(book, num_rows)
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        plan = scheduler.plan(0.0)
        planned = time.perf_counter()
        assert plan is not None, "every sequence has tokens left"
        result = _settled(plan)
        ready = time.perf_counter()
        events = scheduler.commit(plan, result, 0.0)
        times.append((planned - began, time.perf_counter() - ready))
        assert len(events.rows) == num_rows, "the pool holds all of them"
    return times


def summary(times: StepTimes) -> dict[str, float]:
    """Milliseconds: medians, and of both together the 10th and 95th percentile."""
    both = sorted(plan + commit for plan, commit in times)
    return {
        "plan_ms": round(1e3 * statistics.median(plan for plan, _ in times), 4),
        "commit_ms": round(1e3 * statistics.median(commit for _, commit in times), 4),
        "step_ms": round(1e3 * statistics.median(both), 4),
        "step_p10_ms": round(1e3 * both[int(0.1 * len(both))], 4),
        "step_p95_ms": round(1e3 * both[int(0.95 * len(both))], 4),
    }


def _running(book: KVBook, num_rows: int) -> Scheduler:
    """A scheduler with `num_rows` sequences past their prompts."""
    limits: dict[str, Any] = {"max_tokens_per_step": num_rows * PROMPT_LEN, "max_len": PROMPT_LEN + MAX_TOKENS}
    scheduler = Scheduler(book, max_rows=num_rows, **limits)
    params = SamplingParams(max_tokens=MAX_TOKENS)
    for index in range(num_rows):
        prompt = prompt_ids(index)
        request = Request(request_id=str(index), prompt_ids=prompt.tolist(), params=params)
        scheduler.add(Sequence(request, prompt_ids=prompt, max_tokens=MAX_TOKENS, stop_ids=STOP_IDS))
    plan = scheduler.plan(0.0)
    assert plan is not None and plan.num_rows == num_rows, "the budget holds all prompts"
    scheduler.commit(plan, _settled(plan), 0.0)
    return scheduler


def _settled(plan: Plan) -> StepResult:
    """A result in which every emitting row gives token 7."""
    num_rows = plan.num_rows
    tokens = np.full((num_rows, 1), -1, np.int32)
    tokens[plan.emits] = 7
    num_out = np.zeros(num_rows, np.int32)
    num_out[plan.emits] = 1
    return StepResult(plan.step, tokens, num_out, np.zeros(num_rows, np.uint8))
