from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from deepinfer.kernels.noise import Purpose, exponential, gumbel, gumbel_row, philox, portable_log

from .make_golden_noise import golden

GOLDEN = json.loads((Path(__file__).parent / "golden_noise.json").read_text())


def bits(x: torch.Tensor) -> list[str]:
    return [f"{v & 0xFFFFFFFF:08x}" for v in x.view(torch.int32).tolist()]


def from_bits(texts: list[str]) -> torch.Tensor:
    return torch.from_numpy(np.array([int(t, 16) for t in texts], np.uint32).view(np.float32))


def signed(seed: int) -> torch.Tensor:
    return torch.tensor([seed - 2**64 if seed >= 2**63 else seed])


# Known answers of the Random123 distribution: counter, key, output.
RANDOM123 = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "want"), RANDOM123)
def test_philox_known_answers(counter, key, want):
    inputs = [np.array([x]) for x in (*counter, *key)]
    assert tuple(int(x.item()) for x in philox(*inputs)) == want
    assert tuple(int(x.item()) for x in philox(*(torch.from_numpy(x) for x in inputs))) == want


def test_golden_file_is_what_its_maker_writes():
    assert golden() == GOLDEN


@pytest.mark.parametrize("draw", GOLDEN["draws"])
def test_golden_gumbel(draw):
    got = gumbel(
        signed(draw["seed"]),
        torch.tensor([draw["sample_index"]]),
        torch.tensor([draw["pos"]]),
        torch.tensor(GOLDEN["token_ids"]),
        purpose=draw["purpose"],
        round_index=draw["round"],
    )
    assert bits(got[0]) == draw["gumbel"]


def test_golden_exponential_and_log():
    words, want = zip(*GOLDEN["exponential"], strict=True)
    assert bits(exponential(torch.tensor(words))) == list(want)
    inputs, want = zip(*GOLDEN["log"], strict=True)
    assert bits(portable_log(from_bits(list(inputs)))) == list(want)


def test_numpy_and_torch_agree_bit_for_bit():
    words = np.random.default_rng(0).integers(0, 2**32, 200_000)
    assert (exponential(words) == exponential(torch.from_numpy(words)).numpy()).all()
    x = exponential(words)
    assert (portable_log(x) == portable_log(torch.from_numpy(x)).numpy()).all()


def test_log_is_within_0_9_ulp():
    mantissas = np.arange(0x3F400000, 0x3FC00000, 7, dtype=np.int32).view(np.float32)
    for scale in (1.0, 2.0, 2.0**-33, 16.0, 0.5):
        x = mantissas * np.float32(scale)
        want = np.log(x.astype(np.float64))
        ulp = np.spacing(np.abs(want).astype(np.float32))
        assert (np.abs(portable_log(x) - want) <= 0.9 * ulp).all()


def test_exponential_is_the_inverse_distribution_function_to_the_last_word():
    rng = np.random.default_rng(1)
    words = np.concatenate(
        [np.arange(3000), 2**30 + np.arange(-3000, 3000), 2**32 - 1 - np.arange(3000), rng.integers(0, 2**32, 200_000)]
    )
    got = exponential(words).astype(np.float64)
    np.testing.assert_allclose(got, -np.log1p(-(words + 0.5) / 2**32), rtol=4 * 2.0**-24)
    assert (np.diff(exponential(np.sort(words))) >= 0).all()


def test_noise_is_finite_for_extreme_words():
    noise = -portable_log(exponential(torch.tensor([0, 2**32 - 1])))
    assert noise.tolist() == pytest.approx([33 * np.log(2), -np.log(33 * np.log(2))], rel=1e-6)


@settings(deadline=None, max_examples=25)
@given(
    seeds=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4),
    vocab_size=st.integers(1, 70),
    purpose=st.integers(0, 3),
)
def test_rows_equal_chosen_tokens_and_do_not_depend_on_the_batch(seeds, vocab_size, purpose):
    seed, index = torch.tensor(seeds), torch.arange(len(seeds))
    full = gumbel_row(seed, index, index + 5, vocab_size=vocab_size, purpose=purpose)
    ids = torch.randint(0, vocab_size, (len(seeds), 9))
    assert torch.equal(full.gather(1, ids), gumbel(seed, index, index + 5, ids, purpose=purpose))
    alone = gumbel_row(seed[-1:], index[-1:], index[-1:] + 5, vocab_size=vocab_size, purpose=purpose)
    assert torch.equal(full[-1:], alone)


def test_every_part_of_the_key_matters():
    base = {"seed": 1, "index": 0, "pos": 0, "purpose": Purpose.SAMPLE, "round_index": 0}
    variants = [{}, {"seed": 1 + 2**32}, {"seed": 2}, {"index": 1}, {"pos": 1}, {"purpose": 1}, {"round_index": 1}]
    rows = []
    for change in variants:
        key = base | change
        seed, index, pos = (torch.tensor([key[name]]) for name in ("seed", "index", "pos"))
        noise = gumbel_row(seed, index, pos, vocab_size=64, purpose=key["purpose"], round_index=key["round_index"])
        rows.append(tuple(noise[0].tolist()))
    assert len(set(rows)) == len(variants)


def test_noise_follows_the_gumbel_law():
    n = 64
    noise = gumbel_row(torch.arange(n), torch.zeros(n), torch.arange(n), vocab_size=4096).flatten().numpy()
    assert stats.kstest(noise, stats.gumbel_r.cdf).pvalue > 1e-3
    # Neighbouring tokens and neighbouring positions share counters but no correlation.
    same_seed = gumbel_row(torch.zeros(n), torch.zeros(n), torch.arange(n), vocab_size=4096).numpy()
    for a, b in ((same_seed[:, 1:], same_seed[:, :-1]), (same_seed[1:], same_seed[:-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4 / np.sqrt(a.size)


@pytest.mark.parametrize("probability", [1e-7, 1e-8])
def test_tail_probabilities_come_from_the_word_exactly(probability):
    """A token of probability p beats one of 1 - p iff e1 / p < e2 / (1 - p); integrated over all words of e1."""
    words = np.arange(0, 2**13)
    e_rare = exponential(words).astype(np.float64)
    wins = np.exp(-e_rare * (1 - probability) / probability).sum() / 2**32
    assert wins == pytest.approx(probability, rel=2e-3)


def test_rare_words_occur_at_their_rate():
    """e < 2**-14 over 2**21 draws: 128 expected; 99.9 % of Poisson counts lie within the bounds."""
    n = 32
    noise = gumbel_row(torch.arange(n) * 7919, torch.zeros(n), torch.arange(n), vocab_size=2**16)
    count = int((noise > 14 * np.log(2)).sum())
    low, high = stats.poisson.ppf([0.0005, 0.9995], n * 2**16 / 2**14)
    assert low <= count <= high
