"""The whole engine on an NVIDIA GPU: parity, invariance bit by bit, no needless waiting, errors."""

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.errors import NumericalError
from deepinfer.models import LoadOptions, load_model

from ..models.tiny import build_tiny_llama
from .invariance import BOUNDARIES, GREEDY, SEEDED, bits, check_batches, check_chunks, check_prefix_hits, prompts
from .test_parity import our_logits, their_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = ("float32", "bfloat16")
LONG = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


def on_gpu(folder, dtype: str = "float32", **fields) -> LLM:
    return LLM(str(folder), accelerator="nvidia", dtype=dtype, progress=False, **{"max_rows": 40, **fields})


@pytest.fixture(params=[GREEDY, SEEDED], ids=["greedy", "seeded"])
def params(request) -> SamplingParams:
    return request.param


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory):
    """Head width 64, 2,048 positions: the tiles that real models use, and several splits of the keys."""
    folder = tmp_path_factory.mktemp("wide")
    widths = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8}
    return build_tiny_llama(folder, head_dim=64, max_position_embeddings=2048, dtype="bfloat16", **widths)


@pytest.mark.parametrize("invariant", [False, True])
def test_float32_logits_equal_transformers(tiny_llama_folders, invariant: bool) -> None:
    assert not torch.backends.cuda.matmul.allow_tf32
    ids = np.random.default_rng(0).integers(3, 200, 75).tolist()
    for name, folder in tiny_llama_folders.items():
        with torch.inference_mode():
            expected = their_model(folder)(torch.tensor([ids])).logits[0]
        model = load_model(folder, LoadOptions(device="cuda", weights="float32", invariant=invariant))
        assert set(model.ops.names.values()) == ({"triton"} if invariant else {"triton", "eager"})
        for cuts in ([], [1], [31, 32, 33, 74]):
            found = our_logits(model, ids, cuts).cpu()
            torch.testing.assert_close(
                found, expected, rtol=0, atol=1e-4, msg=lambda m, n=name, c=cuts: f"{n} {c}: {m}"
            )


@pytest.mark.parametrize("lag", [0, 1])
def test_greedy_tokens_are_those_of_the_cpu(tiny_llama_folder, lag: int) -> None:
    here = LLM(str(tiny_llama_folder), accelerator="cpu", weights="float32", max_rows=40, progress=False)
    expected = [o.token_ids for o in here.generate(prompts(33), LONG)]
    found = [o.token_ids for o in on_gpu(tiny_llama_folder, lag=lag).generate(prompts(33), LONG)]
    assert found == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_chunk_preemption_prefix_and_lag_leave_every_bit(tiny_llama_folder, dtype: str, params) -> None:
    make = functools.partial(on_gpu, tiny_llama_folder, dtype, invariant=True)
    check_batches(make, params, prompts(33), squeezed_tokens=400)
    check_chunks(make, params, prompts(1)[0])
    check_prefix_hits(make, params)


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_prompts_leave_every_bit(wide_folder, dtype: str, params) -> None:
    """Chunk sizes on both sides of the boundaries of tiles and of splits."""
    make = functools.partial(on_gpu, wide_folder, dtype, invariant=True, max_tokens_per_step=2048)
    batch = prompts(33, longest=1500)
    check_batches(make, params, batch, squeezed_tokens=2000)
    longest = max(batch, key=len)
    assert len(longest) > 1024
    check_chunks(make, params, longest, (*BOUNDARIES[5:], 64, 100, 512, 513, 1023))


