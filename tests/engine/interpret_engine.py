"""Tokens of a folder's model with every op from Triton's interpreter, and with eager ones; prints JSON.

Run by test_interpreter.py in a process of its own: the interpreter is chosen by TRITON_INTERPRET when kernels are
defined.
"""

import json
import sys

import torch

from deepinfer import LLM, SamplingParams
from deepinfer.kinds import OP_KINDS

PROMPTS = [list(range(5, 14)), [40, 7], [9] * 5]
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=3, max_tokens=3, ignore_eos=True)


def tokens(folder: str, name: str) -> list[tuple[int, ...]]:
    """A budget of 8 tokens cuts the first prompt; one request more than rows joins late."""
    llm = LLM(
        folder,
        accelerator="cpu",
        weights="float32",
        want=dict.fromkeys(OP_KINDS, name),
        max_rows=2,
        max_tokens_per_step=8,
        lag=1,
        progress=False,
    )
    assert set(llm.engine.executor.model.ops.names.values()) == {name}
    return [output.token_ids for output in llm.generate(PROMPTS, [GREEDY, SEEDED, GREEDY])]


def main(folder: str) -> None:
    torch.set_num_threads(1)
    print(json.dumps({name: tokens(folder, name) for name in ("eager", "triton")}))


if __name__ == "__main__":
    main(sys.argv[1])
