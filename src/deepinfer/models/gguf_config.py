"""A Hugging Face configuration made from the metadata of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from ..errors import CheckpointError, UnknownModelType
from .gguf_reader import GgufFile

__all__ = ["ARCHITECTURES", "ROPE_FACTORS", "Architecture", "architecture", "head_counts", "hf_config"]

#: Divisors of the rotary frequencies: the form in which llama.cpp keeps Llama 3 scaling. Not a weight.
ROPE_FACTORS = "rope_freqs.weight"

#: The published Llama 3 values; the file holds only their outcome.
LLAMA3_FIELDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@attrs.frozen
class Architecture:
    """How files of one `general.architecture` differ from Hugging Face's layout."""

    model_type: str
    hf_class: str
    #: Rows of q and k have their rotary pairs side by side.
    interleaved: bool


#: `general.architecture` to what is known of it. Mistral models are stored as llama.
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", interleaved=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", interleaved=False),
}


def architecture(file: GgufFile) -> Architecture:
    """Raises UnknownModelType for a name that is none of `ARCHITECTURES`."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UnknownModelType(
            f"{file.path}: general.architecture is {str(name)[:80]!r}; files of {', '.join(ARCHITECTURES)} are read. "
            "Load the model from its Hugging Face folder instead"
        )
    return ARCHITECTURES[name]


def head_counts(file: GgufFile) -> tuple[int, int]:
    """Query heads and key/value heads."""
    keys = _Keys(file)
    heads = keys.count("attention.head_count")
    return heads, keys.count("attention.head_count_kv", heads)


def hf_config(file: GgufFile) -> dict[str, Any]:
    """The keys of a `config.json`, as far as a Llama-family model needs them.

    Raises:
        UnknownModelType: as `architecture`.
        CheckpointError: a key is missing, has a senseless value, or asks for what no key of a configuration says.
    """
    arch, keys = architecture(file), _Keys(file)
    heads, kv_heads = head_counts(file)
    hidden = keys.count("embedding_length")
    head_dim = keys.count("attention.key_length", hidden // heads)
    keys.expect("attention.value_length", head_dim)
    keys.expect("rope.dimension_count", head_dim)
    theta = keys.positive("rope.freq_base", 10_000.0)
    config = {
        "architectures": [arch.hf_class],
        "model_type": arch.model_type,
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": keys.positive("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(keys, head_dim, theta),
        "max_position_embeddings": keys.count("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        **_token_ids(file),
    }
    if arch.model_type == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if keys.get("attention.sliding_window"):
        config |= {"sliding_window": keys.count("attention.sliding_window"), "use_sliding_window": True}
    return config


class _Keys:
    """Metadata of the file's own architecture, checked as it is read."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.prefix = f"{file.metadata.get('general.architecture')}."

    def get(self, key: str) -> Any:
        return self.file.metadata.get(self.prefix + key)

    def fail(self, key: str, value: Any, expected: str) -> CheckpointError:
        shown = "missing" if value is None else str(value)[:80]
        return CheckpointError(
            f"{self.file.path}: {self.prefix}{key} is {shown}; expected {expected}. Convert it again"
        )

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()  # One number a layer, all the same.
        value = default if value is None else value
        if type(value) is not int or not 0 < value < 2**31:
            raise self.fail(key, value, "one positive integer")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            raise self.fail(key, value, "a positive number")
        return float(value)

    def expect(self, key: str, wanted: int) -> None:
        if self.get(key) is not None and self.count(key) != wanted:
            raise self.fail(key, self.get(key), f"the head width {wanted}: partial rotary or uneven heads are not read")


def _vocab_size(file: GgufFile) -> int:
    info = file.tensors.get("token_embd.weight")
    if info is None or len(info.shape) != 2:
        raise CheckpointError(f"{file.path} has no token_embd.weight matrix; it is not a language model's file")
    return info.shape[0]


def _token_ids(file: GgufFile) -> dict[str, Any]:
    found = {}
    for key in ("bos", "eos"):
        value = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(value) is int:
            found[f"{key}_token_id"] = value
    return found


def _rope_scaling(keys: _Keys, head_dim: int, theta: float) -> dict[str, Any] | None:
    if ROPE_FACTORS in keys.file.tensors:
        return _llama3_scaling(keys, head_dim, theta)
    kind = keys.get("rope.scaling.type")
    if kind is None and keys.get("rope.scale_linear") is not None:
        return {"rope_type": "linear", "factor": keys.positive("rope.scale_linear")}
    if kind in (None, "none"):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": keys.positive("rope.scaling.factor")}
    if kind == "yarn":
        original = keys.count("rope.scaling.original_context_length")
        factor = keys.positive("rope.scaling.factor")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise keys.fail("rope.scaling.type", kind, "none, linear or yarn")


def _llama3_scaling(keys: _Keys, head_dim: int, theta: float) -> dict[str, Any]:
    """The fields that give the stored factors, found by trying the published ones."""
    info = keys.file.tensors[ROPE_FACTORS]
    if info.type_name != "F32" or info.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{keys.file.path}: {ROPE_FACTORS} is {info.type_name} {list(info.shape)}; expected F32 [{head_dim // 2}]"
        )
    stored = keys.file.raw(info).view("<f4").astype(np.float64)
    factor = float(stored.max())
    fields = {"rope_type": "llama3", "factor": factor, **LLAMA3_FIELDS}
    if (
        not np.isfinite(stored).all()
        or factor < 1
        or not np.allclose(stored, _llama3_factors(head_dim, theta, factor), rtol=1e-3)
    ):
        raise CheckpointError(
            f"{keys.file.path}: {ROPE_FACTORS} is not Llama 3 scaling with the published fields {LLAMA3_FIELDS}; "
            "load the model from its Hugging Face folder instead"
        )
    return fields


def _llama3_factors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    turns = LLAMA3_FIELDS["original_max_position_embeddings"] / (
        2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    )
    low, high = LLAMA3_FIELDS["low_freq_factor"], LLAMA3_FIELDS["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
