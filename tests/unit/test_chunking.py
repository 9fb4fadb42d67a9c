"""Chunks partition the prompt, segments partition the chunk, and keys follow content alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.chunk_index.chunking import chunk_spans, segment_chunk
from sglang_ext.chunk_index.identity import child_key, root_key
from sglang_ext.chunk_index.spans import Span
from tests.strategies import token_ids

ROOT = root_key(b"model", "default", b"secret")


def test_tokens_before_the_first_bound_are_chunk_one() -> None:
    assert chunk_spans(10, [3, 7]) == (Span(0, 3), Span(3, 7), Span(7, 10))


def test_a_bound_at_zero_adds_no_empty_chunk() -> None:
    assert chunk_spans(10, [0, 7]) == (Span(0, 7), Span(7, 10))


def test_a_prompt_without_bounds_is_one_chunk() -> None:
    assert chunk_spans(10, []) == (Span(0, 10),)


def test_an_empty_prompt_has_no_chunks() -> None:
    assert chunk_spans(0, []) == ()


@given(st.integers(1, 200), st.data())
def test_chunks_partition_the_prompt_and_start_at_the_bounds(n: int, data: st.DataObject) -> None:
    bounds = sorted(data.draw(st.sets(st.integers(0, n - 1))))
    chunks = chunk_spans(n, bounds)
    assert [p for span in chunks for p in range(span.start, span.end)] == list(range(n))
    assert all(span.num_tokens > 0 for span in chunks)
    assert {span.start for span in chunks} == {0, *bounds}


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(1, [1]), (15, [15]), (40, [40]), (255, [255]), (256, [256]), (257, [256, 1])],
)
def test_only_the_last_segment_is_short(num_tokens: int, expected: list[int]) -> None:
    segments = segment_chunk(np.arange(300), Span(5, 5 + num_tokens), ROOT, 256)
    assert [segment.span.num_tokens for segment in segments] == expected


def test_segments_are_chained_from_the_root() -> None:
    tokens = np.arange(10)
    first, second, third = segment_chunk(tokens, Span(1, 10), ROOT, 4)
    assert first.key == child_key(ROOT, None, tokens[1:5])
    assert second.key == child_key(ROOT, first.key, tokens[5:9])
    assert third.key == child_key(ROOT, second.key, tokens[9:10])
    assert (first.parent, second.parent, third.parent) == (None, first.key, second.key)
    assert len({segment.key[0] for segment in (first, second, third)}) == 1
    assert [(s.local_start, s.local_end) for s in (first, second, third)] == [
        (0, 4),
        (4, 8),
        (8, 9),
    ]


def test_an_empty_span_has_no_segments() -> None:
    assert segment_chunk(np.arange(3), Span(1, 1), ROOT, 4) == ()


@given(token_ids(), st.integers(0, 50), st.integers(1, 300))
def test_a_chunk_has_the_same_keys_wherever_it_stands(
    chunk: npt.NDArray[np.int32], offset: int, segment_len: int
) -> None:
    moved = np.concatenate([np.zeros(offset, np.int32), chunk, np.ones(3, np.int32)])
    here = segment_chunk(chunk, Span(0, len(chunk)), ROOT, segment_len)
    there = segment_chunk(moved, Span(offset, offset + len(chunk)), ROOT, segment_len)
    assert [s.key for s in here] == [s.key for s in there]
    assert [s.span.start + offset for s in here] == [s.span.start for s in there]
    assert [s.local_start for s in there] == [s.span.start - offset for s in there]
    assert there[-1].local_end == len(chunk)


def test_a_common_beginning_shares_its_whole_segments() -> None:
    short = segment_chunk(np.arange(10), Span(0, 10), ROOT, 4)
    long = segment_chunk(np.arange(12), Span(0, 12), ROOT, 4)
    assert [a.key == b.key for a, b in zip(short, long, strict=True)] == [True, True, False]
