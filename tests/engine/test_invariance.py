"""Invariant mode: a request's tokens and logprobs are the same bits whatever happens around it."""

import functools

import pytest

from deepinfer import LLM, SamplingParams

from .invariance import GREEDY, SEEDED, bits, check_batches, check_chunks, check_prefix_hits, prompts

MODES = {
    "float32": {"weights": "float32"},
    "4-bit": {"weights": "q4_1"},
    "8-bit": {"weights": "q8_0"},
    "eager": {"weights": "float32", "want": {"linear": "eager", "attention": "eager", "rms_norm": "eager"}},
}


def compose(folder, mode: str, **fields) -> LLM:
    return LLM(str(folder), invariant=True, progress=False, **{"max_rows": 40, **MODES[mode], **fields})


@pytest.fixture(params=[GREEDY, SEEDED], ids=["greedy", "seeded"])
def params(request) -> SamplingParams:
    return request.param


@pytest.mark.parametrize("mode", MODES)
def test_batch_chunk_preemption_prefix_and_lag_leave_every_bit(tiny_llama_folder, mode: str, params) -> None:
    make = functools.partial(compose, tiny_llama_folder, mode)
    check_batches(make, params, prompts(33), squeezed_tokens=400)


@pytest.mark.parametrize("mode", MODES)
def test_every_chunk_boundary_leaves_every_bit(tiny_llama_folder, mode: str, params) -> None:
    check_chunks(functools.partial(compose, tiny_llama_folder, mode), params, prompts(1)[0])


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_all_chunk_sizes_leave_every_bit(tiny_llama_folder, mode: str, params) -> None:
    """The first boundary falls on every position of the prompt."""
    prompt = prompts(1)[0]
    check_chunks(functools.partial(compose, tiny_llama_folder, mode), params, prompt, boundaries=range(1, len(prompt)))


@pytest.mark.parametrize("mode", MODES)
def test_prefix_hits_leave_every_bit(tiny_llama_folder, mode: str, params) -> None:
    check_prefix_hits(functools.partial(compose, tiny_llama_folder, mode), params)


def test_samples_of_one_request_differ_but_repeat(tiny_llama_folder) -> None:
    params = SamplingParams(temperature=1.0, seed=4, n=4, max_tokens=12, ignore_eos=True, logprobs=0)
    outputs = [compose(tiny_llama_folder, "float32", lag=lag).generate(prompts(3), params) for lag in (0, 1)]
    assert [bits(o) for o in outputs[0]] == [bits(o) for o in outputs[1]]
    for output in outputs[0]:
        assert len({c.token_ids for c in output.completions}) == 4
