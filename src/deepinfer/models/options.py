"""Where and in which formats a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from ..errors import ConfigError
from ..kernels.quant import QuantTensor, quantize
from .weights import Weight

__all__ = ["LoadOptions", "in_format"]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
FLOAT_FORMATS = tuple(DTYPES)
QUANT_FORMATS = ("q4_0", "q4_1", "q8_0", "int8")


def _known_dtype(_instance: object, attribute: attrs.Attribute, value: str) -> None:
    if value not in DTYPES:
        raise ConfigError(f"{attribute.name} is {value!r}; expected one of {', '.join(DTYPES)}")


def _known_format(_instance: object, attribute: attrs.Attribute, value: str) -> None:
    if value not in ("auto", *FLOAT_FORMATS, *QUANT_FORMATS):
        known = ", ".join(("auto", *FLOAT_FORMATS, *QUANT_FORMATS))
        raise ConfigError(f"{attribute.name} is {value!r}; expected one of {known}")


@attrs.frozen(kw_only=True)
class LoadOptions:
    """How to load a model; all fields have working defaults for the CPU."""

    device: str = "cpu"
    #: Type of activations.
    dtype: str = attrs.field(default="float32", validator=_known_dtype)
    #: `auto` keeps what the file stores; a float type dequantises; a quantised format quantises at load.
    weights: str = attrs.field(default="auto", validator=_known_format)
    #: Type of keys and values in their pages; None: `dtype`. A 16-bit one halves their traffic.
    cache_dtype: str | None = attrs.field(default=None, validator=attrs.validators.optional(_known_dtype))
    #: Bitwise batch invariance, see docs/architecture.md.
    invariant: bool = False
    page_tokens: int = 16
    #: Shorter than the model's own to save the rotary table and to refuse longer prompts.
    context_len: int | None = None
    #: Op kind to implementation name, such as {"op.attention": "reference"}.
    want: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def torch_cache_dtype(self) -> torch.dtype:
        return DTYPES[self.cache_dtype or self.dtype]

    def place(self, embedding: Weight) -> Weight:
        """The embedding table where it will be read; on the CPU it stays a view of the file."""
        if self.device == "cpu":
            return embedding
        plain = embedding.dequantize() if isinstance(embedding, QuantTensor) else embedding
        return plain.to(self.device, self.torch_dtype)


def in_format(weight: Weight, weights: str) -> Weight:
    """`weight` [N, K] in the format that `LoadOptions.weights` asks for."""
    if weights == "auto":
        return weight
    if weights in FLOAT_FORMATS:
        plain = weight.dequantize() if isinstance(weight, QuantTensor) else weight
        return plain.to(DTYPES[weights])
    if isinstance(weight, QuantTensor):
        return weight if weight.format == weights else quantize(weight.dequantize(), format=weights)
    return quantize(weight, format=weights)
