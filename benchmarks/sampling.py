"""Time of one sampling step beside transformers' processors with torch.multinomial, both measured in this run.

    python benchmarks/sampling.py [--vocab-size 49152] [--repeats 15] [--threads 1]

Prints milliseconds of the best repeat, which a busy machine disturbs least, and the ratio theirs / ours: above 1
this library is faster.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from deepinfer.plan import Admission
from deepinfer.registry import default_registry
from deepinfer.sampling import Sampler, SamplingTable
from deepinfer.types import SamplingParams

BATCHES = (1, 8, 32)
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top-k 50, top-p 0.9": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    "top-p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "penalties": SamplingParams(temperature=0.8, repetition_penalty=1.1, frequency_penalty=0.1),
}


def milliseconds(step: Callable[[], object], repeats: int) -> float:
    step()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def logits_like_a_model(batch: int, vocab_size: int) -> torch.Tensor:
    """A long-tailed row: most of the probability on a few dozen tokens, as language models give."""
    generator = torch.Generator().manual_seed(0)
    ranks = torch.arange(1, vocab_size + 1, dtype=torch.float32)
    rows = [(-1.6 * ranks.log())[torch.randperm(vocab_size, generator=generator)] for _ in range(batch)]
    return torch.stack(rows) + 0.3 * torch.randn(batch, vocab_size, generator=generator)


def ours(params: SamplingParams, logits: torch.Tensor, op_name: str | None) -> Callable[[], object]:
    batch, vocab_size = logits.shape
    op = make_op(op_name)
    sampler, table = Sampler(op, vocab_size=vocab_size), SamplingTable(batch + 1, vocab_size=vocab_size)
    prompt = np.arange(100, 164, dtype=np.int32)
    for slot in range(1, batch + 1):
        table.admit(Admission(slot, prompt, len(prompt), params, seed=slot, sample_index=0))
    slots = np.arange(1, batch + 1, dtype=np.int32)
    pos = torch.full((batch,), len(prompt), dtype=torch.int32)

    def step() -> None:
        table.record(slots, sampler(logits, table=table, slots=slots, pos=pos).tokens)

    return step


def theirs(params: SamplingParams, logits: torch.Tensor) -> Callable[[], object]:
    from transformers.generation import logits_process as lp

    chain = lp.LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        chain.append(lp.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature not in (0.0, 1.0):
        chain.append(lp.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        chain.append(lp.TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        chain.append(lp.TopPLogitsWarper(params.top_p))
    input_ids = torch.arange(100, 164).expand(len(logits), -1)

    def step() -> torch.Tensor:
        scores = chain(input_ids, logits)
        if params.temperature == 0.0:
            return scores.argmax(-1)
        return torch.multinomial(scores.softmax(-1), 1)

    return step


def make_op(name: str | None):
    return default_registry().resolve("op.sample", name=name, device="cpu", dtype="float32", invariant=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--op", default=None, help="implementation of op.sample (default: the registry's choice)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    op = default_registry().select("op.sample", name=options.op, need={"device": "cpu", "dtype": "float32"})
    print(f"op.sample: {op.name}")
    print(f"vocabulary {options.vocab_size}, {options.threads} threads; transformers has no frequency penalty")
    print(f"{'setting':22}{'batch':>6}{'ours ms':>10}{'theirs ms':>11}{'ratio':>8}")
    for name, params in SETTINGS.items():
        for batch in BATCHES:
            logits = logits_like_a_model(batch, options.vocab_size)
            mine = milliseconds(ours(params, logits, options.op), options.repeats)
            other = milliseconds(theirs(params, logits), options.repeats)
            print(f"{name:22}{batch:6}{mine:10.3f}{other:11.3f}{other / mine:8.2f}")


if __name__ == "__main__":
    main()
