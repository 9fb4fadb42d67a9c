"""Float64 versions of the executing modules' operations: the oracle of their tests.

Knows the formulas and nothing of speed. Written with complex numbers, so that a slip in the
production code's real arithmetic does not repeat here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.recompute.rope import RopeSpec


def rope_keys_reference(keys: Tensor, positions: Tensor, spec: RopeSpec) -> Tensor:
    """Apply rotary embedding to keys that were never rotated.

    Args:
        keys: `[num_tokens, num_kv_heads, head_dim]`, any float dtype.
        positions: `[num_tokens]`, int64; may be negative.
        spec: The model's rotary embedding.

    Returns:
        `[num_tokens, num_kv_heads, head_dim]`, float64, without attention factor.

    Source: RoFormer (arXiv:2104.09864), §3.4.
    """
    wide = keys.double()
    rotated, passed = wide[..., : spec.rotary_dim], wide[..., spec.rotary_dim :]
    half = spec.rotary_dim // 2
    angles = positions.double()[:, None, None] * spec.inv_freq
    turn = torch.polar(torch.ones_like(angles), angles)
    pair_dim, pairing = (-2, (2, half)) if spec.is_neox else (-1, (half, 2))
    real, imag = rotated.reshape(*keys.shape[:-1], *pairing).unbind(pair_dim)
    turned = torch.complex(real, imag) * turn
    joined = torch.stack((turned.real, turned.imag), dim=pair_dim).flatten(-2)
    return torch.cat((joined, passed), dim=-1)


def reencode_keys_reference(keys: Tensor, delta: Tensor, spec: RopeSpec) -> Tensor:
    """Rotate cached keys by `delta` positions: rotations add, so this is rope at `delta`.

    Args:
        keys: `[num_tokens, num_kv_heads, head_dim]`, any float dtype, rotated for some position.
        delta: `[num_tokens]`, int64; new position minus cached position, may be negative.
        spec: The model's rotary embedding.

    Returns:
        `[num_tokens, num_kv_heads, head_dim]`, float64.
    """
    return rope_keys_reference(keys, delta, spec)
