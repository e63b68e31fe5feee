"""Tiny seeded Llama folders as transformers writes them, with a byte-level tokenizer.

`CASES` spans what a reader of such folders meets: dtypes, shards, grouped heads, tied heads, biases, and every way
of stretching rotary positions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 320
SPECIAL = ("<s>", "</s>", "<pad>")
MERGES = ("t h", "th e", "Ġ the", "i n", "Ġ a", "r e", "o n", "e r", "Ġ Ġ", "a t", "Ġ o", "o r", "in g", "n d", "Ġa nd")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

#: Name to the keywords of `build_tiny_llama`.
CASES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "mha": {"kv_heads": 4},
    "mqa-wide-heads": {"kv_heads": 1, "head_dim": 32},
    "biases": {"bias": True},
    "bfloat16-sharded": {"dtype": "bfloat16", "sharded": True},
    "float16": {"dtype": "float16"},
    "rope-theta": {"rope": {"rope_type": "default", "rope_theta": 500_000.0}},
    "rope-linear": {"rope": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    "rope-dynamic": {"rope": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}},
    "rope-llama3": {"rope": LLAMA3},
    "rope-yarn": {
        "rope": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


def build_tiny_llama(
    folder: Path,
    *,
    dtype: str = "float32",
    tied: bool = False,
    kv_heads: int = 2,
    head_dim: int = 16,
    rope: Mapping[str, Any] | None = None,
    bias: bool = False,
    sharded: bool = False,
    seed: int = 0,
    **widths: int,
) -> Path:
    """Save a two-layer Llama of width 64 (about 130,000 parameters) into `folder`; returns it.

    widths: fields of `LlamaConfig` that replace those below.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    }
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        attention_bias=bias,
        mlp_bias=bias,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        **(shape | widths),
        **({"rope_parameters": dict(rope)} if rope is not None else {}),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        # Norm weights and biases begin as ones and zeros, which would hide a mix-up.
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.2)
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size="60KB" if sharded else "1GB")
    write_tokenizer(folder)
    return folder


def byte_vocabulary() -> dict[str, int]:
    """Special tokens, the 256 bytes, then what `MERGES` makes."""
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES)]
    return {token: i for i, token in enumerate(dict.fromkeys(tokens))}


def byte_tokenizer() -> Tokenizer:
    merges = [tuple(m.split(" ")) for m in dict.fromkeys(MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab=byte_vocabulary(), merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
