"""The least a torch program can do: merged weights, a fixed KV tensor, no paging, no scheduler, greedy.

    bare_torch.py HF_FOLDER THREADS

What an engine on torch's own float32 products can hope for.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import rates
import torch
import torch.nn.functional as F
from safetensors.torch import load_file


class BareLlama:
    def __init__(self, folder: Path, rows: int, length: int) -> None:
        config = json.loads((folder / "config.json").read_text())
        weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.num_heads, self.num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.width = config["hidden_size"]
        self.head_dim, self.eps = self.width // self.num_heads, config["rms_norm_eps"]
        self.embedding, self.norm = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
        self.layers = [self._layer(weights, f"model.layers.{i}.") for i in range(config["num_hidden_layers"])]
        self.kv = torch.zeros(len(self.layers), 2, rows, self.num_kv_heads, length, self.head_dim)
        theta = (config.get("rope_parameters") or config)["rope_theta"]
        power = torch.arange(0, self.head_dim, 2) / self.head_dim
        angle = torch.arange(length)[:, None] / theta**power
        self.cos, self.sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)

    def _layer(self, weights: dict[str, torch.Tensor], prefix: str) -> tuple[torch.Tensor, ...]:
        def part(name: str) -> torch.Tensor:
            return weights[f"{prefix}{name}.weight"]

        qkv = torch.cat([part(f"self_attn.{x}_proj") for x in "qkv"])
        gate_up = torch.cat([part("mlp.gate_proj"), part("mlp.up_proj")])
        norms = part("input_layernorm"), part("post_attention_layernorm")
        return norms[0], qkv, part("self_attn.o_proj"), norms[1], gate_up, part("mlp.down_proj")

    def rotate(self, x: torch.Tensor, start: int) -> torch.Tensor:
        end, half = start + x.shape[2], self.head_dim // 2
        return x * self.cos[start:end] + torch.cat([-x[..., half:], x[..., :half]], -1) * self.sin[start:end]

    def forward(self, tokens: torch.Tensor, start: int) -> torch.Tensor:
        """tokens [B, T] at positions start... -> logits [B, V] of the last one."""
        batch, length = tokens.shape
        h = F.embedding(tokens, self.embedding)
        split = [n * self.head_dim for n in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        for i, (norm1, qkv, out, norm2, gate_up, down) in enumerate(self.layers):
            q, k, v = F.linear(F.rms_norm(h, (self.width,), norm1, self.eps), qkv).split(split, -1)
            q = self.rotate(q.view(batch, length, -1, self.head_dim).transpose(1, 2), start)
            keys, values = self.kv[i, :, :batch]
            keys[:, :, start : start + length] = self.rotate(
                k.view(batch, length, -1, self.head_dim).transpose(1, 2), start
            )
            values[:, :, start : start + length] = v.view(batch, length, -1, self.head_dim).transpose(1, 2)
            seen = slice(0, start + length)
            mixed = F.scaled_dot_product_attention(
                q, keys[:, :, seen], values[:, :, seen], is_causal=length > 1, enable_gqa=True
            )
            h = h + F.linear(mixed.transpose(1, 2).reshape(batch, length, -1), out)
            gate, up = F.linear(F.rms_norm(h, (self.width,), norm2, self.eps), gate_up).chunk(2, -1)
            h = h + F.linear(F.silu(gate) * up, down)
        return F.linear(F.rms_norm(h[:, -1], (self.width,), self.norm, self.eps), self.embedding)


def main(folder: str, threads: int) -> None:
    torch.set_num_threads(threads)
    model = BareLlama(Path(folder), rows=max(rates.BATCHES), length=rates.PREFILL + rates.STEPS)
    prompt = torch.tensor(rates.prompts(1, rates.PREFILL))

    def steps(batch: int) -> None:
        ids = torch.tensor(rates.prompts(batch, 1))
        for i in range(rates.STEPS):
            ids = model.forward(ids, rates.CONTEXT + i).argmax(-1, keepdim=True)

    with torch.inference_mode():
        model.forward(prompt[:, :16], 0)
        found = {"prefill": rates.PREFILL / rates.best_seconds(lambda: model.forward(prompt, 0))}
        for batch in rates.BATCHES:
            found[f"b{batch}"] = batch * rates.STEPS / rates.best_seconds(lambda batch=batch: steps(batch))
    rates.report(found)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
