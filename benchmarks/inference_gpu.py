"""A random Llama of 1.2 billion parameters in bfloat16 on one GPU, beside transformers' `generate`: same weights.

    PYTHONPATH=src python3 benchmarks/inference_gpu.py [--layers 16] [--json results.json]

Greedy, end-of-sequence ignored. Prefill: tokens per second of one prompt, from submission to its only token. Decode:
tokens per second of a batch in which every sequence has a context. Best of the repeats; the ratio is to transformers.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from deepinfer.bench import latency
from deepinfer.engine import Composition

BATCHES, CONTEXT, STEPS, REPEATS, PREFILL = (1, 8, 32, 128), 128, 64, 4, 4096
VOCAB_SIZE = 128_256


def build(folder: Path, num_layers: int) -> None:
    """The widths of Llama 3.2 1B with random weights, and a tokenizer that spells ids as numbers."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    vocabulary = {str(token_id): token_id for token_id in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="0"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def theirs(folder: Path) -> dict[str, float]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda").eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    draw = random.Random(1)

    def seconds(batch: int, length: int, new: int) -> float:
        ids = torch.tensor([[draw.randrange(10, VOCAB_SIZE) for _ in range(length)] for _ in range(batch)]).cuda()
        torch.cuda.synchronize()
        started = time.perf_counter()
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new)
        torch.cuda.synchronize()
        assert out.shape == (batch, length + new)
        return time.perf_counter() - started

    seconds(1, PREFILL, 2)
    found = {"prefill": PREFILL / min(seconds(1, PREFILL, 1) for _ in range(REPEATS))}
    for batch in BATCHES:
        seconds(batch, CONTEXT, 2)
        first = min(seconds(batch, CONTEXT, 1) for _ in range(REPEATS))
        whole = min(seconds(batch, CONTEXT, STEPS + 1) for _ in range(REPEATS))
        found[f"b{batch}"] = batch * STEPS / (whole - first)
    return found


def ours(folder: Path, *, invariant: bool, lag: int) -> dict[str, float]:
    composition = Composition(
        model=str(folder),
        accelerator="nvidia",
        invariant=invariant,
        lag=lag,
        max_rows=max(BATCHES),
        max_tokens_per_step=8192,
        cache_tokens=65_536,
        prefix_caching=False,
    )
    sizes: dict[str, Any] = {"prompt_len": PREFILL, "context_len": CONTEXT, "steps": STEPS}
    figures = latency.measure(composition, batches=BATCHES, repeats=REPEATS, **sizes)
    found = {f"b{batch}": figures[f"decode_b{batch}_tokens_per_s"] for batch in BATCHES}
    return {"prefill": figures["prefill_tokens_per_s"], **found}


def rows(folder: Path) -> Iterator[tuple[str, dict[str, float]]]:
    yield "transformers generate", theirs(folder)
    for invariant, lag in itertools.product((False, True), (0, 1)):
        gc.collect()
        torch.cuda.empty_cache()
        yield f"deepinfer{' invariant' * invariant}, lag {lag}", ours(folder, invariant=invariant, lag=lag)


def main(num_layers: int, json_path: str | None) -> None:
    results: dict[str, dict[str, float]] = {}
    columns = ("prefill", *(f"b{batch}" for batch in BATCHES))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'tok/s (x transformers)':<28}" + "".join(f"{column:>20}" for column in columns), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder), num_layers)
        for name, figures in rows(Path(folder)):
            results[name] = figures
            base = results["transformers generate"]
            cells = "".join(f"{figures[c]:>11.0f} ({figures[c] / base[c]:5.2f})" for c in columns)
            print(f"{name:<28}{cells}", flush=True)
    if json_path is not None:
        Path(json_path).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    main(arguments.layers, arguments.json)
