"""Selection of recomputed tokens by the prior strategies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.chunk_index.spans import Span, clip_spans, count_tokens, subtract_spans
from sglang_ext.recompute.selection import (
    PRIOR_STRATEGIES,
    Allocation,
    Allotment,
    SelectionParams,
    allocate,
    cluster_chunks,
    select_daric,
    select_epic,
    select_full,
    select_reuse,
    solve_shares,
    token_budget,
)
from tests.strategies import chunk_spans

ALLOCATIONS = st.sampled_from(Allocation)
RATIOS = st.floats(0.01, 0.99)
SHARES = st.floats(0.01, 1.0)
PARAMS = st.builds(
    SelectionParams,
    n_avg=st.integers(0, 60),
    alloc=ALLOCATIONS,
    alloc_ratio=RATIOS,
    max_share=SHARES,
)


def equal_chunks(num_chunks: int, chunk_len: int) -> tuple[Span, ...]:
    return tuple(Span(i * chunk_len, (i + 1) * chunk_len) for i in range(num_chunks))


def token_set(spans: Sequence[Span]) -> set[int]:
    return {token for span in spans for token in range(span.start, span.end)}


def runs_of(tokens: set[int]) -> list[int]:
    """First tokens of the maximal runs of consecutive tokens, in order."""
    return sorted(token for token in tokens if token - 1 not in tokens)


def daric_seed(chunks: Sequence[Span], params: SelectionParams) -> set[int]:
    """Heads and tail before filling, token by token."""
    budget = token_budget(chunks, params)
    heads, tail = allocate(len(chunks), budget / len(chunks), params.alloc, params.alloc_ratio)
    prompt_len = chunks[-1].end
    seed = {token for token in range(prompt_len) if token >= prompt_len - tail}
    for chunk, head in zip(chunks, heads, strict=True):
        seed |= {token for token in range(chunk.start, chunk.end) if token - chunk.start < head}
    return seed


def daric_oracle(chunks: Sequence[Span], params: SelectionParams) -> set[int]:
    """The published rule on sets of tokens instead of spans."""
    budget, prompt_len = token_budget(chunks, params), chunks[-1].end
    if budget == prompt_len:
        return set(range(prompt_len))
    selected = daric_seed(chunks, params)
    for _ in range(3):
        last_start = runs_of(selected)[-1] if selected else prompt_len
        missing = budget - len(selected)
        selected |= set(range(max(0, last_start - missing), last_start))
    return selected


# Allocation


@given(st.integers(1, 80), st.floats(0, 500), ALLOCATIONS, RATIOS)
def test_shares_sum_to_the_average_times_all_chunks(num_chunks, n_avg, alloc, ratio):
    shares = solve_shares(num_chunks, n_avg, alloc, ratio)
    assert len(shares.heads) == num_chunks
    assert math.fsum(shares.heads) + shares.tail == pytest.approx(num_chunks * n_avg)


@given(st.integers(3, 80), st.floats(0, 500), ALLOCATIONS, RATIOS)
def test_shares_meet_both_boundary_conditions(num_chunks, n_avg, alloc, ratio):
    shares = solve_shares(num_chunks, n_avg, alloc, ratio)
    assert shares.heads[0] == 0
    assert shares.heads[1] == pytest.approx(ratio * n_avg)
    assert shares.heads[-1] == shares.tail


@given(st.integers(1, 80), st.integers(0, 20_000), ALLOCATIONS, RATIOS)
def test_rounding_never_adds_a_token_and_loses_less_than_one_per_part(
    num_chunks, total, alloc, ratio
):
    heads, tail = allocate(num_chunks, total / num_chunks, alloc, ratio)
    lost = total - (sum(heads) + tail)
    assert 0 <= lost <= num_chunks


@pytest.mark.parametrize("alloc", Allocation)
@given(n_avg=st.integers(0, 200), ratio=RATIOS)
def test_heads_of_old_chunks_never_rise_as_chunks_are_appended(alloc, n_avg, ratio):
    heads = [allocate(num_chunks, n_avg, alloc, ratio).heads for num_chunks in range(3, 40)]
    for shorter, longer in pairwise(heads):
        assert all(new <= old for old, new in zip(shorter, longer, strict=False))


@pytest.mark.parametrize(("num_chunks", "tail"), [(16, 182), (64, 717)])
def test_exponential_tail_has_the_published_size(num_chunks, tail):
    assert allocate(num_chunks, 32, Allocation.EXP, 0.1).tail == tail


def test_linear_allocation_grows_by_equal_steps():
    # n_i = a·(i − 2) + 3.2 with a = 5·32·0.9 / (0 + 1 + 2 + 3 + 3) = 16
    shares = solve_shares(5, 32, Allocation.LINEAR, 0.1)
    assert shares.heads == pytest.approx((0, 3.2, 19.2, 35.2, 51.2))
    assert allocate(5, 32, Allocation.LINEAR, 0.1) == Allotment((0, 3, 19, 35, 51), 51)


def test_second_chunk_share_is_rounded_as_meant():
    assert 0.29 * 100 < 29
    assert allocate(5, 100, Allocation.LINEAR, 0.29).heads[1] == 29


def test_one_chunk_has_only_a_tail():
    assert allocate(1, 32, Allocation.LINEAR, 0.1) == Allotment((0,), 32)


@pytest.mark.parametrize("alloc", Allocation)
def test_two_chunks_share_equally_between_head_and_tail(alloc):
    assert allocate(2, 32, alloc, 0.1) == Allotment((0, 32), 32)


# DARIC


@given(chunk_spans(), PARAMS)
def test_daric_follows_the_rule_token_by_token(chunks, params):
    assert token_set(select_daric(chunks, params)) == daric_oracle(chunks, params)


@given(chunk_spans(), PARAMS)
def test_daric_meets_its_budget_when_at_most_two_runs_stand_before_the_last(chunks, params):
    total = count_tokens(select_daric(chunks, params))
    budget = token_budget(chunks, params)
    seed = daric_seed(chunks, params)
    ends_selected = chunks[-1].end - 1 in seed
    if len(runs_of(seed)) - ends_selected <= 2:
        assert total == budget
    assert total <= budget


@given(chunk_spans(max_chunks=3), PARAMS)
def test_daric_meets_its_budget_with_up_to_three_chunks(chunks, params):
    assert count_tokens(select_daric(chunks, params)) == token_budget(chunks, params)


def test_three_rounds_may_leave_a_selection_below_its_budget():
    # Nearly equal shares select 3 or 4 of the 5 tokens of each short chunk, so every round mostly
    # walks over tokens that are selected already.
    chunks = (Span(0, 100), *(Span(100 + 5 * i, 105 + 5 * i) for i in range(16)))
    params = SelectionParams(n_avg=4, alloc_ratio=0.99, max_share=1.0)
    total = count_tokens(select_daric(chunks, params))
    assert 0 < total < token_budget(chunks, params)


@given(chunk_spans(), ALLOCATIONS, RATIOS)
def test_daric_selects_the_whole_prompt_when_the_budget_covers_it(chunks, alloc, ratio):
    longest = max(chunk.num_tokens for chunk in chunks)
    params = SelectionParams(longest, alloc, ratio, max_share=1.0)
    assert token_budget(chunks, params) == chunks[-1].end
    assert select_daric(chunks, params) == (Span(0, chunks[-1].end),)


def test_daric_selects_growing_starts_and_the_tail():
    selected = select_daric(equal_chunks(5, 200), SelectionParams(n_avg=32))
    # heads 3, 19, 35, 51 and a tail of 51 make 159 of 160: the tail takes the missing token
    assert selected == (
        Span(200, 203),
        Span(400, 419),
        Span(600, 635),
        Span(800, 851),
        Span(948, 1000),
    )


def test_daric_with_one_chunk_selects_its_end():
    assert select_daric((Span(0, 400),), SelectionParams(n_avg=32)) == (Span(368, 400),)


def test_daric_with_two_chunks_selects_the_second_start_and_the_end():
    selected = select_daric(equal_chunks(2, 200), SelectionParams(n_avg=32))
    assert selected == (Span(200, 232), Span(368, 400))


def test_a_tail_longer_than_the_last_chunk_reaches_into_earlier_chunks():
    chunks = (*equal_chunks(15, 200), Span(3000, 3010))
    selected = select_daric(chunks, SelectionParams(n_avg=32, alloc=Allocation.EXP))
    assert selected[-1].start <= 3010 - 182
    assert count_tokens(selected) == 16 * 32


@given(chunk_spans(), ALLOCATIONS, RATIOS, SHARES)
def test_an_average_of_zero_selects_nothing(chunks, alloc, ratio, share):
    params = SelectionParams(0, alloc, ratio, share)
    assert select_daric(chunks, params) == select_epic(chunks, params) == ()


@given(st.integers(1, 12), PARAMS)
def test_daric_with_chunks_of_one_token_stays_within_its_budget(num_chunks, params):
    chunks = equal_chunks(num_chunks, 1)
    assert count_tokens(select_daric(chunks, params)) <= token_budget(chunks, params)


# EPIC and the ends of the range


def test_epic_selects_equal_starts_of_all_chunks_but_the_first():
    selected = select_epic(equal_chunks(3, 200), SelectionParams(n_avg=32))
    assert selected == (Span(200, 232), Span(400, 432))


def test_epic_shortens_its_starts_when_the_cap_binds():
    selected = select_epic(equal_chunks(3, 200), SelectionParams(n_avg=100))
    assert selected == (Span(200, 250), Span(400, 450))  # 600 · 0.25 / 3


@given(chunk_spans(), PARAMS)
def test_epic_never_selects_from_the_first_chunk(chunks, params):
    assert clip_spans(select_epic(chunks, params), 0, chunks[0].end) == ()


@given(chunk_spans(min_chunks=2), PARAMS)
def test_epic_selects_chunk_starts_of_one_length(chunks, params):
    selected = select_epic(chunks, params)
    starts = [count_tokens(clip_spans(selected, *chunk)) for chunk in chunks[1:]]
    k = token_budget(chunks, params) // len(chunks)
    assert starts == [min(k, chunk.num_tokens) for chunk in chunks[1:]]


@given(chunk_spans(), PARAMS)
def test_reuse_selects_nothing_and_full_everything(chunks, params):
    assert select_reuse(chunks, params) == ()
    assert subtract_spans(chunks, select_full(chunks, params)) == ()


# All strategies


@pytest.mark.parametrize("name", PRIOR_STRATEGIES)
@given(chunks=chunk_spans(), params=PARAMS)
def test_selected_spans_are_sorted_apart_and_inside_the_prompt(name, chunks, params):
    selected = PRIOR_STRATEGIES[name](chunks, params)
    assert all(0 <= span.start < span.end <= chunks[-1].end for span in selected)
    assert all(left.end < right.start for left, right in pairwise(selected))


@pytest.mark.parametrize("name", ["daric", "epic", "reuse"])
@given(chunks=chunk_spans(), params=PARAMS)
def test_selection_never_exceeds_average_or_cap(name, chunks, params):
    total = count_tokens(PRIOR_STRATEGIES[name](chunks, params))
    assert total <= len(chunks) * params.n_avg
    assert total <= params.max_share * chunks[-1].end + 1e-6


@pytest.mark.parametrize("name", ["daric", "epic", "full"])
def test_chunks_that_leave_a_gap_are_refused(name):
    with pytest.raises(AssertionError, match="partition"):
        PRIOR_STRATEGIES[name]((Span(0, 10), Span(11, 20)), SelectionParams(4))


# Parameters and clusters


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_avg", -1),
        ("n_avg", 1.5),
        ("n_avg", True),
        ("alloc", "linear"),
        ("alloc_ratio", 0.0),
        ("alloc_ratio", 1.0),
        ("alloc_ratio", float("nan")),
        ("max_share", 0.0),
        ("max_share", 1.01),
    ],
)
def test_a_parameter_out_of_range_is_named(field, value):
    with pytest.raises(ValueError, match=f"^{field}: got {value!r}, expected"):
        SelectionParams(**{"n_avg": 32, field: value})


def test_clusters_join_neighbours_and_keep_the_rest():
    assert cluster_chunks(equal_chunks(5, 10), 2) == (Span(0, 20), Span(20, 40), Span(40, 50))


@given(chunk_spans(), st.integers(1, 14))
def test_clusters_partition_the_same_prompt(chunks, size):
    clusters = cluster_chunks(chunks, size)
    assert len(clusters) == math.ceil(len(chunks) / size)
    assert clusters[0].start == 0
    assert clusters[-1].end == chunks[-1].end
    assert all(left.end == right.start for left, right in pairwise(clusters))
