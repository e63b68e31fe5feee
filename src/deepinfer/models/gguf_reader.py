"""Reads the container format GGUF, versions 2 and 3: typed metadata and the place of every tensor.

Source: the GGUF specification in the ggml repository (docs/gguf.md). Every length in a file is compared with the
bytes that are left before anything of that size is made, so that a hostile file fails at once.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import attrs
import numpy as np

from ..errors import CheckpointError, MalformedFile
from .mapping import map_file

__all__ = ["GGML_TYPES", "GgmlType", "GgufFile", "TensorInfo"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT, MAX_ALIGNMENT = 32, 2**16
MAX_DIMS = 4
MAX_ARRAY_DEPTH = 4
#: Far above real files (about 60 keys, 300,000 vocabulary entries), far below what takes seconds.
#: MAX_ITEMS counts strings and nested arrays of all metadata together.
MAX_KEYS, MAX_TENSORS, MAX_ITEMS = 65_536, 1_000_000, 4_000_000

SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
BOOL, STRING, ARRAY = 7, 8, 9


@attrs.frozen
class GgmlType:
    """A tensor type: `block_len` values take `block_bytes` bytes."""

    name: str
    block_len: int
    block_bytes: int


#: Type number in the file to what is known of it.
GGML_TYPES: Mapping[int, GgmlType] = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    9: GgmlType("Q8_1", 32, 36),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    15: GgmlType("Q8_K", 256, 292),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136),
    24: GgmlType("I8", 1, 1),
    25: GgmlType("I16", 1, 2),
    26: GgmlType("I32", 1, 4),
    27: GgmlType("I64", 1, 8),
    28: GgmlType("F64", 1, 8),
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2),
    34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17),
}


@attrs.frozen
class TensorInfo:
    """Where a tensor lies. `shape` is in row-major order, the reverse of the file's."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    #: From the beginning of the file.
    offset: int
    #: None for a type this reader does not know the size of.
    num_bytes: int | None

    @property
    def type_name(self) -> str:
        known = GGML_TYPES.get(self.type_id)
        return known.name if known is not None else f"number {self.type_id}"


