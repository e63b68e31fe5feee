"""Where a model's tensors come from, and the bookkeeping that every one of them was used."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from ..errors import TensorMismatch

if TYPE_CHECKING:
    from ..kernels.quant import QuantTensor

__all__ = ["DERIVED_BUFFERS", "Loader", "Weight", "WeightSource"]

Weight: TypeAlias = "torch.Tensor | QuantTensor"

#: Buffers that older checkpoints store although the model computes them.
DERIVED_BUFFERS = ("*.rotary_emb.inv_freq", "*.attn.masked_bias", "*.position_ids")

MAX_NAMED = 8


class WeightSource(Protocol):
    """Tensors of a checkpoint by their Hugging Face names; nothing is read before `get`."""

    #: What error messages call it: a path.
    origin: str

    def names(self) -> Sequence[str]: ...
    def shape(self, name: str) -> tuple[int, ...]:
        """Raises TensorMismatch for an unknown name, as `get` does."""
        ...

    def get(self, name: str) -> Weight:
        """A view of the mapped file where the format allows it. Treat it as read-only."""
        ...


class Loader:
    """Hands tensors of a `WeightSource` to a model that is being built, and keeps the books.

    Owned by one loading call; not thread-safe.

    Args:
        source: where the tensors come from.
        progress: show a tqdm bar (if tqdm is installed).

    Example:
        >>> loader = Loader(source, progress=False)
        >>> norm = loader.take("model.norm.weight", (576,))
        >>> loader.finish()
    """

    def __init__(self, source: WeightSource, *, progress: bool = True) -> None:
        self.source = source
        self._left = dict.fromkeys(source.names())
        self._taken: set[str] = set()
        self._bar = _progress_bar(len(self._left)) if progress else None

    def __contains__(self, name: object) -> bool:
        return name in self._left or name in self._taken

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Compare all the shapes a model expects with the files before any tensor is read.

        Raises:
            TensorMismatch: naming every tensor that is missing or has another shape.
        """
        missing = [name for name in shapes if name not in self]
        wrong = [
            f"{name} is {_dims(self.source.shape(name))}, expected {_dims(shape)}"
            for name, shape in shapes.items()
            if name in self and self.source.shape(name) != tuple(shape)
        ]
        self._report({"missing": missing, "of another shape": wrong})

    def take(self, name: str, shape: Sequence[int] | None = None) -> Weight:
        """The tensor `name`, after its shape was compared with `shape`.

        Raises:
            TensorMismatch: it is missing (similar names are listed) or has another shape.
        """
        if name not in self:
            self._close()
            raise TensorMismatch(f"{self.source.origin} has no tensor {name!r}; {self._hint(name)}")
        found = self.source.shape(name)
        if shape is not None and found != tuple(shape):
            self._close()
            raise TensorMismatch(
                f"{self.source.origin}: tensor {name!r} has shape {_dims(found)}; the configuration asks for "
                f"{_dims(shape)}. The configuration and the weights belong to different models"
            )
        weight = self.source.get(name)
        self._mark(name)
        return weight

    def finish(self, *, allow: Iterable[str] = (), tied: Mapping[str, str] | None = None) -> None:
        """Check that nothing of importance was left.

        Args:
            allow: patterns (`*` wildcards) of tensors that may be left, beside `DERIVED_BUFFERS`.
            tied: left-over name to the name it duplicates; allowed only if both hold the same bytes.

        Raises:
            TensorMismatch: naming the tensors that nobody took, or that differ from what they duplicate.
        """
        self._close()
        tied = tied or {}
        patterns = (*DERIVED_BUFFERS, *allow)
        left = [name for name in self._left if not any(fnmatchcase(name, p) for p in patterns)]
        differ = [
            f"{name} differs from {tied[name]}" for name in left if name in tied and not self._same(name, tied[name])
        ]
        self._report({"left over": [name for name in left if name not in tied], "not tied": differ})

    def _same(self, name: str, other: str) -> bool:
        a, b = self.source.get(name), self.source.get(other)
        if not isinstance(a, torch.Tensor):
            a = a.dequantize()
        if not isinstance(b, torch.Tensor):
            b = b.dequantize()
        return a.shape == b.shape and torch.equal(a, b)

    def _mark(self, name: str) -> None:
        if name in self._left:
            del self._left[name]
            self._taken.add(name)
            if self._bar is not None:
                self._bar.update()

    def _hint(self, name: str) -> str:
        similar = difflib.get_close_matches(name, [*self._left, *self._taken], n=3, cutoff=0.75)
        if similar:
            return f"similar names: {', '.join(similar)}"
        return f"it holds {len(self._left) + len(self._taken)} tensors, such as {', '.join(list(self._left)[:3])}"

    def _report(self, groups: Mapping[str, Sequence[str]]) -> None:
        parts = [f"{len(found)} {what}: {_some(found)}" for what, found in groups.items() if found]
        if parts:
            self._close()
            raise TensorMismatch(
                f"{self.source.origin} does not match the model: {'; '.join(parts)}. "
                "Check that config.json belongs to these weights"
            )

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _progress_bar(total: int) -> Any | None:
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return None
    return tqdm(total=total, desc="loading weights", unit="tensor", leave=False)


def _dims(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + rest
