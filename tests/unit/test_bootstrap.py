"""Percentile bootstrap: exact where it can be worked out, and what holds for every sample."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.scripts.quality.bootstrap import Interval, bootstrap_ci, bootstrap_ratio_ci

VALUES = st.lists(st.floats(0, 1, width=32), min_size=1, max_size=12)


def test_equal_values_leave_no_doubt() -> None:
    assert bootstrap_ci([0.25] * 7) == Interval(0.25, 0.25)
    assert bootstrap_ci([3.0]) == Interval(3.0, 3.0)


def test_one_success_in_ten_by_the_binomial_distribution() -> None:
    # A resample has k successes with k ~ B(10, 0.1). P(k = 0) = 0.349 is above 0.025;
    # P(k <= 2) = 0.930 and P(k <= 3) = 0.987, so that the upper end is 3 of 10.
    assert bootstrap_ci([1.0] + [0.0] * 9) == Interval(0.0, pytest.approx(0.3))


def test_a_lower_confidence_takes_the_quantiles_it_says() -> None:
    # As above: P(k <= 0) = 0.349, P(k <= 1) = 0.736. The middle half ends at 2 of 10.
    assert bootstrap_ci([1.0] + [0.0] * 9, confidence=0.5) == Interval(0.0, pytest.approx(0.2))


def test_the_interval_of_many_values_is_that_of_the_normal_distribution() -> None:
    interval = bootstrap_ci([0.0, 1.0] * 200)
    half = 1.96 * math.sqrt(0.25 / 400)
    assert interval.low == pytest.approx(0.5 - half, abs=0.006)
    assert interval.high == pytest.approx(0.5 + half, abs=0.006)


def test_a_seed_is_a_draw() -> None:
    values = [index / 37 % 1 for index in range(0, 370, 11)]
    assert bootstrap_ci(values, seed=1) == bootstrap_ci(values, seed=1)
    assert bootstrap_ci(values, seed=1) != bootstrap_ci(values, seed=2)
    assert bootstrap_ratio_ci(values, values[::-1], seed=1) != bootstrap_ratio_ci(
        values, values[::-1], seed=2
    )


def test_a_single_draw_is_both_ends() -> None:
    interval = bootstrap_ci([0.1, 0.5, 0.7], num_resamples=1)
    assert interval.low == interval.high


@given(VALUES, st.integers(0, 100))
def test_an_interval_lies_within_its_values(values: list[float], seed: int) -> None:
    interval = bootstrap_ci(values, num_resamples=50, seed=seed)
    assert min(values) - 1e-12 <= interval.low <= interval.high <= max(values) + 1e-12


@given(VALUES)
def test_moving_all_values_moves_the_interval(values: list[float]) -> None:
    interval = bootstrap_ci(values, num_resamples=50)
    moved = bootstrap_ci([value + 2 for value in values], num_resamples=50)
    assert moved.low == pytest.approx(interval.low + 2)
    assert moved.high == pytest.approx(interval.high + 2)


@given(VALUES)
def test_a_higher_confidence_takes_in_a_lower_one(values: list[float]) -> None:
    wide = bootstrap_ci(values, num_resamples=200, confidence=0.99)
    narrow = bootstrap_ci(values, num_resamples=200, confidence=0.5)
    assert wide.low <= narrow.low <= narrow.high <= wide.high


def test_a_ratio_that_is_the_same_for_every_prompt_is_certain() -> None:
    full = [0.1, 0.9, 0.3, 1.0, 0.6]
    kept = bootstrap_ratio_ci([0.8 * value for value in full], full)
    assert kept.low == pytest.approx(0.8)
    assert kept.high == pytest.approx(0.8)


def test_a_ratio_is_that_of_the_means_not_the_mean_of_ratios() -> None:
    # Drawn in pairs: (9, 10) and (1, 1), each twice or both. The ratios are 0.9, 10/11 and 1.
    ratios = bootstrap_ratio_ci([9.0, 1.0], [10.0, 1.0], confidence=0.2)
    assert ratios.low == ratios.high == pytest.approx(10 / 11)
    ends = bootstrap_ratio_ci([9.0, 1.0], [10.0, 1.0])
    assert ends == Interval(pytest.approx(0.9), pytest.approx(1.0))


def test_a_draw_of_zeros_only_is_skipped() -> None:
    interval = bootstrap_ratio_ci([0.0, 0.5], [0.0, 1.0])
    assert interval == Interval(0.5, 0.5)


def test_a_ratio_to_zero_in_every_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="denominators: got a mean of 0 in every draw"):
        bootstrap_ratio_ci([0.5, 0.5], [0.0, 0.0])


def test_a_ratio_needs_pairs() -> None:
    with pytest.raises(ValueError, match="denominators: got 1, expected 2"):
        bootstrap_ratio_ci([0.5, 0.5], [1.0])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], r"got shape \(0,\), expected at least one number"),
        ([[1.0]], r"got shape \(1, 1\), expected at least one number"),
        ([0.5, math.nan], "got nan, expected finite numbers"),
        ([math.inf], "got inf, expected finite numbers"),
    ],
)
def test_values_that_have_no_mean_are_refused(values: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=f"values: {message}"):
        bootstrap_ci(values)
    with pytest.raises(ValueError, match=f"numerators: {message}"):
        bootstrap_ratio_ci(values, [1.0])
    with pytest.raises(ValueError, match=f"denominators: {message}"):
        bootstrap_ratio_ci([1.0], values)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_resamples": 0}, "num_resamples: got 0, expected at least 1"),
        ({"confidence": 0.0}, r"confidence: got 0\.0, expected above 0 and below 1"),
        ({"confidence": 1.0}, r"confidence: got 1\.0, expected above 0 and below 1"),
        ({"confidence": 95.0}, r"confidence: got 95\.0, expected above 0 and below 1"),
    ],
)
def test_draws_that_cannot_be_made_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bootstrap_ci([1.0], **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        bootstrap_ratio_ci([1.0], [1.0], **arguments)  # type: ignore[arg-type]
