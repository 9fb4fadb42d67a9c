"""`ChunkCache`: one index and one payload store, kept in agreement.

Knows the order in which the two must change: a payload is put before its record is published, and a
record leaves the index before its payload is dropped. Does not know what a payload holds, how
segments are named, or which of a request's segments are worth loading or storing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from threading import RLock
from types import TracebackType
from typing import Generic, Literal

from sglang_ext.chunk_index.chunking import ChunkSegment
from sglang_ext.chunk_index.identity import ChunkKey
from sglang_ext.chunk_index.index import ChunkIndex, NodeRecord
from sglang_ext.chunk_index.payloads import PayloadStore, PayloadT, payload_checksum

Verify = Literal["always", "first", "never"]
"""When a payload's checksum is compared: on every load, on its first load, or not at all."""

Refusal = Literal["too_large", "no_room", "orphan", "busy"]
"""Why a segment was not stored: larger than the whole budget; too little can be evicted; its parent
is not cached; a removed segment of the same key still has readers."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Totals now, and counters since the cache was made.

    Attributes:
        num_entries: Segments that can be matched.
        used_bytes: Payload bytes kept, those of removed segments with readers included.
        budget_bytes: Most payload bytes that may be kept.
        num_held: Segments with at least one reader.
        num_hits: Segments found and held by `acquire`.
        num_misses: Segments asked for and not held.
        num_evictions: Segments evicted to make room.
        num_stores: Segments stored.
        load_failures: Hits whose payload was missing or damaged.
        refusals: Segments not stored, by reason.
    """

    num_entries: int
    used_bytes: int
    budget_bytes: int
    num_held: int
    num_hits: int
    num_misses: int
    num_evictions: int
    num_stores: int
    load_failures: int
    refusals: Mapping[Refusal, int]


class Lease(Generic[PayloadT]):
    """Cached leading segments of a prompt's chunks, held until `release` or the end of `with`.

    Belongs to one request; not shared between threads. Hits are hints: `payloads` may find fewer.
    """

    def __init__(self, cache: ChunkCache[PayloadT], runs: Iterable[tuple[NodeRecord, ...]]) -> None:
        self._cache = cache
        self._runs = list(runs)

    def __enter__(self) -> Lease[PayloadT]:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    @property
    def num_hits(self) -> tuple[int, ...]:
        """For each chunk the number of leading segments held now; all 0 after `release`."""
        return tuple(len(run) for run in self._runs)

    def payloads(self, chunk_index: int) -> list[PayloadT]:
        """The chunk's leading payloads, in order, each verified as the cache was told to.

        Modifies the lease and the cache if one is missing or damaged: the hits end before it, it is
        removed with all below it, and nothing behind it is held any more. What is returned stays
        readable after `release`.
        """
        run = self._runs[chunk_index]
        loaded: list[PayloadT] = []
        for record in run:
            payload = self._cache._load(record)
            if payload is None:
                self._runs[chunk_index] = run[: len(loaded)]
                self._cache._discard(run[len(loaded) :])
                break
            loaded.append(payload)
        return loaded

    def release(self) -> None:
        """Hold nothing any more; a second call does nothing."""
        keys = [record.key for run in self._runs for record in run]
        self._runs = [()] * len(self._runs)
        self._cache._release(keys)


