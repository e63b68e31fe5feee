"""transformers in float32, static batch, its own KV cache: transformers_f32.py HF_FOLDER THREADS"""

from __future__ import annotations

import sys

import rates
import torch
from transformers import AutoModelForCausalLM


def main(folder: str, threads: int) -> None:
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def prefill(rows: list[list[int]]):
        return model(torch.tensor(rows), use_cache=True, logits_to_keep=1)

    def decode_seconds(rows: list[list[int]]) -> float:
        out = prefill(rows)
        state = {"past": out.past_key_values, "ids": out.logits[:, -1].argmax(-1, keepdim=True)}

        def steps() -> None:
            for _ in range(rates.STEPS):
                step = model(state["ids"], past_key_values=state["past"], use_cache=True)
                state["past"], state["ids"] = step.past_key_values, step.logits[:, -1].argmax(-1, keepdim=True)

        return rates.best_seconds(steps, repeats=1)

    with torch.inference_mode():
        prefill(rates.prompts(1, 16))
        found = {"prefill": rates.PREFILL / rates.best_seconds(lambda: prefill(rates.prompts(1, rates.PREFILL)))}
        for batch in rates.BATCHES:
            rows = rates.prompts(batch, rates.CONTEXT)
            found[f"b{batch}"] = batch * rates.STEPS / min(decode_seconds(rows) for _ in range(rates.REPEATS))
    rates.report(found)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
