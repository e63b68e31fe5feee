from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch

from deepinfer.errors import NumericalError
from deepinfer.sampling import Sampler, SamplingProcessor
from deepinfer.types import SamplingParams

from .support import GREEDY, Rig, admission, gumbel_sample

V = 60


@pytest.fixture(scope="module")
def model():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=V, **sizes, **heads, initializer_range=0.5)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture
def prompts():
    return torch.randint(3, V, (3, 6), generator=torch.Generator().manual_seed(1))


def generate(model, prompts, *processors, **options):
    common = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mask = options.pop("attention_mask", torch.ones_like(prompts))
    with torch.no_grad():
        out = model.generate(prompts, attention_mask=mask, logits_processor=list(processors), **common, **options)
    return out[:, prompts.shape[1] :]


def processor(params: SamplingParams, **fields) -> SamplingProcessor:
    return SamplingProcessor(params, Sampler(gumbel_sample, vocab_size=V), **fields)


def test_greedy_is_generates_own(model, prompts):
    assert torch.equal(generate(model, prompts, processor(GREEDY)), generate(model, prompts))


def test_greedy_with_penalty_and_bad_words_is_generates_own(model, prompts):
    plain = generate(model, prompts)
    word = plain[0, 3:5].tolist()
    params = attrs.evolve(GREEDY, repetition_penalty=1.4, bad_words=(tuple(word), (int(plain[1, 0]),)))
    want = generate(model, prompts, repetition_penalty=1.4, bad_words_ids=[word, [int(plain[1, 0])]])
    assert torch.equal(generate(model, prompts, processor(params)), want)
    assert not torch.equal(want, plain)


def test_sampled_tokens_are_those_of_the_sampler(model, prompts):
    """Each token equals a direct call of the sampler on the model's logits of that prefix."""
    params = SamplingParams(temperature=0.9, top_k=20, top_p=0.95, frequency_penalty=0.5, seed=11)
    out = generate(model, prompts, processor(params))
    assert torch.equal(out, generate(model, prompts, processor(params)))
    for row in range(3):
        for step in range(0, 12, 4):
            prefix = torch.cat([prompts[row], out[row, :step]])
            with torch.no_grad():
                logits = model(prefix[None]).logits[:, -1]
            rig = Rig(V)
            prompt, output = prompts[row].tolist(), out[row, :step].tolist()
            rig.table.admit(admission(1, params, prompt=prompt, output=output, sample_index=row))
            assert rig(logits, pos=len(prefix)).tokens == out[row, step]


def test_left_padding_changes_no_token(model, prompts):
    params = SamplingParams(temperature=0.8, repetition_penalty=1.2, seed=3)
    short = prompts[:1, 2:]
    alone = generate(model, short, processor(params))
    padded = torch.cat([torch.zeros(1, 2, dtype=torch.int64), short], 1)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    got = generate(model, padded, processor(params, attention_mask=mask), attention_mask=mask)
    assert torch.equal(got, alone)


def test_min_tokens_and_reuse(model, prompts):
    eos = int(generate(model, prompts)[0, 0])
    once = processor(attrs.evolve(GREEDY, min_tokens=5), eos_ids=(eos,))
    first = generate(model, prompts, once)
    assert not (first[:, :5] == eos).any()
    assert torch.equal(generate(model, prompts, once), first)


def test_nan_is_a_typed_error():
    scores = torch.zeros(2, V)
    scores[1, 4] = torch.nan
    with pytest.raises(NumericalError, match="row 1 at position 3"):
        processor(GREEDY)(torch.ones(2, 3, dtype=torch.int64), scores)


def test_scores_leave_one_token():
    scores = processor(SamplingParams(seed=1))(torch.ones(2, 3, dtype=torch.int64), torch.zeros(2, V))
    assert (np.isfinite(scores.numpy()).sum(1) == 1).all() and scores.max() == 0