def test_prompt_scores_and_samples_leave_every_bit(tiny_llama_folder) -> None:
    params = SamplingParams(temperature=1.0, seed=4, n=4, max_tokens=12, ignore_eos=True, logprobs=0, prompt_logprobs=2)
    runs = [
        on_gpu(tiny_llama_folder, invariant=True, lag=lag, max_tokens_per_step=budget).generate(prompts(3), params)
        for lag, budget in ((0, 512), (1, 512), (1, 9))
    ]
    for run in runs[1:]:
        assert [bits(o) for o in run] == [bits(o) for o in runs[0]]
        assert [o.prompt_logprobs for o in run] == [o.prompt_logprobs for o in runs[0]]
    here = LLM(str(tiny_llama_folder), accelerator="cpu", weights="float32", progress=False)
    for output, cpu in zip(runs[0], here.generate(prompts(3), params), strict=True):
        assert len({c.token_ids for c in output.completions}) == 4
        assert [c.token_ids for c in output.completions] == [c.token_ids for c in cpu.completions]


def without_waiting(call: Callable) -> Callable:
    """`call` with every wait of the host for the device made an error."""

    @functools.wraps(call)
    def watched(*args):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return call(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return watched


def test_a_wait_would_be_seen() -> None:
    with pytest.raises(RuntimeError, match="synchron"):
        without_waiting(torch.Tensor.item)(torch.ones(1, device="cuda"))


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 1},
        {"temperature": 0.9, "seed": 1, "top_p": 0.9},
        {"temperature": 0.9, "seed": 1, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "logprobs": 3},
        {"temperature": 0.7, "seed": 1, "repetition_penalty": 1.2, "presence_penalty": 0.1, "logit_bias": {9: 1.0}},
        {"temperature": 0, "n": 3, "prompt_logprobs": 2, "bad_words": [[7, 8], [9]]},
        {"temperature": 0, "min_tokens": 3, "allowed_tokens": [5, 6, 7], "forced_tokens": [6], "ignore_eos": False},
    ],
    ids=["greedy", "seeded", "top-p", "filters", "penalties", "samples and scores", "masks"],
)
def test_launch_and_finish_never_wait(tiny_llama_folder, monkeypatch, fields, lag: int) -> None:
    """Admissions, chunks, decode, copies of shared pages and endings; only `settle` waits."""
    llm = on_gpu(tiny_llama_folder, lag=lag, max_rows=6, max_tokens_per_step=48)
    executor = llm.engine.executor
    for phase in ("launch", "finish"):
        monkeypatch.setattr(executor, phase, without_waiting(getattr(executor, phase)))
    params = SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **fields})
    outputs = llm.generate(prompts(9), params)
    assert [o.error for o in outputs] == [None] * 9
    assert [o.token_ids for o in outputs] == [o.token_ids for o in llm.generate(prompts(9), params)]


def test_two_engines_take_turns(tiny_llama_folder) -> None:
    engines = [on_gpu(tiny_llama_folder, dtype, lag=1).engine for dtype in DTYPES]
    alone = [[o.token_ids for o in engine.generate(prompts(5), LONG)] for engine in engines]
    found = [{}, {}]
    ids = [[engine.add(prompt, LONG) for prompt in prompts(5)] for engine in engines]
    while any(engine.has_work for engine in engines):
        for engine, done in zip(engines, found, strict=True):
            done.update({output.request_id: output.token_ids for output in engine.step()})
    assert [[done[i] for i in mine] for done, mine in zip(found, ids, strict=True)] == alone


@pytest.mark.parametrize("lag", [0, 1])
def test_nan_ends_its_own_row(tiny_llama_folder, lag: int) -> None:
    llm = on_gpu(tiny_llama_folder, lag=lag)
    prompt = list(range(5, 40))
    before = llm.generate(prompt, LONG)[0]
    poison = next(token_id for token_id in range(50, 200) if token_id not in before.token_ids)
    llm.engine.executor.model.embedding[poison] = float("nan")
    with_nan, without = llm.generate([[poison, *prompt], prompt], LONG)
    assert isinstance(with_nan.error, NumericalError)
    assert without.error is None and without.token_ids == before.token_ids
    llm.engine.scheduler.book.check()
    assert not llm.engine.has_work
