"""Choosing tokens: options of a slot, masks, penalties, filters, logprobs, the sampler."""

from __future__ import annotations

from .filters import filter_logits
from .logprobs import Scores, top_logprobs
from .masks import TokenMasks
from .options import SlotOptions, check_params, tokenize_bad_words
from .processor import SamplingProcessor
from .sampler import SampleOut, Sampler
from .table import SamplingTable

__all__ = [
    "SampleOut",
    "Sampler",
    "SamplingProcessor",
    "SamplingTable",
    "Scores",
    "SlotOptions",
    "TokenMasks",
    "check_params",
    "filter_logits",
    "tokenize_bad_words",
    "top_logprobs",
]
