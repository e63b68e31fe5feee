"""A scheduler, a book, a toy device and a clock, wired together."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.cache import PagedBook
from deepinfer.schedulers import FakeExecutor, Scheduler, Sequence, StepLoop, toy_continuation
from deepinfer.types import FinishReason, Request, SamplingParams

VOCAB = 97


class World:
    """Everything a scheduler test needs; `run` checks what must hold for any run."""

    def __init__(
        self,
        *,
        num_pages=65,
        page_tokens=4,
        max_rows=8,
        budget=64,
        max_len=128,
        lag=0,
        num_drafts=0,
        policy=None,
        prefix_caching=True,
        fault=None,
        raise_in="launch",
        masks=None,
        **options,
    ):
        self.book = PagedBook(num_pages, page_tokens=page_tokens, prefix_caching=prefix_caching)
        self.scheduler = Scheduler(
            self.book,
            policy=policy,
            max_rows=max_rows,
            max_tokens_per_step=budget,
            max_len=max_len,
            num_drafts=num_drafts,
            **options,
        )
        self.executor = FakeExecutor(
            num_pages=num_pages,
            page_tokens=page_tokens,
            max_rows=max_rows,
            max_len=max_len,
            vocab_size=VOCAB,
            num_drafts=num_drafts,
            fault=fault,
            raise_in=raise_in,
        )
        self.now = 0.0
        self.loop = StepLoop(self.scheduler, self.executor, lag=lag, masks=masks, clock=lambda: self.now)
        self.sequences = []
        self.plans = []
        self.finished = []
        self.streamed = {}
        launch = self.executor.launch
        self.executor.launch = lambda plan: (self.plans.append(plan), launch(plan))[1]

    def submit(self, prompt, *, max_tokens=8, n=1, stop_ids=(), gates=(), request=None, min_tokens=0, **fields):
        """Add a request's sequences; returns the first (or the list, for n > 1)."""
        prompt = np.asarray(prompt, np.int32)
        fields.setdefault("request_id", f"r{len(self.sequences)}")
        params = fields.pop("params", None) or SamplingParams(max_tokens=max_tokens, n=n, min_tokens=min_tokens)
        request = Request(prompt_ids=prompt.tolist(), params=params, **fields)
        made = []
        for index in range(n):
            sequence = Sequence(
                request,
                prompt_ids=prompt,
                sample_index=index,
                seed=hash_seed(request.request_id),
                stop_ids=stop_ids,
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                arrival_s=self.now,
                gates=gates,
                parent=made[0] if made else None,
            )
            self.scheduler.add(sequence)
            made.append(sequence)
        self.sequences += made
        return made if n > 1 else made[0]

    def step(self, seconds=1.0):
        self.now += seconds
        events = self.loop.step()
        self._record(events)
        return events

    def _record(self, events):
        for event in events:
            for sequence, _, tokens in event.emitted():
                self.streamed.setdefault(sequence, []).extend(tokens)
            self.finished += event.finished

    def run(self, *, max_steps=5000):
        """Step until idle; a run that does not come to an end fails."""
        for _ in range(max_steps):
            if self.loop.idle:
                return
            self.step()
        raise AssertionError(f"{self.scheduler.num_running} running, {self.scheduler.num_waiting} waiting at the end")

    def check_idle(self):
        """Nothing is held, every sequence has ended once and streamed what it has."""
        self.book.check()
        stats = self.book.stats().pages
        assert stats.num_held == stats.num_fenced == 0, stats
        assert self.executor.violations == []
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert len(self.finished) == len(set(self.finished))
        assert set(self.finished) == set(self.sequences)
        for sequence in self.sequences:
            assert sequence.finished and sequence.finish_reason is not None
            assert (sequence.error is not None) == (sequence.finish_reason is FinishReason.ERROR)
            assert self.streamed.get(sequence, []) == sequence.output_ids.tolist(), sequence

    def toy(self, sequence, count=None):
        """What the toy model says after the sequence's prompt, alone."""
        count = sequence.max_tokens if count is None else count
        return toy_continuation(
            sequence.prompt_ids, count, seed=sequence.seed, sample_index=sequence.sample_index, vocab_size=VOCAB
        )

    def expected(self, sequence):
        """(reason, tokens) of a sequence that nobody disturbs."""
        room = min(self.scheduler.limits.max_len, (self.book.num_pages - 1) * self.book.page_tokens + 1)
        tokens = self.toy(sequence, min(sequence.max_tokens, room - sequence.prompt_len)).tolist()
        for index, token in enumerate(tokens):
            if token in sequence.stop_ids and index >= sequence.min_tokens:
                return FinishReason.STOP, tokens[: index + 1]
        return FinishReason.LENGTH, tokens

    def check_undisturbed(self, sequence):
        reason, tokens = self.expected(sequence)
        assert (sequence.finish_reason, sequence.output_ids.tolist()) == (reason, tokens), sequence
        if reason is FinishReason.STOP:
            assert sequence.stop_reason == tokens[-1]


def hash_seed(name):
    return int.from_bytes(name.encode()[-7:].rjust(7, b"\0"), "little") * 2654435761 % 2**64


@pytest.fixture(scope="session")
def world():
    """The class itself: tests make as many worlds as they compare."""
    return World
