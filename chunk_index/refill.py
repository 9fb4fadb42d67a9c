"""Notices that a shared index was lost, and fills it again from one server's arena.

Knows the mark that a shared index carries from its first server on. An index that comes back
without it, or with another, has lost its records: a Redis that restarted without persistence, or
was flushed. Does not know connections or when to look.
"""

from __future__ import annotations

import logging
import secrets
from typing import Generic, Protocol

from sglang_ext.chunk_index import keys
from sglang_ext.chunk_index.arena import Arena
from sglang_ext.chunk_index.identity import ChunkKey
from sglang_ext.chunk_index.index import NodeRecord
from sglang_ext.chunk_index.payloads import PayloadT
from sglang_ext.chunk_index.redis_connection import Argument, Reply
from sglang_ext.chunk_index.tier import Tier
from sglang_ext.errors import PayloadLost

logger = logging.getLogger(__name__)


class _Link(Protocol):
    def call(self, *words: Argument) -> Reply:
        """Send one command and wait for its reply."""
        ...


class Refill(Generic[PayloadT]):
    """Of one shared tier; used by one thread."""

    def __init__(self, link: _Link, arena: Arena[PayloadT], shared: Tier[PayloadT]) -> None:
        self._link = link
        self._arena = arena
        self._shared = shared
        self._mark: bytes | None = None

    def is_due(self) -> bool:
        """Whether the index is another one than at the last look; marks one without a mark.

        Raises:
            IndexUnavailable: It cannot be asked.
        """
        mark = self._link.call("GET", keys.MARK)
        if mark is None:
            self._link.call("SET", keys.MARK, secrets.token_bytes(16), "NX")
            mark = self._link.call("GET", keys.MARK)
        old_mark, self._mark = self._mark, mark if isinstance(mark, bytes) else None
        return old_mark is not None and old_mark != self._mark

    def run(self, now_ms: int) -> int:
        """Offer the shared tier everything the arena has; returns how many segments it took."""
        num_taken = 0
        for record in _parents_first([view.record for view in self._arena.index.scan()]):
            try:
                payload = self._arena.store.get(record)
            except PayloadLost:
                continue  # it left the arena meanwhile
            num_taken += self._shared.keep(record, payload, now_ms) is None
        logger.info("pic tier=%s was lost and filled again: segments=%d", "shared", num_taken)
        return num_taken


def _parents_first(records: list[NodeRecord]) -> list[NodeRecord]:
    """Records in an order in which each can be published; orphans are left out."""
    children: dict[ChunkKey | None, list[NodeRecord]] = {}
    for record in records:
        children.setdefault(record.parent, []).append(record)
    ordered = children.get(None, [])
    for record in ordered:  # grows while it is read
        ordered.extend(children.get(record.key, ()))
    return ordered
