"""`ChunkCache`: what one server sees of all tiers, the arena in front and slower ones behind it.

Knows which tiers there are and in which order they are asked and written. Does not know what a
payload holds, or how a request is served with it.

    request  → prefetch: arena? → lower tiers' indexes → loads → arena
             → acquire: the arena alone, in memory
    segment  → store: arena at once → lower tiers, written behind

A lower tier is used once its cost was measured, which also shows that it can be written and read.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Generic, Protocol, runtime_checkable

from sglang_ext.chunk_index.arena import Arena, Lease
from sglang_ext.chunk_index.chunking import ChunkSegment
from sglang_ext.chunk_index.identity import ChunkKey
from sglang_ext.chunk_index.index import NodeRecord
from sglang_ext.chunk_index.near_index import NearResult
from sglang_ext.chunk_index.payloads import (
    Payload,
    PayloadStore,
    PayloadT,
    payload_checksum,
)
from sglang_ext.chunk_index.prefetch import Path, Prefetch, Run, Runs, plan_loads
from sglang_ext.chunk_index.tier import Tier, TierStats
from sglang_ext.chunk_index.transfer import CostModel, Line, fit_line
from sglang_ext.chunk_index.transfer_queues import Change, Load, LoadQueue, Workers, WriteQueue
from sglang_ext.errors import ExtError

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0

Samples = tuple[tuple[int, PayloadT], tuple[int, PayloadT]]
"""Two payloads of one form with their tokens, the larger one last."""


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Bounds of all transfers.

    Attributes:
        lookup_ms: Longest a request waits for the shared index.
        stall_ms: Longest a request waits while no byte comes from its tiers, or twice the tier's
            own T0 if that is more.
        unknown_ms: Longest a request waits before anything tells how long computing takes.
        num_threads: Loads from one tier at once.
        load_bytes: Most bytes of loads from one tier that wait or run.
        write_bytes: Most bytes that wait to be written to one tier.
    """

    lookup_ms: float = 20.0
    stall_ms: float = 50.0
    unknown_ms: float = 500.0
    num_threads: int = 4
    load_bytes: int = 1 << 30
    write_bytes: int = 256 << 20


@dataclass(frozen=True, slots=True)
class LifeCycle:
    """What a request says of the segments it stores and finds.

    Attributes:
        owner: Digest of its namespace.
        model: Digest of the model.
        doc_ids: Documents whose invalidation removes them.
        ttl_ms: Life time from now; None lives until evicted.
        pinned: Never evict them.
    """

    owner: str = ""
    model: str = ""
    doc_ids: tuple[str, ...] = ()
    ttl_ms: int | None = None
    pinned: bool = False

    @property
    def is_given(self) -> bool:
        """Whether there is anything to add to segments that are cached already."""
        return bool(self.doc_ids) or self.ttl_ms is not None or self.pinned


@runtime_checkable
class _LooksUpInMemory(Protocol):
    """An index that answers some look-ups without waiting for anyone."""

    def lookup(self, paths: Sequence[Path], now_ms: int) -> NearResult:
        """What is known of each path, and whether that is all there is to know."""
        ...

    def touch(self, keys: Sequence[ChunkKey], now_ms: int) -> None:
        """Count hits of what `lookup` gave and was used."""
        ...


