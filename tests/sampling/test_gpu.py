"""The same bits on an accelerator as on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepinfer.kernels.noise import exponential, gumbel, gumbel_row, portable_log
from deepinfer.sampling import Sampler, SamplingTable

from .support import admission, gumbel_sample
from .test_noise import GOLDEN, bits, signed
from .test_sampler import EVERYTHING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCAB_SIZE = 49_157


def sample(device: str, logits: torch.Tensor, slots: list[int], pos: list[int]):
    sampler = Sampler(gumbel_sample, vocab_size=VOCAB_SIZE)
    table = SamplingTable(len(EVERYTHING) + 1, vocab_size=VOCAB_SIZE, device=device)
    for slot, params in enumerate(EVERYTHING, start=1):
        table.admit(admission(slot, params, prompt=(3, 4), output=(2, 8), seed=slot))
    positions = torch.tensor(pos, dtype=torch.int32, device=device)
    out = sampler(logits.to(device), table=table, slots=np.array(slots, np.int32), pos=positions).to_host()
    if device == "cuda":
        torch.cuda.synchronize()
    return out


def test_noise_has_the_bits_of_the_cpu():
    words, want = zip(*GOLDEN["exponential"], strict=True)
    assert bits(exponential(torch.tensor(words, device="cuda")).cpu()) == list(want)
    seed = torch.arange(16) * 2**58 - 5
    rows = [gumbel_row(seed.to(d), seed.to(d), seed.to(d) & 0xFFFF, vocab_size=VOCAB_SIZE) for d in ("cpu", "cuda")]
    assert torch.equal(rows[0], rows[1].cpu())
    x = torch.rand(10**6) + 1e-6
    assert torch.equal(portable_log(x), portable_log(x.cuda()).cpu())


def test_tokens_are_those_of_the_cpu():
    torch.manual_seed(0)
    count = len(EVERYTHING)
    logits = torch.randn(count, VOCAB_SIZE) * 2
    slots = list(range(1, count + 1))
    for pos in range(4, 24):
        here, there = (sample(device, logits, slots, [pos] * count) for device in ("cpu", "cuda"))
        assert torch.equal(here.tokens, there.tokens)
        torch.testing.assert_close(here.raw, there.raw, atol=1e-5, rtol=0)
        torch.testing.assert_close(here.processed, there.processed, atol=1e-5, rtol=0)
        assert torch.equal(here.top_ids, there.top_ids)


def test_a_row_has_the_same_bits_alone_and_in_a_batch():
    torch.manual_seed(1)
    count = len(EVERYTHING)
    logits = torch.randn(count, VOCAB_SIZE) * 2
    whole = sample("cuda", logits, list(range(1, count + 1)), list(range(4, 4 + count)))
    for row in range(count):
        alone = sample("cuda", logits[row : row + 1], [row + 1], [4 + row])
        assert alone.tokens[0] == whole.tokens[row]
        if row in whole.reported:
            at = whole.reported.tolist().index(row)
            assert alone.raw[0] == whole.raw[at] and alone.processed[0] == whole.processed[at]


def test_golden_noise():
    for draw in GOLDEN["draws"]:
        index, pos = (torch.tensor([draw[key]], device="cuda") for key in ("sample_index", "pos"))
        ids = torch.tensor(GOLDEN["token_ids"], device="cuda")
        seed = signed(draw["seed"]).cuda()
        got = gumbel(seed, index, pos, ids, purpose=draw["purpose"], round_index=draw["round"])
        assert bits(got[0].cpu()) == draw["gumbel"]


def test_golden_noise_from_the_triton_kernel():
    pytest.importorskip("triton", reason="triton is not installed")
    from deepinfer.kernels.triton.sampling import noise_row

    # The kernel makes whole rows, and only of round 0: ids beyond any vocabulary are left out.
    ids = [token_id for token_id in GOLDEN["token_ids"] if token_id < 129_280]
    draws = [draw for draw in GOLDEN["draws"] if draw["round"] == 0]
    assert len(ids) == 13 and len(draws) == 4
    for draw in draws:
        index, pos = (torch.tensor([draw[key]], dtype=torch.int32, device="cuda") for key in ("sample_index", "pos"))
        seed = signed(draw["seed"]).cuda()
        row = noise_row(seed, index, pos, vocab_size=129_280, purpose=draw["purpose"])[0, ids]
        assert bits(row.cpu()) == draw["gumbel"][: len(ids)]
