"""What must not change a bit: batch mates, chunks, preemption, prefix hits, lag and order of arrival.

`compose` makes an `LLM` in invariant mode from fields of `Composition`; each check makes the engines it needs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from deepinfer import LLM, SamplingParams
from deepinfer.types import RequestOutput

Compose = Callable[..., LLM]
Prompts = list[list[int]]

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=3)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=20, ignore_eos=True, logprobs=3)
BOUNDARIES = (1, 2, 3, 5, 7, 15, 16, 17, 31, 33, 49)


def prompts(count: int, longest: int = 90) -> Prompts:
    """Token ids of mixed lengths, always the same; the first prompt has 50."""
    draw = random.Random(5)
    lengths = [draw.randint(1, longest) for _ in range(count)]
    lengths[0] = 50
    return [[draw.randrange(3, 200) for _ in range(length)] for length in lengths]


def bits(output: RequestOutput) -> tuple:
    """Everything that must not change; floats compare exactly."""
    assert output.error is None
    return tuple((c.token_ids, c.logprobs, c.finish_reason) for c in output.completions)


def check_batches(compose: Compose, params: SamplingParams, batch: Prompts, *, squeezed_tokens: int) -> None:
    """Alone, together, one step late, shuffled, and preempted in a cache of `squeezed_tokens`."""
    one_by_one = compose(prefix_caching=False)
    expected = [bits(one_by_one.generate(prompt, params)[0]) for prompt in batch]

    together = compose(prefix_caching=False).generate(batch, params)
    assert [bits(o) for o in together] == expected, f"in a batch of {len(batch)}"

    one_late = compose(prefix_caching=False, lag=1).generate(batch, params)
    assert [bits(o) for o in one_late] == expected, "one step late"

    order = list(range(len(batch)))
    random.Random(3).shuffle(order)
    shuffled = compose().generate([batch[i] for i in order], params)
    assert [bits(o) for o in shuffled] == [expected[i] for i in order], "shuffled arrival"

    small = compose(cache_tokens=squeezed_tokens, lag=1)
    squeezed = small.generate(batch, params)
    assert small.engine.metrics.counters["num_preemptions_total"] > 0
    assert [bits(o) for o in squeezed] == expected, "preempted"


def check_chunks(
    compose: Compose, params: SamplingParams, prompt: list[int], boundaries: Sequence[int] = BOUNDARIES
) -> None:
    """A prompt computed in chunks of each of the given sizes."""
    expected = bits(compose().generate(prompt, params)[0])
    for budget in boundaries:
        chunked = compose(max_tokens_per_step=budget, max_rows=1).generate(prompt, params)[0]
        assert bits(chunked) == expected, f"chunks of {budget}"


def check_prefix_hits(compose: Compose, params: SamplingParams) -> None:
    """The same prompt again, and one that goes on from prompt and output."""
    prompt = prompts(1)[0]
    llm = compose()
    first = llm.generate(prompt, params)[0]
    again = llm.generate(prompt, params)[0]
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 48)
    assert bits(again) == bits(first)
    longer = [*prompt, *first.token_ids, 7]
    cold = compose().generate(longer, params)[0]
    warm = llm.generate(longer, params)[0]
    assert warm.num_cached_tokens >= 64
    assert bits(warm) == bits(cold)
