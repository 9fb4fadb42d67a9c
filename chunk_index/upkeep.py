"""Background housekeeping: what a server does for its tiers every so often, in one thread.

Knows intervals and tasks. Does not know what a task does; one that fails is logged and tried again
at its next turn.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event, Thread

from sglang_ext.errors import IndexUnavailable, TierUnavailable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Chore:
    """Something to do again and again.

    Attributes:
        name: For the log.
        interval_s: Seconds from one end to the next start.
        run: What to do; may block, and then delays the others.
    """

    name: str
    interval_s: float
    run: Callable[[], object]


class Upkeep:
    """Runs chores until it is closed."""

    def __init__(self, chores: Sequence[Chore]) -> None:
        """Start the thread; every chore is due at once, in the order given."""
        self._chores = list(chores)
        self._is_closed = Event()
        self._failed: set[str] = set()
        self._thread = Thread(target=self._run, name="pic-upkeep", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """End after the present chore; waits at most `timeout_s` for it."""
        self._is_closed.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        due_s = [time.monotonic()] * len(self._chores)
        while not self._is_closed.is_set():
            for index, chore in enumerate(self._chores):
                if due_s[index] <= time.monotonic() and not self._is_closed.is_set():
                    self._do(chore)
                    due_s[index] = time.monotonic() + chore.interval_s
            pause_s = min(due_s, default=float("inf")) - time.monotonic()
            self._is_closed.wait(max(0.0, min(pause_s, 60.0)))

    def _do(self, chore: Chore) -> None:
        try:
            chore.run()
        except (IndexUnavailable, TierUnavailable) as exc:
            if chore.name not in self._failed:
                logger.warning("pic upkeep: %s: %s (not said again)", chore.name, exc)
            self._failed.add(chore.name)
        except Exception:
            logger.exception("pic error in upkeep: %s", chore.name)
