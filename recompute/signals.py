"""Measures by which a layerwise strategy ranks context tokens, and picks the highest.

Knows one layer's queries, keys and values as plain tensors. Knows nothing of where they are stored,
of which tokens are context, of how many layers are probed or of what is recomputed afterwards:
signals of several layers are added by the caller.

    KV deviation       how far a token's reused KV is from the KV computed in its true context
    query importance   how much attention the query's rows give a token (QCI)
    entropy            whether that attention is spread out or in few places
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from sglang_ext.errors import ShapeError

BLOCK_NUMEL = 2**21
"""Most float32 numbers of an intermediate tensor, 8 MiB; scores and their softmax are alive
together, 2^22. More only where a single token, row of scores or KV head's keys need more."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def kv_deviation(
    new_keys: Tensor, new_values: Tensor, old_keys: Tensor, old_values: Tensor
) -> Tensor:
    """Measure how far each token's KV of one layer has moved: ‖N(K′)−N(K)‖₂ + ‖N(V′)−N(V)‖₂.

    N divides a token's vector, all KV heads together, by its L2 norm. A zero vector stays zero, as
    does one whose norm underflows in float32. Symmetric in new and old.

    Args:
        new_keys: `[num_tokens, num_kv_heads, head_dim]`, bf16, fp16 or fp32, any device; rotated
            for the same positions as `old_keys`.
        new_values: `[num_tokens, num_kv_heads, v_head_dim]`, any of these dtypes, same device.
        old_keys: As `new_keys`.
        old_values: As `new_values`.

    Returns:
        `[num_tokens]`, float32, in [0, 4]; no unit.

    Raises:
        ShapeError: A shape, dtype or device differs; the message says name, expected, got.

    Source: CacheBlend (arXiv:2405.16444) selects tokens by KV deviation; the normalised form is
    DARIC's (arXiv:2611.09109).
    """
    _check_deviation(new_keys, new_values, old_keys, old_values)
    num_tokens = new_keys.shape[0]
    widest = max(new_keys[:1].numel(), new_values[:1].numel(), 1)
    block_len = max(1, BLOCK_NUMEL // widest)
    deviation = torch.empty(num_tokens, dtype=torch.float32, device=new_keys.device)
    for start in range(0, num_tokens, block_len):
        block = slice(start, start + block_len)
        moved = _distance(new_keys[block], old_keys[block])
        deviation[block] = moved.add_(_distance(new_values[block], old_values[block]))
    return deviation


def query_importance(
    queries: Tensor,
    keys: Tensor,
    columns: Tensor,
    scaling: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Average the attention that queries give to each column, over queries and heads (QCI).

    Each query sees the columns up to and including its own; head h reads KV head
    h // (num_heads / num_kv_heads). The softmax runs over all visible columns in float32, so that
    columns of the query itself take their part. Scores exist one block at a time, of at most
    `BLOCK_NUMEL`, and so does the float32 copy of keys in another dtype.

    Args:
        queries: `[num_queries, num_heads, head_dim]`, bf16, fp16 or fp32, any device; rotated.
        keys: `[kv_len, num_kv_heads, head_dim]`, any of these dtypes, same device; rotated, row j
            is column j of the prompt.
        columns: `[num_queries]`, int64, any device; the column where each query stands, ascending
            in `[0, kv_len)`. Read on the host once: a device tensor costs one synchronisation.
        scaling: Factor on the scores.
        window: W ≥ 0, SGLang's `sliding_window_size`: columns before its own − W are hidden from a
            query. None hides none.
        soft_cap: c > 0; scores become c·tanh(score / c). None leaves them.

    Returns:
        `[kv_len]`, float32, at least 0, sums to 1; exactly 0 where no query sees the column.

    Raises:
        ShapeError: A shape, dtype or device differs, there is no query, or `columns` leave their
            order or range; the message says name, expected, got.
        ValueError: `window` is negative or `soft_cap` is not positive.

    Source: ProphetKV, as described in CacheSmith (arXiv:2610.18925).
    """
    _check_importance(queries, keys, columns, window, soft_cap)
    num_queries, num_heads, head_dim = queries.shape
    kv_len, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads
    own = _read_columns(columns, kv_len)
    by_kv_head = queries.reshape(num_queries, num_kv_heads, group, head_dim)
    num_rows = num_queries * group  # the query heads of a KV head are rows over the same keys
    row_columns = columns.to(queries.device).repeat_interleave(group)
    start, end = _visible(own[0], own[-1], window)
    span = end - start
    head_step = min(max(1, BLOCK_NUMEL // (max(num_rows, head_dim) * span)), num_kv_heads)
    row_step = max(1, BLOCK_NUMEL // (max(span, head_dim) * head_step))

    importance = torch.zeros(kv_len, dtype=torch.float32, device=queries.device)
    for head in range(0, num_kv_heads, head_step):
        heads = slice(head, head + head_step)
        by_dim = keys[start:end, heads].float().permute(1, 2, 0)
        folded = by_kv_head[:, heads].transpose(0, 1).flatten(1, 2)
        for row in range(0, num_rows, row_step):
            block = slice(row, min(row + row_step, num_rows))
            first, last = own[block.start // group], own[(block.stop - 1) // group]
            low, high = _visible(first, last, window)
            rows = folded[:, block].float() * scaling
            scores = torch.bmm(rows, by_dim[..., low - start : high - start])
            if soft_cap is not None:
                scores.div_(soft_cap).tanh_().mul_(soft_cap)
            _hide(scores, row_columns[block], first, last, window)
            importance[low:high] += torch.softmax(scores, dim=-1).sum((0, 1))
    return importance.div_(num_queries * num_heads)


def normalised_entropy(weights: Tensor) -> float:
    """Tell spread-out weights (1) from weights in one place (0): −Σ p ln p / ln N, 0·ln 0 = 0.

    p is `weights` divided by their sum. Where that says nothing, because N < 2 or because the sum
    is zero or not finite, the answer is 1.0: spread out, for which the strategy is KV deviation.
    Reads the result on the host: one synchronisation with a device.

    Args:
        weights: `[N]`, float32, at least 0, any device; of the context tokens alone, any scale.

    Returns:
        A float in [0, 1].

    Raises:
        ShapeError: `weights` has another shape or dtype.

    Source: CacheSmith (arXiv:2610.18925).
    """
    if weights.ndim != 1 or weights.dtype != torch.float32:
        raise ShapeError(f"weights: expected [N] {torch.float32}, got {_describe(weights)}")
    if len(weights) < 2:
        return 1.0
    wide = weights.double()
    sum_tensor = wide.sum()
    total, entropy = torch.stack((sum_tensor, torch.special.entr(wide / sum_tensor).sum())).tolist()
    if not math.isfinite(total) or total <= 0:
        return 1.0
    return float(min(1.0, max(0.0, entropy / math.log(len(weights)))))


def top_tokens(scores: Tensor, count: int) -> Tensor:
    """Find the tokens with the highest scores; of equal scores the earlier token's comes first.

    The same on every device: the sort is stable. NaN counts as −∞.

    Args:
        scores: `[N]`, any float dtype, any device.
        count: How many tokens, at least 0; all of them if there are fewer.

    Returns:
        `[min(count, N)]`, int64, on the device of `scores`; indices in ascending order.

    Raises:
        ShapeError: `scores` has another shape or dtype.
        ValueError: `count` is negative.
    """
    if scores.ndim != 1 or not scores.is_floating_point():
        raise ShapeError(f"scores: expected [N] of a float dtype, got {_describe(scores)}")
    if count < 0:
        raise ValueError(f"count: expected at least 0, got {count}")
    comparable = scores.masked_fill(scores.isnan(), -math.inf)
    ranked = torch.sort(comparable, descending=True, stable=True).indices
    return ranked[:count].sort().values


def _distance(new: Tensor, old: Tensor) -> Tensor:
    """L2 distance of the tokens' unit vectors, `[num_tokens]` float32."""
    distance: Tensor = torch.linalg.vector_norm(_unit(new).sub_(_unit(old)), dim=1)
    return distance


def _unit(vectors: Tensor) -> Tensor:
    """A new `[num_tokens, width]` float32 tensor whose rows have norm 1, or are zero."""
    wide = vectors.flatten(1).float()
    norm: Tensor = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
    return wide / norm.masked_fill_(norm == 0, 1.0)


def _read_columns(columns: Tensor, kv_len: int) -> list[int]:
    own: list[int] = columns.tolist()
    if own[0] < 0 or own[-1] >= kv_len:
        raise ShapeError(f"columns: expected all in [0, {kv_len}), got {own[0]} .. {own[-1]}")
    for earlier, later in pairwise(own):
        if earlier > later:
            raise ShapeError(f"columns: expected ascending order, got {earlier} before {later}")
    return own


def _visible(first: int, last: int, window: int | None) -> tuple[int, int]:
    """Half-open range of the columns that queries from column `first` to `last` see together."""
    return (0 if window is None else max(0, first - window)), last + 1


def _hide(scores: Tensor, own: Tensor, first: int, last: int, window: int | None) -> None:
    """Set to −∞ what a row does not see, leaving alone the columns that all rows see.

        columns                 low        last − W      first         last
        row of `first` sees     [==========================]
        row of `last` sees                 [===========================]
        touched                 [ early  )                  ( late     ]

    Args:
        scores: `[num_heads, num_rows, num_columns]`, the columns of `_visible`; modified.
        own: `[num_rows]`, int64, the column of each row.
        first: Lowest of them.
        last: Highest of them.
        window: W.
    """
    low, _ = _visible(first, last, window)
    row = own.unsqueeze(1)
    late = torch.arange(first + 1, last + 1, device=own.device)
    scores[..., first + 1 - low :].masked_fill_(late > row, -math.inf)
    if window is not None and last - window > low:
        early = torch.arange(low, last - window, device=own.device)
        scores[..., : last - window - low].masked_fill_(early < row - window, -math.inf)


def _check_deviation(
    new_keys: Tensor, new_values: Tensor, old_keys: Tensor, old_values: Tensor
) -> None:
    _check_vectors("new_keys", new_keys, "num_tokens, num_kv_heads, head_dim")
    num_tokens, num_kv_heads, _ = new_keys.shape
    _check_vectors("new_values", new_values, f"{num_tokens}, {num_kv_heads}, v_head_dim")
    if new_values.shape[:2] != new_keys.shape[:2] or new_values.device != new_keys.device:
        raise ShapeError(
            f"new_values: expected [{num_tokens}, {num_kv_heads}, v_head_dim] on "
            f"{new_keys.device}, got {_describe(new_values)}"
        )
    for name, old, new in (
        ("old_keys", old_keys, new_keys),
        ("old_values", old_values, new_values),
    ):
        if _describe(old) != _describe(new):
            raise ShapeError(f"{name}: expected {_describe(new)}, got {_describe(old)}")


def _check_importance(
    queries: Tensor, keys: Tensor, columns: Tensor, window: int | None, soft_cap: float | None
) -> None:
    _check_vectors("keys", keys, "kv_len, num_kv_heads, head_dim")
    _, num_kv_heads, head_dim = keys.shape
    _check_vectors("queries", queries, f"num_queries, num_heads, {head_dim}")
    num_queries, num_heads, query_dim = queries.shape
    fits = num_heads > 0 and num_kv_heads > 0 and num_heads % num_kv_heads == 0
    if num_queries == 0 or not fits or query_dim != head_dim or queries.device != keys.device:
        raise ShapeError(
            f"queries: expected [at least 1, a multiple of {num_kv_heads}, {head_dim}] on "
            f"{keys.device}, got {_describe(queries)}"
        )
    if columns.shape != (num_queries,) or columns.dtype != torch.int64:
        raise ShapeError(
            f"columns: expected [{num_queries}] {torch.int64}, got {_describe(columns)}"
        )
    if window is not None and window < 0:
        raise ValueError(f"window: expected at least 0 or None, got {window}")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap: expected above 0 or None, got {soft_cap}")


def _check_vectors(name: str, vectors: Tensor, shape: str) -> None:
    if vectors.ndim != 3 or vectors.dtype not in _DTYPES:
        raise ShapeError(f"{name}: expected [{shape}] bf16, fp16 or fp32, got {_describe(vectors)}")


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
