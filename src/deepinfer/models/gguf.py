"""Tensors of a GGUF file under their Hugging Face names, quantised ones as they are stored.

Two things differ between the formats and are put right here: the names, and the order of the rows of q and k.
llama.cpp rotates neighbouring pairs, so for the llama architecture its files interleave the two halves of every
head; here the halves are put back behind each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ..errors import CheckpointError, MalformedFile, TensorMismatch
from ..kernels.quant import QuantTensor
from .gguf_config import ROPE_FACTORS, architecture, head_counts
from .gguf_reader import GgufFile, TensorInfo
from .weights import Weight

__all__ = ["GgufWeights", "open_gguf"]


TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
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
FLOAT_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
QUANT_FORMATS = {"Q4_0": "q4_0", "Q4_1": "q4_1", "Q8_0": "q8_0"}


class GgufWeights:
    """A `WeightSource` over a GGUF file. Immutable after opening; safe to share between threads.

    Raises:
        UnknownModelType: `general.architecture` is none of `ARCHITECTURES`.
        CheckpointError: a tensor has a type or a name this reader does not know.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.origin = str(file.path)
        self.architecture = architecture(file)
        self._tensors = {_hf_name(file, info): info for name, info in file.tensors.items() if name != ROPE_FACTORS}
        for info in file.tensors.values():
            _check_type(file, info)
        heads, kv_heads = head_counts(file)
        self._heads = {"q_proj": heads, "k_proj": kv_heads} if self.architecture.interleaved else {}

    def names(self) -> Sequence[str]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._info(name).shape

    def get(self, name: str) -> Weight:
        """float tensor or `QuantTensor`, both views of the file but for q and k of the llama architecture."""
        info = self._info(name)
        rows = info.shape[0] if len(info.shape) > 1 else 1
        raw = torch.frombuffer(self.file.mapped, dtype=torch.uint8, count=info.num_bytes or 0, offset=info.offset)
        heads = self._heads.get(name.rpartition(".")[0].rpartition(".")[2])
        if heads is not None:
            raw = _halves_from_pairs(self.file.path, info, raw, heads)
        return _decode(info, raw.view(rows, -1))

    def _info(self, name: str) -> TensorInfo:
        try:
            return self._tensors[name]
        except KeyError:
            raise TensorMismatch(
                f"{self.origin} has no tensor {name!r}; it holds {len(self._tensors)} others"
            ) from None


def open_gguf(path: str | Path) -> GgufWeights:
    """The tensors of a `.gguf` file; raises as `GgufFile` and `GgufWeights`."""
    return GgufWeights(GgufFile(path))


def _hf_name(file: GgufFile, info: TensorInfo) -> str:
    stem, _, suffix = info.name.rpartition(".")
    if suffix in ("weight", "bias"):
        if stem in TOP_NAMES:
            return f"{TOP_NAMES[stem]}.{suffix}"
        block, _, rest = stem.partition(".")
        layer, _, part = rest.partition(".")
        if block == "blk" and layer.isascii() and layer.isdigit() and part in LAYER_NAMES:
            return f"model.layers.{layer}.{LAYER_NAMES[part]}.{suffix}"
    raise CheckpointError(
        f"{file.path}: tensor {info.name[:80]!r} has no counterpart in a dense {architecture(file).model_type} model; "
        "only such models are read"
    )


def _check_type(file: GgufFile, info: TensorInfo) -> None:
    if info.type_name not in FLOAT_DTYPES and info.type_name not in QUANT_FORMATS:
        known = ", ".join((*FLOAT_DTYPES, *QUANT_FORMATS))
        raise CheckpointError(
            f"{file.path}: tensor {info.name!r} has type {info.type_name}; types {known} are read. "
            "Quantise the model to one of them"
        )
    if len(info.shape) > 2:
        raise MalformedFile(
            f"{file.path}: tensor {info.name!r} has shape {list(info.shape)}; expected a vector or a matrix"
        )


def _halves_from_pairs(path: Path, info: TensorInfo, raw: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows [heads, D/2, 2] -> [heads, 2, D/2]; whole rows move, so packed bytes move with them. One copy."""
    rows = info.shape[0]
    if rows % (2 * heads):
        raise MalformedFile(
            f"{path}: {info.name!r} has {rows} rows, which do not divide into {heads} heads of even width"
        )
    order = np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)
    return raw.view(rows, -1)[torch.from_numpy(order)]


def _decode(info: TensorInfo, rows: torch.Tensor) -> Weight:
    """rows u8 [N, row bytes] -> the tensor of `info.shape`."""
    if info.type_name in FLOAT_DTYPES:
        return rows.view(-1).view(FLOAT_DTYPES[info.type_name]).view(info.shape)
    quantised = QuantTensor.from_blocks(rows, format=QUANT_FORMATS[info.type_name])
    return quantised if len(info.shape) > 1 else quantised.dequantize().view(info.shape)
