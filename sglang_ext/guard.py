"""Watches how far strategies are from full prefill, and steps back from those that are too far.

Knows strategies by name, divergences and the time. Knows nothing of models, KV or how a divergence
is measured; changes nothing but what it remembers.

    level 0    as asked
    level 1    twice the budget
    level 2    full prefill
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sglang_ext.recompute.strategies.registry import LAYERWISE_STRATEGIES
from sglang_ext.request import MAX_BUDGET, RequestOptions

WINDOW = 20
"""Checks whose mean is compared with the limit; a level is judged anew when it is entered."""
AGAIN_MS = 600_000
"""How long a strategy stays at a level before the level below it is tried again."""
FULL_LEVEL = 2


@dataclass(frozen=True, slots=True)
class Step:
    """A strategy was moved to another level.

    Attributes:
        strategy: Its name.
        level: The new one.
        mean: Mean divergence that led to it, nats; None if time did.
    """

    strategy: str
    level: int
    mean: float | None


@dataclass(slots=True)
class _Record:
    level: int = 0
    since_ms: int = 0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))


class Guard:
    """Levels of strategies; see the module's docstring.

    Args:
        limit: Most mean first-token KL to full prefill, nats.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._records: dict[str, _Record] = {}

    @property
    def levels(self) -> Mapping[str, int]:
        """The level of every strategy that was ever checked."""
        return {strategy: record.level for strategy, record in self._records.items()}

    def level(self, strategy: str, now_ms: int) -> int:
        """A strategy's level; one that has stood long enough is tried one level lower."""
        record = self._records.get(strategy)
        if record is None:
            return 0
        if record.level and now_ms - record.since_ms >= AGAIN_MS:
            self._move(record, record.level - 1, now_ms)
        return record.level

    def observe(self, strategy: str, level: int, divergence: float, now_ms: int) -> Step | None:
        """Remember a check; returns the step it led to.

        Args:
            strategy: The strategy's name.
            level: The level the request was served at; one from another level says nothing.
            divergence: First-token KL to full prefill, nats.
            now_ms: Milliseconds since the epoch.
        """
        record = self._records.setdefault(strategy, _Record(since_ms=now_ms))
        if level != record.level:
            return None
        record.recent.append(divergence)
        mean = sum(record.recent) / len(record.recent)
        if len(record.recent) < WINDOW or mean <= self._limit or record.level == FULL_LEVEL:
            return None
        self._move(record, record.level + 1, now_ms)
        return Step(strategy, record.level, mean)

    def _move(self, record: _Record, level: int, now_ms: int) -> None:
        record.level, record.since_ms = level, now_ms
        record.recent.clear()


def at_level(options: RequestOptions, level: int) -> RequestOptions:
    """A request's options at a level below `FULL_LEVEL`: the same, or with twice the budget."""
    if level == 0:
        return options
    strategy = LAYERWISE_STRATEGIES.get(options.strategy)
    if strategy is not None:
        asked = options.layerwise.coverage
        coverage = strategy.base.coverage if asked is None else asked
        params = replace(options.layerwise, coverage=min(1.0, 2 * coverage))
        return replace(options, layerwise=params)
    if options.strategy == "reuse":
        return replace(options, strategy="daric")
    selection = options.selection
    return replace(
        options,
        selection=replace(
            selection,
            n_avg=min(MAX_BUDGET, max(1, 2 * selection.n_avg)),
            max_share=min(1.0, 2 * selection.max_share),
        ),
    )
