"""The default engine: parts composed, requests in, outputs out."""

from .admission import Limits
from .async_engine import AsyncEngine
from .compose import compose
from .composition import Composition
from .engine import Engine
from .executor import ModelExecutor
from .llm import LLM
from .metrics import EngineMetrics
from .stops import StopMatcher

__all__ = [
    "LLM",
    "AsyncEngine",
    "Composition",
    "Engine",
    "EngineMetrics",
    "Limits",
    "ModelExecutor",
    "StopMatcher",
    "compose",
]
