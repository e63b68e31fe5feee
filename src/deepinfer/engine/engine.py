"""The engine: requests in, steps, outputs out. Composed from parts; holds no model code and no policy."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from ..cache import PagedBook
from ..errors import DeepInferError, InvalidRequest, RequestError, UnsupportedOption
from ..plan import PromptScores, StepResult, TopLogprobs
from ..protocols import ChatFormat, Executor, Observer, Tokenizer
from ..schedulers import Scheduler, StepEvents, StepLoop
from ..schedulers import Sequence as ScheduledSequence
from ..types import FinishReason, Request, RequestOutput, SamplingParams
from .admission import Limits, check_request, make_sequences, request_seed, with_token_words
from .composition import Composition
from .metrics import EngineMetrics
from .tracker import RequestTracker, token_logprob

__all__ = ["Engine"]

logger = logging.getLogger(__name__)


class Engine:
    """Serves requests by stepping a scheduler and an executor. One thread at a time; `AsyncEngine` adds a door.

    Args:
        scheduler: decides what runs in each step.
        executor: runs it.
        limits: vocabulary, longest sequence and end-of-sequence ids of the model behind the executor.
        tokenizer: needed for text prompts, stop strings and text outputs; without it the engine speaks ids.
        chat_format: needed for conversations.
        lag: 0 settles each step before the next is planned, 1 plans one step ahead. Same tokens.
        seed: fixes the noise of requests that bring no seed of their own; default is fresh entropy.
        observers: told about requests and steps.
        composition: the data this engine was built from, kept for `config`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        limits: Limits,
        tokenizer: Tokenizer | None = None,
        chat_format: ChatFormat | None = None,
        lag: int = 0,
        seed: int | None = None,
        observers: Iterable[Observer] = (),
        model_name: str = "",
        composition: Composition | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.limits = limits
        self.tokenizer = tokenizer
        self.chat_format = chat_format
        self.composition = composition
        self.loop = StepLoop(scheduler, executor, lag=lag, clock=clock)
        self._metrics = EngineMetrics(model_name)
        self._observers = tuple(observers)
        self._clock = clock
        self._entropy = secrets.randbits(128) if seed is None else seed
        self._num_added = 0
        self._live: dict[str, RequestTracker] = {}
        self._tracker_of: dict[ScheduledSequence, tuple[RequestTracker, int]] = {}
        self._ended: list[RequestTracker] = []

    # --- requests -------------------------------------------------------------------------------

    def add(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        stream: bool = False,
        **fields: Any,
    ) -> str:
        """Submit a prompt (text or token ids) and return its request id.

        `stream=True` makes `step` return its output whenever it grew, not only at the end. Further
        keywords are fields of `Request`.

        Raises:
            RequestError: it cannot be served as asked; nothing was submitted.
        """
        if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Iterable):
            raise InvalidRequest(f"the prompt is a {type(prompt).__name__}; expected text or token ids")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequest("the prompt is text, but the engine has no tokenizer; pass token ids")
            prompt = self.tokenizer.encode(prompt)
        request_id = f"request-{self._num_added}" if request_id is None else request_id
        request = Request(request_id=request_id, prompt_ids=tuple(prompt), params=params or SamplingParams(), **fields)
        self.submit(request, stream=stream)
        return request_id

    def submit(self, request: Request, *, stream: bool = False) -> None:
        """Submit a ready request.

        Raises:
            RequestError: it cannot be served as asked; nothing was submitted.
        """
        if request.request_id in self._live:
            raise InvalidRequest(f"request id {request.request_id!r} is in use; choose another")
        check_request(request, self.limits)
        resolved = attrs.evolve(request, params=with_token_words(request.params, self.tokenizer))
        seed = request_seed(self._entropy, self._num_added) if request.params.seed is None else request.params.seed
        now = self._clock()
        sequences = make_sequences(resolved, self.limits, seed=seed, arrival_s=now)
        for sequence in sequences:
            self.scheduler.add(sequence)
        tracker = RequestTracker(resolved, sequences, tokenizer=self.tokenizer, arrival_s=now, streamed=stream)
        self._num_added += 1
        self._live[request.request_id] = tracker
        self._tracker_of.update({sequence: (tracker, i) for i, sequence in enumerate(sequences)})
        self._tell("request_added", resolved)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of a conversation, ready for the model's answer.

        Raises:
            UnsupportedOption: the composition has no chat format or no tokenizer.
            ChatTemplateError: the template refuses or fails.
        """
        if self.chat_format is None or self.tokenizer is None:
            raise UnsupportedOption("this model brings no chat template; pass the prompt as text or token ids")
        text = self.chat_format.render(messages, tools=tools, add_generation_prompt=True)
        # the template writes the special tokens itself
        return self.tokenizer.encode(text, add_special_tokens=False)

    def cancel(self, request_id: str) -> None:
        """End a request with `FinishReason.CANCELLED`; unknown or ended ids are ignored."""
        if request_id in self._live:
            self.scheduler.cancel(request_id)

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    # --- stepping -------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one step; returns outputs of requests that ended, and of streamed ones that grew."""
        grown: dict[str, RequestTracker] = {}
        for events in self.loop.step():
            self._take(events, grown)
        return [tracker.output() for tracker in grown.values() if not tracker.finished] + self._close_ended()

    def generate(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Run prompts to their ends and return their outputs in the same order.

        Raises:
            RequestError: a prompt cannot be served as asked (`LLM.generate` reports it in that prompt's output).
        """
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        ids: list[str] = []
        try:
            ids.extend(self.add(prompt, one) for prompt, one in zip(prompts, each, strict=True))
        except RequestError:
            for request_id in ids:
                self.cancel(request_id)
            raise
        wanted, done = set(ids), {}
        while len(done) < len(ids):
            done.update({output.request_id: output for output in self.step() if output.request_id in wanted})
        return [done[request_id] for request_id in ids]

    @property
    def metrics(self) -> EngineMetrics:
        """Counters and histograms, gauges and cache counts brought up to date."""
        gauges, counters, book = self._metrics.gauges, self._metrics.counters, self.scheduler.book
        gauges["num_requests_running"] = self.scheduler.num_running
        gauges["num_requests_waiting"] = self.scheduler.num_waiting
        gauges["kv_cache_usage_perc"] = 1.0 - book.num_free / max(book.num_pages - 1, 1)
        counters["num_preemptions_total"] = self.scheduler.num_preemptions
        if isinstance(book, PagedBook):
            stats = book.stats()
            counters["prefix_cache_queries_total"] = stats.query_tokens
            counters["prefix_cache_hits_total"] = stats.hit_tokens
        return self._metrics

    def config(self) -> Mapping[str, Any]:
        """Lag, scheduler and executor as plain JSON values; what it was built from is `composition`."""
        parts = {"scheduler": self.scheduler, "executor": self.executor}
        return {
            "lag": self.loop.lag,
            **{name: part.config() for name, part in parts.items() if hasattr(part, "config")},
        }

    # --- taking in a settled step ---------------------------------------------------------------

    def _take(self, events: StepEvents, grown: dict[str, RequestTracker]) -> None:
        now = self._clock()
        self._take_scores(events)
        entry_of = {} if events.result.logprobs is None else _entries(events.result.logprobs)
        for sequence, row, tokens in events.emitted():
            found = self._tracker_of.get(sequence)
            if found is not None:
                self._take_tokens(found, sequence, tokens, events.result, entry_of.get(row), now)
                if found[0].streamed:
                    grown[found[0].request.request_id] = found[0]
        for sequence in events.finished:
            self._finish(sequence, now)
        if not events.plan.num_rows:  # endings between steps
            return
        self._metrics.counters["steps_total"] += 1
        self._tell("step_done", events.plan, events.result)

    def _take_tokens(
        self,
        found: tuple[RequestTracker, int],
        sequence: ScheduledSequence,
        tokens: Sequence[int],
        result: StepResult,
        entry: int | None,
        now: float,
    ) -> None:
        tracker, index = found
        builder = tracker.builders[index]
        num_top = tracker.request.params.logprobs
        for token_id in tokens:
            if builder.finished:
                return
            logprob = None
            if num_top is not None and entry is not None and result.logprobs is not None:
                logprob = token_logprob(result.logprobs, entry, token_id, num_top)
            self._time_token(tracker, index, sequence, now)
            stop = builder.push(token_id, logprob)
            if stop is not None:
                # the token may also have been the last allowed one: the text was cut, so the stop is the reason
                self.scheduler.finish(sequence, FinishReason.STOP, stop_reason=stop)
                self._finish(sequence, now, stop=stop)

    def _take_scores(self, events: StepEvents) -> None:
        scores: PromptScores
        for scores in events.result.prompt_scores:
            sequence = events.sequence_of_row(scores.row)
            if sequence in self._tracker_of:
                self._tracker_of[sequence][0].add_prompt_scores(scores)

    def _time_token(self, tracker: RequestTracker, index: int, sequence: ScheduledSequence, now: float) -> None:
        self._metrics.counters["generation_tokens_total"] += 1
        if tracker.first_token_s is None:
            tracker.first_token_s = now
            self._metrics.counters["prompt_tokens_total"] += len(tracker.request.prompt_ids)
            self._metrics.histograms["time_to_first_token_seconds"].observe(now - tracker.arrival_s)
            started = sequence.admitted_s if sequence.admitted_s is not None else tracker.arrival_s
            self._metrics.histograms["request_queue_time_seconds"].observe(started - tracker.arrival_s)
            self._metrics.histograms["request_prefill_time_seconds"].observe(now - started)
        elif tracker.builders[index].num_tokens:
            self._metrics.histograms["inter_token_latency_seconds"].observe(now - tracker.last_token_s[index])
        tracker.last_token_s[index] = now

    def _finish(self, sequence: ScheduledSequence, now: float, *, stop: str | None = None) -> None:
        found = self._tracker_of.pop(sequence, None)
        if found is None:
            return
        tracker, index = found
        assert sequence.finish_reason is not None
        reason, stop_reason = (
            (sequence.finish_reason, sequence.stop_reason) if stop is None else (FinishReason.STOP, stop)
        )
        tracker.builders[index].finish(reason, stop_reason=stop_reason, error=_as_error(sequence.error))
        if tracker.finished:
            self._ended.append(tracker)
            self._metrics.finished[str(tracker.finish_reason)] += 1
            self._metrics.histograms["e2e_request_latency_seconds"].observe(now - tracker.arrival_s)
            if tracker.first_token_s is not None:
                self._metrics.histograms["request_decode_time_seconds"].observe(now - tracker.first_token_s)

    def _tell(self, event: str, *about: Any) -> None:
        """An observer that fails is reported and costs no request anything."""
        for observer in self._observers:
            try:
                getattr(observer, event)(*about)
            except Exception:
                logger.exception("observer %r failed at %s", observer, event)

    def _close_ended(self) -> list[RequestOutput]:
        outputs = []
        for tracker in self._ended:
            del self._live[tracker.request.request_id]
            outputs.append(tracker.output())
            self._tell("request_finished", outputs[-1])
        self._ended = []
        return outputs


def _entries(logprobs: TopLogprobs) -> dict[int, int]:
    return {row: entry for entry, row in enumerate(logprobs.rows.tolist())}


def _as_error(error: BaseException | None) -> DeepInferError | None:
    return error if error is None or isinstance(error, DeepInferError) else DeepInferError(str(error))
