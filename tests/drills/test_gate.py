"""Whether the answers that all drills take for right are good ones."""

from __future__ import annotations

import statistics

from tests.drills.conftest import Reference
from tests.drills.drill import kl_divergence

MAX_MEDIAN_KL = 0.15
MIN_AGREEMENT = 0.8
MIN_MEDIAN_KL_OF_OTHERS = 3.0


def test_right_answers_are_those_of_an_ordinary_prefill_within_the_strategys_error(
    reference: Reference,
) -> None:
    """DARIC with few tokens differs a little; the answer to another prompt, altogether."""
    answers = [case.expected for case in reference.cases]
    own = [kl_divergence(*pair) for pair in zip(reference.full, answers, strict=True)]
    others = [
        kl_divergence(*pair) for pair in zip(reference.full, answers[1:] + answers[:1], strict=True)
    ]
    is_same = [
        full.argmax() == answer.argmax()
        for full, answer in zip(reference.full, answers, strict=True)
    ]
    assert statistics.median(own) <= MAX_MEDIAN_KL
    assert statistics.median(others) >= MIN_MEDIAN_KL_OF_OTHERS
    assert statistics.fmean(is_same) >= MIN_AGREEMENT
