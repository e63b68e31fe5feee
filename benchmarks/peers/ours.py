"""This library's engine: ours.py MODEL THREADS WEIGHTS CACHE_DTYPE INVARIANT(0|1)"""

from __future__ import annotations

import sys

import rates
import torch

from deepinfer.bench import latency
from deepinfer.engine import Composition


def main(model: str, threads: int, weights: str, cache_dtype: str, invariant: bool) -> None:
    torch.set_num_threads(threads)
    composition = Composition(
        model=model,
        weights=weights,
        cache_dtype=cache_dtype,
        invariant=invariant,
        max_rows=max(rates.BATCHES),
        max_len=1024,
        cache_tokens=8192,
    )
    figures = latency.measure(
        composition,
        prompt_len=rates.PREFILL,
        batches=rates.BATCHES,
        context_len=rates.CONTEXT,
        steps=rates.STEPS,
        repeats=rates.REPEATS,
    )
    found = {"prefill": figures["prefill_tokens_per_s"]}
    found.update({f"b{batch}": figures[f"decode_b{batch}_tokens_per_s"] for batch in rates.BATCHES})
    rates.report(found)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5] == "1")
