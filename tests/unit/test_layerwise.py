"""Plans of phases over layers, what they cost, and the published points of every strategy."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sglang_ext.chunk_index.spans import Span, merge_spans
from sglang_ext.errors import RequestError
from sglang_ext.layerwise import columns_of, spans_of
from sglang_ext.recompute.layerwise import (
    LayerPlan,
    LayerwiseParams,
    LayerwiseStrategy,
    ProbeRows,
    Scored,
    Signal,
    count_covered,
    gradual_filters,
)
from sglang_ext.recompute.strategies.registry import LAYERWISE_STRATEGIES
from tests.strategies import spans

KVDEV, QCI = Signal.KV_DEVIATION, Signal.QUERY_IMPORTANCE
ALL, QUERY, ALONE = ProbeRows.ALL, ProbeRows.QUERY, ProbeRows.QUERY_ALONE
DEPTH = 12

shares = st.floats(0, 1)
depths = st.integers(1, 40)
contexts = st.integers(1, 400)


def kvdev(warmup: int, probe: int, coverage: float, **more: Any) -> LayerPlan:
    return LayerPlan(KVDEV, ALL, warmup, probe, coverage, **more)


def qci(warmup: int, probe: int, coverage: float, rows: ProbeRows = QUERY) -> LayerPlan:
    return LayerPlan(QCI, rows, warmup, probe, coverage)


@st.composite
def plans(draw: st.DrawFn, depth: int, rows: ProbeRows | None = None) -> LayerPlan:
    """Any phases that fit a model, whether or not they could rank."""
    own = rows or draw(st.sampled_from(ProbeRows))
    warmup = draw(st.integers(0, depth))
    probe = draw(st.integers(0, depth - warmup))
    coverage = draw(shares)
    filters = gradual_filters(coverage) if own is ALL and draw(st.booleans()) else ()
    return LayerPlan(KVDEV if own is ALL else QCI, own, warmup, probe, coverage, filters)


# What fits a model


@pytest.mark.parametrize(
    ("plan", "key", "got", "expected"),
    [
        (kvdev(-1, 2, 0.1), "pic_warmup", -1, "0 to 12 layers"),
        (kvdev(13, 0, 0.1), "pic_warmup", 13, "0 to 12 layers"),
        (qci(13, 0, 1.0), "pic_warmup", 13, "0 to 12 layers"),
        (kvdev(4, -1, 0.1), "pic_probe", -1, "0 to 8 layers behind a warm-up of 4"),
        (kvdev(4, 9, 0.1), "pic_probe", 9, "0 to 8 layers behind a warm-up of 4"),
        (qci(0, 13, 0.0), "pic_probe", 13, "0 to 12 layers behind a warm-up of 0"),
        (kvdev(12, 1, 0.1), "pic_probe", 1, "0 to 0 layers behind a warm-up of 12"),
        (qci(1, 0, 0.1), "pic_probe", 0, "at least 1 layer of the query"),
        (qci(0, 0, 0.1), "pic_probe", 0, "at least 1 layer of the query"),
        (qci(3, 0, 0.1, ALONE), "pic_probe", 0, "at least 1 layer of the query"),
        (kvdev(0, 0, 0.1), "pic_probe", 0, "with a warm-up of 0 at least 2 layers: layer 0 sees"),
        (kvdev(0, 1, 0.1), "pic_probe", 1, "with a warm-up of 0 at least 2 layers: layer 0 sees"),
    ],
)
def test_phases_that_do_not_fit_are_refused_by_key_value_and_expectation(
    plan: LayerPlan, key: str, got: int, expected: str
) -> None:
    with pytest.raises(RequestError) as caught:
        plan.check(DEPTH)
    assert caught.value.key == key
    assert str(caught.value).startswith(f"{key}: got {got}, expected {expected}")


@pytest.mark.parametrize(
    "plan",
    [
        kvdev(1, 0, 0.1),  # the keys and values of layer 1
        kvdev(0, 2, 0.1),
        kvdev(1, 1, 0.1),
        kvdev(4, 8, 0.1),
        kvdev(11, 0, 0.1),
        qci(0, 1, 0.1),
        qci(0, 12, 0.1),
        qci(11, 1, 0.1),
        qci(0, 12, 0.1, ALONE),
    ],
)
def test_phases_that_can_rank_are_accepted(plan: LayerPlan) -> None:
    plan.check(DEPTH)


@pytest.mark.parametrize("rows", ProbeRows)
@pytest.mark.parametrize(
    ("warmup", "coverage"), [(0, 0.0), (0, 1.0), (DEPTH, 0.1), (DEPTH, 0.0), (3, 1.0)]
)
def test_nothing_needs_ranking_where_there_is_no_choice(
    rows: ProbeRows, warmup: int, coverage: float
) -> None:
    LayerPlan(KVDEV, rows, warmup, 0, coverage).check(DEPTH)


def test_a_model_of_one_layer_can_only_reuse_or_prefill() -> None:
    for plan in (kvdev(0, 0, 0.0), kvdev(0, 1, 1.0), kvdev(1, 0, 0.5), qci(0, 1, 0.5)):
        plan.check(1)
    for plan in (kvdev(0, 0, 0.5), kvdev(0, 1, 0.5), qci(0, 0, 0.5)):
        with pytest.raises(RequestError, match=r"^pic_probe: got "):
            plan.check(1)


@given(st.data(), depths)
def test_a_plan_is_accepted_where_it_lies_inside_the_model_and_can_rank(
    data: st.DataObject, depth: int
) -> None:
    warmup, probe = data.draw(st.integers(-2, 42)), data.draw(st.integers(-2, 42))
    rows, coverage = data.draw(st.sampled_from(ProbeRows)), data.draw(shares)
    plan = LayerPlan(KVDEV, rows, warmup, probe, coverage)
    is_inside = min(warmup, probe) >= 0 and warmup + probe <= depth
    can_rank = probe >= 1 if rows is not ALL else warmup + max(probe, 1) >= 2
    has_no_choice = coverage in (0.0, 1.0) or warmup == depth
    if is_inside and (can_rank or has_no_choice):
        plan.check(depth)
        return
    with pytest.raises(RequestError) as caught:
        plan.check(depth)
    given = {"pic_warmup": warmup, "pic_probe": probe}
    assert caught.value.got == given[caught.value.key]


# Counting


@pytest.mark.parametrize(
    ("coverage", "num_tokens", "expected"),
    [
        (0.0, 100, 0),
        (1.0, 100, 100),
        (0.15, 100, 15),  # 15.000000000000002 above in floating point
        (0.07, 100, 7),
        (0.29, 100, 29),
        (0.05, 150, 8),
        (1e-6, 100, 1),
        (0.5, 1, 1),
        (0.999999, 10, 10),
        (0.7, 0, 0),
        (1.6, 10, 10),
    ],
)
def test_coverage_counts_whole_tokens_rounded_up(
    coverage: float, num_tokens: int, expected: int
) -> None:
    assert count_covered(coverage, num_tokens) == expected


@given(st.integers(0, 1000), st.integers(1, 1000))
def test_a_coverage_of_k_in_n_counts_k(num_covered: int, num_tokens: int) -> None:
    num_covered = min(num_covered, num_tokens)
    assert count_covered(num_covered / num_tokens, num_tokens) == num_covered


@given(shares, shares, contexts)
def test_a_larger_coverage_never_counts_fewer_tokens(one: float, two: float, num: int) -> None:
    low, high = sorted((one, two))
    assert 0 <= count_covered(low, num) <= count_covered(high, num) <= num


def test_gradual_filters_are_the_documented_multiples() -> None:
    assert gradual_filters(0.15) == pytest.approx((0.24, 0.21, 0.18))
    assert gradual_filters(0.0) == (0.0, 0.0, 0.0)
    assert gradual_filters(1.0) == (1.0, 1.0, 1.0)
    assert gradual_filters(0.75) == pytest.approx((1.0, 1.0, 0.9))


@given(shares)
def test_gradual_filters_fall_towards_the_coverage(coverage: float) -> None:
    steps = (*gradual_filters(coverage), coverage)
    assert list(steps) == sorted(steps, reverse=True)
    assert all(0 <= step <= 1 for step in steps)


# Phases


def test_a_probe_of_the_query_is_rewound_and_one_of_all_is_not() -> None:
    assert kvdev(4, 2, 0.1).first_patched == 6
    assert kvdev(1, 0, 0.1).first_patched == 1
    assert qci(1, 8, 0.1).first_patched == 1
    assert qci(0, 12, 0.1, ALONE).first_patched == 0


def test_coverage_by_layer_follows_the_filters_and_then_stays() -> None:
    plan = kvdev(1, 1, 0.5, filters=(0.8, 0.7, 0.6))
    assert [plan.coverage_of(layer) for layer in range(2, 8)] == [0.8, 0.7, 0.6, 0.5, 0.5, 0.5]
    assert kvdev(1, 1, 0.5).coverage_of(2) == 0.5


def test_plans_that_share_their_passes_have_equal_keys() -> None:
    plan = kvdev(4, 2, 0.05)
    assert plan.key == kvdev(4, 2, 0.7).key
    others = [
        kvdev(3, 2, 0.05),
        kvdev(4, 3, 0.05),
        kvdev(4, 2, 0.05, filters=gradual_filters(0.05)),
        qci(4, 2, 0.05),
        qci(4, 2, 0.05, ALONE),
        replace(plan, signal=QCI),
    ]
    keys = {plan.key, *(other.key for other in others)}
    assert len(keys) == 1 + len(others)


# The recomputed share


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        # of 10 layers and 100 tokens
        (kvdev(0, 0, 0.0), 0.0),
        (kvdev(4, 2, 0.05), (6 * 100 + 4 * 5) / 1000),
        (kvdev(1, 0, 0.15), (100 + 9 * 15) / 1000),
        (kvdev(4, 2, 0.0), 0.6),
        (kvdev(10, 0, 0.05), 1.0),
        (kvdev(4, 6, 0.05), 1.0),
        (qci(0, 10, 0.2), 0.2),
        (qci(1, 8, 0.15), (100 + 9 * 15) / 1000),
        (qci(0, 10, 0.15, ALONE), 0.15),
        (qci(3, 2, 1.0), 1.0),
        (kvdev(1, 1, 0.5, filters=(0.8, 0.7, 0.6)), (200 + 80 + 70 + 60 + 5 * 50) / 1000),
        (kvdev(8, 0, 0.5, filters=(0.8, 0.7, 0.6)), (800 + 80 + 70) / 1000),
    ],
)
def test_share_by_hand(plan: LayerPlan, expected: float) -> None:
    assert plan.share(10, 100, 7) == pytest.approx(expected, abs=1e-12)


def test_share_counts_whole_tokens() -> None:
    assert kvdev(4, 2, 0.05).share(30, 150, 15) == (6 * 150 + 24 * 8) / (30 * 150)


@given(st.data(), depths, contexts, st.integers(0, 50))
def test_share_is_a_share_and_the_query_is_no_part_of_it(
    data: st.DataObject, depth: int, num_context: int, num_query: int
) -> None:
    plan = data.draw(plans(depth))
    share = plan.share(depth, num_context, num_query)
    assert 0 <= share <= 1
    assert share == plan.share(depth, num_context, num_query + 1)


@given(st.data(), depths, contexts, shares)
def test_more_coverage_never_lowers_the_share(
    data: st.DataObject, depth: int, num_context: int, coverage: float
) -> None:
    plan = data.draw(plans(depth))
    smaller, larger = (
        replace(plan, coverage=own, filters=gradual_filters(own) if plan.filters else ())
        for own in sorted((plan.coverage, coverage))
    )
    assert smaller.share(depth, num_context, 1) <= larger.share(depth, num_context, 1)


@given(st.data(), depths, contexts)
def test_more_warm_up_never_lowers_the_share(
    data: st.DataObject, depth: int, num_context: int
) -> None:
    plan = data.draw(plans(depth))
    more = data.draw(st.integers(plan.warmup, max(plan.warmup, depth - plan.probe)))
    longer = replace(plan, warmup=more)
    assert plan.share(depth, num_context, 1) <= longer.share(depth, num_context, 1)


@given(st.data(), depths, contexts)
def test_only_a_probe_of_all_tokens_adds_to_the_share(
    data: st.DataObject, depth: int, num_context: int
) -> None:
    plan = data.draw(plans(depth))
    longer = replace(plan, probe=data.draw(st.integers(plan.probe, depth - plan.warmup)))
    before, after = (each.share(depth, num_context, 1) for each in (plan, longer))
    assert before <= after if plan.rows is ALL else before == after


@given(st.data(), depths, contexts)
def test_warming_every_layer_or_covering_everything_is_plain_prefill(
    data: st.DataObject, depth: int, num_context: int
) -> None:
    plan = data.draw(plans(depth))
    all_warm = replace(plan, warmup=depth, probe=0)
    everything = replace(plan, coverage=1.0, filters=())
    assert all_warm.share(depth, num_context, 1) == 1
    assert everything.share(depth, num_context, 1) == 1


@given(depths, contexts, st.sampled_from(ProbeRows))
def test_no_phase_at_all_is_reuse(depth: int, num_context: int, rows: ProbeRows) -> None:
    assert LayerPlan(KVDEV, rows, 0, 0, 0.0).share(depth, num_context, 1) == 0


# Strategies


@pytest.mark.parametrize(
    ("name", "depth", "expected"),
    [
        ("cacheblend", 30, kvdev(1, 0, 0.15)),
        ("cacheblend", 80, kvdev(1, 0, 0.15)),
        ("kvdev", 30, kvdev(4, 2, 0.05)),
        ("qci", 30, qci(1, 8, 0.15)),
        ("prophetkv", 30, qci(0, 30, 0.20)),
        ("prophetkv", 5, qci(0, 5, 0.20)),
        ("prophetkv", 80, qci(0, 80, 0.20)),
        ("fusionrag", 30, qci(0, 30, 0.15, ALONE)),
        ("fusionrag", 5, qci(0, 5, 0.15, ALONE)),
    ],
)
def test_a_strategy_stands_at_its_published_point(
    name: str, depth: int, expected: LayerPlan
) -> None:
    assert LAYERWISE_STRATEGIES[name].plan(LayerwiseParams(), depth) == expected


def test_the_published_points_are_those_of_every_strategy() -> None:
    assert set(LAYERWISE_STRATEGIES) == {"kvdev", "qci", "cacheblend", "prophetkv", "fusionrag"}


@pytest.mark.parametrize("name", LAYERWISE_STRATEGIES)
def test_a_request_may_choose_every_phase(name: str) -> None:
    strategy = LAYERWISE_STRATEGIES[name]
    plan = strategy.plan(LayerwiseParams(warmup=3, probe=5, coverage=0.4), DEPTH)
    assert (plan.warmup, plan.probe, plan.coverage) == (3, 5, 0.4)
    assert (plan.signal, plan.rows, plan.filters) == (strategy.base.signal, strategy.base.rows, ())
    zeros = strategy.plan(LayerwiseParams(warmup=0, probe=0, coverage=0.0), DEPTH)
    assert (zeros.warmup, zeros.probe, zeros.coverage) == (0, 0, 0.0)


@pytest.mark.parametrize("name", ["prophetkv", "fusionrag"])
def test_a_probe_of_every_layer_starts_behind_the_warm_up(name: str) -> None:
    strategy = LAYERWISE_STRATEGIES[name]
    assert strategy.plan(LayerwiseParams(warmup=5), DEPTH).probe == DEPTH - 5
    assert strategy.plan(LayerwiseParams(warmup=DEPTH), DEPTH).probe == 0
    assert strategy.plan(LayerwiseParams(probe=2), DEPTH).probe == 2


@pytest.mark.parametrize("name", LAYERWISE_STRATEGIES)
def test_only_a_probe_of_all_tokens_narrows_bit_by_bit(name: str) -> None:
    strategy = LAYERWISE_STRATEGIES[name]
    plan = strategy.plan(LayerwiseParams(coverage=0.5, is_gradual=True), DEPTH)
    narrows = name in ("kvdev", "cacheblend")
    assert plan.filters == (gradual_filters(0.5) if narrows else ())


@pytest.mark.parametrize("name", LAYERWISE_STRATEGIES)
def test_a_strategy_refuses_phases_that_do_not_fit_its_model(name: str) -> None:
    with pytest.raises(RequestError, match=r"^pic_warmup: got 6, expected 0 to 5 layers"):
        LAYERWISE_STRATEGIES[name].plan(LayerwiseParams(warmup=6, probe=0), 5)


def test_published_phases_deeper_than_a_model_are_refused() -> None:
    with pytest.raises(RequestError, match="pic_probe: got 8, expected 0 to 3 layers behind"):
        LAYERWISE_STRATEGIES["qci"].plan(LayerwiseParams(), 4)
    with pytest.raises(RequestError, match="pic_warmup: got 4, expected 0 to 3 layers"):
        LAYERWISE_STRATEGIES["kvdev"].plan(LayerwiseParams(), 3)


def scored(values: list[float], plan: LayerPlan) -> Scored:
    columns = torch.arange(len(values)) + 20
    chunks = (Span(0, 20), Span(20, 20 + len(values)), Span(20 + len(values), 40 + len(values)))
    return Scored(torch.tensor(values), columns, chunks, plan)


@pytest.mark.parametrize("name", LAYERWISE_STRATEGIES)
def test_the_tokens_with_the_highest_scores_are_chosen(name: str) -> None:
    strategy = LAYERWISE_STRATEGIES[name]
    seen = scored([0.1, 0.5, 0.5, 0.9, math.nan, 0.2], strategy.base)
    assert strategy.choose(seen, 0).tolist() == []
    assert strategy.choose(seen, 2).tolist() == [1, 3]
    assert strategy.choose(seen, 4).tolist() == [1, 2, 3, 5]


class EveryOther(LayerwiseStrategy):
    """Every second token from a chunk's start, whatever it scores."""

    base = LayerPlan(KVDEV, ALL, warmup=1, probe=1, coverage=0.5)

    def choose(self, scored: Scored, count: int) -> Tensor:
        start = scored.chunks[1].start
        return torch.nonzero((scored.columns - start) % 2 == 0).flatten()[:count]


