"""Reads safetensors files, single and sharded: mapped, lazy, and strict about the header.

Format: an 8-byte little-endian header length, a JSON header of `name: {dtype, shape, data_offsets}`, then the
bytes of all tensors without gaps or overlaps (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NoReturn

import attrs
import torch

from ..errors import CheckpointError, MalformedFile, TensorMismatch
from .mapping import map_file

__all__ = ["SafetensorsFile", "ShardedSafetensors", "open_safetensors"]

#: The format's own limit on the header.
MAX_HEADER_BYTES = 100_000_000
MAX_DIMS = 16
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@attrs.frozen
class _Entry:
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """A `WeightSource` over one file. Immutable after opening; safe to share between threads.

    Raises:
        CheckpointError: the file cannot be opened or has a dtype this reader does not know.
        MalformedFile: the header contradicts the format or the file's length; names file and tensor.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.origin = str(path)
        self._map = map_file(self.path)
        header, self._start = _read_header(self.path, self._map)
        self.metadata = _metadata(self.path, header.pop("__metadata__", {}))
        self._entries = {name: _entry(self.path, name, fields) for name, fields in header.items()}
        _check_layout(self.path, self._entries, len(self._map) - self._start)

    def names(self) -> Sequence[str]:
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def get(self, name: str) -> torch.Tensor:
        """A view of the file; copied only if the file stores it at an address its dtype cannot use."""
        entry = self._entry(name)
        if entry.begin == entry.end:
            return torch.empty(entry.shape, dtype=entry.dtype)
        offset, size = self._start + entry.begin, entry.end - entry.begin
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=offset)
        if offset % entry.dtype.itemsize:
            raw = raw.clone()
        return raw.view(entry.dtype).view(entry.shape)

    def _entry(self, name: str) -> _Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise TensorMismatch(f"{self.path} has no tensor {name!r}; it holds {len(self._entries)} others") from None


class ShardedSafetensors:
    """A `WeightSource` over the shards that an index file names.

    Raises:
        CheckpointError: a shard is missing.
        MalformedFile: the index is not one, leaves its folder, or names tensors its shards do not hold.
    """

    def __init__(self, index: str | Path) -> None:
        self.path = Path(index)
        self.origin = str(self.path.parent)
        weight_map = _read_index(self.path)
        self._shards = {file: self._open(file) for file in dict.fromkeys(weight_map.values())}
        self._home = {name: self._shards[file] for name, file in weight_map.items()}
        self._check(weight_map)
        # A tensor that the index forgot is still offered: the model says whether it is left over.
        for shard in self._shards.values():
            for name in shard.names():
                self._home.setdefault(name, shard)

    def names(self) -> Sequence[str]:
        return tuple(self._home)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shard(name).shape(name)

    def get(self, name: str) -> torch.Tensor:
        return self._shard(name).get(name)

    def _shard(self, name: str) -> SafetensorsFile:
        try:
            return self._home[name]
        except KeyError:
            raise TensorMismatch(f"{self.path} has no tensor {name!r}; it names {len(self._home)} others") from None

    def _open(self, file: str) -> SafetensorsFile:
        path = self.path.parent / file
        if not path.is_file():
            raise CheckpointError(
                f"{self.path} names the shard {file!r}, which is not there; fetch the checkpoint again"
            )
        return SafetensorsFile(path)

    def _check(self, weight_map: Mapping[str, str]) -> None:
        held = {file: set(shard.names()) for file, shard in self._shards.items()}
        absent = [f"{name} (in {file})" for name, file in weight_map.items() if name not in held[file]]
        if absent:
            raise MalformedFile(
                f"{self.path} names {len(absent)} tensors that its shards do not hold: {', '.join(absent[:4])}; "
                "index and shards belong to different checkpoints"
            )


