from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from deepinfer.sampling.rowwise import first_argmax, fold_sum, log_normalizer, prefix_sum, top_by_value

# Few distinct values: ties everywhere. -0.0 and 0.0 are one value.
TIED = st.sampled_from([-np.inf, -2.5, -0.0, 0.0, 1.0, 3.0])
WIDTHS = st.sampled_from([1, 2, 5, 64, 65, 255, 256, 257, 1000])


@st.composite
def tied_rows(draw):
    return draw(hnp.arrays(np.float32, (draw(st.integers(1, 3)), draw(WIDTHS)), elements=TIED))


def by_value(row: np.ndarray) -> list[int]:
    return sorted(range(len(row)), key=lambda i: (-row[i], i))


@settings(deadline=None, max_examples=60)
@given(x=tied_rows())
def test_first_argmax_is_numpys(x):
    values, ids = first_argmax(torch.from_numpy(x))
    assert ids.tolist() == x.argmax(-1).tolist()
    assert values.tolist() == x.max(-1).tolist()


@pytest.mark.parametrize("width", [7, 300, 321])
def test_nan_wins_first_argmax(width):
    x = torch.zeros(2, width)
    x[1, width - 1] = torch.nan
    x[1, 0] = torch.inf
    values, ids = first_argmax(x)
    assert values[0] == 0 and values[1].isnan() and ids.tolist() == [0, width - 1]


@settings(deadline=None, max_examples=80)
@given(x=tied_rows(), data=st.data())
def test_top_by_value_orders_by_value_then_id(x, data):
    count = data.draw(st.integers(1, x.shape[1] + 3))
    values, ids = top_by_value(torch.from_numpy(x), count)
    for row, got_values, got in zip(x, values.tolist(), ids.tolist(), strict=True):
        assert got == by_value(row)[:count]
        assert got_values == row[got].tolist()


def test_sums_do_not_depend_on_batch_or_padding():
    torch.manual_seed(0)
    x = torch.rand(5, 1003)
    total, running = fold_sum(x), prefix_sum(x)
    torch.testing.assert_close(total.double(), x.double().sum(-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(running.double(), x.double().cumsum(-1), rtol=1e-6, atol=0)
    for row in range(5):
        alone = x[row : row + 1].clone()
        assert torch.equal(fold_sum(alone), total[row : row + 1])
        assert torch.equal(log_normalizer(alone), log_normalizer(x)[row : row + 1])
        assert torch.equal(prefix_sum(alone[:, :77]), running[row : row + 1, :77])
    padded = torch.nn.functional.pad(x, (0, 3000))
    assert torch.equal(fold_sum(padded), total)


def test_log_normalizer_matches_float64_and_takes_empty_rows():
    torch.manual_seed(1)
    x = torch.randn(4, 5000) * 30
    x[0, ::2] = -torch.inf
    torch.testing.assert_close(log_normalizer(x).double(), x.double().logsumexp(-1), rtol=1e-6, atol=1e-6)
    assert log_normalizer(torch.full((1, 9), -torch.inf)).item() == -np.inf
