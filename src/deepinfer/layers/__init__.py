"""Blocks of a model, made of ops."""

from __future__ import annotations

from .batch import Batch, RowSet
from .decoder import Attention, DecoderLayer, GatedMlp
from .kv import CacheSpec, KVPool, PagedGroup
from .rope import cos_sin_table, inverse_frequencies

__all__ = [
    "Attention",
    "Batch",
    "CacheSpec",
    "DecoderLayer",
    "GatedMlp",
    "KVPool",
    "PagedGroup",
    "RowSet",
    "cos_sin_table",
    "inverse_frequencies",
]
