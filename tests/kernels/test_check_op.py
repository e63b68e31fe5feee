"""The contract kit must notice wrong ops: each of these is broken in one way that has happened to somebody."""

import attrs
import pytest
import torch
import torch.nn.functional as F

from deepinfer.errors import ConfigError, PartUnavailable
from deepinfer.kernels import reference
from deepinfer.registry import Registry
from deepinfer.testing import assert_batch_invariant, check_op

pytestmark = pytest.mark.usefixtures("one_thread")


def fails(kind, op, *words, **options):
    with pytest.raises(AssertionError) as caught:
        check_op(kind, op, quick=True, **options)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def shifted_rows(rows, **changes):
    return attrs.evolve(rows, **changes)


class TestAttention:
    def test_sees_one_key_too_few(self):
        def op(q, k_pool, v_pool, page_table, rows, *, scale):
            pos = (rows.pos - 1).clamp(min=0)
            return reference.attention(q, k_pool, v_pool, page_table, shifted_rows(rows, pos=pos), scale=scale)

        fails("attention", op, "off by")

    def test_not_causal(self):
        def op(q, k_pool, v_pool, page_table, rows, *, scale):
            pos = (rows.k_len - 1)[rows.row_of.long()]
            return reference.attention(q, k_pool, v_pool, page_table, shifted_rows(rows, pos=pos), scale=scale)

        fails("attention", op, "off by")

    def test_ignores_the_page_table(self):
        def op(q, k_pool, v_pool, page_table, rows, *, scale):
            first = page_table[:, :1]
            table = first + torch.arange(page_table.shape[1], dtype=torch.int32)
            return reference.attention(
                q, k_pool, v_pool, table.clamp(max=len(k_pool) - 1), rows, scale=scale
            ).nan_to_num()

        fails("attention", op, "off by")

    def test_takes_rows_for_slots(self):
        def op(q, k_pool, v_pool, page_table, rows, *, scale):
            slots = torch.arange(len(rows.slot_ids), dtype=torch.int32)
            return reference.attention(q, k_pool, v_pool, page_table, shifted_rows(rows, slot_ids=slots), scale=scale)

        fails("attention", op, "row")

    def test_mixes_up_head_groups(self):
        def op(q, k_pool, v_pool, page_table, rows, *, scale):
            turned = torch.roll(k_pool, 1, dims=2)
            return reference.attention(q, turned, v_pool, page_table, rows, scale=scale)

        fails("attention", op, "off by")

    def test_lets_stale_lines_through(self):
        def op(q, k_pool, v_pool, page_table, rows, *, scale):
            out = reference.attention(q, k_pool, v_pool, page_table, rows, scale=scale)
            for r, slot in enumerate(rows.slot_ids.tolist()):
                line = v_pool[page_table[slot, (int(rows.k_len[r]) - 1) // k_pool.shape[1]].long()]
                out[int(rows.cu_q[r]) : int(rows.cu_q[r + 1])] += 0 * line.sum()
            return out

        fails("attention", op, "NaN")

    def test_trusts_upper_bounds(self):
        def op(q, k_pool, v_pool, page_table, rows, *, scale):
            pos = rows.pos + (rows.max_k - int(rows.k_len.max())) if len(rows.k_len) else rows.pos
            return reference.attention(q, k_pool, v_pool, page_table, shifted_rows(rows, pos=pos), scale=scale)

        fails("attention", op, "bounds too high")

    def test_scales_in_place(self):
        def op(q, k_pool, v_pool, page_table, rows, *, scale):
            k_pool.mul_(scale)
            return reference.attention(q, k_pool, v_pool, page_table, rows, scale=1.0)

        fails("attention", op, "was changed")

    def test_rows_depend_on_the_batch(self):
        def op(q, k_pool, v_pool, page_table, rows, *, scale):
            out = reference.attention(q, k_pool, v_pool, page_table, rows, scale=scale)
            return out * (1 + 2**-20 * len(rows.slot_ids))

        assert check_op("attention", op, quick=True).worst.error < 3e-5
        fails("attention", op, "depends on its batch", invariant=True)


class TestCacheWrite:
    def test_writes_into_the_next_line(self):
        def op(k, v, k_pool, v_pool, page_table, rows):
            reference.cache_write(k, v, k_pool, v_pool, page_table, shifted_rows(rows, pos=(rows.pos - 1).clamp(min=0)))

        fails("cache_write", op, "differs from the reference")

    def test_swaps_keys_and_values(self):
        def op(k, v, k_pool, v_pool, page_table, rows):
            reference.cache_write(v, k, k_pool, v_pool, page_table, rows)

        fails("cache_write", op, "keys")

    def test_touches_padding(self):
        def op(k, v, k_pool, v_pool, page_table, rows):
            reference.cache_write(k, v, k_pool, v_pool, page_table, rows)
            k_pool[0, 0] = 0

        fails("cache_write", op, "[0, 0]")


class TestTokenOps:
    def test_norm_of_the_unrounded_or_missing_residual(self):
        def op(x, weight, *, eps, residual=None):
            return reference.rms_norm(x, weight, eps=eps)[0], x if residual is None else x + residual

        fails("rms_norm", op, "off by")

    def test_norm_without_eps(self):
        def op(x, weight, *, eps, residual=None):
            return reference.rms_norm(x, weight, eps=0.0, residual=residual)

        fails("rms_norm", op, "NaN")

    def test_norm_across_rows(self):
        def op(x, weight, *, eps, residual=None):
            total = x if residual is None else x + residual
            return total * (total.square().mean() + eps).rsqrt() * weight, total

        fails("rms_norm", op, "off by")

    def test_interleaved_rotation(self):
        def op(q, k, pos, *, cos_sin):
            def turn(x):
                cos, sin = cos_sin[pos.long()][:, None].chunk(2, dim=-1)
                even, odd = x[..., ::2], x[..., 1::2]
                return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)

            return turn(q), turn(k)

        fails("rope", op, "queries")

    def test_gate_and_up_swapped(self):
        fails("silu_mul", lambda x: F.silu(x.chunk(2, -1)[1]) * x.chunk(2, -1)[0], "off by")

    def test_linear_that_forgets_the_bias(self):
        class NoBias(reference.Linear):
            def pack(self, weight, bias=None):
                return super().pack(weight)

        fails("linear", NoBias(), "off by")

    def test_linear_whose_scale_is_the_batch_maximum(self):
        class PerTensor(reference.Linear):
            def __call__(self, x, packed):
                if not x.numel():
                    return super().__call__(x, packed)
                step = x.abs().max() / 2**20
                return super().__call__((x / step).round() * step, packed)

        assert check_op("linear", PerTensor(), quick=True).worst.error < 3e-5
        fails("linear", PerTensor(), "depends on its batch", invariant=True)


class TestSample:
    def test_noise_of_rows(self):
        def op(logits, *, seed, **keys):
            return reference.sample(logits, seed=seed + torch.arange(len(seed)), **keys)

        fails("sample", op, "rows")

    def test_last_of_a_tie(self):
        def op(logits, *, token_ids=None, **keys):
            ids = torch.arange(logits.shape[1]).expand(len(logits), -1) if token_ids is None else token_ids
            return reference.sample(logits.flip(1), token_ids=ids.flip(1), **keys)

        fails("sample", op, "ties")

    def test_columns_for_ids(self):
        def op(logits, *, token_ids=None, **keys):
            return reference.sample(logits, **keys)

        fails("sample", op, "listed")


def test_names_factories_and_ops_are_understood():
    registry = Registry(plugins=())
    by_name = check_op("op.silu_mul", "reference", registry=registry, quick=True)
    by_factory = check_op("silu_mul", reference.make_silu_mul, quick=True)
    by_op = check_op("silu_mul", reference.silu_mul, quick=True)
    assert by_name.cases == by_factory.cases == by_op.cases
    assert "silu_mul" in str(by_name) and by_name.implementation == "reference"


def test_wrong_arguments_are_refused():
    with pytest.raises(ConfigError, match="no contract for"):
        check_op("op.softmax", reference.silu_mul)
    with pytest.raises(ConfigError, match="int8"):
        check_op("silu_mul", reference.silu_mul, dtype="int8")
    with pytest.raises(PartUnavailable, match="neither a name nor callable"):
        check_op("silu_mul", 7)


def test_invariance_needs_overlap():
    with pytest.raises(AssertionError, match="nothing was compared"):
        assert_batch_invariant(lambda batch: {i: torch.ones(1) for i in batch}, [[1], [2]])
    assert assert_batch_invariant(lambda batch: {i: torch.tensor(float("nan")) for i in batch}, [[1, 2], [2]]) == 1
