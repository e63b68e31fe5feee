"""The ops a model is made of: their contracts, and how a model binds an implementation of each.

Ops are resolved once, when a model is loaded: its head width, page size and weight format are known then.
Nothing is looked up while a model runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs

from ..errors import ConfigError, PartUnavailable
from ..kinds import KINDS, OP_KINDS
from ..protocols import (
    AttentionOp,
    CacheWriteOp,
    FusedDecoderLayerOp,
    LinearOp,
    RmsNormOp,
    RopeOp,
    SampleOp,
    SiluMulOp,
)
from ..record import Record
from ..registry import Registry, default_registry

__all__ = ["OPS", "OpContract", "Ops", "bind_ops"]


@attrs.frozen
class OpContract:
    """What every implementation of an op promises."""

    kind: str
    #: Tensors in and out with their shapes; letters as in `deepinfer.protocols`.
    shapes: str
    protocol: type
    #: What is allowed and demanded beyond the shapes; `deepinfer.testing.check_op` tests each clause.
    clauses: tuple[str, ...]


_EVERY = ("T may be 0", "inputs are never changed", "out[i] depends on row i and its cached rows only")


def _contract(kind: str, shapes: str, *clauses: str) -> OpContract:
    protocol = KINDS[kind].protocol
    assert protocol is not None, f"{kind} has no protocol"
    return OpContract(kind, shapes, protocol, (*_EVERY, *clauses))


_TABLE = (
    _contract(
        "op.rms_norm",
        "x [T, M], weight [M], residual [T, M] or None -> normed [T, M], x + residual [T, M]",
        "the sum is rounded to x's dtype before the norm reads it",
    ),
    _contract(
        "op.rope",
        "q [T, H, D], k [T, G, D], pos i32 [T], cos_sin f32 [context, D] -> q, k of the same shapes",
        "q and k may be strided views of one tensor",
    ),
    _contract("op.silu_mul", "x [T, 2F] -> [T, F]", "x may be a strided view with contiguous lines"),
    _contract(
        "op.linear",
        "pack(weight [N, K], bias [N] or None); x [T, K] -> [T, N]",
        "pack takes float tensors and kernels.quant.QuantTensor",
    ),
    _contract(
        "op.cache_write",
        "k, v [T, G, D], pools [P, Z, G, D], page_table i32 [S, max pages], rows -> None",
        "only the lines of the tokens change",
        "k and v may be strided views of one tensor",
    ),
    _contract(
        "op.attention",
        "q [T, H, D], pools [P, Z, G, D], page_table i32 [S, max pages], rows -> [T, H, D]",
        "rows may be empty",
        "what lies past a row's last key (NaN, too) and where pages lie has no influence",
        "rows.max_q and rows.max_k are upper bounds",
    ),
    _contract(
        "op.sample",
        "logits f32 [N, K], greedy bool [N], seed i64 [N], sample_index, pos i32 [N], token_ids i64 [N, K] or None"
        " -> ids i64 [N]",
        "exact: the same id on every backend, the lowest column on ties",
    ),
)

#: kind to its contract.
OPS: Final[Mapping[str, OpContract]] = MappingProxyType({row.kind: row for row in _TABLE})


@attrs.frozen(eq=False, kw_only=True)
class Ops:
    """One implementation of each op. Bound for one device, dtype and mode; made by `bind_ops` or by hand."""

    rms_norm: RmsNormOp
    rope: RopeOp
    silu_mul: SiluMulOp
    linear: LinearOp
    cache_write: CacheWriteOp
    attention: AttentionOp
    sample: SampleOp
    #: Runs a whole layer where one implementation brings all its ops and this; None: op by op.
    decoder_layer: FusedDecoderLayerOp | None = None
    #: Op to the name of its implementation, such as {"attention": "triton"}.
    names: Mapping[str, str] = attrs.field(factory=dict, converter=lambda names: MappingProxyType(dict(names)))
    #: What the implementations were asked to serve.
    need: Mapping[str, Any] = attrs.field(factory=dict, converter=lambda need: MappingProxyType(dict(need)))

    def config(self) -> dict[str, Any]:
        """JSON-able: binding again with `want=names` and `need` gives the same ops."""
        return {"names": dict(self.names), "need": dict(self.need)}


def bind_ops(
    *,
    device: Any,
    dtype: Any,
    head_dim: int,
    page_tokens: int,
    weight_format: str = "float",
    cache_dtype: Any = None,
    invariant: bool = False,
    want: Mapping[str, str] | None = None,
    registry: Registry | None = None,
) -> Ops:
    """The best implementation of each op for one model here.

    Args:
        device: device or its name, such as "cuda:0".
        dtype: torch dtype or its name: that of activations.
        head_dim: width D of an attention head.
        page_tokens: tokens Z of a page.
        weight_format: "float", or the format of the quantised weights.
        cache_dtype: torch dtype or its name: that of the keys and values in their pages; None: `dtype`.
        invariant: only implementations whose rows do not depend, bit for bit, on the rest of the batch.
        want: op ("attention" or "op.attention") to the name of the implementation it must be.
        registry: None for the default one.

    Raises:
        ConfigError: `want` names an op that does not exist.
        RegistryError: an op has no (or not the wanted) usable implementation; the message says why.
    """
    registry = default_registry() if registry is None else registry
    need = {
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "invariant": invariant,
        "head_dim": head_dim,
        "page_tokens": page_tokens,
        "weight_format": weight_format,
        "cache_dtype": str(cache_dtype or dtype).removeprefix("torch."),
    }
    wanted = _by_kind(want or {})
    picked = {kind: registry.select(kind, name=wanted.get(kind), need=need) for kind in OP_KINDS}
    _complete_bundles(picked, wanted=wanted, need=need, registry=registry)
    keywords = {key: need[key] for key in ("device", "dtype", "invariant")}
    made = {kind.removeprefix("op."): registry.create(record, **keywords) for kind, record in picked.items()}
    names = {kind.removeprefix("op."): record.name for kind, record in picked.items()}
    fused = _fused_layer(picked.values(), need=need, registry=registry)
    layer = None if fused is None else registry.create(fused, **keywords)
    return Ops(**made, decoder_layer=layer, names=names, need=need)


def _fused_layer(ops: Iterable[Record], *, need: Mapping[str, Any], registry: Registry) -> Record | None:
    """The fused layer of the one implementation that all the ops come from, if it has one."""
    sources = {(record.name, record.dist) for record in ops if record.kind != "op.sample"}
    fused = (r for r in registry.records("fused.decoder_layer") if sources == {(r.name, r.dist)})
    return next((record for record in fused if record.why_not(need) is None), None)


def _by_kind(want: Mapping[str, str]) -> dict[str, str]:
    wanted = {op if op.startswith("op.") else f"op.{op}": name for op, name in want.items()}
    unknown = sorted(set(wanted) - set(OP_KINDS))
    if unknown:
        known = ", ".join(kind.removeprefix("op.") for kind in OP_KINDS)
        raise ConfigError(f"want names {', '.join(unknown)}; expected some of {known}")
    return wanted


def _complete_bundles(
    picked: dict[str, Record], *, wanted: Mapping[str, str], need: Mapping[str, Any], registry: Registry
) -> None:
    """Ops of one bundle share a private layout: take all its members, or replace it by parts that stand alone."""
    for kind in OP_KINDS:
        bundle = picked[kind].bundle
        if bundle is None:
            continue
        members = {
            record.kind: record
            for other in OP_KINDS
            for record in registry.records(other)
            if record.bundle == bundle and record.why_not(need) is None
        }
        offered = {other for other in OP_KINDS if any(r.bundle == bundle for r in registry.records(other))}
        refused = [k for k, name in wanted.items() if k in offered and k in members and name != members[k].name]
        if offered == set(members) and not refused:
            picked.update(members)
        elif kind in wanted:
            missing = ", ".join(sorted((offered - set(members)) | set(refused)))
            raise PartUnavailable(
                f"{picked[kind]} works only together with bundle {bundle!r}, of which {missing} cannot be taken; "
                "want all of its members or none"
            )
        else:
            picked[kind] = _alone(kind, need=need, registry=registry)


def _alone(kind: str, *, need: Mapping[str, Any], registry: Registry) -> Record:
    for record in registry.records(kind):
        if record.bundle is None and record.why_not(need) is None:
            return record
    raise PartUnavailable(f"no {kind} can be used without its bundle; register one, see docs/plugins.md")
