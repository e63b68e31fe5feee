"""The nouns of a request: what a user submits and what comes back."""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from .errors import DeepInferError, InvalidRequest

__all__ = ["Completion", "FinishReason", "Request", "RequestOutput", "SamplingParams", "TokenLogprob"]

MAX_SEED = 2**64 - 1
MAX_SAMPLES = 1024
MIN_TEMPERATURE = 1e-38
MAX_BIAS = 1e6

Check = Callable[[object, attrs.Attribute, Any], None]


class FinishReason(enum.StrEnum):
    """How a completion ended; every completion ends with exactly one."""

    STOP = "stop"
    """A stop id, an end-of-sequence id or a stop string."""
    LENGTH = "length"
    """`max_tokens` or the context length."""
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    """Its `deadline_s` passed before it was done."""
    ERROR = "error"
    """See `Completion.error`."""


def _ints(values: Sequence[int]) -> tuple[int, ...]:
    """Integers of any integer type; a float that would lose its fraction is no token id."""
    try:
        return tuple(operator.index(v) for v in values)
    except TypeError as error:
        raise InvalidRequest(f"{str(values)[:80]!r} is no sequence of integers: {error}; expected token ids") from None


def _texts(values: str | Sequence[str]) -> tuple[str, ...]:
    texts = (values,) if isinstance(values, str) else tuple(values) if isinstance(values, Iterable) else (values,)
    for text in texts:
        if not isinstance(text, str):
            raise InvalidRequest(f"{str(text)[:80]!r} is a {type(text).__name__}; expected text")
    return texts


def _bad_words(values: Sequence[str | Sequence[int]]) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise InvalidRequest(f"bad_words is {str(values)[:80]!r}; expected a list of texts or token id lists")
    return tuple(v if isinstance(v, str) else _ints(v) for v in values)


def _biases(values: Mapping[int, float]) -> dict[int, float]:
    try:
        return {operator.index(token): float(bias) for token, bias in dict(values).items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"logit_bias is {str(values)[:80]}: {error}; expected token id: number") from None


def _text(_instance: object, attribute: attrs.Attribute, value: str) -> None:
    if not isinstance(value, str):
        raise InvalidRequest(f"{attribute.name} is {str(value)[:80]!r}; expected text")


def _temperature(_instance: object, attribute: attrs.Attribute, value: float) -> None:
    """Smaller ones would be no different from 0 but for dividing by it."""
    _between(0.0, 100.0)(_instance, attribute, value)
    if 0 < value < MIN_TEMPERATURE:
        raise InvalidRequest(f"temperature is {value!r}; expected 0 (exact argmax) or at least {MIN_TEMPERATURE}")


def _between(low: float, high: float, *, open_low: bool = False) -> Callable[[object, attrs.Attribute, float], None]:
    def check(_instance: object, attribute: attrs.Attribute, value: float) -> None:
        inside = isinstance(value, (int, float)) and low <= value <= high and not (open_low and value == low)
        if isinstance(value, bool) or not inside:
            bracket = "(" if open_low else "["
            raise InvalidRequest(f"{attribute.name} is {value!r}; expected a number in {bracket}{low}, {high}]")

    return check


