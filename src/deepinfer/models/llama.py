"""The Llama family: pre-norm decoder layers with grouped-query attention, rotary positions, gated MLP.

Reads `model_type` llama, mistral (without a sliding window) and qwen2 (biases on q, k, v).
Source: LLaMA (arXiv 2302.13971), Llama 2 (2307.09288, grouped-query attention).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
import torch.nn.functional as F

from ..errors import CheckpointError, ConfigError
from ..kernels.ops import Ops
from ..kernels.quant import QuantTensor, cat
from ..layers.batch import Batch
from ..layers.decoder import Attention, DecoderLayer, GatedMlp
from ..layers.kv import CacheSpec, KVPool, PagedGroup
from ..layers.rope import cos_sin_table
from ..protocols import DecoderLayerCall
from .options import LoadOptions, in_format
from .weights import Loader, Weight

__all__ = ["Llama", "LlamaConfig", "build"]


def _positive(_instance: object, attribute: attrs.Attribute, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {attribute.name} is {value!r}; expected a positive integer")


def _small(_instance: object, attribute: attrs.Attribute, value: float) -> None:
    if not 0 <= value < 1:
        raise CheckpointError(f"config.json: {attribute.name} is {value}; expected a small number such as 1e-5")


@attrs.frozen(kw_only=True)
class LlamaConfig:
    """Widths of a Llama-family model, from a Hugging Face configuration."""

    hidden_size: int = attrs.field(validator=_positive)
    intermediate_size: int = attrs.field(validator=_positive)
    num_layers: int = attrs.field(validator=_positive)
    num_heads: int = attrs.field(validator=_positive)
    num_kv_heads: int = attrs.field(validator=_positive)
    head_dim: int = attrs.field(validator=_positive)
    vocab_size: int = attrs.field(validator=_positive)
    context_len: int = attrs.field(validator=_positive)
    rms_norm_eps: float = attrs.field(converter=float, validator=_small)
    rope: Mapping[str, Any] = attrs.field(factory=dict)
    tied_head: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Read the keys of a `config.json`.

        Raises:
            CheckpointError: a key is missing or asks for something this family does not do.
        """
        _refuse_unsupported(config)
        try:
            heads, hidden = config["num_attention_heads"], config["hidden_size"]
            return cls(
                hidden_size=hidden,
                intermediate_size=config["intermediate_size"],
                num_layers=config["num_hidden_layers"],
                num_heads=heads,
                num_kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or hidden // heads,
                vocab_size=config["vocab_size"],
                context_len=config.get("max_position_embeddings", 2048),
                rms_norm_eps=config.get("rms_norm_eps", 1e-6),
                rope=_rope_fields(config),
                tied_head=bool(config.get("tie_word_embeddings", False)),
                qkv_bias=bool(config.get("attention_bias", config.get("model_type") == "qwen2")),
                out_bias=bool(config.get("attention_bias", False)),
                mlp_bias=bool(config.get("mlp_bias", False)),
            )
        except KeyError as error:
            raise CheckpointError(f"config.json has no {error}; a Llama-family model needs it") from None
        except (TypeError, ValueError, ZeroDivisionError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"config.json has a value that is no width of a Llama-family model: {error}"
            ) from error

    def __attrs_post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"{self.num_heads} query heads do not divide among {self.num_kv_heads} key/value heads"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim is {self.head_dim}; rotary positions need an even one")


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"hidden_act is {config['hidden_act']!r}; this family is built with silu")
    if config.get("sliding_window") and config.get("use_sliding_window", config.get("model_type") == "mistral"):
        raise CheckpointError(f"sliding_window is {config['sliding_window']}; only full attention is built here")


