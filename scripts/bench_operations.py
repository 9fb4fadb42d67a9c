"""Times the operations of one filled index: look-ups at a steady pace, and what changes it.

Knows the `ChunkIndex` port. Does not know which adapter stands behind it, how it was filled, or
what is aimed at.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from itertools import count
from threading import Event

from sglang_ext.chunk_index import keys
from sglang_ext.chunk_index.codec import encode_record
from sglang_ext.chunk_index.index import ChunkIndex, NodeRecord, Publication, Reservation
from sglang_ext.chunk_index.near_index import RemoteIndex
from sglang_ext.errors import ServerFailed
from sglang_ext.scripts.bench_entries import (
    LONG_CHUNK,
    OWNERS,
    PROMPT_SEGMENTS,
    SEGMENT_BYTES,
    Entries,
    now_ms,
)
from sglang_ext.scripts.bench_timing import Background, BareTrips, Stopwatch, Timings, pace

LOOKUPS_PER_S = 200
WRITES_PER_S = 100
FLUSH_S = 1.0
DEADLINE_MS = 5.0
"""What a server grants a look-up; here one may take longer, so that all are seen."""

SHAPES = (1, LONG_CHUNK)
"""Segments of each chunk of a prompt."""

EVICTED_SHARE = 0.1
EVICT_STEP = 256
EVICTING_S = 0.1
"""Least time of look-ups while entries are evicted, which may take less."""

DOCUMENT_SEGMENTS = 16
SEED = 13


@dataclass(frozen=True, slots=True)
class Row:
    """Calls of one operation.

    Attributes:
        entries: In the index at first.
        backend: `redis-unix`, `redis-tcp`, `redis-cluster` or `memory`.
        op: `match`, `match evicting`, `match at rest`, `publish`, `reserve`, `invalidate` or
            `evict`.
        prompt: Of a match, chunks by segments of each, such as `64x1`; else empty.
        p50_ms: Median.
        p99_ms: What 99 % do not exceed.
        slowest_ms: The slowest.
        rate_per_s: Calls per second; of `evict`, entries that left per second.
        num_calls: Calls.
        num_late: Calls that took longer than `DEADLINE_MS`.
        bare_rtt_ms: Median of bare round trips of as many bytes, in turn with the calls; None
            where nothing is sent.
        bare_p99_ms: What 99 % of those do not exceed.
        bare_slowest_ms: The slowest of those.
    """

    entries: int
    backend: str
    op: str
    prompt: str
    p50_ms: float
    p99_ms: float
    slowest_ms: float
    rate_per_s: float
    num_calls: int
    num_late: int
    bare_rtt_ms: float | None = None
    bare_p99_ms: float | None = None
    bare_slowest_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """A filled index.

    Attributes:
        backend: As in `Row`.
        index: To be measured.
        entries: What is in it.
        place: Where its server listens, for bare round trips; None if there are none.
    """

    backend: str
    index: ChunkIndex
    entries: Entries
    place: str | tuple[str, int] | None = None


class Operations:
    """Measures one index; new entries stay behind.

    Every method raises `ExtError` if the index cannot be reached or does not do what it is asked.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._index = subject.index
        self._names = (f"{subject.backend}-{number}" for number in count())

    def match(self, seconds: float) -> list[Row]:
        """Look-ups of both kinds of prompt, while a thread publishes, touches and flushes."""
        rows: list[Row] = []
        for shape in SHAPES:
            with Background(self._write):
                rows.append(self._look_up("match", shape, lambda passed_s: passed_s >= seconds))
        return rows

    def publish(self, num_calls: int) -> Row:
        """Chunks of one segment, one after the other."""
        records, watch = self._new_records(), Stopwatch()
        for _ in range(num_calls):
            done = watch.time(self._index.publish, next(records), now_ms())
            _expect(done is Publication.STORED, "an entry was not stored")
        return self._row("publish", watch.timings())

    def reserve(self, num_calls: int) -> Row:
        """Reservations, each cancelled after it was timed."""
        watch = Stopwatch()
        for number in range(num_calls):
            owner = OWNERS[number % len(OWNERS)]
            done = watch.time(self._index.reserve, owner, SEGMENT_BYTES, now_ms())
            if not isinstance(done, Reservation):
                raise ServerFailed("bytes were not reserved")
            self._index.cancel(done)
        return self._row("reserve", watch.timings())

    def invalidate(self, num_calls: int) -> Row:
        """Documents of `DOCUMENT_SEGMENTS` segments each, in chunks of `LONG_CHUNK`."""
        watch = Stopwatch()
        for number in range(num_calls):
            doc_id = f"document-{number}@1"
            entries = Entries(0, now_ms(), next(self._names), doc_id)
            for chunk in range(DOCUMENT_SEGMENTS // LONG_CHUNK):
                for record in entries.records(LONG_CHUNK, chunk * len(OWNERS)):
                    self._index.publish(record, now_ms())
            left = watch.time(self._index.invalidate, doc_id, OWNERS[0], 2 * DOCUMENT_SEGMENTS)
            _expect(len(left) == DOCUMENT_SEGMENTS, "a document was not invalidated as a whole")
        return self._row("invalidate", watch.timings())

    def evict(self) -> list[Row]:
        """A tenth of the entries while look-ups go on, and then as many look-ups at rest."""
        evictor = _Evictor(self._index, int(EVICTED_SHARE * self._subject.entries.num_entries))
        shape = SHAPES[-1]
        with Background(evictor.run) as background:
            evicting = self._look_up(
                "match evicting",
                shape,
                lambda passed_s: background.is_done and passed_s >= EVICTING_S,
            )
        seconds = evicting.num_calls / LOOKUPS_PER_S
        at_rest = self._look_up("match at rest", shape, lambda passed_s: passed_s >= seconds)
        return [self._row("evict", evictor.timings(), rate=evictor.rate_per_s), evicting, at_rest]

    def _look_up(self, op: str, shape: int, is_over: Callable[[float], bool]) -> Row:
        """Prompts at a steady pace, and a bare round trip after each."""
        prompts = self._subject.entries.prompts(shape, SEED)
        watch = Stopwatch()
        trips = self._bare_trips(shape)
        with nullcontext() if trips is None else closing(trips):

            def step() -> None:
                prompt = next(prompts)
                found = watch.time(self._index.match, prompt, now_ms())
                is_whole = sum(map(len, found)) == PROMPT_SEGMENTS
                _expect(is_whole or op != "match", "an entry was not found")
                if trips is not None:
                    trips.take()

            pace(LOOKUPS_PER_S, is_over, step)
            bare = None if trips is None else trips.timings()
        return self._row(op, watch.timings(), f"{PROMPT_SEGMENTS // shape}x{shape}", bare)

    def _bare_trips(self, shape: int) -> BareTrips | None:
        """Round trips of the size of a look-up."""
        if self._subject.place is None:
            return None
        chunks = range(PROMPT_SEGMENTS // shape)
        records = [r for number in chunks for r in self._subject.entries.records(shape, number)]
        names = [keys.node_key(record.key) for record in records]
        return BareTrips(self._subject.place, names, [len(encode_record(r)) for r in records])

    def _write(self, is_over: Event) -> None:
        """What a server's threads do beside look-ups: store, touch, and flush now and then."""
        records = self._new_records()
        flushed_s = time.monotonic()

        def step() -> None:
            nonlocal flushed_s
            record = next(records)
            done = self._index.reserve(record.owner, record.payload_bytes, now_ms())
            reservation = done if isinstance(done, Reservation) else None
            self._index.publish(record, now_ms(), reservation)
            if isinstance(self._index, RemoteIndex):
                self._index.touch([record.key], now_ms())
                if time.monotonic() - flushed_s >= FLUSH_S:
                    self._index.flush()
                    flushed_s = time.monotonic()

        pace(WRITES_PER_S, lambda _: is_over.is_set(), step)

    def _new_records(self) -> Iterator[NodeRecord]:
        """Records that are in no index yet, without end."""
        entries = Entries(0, now_ms(), next(self._names))
        return (entries.records(1, number)[0] for number in count())

    def _row(
        self,
        op: str,
        calls: Timings,
        prompt: str = "",
        bare: Timings | None = None,
        rate: float | None = None,
    ) -> Row:
        return Row(
            entries=self._subject.entries.num_entries,
            backend=self._subject.backend,
            op=op,
            prompt=prompt,
            p50_ms=calls.p50_ms,
            p99_ms=calls.p99_ms,
            slowest_ms=calls.slowest_ms,
            rate_per_s=calls.rate_per_s if rate is None else rate,
            num_calls=len(calls.ms),
            num_late=sum(ms > DEADLINE_MS for ms in calls.ms),
            bare_rtt_ms=None if bare is None else bare.p50_ms,
            bare_p99_ms=None if bare is None else bare.p99_ms,
            bare_slowest_ms=None if bare is None else bare.slowest_ms,
        )


class _Evictor:
    """Plans and carries out evictions until so many entries have left."""

    def __init__(self, index: ChunkIndex, num_wanted: int) -> None:
        self._index = index
        self._num_wanted = num_wanted
        self._num_left = 0
        self._watch = Stopwatch()

    @property
    def rate_per_s(self) -> float:
        """Entries that left per second."""
        return self._num_left / self._watch.timings().elapsed_s

    def run(self, is_over: Event) -> None:
        while self._num_left < self._num_wanted and not is_over.is_set():
            num_left = self._watch.time(self._step)
            _expect(num_left > 0, "nothing could be evicted")
            self._num_left += num_left

    def timings(self) -> Timings:
        return self._watch.timings()

    def _step(self) -> int:
        plan = self._index.victims(EVICT_STEP * SEGMENT_BYTES, OWNERS[0], is_own=False)
        return len(self._index.evict(plan))


def _expect(is_true: bool, complaint: str) -> None:
    if not is_true:
        raise ServerFailed(complaint)
