"""Whether loading cached KV is faster than computing it: measured costs, and one comparison.

Knows milliseconds, bytes and tokens. Does not know tiers, payloads or clocks.

A run of segments is loaded only if

    T0 + bytes / bandwidth < fixed + tokens * per token

with the left side measured on the tier and the right side on this model. T0, what a load costs
whatever its size, sets a least useful hit length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock

SMOOTHING = 0.25
"""Weight of the newest sample in a correction."""

MAX_CORRECTION = 1000.0


@dataclass(frozen=True, slots=True)
class Line:
    """A straight line fitted to two measurements.

    Attributes:
        fixed_ms: Cost at size 0, at least 0.
        ms_per_unit: Cost of one more byte or token, at least 0.
    """

    fixed_ms: float
    ms_per_unit: float

    def at(self, size: int) -> float:
        """Milliseconds for a size."""
        return self.fixed_ms + size * self.ms_per_unit


def fit_line(small: tuple[int, float], large: tuple[int, float]) -> Line:
    """The line through two measurements, each (size, milliseconds), the larger size last.

    Noise may make the larger one faster: then all of its cost is proportional.
    """
    (small_size, small_ms), (large_size, large_ms) = small, large
    slope = (large_ms - small_ms) / (large_size - small_size)
    fixed = small_ms - slope * small_size
    if slope <= 0 or fixed < 0:
        return Line(0.0, large_ms / large_size)
    return Line(fixed, slope)


@dataclass(slots=True)
class CostModel:
    """A line, and how far recent measurements lie above or below it; thread-safe.

    The line comes from two measurements made for that purpose and is renewed now and then; what
    is observed in between, mostly of one size, corrects it as a whole.
    """

    _line: Line | None = None
    _correction: float = 1.0
    _lock: Lock = field(default_factory=Lock, repr=False)

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return self._line is not None

    def predict_ms(self, size: int) -> float | None:
        """Milliseconds for a size; None before the first measurement."""
        with self._lock:
            return None if self._line is None else self._line.at(size) * self._correction

    @property
    def fixed_ms(self) -> float:
        """Cost at size 0 as it is now; 0 before the first measurement."""
        with self._lock:
            return 0.0 if self._line is None else self._line.fixed_ms * self._correction

    def renew(self, line: Line) -> None:
        """Replace the line by a new one, which needs no correction yet."""
        with self._lock:
            self._line, self._correction = line, 1.0

    def observe(self, size: int, elapsed_ms: float) -> None:
        """Learn from one measurement; the first alone makes a line through the origin."""
        if size <= 0 or elapsed_ms <= 0:
            return
        with self._lock:
            if self._line is None:
                self._line = Line(0.0, elapsed_ms / size)
                return
            ratio = elapsed_ms / max(self._line.at(size), 1e-6)
            ratio = min(max(ratio, 1 / MAX_CORRECTION), MAX_CORRECTION)
            self._correction += SMOOTHING * (ratio - self._correction)


def is_worth_loading(num_bytes: int, num_tokens: int, load: CostModel, compute: CostModel) -> bool:
    """Whether a run of segments is faster loaded than computed; yes while nothing was computed."""
    load_ms, compute_ms = load.predict_ms(num_bytes), compute.predict_ms(num_tokens)
    if compute_ms is None:
        return True
    return load_ms is not None and load_ms < compute_ms
