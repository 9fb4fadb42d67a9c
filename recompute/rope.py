"""The angle per position step of a model's rotary embedding.

Knows the rope types of SGLang 0.5.23 whose angle is linear in the position, so that moving a key
by Δ positions is one rotation by Δ steps. Knows nothing of keys, layers or requests, and does not
import SGLang: a live module is read by the name of its class.

Frequencies are computed in float32, operation by operation as SGLang does, because the cached
keys were rotated with exactly these values; they are kept as float64. The attention factor
(mscale) of YaRN is left out: it is a factor of the cached keys already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sglang_ext.errors import ShapeError, UnsupportedSGLang


@dataclass(frozen=True, slots=True, eq=False)
class RopeSpec:
    """What a rotation of keys needs to know of a model.

    Attributes:
        head_dim: Dimensions of a key head.
        rotary_dim: Leading dimensions that rotate, even, in 2..`head_dim`.
        is_neox: True pairs dimension i with i + rotary_dim/2 (halves), False pairs 2i with
            2i + 1 (GPT-J, interleaved).
        inv_freq: `[rotary_dim // 2]`, float64, on CPU; radians per position, scaling folded in,
            attention factor left out.

    Raises:
        ShapeError: `rotary_dim` or `inv_freq` does not fit.
    """

    head_dim: int
    rotary_dim: int
    is_neox: bool
    inv_freq: Tensor

    def __post_init__(self) -> None:
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ShapeError(
                f"rotary_dim: expected even and in 2..{self.head_dim}, got {self.rotary_dim}"
            )
        freq = self.inv_freq
        expected = ((self.rotary_dim // 2,), torch.float64, "cpu")
        got = (tuple(freq.shape), freq.dtype, freq.device.type)
        if got != expected:
            raise ShapeError(f"inv_freq: expected {expected}, got {got}")


def rope_spec_from_config(
    *,
    head_dim: int,
    rope_theta: float,
    max_position_embeddings: int,
    rope_scaling: Mapping[str, Any] | None = None,
    partial_rotary_factor: float = 1.0,
    is_neox: bool = True,
) -> RopeSpec:
    """Derive the spec from the fields of a model's `config.json`.

    Args:
        head_dim: Dimensions of a key head.
        rope_theta: Base of the frequencies.
        max_position_embeddings: Context length; the original one where `rope_scaling` names none.
        rope_scaling: `rope_type` (or `type`) and its parameters; None is plain rope.
        partial_rotary_factor: Share of `head_dim` that rotates, in (0, 1].
        is_neox: Pairing of the dimensions, which the model's code decides.

    Raises:
        UnsupportedSGLang: The rope type is not one whose keys can be moved by one rotation.
        ShapeError: The rotated share of `head_dim` is odd or empty.

    Source: `get_rope` of SGLang 0.5.23; RoFormer (arXiv:2104.09864), §3.4; YaRN (arXiv:2309.00071).
    """
    rotary_dim = int(head_dim * partial_rotary_factor)
    scaling = rope_scaling or {"rope_type": "default"}
    rope_type = _rope_type(scaling)
    inv_freq_of = _INV_FREQ_BY_TYPE.get(rope_type)
    if inv_freq_of is None:
        raise UnsupportedSGLang(f"rope type {rope_type!r} is not supported")
    inv_freq = inv_freq_of(rotary_dim, rope_theta, max_position_embeddings, scaling)
    return RopeSpec(head_dim, rotary_dim, is_neox, inv_freq)


def rope_spec_from_module(rotary_emb: Any) -> RopeSpec:
    """Derive the spec from a live rotary module of SGLang; changes nothing.

    The module recomputes its own frequencies, on the device of its cos/sin table, so that they
    equal those the cached keys were rotated with.

    Args:
        rotary_emb: A `RotaryEmbedding` or one of its subclasses that are allowed by name.

    Raises:
        UnsupportedSGLang: The module's class is not on the list, or scales by several factors.
    """
    name = type(rotary_emb).__name__
    inv_freq_of = _INV_FREQ_BY_CLASS.get(name)
    if inv_freq_of is None:
        raise UnsupportedSGLang(f"rotary embedding {name} is not supported")
    with torch.device(rotary_emb.cos_sin_cache.device):
        inv_freq = inv_freq_of(rotary_emb)
    return RopeSpec(
        head_dim=rotary_emb.head_size,
        rotary_dim=rotary_emb.rotary_dim,
        is_neox=rotary_emb.is_neox_style,
        inv_freq=inv_freq.to("cpu", torch.float64),
    )


def _rope_type(scaling: Mapping[str, Any]) -> str:
    """The type by its own name; two types hide behind `default` and are told by their keys."""
    if "mrope_section" in scaling:
        return "mrope"
    if scaling.get("use_fope", False):
        return "fourier"
    return str(scaling.get("rope_type", scaling.get("type")))


def _plain_inv_freq(rotary_dim: int, theta: float) -> Tensor:
    """θ^(−2i / rotary_dim), float32, as SGLang computes it."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
    return torch.reciprocal(torch.pow(theta, exponents))


def _default(rotary_dim: int, theta: float, max_len: int, scaling: Mapping[str, Any]) -> Tensor:
    return _plain_inv_freq(rotary_dim, theta).double()


def _linear(rotary_dim: int, theta: float, max_len: int, scaling: Mapping[str, Any]) -> Tensor:
    return _plain_inv_freq(rotary_dim, theta).double() / _only_factor(scaling.get("factor", 1.0))