@dataclass(slots=True, eq=False)
class LowerTier(Generic[PayloadT]):
    """A tier behind the arena with its queues.

    Attributes:
        tier: Its index and store.
        cost: What a load costs; nothing is loaded or written until it is measured.
        loads: Payloads on their way from it.
        writes: Payloads on their way to it.
        has_failed: It could not be measured, and the log said so.
    """

    tier: Tier[PayloadT]
    cost: CostModel
    loads: LoadQueue[PayloadT]
    writes: WriteQueue[PayloadT]
    has_failed: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether it was measured, and so is used."""
        return self.cost.is_known

    @property
    def is_readable(self) -> bool:
        """Whether it is ready, and no change waits that removes what it still has."""
        return self.is_ready and not self.writes.is_changing


@dataclass(frozen=True, slots=True)
class TransferStats:
    """One lower tier's transfers.

    Attributes:
        tier: Its totals and counters.
        is_ready: It was measured and is used.
        queued_bytes: Bytes that wait to be written.
        num_unwritten: Segments not written since the queue was full.
        load_fixed_ms: T0 as it is now.
    """

    tier: TierStats
    is_ready: bool
    queued_bytes: int
    num_unwritten: int
    load_fixed_ms: float


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The arena and every lower tier, at this moment.

    Attributes:
        arena: Totals and counters of the arena.
        num_held: Segments with at least one reader.
        lower: The lower tiers, fastest first.
    """

    arena: TierStats
    num_held: int
    lower: tuple[TransferStats, ...] = ()


@dataclass(slots=True)
class _Budget:
    """Bytes that requests keep alive beside the arena."""

    max_bytes: int
    num_bytes: int = 0
    lock: Lock = field(default_factory=Lock)

    def take(self, num_bytes: int) -> bool:
        """Take bytes if they fit."""
        with self.lock:
            fits = self.num_bytes + num_bytes <= self.max_bytes
            self.num_bytes += num_bytes if fits else 0
            return fits

    def give_back(self, num_bytes: int) -> None:
        """Undo `take`."""
        with self.lock:
            self.num_bytes -= num_bytes