def test_a_strategy_of_ones_own_is_asked_the_same_questions() -> None:
    strategy = EveryOther()
    plan = strategy.plan(LayerwiseParams(probe=2, is_gradual=True), DEPTH)
    assert plan == kvdev(1, 2, 0.5, filters=gradual_filters(0.5))
    assert strategy.choose(scored([0.0] * 7, plan), 3).tolist() == [0, 2, 4]
    with pytest.raises(RequestError, match="pic_probe"):
        strategy.plan(LayerwiseParams(warmup=0, probe=1), DEPTH)


# Columns and spans


def test_columns_and_spans_by_hand() -> None:
    assert columns_of([Span(2, 5), Span(9, 10)]).tolist() == [2, 3, 4, 9]
    assert columns_of([]).tolist() == []
    assert spans_of(np.array([2, 3, 4, 9])) == (Span(2, 5), Span(9, 10))
    assert spans_of(columns_of([])) == ()
    assert spans_of(np.array([7])) == (Span(7, 8),)


@given(st.lists(spans(), max_size=8).map(merge_spans))
def test_merged_spans_come_back_from_their_columns(merged: tuple[Span, ...]) -> None:
    columns = columns_of(merged)
    assert columns.dtype == np.int64
    assert len(columns) == sum(span.num_tokens for span in merged)
    assert spans_of(columns) == merged


@given(st.sets(st.integers(0, 200)).map(sorted))
def test_columns_come_back_from_their_spans(columns: list[int]) -> None:
    own = np.array(columns, dtype=np.int64)
    assert columns_of(spans_of(own)).tolist() == columns
