"""The kinds of parts this release knows: what one offers, how it is made, how it is checked.

The table documents; it does not close the set. A plugin may register any other kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import attrs

from . import protocols

__all__ = ["KINDS", "OP_KINDS", "Kind"]


@attrs.frozen
class Kind:
    """One row of the table."""

    kind: str
    summary: str
    #: What the factory returns offers this.
    protocol: type | None
    #: Keywords the factory is called with.
    keywords: tuple[str, ...]
    #: Keywords that `accepts` is asked with; not every caller knows all of them.
    need: tuple[str, ...] = ()
    #: `"module:attribute"` of the contract check in the test kit.
    check: str | None = None
    #: Chosen by what a checkpoint holds or asks for, not by priority.
    by_content: bool = False


_OP_KEYWORDS = ("device", "dtype", "invariant")
_OP_NEED = ("device", "dtype", "invariant", "head_dim", "page_tokens", "weight_format", "cache_dtype")
_OP_CHECK = "deepinfer.testing:check_op"


def _op(kind: str, summary: str, protocol: type) -> Kind:
    return Kind(kind, summary, protocol, _OP_KEYWORDS, _OP_NEED, _OP_CHECK)


_ROWS = (
    _op("op.rms_norm", "Residual add and root-mean-square norm.", protocols.RmsNormOp),
    _op("op.rope", "Rotary positions on queries and keys.", protocols.RopeOp),
    _op("op.silu_mul", "silu(gate) times up.", protocols.SiluMulOp),
    _op("op.linear", "Packs a weight once, then multiplies by it.", protocols.LinearOp),
    _op("op.cache_write", "Keys and values of a step into their pages.", protocols.CacheWriteOp),
    _op("op.attention", "Causal attention over paged keys and values.", protocols.AttentionOp),
    _op("op.sample", "Argmax of logits and seeded Gumbel noise.", protocols.SampleOp),
    Kind(
        "fused.decoder_layer",
        "A decoder layer in one call; used where all its ops are of the implementation of the same name.",
        protocols.FusedDecoderLayerOp,
        _OP_KEYWORDS,
        _OP_NEED,
    ),
    Kind("scheduler.policy", "Order in which waiting requests are admitted.", protocols.Policy, ()),
    Kind("checkpoint", "Opens a path as a checkpoint.", None, ("path", "progress"), ("path",), by_content=True),
    Kind(
        "model",
        "Builds a model from a checkpoint; its name is the `model_type` of the configuration.",
        protocols.Model,
        ("config", "loader", "bind", "options"),
        by_content=True,
    ),
    Kind(
        "tokenizer",
        "Text to token ids and back.",
        protocols.Tokenizer,
        ("checkpoint",),
        ("checkpoint",),
        by_content=True,
    ),
    Kind(
        "chat_format", "Messages to a prompt.", protocols.ChatFormat, ("checkpoint",), ("checkpoint",), by_content=True
    ),
    Kind("accelerator", "A device type that models are loaded on.", protocols.Accelerator, ()),
)

#: kind to its row.
KINDS: Final[Mapping[str, Kind]] = MappingProxyType({row.kind: row for row in _ROWS})

#: Kinds that a model binds once, when it is loaded.
OP_KINDS: Final = tuple(kind for kind in KINDS if kind.startswith("op."))
