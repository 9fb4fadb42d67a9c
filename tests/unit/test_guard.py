"""Strategies that are too far from full prefill step back, and come forward again in time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.guard import AGAIN_MS, FULL_LEVEL, WINDOW, Guard, Step, at_level
from sglang_ext.recompute.layerwise import LayerwiseParams
from sglang_ext.recompute.selection import SelectionParams
from sglang_ext.request import STRATEGIES, RequestOptions


def observe(guard: Guard, divergence: float, count: int, now_ms: int = 0) -> list[Step]:
    level = guard.level("qci", now_ms)
    steps = [guard.observe("qci", level, divergence, now_ms) for _ in range(count)]
    return [step for step in steps if step is not None]


def test_a_strategy_never_checked_is_served_as_asked() -> None:
    guard = Guard(0.5)
    assert guard.level("qci", 0) == 0
    assert guard.levels == {}


def test_a_whole_window_above_the_limit_leads_one_level_back() -> None:
    guard = Guard(0.5)
    assert observe(guard, 0.6, WINDOW - 1) == []
    assert observe(guard, 0.6, 1) == [Step("qci", 1, pytest.approx(0.6))]
    assert guard.level("qci", 0) == 1
    assert guard.level("kvdev", 0) == 0


def test_the_mean_counts_and_not_a_single_check() -> None:
    guard = Guard(0.5)
    assert observe(guard, 0.4, WINDOW - 1) == []
    assert observe(guard, 2.0, 1) == []


def test_a_mean_at_the_limit_is_within_it() -> None:
    assert observe(Guard(0.5), 0.5, 3 * WINDOW) == []


def test_a_level_is_judged_by_its_own_checks() -> None:
    guard = Guard(0.5)
    observe(guard, 5.0, WINDOW)
    late = [guard.observe("qci", 0, 5.0, 0) for _ in range(WINDOW)]  # served before the step
    assert late == [None] * WINDOW
    assert guard.levels == {"qci": 1}
    assert observe(guard, 5.0, WINDOW) == [Step("qci", FULL_LEVEL, 5.0)]
    assert observe(guard, 5.0, WINDOW) == []


def test_a_level_is_left_after_a_while() -> None:
    guard = Guard(0.5)
    observe(guard, 5.0, WINDOW)
    observe(guard, 5.0, WINDOW)
    assert guard.level("qci", AGAIN_MS - 1) == FULL_LEVEL
    assert guard.level("qci", AGAIN_MS) == 1
    assert guard.level("qci", 2 * AGAIN_MS - 1) == 1
    assert guard.level("qci", 2 * AGAIN_MS) == 0
    assert guard.level("qci", 9 * AGAIN_MS) == 0


@given(
    strategy=st.sampled_from(STRATEGIES),
    n_avg=st.integers(0, 1 << 20),
    coverage=st.none() | st.floats(0, 1),
    share=st.floats(0.01, 1),
)
def test_a_level_gives_a_budget_that_is_allowed_and_not_smaller(
    strategy: str, n_avg: int, coverage: float | None, share: float
) -> None:
    asked = RequestOptions(
        strategy=strategy,
        selection=SelectionParams(n_avg=n_avg, max_share=share),
        layerwise=LayerwiseParams(coverage=coverage),
    )
    assert at_level(asked, 0) == asked
    given_more = at_level(asked, 1)
    assert given_more.selection.n_avg >= asked.selection.n_avg
    assert given_more.selection.max_share >= asked.selection.max_share
    got = given_more.layerwise.coverage
    assert got is None or 0 <= got <= 1
    assert coverage is None or got is None or got >= coverage


def test_twice_the_budget_is_twice_what_was_asked_or_the_strategys_own() -> None:
    daric = RequestOptions(selection=SelectionParams(n_avg=16, max_share=0.25))
    assert at_level(daric, 1).selection == SelectionParams(n_avg=32, max_share=0.5)
    own = at_level(RequestOptions(strategy="qci"), 1).layerwise
    assert own == LayerwiseParams(coverage=0.3)
    asked = RequestOptions(strategy="qci", layerwise=LayerwiseParams(2, 3, 0.1))
    assert at_level(asked, 1).layerwise == LayerwiseParams(2, 3, 0.2)
    assert at_level(RequestOptions(strategy="reuse"), 1).strategy == "daric"
