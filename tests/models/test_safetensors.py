"""The safetensors reader: equal to the reference library, strict about everything a file may get wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from deepinfer.errors import CheckpointError, MalformedFile, TensorMismatch
from deepinfer.models import open_safetensors

from .damage import check_reader, write_damaged

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "c": torch.tensor([[1], [2]], dtype=torch.float16),
    "d": torch.tensor([True, False, True]),
    "e": torch.zeros(0, 5),
    "f": torch.tensor(7, dtype=torch.int64),
    "g": torch.arange(5, dtype=torch.uint8),
}


def file_bytes(header, data=b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def opened(tmp_path, raw: bytes):
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    return open_safetensors(path)


def test_equals_the_library(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = open_safetensors(tmp_path)
    assert source.metadata == {"format": "pt"}
    assert set(source.names()) == set(TENSORS)
    for name, expected in TENSORS.items():
        found = source.get(name)
        assert source.shape(name) == tuple(expected.shape) == tuple(found.shape)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_tensors_are_views_and_writing_never_reaches_the_file(tmp_path):
    weight = torch.ones(1024, 1024)
    save_file({"w": weight}, tmp_path / "model.safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()
    source = open_safetensors(tmp_path)
    first, second = source.get("w"), source.get("w")
    assert first.data_ptr() == second.data_ptr()
    first[0, 0] = 5
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_view_outlives_its_source(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    view = open_safetensors(tmp_path).get("a")
    assert torch.equal(view, TENSORS["a"])


def test_unaligned_data_is_copied_not_misread(tmp_path):
    raw = file_bytes(
        b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}} ', torch.tensor([1.0, 2.0]).numpy().tobytes()
    )
    assert (len(raw) - 8) % 4
    assert opened(tmp_path, raw).get("w").tolist() == [1.0, 2.0]


BROKEN = {
    "length past the end": (2**63).to_bytes(8, "little") + b"{}",
    "too short": b"\0\0\0",
    "not json": file_bytes(b"{nope"),
    "not an object": file_bytes([1]),
    "deep json": file_bytes(b"[" * 100_000),
    "not utf-8": file_bytes(b'{"\xff": 1}'),
    "huge integer": file_bytes(b'{"w":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}', b"\0" * 4),
    "duplicate key": file_bytes(
        b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"\0",
    ),
    "overlap": file_bytes({"v": entry(offsets=(0, 4)), "w": entry(offsets=(2, 6))}, b"\0" * 6),
    "gap": file_bytes({"v": entry(offsets=(0, 4)), "w": entry(offsets=(8, 12))}, b"\0" * 12),
    "past the end": file_bytes({"w": entry(shape=(4,), offsets=(0, 16))}, b"\0" * 8),
    "trailing bytes": file_bytes({"w": entry()}, b"\0" * 5),
    "bytes and shape differ": file_bytes({"w": entry(shape=(2,))}, b"\0" * 4),
    "negative dim": file_bytes({"w": entry(shape=(-1,))}, b"\0" * 4),
    "bool dim": file_bytes({"w": entry(shape=(True,))}, b"\0" * 4),
    "zero times huge": file_bytes({"w": entry(shape=(0, 2**62), offsets=(0, 0))}),
    "many dims": file_bytes({"w": entry(shape=(1,) * 100)}, b"\0" * 4),
    "backward offsets": file_bytes({"w": entry(offsets=(4, 0))}, b"\0" * 4),
    "missing field": file_bytes({"w": {"dtype": "F32"}}),
    "dtype no text": file_bytes({"w": entry(dtype=3)}, b"\0" * 4),
    "metadata no strings": file_bytes({"__metadata__": {"a": 1}}),
    "empty": b"",
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_named(tmp_path, name):
    with pytest.raises(MalformedFile, match=r"model\.safetensors"):
        opened(tmp_path, BROKEN[name])


def test_the_tensor_at_fault_is_named(tmp_path):
    with pytest.raises(MalformedFile, match="'w' begins at byte 2, expected 4: it overlaps"):
        opened(tmp_path, BROKEN["overlap"])
    with pytest.raises(CheckpointError, match="'w' has dtype 'F4'"):
        opened(tmp_path, file_bytes({"w": entry(dtype="F4")}, b"\0" * 4))


def test_unknown_tensor_and_missing_file(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    with pytest.raises(TensorMismatch, match="no tensor 'zz'"):
        open_safetensors(tmp_path).get("zz")
    with pytest.raises(CheckpointError, match="cannot open"):
        open_safetensors(tmp_path / "absent.safetensors")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="pickle, which is never loaded"):
        open_safetensors(tmp_path / "pickled")


# --- shards --------------------------------------------------------------------------------------


def write_shards(folder, weight_map=None):
    save_file({"a": TENSORS["a"]}, folder / "one.safetensors")
    save_file({"b": TENSORS["b"], "c": TENSORS["c"]}, folder / "two.safetensors")
    weight_map = weight_map or {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_are_one_source(tmp_path):
    write_shards(tmp_path)
    source = open_safetensors(tmp_path)
    assert set(source.names()) == {"a", "b", "c"}
    assert all(torch.equal(source.get(n), TENSORS[n]) for n in "abc")
    assert source.shape("c") == (2, 1)
    with pytest.raises(TensorMismatch, match="no tensor 'd'"):
        source.get("d")


def test_tensor_that_the_index_forgot_is_still_offered(tmp_path):
    write_shards(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    assert "c" in open_safetensors(tmp_path).names()


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "gone.safetensors"}, "names the shard 'gone.safetensors'"),
        ({"a": "one.safetensors", "zz": "two.safetensors"}, r"1 tensors .* zz \(in two.safetensors\)"),
        ({"a": "../one.safetensors"}, "a file name in the same folder"),
        ({"a": "/etc/passwd"}, "a file name in the same folder"),
        ({"a": "..\\one.safetensors"}, "a file name in the same folder"),
        ({"a": 3}, "no weight_map"),
    ],
)
def test_index_that_does_not_fit_its_shards(tmp_path, weight_map, message):
    write_shards(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=message):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{", '{"weight_map": {"a": "x", "a": "y"}}'])
def test_index_that_is_none(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(MalformedFile, match=r"index\.json"):
        open_safetensors(tmp_path)


# --- fuzz ----------------------------------------------------------------------------------------

VALID = save(TENSORS, metadata={"format": "pt"})


@given(
    flips=st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), max_size=6),
    length=st.one_of(st.just(len(VALID)), st.integers(0, len(VALID))),
)
def test_damaged_files_end_in_a_typed_error(tmp_path_factory, flips, length):
    path = tmp_path_factory.mktemp("fuzz") / "model.safetensors"
    check_reader(read_all, write_damaged(path, VALID, flips=flips, length=length), most_bytes=2**20)


def read_all(path: Path) -> None:
    source = open_safetensors(path)
    for name in source.names():
        assert tuple(source.get(name).shape) == source.shape(name)
