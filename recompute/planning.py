"""What happens to every token of one prompt: a plan, made from spans and hits alone.

Knows chunk spans, their segments, how many of them are cached, and the length of the exact prefix.
Knows nothing of KV, slots, layers or SGLang.

One prompt of chunks A B C Q, P tokens of it an exact prefix of SGLang's own tree:

    tokens    |   A   |     B     |     C     |    Q    |
    prefix    [0 .. P)
    place         [P ...cached...)[cached)                    K re-encoded, V copied
    miss                             [missing)                computed alone, kept, then placed
    compute              ##          ##        [.......)      in full context, in place
                         selected    selected   the query

Whatever is neither prefix nor computed carries KV of a chunk that saw only itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from sglang_ext.chunk_index.chunking import ChunkSegment
from sglang_ext.chunk_index.identity import ChunkKey
from sglang_ext.chunk_index.spans import Span, clip_spans, count_tokens, merge_spans, subtract_spans


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of a prompt.

    Attributes:
        span: Its tokens in the prompt.
        segments: Its index nodes in order; together they cover the span.
    """

    span: Span
    segments: tuple[ChunkSegment, ...]


class Placement(NamedTuple):
    """KV of one segment that goes to `span`, the part of the segment behind the prefix.

    Attributes:
        segment: Which KV.
        span: Where to, in the prompt; inside `segment.span`.
        delta: Positions the keys move by: where the chunk starts, since it was computed at 0.
    """

    segment: ChunkSegment
    span: Span
    delta: int


class Miss(NamedTuple):
    """Segments of one chunk that are computed with nothing but their own chunk before them.

    Attributes:
        chunk_span: The chunk in the prompt.
        cached: The chunk's leading segments that are cached; their KV is the context.
        missing: The other segments, up to the chunk's end.
        start: First position to compute. Behind the start of `missing` only in the first chunk,
            where the exact prefix holds what lies between.
        is_used: Their KV is used in this prompt too, not only kept for later ones.
    """

    chunk_span: Span
    cached: tuple[ChunkSegment, ...]
    missing: tuple[ChunkSegment, ...]
    start: int
    is_used: bool

    @property
    def is_approximate(self) -> bool:
        """Used at another position than 0, without having seen what stands before."""
        return self.is_used and self.chunk_span.start > 0


class TokenCounts(NamedTuple):
    """Every token of the prompt, counted once; the four sum to the prompt.

    Attributes:
        exact: Already there exactly: SGLang's prefix, and cached segments of the first chunk.
        reused: Cached KV used as it was kept.
        recomputed: Cached, and computed again in full context.
        computed: Not cached.
    """

    exact: int
    reused: int
    recomputed: int
    computed: int


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """What to do with one prompt; making it changes nothing.

    Attributes:
        prefix_len: Tokens of the exact prefix.
        num_tokens: Tokens of the prompt, generated ones included after a retraction.
        placements: Cached KV to place, in prompt order; the missing segments' are added when
            they have been computed.
        misses: What to compute alone first.
        runs: What to compute in full context, merged and in order; the last run ends the prompt.
        approximate: What keeps KV that saw only its own chunk; disjoint from `runs`.
        num_selected: Tokens the strategy chose, prefix and query included.
        counts: Every token once.
    """

    prefix_len: int
    num_tokens: int
    placements: tuple[Placement, ...]
    misses: tuple[Miss, ...]
    runs: tuple[Span, ...]
    approximate: tuple[Span, ...]
    num_selected: int
    counts: TokenCounts

    @property
    def is_exact(self) -> bool:
        """No token keeps KV that saw only its own chunk."""
        return not self.approximate

    @property
    def approximate_hits(self) -> tuple[Span, ...]:
        """Cached tokens at another position than they were computed at, computed again or not."""
        return merge_spans([placement.span for placement in self.placements if placement.delta])

    @property
    def recomputed_share(self) -> float:
        """Share of the reusable tokens that are computed again in every layer, 0..1."""
        hit = self.counts.reused + self.counts.recomputed
        return self.counts.recomputed / hit if hit else 0.0