def _rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` (newer) or `rope_scaling` beside `rope_theta` (older), as one mapping."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise CheckpointError(f"config.json: the rotary parameters are {given!r}; expected an object")
    rope = dict(given)
    rope.setdefault("rope_theta", config.get("rope_theta", 10_000.0))
    rope.setdefault("original_max_position_embeddings", config.get("max_position_embeddings", 2048))
    return rope


@attrs.frozen(eq=False)
class Llama:
    """A loaded model. Immutable after loading; safe to share between engines of one process."""

    config: LlamaConfig
    ops: Ops
    embedding: Weight
    layers: tuple[DecoderLayerCall, ...]
    final_norm: torch.Tensor
    head: Any
    dtype: torch.dtype
    device: str
    context_len: int

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def cache_spec(self) -> CacheSpec:
        owners = tuple(range(self.config.num_layers))
        return CacheSpec((PagedGroup("full", owners, self.config.num_kv_heads, self.config.head_dim),))

    def forward(self, batch: Batch, kv: KVPool) -> torch.Tensor:
        """Normed hidden states [N, M] of `batch.logit_rows`; keys and values of all T tokens go to `kv`."""
        x, residual = self._embed(batch.token_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, batch, kv)
        if residual is not None:
            residual = residual[batch.logit_rows]
        return self.ops.rms_norm(x[batch.logit_rows], self.final_norm, eps=self.config.rms_norm_eps, residual=residual)[
            0
        ]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, M] -> f32 [N, V]."""
        return self.ops.linear(hidden, self.head).float()

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if isinstance(self.embedding, QuantTensor):
            return self.embedding.gather(token_ids).to(self.dtype)
        return F.embedding(token_ids, self.embedding).to(self.dtype)


@attrs.frozen(eq=False)
class _Builder:
    """Takes tensors from the checkpoint in layer order, so that one pass over the files loads them."""

    config: LlamaConfig
    loader: Loader
    ops: Ops
    options: LoadOptions

    def linear(self, *parts: tuple[str, int], width: int, bias: bool = False) -> Any:
        """Pack the named weights [rows, width] as one, stacked by rows."""
        weights = [
            in_format(self.loader.take(f"{name}.weight", (rows, width)), self.options.weights) for name, rows in parts
        ]
        biases = [_plain(self.loader.take(f"{name}.bias", (rows,))) for name, rows in parts] if bias else []
        return self.ops.linear.pack(_stack(weights), torch.cat(biases) if biases else None)

    def norm(self, name: str) -> torch.Tensor:
        weight = _plain(self.loader.take(f"{name}.weight", (self.config.hidden_size,)))
        return weight.to(self.options.device, self.options.torch_dtype)

    def layer(self, index: int, cos_sin: torch.Tensor) -> DecoderLayer:
        prefix = f"model.layers.{index}."
        eps = self.config.rms_norm_eps
        attention_norm = self.norm(prefix + "input_layernorm")
        attention = self.attention(index, prefix + "self_attn.", cos_sin)
        mlp_norm = self.norm(prefix + "post_attention_layernorm")
        return DecoderLayer(self.ops, eps, attention_norm, attention, mlp_norm, self.mlp(prefix + "mlp."))

    def attention(self, index: int, prefix: str, cos_sin: torch.Tensor) -> Attention:
        c = self.config
        q_rows, kv_rows = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        qkv = self.linear(
            (prefix + "q_proj", q_rows),
            (prefix + "k_proj", kv_rows),
            (prefix + "v_proj", kv_rows),
            width=c.hidden_size,
            bias=c.qkv_bias,
        )
        out = self.linear((prefix + "o_proj", c.hidden_size), width=q_rows, bias=c.out_bias)
        scale = 1 / math.sqrt(c.head_dim)
        return Attention(self.ops, index, c.num_heads, c.num_kv_heads, c.head_dim, qkv, out, cos_sin, scale)

    def mlp(self, prefix: str) -> GatedMlp:
        c = self.config
        gate_up = self.linear(
            (prefix + "gate_proj", c.intermediate_size),
            (prefix + "up_proj", c.intermediate_size),
            width=c.hidden_size,
            bias=c.mlp_bias,
        )
        down = self.linear((prefix + "down_proj", c.hidden_size), width=c.intermediate_size, bias=c.mlp_bias)
        return GatedMlp(self.ops, gate_up, down)

    def head(self, embedding: Weight) -> Any:
        if self.config.tied_head:
            return self.ops.linear.pack(in_format(embedding, self.options.weights))
        return self.linear(("lm_head", self.config.vocab_size), width=self.config.hidden_size)


def _stack(weights: list[Weight]) -> Weight:
    if len(weights) == 1:
        return weights[0]
    quantised = [w for w in weights if isinstance(w, QuantTensor)]
    if len(quantised) == len(weights) and len({w.format for w in quantised}) == 1:
        return cat(quantised)
    return torch.cat([_plain(w) for w in weights])


def _plain(weight: Weight) -> torch.Tensor:
    return weight.dequantize() if isinstance(weight, QuantTensor) else weight


def build(*, config: Mapping[str, Any], loader: Loader, bind: Callable[..., Ops], options: LoadOptions) -> Llama:
    """Read a Llama-family model from a checkpoint.

    Args:
        config: the Hugging Face configuration.
        loader: hands out tensors by their Hugging Face names and checks their shapes.
        bind: `bind_ops` with device and dtype filled in; called once with this model's widths.
        options: where and in which formats to load.

    Raises:
        CheckpointError: the configuration lacks something, or asks for what this family does not do.
        TensorMismatch: a tensor is missing, left over or of another shape.
    """
    widths = LlamaConfig.from_hf(config)
    context_len = min(options.context_len or widths.context_len, widths.context_len)
    if context_len < 1:
        raise ConfigError(f"context_len is {context_len}; expected at least 1")
    ops = bind(head_dim=widths.head_dim)
    make = _Builder(widths, loader, ops, options)
    embedding = loader.take("model.embed_tokens.weight", (widths.vocab_size, widths.hidden_size))
    cos_sin = cos_sin_table(context_len, widths.head_dim, widths.rope, device=options.device)
    fuse = ops.decoder_layer or (lambda layer: layer)
    layers = tuple(fuse(make.layer(i, cos_sin)) for i in range(widths.num_layers))
    model = Llama(
        config=widths,
        ops=ops,
        embedding=options.place(embedding),
        layers=layers,
        final_norm=make.norm("model.norm"),
        head=make.head(embedding),
        dtype=options.torch_dtype,
        device=options.device,
        context_len=context_len,
    )
    # folders of tied models may carry the head again
    loader.finish(tied={"lm_head.weight": "model.embed_tokens.weight"} if widths.tied_head else None)
    return model
