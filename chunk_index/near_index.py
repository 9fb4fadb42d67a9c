"""A near index: what a remote index said, kept in this process, so that most lookups ask nobody.

Knows keys, records, how long an answer is trusted, and which keys changed lately. Does not know
payloads, clocks, how a remote index is reached or how its changes get here.

    unknown ── asked ──► known: a record, or absent ── changed, too old, pushed out ──► unknown

An answer that was under way while a change of its key was announced may tell of the time before:
it is given to who asked, and not remembered. In doubt a key is unknown, which costs one question.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from threading import Lock
from typing import Protocol, runtime_checkable

from sglang_ext.chunk_index.identity import ChunkKey
from sglang_ext.chunk_index.index import (
    ChunkIndex,
    IndexStats,
    NodeRecord,
    NodeView,
    Publication,
    Reservation,
    Shortage,
    Usage,
)
from sglang_ext.errors import IndexUnavailable

_LOG_LEN = 8192  # changed keys remembered; beyond it answers asked before are in doubt

OnKeys = Callable[[Sequence[ChunkKey]], None]
"""Told, from any thread, which keys changed."""


class Changes(Protocol):
    """How changes made by others are learned. The order of the changes of one key is kept."""

    def subscribe(self, on_gone: OnKeys, on_new: OnKeys, on_lost: Callable[[], None]) -> None:
        """Tell of changes from now on, from a thread of its own.

        Args:
            on_gone: These keys left, or their records changed.
            on_new: These keys can be matched now.
            on_lost: Anything may have changed meanwhile. Called after every interruption, and once
                at the beginning if this method returns before changes are heard; each time when
                they are heard again, for what is learned before that may miss a change.
        """
        ...

    def close(self) -> None:
        """Tell nothing any more."""
        ...


@runtime_checkable
class RemoteIndex(ChunkIndex, Protocol):
    """An index outside this process, which takes hit statistics in batches."""

    def touch(self, keys: Sequence[ChunkKey], now_ms: int) -> None:
        """Count a hit of each key, later. Modifies a bounded buffer; no round trip, no error."""
        ...

    def flush(self) -> None:
        """Write hit statistics that were kept back. Modifies statistics and recency."""
        ...


class PathEnd(Enum):
    """Why the hits of a path end where they do.

    ALL: The whole path is a hit. ABSENT: The next key is known to be absent. EXPIRED: The next
    key's record is known to be expired. UNKNOWN: Nothing is known of the next key; the remote
    index can tell.
    """

    ALL = "all"
    ABSENT = "absent"
    EXPIRED = "expired"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class NearResult:
    """What is known of some paths. A hint, as every match is.

    Attributes:
        hits: For each path its leading unexpired records.
        ends: For each path why they end.
        failure: Why the unknown ones could not be asked for; None if nobody tried or none failed.
    """

    hits: tuple[tuple[NodeRecord, ...], ...]
    ends: tuple[PathEnd, ...]
    failure: IndexUnavailable | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the remote index could add nothing."""
        return PathEnd.UNKNOWN not in self.ends

    @property
    def has_knowledge(self) -> bool:
        """Whether anything is known of any path."""
        return any(self.hits) or any(end is not PathEnd.UNKNOWN for end in self.ends)


@dataclass(frozen=True, slots=True)
class NearStats:
    """What is kept now, and counters since the near index was made.

    Attributes:
        num_entries: Keys known now, absent ones included.
        num_hits: Records found here, without a question.
        num_negative_hits: Paths that ended here at a key known to be absent.
        num_remote_lookups: Questions asked.
        num_failures: Questions the remote index did not answer.
        num_invalidations: Known keys forgotten because a change was announced.
        num_losses: Times everything was forgotten because changes may have gone unheard.
    """

    num_entries: int
    num_hits: int
    num_negative_hits: int
    num_remote_lookups: int
    num_failures: int
    num_invalidations: int
    num_losses: int


@dataclass(slots=True)
class _Entry:
    """What is known of a key: its record, or None if it is absent.

    `learned_ms` is None until a lookup sees what was learned without a time.
    """

    record: NodeRecord | None
    learned_ms: int | None


class _ChangeLog:
    """When keys changed, on a count of changes: the latest keys, and a bound for all others."""

    def __init__(self) -> None:
        self._counts: OrderedDict[ChunkKey, int] = OrderedDict()
        self._floor = 0

    def add(self, key: ChunkKey, count: int) -> None:
        self._counts[key] = count
        self._counts.move_to_end(key)
        if len(self._counts) > _LOG_LEN:
            _, self._floor = self._counts.popitem(last=False)

    def add_every_key(self, count: int) -> None:
        self._counts.clear()
        self._floor = count

    def has_since(self, key: ChunkKey, mark: int) -> bool:
        """Whether a key changed, or may have, after the count was `mark`."""
        return self._counts.get(key, self._floor) > mark


