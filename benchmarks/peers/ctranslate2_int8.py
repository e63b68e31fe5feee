"""ctranslate2 with int8 weights: ctranslate2_int8.py HF_FOLDER CT2_FOLDER THREADS (converted on first use)"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ctranslate2
import rates


def main(folder: str, converted: str, threads: int) -> None:
    if not Path(converted, "model.bin").exists():
        ctranslate2.converters.TransformersConverter(folder).convert(converted, quantization="int8", force=True)
    generator = ctranslate2.Generator(
        converted, device="cpu", intra_threads=threads, inter_threads=1, compute_type="int8"
    )
    words = json.loads(Path(converted, "vocabulary.json").read_text())

    def generate(batch: int, length: int, num_new: int) -> None:
        prompts = [[words[i] for i in row] for row in rates.prompts(batch, length)]
        generator.generate_batch(
            prompts,
            max_length=num_new,
            min_length=num_new,
            sampling_topk=1,
            include_prompt_in_result=False,
            end_token=[],
        )

    generate(1, 16, 2)
    found = {"prefill": rates.PREFILL / rates.best_seconds(lambda: generate(1, rates.PREFILL, 1))}
    for batch in rates.BATCHES:
        few = rates.best_seconds(lambda batch=batch: generate(batch, rates.CONTEXT, 1))
        many = rates.best_seconds(lambda batch=batch: generate(batch, rates.CONTEXT, 1 + rates.STEPS))
        found[f"b{batch}"] = batch * rates.STEPS / (many - few)
    rates.report(found)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