class ChunkCache(Generic[PayloadT]):
    """Segments by key with their payloads, within the store's budget; thread-safe."""

    def __init__(
        self, index: ChunkIndex, store: PayloadStore[PayloadT], verify: Verify = "first"
    ) -> None:
        self._index = index
        self._store = store
        self._verify = verify
        self._verified: set[ChunkKey] = set()
        self._lock = RLock()
        self._num_hits = 0
        self._num_misses = 0
        self._num_evictions = 0
        self._num_stores = 0
        self._load_failures = 0
        self._refusals: dict[Refusal, int] = {"too_large": 0, "no_room": 0, "orphan": 0, "busy": 0}

    def acquire(self, chunks: Sequence[Sequence[ChunkSegment]], now_ms: int) -> Lease[PayloadT]:
        """Hold every cached leading segment of every chunk of a prompt.

        Modifies hit statistics, recency and reader counts; the lease must be released.
        """
        paths = [[segment.key for segment in chunk] for chunk in chunks]
        with self._lock:
            matched = self._index.match(paths, now_ms)
            hits = [path[:num_hits] for path, num_hits in zip(paths, matched, strict=True)]
            records = self._index.hold([key for keys in hits for key in keys])
            held = {record.key: record for record in records}
            runs = [tuple(held[k] for k in takewhile(held.__contains__, keys)) for keys in hits]
            behind = [keys[len(run) :] for keys, run in zip(hits, runs, strict=True)]
            self._release([key for keys in behind for key in keys if key in held])
            num_held = sum(len(run) for run in runs)
            self._num_hits += num_held
            self._num_misses += sum(len(path) for path in paths) - num_held
        return Lease(self, runs)

    def store(
        self,
        segment: ChunkSegment,
        payload: PayloadT,
        now_ms: int,
        doc_ids: Sequence[str] = (),
        ttl_ms: int | None = None,
        pinned: bool = False,
        owner: str = "",
    ) -> bool:
        """Keep a segment's payload and make it findable, evicting leaf first if room is needed.

        Never evicts what is held or pinned, nor the segment's own ancestors. A key that is cached
        already keeps its payload and record.

        Args:
            segment: Its parent must be cached.
            payload: Must not change afterwards.
            now_ms: Time of the caller's clock, the one `acquire` is given.
            doc_ids: Documents whose invalidation removes it.
            ttl_ms: Life time from `now_ms`; None lives until evicted.
            pinned: Never evict it.
            owner: Digest of the namespace.

        Returns:
            Whether the segment is cached now. If not, the reason is counted and nothing changed,
            except that what was evicted stays evicted if only then the tier or the index failed.
        """
        record = NodeRecord(
            key=segment.key,
            parent=segment.parent,
            num_tokens=segment.span.num_tokens,
            payload_bytes=payload.nbytes,
            checksum=payload_checksum(payload),
            created_ms=now_ms,
            doc_ids=tuple(doc_ids),
            expires_ms=None if ttl_ms is None else now_ms + ttl_ms,
            owner=owner,
            pinned=pinned,
        )
        with self._lock:
            self._drop(self._index.expire(now_ms))
            present = self._index.show(record.key)
            if present is not None and not present.is_dead:
                return True
            refusal = "busy" if present is not None else self._store_new(record, payload, now_ms)
            if refusal is not None:
                self._refusals[refusal] += 1
                return False
            self._num_stores += 1
            return True

    def invalidate(self, doc_id: str, owner: str = "") -> int:
        """Remove what `owner` stored for a document, and all below; returns how many left at once.

        Segments with readers are missed from now on and leave with their last reader.
        """
        with self._lock:
            return self._drop(self._index.invalidate(doc_id, owner))

    def clear(self) -> int:
        """Remove everything, pinned or not; returns how many left at once, as in `invalidate`."""
        with self._lock:
            return self._drop(self._index.clear())

    def stats(self) -> CacheStats:
        """Totals and counters. Changes nothing."""
        with self._lock:
            totals = self._index.stats()
            return CacheStats(
                num_entries=totals.num_nodes,
                used_bytes=self._store.used_bytes,
                budget_bytes=self._store.budget_bytes,
                num_held=totals.num_held,
                num_hits=self._num_hits,
                num_misses=self._num_misses,
                num_evictions=self._num_evictions,
                num_stores=self._num_stores,
                load_failures=self._load_failures,
                refusals=dict(self._refusals),
            )

    def check_integrity(self) -> None:
        """Verify that index and store agree to the byte and stay within the budget.

        Raises:
            AssertionError: They do not, or either is broken by itself.
        """
        with self._lock:
            self._index.check_integrity()
            totals = self._index.stats()
            keys = set(self._store.keys())
            assert len(keys) == totals.num_nodes + totals.num_dead
            for key in keys:
                view = self._index.show(key)
                payload = self._store.get(key)
                assert view is not None
                assert payload is not None
                assert view.record.payload_bytes == payload.nbytes
            assert self._store.used_bytes == totals.num_bytes + totals.dead_bytes
            assert self._store.used_bytes <= self._store.budget_bytes
            assert self._verified <= keys

    def _store_new(self, record: NodeRecord, payload: PayloadT, now_ms: int) -> Refusal | None:
        """Hold the parent, make room, put, publish; returns why it could not be done."""
        if record.payload_bytes > self._store.budget_bytes:
            return "too_large"
        parents = [] if record.parent is None else [record.parent]
        if len(self._index.hold(parents)) < len(parents):
            return "orphan"
        try:
            if not self._make_room(record.payload_bytes):
                return "no_room"
            if not self._store.put(record.key, payload):
                return "no_room"
            return None if self._publish(record, now_ms) else "orphan"
        finally:
            self._release(parents)

    def _publish(self, record: NodeRecord, now_ms: int) -> bool:
        """Publish a record whose payload was put; the payload goes again if that fails."""
        is_published = False
        try:
            is_published = self._index.publish(record, now_ms)
        finally:
            if not is_published:
                self._store.drop(record.key)
        return is_published

    def _make_room(self, num_bytes: int) -> bool:
        missing = num_bytes - (self._store.budget_bytes - self._store.used_bytes)
        if missing <= 0:
            return True
        plan = self._index.victims(missing)
        if not plan or not self._index.evict(plan):
            return False
        self._num_evictions += self._drop(plan)
        return True

    def _load(self, record: NodeRecord) -> PayloadT | None:
        """A held segment's payload; None if missing or damaged. Hashes outside the lock."""
        with self._lock:
            payload = self._store.get(record.key)
            is_trusted = self._verify == "never" or record.key in self._verified
        if payload is None or is_trusted:
            return payload
        if payload_checksum(payload) != record.checksum:
            return None
        if self._verify == "first":
            with self._lock:
                self._verified.add(record.key)
        return payload

    def _discard(self, lost: Sequence[NodeRecord]) -> None:
        """Remove a held segment that failed to load, and let go of it and what was held behind."""
        with self._lock:
            self._load_failures += 1
            self._drop(self._index.remove(lost[0].key))
            self._release([record.key for record in lost])

    def _release(self, keys: Sequence[ChunkKey]) -> None:
        with self._lock:
            self._drop(self._index.release(keys))

    def _drop(self, records: Sequence[NodeRecord]) -> int:
        """Drop the payloads of records that left the index; returns how many."""
        for record in records:
            self._store.drop(record.key)
            self._verified.discard(record.key)
        return len(records)
