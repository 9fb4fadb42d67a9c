"""Threads that move payloads between host memory and one lower tier, and never block a caller.

Knows loads in flight, queued writes, and their bounds. Does not know requests, what is worth
moving, or what other tiers there are. All threads are daemons: one stuck in a dead file system
must not keep the process from ending.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Generic

from sglang_ext.chunk_index.identity import ChunkKey
from sglang_ext.chunk_index.index import NodeRecord
from sglang_ext.chunk_index.payloads import PayloadT
from sglang_ext.chunk_index.tier import Tier
from sglang_ext.chunk_index.transfer import CostModel

logger = logging.getLogger(__name__)

Job = Callable[[], object]

Change = Callable[[Tier[PayloadT]], object]
"""A removal or annotation, told a tier."""


class Workers:
    """Threads that run jobs in the order they were given; a failing job is logged."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads = [
            Thread(target=self._run, name=f"pic-{name}-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Run a job soon."""
        self._jobs.put(job)

    def close(self, timeout_s: float) -> None:
        """End after the jobs given so far; waits at most about `timeout_s` for each thread."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                logger.exception("pic error in a transfer")
            del job  # or it, and what it holds, would live until the next one comes


@dataclass(slots=True, eq=False)
class Load(Generic[PayloadT]):
    """One payload on its way; shared by all requests that want it.

    Attributes:
        record: Which.
        payload: It, once it is there.
        is_done: It is there, or will not come.
    """

    record: NodeRecord
    payload: PayloadT | None = None
    is_done: bool = False
    _listeners: list[Job] = field(default_factory=list, repr=False)
    _lock: Lock = field(default_factory=Lock, repr=False)

    def when_done(self, listener: Job) -> None:
        """Call a function once, as soon as the load is done; at once if it is."""
        with self._lock:
            if not self.is_done:
                self._listeners.append(listener)
                return
        listener()

    def finish(self, payload: PayloadT | None) -> None:
        """Set the outcome and tell everyone who waits."""
        with self._lock:
            self.payload, self.is_done = payload, True
            listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()


class LoadQueue(Generic[PayloadT]):
    """Loads from one tier; a payload that is on its way is not asked for twice."""

    def __init__(
        self,
        tier: Tier[PayloadT],
        cost: CostModel,
        num_threads: int,
        max_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        """Start the threads.

        Args:
            tier: Where payloads come from.
            cost: Learns from every load.
            num_threads: Loads at once.
            max_bytes: Most bytes of loads that wait or run; one is always taken.
            clock: Seconds of a clock that only goes forward.
        """
        self._tier = tier
        self._cost = cost
        self._max_bytes = max_bytes
        self._clock = clock
        self._workers = Workers(f"load-{tier.name}", num_threads)
        self._lock = Lock()
        self._in_flight: dict[tuple[ChunkKey, int], Load[PayloadT]] = {}
        self._num_bytes = 0
        self._num_arrived = 0

    @property
    def num_arrived(self) -> int:
        """Bytes of all loads that have arrived so far, those of unfinished ones included."""
        return self._num_arrived

    def start(self, record: NodeRecord) -> Load[PayloadT] | None:
        """Begin to load a payload, or join its load; None if too much is under way."""
        name = record.key, record.checksum
        with self._lock:
            load = self._in_flight.get(name)
            if load is not None:
                return load
            if self._in_flight and self._num_bytes + record.payload_bytes > self._max_bytes:
                return None
            load = self._in_flight[name] = Load(record)
            self._num_bytes += record.payload_bytes
        self._workers.submit(lambda: self._load(load))
        return load

    def close(self, timeout_s: float) -> None:
        """End the threads."""
        self._workers.close(timeout_s)

    def _add_bytes(self, num_bytes: int) -> None:
        with self._lock:
            self._num_arrived += num_bytes

    def _load(self, load: Load[PayloadT]) -> None:
        record, payload = load.record, None
        started = self._clock()
        try:
            payload = self._tier.load(record, self._add_bytes)
            if payload is not None:
                self._cost.observe(record.payload_bytes, (self._clock() - started) * 1e3)
        finally:
            self._finish(load, payload)

    def _finish(self, load: Load[PayloadT], payload: PayloadT | None) -> None:
        """Tell everyone; until they have put the payload elsewhere, others join this load."""
        try:
            load.finish(payload)
        finally:
            with self._lock:
                del self._in_flight[load.record.key, load.record.checksum]
                self._num_bytes -= load.record.payload_bytes


class WriteQueue(Generic[PayloadT]):
    """Writes to one tier, in the order they were offered, by one thread."""

    def __init__(self, tier: Tier[PayloadT], max_bytes: int, now_ms: Callable[[], int]) -> None:
        """Start the thread.

        Args:
            tier: Where payloads go.
            max_bytes: Most payload bytes that wait; what is offered beyond is not written.
            now_ms: The clock of the tier's index.
        """
        self._tier = tier
        self._max_bytes = max_bytes
        self._now_ms = now_ms
        self._workers = Workers(f"write-{tier.name}", num_threads=1)
        self._lock = Lock()
        self._num_bytes = 0
        self._num_dropped = 0
        self._num_changes = 0

    @property
    def num_bytes(self) -> int:
        """Payload bytes that wait now."""
        return self._num_bytes

    @property
    def num_dropped(self) -> int:
        """Payloads that were offered and not written, since the queue was full."""
        return self._num_dropped

    @property
    def is_changing(self) -> bool:
        """Whether a change waits or runs, so that the tier may still have what it removes."""
        return self._num_changes > 0

    def offer(self, record: NodeRecord, payload: PayloadT) -> bool:
        """Write a payload later; False if too much is waiting, which is counted."""
        with self._lock:
            if self._num_bytes and self._num_bytes + payload.nbytes > self._max_bytes:
                self._num_dropped += 1
                return False
            self._num_bytes += payload.nbytes
        self._workers.submit(lambda: self._write(record, payload))
        return True

    def annotate(self, record: NodeRecord) -> None:
        """Add a record's documents, expiry and pin to the tier's record, behind earlier writes."""
        self._workers.submit(lambda: self._tier.annotate(record))

    def change(self, change: Change[PayloadT]) -> None:
        """Change the tier behind the writes offered so far, so that none of those comes back."""
        with self._lock:
            self._num_changes += 1
        self._workers.submit(lambda: self._change(change))

    def submit(self, job: Job) -> None:
        """Run something else behind the writes offered so far."""
        self._workers.submit(job)

    def close(self, timeout_s: float) -> None:
        """End the thread behind what was offered, or after `timeout_s`."""
        self._workers.close(timeout_s)

    def _change(self, change: Change[PayloadT]) -> None:
        try:
            change(self._tier)
        finally:
            with self._lock:
                self._num_changes -= 1

    def _write(self, record: NodeRecord, payload: PayloadT) -> None:
        try:
            self._tier.keep(record, payload, self._now_ms())
        finally:
            with self._lock:
                self._num_bytes -= payload.nbytes
