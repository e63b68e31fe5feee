"""Bookkeeping of paged keys and values: pages, prefixes, keys. Imports numpy only and works alone."""

from __future__ import annotations

from .book import CacheStats, NullBook, PagedBook
from .keys import Field, KeyChain, Tag, encode_fields
from .leases import Lease, LeaseTable
from .pages import PagePool, PageState, PoolStats
from .prefix import Insertion, MissReason, PrefixIndex, PrefixMatch

__all__ = [
    "CacheStats",
    "Field",
    "Insertion",
    "KeyChain",
    "Lease",
    "LeaseTable",
    "MissReason",
    "NullBook",
    "PagePool",
    "PageState",
    "PagedBook",
    "PoolStats",
    "PrefixIndex",
    "PrefixMatch",
    "Tag",
    "encode_fields",
]
