"""Rotary tables against transformers' own frequency functions."""

import pytest
import torch

from deepinfer.errors import ConfigError
from deepinfer.layers.rope import cos_sin_table, inverse_frequencies

transformers = pytest.importorskip("transformers")

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100_000.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-mscale": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
}


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_equal_transformers(name: str) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = ROPES[name]
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=2, max_position_embeddings=256, rope_parameters=dict(rope)
    )
    theirs = LlamaRotaryEmbedding(config)
    ours, amplitude = inverse_frequencies(32, rope)
    torch.testing.assert_close(ours, theirs.inv_freq, rtol=1e-6, atol=0)
    assert amplitude == pytest.approx(theirs.attention_scaling)


def test_table_layout_is_cosines_then_sines() -> None:
    table = cos_sin_table(5, 8, {"rope_theta": 10.0})
    assert table.shape == (5, 8)
    assert table[0].tolist() == [1.0] * 4 + [0.0] * 4
    torch.testing.assert_close(table[:, :4] ** 2 + table[:, 4:] ** 2, torch.ones(5, 4))


def test_unknown_and_incomplete_scalings_are_refused() -> None:
    with pytest.raises(ConfigError, match="'spiral'"):
        inverse_frequencies(8, {"rope_type": "spiral"})
    with pytest.raises(ConfigError, match="factor"):
        inverse_frequencies(8, {"rope_type": "linear"})
