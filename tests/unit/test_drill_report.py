"""How the drills judge answers and sum up requests."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.drills.drill import MAX_KL, Outcome, judge, kl_divergence, metric_in

METRICS = """\
# HELP sglang_pic_stores_total Segments offered to the cache.
sglang_pic_stores_total{model_name="m",result="stored",tier="shared"} 7.0
sglang_pic_stores_total{model_name="m",result="stored",tier="host"} 9.0
sglang_pic_stores_total{model_name="m",result="no_room",tier="shared"} 2.0
sglang_pic_stores_total_created{model_name="m",result="stored",tier="shared"} 1e9
"""


def test_an_answer_is_no_distance_from_itself_and_some_from_another() -> None:
    logprobs = np.log([0.5, 0.3, 0.2])
    other = np.log([0.2, 0.3, 0.5])
    assert kl_divergence(logprobs, logprobs) == 0
    assert kl_divergence(logprobs, other) == pytest.approx(0.3 * math.log(2.5))


def test_tokens_that_the_right_answer_excludes_count_nothing() -> None:
    expected = np.array([0.0, -math.inf])
    assert kl_divergence(expected, np.log([0.5, 0.5])) == pytest.approx(math.log(2))


@pytest.mark.parametrize("kl", [MAX_KL * 1.01, math.inf, math.nan])
def test_an_answer_too_far_from_the_right_one_is_wrong(kl: float) -> None:
    assert Outcome(0, 0.0, 1.0, kl=kl).is_wrong
    assert not Outcome(0, 0.0, 1.0, kl=MAX_KL).is_wrong


def test_wrong_and_lost_requests_are_counted_apart() -> None:
    outcomes = [
        Outcome(0, 0.0, 1.0, kl=0.0),
        Outcome(0, 0.0, 1.0, kl=1.0),
        Outcome(0, 0.0, 1.0, error="ReadTimeout"),
        Outcome(0, 0.0, 1.0, error="internal_error"),
    ]
    row = judge("a drill", outcomes, {}, recovered_s=1.234)
    assert (row.requests, row.wrong, row.lost) == (4, 1, 2)
    assert row.recovered_s == 1.23


def test_the_longest_wait_is_what_a_request_says_or_took_beyond_a_calm_one() -> None:
    said = Outcome(0, 0.0, 80.0, kl=0.0, load_ms=50.0)
    slow = Outcome(1, 0.0, 190.0, kl=0.0, load_ms=20.0)
    unknown = Outcome(2, 0.0, 9000.0, kl=0.0)
    assert judge("a drill", [said, unknown], {0: 100.0}).max_wait_ms == 50.0
    assert judge("a drill", [said, slow], {0: 100.0, 1: 100.0}).max_wait_ms == 90.0


def test_a_drill_that_did_not_recover_says_so() -> None:
    assert judge("a drill", [], {}).recovered_s is None


def test_a_metric_is_the_sum_of_the_samples_with_these_labels() -> None:
    assert metric_in(METRICS, "sglang_pic_stores_total", tier="shared") == 9
    assert metric_in(METRICS, "sglang_pic_stores_total", tier="shared", result="stored") == 7
    assert metric_in(METRICS, "sglang_pic_stores_total") == 18
