"""Tokenizers: ids against llama.cpp, bytes and streams against whole decodes."""

from __future__ import annotations

import json
import unicodedata
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from deepinfer.errors import CheckpointError, InvalidRequest
from deepinfer.models import FastTokenizer, GgufFile, load_gguf_tokenizer, load_tokenizer, open_checkpoint
from deepinfer.models.gguf_vocab import PRE_TOKENIZERS

from . import tiny
from .llama_cpp import LlamaCppTokenizer, write_tokenizer_gguf
from .texts import FRAGMENTS, mixed_texts

CONTROL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<jupyter_code>")
NORMAL, CONTROL_KIND, USER_KIND, BYTE_KIND = 1, 3, 4, 6


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf) -> FastTokenizer:
    return open_checkpoint(smollm2_gguf).tokenizer()


def differing(ours, theirs, texts):
    return [
        (t, ours.encode(t, add_special_tokens=False), theirs.encode(t))
        for t in texts
        if ours.encode(t, add_special_tokens=False) != theirs.encode(t)
    ]


def test_smollm2_ids_equal_llama_cpp(smollm2, smollm2_gguf):
    texts = mixed_texts(700, seed=1, control=CONTROL)
    assert differing(smollm2, LlamaCppTokenizer(smollm2_gguf), texts) == []


def test_smollm2_ids_equal_the_converted_folder(smollm2, smollm2_folder):
    from_folder = open_checkpoint(smollm2_folder).tokenizer()
    for text in mixed_texts(700, seed=2, control=CONTROL):
        assert smollm2.encode(text) == from_folder.encode(text)
    assert from_folder.eos_ids == smollm2.eos_ids == (2,)
    assert from_folder.bos_id == smollm2.bos_id == 1
    assert from_folder.vocab_size == smollm2.vocab_size == 49_152


def test_smollm2_round_trips(smollm2):
    for text in mixed_texts(700, seed=3, control=CONTROL):
        ids = smollm2.encode(text)
        assert smollm2.decode(ids, skip_special_tokens=False) == text
        assert b"".join(smollm2.token_bytes(i) for i in ids) == text.encode()


@cache
def _greedy_merges() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Tokens and merges that cross every boundary a pre-tokenizer may draw."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(mixed_texts(400, seed=4), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tuple(tokens), tuple(" ".join(m) for m in model["merges"])


@pytest.mark.parametrize("pre", sorted({id(p): name for name, p in PRE_TOKENIZERS.items()}.values()))
def test_pre_tokenizers_equal_llama_cpp(tmp_path, pre):
    tokens, merges = _greedy_merges()
    path = write_tokenizer_gguf(
        tmp_path / "model.gguf",
        model="gpt2",
        tokens=(*tokens, "<end>", "<user>"),
        kinds=[NORMAL] * len(tokens) + [CONTROL_KIND, USER_KIND],
        merges=merges,
        pre=pre,
        eos_token_id=len(tokens),
        bos_token_id=len(tokens),
        add_bos_token=False,
    )
    ours = load_gguf_tokenizer(GgufFile(path))
    texts = mixed_texts(300, seed=5, control=("<end>", "<user>"))
    if PRE_TOKENIZERS[pre].nfc:
        # llama.cpp leaves out the normalisation that the model was trained with.
        texts = [unicodedata.normalize("NFC", t) for t in texts]
    assert differing(ours, LlamaCppTokenizer(path), texts) == []