def plan_prompt(
    chunks: Sequence[Chunk],
    num_hits: Sequence[int],
    selection: Sequence[Span],
    prefix_len: int,
    num_tokens: int,
    keeps_query: bool,
) -> PromptPlan:
    """Decide what to place, what to compute alone, and what to compute in context.

    Args:
        chunks: The prompt's chunks, which partition `[0, prompt)`; the last one is the query.
        num_hits: For each chunk, how many of its leading segments are cached.
        selection: Tokens the strategy recomputes, made for the whole prompt; what falls into the
            exact prefix is dropped, not handed to others.
        prefix_len: Tokens of SGLang's exact prefix, below `num_tokens`.
        num_tokens: Prompt tokens, plus generated ones after a retraction.
        keeps_query: The query's missing segments are computed alone as well, to be kept.
    """
    placements: list[Placement] = []
    misses: list[Miss] = []
    context: list[Span] = []
    last = len(chunks) - 1
    for index, (chunk, hits) in enumerate(zip(chunks, num_hits, strict=True)):
        if chunk.span.end <= prefix_len:
            continue
        cached, missing = chunk.segments[:hits], chunk.segments[hits:]
        placements += place_segments(cached, chunk.span, prefix_len)
        start = max(prefix_len, missing[0].span.start if missing else chunk.span.end)
        is_query = index == last
        is_isolated = chunk.span.start == 0 or chunk.span.start >= prefix_len
        is_kept = missing and is_isolated and (keeps_query or not is_query)
        is_used = not is_query or chunk.span.start == 0
        if is_kept:
            misses.append(Miss(chunk.span, cached, missing, start, is_used))
        if is_query and not (is_kept and is_used):
            context.append(Span(start, num_tokens))
        elif not is_query and missing and not is_isolated:
            context.append(Span(start, chunk.span.end))
    context.append(Span(max(num_tokens - 1, prefix_len), num_tokens))
    context.append(Span(max(chunks[-1].span.end, prefix_len), num_tokens))
    chosen = clip_spans(selection, prefix_len, num_tokens)
    runs = merge_spans([*chosen, *context])
    approximate = [
        *(placement.span for placement in placements if placement.delta),
        *(Span(miss.start, miss.chunk_span.end) for miss in misses if miss.is_approximate),
    ]
    return PromptPlan(
        prefix_len=prefix_len,
        num_tokens=num_tokens,
        placements=tuple(placements),
        misses=tuple(misses),
        runs=runs,
        num_selected=count_tokens(selection),
        counts=_count(placements, runs, prefix_len, num_tokens),
        approximate=subtract_spans(approximate, runs),
    )


def resolve_hits(
    chunks: Sequence[Chunk],
    num_cached: Sequence[int],
    known: Collection[ChunkKey],
    prefix_len: int,
) -> tuple[int, ...]:
    """Count as hits what is cached, and what is or will be computed before it is needed.

    Args:
        chunks: The prompt's chunks.
        num_cached: For each chunk, how many of its leading segments the cache holds.
        known: Keys computed for other prompts of the same batch.
        prefix_len: Tokens of the exact prefix.

    Returns:
        For each chunk its leading segments that need not be computed, a second occurrence of a
        missing chunk in the same prompt included.
    """
    seen = set(known)
    hits: list[int] = []
    for chunk, cached in zip(chunks, num_cached, strict=True):
        behind = takewhile(lambda segment: segment.key in seen, chunk.segments[cached:])
        hits.append(cached + sum(1 for _ in behind))
        is_isolated = chunk.span.start == 0 or chunk.span.start >= prefix_len
        if is_isolated and chunk.span.end > prefix_len:
            seen.update(segment.key for segment in chunk.segments)
    return tuple(hits)


def place_segments(
    segments: Sequence[ChunkSegment], chunk_span: Span, prefix_len: int
) -> tuple[Placement, ...]:
    """Where segments of one chunk go in the prompt, leaving out what the prefix covers."""
    clipped = ((segment, max(segment.span.start, prefix_len)) for segment in segments)
    return tuple(
        Placement(segment, Span(start, segment.span.end), chunk_span.start)
        for segment, start in clipped
        if start < segment.span.end
    )


def _count(
    placements: Sequence[Placement], runs: Sequence[Span], prefix_len: int, num_tokens: int
) -> TokenCounts:
    hits = [placement.span for placement in placements]
    exact_hits = [placement.span for placement in placements if not placement.delta]
    kept = count_tokens(subtract_spans(hits, runs))
    kept_exact = count_tokens(subtract_spans(exact_hits, runs))
    recomputed = count_tokens(hits) - kept
    exact, reused = prefix_len + kept_exact, kept - kept_exact
    return TokenCounts(exact, reused, recomputed, num_tokens - exact - reused - recomputed)
