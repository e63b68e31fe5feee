"""What a slot's request asked of the sampler, and checks that need the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import attrs

from ..errors import InvalidRequest, UnsupportedOption
from ..types import SamplingParams

__all__ = ["SlotOptions", "check_params", "tokenize_bad_words"]


@attrs.frozen
class SlotOptions:
    """Host copy of what was asked for a slot. Immutable."""

    params: SamplingParams
    #: The 64 bits of the seed as a signed number, as tensors hold it.
    seed: int
    sample_index: int
    prompt_len: int
    #: Ids that end the completion.
    stop_ids: tuple[int, ...]

    @property
    def greedy(self) -> bool:
        return self.params.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        p = self.params
        return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0

    @property
    def bad_words(self) -> tuple[tuple[int, ...], ...]:
        return tuple(word for word in self.params.bad_words if not isinstance(word, str))

    @property
    def edits_logits(self) -> bool:
        """Whether anything but temperature and filters acts on the logits."""
        p = self.params
        held_back = p.min_tokens > 0 and bool(self.stop_ids)
        listed = p.allowed_tokens is not None or bool(p.bad_words) or bool(p.logit_bias)
        return self.has_penalties or held_back or listed


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Refuse what a vocabulary of `vocab_size` tokens cannot honour.

    Raises:
        InvalidRequest: a token id outside the vocabulary, or a bias of +inf.
        UnsupportedOption: bad words given as text (see `tokenize_bad_words`), or more logprobs than tokens.
    """
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("forced_tokens", params.forced_tokens, vocab_size)
    _check_ids("allowed_tokens", params.allowed_tokens or (), vocab_size)
    _check_ids("logit_bias", params.logit_bias, vocab_size)
    for word in params.bad_words:
        if isinstance(word, str):
            raise UnsupportedOption(
                f"bad_words holds the text {word!r}; the sampler knows tokens only; apply tokenize_bad_words first"
            )
        _check_ids("bad_words", word, vocab_size)
    for token, bias in params.logit_bias.items():
        if bias == math.inf:
            raise InvalidRequest(f"logit_bias of token {token} is inf; expected less; use allowed_tokens to force it")
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and count > vocab_size:
            raise UnsupportedOption(
                f"{name} asks for {count} alternatives; the vocabulary has {vocab_size}; ask for less"
            )


def tokenize_bad_words(params: SamplingParams, encode: Callable[[str], Sequence[int]]) -> SamplingParams:
    """The same parameters with texts of `bad_words` as token sequences.

    A word is banned as it stands and with a space before it, since tokenizers tell the two apart. `encode` must
    not add special tokens.
    """
    if not any(isinstance(word, str) for word in params.bad_words):
        return params
    words: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        if not isinstance(word, str):
            words[word] = None
            continue
        for text in (word, " " + word.lstrip()):
            words[tuple(encode(text))] = None
    words.pop((), None)
    return attrs.evolve(params, bad_words=tuple(words))


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"{name} holds token id {token}; expected an id in [0, {vocab_size})")
