"""Compiled CPU kernels beside torch, on the shapes of SmolLM2-135M.

    python benchmarks/kernels_cpu.py [--threads N] [--seconds S] [--json PATH]

Each line: our time, torch's time for the same job, their ratio (above 1: ours is faster) and our rate. Times are the
best of many runs, so that other work on the machine distorts them little. torch's job is `F.linear` in float32, its
8-bit `quantized.linear` for 8-bit weights, and `scaled_dot_product_attention` over contiguous keys.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from deepinfer.kernels import native
from deepinfer.kernels.eager.int8 import int8_available, int8_linear, pack_int8
from deepinfer.kernels.quant import FORMATS, quantize
from deepinfer.layers.batch import RowSet

HEADS, KV_HEADS, WIDTH, PAGE_TOKENS = 9, 3, 64, 16
#: Name, outputs, inputs, how often a forward of one step runs it, format of the 4-bit model.
LINEARS = (
    ("qkv", 960, 576, 30, "q4_1"),
    ("out", 576, 576, 30, "q4_1"),
    ("gate_up", 3072, 576, 30, "q4_1"),
    ("down", 576, 1536, 30, "q4_1"),
    ("head", 49152, 576, 1, "q8_0"),
)
ROWS = (1, 8, 32, 512)


def best_s(run: Callable[[], object], seconds: float) -> float:
    """Shortest wall time of a call within `seconds`."""
    run()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def linear_lines(seconds: float) -> list[dict]:
    linear, lines = native.make_linear(device="cpu", dtype="float32"), []
    for name, num_out, num_in, times, model_format in LINEARS:
        weight = torch.randn(num_out, num_in) / num_in**0.5
        formats = [f for f in FORMATS if f in (model_format, "q8_0", "int8")]
        packed = {f: linear.pack(quantize(weight, format=f)) for f in formats}
        packed |= {"float32": linear.pack(weight), "bfloat16": linear.pack(weight.bfloat16())}
        eight_bit = pack_int8(weight) if int8_available() else None
        for rows in ROWS[:3] if name == "head" else ROWS:
            x = torch.randn(rows, num_in)
            plain = best_s(partial(F.linear, x, weight), seconds)
            theirs = best_s(partial(int8_linear, x, eight_bit), seconds) if eight_bit else plain
            for what, weights in packed.items():
                ours = best_s(partial(linear, x, weights), seconds)
                peer = theirs if what in ("q8_0", "int8") else plain
                rate = 2e-9 * rows * num_out * num_in / ours
                lines.append(line(f"linear {name} {what}", rows, ours, peer, rate) | {"times": times})
    return lines


def paged_rows(num_rows: int, num_new: int, length: int) -> tuple[torch.Tensor, RowSet]:
    """`num_rows` sequences of `length` tokens on scattered pages, the last `num_new` of each being queries."""
    pages_each = -(-length // PAGE_TOKENS)
    table = torch.zeros(num_rows + 1, pages_each, dtype=torch.int32)
    table[1:] = torch.randperm(num_rows * pages_each).view(num_rows, -1) + 1
    rows = RowSet(
        slot_ids=torch.arange(1, num_rows + 1, dtype=torch.int32),
        cu_q=(torch.arange(num_rows + 1) * num_new).int(),
        pos=torch.arange(length - num_new, length).repeat(num_rows).int(),
        row_of=torch.arange(num_rows).repeat_interleave(num_new).int(),
        k_len=torch.full((num_rows,), length, dtype=torch.int32),
        max_q=num_new,
        max_k=length,
    )
    return table, rows


def attention_lines(seconds: float) -> list[dict]:
    attention, lines = native.make_attention(device="cpu", dtype="float32"), []
    for num_rows, num_new, length in ((1, 512, 512), (1, 1, 128), (8, 1, 128), (32, 1, 128), (1, 1, 4096)):
        table, rows = paged_rows(num_rows, num_new, length)
        pools = torch.randn(2, int(table.max()) + 1, PAGE_TOKENS, KV_HEADS, WIDTH)
        q = torch.randn(num_rows * num_new, HEADS, WIDTH)
        ours = best_s(partial(attention, q, pools[0], pools[1], table, rows, scale=0.125), seconds)
        queries = torch.randn(num_rows, HEADS, num_new, WIDTH)
        keys, values = torch.randn(2, num_rows, KV_HEADS, length, WIDTH)
        causal = {"is_causal": num_new > 1, "enable_gqa": True}
        peer = best_s(partial(F.scaled_dot_product_attention, queries, keys, values, **causal), seconds)
        pairs = num_rows * sum(range(length - num_new + 1, length + 1))
        rate = 4e-9 * WIDTH * HEADS * pairs / ours
        lines.append(
            line(f"attention {num_new} of {length}", num_rows, ours, peer, rate) | {"times": 30, "format": "-"}
        )
    return lines


def line(name: str, rows: int, ours: float, peer: float, gflop_per_s: float) -> dict:
    found = {
        "name": name,
        "rows": rows,
        "ours_s": ours,
        "torch_s": peer,
        "ratio": peer / ours,
        "gflop_per_s": gflop_per_s,
    }
    print(f"{name:26s} rows {rows:4d}  {ours * 1e6:9.1f} us  torch {peer * 1e6:9.1f} us  ratio {peer / ours:5.2f}  "
          f"{gflop_per_s:6.1f} GFLOP/s", flush=True)  # fmt: skip
    return found


def step_estimates(lines: list[dict]) -> None:
    """Tokens per second that the linear layers and attention alone would allow, by rows of a step."""
    attention_of = {
        1: "attention 1 of 128",
        8: "attention 1 of 128",
        32: "attention 1 of 128",
        512: "attention 512 of 512",
    }
    for model, formats in {"4-bit": ("q4_1", "q8_0"), "float32": ("float32", "float32")}.items():
        for rows in ROWS:
            wanted = {f"linear {name} {formats[name == 'head']}" for name, *_ in LINEARS}
            total = sum(x["ours_s"] * x["times"] for x in lines if x["name"] in wanted and x["rows"] == rows)
            batch = 1 if rows == 512 else rows
            total += sum(x["ours_s"] * 30 for x in lines if x["name"] == attention_of[rows] and x["rows"] == batch)
            print(f"{model:8s} rows {rows:4d}: {rows / total:8.1f} tok/s (linear layers and attention)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.5, help="per figure")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    args = parser.parse_args()
    reason = native.probe()
    if reason is not None:
        raise SystemExit(f"native kernels cannot be used: {reason}")
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        lines = linear_lines(args.seconds) + attention_lines(args.seconds)
    step_estimates(lines)
    if args.json:
        args.json.write_text(json.dumps({"threads": args.threads, "lines": lines}, indent=1))


if __name__ == "__main__":
    main()
