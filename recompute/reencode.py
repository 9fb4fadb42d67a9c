"""Moves cached keys to new positions by rotating them.

Knows rotary embeddings: a key rotated for position p becomes the key for p + Δ by a further
rotation of Δ steps. Knows nothing of where keys are stored, of chunks or of requests.

A rotation is planned once per request and used for every layer. Angles are float64, their cosines
and sines float32, the products float32, and the result is rounded once to the dtype of the keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sglang_ext.errors import ShapeError
from sglang_ext.recompute.rope import RopeSpec

_KEY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Rotation(NamedTuple):
    """Cosines and sines of a planned rotation, for all layers of a request."""

    cos: Tensor
    """`[num_tokens, 1, rotary_dim // 2]`, float32; after `expand_heads` the second is the heads."""
    sin: Tensor
    """As `cos`."""

    def expand_heads(self, num_kv_heads: int) -> Rotation:
        """The same rotation with a copy per head.

        Takes `num_kv_heads` times the memory. On CPU it halves the time of `reencode_keys` with
        neox pairing, whose inner loops are then as long as the tensor; worth it over many layers.
        """
        return Rotation(*(part.expand(-1, num_kv_heads, -1).contiguous() for part in self))


def plan_rotation(spec: RopeSpec, delta: Tensor, device: torch.device | str) -> Rotation:
    """Compute the rotation that moves each token by its own number of positions.

    Args:
        spec: The model's rotary embedding.
        delta: `[num_tokens]`, int64; new position minus cached position, may be negative.
        device: Where the keys are; angles are computed there.

    Raises:
        ShapeError: `delta` has another shape or dtype.

    Source: RoFormer (arXiv:2104.09864), §3.4.
    """
    if delta.ndim != 1 or delta.dtype != torch.int64:
        raise ShapeError(f"delta: expected [num_tokens] {torch.int64}, got {_describe(delta)}")
    steps = delta.to(device).double().view(-1, 1, 1)
    angles = steps * spec.inv_freq.to(device)
    return Rotation(angles.cos().float(), angles.sin().float())


def reencode_keys(
    keys: Tensor, rotation: Rotation, spec: RopeSpec, out: Tensor | None = None
) -> Tensor:
    """Rotate keys from the positions they were cached at to their new ones.

    Tokens with a delta of 0 come back equal, bit for bit but for the sign of a zero.

    Args:
        keys: `[num_tokens, num_kv_heads, head_dim]`, bf16, fp16 or fp32; not modified unless it is
            `out` as well.
        rotation: The plan for these tokens, on the device of `keys`.
        spec: The model's rotary embedding; dimensions from `rotary_dim` on are copied.
        out: As `keys`, any strides; overwritten. May be `keys` itself, must not overlap it
            otherwise. None allocates.

    Returns:
        `out`, or the new tensor.

    Raises:
        ShapeError: A shape, dtype or device differs; the message says name, expected, got.

    Source: RoFormer (arXiv:2104.09864), §3.4.
    """
    _check_reencode(keys, rotation, spec, out)
    if out is None:
        out = torch.empty_like(keys)
    rotary_dim = spec.rotary_dim
    rotate = _rotate_halves if spec.is_neox else _rotate_pairs
    rotate(keys[..., :rotary_dim].float(), rotation, out[..., :rotary_dim])
    if rotary_dim < spec.head_dim:
        out[..., rotary_dim:] = keys[..., rotary_dim:]
    return out


def _rotate_halves(keys: Tensor, rotation: Rotation, out: Tensor) -> None:
    """Pairs are (i, i + half). Both halves are ready before `out`, maybe `keys`, is written."""
    half = keys.shape[-1] // 2
    first, second = keys[..., :half], keys[..., half:]
    cos, sin = rotation
    new_first = (first * cos).addcmul_(second, sin, value=-1)
    new_second = (second * cos).addcmul_(first, sin)
    out[..., :half] = new_first
    out[..., half:] = new_second


def _rotate_pairs(keys: Tensor, rotation: Rotation, out: Tensor) -> None:
    """Pairs are (2i, 2i + 1): complex numbers in memory, which is faster than strided halves."""
    num_tokens, num_kv_heads, rotary_dim = keys.shape
    pairs = keys.reshape(num_tokens, num_kv_heads, rotary_dim // 2, 2).contiguous()
    turned = torch.view_as_complex(pairs) * torch.complex(*rotation)
    out.copy_(torch.view_as_real(turned).flatten(-2))


def _check_reencode(keys: Tensor, rotation: Rotation, spec: RopeSpec, out: Tensor | None) -> None:
    if keys.ndim != 3 or keys.shape[-1] != spec.head_dim or keys.dtype not in _KEY_DTYPES:
        raise ShapeError(
            f"keys: expected [num_tokens, num_kv_heads, {spec.head_dim}] bf16, fp16 or fp32, "
            f"got {_describe(keys)}"
        )
    num_tokens, num_kv_heads, _ = keys.shape
    for name, part in zip(rotation._fields, rotation, strict=True):
        fits = part.shape in (
            (num_tokens, 1, spec.rotary_dim // 2),
            (num_tokens, num_kv_heads, spec.rotary_dim // 2),
        )
        if not fits or part.dtype != torch.float32 or part.device != keys.device:
            raise ShapeError(
                f"rotation.{name}: expected [{num_tokens}, 1 or {num_kv_heads}, "
                f"{spec.rotary_dim // 2}] {torch.float32} on {keys.device}, got {_describe(part)}"
            )
    if out is not None and _describe(out) != _describe(keys):
        raise ShapeError(f"out: expected {_describe(keys)}, got {_describe(out)}")


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
