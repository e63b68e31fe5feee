"""A tokenizer from the metadata of a GGUF file.

Two families of vocabularies are read: byte-level BPE ("gpt2") with the pre-tokenizers listed in `PRE_TOKENIZERS`,
and SentencePiece BPE ("llama") with its scores and byte tokens. A file names its pre-tokenizer but does not hold
it; one that is not listed is refused, as near misses give other ids without any sign of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer

from ..errors import CheckpointError
from .gguf_reader import GgufFile
from .tokenizer import FastTokenizer

if TYPE_CHECKING:
    from .checkpoint import Checkpoint

__all__ = ["PRE_TOKENIZERS", "PreTokenizer", "gguf_tokenizer", "load_gguf_tokenizer"]

#: Values of `tokenizer.ggml.token_type`.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
#: The visible space of SentencePiece.
SPACE = "▁"
MAX_PIECE_CHARS = 1024

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@attrs.frozen
class PreTokenizer:
    """How text is cut before the merges: regular expressions, each applied to the pieces of the one before."""

    patterns: tuple[str, ...] = ()
    #: Cut with the GPT-2 expression as well, after `patterns`.
    gpt2: bool = False
    #: A piece that is a token as it stands is not merged.
    ignore_merges: bool = False
    nfc: bool = False
    add_bos: bool = False


_GPT2 = PreTokenizer(gpt2=True)
_DIGITS_GPT2 = PreTokenizer((r"\p{N}",), gpt2=True)
_LLAMA3 = PreTokenizer((f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}{{1,3}}|{_REST}",), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}|{_REST}",), nfc=True)
_DEEPSEEK_CODER = PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"))
_DEEPSEEK_V3 = PreTokenizer(
    (
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)

#: `tokenizer.ggml.pre` to the cutting it stands for.
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,
    "command-r": _DIGITS_GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK_V3,
}


def load_gguf_tokenizer(file: GgufFile) -> FastTokenizer:
    """The tokenizer whose vocabulary the file holds.

    Raises:
        CheckpointError: it is of an unknown family or pre-tokenizer, or its parts do not fit together.
    """
    vocabulary = _Vocabulary(file)
    model = file.metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer = _byte_level(vocabulary)
    elif model == "llama":
        tokenizer = _sentencepiece(vocabulary)
    else:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.model is {str(model)[:80]!r}; gpt2 and llama are read. "
            "Load a tokenizer.json instead"
        )
    _add_special(tokenizer, vocabulary)
    return FastTokenizer(
        tokenizer,
        bos_id=vocabulary.special_id("bos"),
        eos_ids=[i for key in ("eos", "eot", "eom") if (i := vocabulary.special_id(key)) is not None],
        origin=str(file.path),
    )


def gguf_tokenizer(*, checkpoint: Checkpoint) -> FastTokenizer:
    """Factory of the registry: the tokenizer inside an opened GGUF file."""
    if checkpoint.gguf is None:
        raise CheckpointError(f"{checkpoint.path} is no GGUF file; its tokenizer is read by the part named hf")
    return load_gguf_tokenizer(checkpoint.gguf)


class _Vocabulary:
    """Checked access to the `tokenizer.ggml.*` metadata."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.tokens: list[str] = self._strings("tokens")
        self.ids: dict[str, int] = {}
        for token_id, token in enumerate(self.tokens):
            self.ids.setdefault(token, token_id)
        self.kinds = self._numbers("token_type", fill=1)

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"tokenizer.ggml.{key}")

    def fail(self, key: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: tokenizer.ggml.{key} {what}; convert the file again")

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        return value if isinstance(value, bool) else default

    def special_id(self, key: str) -> int | None:
        value = self.get(f"{key}_token_id")
        # Converters write -1 as an unsigned number for "none".
        return value if type(value) is int and 0 <= value < len(self.tokens) else None

    def of_kind(self, *kinds: int) -> list[str]:
        return [self.tokens[i] for i in np.flatnonzero(np.isin(self.kinds, kinds))]

    def merges(self) -> list[tuple[str, str]]:
        pairs = []
        for merge in self._strings("merges"):
            # From 1 on: the left part may itself be or begin with a space.
            at = merge.find(" ", 1)
            if at < 0:
                raise self.fail("merges", f"holds {merge[:80]!r}, which is no pair")
            pairs.append((merge[:at], merge[at + 1 :]))
        return pairs

    def scores(self) -> np.ndarray:
        return self._numbers("scores")

    def _strings(self, key: str) -> list[str]:
        value = self.get(key)
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self.fail(key, "is missing or no list of strings")
        return value

    def _numbers(self, key: str, fill: int | None = None) -> np.ndarray:
        value = self.get(key)
        if value is None and fill is not None:
            return np.full(len(self.tokens), fill)
        if not isinstance(value, np.ndarray) or value.dtype == np.bool_ or len(value) != len(self.tokens):
            raise self.fail(key, f"does not hold one number for each of the {len(self.tokens)} tokens")
        return value


def _bpe(vocabulary: _Vocabulary, merges: Sequence[tuple[str, str]], **options: Any) -> RustTokenizer:
    try:
        return RustTokenizer(models.BPE(vocab=vocabulary.ids, merges=list(merges), **options))
    except Exception as error:
        raise vocabulary.fail("merges", f"does not fit the tokens: {error}") from error


def _byte_level(vocabulary: _Vocabulary) -> RustTokenizer:
    name = vocabulary.get("pre")
    pre = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if pre is None:
        raise CheckpointError(
            f"{vocabulary.file.path}: tokenizer.ggml.pre is {str(name)[:80]!r}; known are {', '.join(PRE_TOKENIZERS)}. "
            "Load a tokenizer.json instead"
        )
    tokenizer = _bpe(vocabulary, vocabulary.merges(), ignore_merges=pre.ignore_merges)
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.gpt2)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _frame(tokenizer, vocabulary, add_bos=pre.add_bos)
    return tokenizer


