"""llama.cpp through xllamacpp on the GGUF as it is, continuous batching: llama_cpp.py GGUF THREADS"""

from __future__ import annotations

import sys
import threading

import rates
import xllamacpp


def server(gguf: str, threads: int, slots: int) -> xllamacpp.Server:
    params = xllamacpp.CommonParams()
    params.model.path = gguf
    params.n_ctx = 1024 * slots
    params.n_parallel = slots
    params.verbosity = -1
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.cont_batching = True
    params.n_threads_http = 1
    return xllamacpp.Server(params)


def complete(engine: xllamacpp.Server, rows: list[list[int]], num_new: int) -> None:
    def one(prompt: list[int]) -> None:
        request = {"prompt": prompt, "n_predict": num_new, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        engine.handle_completions(request)

    workers = [threading.Thread(target=one, args=(prompt,)) for prompt in rows]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def main(gguf: str, threads: int, slots: int) -> None:
    engine = server(gguf, threads, slots)
    complete(engine, rates.prompts(1, 16), 2)
    found = {}
    if slots == 1:
        run = rates.prompts(1, rates.PREFILL)
        found["prefill"] = rates.PREFILL / rates.best_seconds(lambda: complete(engine, run, 1))
    rows = rates.prompts(slots, rates.CONTEXT)
    repeats = rates.REPEATS if slots < 32 else 1
    few = rates.best_seconds(lambda: complete(engine, rows, 1), repeats)
    many = rates.best_seconds(lambda: complete(engine, rows, 1 + rates.STEPS), repeats)
    found[f"b{slots}"] = slots * rates.STEPS / max(many - few, 1e-9)
    rates.report(found)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
