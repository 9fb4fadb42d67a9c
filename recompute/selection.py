"""Which tokens of a prompt the prior strategies recompute.

Knows the chunk boundaries of one prompt and a budget. Knows nothing of which chunks are cached,
of layers, or of KV: the caller drops what is an exact prefix or is computed anyway.

    chunk   |   1    |    2     |    3     |        M         |
    daric   |        |##        |###       |#####       ######|   starts grow, then the tail
    epic    |        |####      |####      |####              |   equal starts, no tail
    reuse   |        |          |          |                  |
    full    |######################################################|

Chunk 1 stands at position 0 with nothing before it, so its isolated KV is exact.
Source: DARIC (arXiv:2611.09109); EPIC is the baseline it compares with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple, Protocol

from sglang_ext.chunk_index.spans import Span, count_tokens, merge_spans

_MAX_FILL_ROUNDS = 3
_ROUNDING_SLACK = 1e-9  # 0.29 * 100 is 28.999999999999996 and means 29


class Allocation(StrEnum):
    """How the recomputed tokens of a chunk grow with its index: f(x) = x, ln x, or e^x."""

    LINEAR = "linear"
    LOG = "log"
    EXP = "exp"


@dataclass(frozen=True, slots=True)
class SelectionParams:
    """What a request may choose about its selection.

    Attributes:
        n_avg: Average recomputed tokens per chunk, all chunks counted, at least 0.
        alloc: Growth of the allocation over the chunk index (daric).
        alloc_ratio: Tokens of chunk 2 as a share of `n_avg`, in (0, 1) (daric).
        max_share: Most recomputed tokens as a share of the prompt, in (0, 1].

    Raises:
        ValueError: A field has the wrong type or range; names field, got, expected.
    """

    n_avg: int
    alloc: Allocation = Allocation.LINEAR
    alloc_ratio: float = 0.1
    max_share: float = 0.25

    def __post_init__(self) -> None:
        if isinstance(self.n_avg, bool) or not isinstance(self.n_avg, int) or self.n_avg < 0:
            raise ValueError(f"n_avg: got {self.n_avg!r}, expected an int of at least 0")
        if not isinstance(self.alloc, Allocation):
            raise ValueError(f"alloc: got {self.alloc!r}, expected a member of Allocation")
        if not 0 < self.alloc_ratio < 1:
            raise ValueError(f"alloc_ratio: got {self.alloc_ratio!r}, expected a number in (0, 1)")
        if not 0 < self.max_share <= 1:
            raise ValueError(f"max_share: got {self.max_share!r}, expected a number in (0, 1]")


class Shares(NamedTuple):
    """DARIC's allocation before rounding: the solution of its equations."""

    heads: tuple[float, ...]
    """Leading tokens of chunks 1..M; the first is 0."""
    tail: float
    """Last tokens of the prompt."""


class Allotment(NamedTuple):
    """DARIC's allocation in whole tokens, not yet clipped to the lengths of the chunks."""

    heads: tuple[int, ...]
    """Leading tokens of chunks 1..M; the first is 0."""
    tail: int
    """Last tokens of the prompt."""


class PriorStrategy(Protocol):
    """Selects tokens before the forward pass, from chunk boundaries alone."""

    def __call__(self, chunks: Sequence[Span], params: SelectionParams, /) -> tuple[Span, ...]:
        """Select the tokens to recompute; changes nothing.

        Args:
            chunks: A partition of the prompt `[0, N)` in order, none empty.
            params: The request's parameters.

        Returns:
            Sorted, merged spans inside `[0, N)`.
        """


def solve_shares(num_chunks: int, n_avg: float, alloc: Allocation, ratio: float) -> Shares:
    """Solve DARIC's allocation in real numbers.

    With n_i = a·f(i) + b for chunks i = 2..M and a tail n_l, finds a, b, n_l such that
    n_2 = ratio·n_avg, n_M = n_l, and Σ n_i + n_l = M·n_avg. Writing g(i) = f(i) − f(2) this is
    n_i = a·g(i) + ratio·n_avg with a = M·n_avg·(1 − ratio) / (Σ g(i) + g(M)). The system is
    singular for M = 2, where n_2 = n_l = n_avg; one chunk has a tail of n_avg and no head.

    Args:
        num_chunks: M, all chunks of the prompt, at least 1.
        n_avg: Average tokens per chunk, at least 0; may be fractional.
        alloc: f.
        ratio: In (0, 1).

    Source: DARIC (arXiv:2611.09109); M = 1 and M = 2 are our completion.
    """
    if num_chunks < 3:
        return Shares((0.0, n_avg)[:num_chunks], n_avg)
    growth = [_growth(index, num_chunks, alloc) for index in range(2, num_chunks + 1)]
    rise = [value - growth[0] for value in growth]
    slope = num_chunks * n_avg * (1 - ratio) / (math.fsum(rise) + rise[-1])
    heads = tuple(slope * value + ratio * n_avg for value in rise)
    return Shares((0.0, *heads), heads[-1])


def allocate(num_chunks: int, n_avg: float, alloc: Allocation, ratio: float) -> Allotment:
    """Round DARIC's shares to whole tokens; they sum to at most a whole `num_chunks * n_avg`.

    Heads are rounded down, the tail to nearest. Because the last head equals the tail before
    rounding, ⌊x⌋ + round(x) ≤ 2x keeps the sum within the budget.

    Args:
        num_chunks: M, all chunks of the prompt, at least 1.
        n_avg: Average tokens per chunk, at least 0; may be fractional.
        alloc: f.
        ratio: In (0, 1).
    """
    shares = solve_shares(num_chunks, n_avg, alloc, ratio)
    return Allotment(tuple(_floor(head) for head in shares.heads), _floor(shares.tail + 0.5))


