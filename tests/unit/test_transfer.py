"""Measured costs: what they predict, how they follow a tier, and which side they choose."""

from __future__ import annotations

from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.chunk_index.transfer import CostModel, Line, fit_line, is_worth_loading

sizes = st.integers(1, 1 << 30)
milliseconds = st.floats(0, 1e6)


def model(fixed_ms: float, ms_per_unit: float) -> CostModel:
    cost = CostModel()
    cost.renew(Line(fixed_ms, ms_per_unit))
    return cost


# Lines


def test_two_exact_measurements_give_back_their_line() -> None:
    line = fit_line((1000, 3.0), (11_000, 23.0))
    assert line.fixed_ms == pytest.approx(1.0)
    assert line.ms_per_unit == pytest.approx(0.002)
    assert line.at(6000) == pytest.approx(13.0)


@given(small=sizes, extra=sizes, small_ms=milliseconds, large_ms=milliseconds)
def test_a_line_through_any_measurements_never_costs_less_than_nothing(
    small: int, extra: int, small_ms: float, large_ms: float
) -> None:
    line = fit_line((small, small_ms), (small + extra, large_ms))
    assert line.fixed_ms >= 0
    assert line.ms_per_unit >= 0
    assert line.at(small + extra) == pytest.approx(large_ms, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("large_ms", [5.0, 4.0, 60.0])
def test_measurements_that_noise_put_off_a_line_make_all_of_the_larger_one_proportional(
    large_ms: float,
) -> None:
    """The larger faster than the smaller, or so much slower that size 0 would cost less than 0."""
    assert fit_line((100, 5.0), (1000, large_ms)) == Line(0.0, large_ms / 1000)


@given(
    fixed=st.floats(0.5, 10),
    per_unit=st.floats(0.001, 1),
    noise=st.tuples(st.floats(0.95, 1.05), st.floats(0.95, 1.05)),
)
def test_little_noise_moves_a_prediction_little(
    fixed: float, per_unit: float, noise: tuple[float, float]
) -> None:
    exact = Line(fixed, per_unit)
    line = fit_line((10, exact.at(10) * noise[0]), (10_000, exact.at(10_000) * noise[1]))
    assert line.at(10_000) == pytest.approx(exact.at(10_000), rel=0.051)
    assert line.at(5000) == pytest.approx(exact.at(5000), rel=0.11)


# Models


def test_nothing_is_predicted_before_the_first_measurement() -> None:
    cost = CostModel()
    assert not cost.is_known
    assert cost.predict_ms(100) is None
    assert cost.fixed_ms == 0


def test_the_first_observation_alone_is_proportional() -> None:
    cost = CostModel()
    cost.observe(100, 5.0)
    assert cost.is_known
    assert cost.predict_ms(300) == pytest.approx(15.0)


def test_predictions_follow_a_tier_that_becomes_ten_times_slower_within_a_few_loads() -> None:
    cost = model(1.0, 0.001)
    exact = Line(10.0, 0.01)
    for _ in range(4):
        cost.observe(8000, exact.at(8000))
    assert cost.predict_ms(8000) > 0.6 * exact.at(8000)  # type: ignore[operator]
    for _ in range(8):
        cost.observe(8000, exact.at(8000))
    assert cost.predict_ms(8000) == pytest.approx(exact.at(8000), rel=0.05)
    assert cost.predict_ms(100) == pytest.approx(exact.at(100), rel=0.05)
    assert cost.fixed_ms == pytest.approx(10.0, rel=0.05)


def test_one_slow_load_alone_does_not_condemn_a_tier() -> None:
    cost = model(1.0, 0.001)
    cost.observe(8000, 90.0)
    assert cost.predict_ms(8000) < 0.4 * 90  # type: ignore[operator]
    for _ in range(12):
        cost.observe(8000, 9.0)
    assert cost.predict_ms(8000) == pytest.approx(9.0, rel=0.1)


def test_a_renewed_line_forgets_what_was_observed_before() -> None:
    cost = model(1.0, 0.001)
    for _ in range(20):
        cost.observe(8000, 1e6)
    cost.renew(Line(2.0, 0.002))
    assert cost.predict_ms(8000) == pytest.approx(18.0)
    assert cost.fixed_ms == pytest.approx(2.0)


def test_even_an_absurd_observation_is_forgotten_after_some_more() -> None:
    cost = model(1.0, 0.001)
    cost.observe(1, 1e12)
    for _ in range(60):
        cost.observe(8000, 9.0)
    assert cost.predict_ms(8000) == pytest.approx(9.0, rel=0.1)


@pytest.mark.parametrize(("size", "elapsed_ms"), [(0, 5.0), (-1, 5.0), (5, 0.0), (5, -1.0)])
def test_what_tells_nothing_is_not_learned(size: int, elapsed_ms: float) -> None:
    cost = CostModel()
    cost.observe(size, elapsed_ms)
    assert not cost.is_known
    cost.renew(Line(1.0, 1.0))
    cost.observe(size, elapsed_ms)
    assert cost.predict_ms(10) == pytest.approx(11.0)


@given(
    st.lists(st.tuples(sizes, st.floats(1e-6, 1e9)), max_size=30),
    st.tuples(st.floats(0, 1e3), st.floats(0, 1)),
)
def test_predictions_stay_finite_and_grow_with_size(
    observations: list[tuple[int, float]], line: tuple[float, float]
) -> None:
    cost = model(*line)
    for size, elapsed_ms in observations:
        cost.observe(size, elapsed_ms)
    small, large = cost.predict_ms(10), cost.predict_ms(1 << 30)
    assert small is not None
    assert large is not None
    assert 0 <= cost.fixed_ms <= small <= large < float("inf")


def test_threads_may_observe_at_once() -> None:
    cost = model(0.0, 1.0)

    def observe() -> None:
        for _ in range(500):
            cost.observe(10, 20.0)

    threads = [Thread(target=observe) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cost.predict_ms(10) == pytest.approx(20.0)


# The choice


def test_the_faster_side_is_chosen_and_a_tie_is_computed() -> None:
    compute = model(2.0, 0.1)
    assert is_worth_loading(1000, 100, model(1.0, 0.01), compute)
    assert not is_worth_loading(1000, 100, model(1.0, 0.02), compute)
    assert not is_worth_loading(1000, 100, model(2.0, 0.01), compute)


def test_a_high_fixed_cost_sets_a_least_useful_length() -> None:
    load, compute = model(50.0, 0.0), model(0.0, 1.0)
    assert [n for n in (10, 50, 51, 100) if is_worth_loading(n * 8, n, load, compute)] == [51, 100]


def test_loading_is_tried_while_nothing_was_computed() -> None:
    assert is_worth_loading(1000, 1, model(1e6, 1.0), CostModel())


def test_a_tier_that_was_never_measured_is_not_loaded_from_once_computing_was() -> None:
    assert not is_worth_loading(1000, 100, CostModel(), model(0.0, 1.0))
