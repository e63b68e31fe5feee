"""Keys of cached pages that leave the process: a SHA-256 chain over tokens and everything else that counts.

The byte layout is public and fixed, so that other programs and languages can make the same keys
(integers are little-endian, `||` is concatenation, Z is the number of tokens of a page):

    root   = SHA256( "deepinfer.page.v1" || u8(len(seed)) || seed || u32(Z) || fields )
    key[i] = SHA256( key[i - 1] || i32[Z] tokens of page i || fields of page i ),  key[-1] = root
    fields = u16(number of fields) || field || field ...      ordered by tag, then as given
    field  = u8(tag) || u32(len(value)) || value

The length before each value keeps neighbouring values apart, and the tag keeps a model name from
passing for a salt. A page's key depends on all pages before it.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import CacheError

__all__ = ["Field", "KeyChain", "Tag", "encode_fields"]

MAGIC = b"deepinfer.page.v1"
KEY_BYTES = 32
NO_FIELDS = b"\x00\x00"


class Tag(enum.IntEnum):
    """What a field says. Numbers are part of the format: never reuse one."""

    MODEL = 1
    """Name and hash of the weights."""
    LAYOUT = 2
    """Fingerprint of the entry formats, layer map and parallel layout."""
    ADAPTER = 3
    """Name and hash of an adapter."""
    IMAGE = 4
    """Hash of an image and the offset of its tokens in the page; one field for each image."""
    SALT = 5
    """The tenant's salt, set by the trusted side."""
    FLOOR = 6
    """First position that a bounded replay computed; such pages never serve an exact request."""
    USER = 7
    """Anything else of the caller's."""


#: Tag and value; text is encoded as UTF-8, integers as 8 signed bytes.
Field = tuple[Tag, bytes | str | int]


def encode_fields(fields: Sequence[Field]) -> bytes:
    """The fields as bytes; two different lists never give the same ones.

    The order of fields with different tags does not matter, that of equal tags does.

    Raises:
        CacheError: a value is not bytes, text or an integer of 64 bits, or is longer than 4 GiB.
    """
    parts = [struct.pack("<H", len(fields))]
    for tag, value in sorted(fields, key=lambda field: field[0]):
        content = _encode_value(Tag(tag), value)
        parts.append(struct.pack("<BI", tag, len(content)))
        parts.append(content)
    return b"".join(parts)


def _encode_value(tag: Tag, value: bytes | str | int) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63:
        return struct.pack("<q", value)
    if isinstance(value, bytes):
        return value
    raise CacheError(f"field {tag.name} is {value!r}; expected bytes, text or a 64-bit integer")


class KeyChain:
    """Makes the keys of pages of one namespace. Immutable; may be used by any thread.

    page_tokens: tokens of a page. fields: what all pages depend on (model, layout, adapter, salt).
    seed: up to 255 bytes that processes which share keys agree on; a secret one keeps outsiders from
    guessing keys.

    Example:
        >>> import numpy as np
        >>> chain = KeyChain(page_tokens=4, fields=[(Tag.MODEL, "tiny")])
        >>> chain.keys(np.arange(9, dtype=np.int32)).shape
        (2, 32)
    """

    def __init__(self, *, page_tokens: int, fields: Sequence[Field] = (), seed: bytes = b"") -> None:
        if page_tokens < 1 or len(seed) > 255:
            raise CacheError(f"page_tokens is {page_tokens}, seed has {len(seed)} bytes; expected >= 1 and <= 255")
        self.page_tokens = page_tokens
        head = MAGIC + bytes([len(seed)]) + seed + struct.pack("<I", page_tokens)
        self.root = hashlib.sha256(head + encode_fields(fields)).digest()

    def keys(
        self,
        token_ids: NDArray[np.int32],
        *,
        parent: bytes | None = None,
        page_fields: Mapping[int, Sequence[Field]] | None = None,
    ) -> NDArray[np.uint8]:
        """Keys [n, 32] u8 of the n whole pages of `token_ids` [L] i32.

        parent: key of the page before the first token, to go on with a chain. page_fields: fields of
        single pages (images, a floor) by page number, counted from the first token given here.
        Cost: one SHA-256 of two blocks for 16 tokens; never needed for lookups inside the process.

        Raises:
            CacheError: tokens are not integers of 32 bits; `parent` is not a key.
        """
        if parent is not None and len(parent) != KEY_BYTES:
            raise CacheError(f"parent has {len(parent)} bytes; expected a key of {KEY_BYTES}")
        packed, step = self._pack(token_ids), 4 * self.page_tokens
        extra = page_fields or {}
        sha256 = hashlib.sha256
        key, found = parent or self.root, []
        for number, start in enumerate(range(0, len(packed), step)):
            fields = encode_fields(extra[number]) if number in extra else NO_FIELDS
            key = sha256(key + packed[start : start + step] + fields).digest()
            found.append(key)
        return np.frombuffer(b"".join(found), np.uint8).reshape(-1, KEY_BYTES)

    def _pack(self, token_ids: NDArray[np.int32]) -> bytes:
        ids = np.asarray(token_ids)
        whole = ids[: len(ids) // self.page_tokens * self.page_tokens]
        if whole.size and (whole.dtype.kind not in "iu" or whole.min() < -(2**31) or whole.max() >= 2**31):
            raise CacheError(f"token_ids are {whole.dtype}; expected integers of 32 bits")
        return whole.astype("<i4").tobytes()
