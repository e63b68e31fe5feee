"""Quantised weights [N, K]: what is stored, how floats become it and how it becomes floats again.

| format | group of 32 values along K | bytes | value |
|---|---|---|---|
| q4_0 | f16 d, 16 bytes of nibbles | 18 | d (q - 8), q in 0 ... 15 |
| q4_1 | f16 d, f16 m, 16 bytes of nibbles | 20 | d q + m |
| q8_0 | f16 d, 32 signed bytes | 34 | d q |
| int8 | none: signed bytes, one f32 scale a row | 32 | scale q, q in -127 ... 127 |

The first three are the block formats of GGUF files, byte for byte, so a mapped file is used as it lies. Byte i
of the nibbles holds value i in its low and value i + 16 in its high half.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import attrs
import torch

from ..errors import ConfigError

__all__ = ["BLOCK_BYTES", "FORMATS", "GROUP", "QuantTensor", "cat", "quantize"]

#: Values that share a scale.
GROUP: Final = 32
#: Block format to the bytes of one group.
BLOCK_BYTES: Final = MappingProxyType({"q4_0": 18, "q4_1": 20, "q8_0": 34})
FORMATS: Final = (*BLOCK_BYTES, "int8")


def _planes(planes: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    return MappingProxyType(dict(planes))


@attrs.frozen(eq=False)
class QuantTensor:
    """A quantised matrix [N, K]. Immutable; its planes may be views of a read-only file.

    Planes: `blocks` u8 [N, K / 32 * block bytes], or for int8 `values` i8 [N, K] and `scale` f32 [N].

    Raises:
        ConfigError: unknown format, K no multiple of 32, or planes of another shape.
    """

    format: str
    shape: tuple[int, int]
    planes: Mapping[str, torch.Tensor] = attrs.field(converter=_planes, repr=False)

    def __attrs_post_init__(self) -> None:
        expected = _plane_layout(self.format, *self.shape)
        found = {name: (plane.dtype, tuple(plane.shape)) for name, plane in self.planes.items()}
        if found != expected:
            raise ConfigError(f"planes of a {self.format} tensor {list(self.shape)} are {found}; expected {expected}")

    @classmethod
    def from_blocks(cls, blocks: torch.Tensor, *, format: str) -> QuantTensor:
        """blocks u8 [N, row bytes] in one of the GGUF block formats; nothing is copied.

        Raises:
            ConfigError: not a block format, or rows that hold no whole number of blocks.
        """
        size = BLOCK_BYTES.get(format)
        if size is None or blocks.shape[-1] % size:
            raise ConfigError(
                f"rows of {blocks.shape[-1]} bytes are no {format} blocks; block bytes: {dict(BLOCK_BYTES)}"
            )
        return cls(format, (blocks.shape[0], blocks.shape[1] // size * GROUP), {"blocks": blocks})

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes.values())

    def dequantize(self) -> torch.Tensor:
        """f32 [N, K]."""
        return _DEQUANTIZE[self.format](self.planes)

    def gather(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Rows `row_ids` (integer [T]) as f32 [T, K]; the rest of the table stays as it is."""
        return self.take_rows(row_ids).dequantize()

    def take_rows(self, row_ids: torch.Tensor) -> QuantTensor:
        """The quantised rows `row_ids` (integer [T]), in that order."""
        planes = {name: plane.index_select(0, row_ids) for name, plane in self.planes.items()}
        return QuantTensor(self.format, (len(row_ids), self.shape[1]), planes)

    def block_parts(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Scales d f16 [N, K / 32], minimums m f16 of that shape (q4_1 only) and codes u8 [N, K / 32, 16 or 32]."""
        return _split_blocks(self.format, self.planes["blocks"])


def cat(weights: Sequence[QuantTensor]) -> QuantTensor:
    """Rows of several matrices of one format and width below each other; no value changes.

    Raises:
        ConfigError: nothing given, or formats or widths differ.
    """
    kinds = {(w.format, w.shape[1]) for w in weights}
    if len(kinds) != 1:
        raise ConfigError(f"cannot join quantised weights of {sorted(kinds)}; expected one format and one width")
    ((name, width),) = kinds
    planes = {key: torch.cat([w.planes[key] for w in weights]) for key in weights[0].planes}
    return QuantTensor(name, (sum(w.shape[0] for w in weights), width), planes)


def quantize(weight: torch.Tensor, *, format: str) -> QuantTensor:
    """weight float [N, K] -> the nearest codes under each group's (row's) scale, as ggml's reference picks them.

    Raises:
        ConfigError: unknown format or K no multiple of 32.
    """
    _plane_layout(format, *weight.shape)
    planes = _QUANTIZE[format](weight.float())
    return QuantTensor(format, (weight.shape[0], weight.shape[1]), planes)


def _plane_layout(format: str, num_rows: int, width: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    if format not in FORMATS:
        raise ConfigError(f"weight format is {format!r}; expected one of {', '.join(FORMATS)}")
    if width % GROUP:
        raise ConfigError(
            f"a {format} row has {width} values; expected a multiple of {GROUP}. Keep this weight in a float type"
        )
    if format == "int8":
        return {"values": (torch.int8, (num_rows, width)), "scale": (torch.float32, (num_rows,))}
    return {"blocks": (torch.uint8, (num_rows, width // GROUP * BLOCK_BYTES[format]))}


def _split_blocks(format: str, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    size = BLOCK_BYTES[format]
    parts = blocks.view(blocks.shape[0], blocks.shape[1] // size, size)
    head = 4 if format == "q4_1" else 2
    halves = parts[..., :head].contiguous().view(torch.float16)
    return halves[..., 0], halves[..., 1] if head == 4 else None, parts[..., head:]


def _join_blocks(heads: Sequence[torch.Tensor], codes: torch.Tensor) -> dict[str, torch.Tensor]:
    """heads f32 [N, K / 32], codes u8 [N, K / 32, bytes] -> the plane of blocks."""
    scales = torch.stack(list(heads), dim=-1).to(torch.float16).view(torch.uint8)
    return {"blocks": torch.cat((scales, codes), dim=-1).flatten(1)}


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    return torch.cat((codes & 15, codes >> 4), dim=-1).float()


def _from_q4_0(planes: Mapping[str, torch.Tensor]) -> torch.Tensor:
    d, _, codes = _split_blocks("q4_0", planes["blocks"])
    return ((_nibbles(codes) - 8) * d.float()[..., None]).flatten(1)


def _from_q4_1(planes: Mapping[str, torch.Tensor]) -> torch.Tensor:
    d, m, codes = _split_blocks("q4_1", planes["blocks"])
    assert m is not None, "q4_1 blocks hold a minimum"
    return (_nibbles(codes) * d.float()[..., None] + m.float()[..., None]).flatten(1)


def _from_q8_0(planes: Mapping[str, torch.Tensor]) -> torch.Tensor:
    d, _, codes = _split_blocks("q8_0", planes["blocks"])
    return (codes.view(torch.int8).float() * d.float()[..., None]).flatten(1)


def _from_int8(planes: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return planes["values"].float() * planes["scale"][:, None]


def _inverse(d: torch.Tensor) -> torch.Tensor:
    return torch.where(d == 0, 0.0, 1.0 / d)


def _pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Whole numbers 0 ... 15, float [N, K / 32, 32] -> u8 [N, K / 32, 16]."""
    low, high = codes.to(torch.uint8).split(GROUP // 2, dim=-1)
    return low | high << 4


def _to_q4_0(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The value of largest magnitude becomes code 0, which reaches one step further than 15."""
    groups = weight.view(weight.shape[0], -1, GROUP)
    peak = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]
    d = peak / -8
    codes = (groups * _inverse(d)[..., None] + 8.5).clamp(0, 15).floor()
    return _join_blocks([d], _pack_nibbles(codes))


def _to_q4_1(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    groups = weight.view(weight.shape[0], -1, GROUP)
    low, high = groups.aminmax(dim=-1)
    d = (high - low) / 15
    codes = ((groups - low[..., None]) * _inverse(d)[..., None] + 0.5).clamp(0, 15).floor()
    return _join_blocks([d, low], _pack_nibbles(codes))


def _to_q8_0(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    groups = weight.view(weight.shape[0], -1, GROUP)
    d = groups.abs().amax(-1) / 127
    scaled = groups * _inverse(d)[..., None]
    codes = (scaled.abs() + 0.5).floor().copysign(scaled)
    return _join_blocks([d], codes.clamp(-127, 127).to(torch.int8).view(torch.uint8))


def _to_int8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.abs().amax(1) / 127
    codes = (weight * _inverse(scale)[:, None]).round().clamp(-127, 127)
    return {"values": codes.to(torch.int8), "scale": scale}


_DEQUANTIZE: Final[Mapping[str, Callable[[Mapping[str, torch.Tensor]], torch.Tensor]]] = MappingProxyType(
    {"q4_0": _from_q4_0, "q4_1": _from_q4_1, "q8_0": _from_q8_0, "int8": _from_int8}
)
_QUANTIZE: Final[Mapping[str, Callable[[torch.Tensor], dict[str, torch.Tensor]]]] = MappingProxyType(
    {"q4_0": _to_q4_0, "q4_1": _to_q4_1, "q8_0": _to_q8_0, "int8": _to_int8}
)
