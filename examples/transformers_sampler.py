"""The sampler alone, inside transformers' `generate`: seeded noise, bad words, penalties, exact greedy.

    python examples/transformers_sampler.py HF_FOLDER [PROMPT]

Nothing of deepinfer's cache, schedulers, models or engine is imported.
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepinfer.kernels.reference import make_sample
from deepinfer.sampling import Sampler, SamplingProcessor
from deepinfer.types import SamplingParams


def main(folder: str, prompt: str = "The capital of France is") -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sampler = Sampler(make_sample(device="cpu", dtype="float32", invariant=True), vocab_size=model.config.vocab_size)
    inputs = tokenizer([prompt], return_tensors="pt")
    for params in (
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.8, top_p=0.9, min_p=0.05, seed=7),
        SamplingParams(temperature=0.8, top_p=0.9, min_p=0.05, seed=7, presence_penalty=0.5),
    ):
        ids = model.generate(
            **inputs, logits_processor=[SamplingProcessor(params, sampler)], do_sample=False, max_new_tokens=24
        )
        print(repr(tokenizer.decode(ids[0], skip_special_tokens=True)))


if __name__ == "__main__":
    main(*sys.argv[1:])