def _dynamic(rotary_dim: int, theta: float, max_len: int, scaling: Mapping[str, Any]) -> Tensor:
    if "alpha" in scaling:
        base = _alpha_base(theta, scaling["alpha"], rotary_dim)
    else:
        base = _ntk_base(theta, scaling.get("factor", 1.0), rotary_dim)
    return _plain_inv_freq(rotary_dim, base).double()


def _llama3(rotary_dim: int, theta: float, max_len: int, scaling: Mapping[str, Any]) -> Tensor:
    """Keep short wavelengths, divide long ones by the factor, blend linearly between."""
    low = float(scaling.get("low_freq_factor", 1.0))
    high = float(scaling.get("high_freq_factor", 4.0))
    original_len = int(scaling.get("original_max_position_embeddings", max_len))
    inv_freq = _plain_inv_freq(rotary_dim, theta)
    turns = original_len / (2 * math.pi / inv_freq)
    keep = ((turns - low) / max(high - low, 1e-6)).clamp(0, 1)
    factor = float(scaling.get("factor", 1.0))
    return ((1 - keep) * inv_freq / factor + keep * inv_freq).double()


def _yarn(rotary_dim: int, theta: float, max_len: int, scaling: Mapping[str, Any]) -> Tensor:
    """Keep fast dimensions, divide slow ones by the factor, ramp between two dimension bounds."""
    original_len = int(scaling.get("original_max_position_embeddings", max_len))
    low = _yarn_dim(scaling.get("beta_fast", 32), rotary_dim, theta, original_len)
    high = _yarn_dim(scaling.get("beta_slow", 1), rotary_dim, theta, original_len)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    dims = torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu")
    ramp = ((dims - low) / ((high - low) or 0.001)).clamp(0, 1)
    keep = (1 - ramp) * float(scaling.get("extrapolation_factor", 1.0))
    factor = float(scaling.get("factor", 1.0))
    periods = torch.pow(theta, dims * 2 / rotary_dim)
    slow, fast = torch.reciprocal(factor * periods), torch.reciprocal(periods)
    return (slow * (1 - keep) + fast * keep).double()


def _yarn_dim(num_turns: float, rotary_dim: int, theta: float, original_len: int) -> float:
    """The pair of dimensions that makes `num_turns` turns over the original context."""
    turns_ratio = original_len / (num_turns * 2 * math.pi)
    return rotary_dim * math.log(turns_ratio) / (2 * math.log(theta))


def _ntk_base(theta: float, factor: float, rotary_dim: int) -> float:
    """SGLang's dynamic NTK: the base for the longest context, used at every length."""
    stretch = factor * factor - (factor - 1)
    return float(theta * stretch ** (rotary_dim / (rotary_dim - 2)))


def _alpha_base(theta: float, alpha: float, rotary_dim: int) -> float:
    return float(theta * alpha ** (rotary_dim / (rotary_dim - 2)))


def _only_factor(factor: float | Sequence[float]) -> float:
    """The linear factor; several would need one table per LoRA adapter."""
    factors = factor if isinstance(factor, Sequence) else (factor,)
    if len(factors) != 1:
        raise UnsupportedSGLang(f"linear rope with {len(factors)} scaling factors is not supported")
    return float(factors[0])


def _module_plain(emb: Any) -> Tensor:
    inv_freq: Tensor = emb._compute_inv_freq(emb.base)
    return inv_freq


def _module_linear(emb: Any) -> Tensor:
    return _module_plain(emb).double() / _only_factor(emb.scaling_factors)


def _module_ntk(emb: Any) -> Tensor:
    base = _ntk_base(emb.base, emb.scaling_factor, emb.rotary_dim)
    inv_freq: Tensor = emb._compute_inv_freq(base)
    return inv_freq


def _module_alpha(emb: Any) -> Tensor:
    base = _alpha_base(emb.base, emb.scaling_alpha, emb.rotary_dim)
    inv_freq: Tensor = emb._compute_inv_freq(base)
    return inv_freq


def _module_yarn(emb: Any) -> Tensor:
    inv_freq: Tensor = emb._compute_inv_freq(emb.scaling_factor)
    return inv_freq


_INV_FREQ_BY_TYPE: Mapping[str, Callable[[int, float, int, Mapping[str, Any]], Tensor]] = (
    MappingProxyType(
        {
            "default": _default,
            "linear": _linear,
            "llama3": _llama3,
            "dynamic": _dynamic,
            "yarn": _yarn,
            "deepseek_yarn": _yarn,
        }
    )
)

# What is missing needs more than one rotation: Phi-3 longrope picks its table by the batch's
# longest position, multimodal rope has three positions per token, Gemma 4 pairs other dimensions.
_INV_FREQ_BY_CLASS: Mapping[str, Callable[[Any], Tensor]] = MappingProxyType(
    {
        "RotaryEmbedding": _module_plain,
        "LinearScalingRotaryEmbedding": _module_linear,
        "Llama3RotaryEmbedding": _module_plain,
        "DynamicNTKScalingRotaryEmbedding": _module_ntk,
        "DynamicNTKAlphaRotaryEmbedding": _module_alpha,
        "YaRNScalingRotaryEmbedding": _module_yarn,
        "DeepseekScalingRotaryEmbedding": _module_yarn,
    }
)
