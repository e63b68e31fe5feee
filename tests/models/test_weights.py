"""The loader's books: every tensor taken once, with the shape the model expects."""

from __future__ import annotations

import pytest
import torch

from deepinfer.errors import TensorMismatch
from deepinfer.kernels.quant import quantize
from deepinfer.models import Loader


class Source:
    """A `WeightSource` over a dictionary that counts reads."""

    origin = "somewhere/model"

    def __init__(self, tensors):
        self.tensors, self.reads = tensors, []

    def names(self):
        return tuple(self.tensors)

    def shape(self, name):
        return tuple(self.tensors[name].shape)

    def get(self, name):
        self.reads.append(name)
        return self.tensors[name]


def source(**more):
    return Source({"model.embed_tokens.weight": torch.ones(8, 4), "model.norm.weight": torch.ones(4), **more})


def test_taking_everything_finishes():
    loader = Loader(source(), progress=False)
    assert torch.equal(loader.take("model.norm.weight", (4,)), torch.ones(4))
    loader.take("model.embed_tokens.weight", [8, 4])
    loader.take("model.embed_tokens.weight")
    loader.finish()


def test_nothing_is_read_before_it_is_taken():
    tensors = source()
    loader = Loader(tensors, progress=False)
    loader.check({"model.norm.weight": (4,)})
    assert "model.norm.weight" in loader
    assert "other" not in loader
    assert tensors.reads == []


def test_missing_tensor_is_named_with_similar_ones():
    with pytest.raises(
        TensorMismatch, match=r"somewhere/model has no tensor 'model.norms.weight'; similar names: model.norm.weight"
    ):
        Loader(source(), progress=False).take("model.norms.weight", (4,))


def test_other_shape_is_named_and_not_read():
    tensors = source()
    with pytest.raises(TensorMismatch, match=r"'model.norm.weight' has shape \[4\]; .* \[5\]"):
        Loader(tensors, progress=False).take("model.norm.weight", (5,))
    assert tensors.reads == []


def test_check_names_all_at_once():
    expected = {"a": (1,), "b": (2,), "model.norm.weight": (5,), "model.embed_tokens.weight": (8, 4)}
    with pytest.raises(
        TensorMismatch, match=r"2 missing: a, b; 1 of another shape: model.norm.weight is \[4\], expected \[5\]"
    ):
        Loader(source(), progress=False).check(expected)


def test_left_over_tensors_are_named():
    loader = Loader(source(**{f"extra.{i}": torch.ones(1) for i in range(12)}), progress=False)
    loader.take("model.norm.weight")
    with pytest.raises(TensorMismatch, match=r"13 left over: model.embed_tokens.weight, extra.0, .* and 5 more"):
        loader.finish()


def test_what_may_be_left():
    more = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
        "lm_head.weight": torch.ones(8, 4),
        "vision.a": torch.ones(1),
    }
    loader = Loader(source(**more), progress=False)
    loader.take("model.norm.weight")
    loader.take("model.embed_tokens.weight")
    loader.finish(allow=("vision.*", "lm_head.weight"))
    with pytest.raises(TensorMismatch, match=r"1 left over: lm_head.weight"):
        loader.finish(allow=("vision.*",))


@pytest.mark.parametrize("quantised", [False, True])
def test_tied_duplicate_must_be_one(quantised):
    table = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    stored = quantize(table, format="q8_0") if quantised else table
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    same = Loader(Source({"model.embed_tokens.weight": stored, "lm_head.weight": stored}), progress=False)
    same.take("model.embed_tokens.weight")
    same.finish(tied=tied)
    other = Loader(Source({"model.embed_tokens.weight": stored, "lm_head.weight": table + 1}), progress=False)
    other.take("model.embed_tokens.weight")
    with pytest.raises(TensorMismatch, match=r"1 not tied: lm_head.weight differs from model.embed_tokens.weight"):
        other.finish(tied=tied)


def test_progress_bar_counts_tensors(capsys):
    loader = Loader(source(), progress=True)
    loader.take("model.norm.weight")
    loader.take("model.embed_tokens.weight")
    loader.finish()
    assert "loading weights" in capsys.readouterr().err
