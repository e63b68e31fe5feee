"""Triton ops: through the interpreter on the CPU, and on a GPU where there is one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepinfer.kernels import noise, usable
from deepinfer.testing import check_op

pytest.importorskip("triton", reason="triton is not installed")

OPS = ("rms_norm", "rope", "silu_mul", "linear", "cache_write", "attention", "sample")
SCRIPT = Path(__file__).with_name("interpret_ops.py")
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def interpreted(dtypes: str, ops: str, *, quick: bool) -> dict[str, str]:
    command = [sys.executable, str(SCRIPT), dtypes, ops, str(int(quick))]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_interpreter_agrees_with_the_reference():
    found = interpreted("float32", ",".join(OPS), quick=True)
    assert len(found) == len(OPS) + 2
    assert not [text for text in found.values() if text.startswith("FAILED")], found


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_interpreter_in_full(op):
    found = interpreted("float32,float16", op, quick=False)
    assert not [text for text in found.values() if text.startswith("FAILED")], found


def test_importing_the_package_does_not_import_triton():
    code = "import sys, deepinfer.kernels.triton as t; t.accepts(device='cpu'); print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("need", "word"),
    [
        ({"device": "cpu"}, "TRITON_INTERPRET"),
        ({"device": "cuda:0", "head_dim": 512}, "512"),
        ({"device": "cuda", "head_dim": 65}, "65"),
        ({"device": "cuda", "page_tokens": 24}, "24"),
    ],
)
def test_refusals_say_why(need, word, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert word in (usable.triton_accepts(**need) or "")


def test_what_is_accepted(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for width in (32, 64, 80, 96, 128, 192, 256):
        assert usable.triton_accepts(device="cuda", dtype="bfloat16", head_dim=width, page_tokens=1) is None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert usable.triton_accepts(device="cpu", dtype="float16") is None
    assert "bfloat16" in (usable.triton_accepts(device="cpu", dtype="bfloat16") or "")
    assert usable.triton_probe() is None


class TestOnGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("invariant", [False, True])
    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    @pytest.mark.parametrize("op", OPS)
    def test_contract(self, op, dtype, invariant):
        from deepinfer.kernels import triton

        print(check_op(op, getattr(triton, f"make_{op}"), device="cuda", dtype=dtype, invariant=invariant))

    @pytest.mark.parametrize("op", OPS)
    def test_eager_contract(self, op):
        from deepinfer.kernels import eager

        print(check_op(op, getattr(eager, f"make_{op}"), device="cuda", dtype="float16"))

    def test_noise_is_that_of_the_cpu(self):
        from deepinfer.kernels.triton.sampling import noise_row

        seed = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 123456789])
        index, pos = torch.arange(6, dtype=torch.int32), torch.arange(6, dtype=torch.int32) * 99991
        for purpose in (0, 1, 3):
            mine = noise_row(seed.cuda(), index.cuda(), pos.cuda(), vocab_size=129283, purpose=purpose)
            theirs = noise.gumbel_row(seed, index, pos, vocab_size=129283, purpose=purpose)
            assert torch.equal(mine.cpu(), theirs)
            eager = noise.gumbel_row(seed.cuda(), index.cuda(), pos.cuda(), vocab_size=129283, purpose=purpose)
            assert torch.equal(eager.cpu(), theirs)

    def test_linear_tiles_give_equal_bits(self):
        from deepinfer.kernels.triton import linear

        for dtype in ("float16", "bfloat16"):
            for num_out, num_in in ((512, 1000), (4096, 4096), (130, 576)):
                op = linear.TritonLinear(device="cuda", dtype=dtype)
                packed = op.pack(torch.randn(num_out, num_in, device="cuda"))
                x = torch.randn(777, num_in, device="cuda", dtype=getattr(torch, dtype))
                ways = [(tiles, False) for tiles in linear.TILES]
                if num_in % 8 == 0:
                    ways += [(tiles, True) for tiles in linear.TILES if tiles.block_m == 128]
                outs = [op._multiply(x, packed, tiles, blocks=blocks) for tiles, blocks in ways]
                for (tiles, blocks), out in zip(ways, outs, strict=True):
                    assert torch.equal(out, outs[0]), (dtype, num_out, num_in, tiles, blocks)
                alone = torch.cat([op(x[i : i + 1], packed) for i in range(0, 777, 97)])
                assert torch.equal(alone, outs[0][::97])

    @pytest.mark.parametrize("width", [64, 128, 256])
    def test_attention_is_invariant_over_long_contexts(self, width):
        from deepinfer.kernels.triton.attention import PagedAttention
        from deepinfer.testing import Sequence, make_paged_batch

        op = PagedAttention(device="cuda", invariant=True)
        shape = {"num_heads": 8, "num_kv_heads": 2, "width": width, "page_tokens": 16}

        def run(sequences, num_decode):
            batch = make_paged_batch(sequences, num_decode=num_decode, **shape).to("cuda", torch.bfloat16)
            return op(batch.q, batch.k_pool, batch.v_pool, batch.page_table, batch.rows, scale=width**-0.5)

        whole = run([Sequence(5000, 5000, 1)], 0)
        for start in (4000, 4990):
            assert torch.equal(run([Sequence(5000 - start, 5000, 1)], 0), whole[start:]), start
        for length in (5000, 4609, 4608, 513, 512, 511, 65, 64, 63, 1):
            alone = run([Sequence(1, length, 1)], 1)
            assert torch.equal(alone[0], whole[length - 1]), length
            together = run([Sequence(1, 3000, 2), Sequence(1, length, 1), Sequence(300, 700, 3)], 2)
            assert torch.equal(together[1], whole[length - 1]), length

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("width", [32, 64, 128])
    def test_narrow_and_wide_tiles_give_equal_partial_results(self, width, dtype, monkeypatch):
        """In float32, before anything is rounded: the two shapes that invariant decode chooses between."""
        from deepinfer.kernels.triton import attention
        from deepinfer.testing import Sequence, make_paged_batch

        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("only compute capability 9.0 uses both shapes")
        sequences = [Sequence(1, length, ident) for ident, length in enumerate((4096, 3333, 1024, 511, 2047, 1))]
        batch = make_paged_batch(
            sequences, num_heads=32, num_kv_heads=8, width=width, page_tokens=16, num_decode=len(sequences)
        ).to("cuda", dtype)
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        monkeypatch.setattr(attention, "merge_splits", lambda part, stat, *_, **__: seen.append((part, stat)))
        # Splits past the end of a row are never written.
        monkeypatch.setattr(torch, "empty", torch.zeros)
        for num_sms, block_m in ((10**6, 64), (1, 16)):
            op = attention.PagedAttention(device="cuda", invariant=True)
            op._num_sms = num_sms
            assert op._few(batch.q, 48).block_m == block_m
            op(batch.q, batch.k_pool, batch.v_pool, batch.page_table, batch.rows, scale=width**-0.5)
        (part, stat), (other_part, other_stat) = seen
        assert part.abs().sum() > 0
        assert torch.equal(stat, other_stat), (stat - other_stat).abs().max()
        assert torch.equal(part, other_part), (part - other_part).abs().max()

    def test_pools_beyond_two_to_the_31_elements(self):
        from deepinfer.kernels import triton
        from deepinfer.testing import Sequence, make_paged_batch

        shape = {"num_heads": 8, "num_kv_heads": 8, "width": 128, "page_tokens": 16}
        batch = make_paged_batch([Sequence(1, 100, 1), Sequence(20, 40, 2)], num_decode=1, **shape)
        batch = batch.to("cuda", torch.bfloat16)
        far = 2**31 // (16 * 8 * 128) + 5
        attention = triton.make_attention(device="cuda", dtype="bfloat16")
        write = triton.make_cache_write(device="cuda", dtype="bfloat16")
        near = attention(batch.q, batch.k_pool, batch.v_pool, batch.page_table, batch.rows, scale=0.1)
        num_pages = len(batch.k_pool)
        pools = []
        for pool in (batch.k_pool, batch.v_pool):
            big = torch.empty((far + num_pages, *pool.shape[1:]), dtype=pool.dtype, device="cuda")
            big[far:] = pool
            pools.append(big)
        table = batch.page_table + far
        write(batch.k, batch.v, *pools, table, batch.rows)
        assert torch.equal(attention(batch.q, *pools, table, batch.rows, scale=0.1), near)
        assert torch.equal(pools[0][far:].nan_to_num(), batch.k_pool.nan_to_num())

    def test_graph_replay_equals_eager(self):
        from deepinfer.kernels import triton
        from deepinfer.testing import Sequence, make_paged_batch

        sequences = [Sequence(1, 900, 1), Sequence(1, 30, 2), Sequence(40, 600, 3)]
        batch = make_paged_batch(sequences, num_heads=8, num_kv_heads=2, width=64, page_tokens=16, num_decode=2)
        batch = batch.to("cuda", torch.bfloat16)
        for invariant in (False, True):
            op = triton.make_attention(device="cuda", dtype="bfloat16", invariant=invariant)
            call = lambda op=op: op(  # noqa: E731
                batch.q, batch.k_pool, batch.v_pool, batch.page_table, batch.rows, scale=0.125
            )
            expected = call()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = call()
            out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(out, expected)
