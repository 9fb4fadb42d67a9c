"""Integer arithmetic on half-open token ranges. Knows nothing of KV, chunks or SGLang."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple


class Span(NamedTuple):
    """A half-open range of token positions `[start, end)` in a request."""

    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        """Tokens in the span."""
        return self.end - self.start


def merge_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Sort spans, drop empty ones, and join those that overlap or touch."""
    merged: list[Span] = []
    for span in sorted(spans):
        if span.num_tokens <= 0:
            continue
        if merged and span.start <= merged[-1].end:
            merged[-1] = Span(merged[-1].start, max(merged[-1].end, span.end))
        else:
            merged.append(span)
    return tuple(merged)


def clip_spans(spans: Sequence[Span], start: int, end: int) -> tuple[Span, ...]:
    """The parts of merged `spans` inside `[start, end)`, in time that grows with their number."""
    first = bisect_right(spans, start, key=lambda span: span.end)
    clipped: list[Span] = []
    for span in islice(spans, first, None):
        if span.start >= end:
            break
        clipped.append(Span(max(span.start, start), min(span.end, end)))
    return tuple(clipped)


def count_tokens(spans: Iterable[Span]) -> int:
    """Tokens covered by spans that do not overlap."""
    return sum(span.num_tokens for span in spans)


def subtract_spans(spans: Iterable[Span], holes: Iterable[Span]) -> tuple[Span, ...]:
    """What of `spans` no hole covers; both may be unsorted, the result is merged."""
    cuts = merge_spans(holes)
    left: list[Span] = []
    for span in merge_spans(spans):
        start = span.start
        for cut in clip_spans(cuts, span.start, span.end):
            if cut.start > start:
                left.append(Span(start, cut.start))
            start = cut.end
        if start < span.end:
            left.append(Span(start, span.end))
    return tuple(left)