class ChunkCache(Generic[PayloadT]):
    """All tiers of one server; thread-safe. Calls of the request path never wait for I/O."""

    def __init__(
        self,
        arena: Arena[PayloadT],
        lower: Sequence[Tier[PayloadT]] = (),
        limits: TransferLimits | None = None,
        now_ms: Callable[[], int] = lambda: int(time.time() * 1e3),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the threads of the lower tiers; without any there are none.

        Args:
            arena: Host memory.
            lower: Fastest first.
            limits: Bounds of transfers.
            now_ms: Milliseconds since the epoch, the clock of all records.
            clock: Seconds of a clock that only goes forward.
        """
        self.arena = arena
        self.compute_cost = CostModel()
        self.limits = limits or TransferLimits()
        self._now_ms = now_ms
        self._clock = clock
        self.lower = tuple(self._make_lower(tier) for tier in lower)
        self._lookups = Workers("lookup", num_threads=1) if lower else None
        budget = arena.index.stats().budget_bytes
        self._prefetch_budget = _Budget(1 << 62 if budget is None else budget)
        self._on_settled: Callable[[], None] = lambda: None
        self._landing = Lock()  # held while payloads that came get into the arena, in order
        self._epoch = object()  # another one since the last change

    def when_loaded(self, listener: Callable[[], None]) -> None:
        """Call a function, from any thread, whenever a load or look-up ends."""
        self._on_settled = listener

    # The request path

    def knows(self, paths: Sequence[Path], now_ms: int) -> bool:
        """Whether anything of these paths is in the arena, or known to be in a lower tier."""
        return any(self.arena.index.peek(paths, now_ms)) or any(
            any(self._look_up_in_memory(lower, paths, now_ms)[0]) for lower in self.lower
        )

    def prefetch(self, paths: Sequence[Path], now_ms: int) -> Prefetch[PayloadT] | None:
        """Start to bring into the arena what lower tiers have of a prompt's chunks.

        Modifies statistics of the lower tiers' indexes, and later the arena.

        Args:
            paths: For each chunk the keys of its segments, first segment first.
            now_ms: Milliseconds since the epoch.

        Returns:
            None if no lower tier has anything to add; else what the caller checks until it is
            settled, which is at once if nothing is worth loading.
        """
        if not any(tier.is_ready for tier in self.lower):
            return None
        num_here = self.arena.index.peek(paths, now_ms)
        if all(here == len(path) for here, path in zip(num_here, paths, strict=True)):
            return None
        prefetch = Prefetch[PayloadT](
            started_s=self._clock(),
            lookup_limit_s=self.limits.lookup_ms / 1e3,
            stall_s=self._stall_s(),
            num_arrived=lambda: sum(tier.loads.num_arrived for tier in self.lower),
        )
        epoch = self._epoch
        found: list[Runs] = []
        for tier in self.lower:
            runs, is_complete = self._look_up_in_memory(tier, paths, now_ms)
            if not is_complete:
                assert self._lookups is not None
                self._lookups.submit(
                    lambda: self._look_up(prefetch, epoch, found, num_here, paths, now_ms)
                )
                return prefetch
            found.append(runs)
        self._begin(prefetch, epoch, found, num_here)
        return None if prefetch.is_empty else prefetch

    def acquire(self, paths: Sequence[Path], now_ms: int) -> Lease[PayloadT]:
        """Hold every leading segment of every chunk that the arena has.

        Modifies hit statistics, recency and reader counts; the lease must be released.
        """
        return self.arena.acquire(paths, now_ms)

    def store(
        self,
        segment: ChunkSegment,
        payload: PayloadT,
        now_ms: int,
        life: LifeCycle | None = None,
    ) -> bool:
        """Keep a segment's payload in the arena, and write it to the lower tiers later.

        Args:
            segment: Its parent must be cached.
            payload: Must not change afterwards.
            now_ms: Milliseconds since the epoch.
            life: Whose it is and how long it lives.

        Returns:
            Whether the arena has the segment now. The lower tiers get it in any case.
        """
        record = self._make_record(segment, payload, now_ms, life or LifeCycle())
        refusal = self.arena.keep(record, payload, now_ms)
        for tier in self.lower:
            if tier.is_ready:
                tier.writes.offer(record, payload)
        return refusal is None

    def annotate(self, segment: ChunkSegment, now_ms: int, life: LifeCycle) -> None:
        """Add a request's documents, expiry and pin to a cached segment, in every tier."""
        record = NodeRecord(
            key=segment.key,
            parent=segment.parent,
            num_tokens=segment.span.num_tokens,
            payload_bytes=0,
            checksum=0,
            created_ms=now_ms,
            doc_ids=life.doc_ids,
            expires_ms=None if life.ttl_ms is None else now_ms + life.ttl_ms,
            owner=life.owner,
            pinned=life.pinned,
            model=life.model,
        )
        self.arena.annotate(record)
        for tier in self.lower:
            tier.writes.annotate(record)

    # Management

    def measure(self, samples: Samples[PayloadT]) -> None:
        """Find out, in each lower tier's own thread, what it costs; only then is it used.

        A tier that cannot be written or read is named in the log, once, and tried again with the
        next call.

        Args:
            samples: Two payloads of one form, the larger one last, each with its tokens.
        """
        for tier in self.lower:
            tier.writes.submit(partial(self._measure, tier, samples))

    def measure_unused(self, samples: Samples[PayloadT]) -> None:
        """As `measure`, but only tiers that are not used yet."""
        for tier in self.lower:
            if not tier.is_ready:
                tier.writes.submit(partial(self._measure_unused, tier, samples))

    def apply(self, change: Change[PayloadT]) -> None:
        """Carry out a change in every tier: in the arena now, elsewhere soon.

        Nothing comes back: lower tiers do it behind the writes offered so far, nothing is looked
        up in them until then, and what is on its way from them does not get into the arena.
        """
        self._change_arena(change)
        for tier in self.lower:
            tier.writes.change(change)

    def apply_local(self, change: Change[PayloadT]) -> None:
        """Carry out, in this server's own tiers, what was done to the shared one already."""
        self._change_arena(change)
        for tier in self.lower:
            if tier.tier.name == "disk":
                tier.writes.change(change)

    def stats(self) -> CacheStats:
        """Totals and counters; asks a shared index nothing. Changes nothing."""
        lower = tuple(
            TransferStats(
                tier=tier.tier.stats(),
                is_ready=tier.is_ready,
                queued_bytes=tier.writes.num_bytes,
                num_unwritten=tier.writes.num_dropped,
                load_fixed_ms=tier.cost.fixed_ms,
            )
            for tier in self.lower
        )
        return CacheStats(self.arena.stats(), self.arena.index.num_held, lower)

    def check_integrity(self) -> None:
        """Verify the arena; not for use while it is written.

        Raises:
            AssertionError: Its index and store do not agree.
        """
        self.arena.check_integrity()

    def close(self) -> None:
        """Write what waits, for a short while, and end the threads."""
        if self._lookups is not None:
            self._lookups.close(CLOSE_TIMEOUT_S)
        for tier in self.lower:
            tier.writes.close(CLOSE_TIMEOUT_S)
            tier.loads.close(CLOSE_TIMEOUT_S)

    def _make_lower(self, tier: Tier[PayloadT]) -> LowerTier[PayloadT]:
        cost, limits = CostModel(), self.limits
        loads = LoadQueue(tier, cost, limits.num_threads, limits.load_bytes, self._clock)
        return LowerTier(tier, cost, loads, WriteQueue(tier, limits.write_bytes, self._now_ms))

    def _make_record(
        self, segment: ChunkSegment, payload: PayloadT, now_ms: int, life: LifeCycle
    ) -> NodeRecord:
        num_tokens = segment.span.num_tokens
        return NodeRecord(
            key=segment.key,
            parent=segment.parent,
            num_tokens=num_tokens,
            payload_bytes=payload.nbytes,
            checksum=payload_checksum(payload),
            created_ms=now_ms,
            doc_ids=life.doc_ids,
            expires_ms=None if life.ttl_ms is None else now_ms + life.ttl_ms,
            owner=life.owner,
            pinned=life.pinned,
            model=life.model,
            compute_us=int((self.compute_cost.predict_ms(num_tokens) or 0.0) * 1e3),
        )

    def _stall_s(self) -> float:
        slowest_ms = max(tier.cost.fixed_ms for tier in self.lower)
        return max(self.limits.stall_ms, 2 * slowest_ms) / 1e3

    def _look_up_in_memory(
        self, tier: LowerTier[PayloadT], paths: Sequence[Path], now_ms: int
    ) -> tuple[Runs, bool]:
        """What is known without waiting, and whether that is all there is to know."""
        index = tier.tier.index
        if not (tier.is_readable and isinstance(index, _LooksUpInMemory)):
            return self._match(tier, paths, now_ms), True
        near = index.lookup(paths, now_ms)
        if near.is_complete:
            index.touch([record.key for run in near.hits for record in run], now_ms)
            tier.tier.count_match(paths, near.hits)
        return near.hits, near.is_complete

    def _match(self, tier: LowerTier[PayloadT], paths: Sequence[Path], now_ms: int) -> Runs:
        """What a tier has; nothing while it is not read."""
        return tier.tier.match(paths, now_ms) if tier.is_readable else ((),) * len(paths)

    def _look_up(
        self,
        prefetch: Prefetch[PayloadT],
        epoch: object,
        found: list[Runs],
        num_here: Sequence[int],
        paths: Sequence[Path],
        now_ms: int,
    ) -> None:
        """The look-up's rest, in a thread that may wait."""
        if not prefetch.is_settled:  # else the request went on without
            found += [self._match(tier, paths, now_ms) for tier in self.lower[len(found) :]]
            self._begin(prefetch, epoch, found, num_here)
        self._on_settled()

    def _begin(
        self,
        prefetch: Prefetch[PayloadT],
        epoch: object,
        found: Sequence[Runs],
        num_here: Sequence[int],
    ) -> None:
        plan = plan_loads(
            num_here,
            found,
            [tier.cost for tier in self.lower],
            self.compute_cost,
            self._prefetch_budget.max_bytes,
        )
        chunks: list[list[tuple[int, Load[PayloadT]]]] = [[] for _ in num_here]
        if self._prefetch_budget.take(plan.num_bytes):
            weakref.finalize(prefetch, self._prefetch_budget.give_back, plan.num_bytes)
            chunks = [self._start(runs) for runs in plan.chunks]
        loads = [load for chunk in chunks for _, load in chunk]
        num_declined = plan.num_declined + plan.num_segments - len(loads)
        limit_ms = self.compute_cost.predict_ms(sum(load.record.num_tokens for load in loads))
        limit_s = (self.limits.unknown_ms if limit_ms is None else limit_ms) / 1e3
        prefetch.begin(chunks, limit_s, num_declined, self._clock())
        for chunk, started in enumerate(chunks):
            for _, load in started:
                load.when_done(partial(self._land, prefetch, epoch, chunk))

    def _start(self, runs: Sequence[Run]) -> list[tuple[int, Load[PayloadT]]]:
        """Begin a chunk's loads, up to the first that its tier's queue has no room for."""
        started: list[tuple[int, Load[PayloadT]]] = []
        for run in runs:
            for record in run.records:
                load = self.lower[run.tier].loads.start(record)
                if load is None:
                    return started
                started.append((run.tier, load))
        return started

    def _land(self, prefetch: Prefetch[PayloadT], epoch: object, chunk: int) -> None:
        """Put into the arena, in order, what has come of a chunk; and into faster tiers."""
        now_ms = self._now_ms()
        with self._landing:
            landed = prefetch.take_landed(chunk)
            for index, load in landed if epoch is self._epoch else ():
                assert load.payload is not None
                self.arena.keep_verified(load.record, load.payload, now_ms)
                for faster in self.lower[:index]:
                    if faster.is_ready:
                        faster.writes.offer(load.record, load.payload)
        self._on_settled()

    def _change_arena(self, change: Change[PayloadT]) -> None:
        with self._landing:
            self._epoch = object()
            change(self.arena)

    def _measure_unused(self, tier: LowerTier[PayloadT], samples: Samples[PayloadT]) -> None:
        if not tier.is_ready:  # an attempt that was made meanwhile is enough
            self._measure(tier, samples)

    def _measure(self, tier: LowerTier[PayloadT], samples: Samples[PayloadT]) -> None:
        was_ready = tier.is_ready
        try:
            line = measure_store(tier.tier.store, samples, self._now_ms(), self._clock)
        except ExtError as exc:
            if not was_ready and not tier.has_failed:
                logger.warning("pic tier=%s is disabled: %s", tier.tier.name, exc)
            tier.has_failed = True
            return
        tier.cost.renew(line)
        if not was_ready:
            speed = 1e3 / line.ms_per_unit / (1 << 20) if line.ms_per_unit else float("inf")
            logger.info(
                "pic tier=%s is ready: t0_ms=%.2f mib_per_s=%.0f",
                tier.tier.name,
                line.fixed_ms,
                speed,
            )


def measure_store(
    store: PayloadStore[PayloadT],
    samples: Samples[PayloadT],
    now_ms: int,
    clock: Callable[[], float],
) -> Line:
    """What a load costs: writes two payloads, reads them back, and drops them again.

    Raises:
        TierUnavailable: They cannot be written or read.
        PayloadLost: They are not what was written.
    """
    store.probe()
    points: list[tuple[int, float]] = []
    for num_tokens, payload in samples:
        record = _probe_record(num_tokens, payload, now_ms)
        store.put(record, payload)
        try:
            started = clock()
            store.get(record)
            points.append((payload.nbytes, (clock() - started) * 1e3))
        finally:
            store.drop(record)
    return fit_line(points[0], points[1])


def _probe_record(num_tokens: int, payload: Payload, now_ms: int) -> NodeRecord:
    """A record that is never published, under a key no chunk has."""
    checksum = payload_checksum(payload)
    key = ChunkKey(b"\0probe" + checksum.to_bytes(8, "big") + now_ms.to_bytes(8, "big")[-3:])
    return NodeRecord(key, None, num_tokens, payload.nbytes, checksum, now_ms)
