"""From a checkpoint to a model: finds the family in the registry, binds its ops, hands out its tensors."""

from __future__ import annotations

import functools
from pathlib import Path

from ..errors import UnknownModelType, UnknownPart
from ..kernels.ops import bind_ops
from ..kernels.quant import QuantTensor
from ..protocols import Model
from ..registry import Registry, default_registry
from .checkpoint import Checkpoint, open_checkpoint
from .options import LoadOptions
from .weights import Loader

__all__ = ["load_model"]


def load_model(
    checkpoint: Checkpoint | str | Path,
    options: LoadOptions | None = None,
    *,
    registry: Registry | None = None,
    progress: bool = False,
) -> Model:
    """Load a model of any registered family.

    Raises:
        UnknownModelType: no registered model reads this `model_type`.
        CheckpointError: the configuration or a tensor does not fit; the message names it.
        PartUnavailable: no implementation of an op fits this device, type and invariance.
    """
    options = LoadOptions() if options is None else options
    registry = default_registry() if registry is None else registry
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = open_checkpoint(checkpoint, registry=registry)
    model_type = checkpoint.config.get("model_type")
    bind = functools.partial(
        bind_ops,
        device=options.device,
        dtype=options.dtype,
        invariant=options.invariant,
        cache_dtype=options.cache_dtype,
        page_tokens=options.page_tokens,
        weight_format=_weight_format(checkpoint, options),
        want=options.want,
        registry=registry,
    )
    loader = Loader(checkpoint.weights, progress=progress)
    try:
        if not isinstance(model_type, str):
            raise UnknownPart("config.json names no model_type")
        record = registry.select("model", name=model_type)
    except UnknownPart:
        known = ", ".join(sorted({r.name for r in registry.records("model")}))
        raise UnknownModelType(
            f"{checkpoint.path}: model_type is {model_type!r}; registered are {known}. "
            "Register another with a record of kind 'model', see docs/plugins.md"
        ) from None
    return registry.create(record, config=checkpoint.config, loader=loader, bind=bind, options=options)


def _weight_format(checkpoint: Checkpoint, options: LoadOptions) -> str:
    """What most weights will be packed from, so that ops can refuse formats they do not read."""
    if options.weights != "auto":
        return options.weights
    name = next((n for n in checkpoint.weights.names() if n.endswith("_proj.weight")), None)
    if name is None:
        return options.dtype
    weight = checkpoint.weights.get(name)
    return weight.format if isinstance(weight, QuantTensor) else str(weight.dtype).removeprefix("torch.")