def token_budget(chunks: Sequence[Span], params: SelectionParams) -> int:
    """Most tokens a selection may hold: min(M·n_avg, ⌊max_share·N⌋)."""
    return min(len(chunks) * params.n_avg, _floor(params.max_share * chunks[-1].end))


def select_daric(chunks: Sequence[Span], params: SelectionParams) -> tuple[Span, ...]:
    """Select growing chunk starts and the end of the prompt.

    The union of heads and tail may fall short of the budget (rounding, chunks shorter than their
    share, a tail that covers heads); then, at most three times, the last interval is extended to
    the left by what is missing. A round that fails to close the gap merges at least one run of
    selected tokens into the last interval, so the budget is met exactly whenever at most two
    runs stand before it, and in particular for M ≤ 3. It is never exceeded. A budget of the
    whole prompt selects the whole prompt.

    Args:
        chunks: A partition of the prompt `[0, N)` in order, none empty.
        params: `n_avg` is scaled to ⌊max_share·N⌋ / M where the cap binds.

    Returns:
        Sorted, merged spans inside `[0, N)` with at most `token_budget` tokens.

    Source: DARIC (arXiv:2611.09109).
    """
    _assert_partition(chunks)
    budget = token_budget(chunks, params)
    prompt_len = chunks[-1].end
    if budget == prompt_len:
        return (Span(0, prompt_len),)
    allotment = allocate(len(chunks), budget / len(chunks), params.alloc, params.alloc_ratio)
    heads = _heads(chunks, allotment.heads)
    return _fill(heads, Span(max(0, prompt_len - allotment.tail), prompt_len), budget)


def select_epic(chunks: Sequence[Span], params: SelectionParams) -> tuple[Span, ...]:
    """Select the first k tokens of every chunk but the first, k = ⌊budget / M⌋.

    Args:
        chunks: A partition of the prompt `[0, N)` in order, none empty.
        params: k is `n_avg` unless the cap binds.

    Returns:
        Sorted, merged spans inside `[0, N)` with at most `token_budget` tokens.

    Source: EPIC, as compared with in DARIC (arXiv:2611.09109).
    """
    _assert_partition(chunks)
    per_chunk = token_budget(chunks, params) // len(chunks)
    return merge_spans(_heads(chunks, (0, *[per_chunk] * (len(chunks) - 1))))


def select_reuse(chunks: Sequence[Span], params: SelectionParams) -> tuple[Span, ...]:
    """Select nothing: reuse every cached token as it is."""
    return ()


def select_full(chunks: Sequence[Span], params: SelectionParams) -> tuple[Span, ...]:
    """Select the whole prompt, whatever the budget."""
    _assert_partition(chunks)
    return (Span(0, chunks[-1].end),)


PRIOR_STRATEGIES: Mapping[str, PriorStrategy] = MappingProxyType(
    {
        "daric": select_daric,
        "epic": select_epic,
        "reuse": select_reuse,
        "full": select_full,
    }
)
"""Prior strategies by the name a request gives in `pic_strategy`."""


def cluster_chunks(chunks: Sequence[Span], size: int) -> tuple[Span, ...]:
    """Join every `size` adjacent chunks, the last group may be smaller, so they count as one."""
    return tuple(
        Span(chunks[first].start, chunks[min(first + size, len(chunks)) - 1].end)
        for first in range(0, len(chunks), size)
    )


def _growth(index: int, num_chunks: int, alloc: Allocation) -> float:
    """f(index); the exponential is scaled by e^−M, which the slope cancels, and cannot overflow."""
    if alloc is Allocation.LINEAR:
        return float(index)
    if alloc is Allocation.LOG:
        return math.log(index)
    return math.exp(index - num_chunks)


def _floor(value: float) -> int:
    """Round down, forgiving the last bits of a product that is meant to be whole."""
    return math.floor(value + _ROUNDING_SLACK)


def _heads(chunks: Sequence[Span], head_lens: Sequence[int]) -> list[Span]:
    """The first `head_lens[i]` tokens of each chunk, never more than it has."""
    return [
        Span(chunk.start, min(chunk.start + head_len, chunk.end))
        for chunk, head_len in zip(chunks, head_lens, strict=True)
    ]


def _fill(heads: Sequence[Span], tail: Span, budget: int) -> tuple[Span, ...]:
    """Merge heads and tail, then extend the last interval to the left towards the budget."""
    selected = merge_spans([*heads, tail])
    for _ in range(_MAX_FILL_ROUNDS):
        missing = budget - count_tokens(selected)
        if missing == 0:
            break
        last = selected[-1] if selected else tail  # an empty tail still marks the prompt's end
        selected = merge_spans([*selected, Span(max(0, last.start - missing), last.end)])
    return selected


def _assert_partition(chunks: Sequence[Span]) -> None:
    ends = [0, *(chunk.end for chunk in chunks)]
    assert chunks, "a prompt has at least one chunk"
    assert all(chunk.start == end < chunk.end for chunk, end in zip(chunks, ends, strict=False)), (
        f"chunks must partition the prompt, got {list(chunks)}"
    )
