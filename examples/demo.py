"""A conversation of two turns with SmolLM2-135M: text, tokens per second, prefix-cache hits.

python examples/demo.py
"""

from __future__ import annotations

import time

from deepinfer import LLM, RequestOutput, SamplingParams

SYSTEM = "You are a helpful assistant. You answer in one or two short sentences and never invent facts."
TURNS = ["What is the capital of France?", "And what is the country famous for?"]


def main() -> None:
    started = time.perf_counter()
    llm = LLM("smollm2", max_rows=4, progress=False)
    print(f"SmolLM2-135M loaded in {time.perf_counter() - started:.1f} s, weights as stored (4-bit)\n")
    messages = [{"role": "system", "content": SYSTEM}]
    params = SamplingParams(temperature=0, max_tokens=64)
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        started = time.perf_counter()
        output = llm.chat(messages, params)[0]
        show(turn, output, time.perf_counter() - started)
        messages.append({"role": "assistant", "content": output.text})
    print("Deterministic: the same question in a batch of five gives the same words:", same_in_batch(llm, params))


def show(question: str, output: RequestOutput, seconds: float) -> None:
    print(f"user       {question}")
    print(f"assistant  {output.text.strip()}")
    print(
        f"           {len(output.token_ids)} tokens in {seconds:.2f} s = {len(output.token_ids) / seconds:.0f} tok/s; "
        f"prefix cache: {output.num_cached_tokens} of {len(output.prompt_ids)} prompt tokens\n"
    )


def same_in_batch(llm: LLM, params: SamplingParams) -> bool:
    question = {"role": "user", "content": TURNS[0]}
    alone = llm.chat([question], params)[0]
    others = [[{"role": "user", "content": f"Name {n} animals."}] for n in range(2, 6)]
    return llm.chat([[question], *others], params)[0].text == alone.text


if __name__ == "__main__":
    main()
