"""Spans behave like the sets of positions they stand for."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.chunk_index.spans import (
    Span,
    clip_spans,
    count_tokens,
    merge_spans,
    subtract_spans,
)
from tests.strategies import spans

span_lists = st.lists(spans(), max_size=8)


def positions(some: Iterable[Span]) -> set[int]:
    return {position for span in some for position in range(span.start, span.end)}


def is_canonical(some: tuple[Span, ...]) -> bool:
    gaps = all(left.end < right.start for left, right in pairwise(some))
    return gaps and all(span.num_tokens > 0 for span in some)


def test_touching_overlapping_and_empty_spans_merge_into_one() -> None:
    merged = merge_spans([Span(4, 6), Span(0, 2), Span(2, 3), Span(3, 3), Span(5, 9), Span(4, 5)])
    assert merged == (Span(0, 3), Span(4, 9))


def test_an_empty_span_between_two_others_does_not_join_them() -> None:
    assert merge_spans([Span(0, 2), Span(3, 3), Span(4, 5)]) == (Span(0, 2), Span(4, 5))


def test_a_hole_in_the_middle_leaves_both_sides() -> None:
    assert subtract_spans([Span(0, 10)], [Span(3, 5)]) == (Span(0, 3), Span(5, 10))


@given(span_lists)
def test_merging_keeps_every_position_and_is_canonical(some: list[Span]) -> None:
    merged = merge_spans(some)
    assert positions(merged) == positions(some)
    assert is_canonical(merged)
    assert merge_spans(merged) == merged
    assert count_tokens(merged) == len(positions(some))


@given(span_lists, spans())
def test_clipping_keeps_exactly_the_positions_inside(some: list[Span], window: Span) -> None:
    clipped = clip_spans(merge_spans(some), window.start, window.end)
    assert positions(clipped) == positions(some) & positions([window])
    assert all(span.num_tokens > 0 for span in clipped)


@given(span_lists, span_lists)
def test_subtracting_removes_exactly_the_holes(some: list[Span], holes: list[Span]) -> None:
    left = subtract_spans(some, holes)
    assert positions(left) == positions(some) - positions(holes)
    assert is_canonical(left)