class NearIndex:
    """A remote index, and a bounded memory of it that answers `match`; thread-safe.

    Every method but `match` is the remote index's; see `ChunkIndex`. What this process changes is
    known here at once, what others change when it is announced, or when what is known is too old.
    A path must be the key path of a chunk, so that a key is always asked for below the same parent.
    The lock is never held during a call of the remote index.
    """

    def __init__(
        self,
        remote: ChunkIndex,
        changes: Changes | None,
        max_entries: int = 200_000,
        negative_ms: int = 2_000,
        positive_ms: int = 60_000,
    ) -> None:
        """Listen to changes from now on.

        Args:
            remote: Asked for what is not known; told of hits if it is a `RemoteIndex`.
            changes: What others change there; None learns of it only by asking again.
            max_entries: Most keys known; the longest unused is forgotten.
            negative_ms: How long an absent key is not asked for again.
            positive_ms: How long a record is not asked for again.
        """
        self._remote = remote
        self._statistics = remote if isinstance(remote, RemoteIndex) else None
        self._changes = changes
        self._max_entries = max_entries
        self._negative_ms = negative_ms
        self._positive_ms = positive_ms
        self._lock = Lock()
        self._entries: OrderedDict[ChunkKey, _Entry] = OrderedDict()
        self._count = 0
        self._changed = _ChangeLog()  # all changes: a record read before one is in doubt
        self._renewed = _ChangeLog()  # those after which a key is present: so is an absence
        self._num_hits = 0
        self._num_negative_hits = 0
        self._num_remote_lookups = 0
        self._num_failures = 0
        self._num_invalidations = 0
        self._num_losses = 0
        if changes is not None:
            changes.subscribe(self._on_gone, self._on_new, self._on_lost)

    def lookup(self, paths: Sequence[Sequence[ChunkKey]], now_ms: int) -> NearResult:
        """What is known here of each path, without asking. Modifies the memory's recency only.

        Who uses the hits without `match` reports them by `touch`.
        """
        with self._lock:
            return self._lookup(paths, now_ms)

    def find(self, paths: Sequence[Sequence[ChunkKey]], now_ms: int) -> NearResult:
        """As `match`, with what it could not find out; never raises `IndexUnavailable`.

        Incomplete only if the remote index had to be asked and did not answer.
        """
        with self._lock:
            near = self._lookup(paths, now_ms)
            mark = self._count
        result = near if near.is_complete else self._ask(paths, near, now_ms, mark)
        is_failed = result.failure is not None
        ends_and_runs = zip(near.ends, near.hits, strict=True)
        served = [run for end, run in ends_and_runs if is_failed or end is not PathEnd.UNKNOWN]
        self.touch([record.key for run in served for record in run], now_ms)
        return result

    def match(
        self, paths: Sequence[Sequence[ChunkKey]], now_ms: int
    ) -> tuple[tuple[NodeRecord, ...], ...]:
        """Leading unexpired nodes of each path; one question for all that is not known here.

        Modifies the memory, and hit statistics of the remote index, in batches. If it does not
        answer, what is known here counts and all else is a miss.

        Raises:
            IndexUnavailable: It did not answer, and nothing is known here of any path.
        """
        result = self.find(paths, now_ms)
        if result.failure is not None and not result.has_knowledge:
            raise result.failure
        return result.hits

    def forget(self, keys: Sequence[ChunkKey]) -> None:
        """Know nothing of these keys. Modifies the memory only."""
        with self._lock:
            self._forget(keys, self._changed, self._renewed)

    def close(self) -> None:
        """Listen no more, and know nothing."""
        if self._changes is not None:
            self._changes.close()
        with self._lock:
            self._forget_all()

    def near_stats(self) -> NearStats:
        """Size and counters of the memory. Changes nothing."""
        with self._lock:
            return NearStats(
                num_entries=len(self._entries),
                num_hits=self._num_hits,
                num_negative_hits=self._num_negative_hits,
                num_remote_lookups=self._num_remote_lookups,
                num_failures=self._num_failures,
                num_invalidations=self._num_invalidations,
                num_losses=self._num_losses,
            )

    def touch(self, keys: Sequence[ChunkKey], now_ms: int) -> None:
        """Count hits at the remote index, later; nothing happens if it takes none."""
        if self._statistics is not None and keys:
            self._statistics.touch(keys, now_ms)

    def flush(self) -> None:
        """Write hit statistics that were kept back, if the remote index does so."""
        if self._statistics is not None:
            self._statistics.flush()

    def reserve(self, owner: str, num_bytes: int, now_ms: int) -> Reservation | Shortage:
        """Set bytes aside."""
        return self._remote.reserve(owner, num_bytes, now_ms)

    def cancel(self, reservation: Reservation) -> None:
        """Give reserved bytes back."""
        self._remote.cancel(reservation)

    def publish(
        self, record: NodeRecord, now_ms: int, reservation: Reservation | None = None
    ) -> Publication:
        """Make a segment findable; known here if STORED, unknown from now on otherwise."""
        mark = self._mark()
        try:
            done = self._remote.publish(record, now_ms, reservation)
        except IndexUnavailable:
            self.forget([record.key])
            raise
        if done is Publication.STORED:
            self._settle_present(record, mark, now_ms)
        elif done is Publication.ORPHAN and record.parent is not None:
            self.forget([record.key, record.parent])
        else:
            self.forget([record.key])
        return done

    def annotate(
        self,
        key: ChunkKey,
        doc_ids: Sequence[str] = (),
        expires_ms: int | None = None,
        *,
        pinned: bool = False,
    ) -> NodeRecord | None:
        """Add documents to a node and pin it; its new record, or its absence, is known here."""
        mark = self._mark()
        record = self._remote.annotate(key, doc_ids, expires_ms, pinned=pinned)
        return self._settle(key, record, mark)

    def unpin(self, key: ChunkKey) -> NodeRecord | None:
        """Let a node be evicted again; its new record, or its absence, is known here."""
        mark = self._mark()
        return self._settle(key, self._remote.unpin(key), mark)

    def show(self, key: ChunkKey) -> NodeView | None:
        """One node, as the remote index shows it."""
        return self._remote.show(key)

    def scan(self) -> Iterator[NodeView]:
        """Every node of the remote index."""
        return self._remote.scan()

    def remove(self, key: ChunkKey) -> tuple[NodeRecord, ...]:
        """Remove a node and all below it; absent here from now on, even if that fails there."""
        mark = self._mark()
        left: tuple[NodeRecord, ...] = ()
        try:
            left = self._remote.remove(key)
        finally:
            self._settle_absent([key, *(record.key for record in left)], mark)
        return left

    def victims(self, num_bytes: int, owner: str, *, is_own: bool) -> tuple[NodeRecord, ...]:
        """Plan an eviction."""
        return self._remote.victims(num_bytes, owner, is_own=is_own)

    def evict(self, records: Sequence[NodeRecord]) -> tuple[NodeRecord, ...]:
        """Remove what is still evictable; absent here from now on, unknown if it fails."""
        mark = self._mark()
        try:
            left = self._remote.evict(records)
        except IndexUnavailable:
            self.forget([record.key for record in records])
            raise
        return self._without(left, mark)

    def expire(self, now_ms: int, limit: int) -> tuple[NodeRecord, ...]:
        """Remove expired nodes; absent here from now on."""
        mark = self._mark()
        return self._without(self._remote.expire(now_ms, limit), mark)

    def invalidate(self, doc_id: str, owner: str, limit: int) -> tuple[NodeRecord, ...]:
        """Remove an owner's nodes of a document; absent here from now on."""
        mark = self._mark()
        return self._without(self._remote.invalidate(doc_id, owner, limit), mark)

    def clear(
        self, limit: int, owner: str | None = None, model: str | None = None
    ) -> tuple[NodeRecord, ...]:
        """Remove every node, or an owner's or a model's; absent here from now on."""
        mark = self._mark()
        return self._without(self._remote.clear(limit, owner, model), mark)

    def set_quota(self, owner: str, num_bytes: int | None) -> None:
        """Change an owner's quota."""
        self._remote.set_quota(owner, num_bytes)

    def usage(self) -> Mapping[str, Usage]:
        """Every owner's share."""
        return self._remote.usage()

    def stats(self) -> IndexStats:
        """Totals of the remote index; see `near_stats` for the memory's."""
        return self._remote.stats()

    def check_integrity(self) -> None:
        """Verify the remote index and the memory's bounds."""
        with self._lock:
            assert len(self._entries) <= self._max_entries
            for key, entry in self._entries.items():
                assert entry.record is None or entry.record.key == key
        self._remote.check_integrity()

    def _lookup(self, paths: Sequence[Sequence[ChunkKey]], now_ms: int) -> NearResult:
        walks = [self._walk(path, now_ms) for path in paths]
        hits = tuple([run for run, _ in walks])
        ends = tuple([end for _, end in walks])
        self._num_hits += sum([len(run) for run, end in walks if end is not PathEnd.UNKNOWN])
        self._num_negative_hits += ends.count(PathEnd.ABSENT)
        return NearResult(hits, ends)

    def _walk(
        self, path: Sequence[ChunkKey], now_ms: int
    ) -> tuple[tuple[NodeRecord, ...], PathEnd]:
        """Known leading records of one path, and why they end. Modifies recency."""
        run: list[NodeRecord] = []
        for key in path:
            entry = self._entries.get(key)
            if entry is None or self._is_old(entry, now_ms):
                return tuple(run), PathEnd.UNKNOWN
            self._entries.move_to_end(key)
            record = entry.record
            if record is None:
                return tuple(run), PathEnd.ABSENT
            if record.expires_ms is not None and record.expires_ms <= now_ms:
                return tuple(run), PathEnd.EXPIRED
            run.append(record)
        return tuple(run), PathEnd.ALL

    def _is_old(self, entry: _Entry, now_ms: int) -> bool:
        """Whether an entry is to be asked for again; a clock that was set back makes it so too."""
        if entry.learned_ms is None:
            entry.learned_ms = now_ms
        age_ms = now_ms - entry.learned_ms
        return not 0 <= age_ms < (self._negative_ms if entry.record is None else self._positive_ms)

    def _ask(
        self, paths: Sequence[Sequence[ChunkKey]], near: NearResult, now_ms: int, mark: int
    ) -> NearResult:
        """Ask for the unknown paths and remember the answers; `mark` is the count at the lookup."""
        unknown = [i for i, end in enumerate(near.ends) if end is PathEnd.UNKNOWN]
        try:
            answers = self._remote.match([paths[i] for i in unknown], now_ms)
        except IndexUnavailable as exc:
            with self._lock:
                self._num_remote_lookups += 1
                self._num_failures += 1
            return NearResult(near.hits, near.ends, failure=exc)
        hits, ends = list(near.hits), list(near.ends)
        with self._lock:
            self._num_remote_lookups += 1
            for i, run in zip(unknown, answers, strict=True):
                self._remember(paths[i], run, now_ms, mark)
                hits[i] = run
                ends[i] = PathEnd.ALL if len(run) == len(paths[i]) else PathEnd.ABSENT
        return NearResult(tuple(hits), tuple(ends))

    def _remember(
        self, path: Sequence[ChunkKey], run: Sequence[NodeRecord], now_ms: int, mark: int
    ) -> None:
        """Know an answer: its records, the first key as absent, and nothing of those behind."""
        for record in run:
            if not self._changed.has_since(record.key, mark):
                self._put(record.key, _Entry(record, now_ms))
        for key in path[len(run) + 1 :]:
            self._entries.pop(key, None)
        for key in path[len(run) : len(run) + 1]:
            if not self._renewed.has_since(key, mark):
                self._put(key, _Entry(None, now_ms))

    def _put(self, key: ChunkKey, entry: _Entry) -> None:
        self._entries[key] = entry
        self._entries.move_to_end(key)
        if len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def _mark(self) -> int:
        """The count of changes, taken before the remote index is called."""
        with self._lock:
            return self._count

    def _settle(self, key: ChunkKey, record: NodeRecord | None, mark: int) -> NodeRecord | None:
        if record is None:
            self._settle_absent([key], mark)
        else:
            self._settle_present(record, mark, None)
        return record

    def _settle_present(self, record: NodeRecord, mark: int, now_ms: int | None) -> None:
        """Know a record this process made, unless others changed its key meanwhile."""
        with self._lock:
            is_doubtful = self._changed.has_since(record.key, mark)
            self._forget([record.key], self._changed, self._renewed)
            if not is_doubtful:
                self._put(record.key, _Entry(record, now_ms))

    def _settle_absent(self, keys: Sequence[ChunkKey], mark: int) -> None:
        """Know that this process removed keys, except those that became present meanwhile."""
        with self._lock:
            self._forget(keys, self._changed)
            for key in keys:
                if not self._renewed.has_since(key, mark):
                    self._put(key, _Entry(None, None))

    def _without(self, left: tuple[NodeRecord, ...], mark: int) -> tuple[NodeRecord, ...]:
        self._settle_absent([record.key for record in left], mark)
        return left

    def _forget(self, keys: Iterable[ChunkKey], *logs: _ChangeLog) -> int:
        """Note a change of keys and drop what is known of them; returns how many were known."""
        self._count += 1
        num_known = 0
        for key in keys:
            num_known += self._entries.pop(key, None) is not None
            for log in logs:
                log.add(key, self._count)
        return num_known

    def _forget_all(self) -> None:
        self._count += 1
        self._entries.clear()
        self._changed.add_every_key(self._count)
        self._renewed.add_every_key(self._count)

    def _on_gone(self, keys: Sequence[ChunkKey]) -> None:
        with self._lock:
            self._num_invalidations += self._forget(keys, self._changed)

    def _on_new(self, keys: Sequence[ChunkKey]) -> None:
        with self._lock:
            self._num_invalidations += self._forget(keys, self._changed, self._renewed)

    def _on_lost(self) -> None:
        with self._lock:
            self._num_losses += 1
            self._forget_all()
