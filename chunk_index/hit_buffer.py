"""Hits that are counted here and written to a shared index later, in batches.

Knows keys, counts and the order of last use. Does not know where they are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from threading import Lock

from sglang_ext.chunk_index.identity import ChunkKey

MAX_KEYS = 65_536
"""Keys counted at most; further ones are not counted until the buffer is taken."""


@dataclass(frozen=True, slots=True)
class Hits:
    """What a node is to be told.

    Attributes:
        key: The node.
        num_hits: Hits since the last time.
        last_ms: Time of the last one.
    """

    key: ChunkKey
    num_hits: int
    last_ms: int


class HitBuffer:
    """Counts by key, the longest unused first; thread-safe and bounded."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._lock = Lock()
        self._counted: dict[ChunkKey, tuple[int, int]] = {}  # hits, time of the last one

    def add(self, path: Sequence[ChunkKey], now_ms: int) -> None:
        """Count one hit of each key; in a chunk parents stand before their children.

        Modifies the buffer. Within a chunk the deepest is used first, as everywhere.
        """
        with self._lock:
            counted = self._counted
            for key in _deepest_first(path):
                num_hits, last_ms = counted.pop(key, (0, now_ms))
                if num_hits or len(counted) < self._max_keys:
                    counted[key] = num_hits + 1, max(last_ms, now_ms)

    def take(self) -> list[Hits]:
        """All that was counted, the longest unused first. Empties the buffer."""
        with self._lock:
            counted, self._counted = self._counted, {}
        return [Hits(key, *hits) for key, hits in counted.items()]


def _deepest_first(path: Sequence[ChunkKey]) -> Iterator[ChunkKey]:
    """The keys of each chunk, which have their first byte in common, in reverse."""
    for _, chunk in groupby(path, itemgetter(0)):
        yield from reversed(list(chunk))
