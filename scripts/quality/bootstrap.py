"""How far a mean score could be off, had other prompts been drawn: percentile bootstrap.

Knows numbers, one a prompt; does not know what they measure.

Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), §13.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """Where the value lies with the confidence that was asked for.

    Attributes:
        low: Its lower end.
        high: Its upper end; not below `low`.
    """

    low: float
    high: float


def bootstrap_ci(
    values: Sequence[float],
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> Interval:
    """Confidence interval of the mean of values.

    Args:
        values: One a prompt, finite; prompts are drawn again with replacement.
        num_resamples: Draws of as many prompts as there are, at least 1.
        seed: Of the draws; the same seed gives the same interval.
        confidence: Share of the resampled means that lie inside, above 0 and below 1.

    Raises:
        ValueError: An argument is out of range; the message says which.
    """
    sample = _as_sample("values", values)
    _check_draws(num_resamples, confidence)
    return _between(sample[_draw(len(sample), num_resamples, seed)].mean(axis=1), confidence)


def bootstrap_ratio_ci(
    numerators: Sequence[float],
    denominators: Sequence[float],
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> Interval:
    """Confidence interval of `mean(numerators) / mean(denominators)`, resampled in pairs.

    Args:
        numerators: One a prompt, finite: its score when computed one way.
        denominators: Its score when computed the other way, in the same order. A draw with mean 0
            has no ratio and is skipped.
        num_resamples: See `bootstrap_ci`.
        seed: See `bootstrap_ci`.
        confidence: See `bootstrap_ci`.

    Raises:
        ValueError: An argument is out of range, there are not as many of the one as of the other,
            or no draw has a ratio.
    """
    tops = _as_sample("numerators", numerators)
    bottoms = _as_sample("denominators", denominators)
    _check_draws(num_resamples, confidence)
    if len(tops) != len(bottoms):
        raise ValueError(f"denominators: got {len(bottoms)}, expected {len(tops)}, one a numerator")
    drawn = _draw(len(tops), num_resamples, seed)
    divisors = bottoms[drawn].mean(axis=1)
    has_ratio = divisors != 0
    if not has_ratio.any():
        raise ValueError("denominators: got a mean of 0 in every draw, expected scores above 0")
    ratios = tops[drawn].mean(axis=1)[has_ratio] / divisors[has_ratio]
    return _between(ratios, confidence)


def _as_sample(name: str, values: Sequence[float]) -> NDArray[np.float64]:
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or not len(sample):
        raise ValueError(f"{name}: got shape {sample.shape}, expected at least one number in a row")
    if not np.isfinite(sample).all():
        raise ValueError(f"{name}: got {sample[~np.isfinite(sample)][0]}, expected finite numbers")
    return sample


def _check_draws(num_resamples: int, confidence: float) -> None:
    if num_resamples < 1:
        raise ValueError(f"num_resamples: got {num_resamples}, expected at least 1")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: got {confidence}, expected above 0 and below 1")


def _draw(num_values: int, num_resamples: int, seed: int) -> NDArray[np.int64]:
    """`[num_resamples, num_values]` indices of values, each row drawn with replacement."""
    return np.random.default_rng(seed).integers(num_values, size=(num_resamples, num_values))


def _between(statistics: NDArray[np.float64], confidence: float) -> Interval:
    low, high = np.quantile(statistics, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(low), float(high))
