"""Float64 versions of the executing modules' operations: the oracle of their tests.

Knows the formulas and nothing of speed. Rotations are written with complex numbers, signals with
loops over tokens, queries and heads, so that a slip in the production code's arithmetic does not
repeat here.
"""

from __future__ import annotations

import math

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


def reference_kv_deviation(
    new_keys: Tensor, new_values: Tensor, old_keys: Tensor, old_values: Tensor
) -> Tensor:
    """Distance of unit keys plus distance of unit values, token by token.

    Args:
        new_keys: `[num_tokens, num_kv_heads, head_dim]`, any float dtype.
        new_values: `[num_tokens, num_kv_heads, v_head_dim]`, any float dtype.
        old_keys: As `new_keys`.
        old_values: As `new_values`.

    Returns:
        `[num_tokens]`, float64.

    Source: DARIC (arXiv:2611.09109).
    """

    def distance(new: Tensor, old: Tensor) -> float:
        return math.dist(_unit_vector(new), _unit_vector(old))

    return torch.tensor(
        [
            distance(new_keys[token], old_keys[token])
            + distance(new_values[token], old_values[token])
            for token in range(len(new_keys))
        ],
        dtype=torch.float64,
    )


def _unit_vector(vector: Tensor) -> list[float]:
    values = [float(value) for value in vector.flatten()]
    norm = math.hypot(*values)
    return [value / norm for value in values] if norm > 0 else values


def reference_query_importance(
    queries: Tensor,
    keys: Tensor,
    columns: Tensor,
    scaling: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Mean attention of each column, query by query and head by head, with a mask over all keys.

    Args:
        queries: `[num_queries, num_heads, head_dim]`, any float dtype, at least one query.
        keys: `[kv_len, num_kv_heads, head_dim]`, any float dtype.
        columns: `[num_queries]`, int64, in `[0, kv_len)`; any order.
        scaling: Factor on the scores.
        window: W; a query at column c sees the columns from c - W to c. None: from 0.
        soft_cap: Scores are bent to stay within it. None leaves them.

    Returns:
        `[kv_len]`, float64.

    Source: ProphetKV, as described in CacheSmith (arXiv:2610.18925).
    """
    num_queries, num_heads, _ = queries.shape
    kv_len, num_kv_heads, _ = keys.shape
    total = torch.zeros(kv_len, dtype=torch.float64)
    for query, own in zip(queries.double(), columns.tolist(), strict=True):
        earliest = 0 if window is None else own - window
        is_hidden = torch.tensor([not earliest <= column <= own for column in range(kv_len)])
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            scores = keys[:, kv_head].double() @ query[head] * scaling
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            total += torch.softmax(scores.masked_fill(is_hidden, -math.inf), dim=0)
    return total / (num_queries * num_heads)