def open_safetensors(path: str | Path) -> SafetensorsFile | ShardedSafetensors:
    """A file, an index file or a folder that holds `model.safetensors` or `model.safetensors.index.json`.

    Raises:
        CheckpointError: there is none; also as the two classes.
    """
    path = Path(path)
    if path.is_dir():
        found = next((path / name for name in (SINGLE, INDEX) if (path / name).is_file()), None)
        if found is None:
            raise CheckpointError(f"{path} holds neither {SINGLE} nor {INDEX}; {_other_weights(path)}")
        path = found
    return ShardedSafetensors(path) if path.name.endswith(".index.json") else SafetensorsFile(path)


def _other_weights(folder: Path) -> str:
    pickled = sorted(p.name for p in folder.glob("*.bin"))
    if pickled:
        return f"{pickled[0]} is a pickle, which is never loaded; convert it to safetensors"
    return "put the weights beside config.json"


def _fail(path: Path, what: str) -> NoReturn:
    raise MalformedFile(f"{path}: {what}; the file is damaged or not safetensors, fetch it again")


def _read_header(path: Path, mapped: Any) -> tuple[dict[str, Any], int]:
    size = len(mapped)
    if size < 8:
        _fail(path, f"{size} bytes are too few for the 8-byte header length")
    length = int.from_bytes(mapped[:8], "little")
    if length > min(MAX_HEADER_BYTES, size - 8):
        _fail(path, f"the header says it is {length} bytes long, but only {size - 8} follow (limit {MAX_HEADER_BYTES})")
    try:
        header = json.loads(mapped[8 : 8 + length].decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        _fail(path, f"the header is not valid JSON: {error}")
    if not isinstance(header, dict):
        _fail(path, f"the header is a JSON {type(header).__name__}, expected an object")
    return header, 8 + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"key {twice!r} appears more than once")
    return found


def _metadata(path: Path, value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        _fail(path, "__metadata__ is not an object of strings")
    return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _entry(path: Path, name: str, fields: Any) -> _Entry:
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        _fail(path, f"tensor {name!r} is not described by dtype, shape and data_offsets")
    shape, offsets = fields["shape"], fields["data_offsets"]
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(map(_is_count, shape)):
        _fail(path, f"tensor {name!r} has shape {str(shape)[:80]}; expected at most {MAX_DIMS} non-negative integers")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        _fail(path, f"tensor {name!r} has data_offsets {str(offsets)[:80]}; expected two non-negative integers")
    dtype = _dtype(path, name, fields["dtype"])
    begin, end = offsets
    # The product over the non-zero widths guards torch against overflow where one width is zero.
    if math.prod(d for d in shape if d) >= 2**60 or math.prod(shape) * dtype.itemsize != end - begin:
        _fail(path, f"tensor {name!r} of shape {shape} and dtype {fields['dtype']} does not take {end - begin} bytes")
    return _Entry(dtype, tuple(shape), begin, end)


def _dtype(path: Path, name: str, code: Any) -> torch.dtype:
    if not isinstance(code, str):
        _fail(path, f"tensor {name!r} has dtype {str(code)[:80]}; expected a string")
    if code not in DTYPES:
        raise CheckpointError(
            f"{path}: tensor {name!r} has dtype {code[:40]!r}; known are {', '.join(DTYPES)}. Convert the checkpoint"
        )
    return DTYPES[code]


def _check_layout(path: Path, entries: Mapping[str, _Entry], size: int) -> None:
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.end > size:
            _fail(path, f"tensor {name!r} ends at byte {entry.end} of {size}")
        if entry.begin != at:
            what = "overlaps the tensor before it" if entry.begin < at else "leaves a gap before it"
            _fail(path, f"tensor {name!r} begins at byte {entry.begin}, expected {at}: it {what}")
        at = entry.end
    if at != size:
        _fail(path, f"{size - at} bytes follow the last tensor")


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_text("utf-8"), object_pairs_hook=_unique)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise MalformedFile(f"{path} is not valid JSON: {error}; fetch the checkpoint again") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise MalformedFile(f"{path} has no weight_map of tensor names to file names; fetch the checkpoint again")
    for name, file in weight_map.items():
        if file in ("", ".", "..") or PurePosixPath(file).name != file or PureWindowsPath(file).name != file:
            raise MalformedFile(f"{path} puts tensor {name!r} into {file!r}; expected a file name in the same folder")
    return weight_map
