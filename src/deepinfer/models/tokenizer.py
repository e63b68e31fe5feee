"""Text to token ids and back, on the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as RustTokenizer

from ..errors import CheckpointError, InvalidRequest
from .detokenizer import Detokenizer
from .token_bytes import read_rules, token_table

if TYPE_CHECKING:
    from .checkpoint import Checkpoint

__all__ = ["FastTokenizer", "hf_tokenizer", "load_tokenizer"]


class FastTokenizer:
    """A `Tokenizer` over a tokenizer of the `tokenizers` library. Immutable; safe to share between threads.

    Args:
        tokenizer: the library's object; this class owns it from now on.
        bos_id: beginning-of-sequence id, if the model has one.
        eos_ids: ids that end a completion.
        origin: what error messages call it: a path.

    Raises:
        CheckpointError: its decoder is of an unknown kind.

    Example:
        >>> tokenizer = open_checkpoint("smollm2/").tokenizer()
        >>> tokenizer.decode(tokenizer.encode("Hello, world"))
        'Hello, world'
    """

    def __init__(
        self,
        tokenizer: RustTokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        origin: str = "tokenizer",
    ) -> None:
        # A tokenizer.json may carry the cutting and padding of somebody's training run.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._rules = read_rules(tokenizer, origin=origin)
        self.origin = origin
        self.bos_id = bos_id
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.special_ids = frozenset(i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special)
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def strip_left(self) -> int:
        """Leading spaces that decoding drops, because encoding adds them."""
        return self._rules.strip_left

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        Args:
            text: any valid Unicode.
            add_special_tokens: put the tokens around it that the model expects (often one BOS).
            parse_special: read special tokens that are spelled out in `text` as such. False for text that a
                stranger wrote, where `<|im_end|>` is nine characters and not the end of a message.

        Raises:
            InvalidRequest: `text` holds a lone surrogate, which has no UTF-8 form.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text holds a lone surrogate at character {error.start}, which no tokenizer can read; remove it"
            ) from None
        tokenizer = self._tokenizer if parse_special else self._literal
        return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are not UTF-8 become U+FFFD. Ids without a token add nothing.

        Raises:
            InvalidRequest: an id is negative.
        """
        stream = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join([stream.push(int(i)) for i in token_ids]) + stream.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes an id stands for; none for an id past the vocabulary, which a padded output head may sample.

        Raises:
            InvalidRequest: it is negative.
        """
        if token_id < 0:
            raise InvalidRequest(f"token id is {token_id}; expected 0 to {self.vocab_size - 1}")
        return self._table[token_id] if token_id < len(self._table) else b""

    def token_id(self, token: str) -> int | None:
        """Id of a token by its name in the vocabulary."""
        return self._tokenizer.token_to_id(token)

    def detokenizer(self, *, skip_special_tokens: bool = True, prefix_ids: Iterable[int] = ()) -> Detokenizer:
        """A fresh stream decoder, see `Detokenizer`."""
        return Detokenizer(self, skip_special_tokens=skip_special_tokens, prefix_ids=prefix_ids)

    def to_json(self) -> str:
        """The text of a `tokenizer.json`."""
        return self._tokenizer.to_str()

    @cached_property
    def _table(self) -> list[bytes]:
        return token_table(self._tokenizer, self._rules)

    @cached_property
    def _literal(self) -> RustTokenizer:
        # The switch is a property of the library's object, so a second one is kept instead of turning it
        # under the feet of another thread.
        literal = RustTokenizer.from_str(self._tokenizer.to_str())
        literal.encode_special_tokens = True
        return literal


def load_tokenizer(
    folder: str | Path,
    *,
    config: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
) -> FastTokenizer:
    """The tokenizer of a Hugging Face folder, from its `tokenizer.json`.

    The three configurations say which ids begin and end a sequence; all end ids they name count.

    Raises:
        CheckpointError: there is no such file or the library cannot read it.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no tokenizer.json; make one with transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    tokenizer = _read(path)
    names, model, generation = tokenizer_config or {}, config or {}, generation_config or {}
    bos_id = _named(tokenizer, names.get("bos_token"))
    eos_ids = [*_ids(generation), *_ids(model)]
    named_eos = _named(tokenizer, names.get("eos_token"))
    return FastTokenizer(
        tokenizer,
        bos_id=next(iter(_ids(model, "bos_token_id")), None) if bos_id is None else bos_id,
        eos_ids=eos_ids if named_eos is None else [*eos_ids, named_eos],
        origin=str(path),
    )


def hf_tokenizer(*, checkpoint: Checkpoint) -> FastTokenizer:
    """Factory of the registry: the tokenizer of an opened Hugging Face folder."""
    return load_tokenizer(
        checkpoint.path,
        config=checkpoint.config,
        generation_config=checkpoint.generation_config,
        tokenizer_config=checkpoint.tokenizer_config,
    )


def _read(path: Path) -> RustTokenizer:
    try:
        return RustTokenizer.from_file(str(path))
    except BaseException as error:
        # The library is Rust: some damaged files make it panic, and a panic is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"cannot read {path}: {error}; fetch it again or upgrade tokenizers") from error


def _named(tokenizer: RustTokenizer, token: Any) -> int | None:
    if isinstance(token, Mapping):
        token = token.get("content")
    return tokenizer.token_to_id(token) if isinstance(token, str) else None


def _ids(config: Mapping[str, Any], key: str = "eos_token_id") -> list[int]:
    value = config.get(key)
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]
