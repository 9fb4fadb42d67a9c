"""`Tier`: one index and one payload store, kept in agreement.

Knows the order in which the two must change: bytes are reserved, then the payload is put, then its
record is published; a record leaves the index before its payload is dropped. What fails is counted
and is a miss; nothing raises. Does not know what a payload holds, which other tiers there are, or
which of a request's segments are worth loading or storing.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Generic, Literal

from sglang_ext.chunk_index.identity import ChunkKey
from sglang_ext.chunk_index.index import (
    ChunkIndex,
    IndexStats,
    NodeRecord,
    Publication,
    Reservation,
    Shortage,
)
from sglang_ext.chunk_index.payloads import OnBytes, PayloadStore, PayloadT
from sglang_ext.errors import IndexUnavailable, PayloadLost, TierUnavailable

logger = logging.getLogger(__name__)

Refusal = Literal["too_large", "no_room", "orphan", "busy", "unavailable"]
"""Why a segment was not stored: larger than the whole budget; too little can be evicted, or the
owner's quota is full of pinned nodes; its parent is not cached; a removed segment of the same key
is still there; index or store cannot be reached."""

REFUSALS: tuple[Refusal, ...] = ("too_large", "no_room", "orphan", "busy", "unavailable")
BATCH = 256
MAX_EVICTION_ROUNDS = 64


@dataclass(frozen=True, slots=True)
class TierStats:
    """Totals now, and counters since the tier was made.

    Attributes:
        name: `host`, `disk` or `shared`.
        num_entries: Segments that can be matched.
        used_bytes: Payload bytes of those, and reserved ones.
        budget_bytes: Most payload bytes that may be kept; None is unlimited.
        num_hits: Segments found.
        num_misses: Segments asked for and not found.
        num_evictions: Segments evicted to make room.
        num_stores: Segments stored.
        load_failures: Hits whose payload was not there or not right, by reason.
        refusals: Segments not stored, by reason.
        num_unavailable: Calls that failed because index or store could not be reached.
    """

    name: str
    num_entries: int
    used_bytes: int
    budget_bytes: int | None
    num_hits: int
    num_misses: int
    num_evictions: int
    num_stores: int
    load_failures: Mapping[str, int]
    refusals: Mapping[str, int]
    num_unavailable: int


class Tier(Generic[PayloadT]):
    """Segments by record with their payloads; thread-safe, without a lock around slow calls."""

    def __init__(self, name: str, index: ChunkIndex, store: PayloadStore[PayloadT]) -> None:
        self.name = name
        self.index = index
        self.store = store
        self._lock = Lock()
        self._counts: Counter[str] = Counter()
        self._load_failures: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._told: set[str] = set()

    def match(
        self, paths: Sequence[Sequence[ChunkKey]], now_ms: int
    ) -> tuple[tuple[NodeRecord, ...], ...]:
        """For each key path its leading cached records; nothing if the index is unavailable.

        Modifies hit statistics and recency.
        """
        found: tuple[tuple[NodeRecord, ...], ...] = ((),) * len(paths)
        with self._degraded("match"):
            found = self.index.match(paths, now_ms)
        self.count_match(paths, found)
        return found

    def count_match(
        self, paths: Sequence[Sequence[ChunkKey]], found: Sequence[Sequence[NodeRecord]]
    ) -> None:
        """Count what was found of some paths, be it without `match`. Modifies counters only."""
        num_hits = sum(map(len, found))
        self._count(hits=num_hits, misses=sum(map(len, paths)) - num_hits)

    def load(self, record: NodeRecord, on_bytes: OnBytes | None = None) -> PayloadT | None:
        """A record's payload, checked as far as its store checks; None if it cannot be had.

        Modifies the tier if the payload is lost: then the record goes, with all below it.
        """
        try:
            return self.store.get(record, on_bytes)
        except PayloadLost as exc:
            self.discard(record, exc.reason)
        except TierUnavailable as exc:
            self._report("load", exc)
        return None

    def discard(self, record: NodeRecord, reason: str) -> None:
        """Remove a record whose payload is lost, and count the failure.

        A record that was meanwhile replaced by another writer's stays.
        """
        with self._lock:
            self._load_failures[reason] += 1
        self._tell(f"load-{reason}", "a payload is %s; its entry is removed", reason)
        with self._degraded("remove"):
            view = self.index.show(record.key)
            if view is None or view.record.checksum == record.checksum:
                self._remove(partial(self.index.remove, record.key))

    def keep(self, record: NodeRecord, payload: PayloadT, now_ms: int) -> Refusal | None:
        """Store a payload and make it findable, evicting leaf first if room is needed.

        Never evicts what is pinned. A key that is cached already keeps its payload and record, to
        which the new one's documents, expiry and pin are added.

        Returns:
            None if the segment is cached now; else why not, which is counted. Nothing changed
            then, except that what was evicted stays evicted.
        """
        refusal: Refusal | None = "unavailable"
        with self._degraded("store"):
            refusal = self._keep(record, payload, now_ms)
        if refusal is not None:
            with self._lock:
                self._refusals[refusal] += 1
        return refusal

    def annotate(self, record: NodeRecord) -> None:
        """Add a record's documents, expiry and pin to the cached record of its key, if any."""
        if record.doc_ids or record.pinned or record.expires_ms is not None:
            with self._degraded("annotate"):
                self.index.annotate(
                    record.key, record.doc_ids, record.expires_ms, pinned=record.pinned
                )

    def collect(self, now_ms: int) -> int:
        """Remove what is expired; returns how many nodes left."""
        return self._drain("expire", lambda: self.index.expire(now_ms, BATCH))

    def invalidate(self, doc_id: str, owner: str) -> int:
        """Remove what an owner stored for a document, and all below; returns how many left."""
        return self._drain("invalidate", lambda: self.index.invalidate(doc_id, owner, BATCH))

    def clear(self, owner: str | None = None, model: str | None = None) -> int:
        """Remove everything, or one owner's or one model's; returns how many nodes left."""
        return self._drain("clear", lambda: self.index.clear(BATCH, owner, model))

    def adopt(self) -> int:
        """Publish what the store kept from an earlier run; returns how many segments.

        For an index that is empty at start. Parents come first. What does not fit, has lost its
        parent, or is a second payload of its key, is dropped.
        """
        waiting: dict[ChunkKey | None, list[NodeRecord]] = {}
        for record in self.store.records():
            waiting.setdefault(record.parent, []).append(record)
        num_adopted = 0
        level = waiting.pop(None, [])
        while level:
            level.sort(key=lambda record: record.created_ms)
            num_adopted += sum(map(self._adopt, level))
            level = [child for record in level for child in waiting.pop(record.key, ())]
        for orphans in waiting.values():
            self.drop(orphans)
        return num_adopted

    def stats(self) -> TierStats:
        """Totals and counters; waits for nothing. Changes nothing."""
        totals = self.totals()
        with self._lock:
            return TierStats(
                name=self.name,
                num_entries=totals.num_nodes,
                used_bytes=totals.num_bytes + totals.reserved_bytes,
                budget_bytes=totals.budget_bytes,
                num_hits=self._counts["hits"],
                num_misses=self._counts["misses"],
                num_evictions=self._counts["evictions"],
                num_stores=self._counts["stores"],
                load_failures=dict(self._load_failures),
                refusals={name: self._refusals[name] for name in REFUSALS},
                num_unavailable=self._counts["unavailable"],
            )

    def totals(self) -> IndexStats:
        """The index's totals. Changes nothing."""
        return self.index.stats()

    def drop(self, records: Sequence[NodeRecord]) -> int:
        """Drop the payloads of records that left the index; returns how many."""
        for record in records:
            self.store.drop(record)
        return len(records)

    def _keep(self, record: NodeRecord, payload: PayloadT, now_ms: int) -> Refusal | None:
        """`keep`, for an index and a store that can be reached."""
        present = self._collect_due(record.key, now_ms)
        if present is not None and present.is_expired(now_ms):
            return "busy"
        if present is not None:
            self.annotate(record)
            return None
        if record.parent is not None and self.index.show(record.parent) is None:
            return "orphan"
        budget = self.totals().budget_bytes
        if budget is not None and record.payload_bytes > budget:
            return "too_large"
        reservation = self._reserve(record, now_ms)
        if reservation is None:
            return "no_room"
        try:
            self.store.put(record, payload)
        except BaseException:
            self.index.cancel(reservation)
            raise
        return self._publish(record, now_ms, reservation)

    def _collect_due(self, key: ChunkKey, now_ms: int) -> NodeRecord | None:
        """The cached record of a key; if its time is up, what is due is collected first."""
        view = self.index.show(key)
        if view is not None and view.record.is_expired(now_ms):
            self._remove(partial(self.index.expire, now_ms, BATCH))
            view = self.index.show(key)
        return None if view is None else view.record

    def _publish(self, record: NodeRecord, now_ms: int, reservation: Reservation) -> Refusal | None:
        """Publish a record whose payload was put; the payload goes again if that fails."""
        publication = None
        try:
            publication = self.index.publish(record, now_ms, reservation)
        finally:
            if publication is not Publication.STORED and not self._is_kept(record):
                self.store.drop(record)
        if publication is Publication.STORED:
            self._count(stores=1)
            return None
        if publication is Publication.PRESENT:
            self.annotate(record)
            return None
        return "busy" if publication is Publication.BUSY else "orphan"

    def _is_kept(self, record: NodeRecord) -> bool:
        """Whether another writer of the same bytes published them, so that they must stay."""
        try:
            view = self.index.show(record.key)
        except IndexUnavailable:
            return True  # a payload too many is found by a sweep; one too few is a lost hit
        return view is not None and view.record.checksum == record.checksum

    def _reserve(self, record: NodeRecord, now_ms: int) -> Reservation | None:
        """Reserve a record's bytes, evicting what it takes; None if that is impossible."""
        for _ in range(MAX_EVICTION_ROUNDS):
            answer = self.index.reserve(record.owner, record.payload_bytes, now_ms)
            if isinstance(answer, Reservation):
                return answer
            if self._remove(partial(self.index.expire, now_ms, BATCH)):
                continue
            plan = self._plan_eviction(record, answer)
            num_evicted = self._remove(partial(self.index.evict, plan))
            self._count(evictions=num_evicted)
            if not num_evicted:
                return None
        return None

    def _plan_eviction(self, record: NodeRecord, shortage: Shortage) -> tuple[NodeRecord, ...]:
        """Whom to evict for a record: never those above it, without whom it cannot be stored."""
        spared_bytes = 0
        while True:
            plan = self.index.victims(
                shortage.num_bytes + spared_bytes, record.owner, is_own=shortage.is_own
            )
            above = _ancestors(record, plan)
            above_bytes = sum(ancestor.payload_bytes for ancestor in above)
            if above_bytes <= spared_bytes:
                return tuple(victim for victim in plan if victim not in above)
            spared_bytes = above_bytes

    def _adopt(self, record: NodeRecord) -> bool:
        """Publish what the store kept of a segment, or drop it; returns which."""
        is_new = self.index.show(record.key) is None
        has_parent = record.parent is None or self.index.show(record.parent) is not None
        reservation = self._reserve(record, record.created_ms) if is_new and has_parent else None
        publication = Publication.BUSY
        if reservation is not None:
            publication = self.index.publish(record, record.created_ms, reservation)
        if publication is not Publication.STORED and not self._is_kept(record):
            self.store.drop(record)
        return publication is Publication.STORED

    def _remove(self, take: Callable[[], Sequence[NodeRecord]]) -> int:
        """Take records out of the index, then drop their payloads; returns how many."""
        return self.drop(take())

    def _drain(self, what: str, step: Callable[[], Sequence[NodeRecord]]) -> int:
        """Repeat a bounded removal until nothing is left; returns how many nodes left."""
        num_left = 0
        with self._degraded(what):
            while num_removed := self._remove(step):
                num_left += num_removed
        return num_left

    @contextmanager
    def _degraded(self, what: str) -> Iterator[None]:
        """Turn an unavailable index or store into a counted, once logged nothing."""
        try:
            yield
        except (IndexUnavailable, TierUnavailable) as exc:
            self._report(what, exc)

    def _report(self, what: str, exc: Exception) -> None:
        self._count(unavailable=1)
        self._tell(f"{what}-{type(exc).__name__}", "%s: %s (counted from now on)", what, exc)

    def _tell(self, kind: str, message: str, *args: object) -> None:
        """Log a kind of trouble the first time it happens."""
        with self._lock:
            if kind in self._told:
                return
            self._told.add(kind)
        logger.warning("pic tier=%s " + message, self.name, *args)

    def _count(self, **numbers: int) -> None:
        with self._lock:
            self._counts.update(numbers)


class RemoteTier(Tier[PayloadT]):
    """A tier whose index is asked over a network, so its totals are those last asked for."""

    def __init__(self, name: str, index: ChunkIndex, store: PayloadStore[PayloadT]) -> None:
        super().__init__(name, index, store)
        self._totals = IndexStats(0, 0, 0, None)

    def totals(self) -> IndexStats:
        """The totals last asked for."""
        return self._totals

    def refresh_totals(self) -> None:
        """Ask the index for its totals."""
        with self._degraded("stats"):
            self._totals = self.index.stats()


def _ancestors(record: NodeRecord, plan: Sequence[NodeRecord]) -> list[NodeRecord]:
    """Those of a plan, children before parents, that stand above a record."""
    above: list[NodeRecord] = []
    key = record.parent
    for planned in plan:
        if planned.key == key:
            above.append(planned)
            key = planned.parent
    return above
