"""The bytes that each token id stands for.

Text of a token stream is defined here as the UTF-8 reading of its joined bytes, so that streaming and decoding at
once agree by construction. It equals the `tokenizers` library's own `decode` wherever the bytes are valid UTF-8;
where they are not, that library replaces a whole run of byte tokens, which a stream could only do by taking back
text it has shown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs
from tokenizers import Tokenizer as RustTokenizer

from ..errors import CheckpointError

__all__ = ["ByteRules", "byte_of_char", "read_rules", "token_table"]


@attrs.frozen
class ByteRules:
    """How the decoder of a tokenizer turns tokens into bytes."""

    #: Tokens spell bytes in the printable alphabet of byte-level BPE.
    byte_level: bool = False
    #: `<0x0A>` stands for one byte.
    byte_fallback: bool = False
    #: Texts replaced inside tokens, such as the visible space of SentencePiece.
    replaced: tuple[tuple[str, str], ...] = ()
    #: Spaces dropped at the beginning of a text (which encoding put there).
    strip_left: int = 0


def byte_of_char() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable bytes are themselves, the others follow from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(shifted)}


def read_rules(tokenizer: RustTokenizer, *, origin: str) -> ByteRules:
    """Rules of the tokenizer's decoder.

    Raises:
        CheckpointError: the decoder is of a kind whose tokens have no bytes of their own.
    """
    if tokenizer.decoder is None:
        raise CheckpointError(f"{origin}: the tokenizer has no decoder, so its tokens cannot be turned into text")
    rules = ByteRules()
    for step in _steps(json.loads(tokenizer.decoder.__getstate__())):
        rules = _with_step(rules, step, origin)
    return rules


def _steps(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if spec.get("type") == "Sequence":
        return [inner for part in spec["decoders"] for inner in _steps(part)]
    return [spec]


def _with_step(rules: ByteRules, step: Mapping[str, Any], origin: str) -> ByteRules:
    kind = step.get("type")
    if kind == "ByteLevel":
        return attrs.evolve(rules, byte_level=True)
    if kind == "ByteFallback":
        return attrs.evolve(rules, byte_fallback=True)
    if kind == "Fuse":
        return rules
    if kind == "Replace" and "String" in step["pattern"]:
        return attrs.evolve(rules, replaced=(*rules.replaced, (step["pattern"]["String"], step["content"])))
    if kind == "Metaspace":
        strip = int(step.get("prepend_scheme", "always") != "never")
        return attrs.evolve(rules, replaced=(*rules.replaced, (step["replacement"], " ")), strip_left=strip)
    if kind == "Strip" and step["content"] == " " and not step["stop"]:
        return attrs.evolve(rules, strip_left=step["start"])
    raise CheckpointError(
        f"{origin}: the tokenizer decodes with {kind} {dict(step)}; ByteLevel, Metaspace, ByteFallback, Fuse, Replace "
        "of a string and Strip of leading spaces are known. Register a tokenizer for it"
    )


def token_table(tokenizer: RustTokenizer, rules: ByteRules) -> list[bytes]:
    """Bytes of every id below the vocabulary size; an id without a token has none."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    alphabet = byte_of_char() if rules.byte_level else {}
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        table[token_id] = _bytes_of(token, rules, {} if token_id in added else alphabet)
    return table


def _bytes_of(token: str, rules: ByteRules, alphabet: Mapping[str, int]) -> bytes:
    if alphabet:
        try:
            return bytes([alphabet[char] for char in token])
        except KeyError:
            return token.encode("utf-8")
    if rules.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    for old, new in rules.replaced:
        token = token.replace(old, new)
    return token.encode("utf-8")
