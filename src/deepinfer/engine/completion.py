"""Builds one completion from the tokens of a sequence: text, stop strings, logprobs."""

from __future__ import annotations

from ..errors import DeepInferError
from ..protocols import TextStream
from ..types import Completion, FinishReason, SamplingParams, TokenLogprob
from .stops import StopMatcher

__all__ = ["CompletionBuilder"]


class CompletionBuilder:
    """Grows with one sequence. Owned by the engine, which feeds it in token order.

    Without stop strings text is made only when a completion is asked for, so that offline batches pay nothing
    per token.
    """

    def __init__(self, index: int, params: SamplingParams, text_stream: TextStream | None) -> None:
        self.index = index
        self._token_ids: list[int] = []
        self._text = ""
        self._num_read = 0
        self._stream = text_stream
        self._stops = StopMatcher(params.stop) if params.stop else None
        self._hidden = frozenset(params.stop_token_ids)
        self._logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self._reason: FinishReason | None = None
        self._stop_reason: str | int | None = None
        self._error: DeepInferError | None = None

    @property
    def finished(self) -> bool:
        return self._reason is not None

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def push(self, token_id: int, logprob: TokenLogprob | None) -> str | None:
        """Take the next token; returns the stop string if it was just completed."""
        self._token_ids.append(token_id)
        if self._logprobs is not None and logprob is not None:
            self._logprobs.append(logprob)
        if self._stops is None:
            return None
        self._read()
        return self._stops.hit

    def finish(
        self, reason: FinishReason, *, stop_reason: str | int | None = None, error: DeepInferError | None = None
    ) -> None:
        self._reason, self._stop_reason, self._error = reason, stop_reason, error
        self._read()
        if self._stream is not None:
            self._show(self._stream.flush())
        if self._stops is not None:
            self._text += self._stops.flush()

    def build(self) -> Completion:
        """An immutable copy of the state so far."""
        self._read()
        return Completion(
            index=self.index,
            token_ids=tuple(self._token_ids),
            text=self._text,
            finish_reason=self._reason,
            stop_reason=self._stop_reason,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            error=self._error,
        )

    def _read(self) -> None:
        if self._stream is None:
            return
        new, self._num_read = self._token_ids[self._num_read :], len(self._token_ids)
        for token_id in new:
            if token_id not in self._hidden:
                self._show(self._stream.push(token_id))

    def _show(self, text: str) -> None:
        self._text += text if self._stops is None else self._stops.push(text)
