"""Turns a stream of tokens into text that never has to be taken back."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

__all__ = ["ByteTokens", "Detokenizer"]


class ByteTokens(Protocol):
    """What a detokenizer needs of a tokenizer."""

    @property
    def strip_left(self) -> int: ...
    @property
    def special_ids(self) -> frozenset[int]: ...
    def token_bytes(self, token_id: int) -> bytes: ...


class Detokenizer:
    """Incremental decoding of one stream. Owned by that stream; not thread-safe.

    All that was pushed and flushed, joined, equals `decode` of the whole stream, for any ids. `push` holds back
    only the bytes of an unfinished character (at most three), so a replacement character is final when it comes.

    Args:
        tokenizer: gives each token's bytes.
        skip_special_tokens: special tokens add no text.
        prefix_ids: tokens that come before the stream (the end of a prompt): their text is not repeated, but a
            character begun there is finished here, and a leading space after it is kept.

    Example:
        >>> stream = tokenizer.detokenizer()
        >>> text = "".join(stream.push(i) for i in ids) + stream.flush()
    """

    def __init__(
        self, tokenizer: ByteTokens, *, skip_special_tokens: bool = True, prefix_ids: Iterable[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._spaces = tokenizer.strip_left
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in prefix_ids:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """Text that became certain with this token; often empty inside a multi-byte character."""
        if token_id in self._hidden:
            return ""
        raw = self._tokenizer.token_bytes(token_id)
        while self._spaces and raw:
            if raw[:1] != b" ":
                self._spaces = 0
            else:
                raw, self._spaces = raw[1:], self._spaces - 1
        return self._decoder.decode(raw)

    def flush(self) -> str:
        """Text of what is held back (a replacement character for an unfinished one); ends the stream."""
        return self._decoder.decode(b"", final=True)
