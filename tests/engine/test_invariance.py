"""Invariant mode: a request's tokens and logprobs are the same bits whatever happens around it."""

import random

import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.types import RequestOutput

MODES = {
    "float32": {"weights": "float32"},
    "4-bit": {"weights": "q4_1"},
    "8-bit": {"weights": "q8_0"},
    "eager": {"weights": "float32", "want": {"linear": "eager", "attention": "eager", "rms_norm": "eager"}},
}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=3)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=20, ignore_eos=True, logprobs=3)


def compose(folder, mode: str, **fields) -> LLM:
    return LLM(str(folder), invariant=True, progress=False, **{"max_rows": 40, **MODES[mode], **fields})


def prompts(count: int, longest: int = 90) -> list[list[int]]:
    draw = random.Random(5)
    lengths = [draw.randint(1, longest) for _ in range(count)]
    lengths[0] = 50
    return [[draw.randrange(3, 200) for _ in range(length)] for length in lengths]


def bits(output: RequestOutput) -> tuple:
    """Everything that must not change; floats compare exactly."""
    assert output.error is None
    return tuple((c.token_ids, c.logprobs, c.finish_reason) for c in output.completions)


def alone(folder, mode: str, params: SamplingParams) -> list[tuple]:
    llm = compose(folder, mode, prefix_caching=False)
    return [bits(llm.generate(prompt, params)[0]) for prompt in prompts(33)]


@pytest.fixture(params=[GREEDY, SEEDED], ids=["greedy", "seeded"])
def params(request) -> SamplingParams:
    return request.param


@pytest.mark.parametrize("mode", MODES)
def test_batch_chunk_preemption_prefix_and_lag_leave_every_bit(tiny_llama_folder, mode: str, params) -> None:
    expected = alone(tiny_llama_folder, mode, params)
    batch = prompts(33)

    together = compose(tiny_llama_folder, mode, prefix_caching=False).generate(batch, params)
    assert [bits(o) for o in together] == expected, "in a batch of 33"

    one_late = compose(tiny_llama_folder, mode, prefix_caching=False, lag=1).generate(batch, params)
    assert [bits(o) for o in one_late] == expected, "one step late"

    order = list(range(33))
    random.Random(3).shuffle(order)
    shuffled = compose(tiny_llama_folder, mode).generate([batch[i] for i in order], params)
    assert [bits(o) for o in shuffled] == [expected[i] for i in order], "shuffled arrival"

    small = compose(tiny_llama_folder, mode, cache_tokens=400, lag=1)
    squeezed = small.generate(batch, params)
    assert small.engine.metrics.counters["num_preemptions_total"] > 0
    assert [bits(o) for o in squeezed] == expected, "preempted"


@pytest.mark.parametrize("mode", MODES)
def test_every_chunk_boundary_leaves_every_bit(tiny_llama_folder, mode: str, params) -> None:
    prompt = prompts(1)[0]
    expected = bits(compose(tiny_llama_folder, mode).generate(prompt, params)[0])
    for budget in (1, 2, 3, 5, 7, 15, 16, 17, 31, 33, 49):
        chunked = compose(tiny_llama_folder, mode, max_tokens_per_step=budget, max_rows=1).generate(prompt, params)[0]
        assert bits(chunked) == expected, f"chunks of {budget}"


@pytest.mark.parametrize("mode", MODES)
def test_prefix_hits_leave_every_bit(tiny_llama_folder, mode: str, params) -> None:
    prompt = prompts(1)[0]
    llm = compose(tiny_llama_folder, mode)
    first = llm.generate(prompt, params)[0]
    again = llm.generate(prompt, params)[0]
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 48)
    assert bits(again) == bits(first)
    longer = [*prompt, *first.token_ids, 7]
    cold = compose(tiny_llama_folder, mode).generate(longer, params)[0]
    warm = llm.generate(longer, params)[0]
    assert warm.num_cached_tokens >= 64
    assert bits(warm) == bits(cold)


def test_samples_of_one_request_differ_but_repeat(tiny_llama_folder) -> None:
    params = SamplingParams(temperature=1.0, seed=4, n=4, max_tokens=12, ignore_eos=True, logprobs=0)
    outputs = [compose(tiny_llama_folder, "float32", lag=lag).generate(prompts(3), params) for lag in (0, 1)]
    assert [bits(o) for o in outputs[0]] == [bits(o) for o in outputs[1]]
    for output in outputs[0]:
        assert len({c.token_ids for c in output.completions}) == 4