def _sentencepiece(vocabulary: _Vocabulary) -> RustTokenizer:
    unknown = vocabulary.special_id("unknown")
    tokenizer = _bpe(
        vocabulary,
        _merges_from_scores(vocabulary),
        byte_fallback=True,
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
    )
    prefix = vocabulary.flag("add_space_prefix", True)
    visible = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), visible]) if prefix else visible
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    _frame(tokenizer, vocabulary, add_bos=True)
    return tokenizer


def _merges_from_scores(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """SentencePiece keeps no merges: any two pieces merge whose union is a piece, the best score first."""
    ids, scores = vocabulary.ids, vocabulary.scores()
    ranked = []
    for token_id in np.flatnonzero(vocabulary.kinds == NORMAL).tolist():
        token = vocabulary.tokens[token_id]
        if len(token) > MAX_PIECE_CHARS:
            raise vocabulary.fail("tokens", f"holds a piece of {len(token)} characters (limit {MAX_PIECE_CHARS})")
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                ranked.append((-float(scores[token_id]), token_id, ids[left], ids[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _frame(tokenizer: RustTokenizer, vocabulary: _Vocabulary, *, add_bos: bool) -> None:
    """Put BOS before and EOS behind a text, as far as the file asks for it."""
    bos = vocabulary.special_id("bos") if vocabulary.flag("add_bos_token", add_bos) else None
    eos = vocabulary.special_id("eos") if vocabulary.flag("add_eos_token", False) else None
    if bos is None and eos is None:
        return
    before = [] if bos is None else ["B"]
    behind = [] if eos is None else ["E"]
    ids = [
        {"id": name, "ids": [i], "tokens": [vocabulary.tokens[i]]}
        for name, i in (("B", bos), ("E", eos))
        if i is not None
    ]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *behind], pair=[*before, "$A", "$B", *behind], special_tokens=ids
    )


def _add_special(tokenizer: RustTokenizer, vocabulary: _Vocabulary) -> None:
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in vocabulary.of_kind(CONTROL, UNKNOWN) if t]
    )
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in vocabulary.of_kind(USER_DEFINED) if t])
