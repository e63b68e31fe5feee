"""Every exception deepinfer raises on purpose.

    DeepInferError
    ├── RequestError                one request is at fault; the engine goes on serving the others
    │   ├── InvalidRequest          a value of the request is wrong (empty prompt, token id out of range, ...)
    │   ├── ContextLengthExceeded   prompt (plus forced tokens) does not fit the context or the cache
    │   ├── UnsupportedOption       the request asks for something this composition cannot honour
    │   ├── ChatTemplateError       the chat template failed, looped or reached for something forbidden
    │   ├── NumericalError          the model produced NaN for this request
    │   └── StepFailed              the model raised while this request was in the batch
    ├── ConfigError                 a part was composed with values that do not fit together
    ├── RegistryError
    │   ├── UnknownPart             nothing of that kind or name is registered
    │   ├── PartUnavailable         it is registered, but cannot be used here (with the reason)
    │   └── NameClash               two distributions registered the same kind and name
    ├── CheckpointError             a checkpoint cannot be used as it is
    │   ├── MalformedFile           the bytes of a file contradict its format
    │   ├── TensorMismatch          a tensor is missing, left over or of another shape
    │   └── UnknownModelType        no registered model reads this configuration
    └── CacheError
        ├── OutOfPages              the page pool cannot give what was asked for
        └── LeaseError              a page or lease was used against its contract

A message says what happened with the actual value, what was expected and what to do.
"""

from __future__ import annotations

__all__ = [
    "CacheError",
    "ChatTemplateError",
    "CheckpointError",
    "ConfigError",
    "ContextLengthExceeded",
    "DeepInferError",
    "InvalidRequest",
    "LeaseError",
    "MalformedFile",
    "NameClash",
    "NumericalError",
    "OutOfPages",
    "PartUnavailable",
    "RegistryError",
    "RequestError",
    "StepFailed",
    "TensorMismatch",
    "UnknownModelType",
    "UnknownPart",
    "UnsupportedOption",
]


class DeepInferError(Exception):
    """Base of all errors of this library."""


class RequestError(DeepInferError):
    """One request is at fault; nothing else is lost."""


class InvalidRequest(RequestError, ValueError):
    """A value of the request is wrong."""


class ContextLengthExceeded(InvalidRequest):
    """The prompt does not fit the model's context or the cache."""


class UnsupportedOption(RequestError):
    """The request asks for something this composition cannot honour."""


class ChatTemplateError(RequestError):
    """The chat template failed, ran past its limits or reached for something forbidden."""


class NumericalError(RequestError):
    """The model produced NaN for this request."""


class StepFailed(RequestError):
    """The model raised while this request was in the batch."""


class ConfigError(DeepInferError, ValueError):
    """A part was composed with values that do not fit together."""


class RegistryError(DeepInferError):
    """Something about finding a part by kind and name."""


class UnknownPart(RegistryError, LookupError):
    """Nothing of that kind or name is registered."""


class PartUnavailable(RegistryError):
    """The part is registered but cannot be used here."""


class NameClash(RegistryError):
    """Two distributions registered the same kind and name."""


class CheckpointError(DeepInferError):
    """A checkpoint cannot be used as it is."""


class MalformedFile(CheckpointError, ValueError):
    """The bytes of a file contradict its format."""


class TensorMismatch(CheckpointError):
    """A tensor is missing, left over or of another shape than the configuration says."""


class UnknownModelType(CheckpointError, LookupError):
    """No registered model reads this configuration."""


class CacheError(DeepInferError):
    """Something about pages or the prefix index."""


class OutOfPages(CacheError):
    """The page pool cannot give what was asked for."""


class LeaseError(CacheError):
    """A page or lease was used against its contract."""
