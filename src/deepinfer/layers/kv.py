"""The tensors behind the pages: what a model's layers own, and the pool that holds it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np
import torch

from ..errors import ConfigError
from ..plan import Move
from ..transfer import to_device

__all__ = ["CacheSpec", "KVPool", "PagedGroup"]


@attrs.frozen
class PagedGroup:
    """Entries that grow with the context, one per token and owning layer: a key and a value."""

    name: str
    #: Layers that own storage in this group, in order.
    owners: tuple[int, ...]
    num_heads: int
    head_dim: int

    @property
    def elements_per_token(self) -> int:
        return 2 * len(self.owners) * self.num_heads * self.head_dim


@attrs.frozen
class CacheSpec:
    """What one sequence of a model needs to remember."""

    groups: tuple[PagedGroup, ...]

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return sum(g.elements_per_token for g in self.groups) * dtype.itemsize


class KVPool:
    """Key and value pages of every layer. P pages of Z tokens, G heads of width D.

    Owned by one executor; not thread-safe. Page 0 is padding: writes to it are allowed and never read.
    """

    def __init__(
        self, spec: CacheSpec, *, num_pages: int, page_tokens: int, dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        if num_pages < 2 or page_tokens < 1:
            raise ConfigError(
                f"num_pages is {num_pages}, page_tokens {page_tokens}; expected >= 2 (page 0 pads) and >= 1"
            )
        self.spec = spec
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self._device = device
        self._pools: dict[int, torch.Tensor] = {}
        for group in spec.groups:
            shape = (2, num_pages, page_tokens, group.num_heads, group.head_dim)
            for layer in group.owners:
                self._pools[layer] = _zeros(shape, dtype, device)
        self._layers = {layer: (pool[0], pool[1]) for layer, pool in self._pools.items()}

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value pools [P, Z, G, D] of one layer."""
        return self._layers[index]

    def copy_pages(self, moves: Sequence[Move]) -> None:
        """Copy whole pages, all layers; sources are read before any is written."""
        if not moves:
            return
        src, dst = to_device(np.array([(m.src, m.dst) for m in moves]).T, self._device)
        for pool in self._pools.values():
            pool[:, dst] = pool[:, src]

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self._pools.values())


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """On the host from numpy, whose zeros are untouched memory: it is used only as pages are written."""
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
