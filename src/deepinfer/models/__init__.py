"""Checkpoints, tokenizers, chat formats and the models that are built from them.

Names are loaded on first use: rendering a chat template needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .chat import JinjaChatFormat, jinja_chat_format
    from .checkpoint import Checkpoint, find_demo_model, open_checkpoint
    from .detokenizer import Detokenizer
    from .gguf import GgufWeights, open_gguf
    from .gguf_reader import GgufFile
    from .gguf_vocab import gguf_tokenizer, load_gguf_tokenizer
    from .llama import Llama, LlamaConfig
    from .loading import load_model
    from .options import LoadOptions
    from .safetensors import SafetensorsFile, ShardedSafetensors, open_safetensors
    from .tokenizer import FastTokenizer, hf_tokenizer, load_tokenizer
    from .weights import Loader, WeightSource

__all__ = [
    "Checkpoint",
    "Detokenizer",
    "FastTokenizer",
    "GgufFile",
    "GgufWeights",
    "JinjaChatFormat",
    "Llama",
    "LlamaConfig",
    "LoadOptions",
    "Loader",
    "SafetensorsFile",
    "ShardedSafetensors",
    "WeightSource",
    "find_demo_model",
    "gguf_tokenizer",
    "hf_tokenizer",
    "jinja_chat_format",
    "load_gguf_tokenizer",
    "load_model",
    "load_tokenizer",
    "open_checkpoint",
    "open_gguf",
    "open_safetensors",
]

_HOMES = {
    "Checkpoint": "checkpoint",
    "Detokenizer": "detokenizer",
    "FastTokenizer": "tokenizer",
    "GgufFile": "gguf_reader",
    "GgufWeights": "gguf",
    "JinjaChatFormat": "chat",
    "Llama": "llama",
    "LlamaConfig": "llama",
    "LoadOptions": "options",
    "Loader": "weights",
    "SafetensorsFile": "safetensors",
    "ShardedSafetensors": "safetensors",
    "WeightSource": "weights",
    "find_demo_model": "checkpoint",
    "gguf_tokenizer": "gguf_vocab",
    "hf_tokenizer": "tokenizer",
    "jinja_chat_format": "chat",
    "load_gguf_tokenizer": "gguf_vocab",
    "load_model": "loading",
    "load_tokenizer": "tokenizer",
    "open_checkpoint": "checkpoint",
    "open_gguf": "gguf",
    "open_safetensors": "safetensors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
