"""Building blocks for LLM inference.

Names are loaded on first use, so that `import deepinfer` costs no torch. The parts:

    deepinfer.LLM             texts in, texts out
    deepinfer.Engine          add requests, step, stream
    deepinfer.schedulers      who computes what in the next step
    deepinfer.cache           pages of keys and values, shared prefixes
    deepinfer.sampling        logits to tokens
    deepinfer.kernels         ops, and what runs them here
    deepinfer.models          checkpoints, tokenizers, chat formats
    deepinfer.registry        everything replaceable, by kind and name
"""

from __future__ import annotations

# Type checkers know this name; importing it from `typing` would cost more than everything else here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from . import cache, engine, errors, kernels, layers, models, registry, sampling, schedulers, testing
    from .accelerator import choose_accelerator
    from .cache import PagedBook
    from .engine import LLM, AsyncEngine, Composition, Engine
    from .environment import load_environment
    from .kernels import bind_ops
    from .models import load_model, open_checkpoint
    from .record import Record
    from .registry import Registry, default_registry
    from .sampling import Sampler
    from .schedulers import Scheduler, StepLoop
    from .types import Completion, FinishReason, Request, RequestOutput, SamplingParams, TokenLogprob

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngine",
    "Completion",
    "Composition",
    "Engine",
    "FinishReason",
    "PagedBook",
    "Record",
    "Registry",
    "Request",
    "RequestOutput",
    "Sampler",
    "SamplingParams",
    "Scheduler",
    "StepLoop",
    "TokenLogprob",
    "__version__",
    "bind_ops",
    "cache",
    "choose_accelerator",
    "default_registry",
    "engine",
    "errors",
    "kernels",
    "layers",
    "load_environment",
    "load_model",
    "models",
    "open_checkpoint",
    "registry",
    "sampling",
    "schedulers",
    "testing",
]

_HOMES = {
    "LLM": "engine",
    "AsyncEngine": "engine",
    "Completion": "types",
    "Composition": "engine",
    "Engine": "engine",
    "FinishReason": "types",
    "PagedBook": "cache",
    "Record": "record",
    "Registry": "registry",
    "Request": "types",
    "RequestOutput": "types",
    "Sampler": "sampling",
    "SamplingParams": "types",
    "Scheduler": "schedulers",
    "StepLoop": "schedulers",
    "TokenLogprob": "types",
    "bind_ops": "kernels",
    "choose_accelerator": "accelerator",
    "default_registry": "registry",
    "load_environment": "environment",
    "load_model": "models",
    "open_checkpoint": "models",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    if name not in _HOMES:
        return import_module(f"{__name__}.{name}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
