"""Page bookkeeping beside a block manager of the plain design, measured in the same run.

The baseline is written here, in the way small engines do it: one object a block, a deque of free blocks,
a dictionary from the chained hash of a block's tokens to its number, token lists compared at a hit. It
stands for the design, not for any released engine.

    python benchmarks/cache.py [--json]
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import deque
from typing import Any

import numpy as np

from deepinfer.bench.cache import PAGE_TOKENS, best_s, branching_prompts, measure, random_prompts

BLOCK_BYTES = 4 * PAGE_TOKENS
BASELINE = "chained-hash block manager (baseline written for this benchmark)"


class Block:
    """One block of the baseline."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.refs = 0
        self.digest = b""
        self.tokens = b""


class ChainedHashBlocks:
    """Allocation with prefix reuse, one block after the other."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(number) for number in range(num_blocks)]
        self.free = deque(range(num_blocks))
        self.by_digest: dict[bytes, int] = {}

    def admit(self, prompt: np.ndarray) -> list[int]:
        """Blocks for all of a prompt; whole ones are shared or entered for later requests."""
        table: list[int] = []
        packed, digest, missed = prompt.tobytes(), b"", False
        for start in range(0, len(packed), BLOCK_BYTES):
            tokens = packed[start : start + BLOCK_BYTES]
            whole = len(tokens) == BLOCK_BYTES
            if whole:
                digest = hashlib.blake2b(digest + tokens, digest_size=8).digest()
            number = self.by_digest.get(digest, -1) if whole and not missed else -1
            if number >= 0 and self.blocks[number].tokens == tokens:
                block = self.blocks[number]
                if block.refs == 0:
                    self.free.remove(number)
                block.refs += 1
            else:
                missed = True
                block = self._take()
                if whole:
                    block.digest, block.tokens = digest, tokens
                    self.by_digest[digest] = block.number
            table.append(block.number)
        return table

    def release(self, table: list[int]) -> None:
        for number in reversed(table):
            block = self.blocks[number]
            block.refs -= 1
            if block.refs == 0:
                self.free.append(number)

    def _take(self) -> Block:
        block = self.blocks[self.free.popleft()]
        if self.by_digest.get(block.digest) == block.number:
            del self.by_digest[block.digest]
        block.refs, block.digest, block.tokens = 1, b"", b""
        return block


def measure_baseline(num_prompts: int, num_requests: int) -> dict[str, float]:
    """The workloads of `deepinfer.bench.cache` that the baseline can do, under the same names."""
    prompts = random_prompts(num_prompts, 8192)
    num_pages = sum(len(p) // PAGE_TOKENS for p in prompts)
    blocks = ChainedHashBlocks(num_pages)
    # Tables stay held while they are looked up again: taking a block out of the middle of the free
    # deque would cost the baseline more than the look-up itself.
    tables = [blocks.admit(prompt) for prompt in prompts]

    def readmit() -> None:
        for prompt in prompts:
            blocks.release(blocks.admit(prompt))

    readmit_s = best_s(readmit, passes=3)
    release_s = best_s(lambda: [blocks.release(table) for table in tables], passes=1)
    branching = branching_prompts(num_requests)

    def serve() -> None:
        manager = ChainedHashBlocks(64 * 128 + 32 * num_requests + 256)
        for table in [manager.admit(prompt) for prompt in branching]:
            manager.release(table)

    return {
        "readmit_long_pages_per_s": num_pages / readmit_s,
        "free_pages_per_s": num_pages / release_s,
        "branching_requests_per_s": num_requests / best_s(serve, passes=3),
    }


def run(*, num_prompts: int = 100, num_requests: int = 2000) -> dict[str, Any]:
    """Figures of this library, of the baseline, and their ratios where both have one."""
    ours = measure(num_prompts=num_prompts, num_requests=num_requests)
    baseline = measure_baseline(max(2, num_prompts // 5), num_requests)
    ratios = {name: ours[name] / value for name, value in baseline.items() if name in ours}
    return {"deepinfer": ours, "baseline": baseline, "baseline_is": BASELINE, "ratio": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    figures = run()
    if args.json:
        print(json.dumps(figures))
        return
    print(f"baseline: {figures['baseline_is']}")
    print(f"{'':32}{'deepinfer':>14}{'baseline':>14}{'ratio':>9}")
    for name, value in figures["deepinfer"].items():
        other = figures["baseline"].get(name)
        print(f"{name:32}{value:14,.1f}" + (f"{other:14,.1f}{figures['ratio'][name]:9.1f}" if other else ""))


if __name__ == "__main__":
    main()
