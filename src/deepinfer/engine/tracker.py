"""Everything the engine knows of one request between its submission and its last token."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan import PromptScores, TopLogprobs
from ..protocols import TextStream, Tokenizer
from ..schedulers import Sequence as ScheduledSequence
from ..types import FinishReason, Request, RequestOutput, TokenLogprob
from .completion import CompletionBuilder

__all__ = ["RequestTracker", "token_logprob"]


def token_logprob(top: TopLogprobs, entry: int, token_id: int, num_top: int) -> TokenLogprob:
    """Logprobs of one emitted token; `num_top` of the K computed for the batch."""
    best = zip(top.top_ids[entry, :num_top].tolist(), top.top_raw[entry, :num_top].tolist(), strict=True)
    return TokenLogprob(
        token_id=token_id, raw=float(top.raw[entry]), processed=float(top.processed[entry]), top=tuple(best)
    )


class RequestTracker:
    """A request, its n sequences and what they have produced. Owned by the engine."""

    def __init__(
        self,
        request: Request,
        sequences: Sequence[ScheduledSequence],
        *,
        tokenizer: Tokenizer | None,
        arrival_s: float,
        streamed: bool,
    ) -> None:
        self.request = request
        self.sequences = tuple(sequences)
        streams = [_text_stream(tokenizer, request) for _ in sequences]
        self.builders = tuple(CompletionBuilder(i, request.params, stream) for i, stream in enumerate(streams))
        self.streamed = streamed
        self.arrival_s = arrival_s
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: list[float] = [arrival_s] * len(self.builders)
        self._prompt_logprobs: dict[int, TokenLogprob] = {}

    @property
    def finished(self) -> bool:
        return all(builder.finished for builder in self.builders)

    @property
    def num_cached_tokens(self) -> int:
        return self.sequences[0].num_cached_tokens

    @property
    def finish_reason(self) -> FinishReason:
        """Of the request as a whole: an error if any completion has one, else the first completion's."""
        reasons = [builder.build().finish_reason for builder in self.builders]
        if FinishReason.ERROR in reasons:
            return FinishReason.ERROR
        assert reasons[0] is not None
        return reasons[0]

    def add_prompt_scores(self, scores: PromptScores) -> None:
        """A recomputed chunk overwrites what it scored before."""
        num_top = self.request.params.prompt_logprobs or 0
        for i, token_id in enumerate(scores.token_ids.tolist()):
            best = zip(scores.top_ids[i, :num_top].tolist(), scores.top_raw[i, :num_top].tolist(), strict=True)
            raw = float(scores.raw[i])
            self._prompt_logprobs[scores.start + i] = TokenLogprob(
                token_id=token_id, raw=raw, processed=raw, top=tuple(best)
            )

    def output(self) -> RequestOutput:
        """An immutable copy of the state so far."""
        scored = self.request.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=self.request.request_id,
            prompt_ids=self.request.prompt_ids,
            completions=tuple(builder.build() for builder in self.builders),
            prompt_logprobs=tuple(v for _, v in sorted(self._prompt_logprobs.items())) if scored else None,
            num_cached_tokens=self.num_cached_tokens,
        )


def _text_stream(tokenizer: Tokenizer | None, request: Request) -> TextStream | None:
    # a character is at most four byte tokens, and a special token or two may stand behind it
    return None if tokenizer is None else tokenizer.detokenizer(prefix_ids=request.prompt_ids[-8:])
