"""Plans of one prompt, and which segments count as hits.

Examples are drawn with one character per token, the segment length is 2 unless said otherwise:

    chunks   which chunk a token belongs to
    cached   `c` where the cache holds the token's segment
    prefix   `=` where SGLang's own exact prefix is
    select   `*` what the strategy chose
    place    `p` cached KV goes there     miss  `m` computed alone     runs  `#` computed in context
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.chunk_index.chunking import segment_chunk
from sglang_ext.chunk_index.identity import DIGEST_BYTES, ChunkKey, RootKey
from sglang_ext.chunk_index.spans import Span, count_tokens, merge_spans
from sglang_ext.recompute.planning import (
    Chunk,
    PromptPlan,
    TokenCounts,
    place_segments,
    plan_prompt,
    resolve_hits,
)
from sglang_ext.recompute.selection import PRIOR_STRATEGIES, SelectionParams

ROOT = RootKey(bytes(DIGEST_BYTES))


def cut(texts: Sequence[str], segment_len: int = 2) -> tuple[Chunk, ...]:
    """Chunks whose token ids are the characters of `texts`."""
    ids = np.frombuffer("".join(texts).encode("ascii"), dtype=np.uint8).astype(np.int64)
    ends = list(accumulate(map(len, texts)))
    spans = [Span(end - len(text), end) for text, end in zip(texts, ends, strict=True)]
    return tuple(Chunk(span, segment_chunk(ids, span, ROOT, segment_len)) for span in spans)


def spans_of(drawing: str) -> tuple[Span, ...]:
    """Where a drawing is not blank."""
    return merge_spans(Span(i, i + 1) for i, mark in enumerate(drawing) if mark not in " .")


def draw(spans: Iterable[Span], mark: str, num_tokens: int) -> str:
    """Spans as a drawing; a token that two of them cover is a `2`."""
    marks = ["."] * num_tokens
    for span in spans:
        for token in range(span.start, span.end):
            marks[token] = mark if marks[token] == "." else "2"
    return "".join(marks)


def num_cached(chunks: Sequence[Chunk], drawing: str) -> list[int]:
    """Leading segments of each chunk that are wholly cached in a drawing."""
    counts = []
    for chunk in chunks:
        marks = [drawing[s.span.start : s.span.end].count("c") for s in chunk.segments]
        whole = [n == s.span.num_tokens for n, s in zip(marks, chunk.segments, strict=True)]
        counts.append([*whole, False].index(False))
    return counts


def plan_drawing(
    texts: Sequence[str],
    cached: str = "",
    prefix: str = "",
    select: str = "",
    generated: int = 0,
    keeps_query: bool = False,
) -> PromptPlan:
    chunks = cut(texts)
    num_tokens = chunks[-1].span.end + generated
    hits = resolve_hits(chunks, num_cached(chunks, cached.ljust(num_tokens)), (), len(prefix))
    return plan_prompt(chunks, hits, spans_of(select), len(prefix), num_tokens, keeps_query)


def drawn(plan: PromptPlan) -> tuple[str, str, str]:
    """What is placed, computed alone and used, and computed in context."""
    return (
        draw([placement.span for placement in plan.placements], "p", plan.num_tokens),
        draw(
            [Span(miss.start, miss.chunk_span.end) for miss in plan.misses if miss.is_used],
            "m",
            plan.num_tokens,
        ),
        draw(plan.runs, "#", plan.num_tokens),
    )


# Examples


def test_a_cold_prompt_computes_every_chunk_alone_and_the_query_in_context() -> None:
    plan = plan_drawing(["aaaa", "bbb", "qq"])
    assert drawn(plan) == (
        #  aaaabbbqq
        ".........",
        "mmmmmmm..",
        ".......##",
    )
    assert plan.counts == TokenCounts(exact=0, reused=0, recomputed=0, computed=9)
    assert not plan.is_exact  # b saw only itself


def test_cached_chunks_are_placed_wherever_they_stand() -> None:
    plan = plan_drawing(
        ["bbb", "aaaa", "qq"],
        cached="ccccccc..",
        select="...*.....",
    )
    assert drawn(plan) == (
        #  bbbaaaaqq
        "ppppppp..",
        ".........",
        "...#...##",
    )
    assert [placement.delta for placement in plan.placements] == [0, 0, 3, 3]
    assert plan.counts == TokenCounts(exact=3, reused=3, recomputed=1, computed=2)
    assert plan.recomputed_share == pytest.approx(1 / 4)
    assert plan.num_selected == 1


def test_one_new_chunk_between_cached_ones_is_the_only_miss() -> None:
    plan = plan_drawing(["bb", "xx", "cc", "aa", "q"], cached="cc..cccc.")
    assert drawn(plan) == (
        #  bbxxccaaq
        "pp..pppp.",
        "..mm.....",
        "........#",
    )
    assert plan.counts == TokenCounts(exact=2, reused=4, recomputed=0, computed=3)


def test_missing_segments_of_a_partly_cached_chunk_follow_its_own_cached_ones() -> None:
    # Half of a segment counts as nothing.
    plan = plan_drawing(["a", "bbbbb", "q"], cached="cccc...")
    assert drawn(plan) == (
        #  abbbbbq
        "ppp....",
        "...mmm.",
        "......#",
    )
    (miss,) = plan.misses
    assert [segment.span for segment in miss.cached] == [Span(1, 3)]
    assert [segment.span for segment in miss.missing] == [Span(3, 5), Span(5, 6)]


def test_the_prefix_is_neither_placed_nor_computed() -> None:
    plan = plan_drawing(
        ["aaaa", "bbbb", "cccc", "qq"],
        cached="cccccccccccc..",
        prefix="========",
        select="....**..**....",
    )
    assert drawn(plan) == (
        #  aaaabbbbccccqq
        "........pppp..",
        "..............",
        "........##..##",
    )
    assert plan.counts == TokenCounts(exact=8, reused=2, recomputed=2, computed=2)
    assert plan.num_selected == 4  # made for the whole prompt, prefix included


def test_a_prefix_inside_a_cached_chunk_leaves_only_the_remainder() -> None:
    plan = plan_drawing(["aaaa", "bbbbb", "q"], cached="ccccccccc.", prefix="=====")
    assert drawn(plan) == (
        #  aaaabbbbbq
        ".....pppp.",
        "..........",
        ".........#",
    )
    assert [placement.span for placement in plan.placements] == [
        Span(5, 6),  # of the segment [4, 6)
        Span(6, 8),
        Span(8, 9),
    ]
    assert {placement.delta for placement in plan.placements} == {4}


def test_a_prefix_inside_a_missing_chunk_leaves_the_remainder_to_the_context() -> None:
    # Its first tokens saw other chunks, so the rest can neither be kept nor computed alone.
    plan = plan_drawing(["aaaa", "bbbbb", "cc", "q"], prefix="=====")
    assert drawn(plan) == (
        #  aaaabbbbbccq
        "............",
        ".........mm.",
        ".....####..#",
    )


def test_a_prefix_inside_the_first_chunk_is_its_context() -> None:
    # Nothing stands before chunk 1: prefix and chunk are the same KV, and it can be kept.
    plan = plan_drawing(["aaaaaa", "q"], cached="cc.....", prefix="===")
    assert drawn(plan) == (
        #  aaaaaaq
        ".......",
        "...mmm.",
        "......#",
    )
    (miss,) = plan.misses
    assert (miss.start, miss.missing[0].span) == (3, Span(2, 4))
    assert plan.is_exact


def test_a_prefix_that_ends_with_a_chunk_leaves_nothing_of_it() -> None:
    for prefix in ("====", "======="):
        plan = plan_drawing(["aaaa", "bbb", "q"], prefix=prefix)
        assert all(miss.chunk_span.start >= len(prefix) for miss in plan.misses)
        assert plan.counts.exact == len(prefix)


def test_cached_segments_of_the_first_chunk_are_exact() -> None:
    plan = plan_drawing(["aaaa", "qq"], cached="cccc..")
    assert plan.is_exact
    assert plan.counts == TokenCounts(exact=4, reused=0, recomputed=0, computed=2)


def test_a_prompt_that_ends_in_a_cached_chunk_computes_its_last_token() -> None:
    plan = plan_drawing(["aa", "bbbb"], cached="cccccc")
    assert drawn(plan) == (
        #  aabbbb
        "pppppp",
        "......",
        ".....#",
    )
    assert plan.counts == TokenCounts(exact=2, reused=3, recomputed=1, computed=0)
    assert not plan.is_exact


def test_a_partly_cached_query_is_computed_behind_its_cached_segments() -> None:
    plan = plan_drawing(["aa", "qqqqq"], cached="cccc...")
    assert drawn(plan) == (
        #  aaqqqqq
        "pppp...",
        ".......",
        "....###",
    )
    assert plan.misses == ()


def test_a_kept_query_is_computed_alone_as_well_as_in_context() -> None:
    plan = plan_drawing(["aa", "qqq"], cached="cc...", keeps_query=True)
    assert drawn(plan) == (
        #  aaqqq
        "pp...",
        ".....",
        "..###",
    )
    (miss,) = plan.misses
    assert not miss.is_used
    assert not miss.is_approximate
    assert plan.is_exact
    assert plan.counts == TokenCounts(exact=2, reused=0, recomputed=0, computed=3)


def test_one_chunk_is_a_query_and_computed_in_context() -> None:
    plan = plan_drawing(["qqqqq"], cached="cc...")
    assert drawn(plan) == (
        #  qqqqq
        "pp...",
        ".....",
        "..###",
    )
    assert plan.is_exact


def test_one_kept_chunk_is_computed_once() -> None:
    plan = plan_drawing(["qqqqq"], keeps_query=True)
    assert drawn(plan) == (
        #  qqqqq
        ".....",
        "mmmmm",
        "....#",
    )
    assert plan.is_exact


def test_the_same_missing_chunk_is_computed_once_and_placed_again() -> None:
    plan = plan_drawing(["aaa", "bbb", "aaa", "bbb", "q"])
    assert drawn(plan) == (
        #  aaabbbaaabbbq
        "......pppppp.",
        "mmmmmm.......",
        "............#",
    )
    assert [placement.delta for placement in plan.placements] == [6, 6, 9, 9]


def test_chunks_that_begin_alike_share_the_segments_they_have_in_common() -> None:
    plan = plan_drawing(["x", "aabb", "aacc", "q"])
    assert drawn(plan) == (
        #  xaabbaaccq
        ".....pp...",
        "mmmmm..mm.",
        ".........#",
    )
    assert plan.misses[2].cached[0].key == plan.misses[1].missing[0].key


def test_a_chunk_cut_by_the_prefix_does_not_serve_its_second_occurrence() -> None:
    plan = plan_drawing(["q", "aaa", "aaa", "q"], prefix="==")
    assert drawn(plan) == (
        #  qaaaaaaq
        "........",
        "....mmm.",
        "..##...#",
    )


def test_everything_in_the_prefix_but_the_last_token() -> None:
    plan = plan_drawing(["aa", "bb", "cc"], cached="cccccc", prefix="=====", select="......")
    assert drawn(plan) == (
        #  aabbcc
        ".....p",
        "......",
        ".....#",
    )
    assert plan.counts == TokenCounts(exact=5, reused=0, recomputed=1, computed=0)
    assert plan.misses == ()
    assert plan.is_exact


def test_generated_tokens_of_a_retracted_request_are_computed_in_context() -> None:
    plan = plan_drawing(["aa", "bb", "q"], cached="cccc.", generated=3)
    assert drawn(plan) == (
        #  aabbq+++
        "pppp....",
        "........",
        "....####",
    )
    assert sum(plan.counts) == 8


def test_a_retracted_request_whose_prompt_ends_in_a_cached_chunk() -> None:
    plan = plan_drawing(["aa", "bb"], cached="cccc", generated=2)
    assert drawn(plan) == (
        #  aabb++
        "pppp..",
        "......",
        "....##",
    )


def test_a_prefix_behind_the_prompt_leaves_generated_tokens_only() -> None:
    plan = plan_drawing(["aa", "bb"], cached="cccc", prefix="=====", generated=3)
    assert drawn(plan) == (
        #  aabb+++
        ".......",
        ".......",
        ".....##",
    )
    assert plan.counts == TokenCounts(exact=5, reused=0, recomputed=0, computed=2)
    assert plan.is_exact


def test_selecting_everything_leaves_nothing_approximate() -> None:
    plan = plan_drawing(["aa", "bb", "cc"], cached="cccc..", select="******")
    assert plan.runs == (Span(0, 6),)
    assert plan.is_exact
    assert plan.counts == TokenCounts(exact=0, reused=0, recomputed=4, computed=2)
    assert plan.recomputed_share == 1.0


def test_a_prompt_without_hits_has_no_share() -> None:
    assert plan_drawing(["aa", "qq"]).recomputed_share == 0.0


def test_placing_leaves_out_what_the_prefix_covers() -> None:
    (chunk,) = cut(["aaaaa"])
    placed = place_segments(chunk.segments, chunk.span, prefix_len=3)
    assert [(p.segment.span, p.span, p.delta) for p in placed] == [
        (Span(2, 4), Span(3, 4), 0),
        (Span(4, 5), Span(4, 5), 0),
    ]
    assert place_segments(chunk.segments, chunk.span, prefix_len=5) == ()


# Hits


def test_segments_behind_a_gap_are_no_hits() -> None:
    chunks = cut(["aabbcc", "q"])
    keys = [segment.key for segment in chunks[0].segments]
    assert resolve_hits(chunks, [0, 0], {keys[1], keys[2]}, 0) == (0, 0)
    assert resolve_hits(chunks, [1, 0], {keys[1]}, 0) == (2, 0)


def test_a_query_that_is_not_kept_serves_nobody_and_is_served() -> None:
    chunks = cut(["x", "aaa", "aaa"])
    assert resolve_hits(chunks, [0, 0, 0], (), 0) == (0, 0, 2)
    chunks = cut(["aaa"])
    assert resolve_hits(chunks, [0], (), 0) == (0,)


# Properties


@dataclass(frozen=True)
class Prompt:
    """Everything a plan depends on.

    Attributes:
        chunks: Of the prompt; contents repeat.
        cached: Keys in the cache; with a segment, all before it in its chunk.
        known: Keys computed for other prompts of the batch.
        selection: What a strategy chose.
        prefix_len: Below `num_tokens`.
        num_tokens: Prompt and generated tokens.
        keeps_query: As in `plan_prompt`.
    """

    chunks: tuple[Chunk, ...]
    cached: frozenset[ChunkKey]
    known: frozenset[ChunkKey]
    selection: tuple[Span, ...]
    prefix_len: int
    num_tokens: int
    keeps_query: bool

    @property
    def num_cached(self) -> tuple[int, ...]:
        return tuple(
            sum(segment.key in self.cached for segment in chunk.segments) for chunk in self.chunks
        )

    @property
    def hits(self) -> tuple[int, ...]:
        return resolve_hits(self.chunks, self.num_cached, self.known, self.prefix_len)

    @property
    def plan(self) -> PromptPlan:
        return plan_prompt(
            self.chunks,
            self.hits,
            self.selection,
            self.prefix_len,
            self.num_tokens,
            self.keeps_query,
        )


@st.composite
def prompts(draw_: st.DrawFn) -> Prompt:
    contents = draw_(
        st.lists(st.text("ab", min_size=1, max_size=9), min_size=1, max_size=4, unique=True)
    )
    texts = draw_(st.lists(st.sampled_from(contents), min_size=1, max_size=6))
    chunks = cut(texts, draw_(st.integers(1, 5)))
    prompt_len = chunks[-1].span.end
    cached: set[ChunkKey] = set()
    for chunk in chunks:
        kept = draw_(st.integers(0, len(chunk.segments)))
        cached.update(segment.key for segment in chunk.segments[:kept])
    keys = sorted({segment.key for chunk in chunks for segment in chunk.segments})
    known = draw_(st.sets(st.sampled_from(keys), max_size=3))
    params = st.builds(SelectionParams, n_avg=st.integers(0, 4), max_share=st.just(1.0))
    strategy = PRIOR_STRATEGIES[draw_(st.sampled_from(sorted(PRIOR_STRATEGIES)))]
    selection = strategy([chunk.span for chunk in chunks], draw_(params))
    num_tokens = prompt_len + draw_(st.sampled_from([0, 0, 0, 1, 4]))
    edges = [segment.span.end for chunk in chunks for segment in chunk.segments]
    return Prompt(
        chunks,
        frozenset(cached),
        frozenset(known),
        selection,
        min(draw_(st.integers(0, num_tokens - 1) | st.sampled_from(edges)), num_tokens - 1),
        num_tokens,
        draw_(st.booleans()),
    )


def tokens(spans: Iterable[Span]) -> set[int]:
    return {token for span in spans for token in range(span.start, span.end)}


def alone(plan: PromptPlan) -> list[Span]:
    """What misses put into the prompt."""
    return [Span(miss.start, miss.chunk_span.end) for miss in plan.misses if miss.is_used]


@given(prompts())
def test_the_four_counts_are_never_negative_and_sum_to_the_tokens(prompt: Prompt) -> None:
    counts = prompt.plan.counts
    assert min(counts) >= 0
    assert sum(counts) == prompt.num_tokens


@given(prompts())
def test_the_counts_are_what_a_count_of_tokens_gives(prompt: Prompt) -> None:
    plan = prompt.plan
    runs = tokens(plan.runs)
    exact = tokens(p.span for p in plan.placements if p.segment.span.start == p.segment.local_start)
    others = tokens(p.span for p in plan.placements) - exact
    assert plan.counts == TokenCounts(
        exact=prompt.prefix_len + len(exact - runs),
        reused=len(others - runs),
        recomputed=len((exact | others) & runs),
        computed=prompt.num_tokens - prompt.prefix_len - len(exact | others),
    )
    assert 0.0 <= plan.recomputed_share <= 1.0


@given(prompts())
def test_runs_are_merged_ascending_and_end_the_prompt(prompt: Prompt) -> None:
    runs = prompt.plan.runs
    assert runs == merge_spans(runs)
    assert runs[0].start >= prompt.prefix_len
    assert runs[-1].end == prompt.num_tokens


@given(prompts())
def test_placements_stay_behind_the_prefix_inside_their_segments_and_apart(prompt: Prompt) -> None:
    placements = prompt.plan.placements
    for placement in placements:
        segment, span = placement.segment, placement.span
        assert max(prompt.prefix_len, segment.span.start) <= span.start < span.end
        assert span.end == segment.span.end
        assert placement.delta == segment.span.start - segment.local_start
    spans = [placement.span for placement in placements]
    assert spans == sorted(spans)
    assert len(tokens(spans)) == count_tokens(spans)


@given(prompts())
def test_every_token_behind_the_prefix_gets_its_kv(prompt: Prompt) -> None:
    plan = prompt.plan
    placed = tokens(placement.span for placement in plan.placements)
    computed_alone = tokens(alone(plan))
    assert placed | computed_alone | tokens(plan.runs) == set(
        range(prompt.prefix_len, prompt.num_tokens)
    )
    assert not placed & computed_alone


@given(prompts())
def test_a_plan_is_exact_when_no_token_keeps_kv_that_saw_only_its_own_chunk(
    prompt: Prompt,
) -> None:
    plan = prompt.plan
    behind_first = set(range(prompt.chunks[0].span.end, prompt.num_tokens))
    placed = tokens(placement.span for placement in plan.placements)
    left = ((placed | tokens(alone(plan))) & behind_first) - tokens(plan.runs)
    assert plan.is_exact == (not left)


@given(prompts())
def test_what_was_selected_behind_the_prefix_is_computed_in_context(prompt: Prompt) -> None:
    chosen = tokens(prompt.selection)
    assert chosen & set(range(prompt.prefix_len, prompt.num_tokens)) <= tokens(prompt.plan.runs)
    assert prompt.plan.num_selected == len(chosen)


@given(prompts())
def test_misses_in_their_order_never_need_what_is_not_there_yet(prompt: Prompt) -> None:
    plan = prompt.plan
    there = set(prompt.cached | prompt.known)
    for miss in plan.misses:
        assert {segment.key for segment in miss.cached} <= there
        there |= {segment.key for segment in miss.missing}
    assert {placement.segment.key for placement in plan.placements} <= there


@given(prompts())
def test_no_segment_is_computed_alone_twice(prompt: Prompt) -> None:
    keys = [segment.key for miss in prompt.plan.misses for segment in miss.missing]
    assert len(keys) == len(set(keys))


@given(prompts())
def test_a_miss_covers_the_rest_of_its_chunk_and_saw_nothing_before_it(prompt: Prompt) -> None:
    chunks = {chunk.span: chunk for chunk in prompt.chunks}
    for miss in prompt.plan.misses:
        assert miss.missing
        assert miss.cached + miss.missing == chunks[miss.chunk_span].segments
        assert prompt.prefix_len <= miss.start < miss.chunk_span.end
        if miss.chunk_span.start > 0:
            assert miss.chunk_span.start >= prompt.prefix_len
            assert miss.start == miss.missing[0].span.start


@given(prompts())
def test_every_missing_chunk_that_can_be_kept_is_computed_alone(prompt: Prompt) -> None:
    missed = {miss.chunk_span for miss in prompt.plan.misses}
    for chunk, hits in zip(prompt.chunks[:-1], prompt.hits, strict=False):
        can_be_kept = chunk.span.start == 0 or chunk.span.start >= prompt.prefix_len
        if hits < len(chunk.segments) and can_be_kept and chunk.span.end > prompt.prefix_len:
            assert chunk.span in missed


@given(prompts())
def test_hits_are_at_least_what_is_cached(prompt: Prompt) -> None:
    for chunk, cached, hits in zip(prompt.chunks, prompt.num_cached, prompt.hits, strict=True):
        assert cached <= hits <= len(chunk.segments)
