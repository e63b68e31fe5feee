"""The tiny folders are what they say."""

import json

import pytest
import torch
from safetensors.torch import load_file

from deepinfer.models import open_checkpoint

from . import tiny


def test_every_case_opens_and_equals_the_library_that_wrote_it(tiny_llama_folders):
    assert set(tiny_llama_folders) == set(tiny.CASES)
    for folder in tiny_llama_folders.values():
        checkpoint = open_checkpoint(folder, progress=False)
        theirs = {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
        assert set(checkpoint.weights.names()) == set(theirs)
        for name, expected in theirs.items():
            found = checkpoint.weights.get(name)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)


def test_sharded_case_has_shards(tiny_llama_folders):
    index = json.loads((tiny_llama_folders["bfloat16-sharded"] / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2


@pytest.mark.parametrize("text", ["the thing and the other", "Ünï ½ 🙂 你好"])
def test_tokenizer_round_trip(tiny_llama_folders, text):
    tokenizer = open_checkpoint(tiny_llama_folders["plain"]).tokenizer()
    ids = tokenizer.encode(text)
    assert max(ids) < tiny.VOCAB_SIZE
    assert tokenizer.decode(ids) == text
