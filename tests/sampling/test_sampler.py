from __future__ import annotations

import subprocess
import sys

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.kernels.noise import gumbel_row
from deepinfer.sampling import Sampler, TokenMasks, filter_logits
from deepinfer.types import SamplingParams

from ..threads import torch_threads
from .support import GREEDY, INF, Rig, admission, gumbel_sample


def pack(allowed: torch.Tensor) -> torch.Tensor:
    """bool [M, V] -> i32 [M, ceil(V / 32)], bit by bit."""
    rows, width = allowed.shape
    words = np.zeros((rows, -(-width // 32)), np.uint32)
    for row, token in allowed.nonzero().tolist():
        words[row, token // 32] |= np.uint32(1 << (token % 32))
    return torch.from_numpy(words.view(np.int32))


EVERYTHING = (
    GREEDY,
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=5, top_p=0.9, logprobs=3),
    SamplingParams(top_p=0.97, logprobs=0),
    SamplingParams(temperature=1.5, min_p=0.05, frequency_penalty=0.3),
    SamplingParams(top_k=200, repetition_penalty=1.3, presence_penalty=-0.2, logprobs=1),
    attrs.evolve(GREEDY, bad_words=((3,), (2, 1)), logit_bias={4: 2.0}, logprobs=2),
    SamplingParams(allowed_tokens=(1, 5, 9), min_tokens=3, stop_token_ids=(5,)),
    SamplingParams(forced_tokens=(8, 8), logprobs=4),
    SamplingParams(temperature=0.01, top_p=0.5),
)


# --- behaviours 1 to 8 ---------------------------------------------------------------------------


def test_input_is_not_modified():
    torch.manual_seed(0)
    x = torch.randn(len(EVERYTHING), 300)
    before = x.clone()
    masks = TokenMasks(pack(torch.rand(2, 300) < 0.5), np.array([0, 4], np.int32))
    Rig(300, *EVERYTHING)(x, masks=masks)
    assert torch.equal(x, before)


def test_zero_probability_is_never_sampled():
    x = torch.zeros(64)
    x[::2] = -INF
    assert (Rig(64, SamplingParams()).draws(x, 3000) % 2 == 1).all()


def test_noise_is_that_of_seed_index_and_position():
    """The law of the token, written out: argmax of tempered logits plus noise."""
    torch.manual_seed(1)
    x = torch.randn(40, 500)
    rig = Rig(500, SamplingParams(temperature=0.8, seed=2**63 + 5), sample_index=3)
    pos = torch.arange(100, 140)
    noise = gumbel_row(torch.full((40,), 5 - 2**63), torch.full((40,), 3), pos, vocab_size=500)
    want = (x.double() / 0.8 + noise.double()).argmax(-1)
    assert torch.equal(rig(x, slots=[1] * 40, pos=pos.tolist()).tokens, want)


def test_same_tokens_in_another_process():
    code = (
        "import torch; from tests.sampling.support import Rig; from deepinfer.types import SamplingParams as P;"
        "x = torch.arange(900).remainder(97).float() / 20;"
        "r = Rig(900, P(seed=7), P(seed=7, top_p=0.9, temperature=0.9));"
        "print(r.draws(x, 12).tolist() + r.draws(x, 12, slot=2).tolist())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    namespace: dict = {}
    exec(code.replace("print(", "out = ("), namespace)
    assert found.strip() == str(namespace["out"])


def test_one_hot_rows_always_give_that_token():
    x = torch.full((50,), -INF)
    x[17] = -3.0
    for params in (GREEDY, SamplingParams(), SamplingParams(top_k=3, top_p=0.1, min_p=0.5)):
        assert (Rig(50, params).draws(x, 200) == 17).all()


@pytest.mark.parametrize("shift", [np.log(1e-4), -8.0, 16.0, 0.1])
def test_shifting_a_row_changes_nothing(shift):
    """Unnormalised input: scaling all probabilities. Rounding may flip a tie of scores within a few ulp."""
    torch.manual_seed(2)
    x = torch.randn(2000)
    for params in (SamplingParams(), SamplingParams(top_k=20), SamplingParams(top_p=0.8)):
        rig = Rig(2000, params)
        same = rig.draws(x, 100) == rig.draws(x + shift, 100)
        assert same.sum() >= 99


def test_extreme_logits_and_temperatures_stay_finite():
    x = torch.tensor([[3e38, 1.0, -3e38], [0.0, -1.0, -3e38]])
    params = SamplingParams(temperature=1e-38, logprobs=0)
    out = Rig(3, params, params)(x)
    assert out.tokens.tolist() == [0, 0] and not out.bad.any()
    assert out.processed.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("vocab_size", [50, 301, 5000])
def test_a_row_has_the_same_bits_alone_and_in_any_batch_and_order(vocab_size):
    torch.manual_seed(3)
    count = len(EVERYTHING)
    x = torch.randn(count, vocab_size) * 2
    pos = [1 + row for row in range(count)]
    rig = Rig(vocab_size, *EVERYTHING)
    whole = rig(x, pos=pos)
    order = torch.randperm(count)
    shuffled = rig(x[order], slots=(order + 1).tolist(), pos=[pos[i] for i in order])
    assert torch.equal(shuffled.tokens, whole.tokens[order])
    for row in range(count):
        alone = rig(x[row : row + 1], slots=[row + 1], pos=[pos[row]])
        pair = rig(x[[row, 0, row]], slots=[row + 1, 1, row + 1], pos=[pos[row], 1, pos[row]])
        assert alone.tokens[0] == whole.tokens[row] == pair.tokens[0] == pair.tokens[2]
        if row in whole.reported:
            at = whole.reported.tolist().index(row)
            back = order[torch.from_numpy(shuffled.reported).long()].tolist().index(row)
            num_top = alone.top_ids.shape[1]
            for other, i in ((whole, at), (shuffled, back)):
                assert alone.raw[0] == other.raw[i]
                assert alone.processed[0] == other.processed[i]
                assert torch.equal(alone.top_ids[0], other.top_ids[i, :num_top])
                assert torch.equal(alone.top_raw[0], other.top_raw[i, :num_top])


@pytest.mark.parametrize("threads", [1, 2])
def test_thread_count_changes_no_token(threads):
    torch.manual_seed(4)
    x = torch.randn(3, 49152) * 3
    rig = Rig(49152, SamplingParams(top_p=0.9, logprobs=0), SamplingParams(logprobs=5), GREEDY)
    want = rig(x)
    with torch_threads(threads):
        got = rig(x)
    assert torch.equal(got.tokens, want.tokens) and torch.equal(got.raw, want.raw)
    assert torch.equal(got.processed, want.processed)


# --- behaviours 18 and 19 ------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(q=st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_expanding_slots_to_rows_keeps_every_option(q):
    params = [SamplingParams(temperature=0.1 + slot, top_k=slot, seed=slot + 1) for slot in range(len(q))]
    rig = Rig(100, *params)
    slots = np.repeat(np.arange(1, len(q) + 1, dtype=np.int32), q)
    rows = rig.table.batch_rows(slots)
    first = np.concatenate([[0], np.cumsum(q)[:-1]])
    assert rows.temperature[first, 0].tolist() == pytest.approx([p.temperature for p in params])
    assert rows.seed.tolist() == np.repeat([p.seed for p in params], q).tolist()
    assert rows.active.tolist() == list(range(len(slots)))


def test_logprobs_none_and_zero_are_different_requests():
    x = torch.randn(3, 20)
    params = [attrs.evolve(GREEDY, logprobs=n) for n in (None, 0, 4)]
    out = Rig(20, *params)(x)
    assert out.reported.tolist() == [1, 2]
    assert out.raw.shape == (2,) and out.top_ids.shape == (2, 4)
    step = out.top_logprobs(np.array([10, 11, 12], np.int32))
    assert step is not None and step.rows.tolist() == [11, 12]
    assert Rig(20, params[1])(x[:1]).top_ids.shape == (1, 0)
    nothing = Rig(20, params[0])(x[:1])
    assert nothing.raw.shape == (0,) and nothing.top_logprobs(np.array([0], np.int32)) is None


# --- order, logprobs, errors ---------------------------------------------------------------------


def test_greedy_is_the_lowest_id_on_ties():
    x = torch.zeros(3, 700)
    x[1, [300, 600]] = 1.0
    x[2, 650:] = 2.0
    assert Rig(700, GREEDY, GREEDY, GREEDY)(x).tokens.tolist() == [0, 300, 650]


def test_logprobs_are_of_the_two_distributions():
    torch.manual_seed(5)
    x = torch.randn(1, 80) * 2
    params = SamplingParams(temperature=0.6, logit_bias={3: 4.0}, top_k=10, top_p=0.9, logprobs=5)
    out = Rig(80, params)(x)
    raw = torch.log_softmax(x.double(), -1)
    biased = x.clone()
    biased[0, 3] += 4.0
    processed = torch.log_softmax(filter_logits(biased / 0.6, top_k=10, top_p=0.9).double(), -1)
    token = out.tokens[0]
    assert out.raw[0].item() == pytest.approx(raw[0, token].item(), abs=1e-5)
    assert out.processed[0].item() == pytest.approx(processed[0, token].item(), abs=1e-5)
    assert out.top_ids[0].tolist() == raw.topk(5).indices[0].tolist()
    torch.testing.assert_close(out.top_raw.double(), raw.topk(5).values, atol=1e-5, rtol=0)


def test_top_lists_put_the_lower_id_first():
    out = Rig(9, attrs.evolve(GREEDY, logprobs=4))([[0, 5, 1, 5, 1, 5, 0, 0, 1]])
    assert out.top_ids.tolist() == [[1, 3, 5, 2]]


@pytest.mark.parametrize("base", [GREEDY, SamplingParams(), SamplingParams(top_k=1), SamplingParams(top_p=0.01)])
def test_forced_tokens_replace_the_token_and_keep_its_logprobs(base):
    x = torch.zeros(1, 300)
    x[0, 7] = 30.0
    rig = Rig(300, attrs.evolve(base, forced_tokens=(4, 7), logprobs=0), prompt=(1, 2, 3))
    raw = torch.log_softmax(x.double(), -1)[0]
    first, second, third = (rig(x, pos=pos) for pos in (3, 4, 5))
    assert [first.tokens.item(), second.tokens.item(), third.tokens.item()] == [4, 7, 7]
    assert first.raw.item() == pytest.approx(raw[4].item(), abs=1e-5)
    filtered_out = base != SamplingParams()
    assert first.processed.item() == (-INF if filtered_out else pytest.approx(raw[4].item(), abs=1e-5))
    assert second.processed.item() == pytest.approx(0.0, abs=1e-6)


def test_bad_rows_are_reported_and_harm_nobody():
    torch.manual_seed(6)
    params = SamplingParams(top_p=0.9)
    x = torch.randn(8, 300)
    good = Rig(300, *[params, GREEDY] * 4)(x)
    x[2, 5] = torch.nan
    x[3, 299] = torch.nan
    x[4] = -INF
    x[5] = -INF
    x[6, 0] = INF
    out = Rig(300, *[params, GREEDY] * 4)(x)
    assert out.bad.tolist() == [False, False, True, True, True, True, True, False]
    assert out.empty.tolist() == [False, False, False, False, True, True, False, False]
    assert (out.tokens[out.bad] == 0).all()
    assert torch.equal(out.tokens[[0, 1, 7]], good.tokens[[0, 1, 7]])


def test_masks_that_leave_nothing_are_a_status():
    params = SamplingParams(allowed_tokens=(3,), bad_words=((3,),), logprobs=1)
    out = Rig(10, params, attrs.evolve(params, temperature=0.0), GREEDY)(torch.randn(3, 10))
    assert out.bad.tolist() == out.empty.tolist() == [True, True, False]


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 500])
def test_grammar_masks_reach_their_rows_only(vocab_size):
    torch.manual_seed(7)
    allowed = torch.rand(2, vocab_size) < 0.3
    allowed[:, vocab_size - 1] = True
    x = torch.randn(4, vocab_size)
    masks = TokenMasks(pack(allowed), np.array([3, 1], np.int32))
    params = (SamplingParams(), SamplingParams(top_k=4), GREEDY, GREEDY)
    out, free = Rig(vocab_size, *params)(x, masks=masks), Rig(vocab_size, *params)(x)
    assert torch.equal(out.tokens[[0, 2]], free.tokens[[0, 2]])
    assert allowed[0, out.tokens[3]] and allowed[1, out.tokens[1]]
    assert out.tokens[3] == x[3].masked_fill(~allowed[0], -INF).argmax()


def test_transforms_run_first_and_leave_raw_logprobs_alone():
    calls = []

    def add_five(logits, rows):
        calls.append(list(rows))
        logits[:, 5] += 5.0
        return logits

    rig = Rig(40, attrs.evolve(GREEDY, logprobs=0), SamplingParams(bad_words=((5,),)))
    sampler = Sampler(gumbel_sample, vocab_size=40, transforms=(add_five,))
    x = torch.zeros(2, 40)
    slots, pos = np.array([1, 2], np.int32), torch.tensor([1, 1], dtype=torch.int32)
    out = sampler(x, table=rig.table, slots=slots, pos=pos, views=["a", "b"])
    assert calls == [["a", "b"]] and not x.any()
    assert out.tokens[0] == 5 and out.tokens[1] != 5
    assert out.raw.item() == pytest.approx(-np.log(40), abs=1e-6)
    assert sampler.config()["vocab_size"] == 40


def test_padding_slot_and_changing_tenants():
    x = torch.randn(2, 30)
    rig = Rig(30, attrs.evolve(GREEDY, bad_words=((int(x[0].argmax()),),)))
    assert rig(x, slots=[0, 0]).tokens.tolist() == x.argmax(-1).tolist()
    banned = rig(x[:1], slots=[1]).tokens
    rig.table.admit(admission(1, GREEDY))
    assert rig(x[:1], slots=[1]).tokens == x[0].argmax() != banned


def test_no_rows():
    out = Rig(30)(torch.zeros(0, 30))
    assert out.tokens.shape == out.bad.shape == (0,)