def sentencepiece_vocabulary():
    """Pieces with scores as SentencePiece's BPE numbers them, learned from the fragments."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False, limit_alphabet=150)
    trained.train_from_iterator(mixed_texts(300, seed=6), trainer)
    # llama.cpp reads tokens as C strings and aborts on one that holds a NUL.
    pieces = [p for p in sorted(trained.get_vocab(), key=trained.get_vocab().get) if "\0" not in p]
    fixed = [("<unk>", 2), ("<s>", CONTROL_KIND), ("</s>", CONTROL_KIND)]
    byte_pieces = [(f"<0x{b:02X}>", BYTE_KIND) for b in range(256)]
    entries = [*fixed, *byte_pieces, *((p, NORMAL) for p in pieces), ("[INST]", USER_KIND)]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))] + [0.0]
    return [t for t, _ in entries], [k for _, k in entries], scores


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_vocabulary_equals_llama_cpp(tmp_path, prefix):
    tokens, kinds, scores = sentencepiece_vocabulary()
    path = write_tokenizer_gguf(
        tmp_path / "model.gguf",
        model="llama",
        tokens=tokens,
        kinds=kinds,
        scores=scores,
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
        add_space_prefix=prefix,
    )
    ours, theirs = load_gguf_tokenizer(GgufFile(path)), LlamaCppTokenizer(path)
    texts = mixed_texts(300, seed=7, control=("</s>", "[INST]"))
    assert differing(ours, theirs, texts) == []
    assert ours.encode("the fox") == theirs.encode("the fox", add_special=True)
    for text in FRAGMENTS:
        assert ours.decode(ours.encode(text)) == text
    assert ours.token_bytes(3 + 0xE4) == b"\xe4"


# --- streams -------------------------------------------------------------------------------------


def metaspace_tokenizer() -> FastTokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁a", "a", "b", "é", "▁▁", "你"]
    tokenizer = Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[("▁", "a")], byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return FastTokenizer(tokenizer)


STREAMED = {"byte-level": FastTokenizer(tiny.byte_tokenizer()), "metaspace": metaspace_tokenizer()}


@pytest.mark.parametrize("name", STREAMED)
@given(ids=st.lists(st.integers(0, 330), max_size=60), cut=st.integers(0, 60), skip=st.booleans())
def test_stream_equals_decode_for_any_ids(name, ids, cut, skip):
    tokenizer = STREAMED[name]
    stream = tokenizer.detokenizer(skip_special_tokens=skip)
    pushed = [stream.push(i) for i in ids]
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(pushed) + stream.flush() == whole
    assert whole.startswith("".join(pushed[:cut]))
    hidden = tokenizer.special_ids if skip else frozenset()
    raw = b"".join(tokenizer.token_bytes(i) for i in ids if i not in hidden)
    if tokenizer.strip_left and raw.startswith(b" "):
        raw = raw[1:]
    assert whole == raw.decode("utf-8", "replace")


@pytest.mark.parametrize("name", STREAMED)
@given(text=st.text(alphabet=st.sampled_from("aé 你b🙂\n"), max_size=30), cut=st.integers(0, 30))
def test_valid_text_streams_without_replacement(name, text, cut):
    tokenizer = STREAMED[name]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer._tokenizer.decode(ids) == text
    stream = tokenizer.detokenizer()
    assert all("\ufffd" not in stream.push(i) for i in ids)
    rest = tokenizer.detokenizer(prefix_ids=ids[:cut])
    head = tokenizer.detokenizer()
    shown = "".join(head.push(i) for i in ids[:cut])
    assert shown + "".join(rest.push(i) for i in ids[cut:]) + rest.flush() == text


def test_unfinished_character_is_held_then_replaced():
    tokenizer = STREAMED["metaspace"]
    stream = tokenizer.detokenizer()
    assert [stream.push(3 + b) for b in "🙂".encode()] == ["", "", "", "🙂"]
    assert [stream.push(3 + 0xE4), stream.push(tokenizer.token_id("b"))] == ["", "\ufffdb"]
    assert stream.push(3 + 0xE4) == ""
    assert stream.flush() == "\ufffd"


# --- the surface ---------------------------------------------------------------------------------


def test_special_tokens_in_a_strangers_text(smollm2):
    assert smollm2.encode("<|im_end|>") == [2]
    literal = smollm2.encode("<|im_end|>", parse_special=False)
    assert 2 not in literal
    assert smollm2.decode(literal) == "<|im_end|>"
    assert smollm2.encode("<|im_end|>") == [2]
    assert smollm2.decode([2]) == ""
    assert smollm2.decode([2], skip_special_tokens=False) == "<|im_end|>"


def test_ids_past_the_vocabulary_add_nothing_and_negative_ones_are_refused(smollm2):
    assert smollm2.decode([504, 60_000, 3575]) == "The capital"
    with pytest.raises(InvalidRequest, match="-1"):
        smollm2.decode([-1])


def test_lone_surrogate_is_refused(smollm2):
    with pytest.raises(InvalidRequest, match="surrogate at character 2"):
        smollm2.encode("ab\ud800")


def test_eos_ids_come_from_all_three_places(tmp_path):
    tiny.write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(
        tmp_path,
        config={"eos_token_id": 5, "bos_token_id": 9},
        generation_config={"eos_token_id": [7, 5, None, True]},
        tokenizer_config={"eos_token": {"content": "</s>"}, "bos_token": "<s>"},
    )
    assert tokenizer.eos_ids == (7, 5, 1)
    assert tokenizer.bos_id == 0


def test_truncation_of_a_training_run_is_dropped(tmp_path):
    tokenizer = tiny.byte_tokenizer()
    tokenizer.enable_truncation(max_length=4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path).encode("abcdefghijkl")) == 12


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.CTC()])
def test_decoders_without_bytes_are_refused(decoder):
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(CheckpointError, match="decode"):
        FastTokenizer(tokenizer)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        ({"model": "gpt2", "pre": "unheard-of"}, "tokenizer.ggml.pre is 'unheard-of'"),
        ({"model": "gpt2"}, "tokenizer.ggml.pre is 'None'"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ("a zz",)}, "merges does not fit"),
        ({"model": "llama"}, "scores does not hold"),
        ({"model": "llama", "scores": [0.0]}, "scores does not hold one number for each"),
    ],
)
def test_gguf_vocabularies_that_are_not_read(tmp_path, fields, message):
    path = write_tokenizer_gguf(
        tmp_path / "m.gguf", **{"tokens": ["a", "b"], "kinds": [1, 1], "merges": ("a b",), **fields}
    )
    with pytest.raises(CheckpointError, match=message):
        load_gguf_tokenizer(GgufFile(path))
