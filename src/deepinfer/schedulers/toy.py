"""A toy language model: the next token is a hash of every token before it. Any wrong key changes what follows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["ToyModel", "toy_continuation"]

Int32 = NDArray[np.int32]
UInt64 = NDArray[np.uint64]


def mix(values: UInt64) -> UInt64:
    """Finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit changes every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class ToyModel:
    """Hashes of prefixes, and tokens from hashes.

    The hash of tokens t[0..k) is the sum of (t[i] + 1) * weight[i] modulo 2**64, so that a prefix grows by one
    addition and a token counts with its position.
    """

    def __init__(self, *, vocab_size: int, max_len: int) -> None:
        self.vocab_size = vocab_size
        self._weights = mix(np.arange(1, max_len + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)

    def terms(self, tokens: Int32, positions: NDArray[np.integer]) -> UInt64:
        """What each token adds to the hash of a prefix that it is in."""
        return (tokens.astype(np.uint64) + np.uint64(1)) * self._weights[positions]

    def next_tokens(self, hashes: UInt64, noise: UInt64) -> Int32:
        """[R] i32: a function of the prefix and of the request's noise key alone."""
        return (mix(hashes ^ noise) % np.uint64(self.vocab_size)).astype(np.int32)

    def noise(self, seed: int, sample_index: int) -> np.uint64:
        key = np.asarray([seed], np.uint64) + np.asarray([sample_index + 1], np.uint64) * np.uint64(0xD1342543DE82EF95)
        return mix(key)[0]


def toy_continuation(
    prompt_ids: Int32, count: int, *, seed: int = 0, sample_index: int = 0, vocab_size: int = 97
) -> Int32:
    """The first `count` tokens after a prompt, computed one by one without pages or batches."""
    model = ToyModel(vocab_size=vocab_size, max_len=len(prompt_ids) + count)
    noise = np.asarray([model.noise(seed, sample_index)])
    tokens = np.asarray(prompt_ids, np.int32)
    for _ in range(count):
        total = model.terms(tokens, np.arange(len(tokens))).sum(keepdims=True)
        tokens = np.concatenate([tokens, model.next_tokens(total, noise)])
    return tokens[len(prompt_ids) :]
