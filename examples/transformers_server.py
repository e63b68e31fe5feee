"""Schedulers and cache alone: continuous batching and prefix caching around a transformers model.

A plain asyncio server on loopback, one JSON object a line: send `{"prompt_ids": [...], "max_tokens": 16}`, get
`{"token": id}` lines and at the end `{"finish_reason": "...", "cached_tokens": n}`. Nothing of deepinfer's
kernels, models, sampling or engine is imported: the model, its attention and argmax are transformers' and torch's.

    python examples/transformers_server.py HF_FOLDER [PORT]
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from deepinfer.cache import PagedBook
from deepinfer.plan import Plan, StepResult
from deepinfer.schedulers import Scheduler, Sequence, StepLoop
from deepinfer.types import Request, SamplingParams


class TransformersExecutor:
    """Runs plans with a transformers model; keys and values of every page are kept here."""

    def __init__(
        self, model: PreTrainedModel, *, num_pages: int, page_tokens: int, max_rows: int, max_len: int
    ) -> None:
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 2, num_pages, page_tokens, config.num_key_value_heads, head_dim)
        self.model = model
        self.page_tokens = page_tokens
        self.pages = torch.zeros(shape)
        self.table = np.zeros((max_rows + 1, -(-max_len // page_tokens)), np.int64)
        self.length = np.zeros(max_rows + 1, np.int64)
        self.last = np.zeros(max_rows + 1, np.int64)

    def launch(self, plan: Plan) -> tuple[Plan, dict[int, torch.Tensor]]:
        """Forward every row; transformers takes them one by one, each with its own past."""
        for slot, index, page in plan.page_delta.tolist():
            self.table[slot, index] = page
        for move in plan.moves:
            self.pages[:, :, move.dst] = self.pages[:, :, move.src]
        emits = set(plan.emits.tolist())
        logits, offset = {}, 0
        for row, slot in enumerate(plan.slots.tolist()):
            if row < plan.num_verify:
                start, ids = int(self.length[slot]) - 1, [int(self.last[slot])]
            else:
                start, q_len = int(plan.chunk_start[row]), int(plan.q_max[row])
                ids, offset = plan.chunk_ids[offset : offset + q_len].tolist(), offset + q_len
            last = self._forward(slot, start, ids)
            self.length[slot] = start + len(ids)
            if row in emits:
                logits[row] = last
        return plan, logits

    def finish(self, pending: tuple[Plan, dict[int, torch.Tensor]], masks: Any | None) -> None:
        plan, logits = pending
        for row, values in logits.items():
            slot = int(plan.slots[row])
            self.last[slot] = int(values.argmax())
            self.length[slot] += 1

    def settle(self, pending: tuple[Plan, dict[int, torch.Tensor]]) -> StepResult:
        plan, logits = pending
        tokens = np.full((plan.num_rows, 1), -1, np.int32)
        for row in logits:
            tokens[row, 0] = self.last[plan.slots[row]]
        num_out = (tokens[:, 0] >= 0).astype(np.int32)
        return StepResult(plan.step, tokens, num_out, np.zeros(plan.num_rows, np.uint8))

    @torch.inference_mode()
    def _forward(self, slot: int, start: int, ids: list[int]) -> torch.Tensor:
        """Logits [V] after `ids` at positions start...; their keys and values go to the slot's pages."""
        where = np.arange(start + len(ids))
        page, line = self.table[slot, where // self.page_tokens], where % self.page_tokens
        past = DynamicCache()
        for layer in range(len(self.pages)):
            kept = self.pages[layer, :, page[:start], line[:start]].permute(0, 2, 1, 3)  # [2, G, start, D]
            past.update(kept[0][None], kept[1][None], layer)
        out = self.model(torch.tensor([ids]), past_key_values=past, use_cache=True, logits_to_keep=1)
        for layer, entry in enumerate(out.past_key_values.layers):
            fresh = torch.stack([entry.keys[0, :, start:], entry.values[0, :, start:]])
            self.pages[layer, :, page[start:], line[start:]] = fresh.permute(0, 2, 1, 3)
        return out.logits[0, -1]


class Server:
    """One step loop, many connections. Everything happens on the event loop."""

    def __init__(
        self, model: PreTrainedModel, *, num_pages: int = 256, page_tokens: int = 16, max_rows: int = 8
    ) -> None:
        max_len = (num_pages - 1) * page_tokens // 2
        self.book = PagedBook(num_pages, page_tokens=page_tokens)
        self.scheduler = Scheduler(self.book, max_rows=max_rows, max_tokens_per_step=256, max_len=max_len)
        executor = TransformersExecutor(
            model, num_pages=num_pages, page_tokens=page_tokens, max_rows=max_rows, max_len=max_len
        )
        self.loop = StepLoop(self.scheduler, executor)
        self.eos = model.config.eos_token_id
        self._queues: dict[Sequence, asyncio.Queue[dict[str, Any]]] = {}
        self._added = asyncio.Event()

    async def run(self) -> None:
        """Step while there is work; sleep otherwise."""
        while True:
            await self._added.wait()
            while self._queues:
                for events in self.loop.step():
                    for sequence, _, tokens in events.emitted():
                        for token in tokens:
                            self._queues[sequence].put_nowait({"token": token})
                    for sequence in events.finished:
                        end = {
                            "finish_reason": str(sequence.finish_reason),
                            "cached_tokens": sequence.num_cached_tokens,
                        }
                        self._queues.pop(sequence).put_nowait(end)
                await asyncio.sleep(0)
            self._added.clear()

    def add(self, prompt_ids: list[int], max_tokens: int) -> asyncio.Queue[dict[str, Any]]:
        request = Request(request_id=f"{time.monotonic_ns()}", prompt_ids=prompt_ids, params=SamplingParams())
        eos = self.eos if isinstance(self.eos, list) else [self.eos]
        sequence = Sequence(
            request,
            prompt_ids=np.asarray(prompt_ids, np.int32),
            stop_ids=tuple(eos),
            max_tokens=max_tokens,
            arrival_s=time.monotonic(),
        )
        self.scheduler.add(sequence)
        self._queues[sequence] = asyncio.Queue()
        self._added.set()
        return self._queues[sequence]

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            try:
                asked = json.loads(line)
                queue = self.add(asked["prompt_ids"], asked.get("max_tokens", 16))
            except Exception as error:  # one bad line costs its sender an answer, nobody else anything
                writer.write(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
                continue
            message: dict[str, Any] = {}
            while "finish_reason" not in message:
                message = await queue.get()
                writer.write(json.dumps(message).encode() + b"\n")
                await writer.drain()
        writer.close()


async def serve(folder: str, port: int = 8765) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    server = Server(model)
    stepping = asyncio.create_task(server.run())
    async with await asyncio.start_server(server.connection, "127.0.0.1", port) as listener:
        print(f"listening on 127.0.0.1:{port}", flush=True)
        await listener.serve_forever()
    await stepping


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], *(int(port) for port in sys.argv[2:3])))
