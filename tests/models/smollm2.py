"""The demo model as a Hugging Face folder, converted once by other people's readers.

The conversion uses the packages `gguf` and `tokenizers` and none of deepinfer's code, so that it can be compared
with it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
#: Raise it when the layout of the folder changes.
LAYOUT = 1


def cache_dir() -> Path:
    """DEEPINFER_CACHE_DIR, or `.cache` of this checkout."""
    return Path(os.environ.get("DEEPINFER_CACHE_DIR") or Path(__file__).parents[2] / ".cache")


def smollm2_folder(gguf_path: Path, *, dtype: str = "float32") -> Path:
    """The folder, converted on the first call of all processes together (half a GiB in float32)."""
    final = cache_dir() / f"smollm2-{dtype}-v{LAYOUT}"
    final.parent.mkdir(parents=True, exist_ok=True)
    with _lock(final.with_suffix(".lock")):
        if not final.is_dir():
            part = Path(tempfile.mkdtemp(dir=final.parent, prefix="smollm2-part-"))
            try:
                convert(gguf_path, part, dtype=dtype)
                part.rename(final)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    return final


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Workers of one test run are processes: one converts, the others wait."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def convert(gguf_path: Path, folder: Path, *, dtype: str) -> None:
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    reader = GGUFReader(gguf_path)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1].tolist())
        weights[_hf_name(tensor.name)] = torch.tensor(_unpermuted(tensor.name, values, meta)).to(getattr(torch, dtype))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", _config(meta, dtype))
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(meta))
    _tokenizer(meta).save(str(folder / "tokenizer.json"))


def _hf_name(name: str) -> str:
    if not name.startswith("blk."):
        return f"{TOP[name.removesuffix('.weight')]}.weight"
    _, layer, part, suffix = name.split(".")
    return f"model.layers.{layer}.{LAYERS[part]}.{suffix}"


def _unpermuted(name: str, values: Any, meta: dict[str, Any]) -> Any:
    """Query and key rows: from neighbouring rotary pairs to halves."""
    for part, key in ((".attn_q.", "head_count"), (".attn_k.", "head_count_kv")):
        if part in name:
            heads = meta[f"llama.attention.{key}"]
            return values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape).copy()
    return values


def _config(meta: dict[str, Any], dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "hidden_act": "silu",
        "rms_norm_eps": meta["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": meta["llama.rope.freq_base"],
        "max_position_embeddings": meta["llama.context_length"],
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": dtype,
    }


def _tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "chat_template": meta["tokenizer.chat_template"],
    }


def _tokenizer(meta: dict[str, Any]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ", 1)) for m in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    return tokenizer


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
