"""Rotary position tables: plain RoPE and the published ways of stretching it.

Every scaling is a change of the inverse frequencies (and, for YaRN, of the amplitude), so one
table `cos_sin` f32 [context, D] serves them all: line p holds D/2 cosines, then D/2 sines.

Sources: RoFormer (arXiv 2104.09864), position interpolation (2306.15595), YaRN (2309.00071), the Llama 3.1
model card's frequency smoothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import ConfigError

__all__ = ["cos_sin_table", "inverse_frequencies"]

#: Elements of the largest table (4 GiB): eight million positions at a head width of 128.
MAX_TABLE = 2**30


def inverse_frequencies(head_dim: int, rope: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """Inverse frequencies f32 [head_dim / 2] and the factor on cosines and sines.

    `rope` holds `rope_theta`, `rope_type` (default, linear, llama3, yarn, dynamic) and that type's fields, as
    in a Hugging Face configuration. `dynamic` is the default within the original context, which is all that
    the model offers then: beyond it, keys already cached would have to be turned again.

    Raises:
        ConfigError: unknown `rope_type` or a field is missing.
    """
    theta = float(rope.get("rope_theta", 10_000.0))
    if not 0 < theta < math.inf:
        raise ConfigError(f"rope_theta is {theta}; expected a positive number")
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    try:
        if kind in ("default", "dynamic"):
            return plain, 1.0
        if kind == "linear":
            return plain / float(rope["factor"]), 1.0
        if kind == "llama3":
            return _llama3(plain, rope), 1.0
        if kind == "yarn":
            return _yarn(plain, head_dim, theta, rope)
    except KeyError as error:
        raise ConfigError(f"rope_type {kind!r} needs the field {error}; the configuration has {sorted(rope)}") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"rope_type {kind!r} cannot be computed from {dict(rope)}: {error}") from error
    raise ConfigError(f"rope_type is {kind!r}; expected default, linear, llama3, yarn or dynamic")


def _llama3(plain: torch.Tensor, rope: Mapping[str, Any]) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended."""
    original = rope["original_max_position_embeddings"]
    low, high = original / rope["low_freq_factor"], original / rope["high_freq_factor"]
    wave = 2 * math.pi / plain
    stretched = plain / rope["factor"]
    blend = (original / wave - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
    between = (1 - blend) * stretched + blend * plain
    return torch.where(wave > low, stretched, torch.where(wave < high, plain, between))


def _yarn(plain: torch.Tensor, head_dim: int, theta: float, rope: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071, sections 3.2 and 3.4): a ramp between kept and stretched frequencies."""
    factor = float(rope["factor"])
    original = rope["original_max_position_embeddings"]

    def dim_of(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(rope.get("beta_fast") or 32), dim_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = max(high - low, 0.001)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp), _yarn_amplitude(factor, rope)


def _yarn_amplitude(factor: float, rope: Mapping[str, Any]) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1.0)


def cos_sin_table(context_len: int, head_dim: int, rope: Mapping[str, Any], *, device: str = "cpu") -> torch.Tensor:
    """`cos_sin` f32 [context_len, head_dim]: line p holds D/2 cosines, then D/2 sines of position p."""
    if context_len * head_dim > MAX_TABLE:
        raise ConfigError(
            f"a rotary table of {context_len} positions by {head_dim} would take "
            f"{4e-9 * context_len * head_dim:.0f} GB; compose with a smaller max_len"
        )
    inverse, amplitude = inverse_frequencies(head_dim, rope)
    if not inverse.isfinite().all():
        raise ConfigError(f"the rotary frequencies of {dict(rope)} are not finite; check its factors")
    angle = torch.arange(context_len, dtype=torch.float32)[:, None] * inverse
    return (torch.cat([angle.cos(), angle.sin()], dim=-1) * amplitude).to(device)
