"""Times of the Triton ops on one GPU, against the measured roofs of that GPU and against torch's own kernels.

    PYTHONPATH=src python3 benchmarks/kernels_gpu.py [--json results.json]

Times are medians of CUDA graph replays, so launch cost is left out; inputs rotate where they would fit the L2
cache. "share" is the floor (bytes over copy bandwidth, or operations over the rate of a large bf16 product)
over the time. Random data throughout.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from deepinfer.kernels import eager, triton
from deepinfer.layers.batch import RowSet

DTYPE, DEVICE = torch.bfloat16, "cuda"
H, G, D, Z = 32, 8, 128, 16


def graph_seconds(calls: list[Callable[[], object]], repeats: int = 20) -> float:
    """Median seconds of one call; the calls are captured together and replayed."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times)


class Table:
    """Rows of the report."""

    def __init__(self) -> None:
        x = torch.randn(2**30, device=DEVICE)
        y = torch.empty_like(x)
        # A kernel, not `copy_`: a captured copy becomes a memcpy node, which was 1.5 times slower on an H200.
        self.bytes_per_s = 2 * x.nbytes / graph_seconds([lambda: torch.neg(x, out=y)])
        a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=DTYPE) for _ in range(2))
        self.flops_per_s = 2 * 8192**3 / graph_seconds([lambda: a @ b])
        self.rows: list[dict] = []
        print(f"{torch.cuda.get_device_name()}: copy {self.bytes_per_s / 1e12:.2f} TB/s, bf16 product "
              f"{self.flops_per_s / 1e12:.0f} TFLOP/s; torch {torch.__version__}")  # fmt: skip

    def add(self, name: str, seconds: float, *, num_bytes: float, flops: float = 0.0, note: str = "") -> None:
        floor = max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)
        row = {"name": name, "us": seconds * 1e6, "tb_per_s": num_bytes / seconds / 1e12,
               "tflop_per_s": flops / seconds / 1e12, "share": floor / seconds, "note": note}  # fmt: skip
        self.rows.append(row)
        print(f"{name:46s} {row['us']:9.1f} us  {row['tb_per_s']:5.2f} TB/s  {row['tflop_per_s']:6.1f} TFLOP/s  "
              f"share {row['share']:.2f}  {note}", flush=True)  # fmt: skip


def decode_rows(batch: int, k_len: int, first_slot: int) -> RowSet:
    def i32(x: torch.Tensor) -> torch.Tensor:
        return x.to(DEVICE, torch.int32)

    return RowSet(
        slot_ids=i32(torch.arange(batch) + first_slot),
        cu_q=i32(torch.arange(batch + 1)),
        pos=i32(torch.full((batch,), k_len - 1)),
        row_of=i32(torch.arange(batch)),
        k_len=i32(torch.full((batch,), k_len)),
        max_q=1,
        max_k=k_len,
        num_decode=batch,
    )


def scattered_table(num_slots: int, pages_each: int) -> torch.Tensor:
    order = torch.randperm(num_slots * pages_each, device=DEVICE)
    return order.view(num_slots, pages_each).to(torch.int32)