class GgufFile:
    """Metadata and tensor places of a mapped file. Immutable after opening.

    `metadata` values are int, float, bool, str, numpy arrays (numbers, bools) or lists (strings, arrays).

    Raises:
        CheckpointError: the file cannot be opened, or is of another version or byte order.
        MalformedFile: its bytes contradict the format; the message names the file and the place.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.mapped = map_file(self.path)
        cursor = _Cursor(self.path, self.mapped)
        self.version = _version(cursor)
        num_tensors = cursor.count(24, MAX_TENSORS, "tensor count")
        num_keys = cursor.count(13, MAX_KEYS, "metadata count")
        self.metadata = _read_metadata(cursor, num_keys)
        self.alignment = _alignment(cursor, self.metadata)
        self.tensors = _read_tensors(cursor, num_tensors, self.alignment)

    def raw(self, info: TensorInfo) -> np.ndarray:
        """The bytes of a tensor, u8 [num_bytes], as a view of the mapping."""
        assert info.num_bytes is not None
        return np.frombuffer(self.mapped, dtype=np.uint8, count=info.num_bytes, offset=info.offset)


class _Cursor:
    """A position in the file that only moves after the bytes were seen to be there."""

    def __init__(self, path: Path, mapped: Any) -> None:
        self.path, self.mapped, self.size, self.at = path, mapped, len(mapped), 0
        self._items_left = MAX_ITEMS

    def fail(self, what: str) -> NoReturn:
        raise MalformedFile(f"{self.path}, byte {self.at}: {what}; the file is damaged, fetch it again")

    def scalar(self, code: str) -> Any:
        width = struct.calcsize(code)
        if self.at + width > self.size:
            self.fail(f"{width} bytes expected, the file ends after {self.size - self.at}")
        (value,) = struct.unpack_from(code, self.mapped, self.at)
        self.at += width
        return value

    def count(self, least_bytes: int, limit: int, what: str) -> int:
        """A u64 that counts things of at least `least_bytes` bytes each."""
        value = self.scalar("<Q")
        if value > limit or value * least_bytes > self.size - self.at:
            self.fail(f"{what} is {value}, but {self.size - self.at} bytes are left (limit {limit})")
        return value

    def string(self) -> str:
        length = self.count(1, self.size, "string length")
        raw = self.mapped[self.at : self.at + length]
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"a string is not UTF-8: {error.reason}")
        self.at += length
        return text

    def numbers(self, dtype: str) -> np.ndarray:
        width = np.dtype(dtype).itemsize
        length = self.count(width, self.size, "array length")
        found = np.frombuffer(self.mapped, dtype=dtype, count=length, offset=self.at)
        self.at += length * width
        return found

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in SCALARS:
            return self.scalar(STRUCT_CODES[kind])
        if kind == BOOL:
            return self.boolean(self.scalar("<B"))
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            self.fail(f"unknown value type {kind}")
        return self.array(depth)

    def boolean(self, value: int) -> bool:
        if value > 1:
            self.fail(f"a bool is {value}, expected 0 or 1")
        return bool(value)

    def array(self, depth: int) -> np.ndarray | list[Any]:
        if depth == MAX_ARRAY_DEPTH:
            self.fail(f"arrays are nested more than {MAX_ARRAY_DEPTH} deep")
        kind = self.scalar("<I")
        if kind in SCALARS:
            return self.numbers(SCALARS[kind])
        if kind == BOOL:
            bits = self.numbers("<u1")
            if bits.size and bits.max() > 1:
                self.fail("an array of bools holds another value than 0 and 1")
            return bits.astype(np.bool_)
        if kind not in (STRING, ARRAY):
            self.fail(f"unknown array element type {kind}")
        length = self.count(8 if kind == STRING else 12, self._items_left, "array length")
        self._items_left -= length
        if kind == STRING:
            return [self.string() for _ in range(length)]
        return [self.array(depth + 1) for _ in range(length)]


STRUCT_CODES = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q", 12: "<d"}


def _version(cursor: _Cursor) -> int:
    magic = bytes(cursor.mapped[:4])
    if magic != MAGIC:
        cursor.fail(f"the file begins with {magic!r}, expected {MAGIC!r}")
    cursor.at = 4
    version = cursor.scalar("<I")
    if version in VERSIONS:
        return version
    if version and version & 0xFFFF == 0:
        raise CheckpointError(f"{cursor.path} is a big-endian GGUF file; only little-endian ones are read")
    raise CheckpointError(f"{cursor.path} is GGUF version {version}; versions 2 and 3 are read. Convert it again")


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        if key in found:
            cursor.fail(f"metadata key {key[:80]!r} appears twice")
        found[key] = cursor.value(cursor.scalar("<I"))
    return found


def _alignment(cursor: _Cursor, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is not int or not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
        cursor.fail(f"general.alignment is {str(value)[:80]}, expected a power of two up to {MAX_ALIGNMENT}")
    return value


def _read_tensors(cursor: _Cursor, num_tensors: int, alignment: int) -> dict[str, TensorInfo]:
    infos = [_read_info(cursor) for _ in range(num_tensors)]
    start = -(-cursor.at // alignment) * alignment
    found: dict[str, TensorInfo] = {}
    for info in infos:
        if info.name in found:
            cursor.fail(f"tensor {info.name!r} appears twice")
        if info.offset % alignment:
            cursor.fail(f"tensor {info.name!r} begins at {info.offset}, which is no multiple of {alignment}")
        found[info.name] = attrs.evolve(info, offset=start + info.offset)
    _check_layout(cursor, found)
    return found


def _read_info(cursor: _Cursor) -> TensorInfo:
    name = cursor.string()
    num_dims = cursor.scalar("<I")
    if not 1 <= num_dims <= MAX_DIMS:
        cursor.fail(f"tensor {name[:80]!r} has {num_dims} dimensions, expected 1 to {MAX_DIMS}")
    dims = [cursor.scalar("<Q") for _ in range(num_dims)]
    type_id, offset = cursor.scalar("<I"), cursor.scalar("<Q")
    if not all(dims) or math.prod(dims) >= 2**60:
        cursor.fail(f"tensor {name[:80]!r} has dimensions {dims}")
    return TensorInfo(name, tuple(reversed(dims)), type_id, offset, _num_bytes(cursor, name, dims, type_id))


def _num_bytes(cursor: _Cursor, name: str, dims: list[int], type_id: int) -> int | None:
    known = GGML_TYPES.get(type_id)
    if known is None:
        return None
    if dims[0] % known.block_len:
        cursor.fail(
            f"tensor {name[:80]!r} has rows of {dims[0]}, no multiple of the {known.block_len} of a {known.name} block"
        )
    return math.prod(dims) // known.block_len * known.block_bytes


def _check_layout(cursor: _Cursor, tensors: Mapping[str, TensorInfo]) -> None:
    end, before = 0, ""
    for info in sorted(tensors.values(), key=lambda i: i.offset):
        if info.offset + (info.num_bytes or 0) > cursor.size:
            cursor.fail(
                f"tensor {info.name!r} ends at byte {info.offset + (info.num_bytes or 0)}, the file at {cursor.size}"
            )
        if info.offset < end:
            cursor.fail(f"tensor {info.name!r} begins at byte {info.offset}, inside tensor {before!r}")
        end, before = info.offset + (info.num_bytes or 0), info.name
