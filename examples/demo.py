"""A conversation of two turns with SmolLM2-135M: text, tokens per second, prefix-cache hits.

python examples/demo.py
"""

from __future__ import annotations

import time

from deepinfer import LLM, SamplingParams

SYSTEM = "You are a helpful assistant. You answer in one or two short sentences and never invent facts."
TURNS = ["What is the capital of France?", "Tell me three things one can see there."]


def main() -> None:
    started = time.perf_counter()
    llm = LLM("smollm2", max_rows=8, progress=False)
    print(f"SmolLM2-135M loaded in {time.perf_counter() - started:.1f} s, weights as stored (4-bit)\n")
    messages = [{"role": "system", "content": SYSTEM}]
    params = SamplingParams(temperature=0, max_tokens=64)
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        messages.append({"role": "assistant", "content": answer(llm, messages, params)})
    print("The same question in a batch of five gives the same words:", same_in_batch(llm, params))


def answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Stream one answer to the terminal, then say how fast it came."""
    print(f"user       {messages[-1]['content']}\nassistant  ", end="")
    engine, started, first, shown = llm.engine, time.perf_counter(), 0.0, 0
    engine.add(engine.render_chat(messages), params, stream=True)
    while engine.has_work:
        for output in engine.step():
            first = first or time.perf_counter() - started
            print(output.text[shown:], end="", flush=True)
            shown = len(output.text)
    rest, count = time.perf_counter() - started - first, len(output.token_ids)
    prompt = f"{len(output.prompt_ids)} prompt tokens, {output.num_cached_tokens} of them from the prefix cache"
    print(f"\n           {prompt}; first token after {1e3 * first:.0f} ms, then {(count - 1) / rest:.0f} tokens/s\n")
    return output.text


def same_in_batch(llm: LLM, params: SamplingParams) -> bool:
    question = {"role": "user", "content": TURNS[0]}
    alone = llm.chat([question], params)[0]
    others = [[{"role": "user", "content": f"Name {n} animals."}] for n in range(2, 6)]
    return llm.chat([[question], *others], params)[0].text == alone.text


if __name__ == "__main__":
    main()