def attention_decode(table: Table, batch: int, k_len: int) -> None:
    copies = max(1, 8 // batch)
    pages = scattered_table(batch * copies, k_len // Z)
    pool = torch.randn(2, pages.numel(), Z, G, D, device=DEVICE, dtype=DTYPE)
    q = torch.randn(batch, H, D, device=DEVICE, dtype=DTYPE)
    num_bytes, flops = batch * k_len * G * D * 4, 4 * batch * k_len * H * D
    for invariant in (False, True):
        op = triton.make_attention(device=DEVICE, dtype="bfloat16", invariant=invariant)
        sets = [decode_rows(batch, k_len, i * batch) for i in range(copies)]
        calls = [lambda op=op, r=r: op(q, pool[0], pool[1], pages, r, scale=D**-0.5) for r in sets]
        mode = "invariant" if invariant else "fast"
        table.add(f"attention decode b{batch} kv{k_len} {mode}", graph_seconds(calls), num_bytes=num_bytes, flops=flops)


def attention_prefill(table: Table, length: int, page_tokens: int) -> None:
    pages = scattered_table(1, length // page_tokens)
    pool = torch.randn(2, pages.numel(), page_tokens, G, D, device=DEVICE, dtype=DTYPE)
    q = torch.randn(length, H, D, device=DEVICE, dtype=DTYPE)
    every = torch.arange(length, device=DEVICE, dtype=torch.int32)
    zero, end = every[:1] * 0, torch.full((1,), length, device=DEVICE, dtype=torch.int32)
    rows = RowSet(slot_ids=zero, cu_q=torch.cat((zero, end)), pos=every, row_of=every * 0, k_len=end, max_q=length,
                  max_k=length)  # fmt: skip
    flops, num_bytes = 2 * length * length * H * D, length * (2 * H + 2 * G) * D * 2
    k, v = (x[pages[0].long()].flatten(0, 1).transpose(0, 1)[None] for x in pool)
    dense = q.transpose(0, 1)[None]
    peer = graph_seconds([lambda: F.scaled_dot_product_attention(dense, k, v, is_causal=True, enable_gqa=True)])
    table.add(f"attention prefill {length} torch SDPA (dense keys)", peer, num_bytes=num_bytes, flops=flops)
    for invariant in (False, True):
        op = triton.make_attention(device=DEVICE, dtype="bfloat16", invariant=invariant)
        seconds = graph_seconds([lambda op=op: op(q, pool[0], pool[1], pages, rows, scale=D**-0.5)], repeats=10)
        name = f"attention prefill {length} pages of {page_tokens} {'invariant' if invariant else 'fast'}"
        table.add(name, seconds, num_bytes=num_bytes, flops=flops,
                  note=f"{peer / seconds:.2f}x of SDPA")  # fmt: skip


def linear(table: Table, num_rows: int, num_out: int, num_in: int) -> None:
    copies = max(1, 2**28 // (2 * num_out * num_in))
    weights = torch.randn(copies, num_out, num_in, device=DEVICE, dtype=DTYPE) / num_in**0.5
    x = torch.randn(num_rows, num_in, device=DEVICE, dtype=DTYPE)
    op = triton.make_linear(device=DEVICE, dtype="bfloat16", invariant=True)
    packed = [op.pack(weight) for weight in weights]
    num_bytes = 2 * (num_out * num_in + num_rows * (num_out + num_in))
    flops = 2 * num_rows * num_out * num_in
    peer = graph_seconds([lambda w=w: F.linear(x, w) for w in weights])
    seconds = graph_seconds([lambda p=p: op(x, p) for p in packed])
    name = f"linear {num_rows} x {num_out} x {num_in}"
    table.add(f"{name} cuBLAS", peer, num_bytes=num_bytes, flops=flops)
    table.add(f"{name} invariant", seconds, num_bytes=num_bytes, flops=flops, note=f"{peer / seconds:.2f}x of cuBLAS")


def rowwise(table: Table) -> None:
    x, residual = (torch.randn(8192, 4096, device=DEVICE, dtype=DTYPE) for _ in range(2))
    weight = torch.randn(4096, device=DEVICE, dtype=DTYPE)
    ops = {"triton": triton, "eager": eager}
    for name, package in ops.items():
        norm = package.make_rms_norm(device=DEVICE, dtype="bfloat16")
        seconds = graph_seconds([lambda n=norm: n(x, weight, eps=1e-5, residual=residual)])
        table.add(f"rms_norm 8192 x 4096 with residual {name}", seconds, num_bytes=4 * x.nbytes)
    wide = torch.randn(8192, 2 * 14336, device=DEVICE, dtype=DTYPE)
    for name, package in ops.items():
        silu_mul = package.make_silu_mul(device=DEVICE, dtype="bfloat16")
        table.add(f"silu_mul 8192 x 14336 {name}", graph_seconds([lambda s=silu_mul: s(wide)]),
                  num_bytes=1.5 * wide.nbytes)  # fmt: skip
    fused = torch.randn(8192, H + 2 * G, D, device=DEVICE, dtype=DTYPE)
    q, k, v = fused.split((H, G, G), dim=1)
    pos = torch.arange(8192, device=DEVICE, dtype=torch.int32)
    cos_sin = torch.randn(8192, D, device=DEVICE)
    pages = scattered_table(1, 8192 // Z)
    pool = torch.empty(2, pages.numel(), Z, G, D, device=DEVICE, dtype=DTYPE)
    rows = RowSet(slot_ids=pos[:1], cu_q=pos[:2] * 8192, pos=pos, row_of=pos * 0, k_len=pos[:1] + 8192, max_q=8192,
                  max_k=8192)  # fmt: skip
    for name, package in ops.items():
        rope = package.make_rope(device=DEVICE, dtype="bfloat16")
        seconds = graph_seconds([lambda r=rope: r(q, k, pos, cos_sin=cos_sin)])
        table.add(f"rope 8192 tokens {name}", seconds, num_bytes=2 * 8192 * (H + G) * D * 2 + cos_sin.nbytes)
        write = package.make_cache_write(device=DEVICE, dtype="bfloat16")
        seconds = graph_seconds([lambda w=write: w(k, v, pool[0], pool[1], pages, rows)])
        table.add(f"cache_write 8192 tokens {name}", seconds, num_bytes=4 * 8192 * G * D * 2)


def sampling(table: Table, num_rows: int, vocab_size: int) -> None:
    logits = torch.randn(4, num_rows, vocab_size, device=DEVICE)
    keys = {
        "seed": torch.arange(num_rows, device=DEVICE),
        "sample_index": torch.zeros(num_rows, device=DEVICE, dtype=torch.int32),
        "pos": torch.arange(num_rows, device=DEVICE, dtype=torch.int32),
        "purpose": 0,
    }
    op = triton.make_sample(device=DEVICE, dtype="float32")
    peer = graph_seconds([lambda x=x: x.argmax(dim=-1) for x in logits])
    table.add(f"argmax {num_rows} x {vocab_size} torch", peer, num_bytes=logits[0].nbytes)
    for name, greedy in (("greedy", True), ("Gumbel", False)):
        flags = torch.full((num_rows,), greedy, device=DEVICE)
        seconds = graph_seconds([lambda x=x, f=flags: op(x, greedy=f, **keys) for x in logits])
        table.add(f"sample {name} {num_rows} x {vocab_size}", seconds, num_bytes=logits[0].nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--only", default="", help="attention, linear, rowwise or sampling")
    options = parser.parse_args()
    torch.manual_seed(0)
    table = Table()
    if options.only in ("", "attention"):
        for batch in (1, 32, 128):
            attention_decode(table, batch, 8192)
        for page_tokens in (16, 64):
            attention_prefill(table, 8192, page_tokens)
    if options.only in ("", "linear"):
        for num_rows in (1, 16, 64, 128, 512, 2048, 8192):
            linear(table, num_rows, 4096, 4096)
        for num_rows in (1, 64, 8192):
            linear(table, num_rows, 28672, 4096)
    if options.only in ("", "rowwise"):
        rowwise(table)
    if options.only in ("", "sampling"):
        sampling(table, 64, 129280)
    if options.json:
        roofs = {"bytes_per_s": table.bytes_per_s, "flops_per_s": table.flops_per_s}
        options.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), **roofs, "rows": table.rows}))


if __name__ == "__main__":
    main()