def _count(low: int, *, optional: bool = False) -> Callable[[object, attrs.Attribute, int | None], None]:
    def check(_instance: object, attribute: attrs.Attribute, value: int | None) -> None:
        if value is None and optional:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise InvalidRequest(f"{attribute.name} is {value!r}; expected an integer >= {low}")

    return check


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen. Immutable; checked when made.

    The order in which the fields act is documented once, in `deepinfer.sampling.sampler`.

    Raises:
        InvalidRequest: a field is out of its range; the message names it.
    """

    max_tokens: int = attrs.field(default=128, validator=_count(1))
    #: Stop ids are not sampled before this many tokens are out.
    min_tokens: int = attrs.field(default=0, validator=_count(0))
    #: 0 is exact argmax, lowest id on ties.
    temperature: float = attrs.field(default=1.0, validator=_temperature)
    #: 0 keeps the whole vocabulary.
    top_k: int = attrs.field(default=0, validator=_count(0))
    top_p: float = attrs.field(default=1.0, validator=_between(0.0, 1.0, open_low=True))
    #: Tokens less likely than `min_p` times the likeliest are dropped.
    min_p: float = attrs.field(default=0.0, validator=_between(0.0, 1.0))
    #: Divides positive and multiplies negative logits of tokens seen in prompt or output.
    repetition_penalty: float = attrs.field(default=1.0, validator=_between(0.0, 100.0, open_low=True))
    #: Subtracted once from logits of tokens seen in the output.
    presence_penalty: float = attrs.field(default=0.0, validator=_between(-100.0, 100.0))
    #: Subtracted per occurrence in the output.
    frequency_penalty: float = attrs.field(default=0.0, validator=_between(-100.0, 100.0))
    #: Token id to a value added to its logit.
    logit_bias: Mapping[int, float] = attrs.field(factory=dict, converter=_biases)
    #: Texts or token sequences that never appear in the output.
    bad_words: tuple[str | tuple[int, ...], ...] = attrs.field(default=(), converter=_bad_words)
    #: Only these ids can be sampled.
    allowed_tokens: tuple[int, ...] | None = attrs.field(default=None, converter=attrs.converters.optional(_ints))
    #: Texts that end the completion, also before `min_tokens`; they never appear in the output, not even streamed.
    stop: tuple[str, ...] = attrs.field(default=(), converter=_texts)
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_ints)
    ignore_eos: bool = False
    n: int = attrs.field(default=1, validator=_count(1))
    #: Same seed, same prompt: same tokens. None draws a fresh one per request.
    seed: int | None = attrs.field(default=None, validator=_count(0, optional=True))
    #: The first output tokens are these (their logprobs are reported as usual).
    forced_tokens: tuple[int, ...] = attrs.field(default=(), converter=_ints)
    #: Report the chosen token and this many most likely ones per position; None reports nothing.
    logprobs: int | None = attrs.field(default=None, validator=_count(0, optional=True))
    #: The same for every prompt position but the first.
    prompt_logprobs: int | None = attrs.field(default=None, validator=_count(0, optional=True))

    def __attrs_post_init__(self) -> None:
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}")
        if len(self.forced_tokens) > self.max_tokens:
            raise InvalidRequest(
                f"{len(self.forced_tokens)} forced_tokens do not fit max_tokens {self.max_tokens}; raise max_tokens"
            )
        if self.seed is not None and self.seed > MAX_SEED:
            raise InvalidRequest(f"seed is {self.seed}; expected at most 2**64 - 1")
        if self.allowed_tokens is not None and not self.allowed_tokens:
            raise InvalidRequest("allowed_tokens is empty, so nothing could be sampled; pass None for no limit")
        if any(not text for text in self.stop):
            raise InvalidRequest("stop holds an empty string, which would end every completion at once")
        if any(not word for word in self.bad_words):
            raise InvalidRequest("bad_words holds an empty word; remove it")
        if self.n > MAX_SAMPLES:
            raise InvalidRequest(f"n is {self.n}; expected at most {MAX_SAMPLES}")
        for token, bias in self.logit_bias.items():
            if not (abs(bias) <= MAX_BIAS or bias == -math.inf):
                raise InvalidRequest(
                    f"logit_bias holds {token}: {bias}; expected -inf or a number of at most {MAX_BIAS:g} "
                    "(to force a token, pass it as allowed_tokens)"
                )


def _params(_instance: object, attribute: attrs.Attribute, value: SamplingParams) -> None:
    if not isinstance(value, SamplingParams):
        raise InvalidRequest(f"{attribute.name} is a {type(value).__name__}; expected SamplingParams")


@attrs.frozen(kw_only=True)
class Request:
    """One prompt and how to continue it."""

    request_id: str = attrs.field(validator=_text)
    prompt_ids: tuple[int, ...] = attrs.field(converter=_ints, repr=False)
    params: SamplingParams = attrs.field(factory=SamplingParams, validator=_params)
    #: Larger is served first by the priority policy.
    priority: int = attrs.field(default=0, validator=_count(-(2**31)))
    #: Seconds after arrival at which it ends with `FinishReason.DEADLINE`.
    deadline_s: float | None = attrs.field(
        default=None, validator=attrs.validators.optional(_between(0.0, math.inf, open_low=True))
    )
    #: Who to account it to (fair share).
    user: str = attrs.field(default="", validator=_text)
    #: Requests share cached prefixes only within one salt (one per tenant).
    salt: str = attrs.field(default="", validator=_text)
    #: Further things the cached keys depend on (an adapter name, image hashes).
    extra_keys: tuple[str, ...] = attrs.field(default=(), converter=_texts)


@attrs.frozen(kw_only=True)
class TokenLogprob:
    """Log-probabilities at one position.

    `raw` is of the model's distribution, `processed` of the one sampled from (after masks, bias,
    penalties, temperature and filters; `-inf` for a forced token that was filtered out).
    """

    token_id: int
    raw: float
    processed: float
    #: (token id, raw logprob) of the most likely ones, most likely first, lower id on ties.
    top: tuple[tuple[int, float], ...] = ()


@attrs.frozen(kw_only=True)
class Completion:
    """One continuation of a request's prompt."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    #: The stop string or stop id that ended it.
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: DeepInferError | None = None


@attrs.frozen(kw_only=True)
class RequestOutput:
    """What a request has produced so far (streaming) or in all."""

    request_id: str
    prompt_ids: tuple[int, ...] = attrs.field(repr=False)
    completions: tuple[Completion, ...]
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    #: Prompt tokens whose keys came from the prefix cache.
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        return all(c.finish_reason is not None for c in self.completions)

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.completions[0].token_ids

    @property
    def error(self) -> DeepInferError | None:
        return next((c.error for c in self.completions if c.error is not None), None)
