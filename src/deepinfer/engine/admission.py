"""Checks a request against a composition before anything is scheduled, and makes its sequences."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import attrs
import numpy as np

from ..errors import ContextLengthExceeded, InvalidRequest, UnsupportedOption
from ..protocols import Tokenizer
from ..sampling import check_params, tokenize_bad_words
from ..schedulers import Sequence as ScheduledSequence
from ..types import Request, SamplingParams

__all__ = ["Limits", "check_request", "make_sequences", "request_seed", "with_token_words"]


@attrs.frozen
class Limits:
    """What one composition can serve."""

    vocab_size: int
    #: Longest prompt and output together.
    max_len: int
    eos_ids: tuple[int, ...] = ()


def check_request(request: Request, limits: Limits) -> None:
    """Refuse what cannot be served, before it costs anything.

    Raises:
        InvalidRequest: empty prompt, a token id out of range, a parameter that does not fit the vocabulary.
        ContextLengthExceeded: the prompt leaves no room for a token.
    """
    prompt = request.prompt_ids
    if not prompt:
        raise InvalidRequest(f"request {request.request_id}: the prompt is empty; give at least one token")
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= limits.vocab_size:
        bad = low if low < 0 else high
        raise InvalidRequest(
            f"request {request.request_id}: token id {bad} at position {prompt.index(bad)}; "
            f"the vocabulary has ids 0 to {limits.vocab_size - 1}"
        )
    if len(prompt) >= limits.max_len:
        raise ContextLengthExceeded(
            f"request {request.request_id}: the prompt has {len(prompt)} tokens; at most {limits.max_len - 1} "
            f"fit beside one generated token. Shorten it or compose with a larger max_len"
        )
    check_params(request.params, limits.vocab_size)


def with_token_words(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """`params` with every bad word as token ids.

    Raises:
        UnsupportedOption: texts are asked about, but the composition has no tokenizer.
    """
    has_texts = any(isinstance(word, str) for word in params.bad_words)
    if tokenizer is None:
        if has_texts or params.stop:
            asked = "bad_words" if has_texts else "stop"
            raise UnsupportedOption(f"{asked} holds text, but the engine has no tokenizer; compose with one or use ids")
        return params
    if not has_texts:
        return params
    return tokenize_bad_words(params, lambda text: tokenizer.encode(text, add_special_tokens=False))


def request_seed(entropy: int, index: int) -> int:
    """64-bit noise key of the `index`-th request of an engine that was given no seed for it."""
    digest = hashlib.blake2b(index.to_bytes(8, "little"), key=entropy.to_bytes(16, "little"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def make_sequences(request: Request, limits: Limits, *, seed: int, arrival_s: float) -> tuple[ScheduledSequence, ...]:
    """One sequence for each of the request's n samples; the later ones share the first one's prompt."""
    params = request.params
    stop_ids: Sequence[int] = (*(() if params.ignore_eos else limits.eos_ids), *params.stop_token_ids)
    prompt_ids = np.asarray(request.prompt_ids, np.int32)
    sequences: list[ScheduledSequence] = []
    for sample_index in range(params.n):
        sequences.append(
            ScheduledSequence(
                request,
                prompt_ids=prompt_ids,
                sample_index=sample_index,
                seed=seed,
                stop_ids=tuple(dict.fromkeys(stop_ids)),
                max_tokens=min(params.max_tokens, limits.max_len - len(prompt_ids)),
                min_tokens=params.min_tokens,
                arrival_s=arrival_s,
                parent=sequences[0] if sequences else None,
            )
        )
    return tuple(sequences)
