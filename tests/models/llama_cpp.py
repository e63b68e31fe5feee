"""Somebody else's tokenizer: llama.cpp through xllamacpp, and small GGUF files for it to read."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

WIDTH = 32


class LlamaCppTokenizer:
    """Asks a llama.cpp server of this process for token ids."""

    def __init__(self, path: Path) -> None:
        xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp's tokenizer is the reference")
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = 32
        params.n_parallel = 1
        params.cpuparams.n_threads = 1
        params.warmup = False
        params.port = 0
        params.verbosity = -1
        self._server = xllamacpp.Server(params)

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        body = {"content": text, "add_special": add_special, "parse_special": True}
        request = urllib.request.Request(
            self._server.listening_address + "/tokenize",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["tokens"]


def write_tokenizer_gguf(
    path: Path, *, model: str, tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[str] = (), **fields: Any
) -> Path:
    """A one-layer llama of width 32 with random weights and the given vocabulary.

    `fields` are further `tokenizer.ggml.*` values.
    """
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(model)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(kinds))
    if merges:
        writer.add_token_merges(list(merges))
    for key, value in fields.items():
        _add(writer, f"tokenizer.ggml.{key}", value)
    _add_weights(writer, len(tokens))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, [float(v) for v in value])


def _add_weights(writer: Any, vocab_size: int) -> None:
    draw = np.random.default_rng(0)
    shapes = {
        "token_embd": (vocab_size, WIDTH),
        "output_norm": (WIDTH,),
        "blk.0.attn_norm": (WIDTH,),
        "blk.0.attn_q": (WIDTH, WIDTH),
        "blk.0.attn_k": (WIDTH // 2, WIDTH),
        "blk.0.attn_v": (WIDTH // 2, WIDTH),
        "blk.0.attn_output": (WIDTH, WIDTH),
        "blk.0.ffn_norm": (WIDTH,),
        "blk.0.ffn_gate": (WIDTH, WIDTH),
        "blk.0.ffn_up": (WIDTH, WIDTH),
        "blk.0.ffn_down": (WIDTH, WIDTH),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", draw.standard_normal(shape).astype(np.float32))
