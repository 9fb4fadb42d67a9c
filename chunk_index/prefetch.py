"""`Prefetch`: brings one request's cached KV from lower tiers into reach, while it waits.

Knows which segments a prompt has, where each was found, and how long waiting can pay. Does not know
SGLang, or how a payload travels (`transfer_queues`).

    arrival → look-up (memory; else a thread asks the shared index) → loads → settled → admission

A prefetch is settled when every load is done, or when waiting longer cannot pay: at the deadline,
which is the time that computing the segments would take, or as soon as no byte has come for
`stall_s`. What arrives later still lands in the arena, for the next request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Generic, NamedTuple

from sglang_ext.chunk_index.identity import ChunkKey
from sglang_ext.chunk_index.index import NodeRecord
from sglang_ext.chunk_index.payloads import PayloadT
from sglang_ext.chunk_index.transfer import CostModel, is_worth_loading
from sglang_ext.chunk_index.transfer_queues import Load

Path = Sequence[ChunkKey]
Runs = Sequence[Sequence[NodeRecord]]
"""For each path its leading cached records."""


class Run(NamedTuple):
    """Neighbouring segments of one chunk that one tier has and all faster tiers lack.

    Attributes:
        tier: Index of the tier, fastest first.
        records: The segments, in order.
    """

    tier: int
    records: tuple[NodeRecord, ...]

    @property
    def num_bytes(self) -> int:
        """Payload bytes to load."""
        return sum(record.payload_bytes for record in self.records)

    @property
    def num_tokens(self) -> int:
        """Tokens that need not be computed then."""
        return sum(record.num_tokens for record in self.records)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to load for a prompt; making it changes nothing.

    Attributes:
        chunks: For each chunk its runs, in the order they follow each other.
        num_declined: Segments that are faster computed than loaded, or beyond `max_bytes`.
    """

    chunks: tuple[tuple[Run, ...], ...]
    num_declined: int

    @property
    def num_segments(self) -> int:
        """Segments of all runs."""
        return sum(len(run.records) for runs in self.chunks for run in runs)

    @property
    def num_bytes(self) -> int:
        """Payload bytes of all runs."""
        return sum(run.num_bytes for runs in self.chunks for run in runs)

    @property
    def num_tokens(self) -> int:
        """Tokens of all runs."""
        return sum(run.num_tokens for runs in self.chunks for run in runs)


def plan_loads(
    num_here: Sequence[int],
    found: Sequence[Runs],
    costs: Sequence[CostModel],
    compute: CostModel,
    max_bytes: int,
) -> LoadPlan:
    """Decide which of a prompt's segments to load, and from where.

    Args:
        num_here: For each chunk the number of leading segments in the arena.
        found: For each lower tier, fastest first, what it has of each chunk.
        costs: For each lower tier what a load costs.
        compute: What computing tokens alone in their chunk costs.
        max_bytes: Most bytes to load for one prompt.
    """
    chunks: list[tuple[Run, ...]] = []
    num_declined = 0
    for chunk, start in enumerate(num_here):
        runs: list[Run] = []
        for tier, runs_of_tier in enumerate(found):
            run = Run(tier, tuple(runs_of_tier[chunk][start:]))
            if not run.records:
                continue
            is_worth = is_worth_loading(run.num_bytes, run.num_tokens, costs[tier], compute)
            if not is_worth or run.num_bytes > max_bytes:
                continue  # a slower tier may have more, whose fixed cost pays then
            runs.append(run)
            max_bytes -= run.num_bytes
            start += len(run.records)
        num_found = max((len(runs_of_tier[chunk]) for runs_of_tier in found), default=0)
        num_declined += max(0, num_found - start)
        chunks.append(tuple(runs))
    return LoadPlan(tuple(chunks), num_declined)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Prefetch(Generic[PayloadT]):
    """The loads of one request; thread-safe.

    Attributes:
        started_s: When it began, on the caller's clock.
        lookup_limit_s: Longest wait for the look-up.
        stall_s: Longest wait without a byte coming from the tiers, for whomever.
        num_arrived: Bytes that have come from the tiers so far.
        payloads: What has come and belongs to the request, until `release`.
        num_bytes: Bytes that came in time, by tier index.
        num_late: Loads that had not come when it was settled.
        num_declined: Segments found but not loaded.
        waited_ms: Time until it was settled.
        is_settled: The request need not wait any more.
    """

    started_s: float
    lookup_limit_s: float
    stall_s: float
    num_arrived: Callable[[], int]
    payloads: dict[ChunkKey, PayloadT] = field(default_factory=dict)
    num_bytes: Counter[int] = field(default_factory=Counter)
    num_late: int = 0
    num_declined: int = 0
    waited_ms: float = 0.0
    is_settled: bool = False
    _chunks: tuple[list[tuple[int, Load[PayloadT]]], ...] | None = None
    _num_landed: list[int] = field(default_factory=list)
    _deadline_s: float = 0.0
    _seen_bytes: int = 0
    _seen_s: float = 0.0
    _lock: Lock = field(default_factory=Lock, repr=False)

    @property
    def is_empty(self) -> bool:
        """Whether the look-up is done, and found nothing that is loaded or declined."""
        return self._chunks is not None and not any(self._chunks) and not self.num_declined

    def begin(
        self,
        chunks: Sequence[Sequence[tuple[int, Load[PayloadT]]]],
        limit_s: float,
        num_declined: int,
        now_s: float,
    ) -> None:
        """Set the loads once the look-up is done: for each chunk (tier, load) in order.

        `limit_s` is the longest wait that can pay.
        """
        with self._lock:
            self._chunks = tuple(list(loads) for loads in chunks)
            self._num_landed = [0] * len(self._chunks)
            self.num_declined = num_declined
            self._deadline_s = now_s + limit_s
            self._seen_bytes, self._seen_s = self.num_arrived(), now_s

    def take_landed(self, chunk: int) -> list[tuple[int, Load[PayloadT]]]:
        """The chunk's next loads that have come, in order and each once, for the arena."""
        with self._lock:
            assert self._chunks is not None
            loads = self._chunks[chunk]
            start = end = self._num_landed[chunk]
            while end < len(loads) and loads[end][1].payload is not None:
                end += 1
            self._num_landed[chunk] = end
            return loads[start:end]

    def check(self, now_s: float) -> bool:
        """Whether the request need not wait any more; the first time so, sums are taken."""
        if self.is_settled:
            return True
        with self._lock:
            if not self._is_over(now_s):
                return False
            self.is_settled = True
            if self._chunks is None or any(self._chunks):
                self.waited_ms = (now_s - self.started_s) * 1e3
            for loads in self._chunks or ():
                self._take(loads)
            return True

    def release(self) -> None:
        """Keep no payload any more that was taken; what is on its way lands all the same."""
        with self._lock:
            self.payloads = {}
            for chunk, loads in enumerate(self._chunks or ()):
                del loads[: self._num_landed[chunk]]
                self._num_landed[chunk] = 0

    def _take(self, loads: Sequence[tuple[int, Load[PayloadT]]]) -> None:
        for position, (tier, load) in enumerate(loads):
            if load.payload is None:
                self.num_late += sum(not later.is_done for _, later in loads[position:])
                return  # what stands behind it in its chunk is of no use without it
            self.payloads[load.record.key] = load.payload
            self.num_bytes[tier] += load.record.payload_bytes

    def _is_over(self, now_s: float) -> bool:
        if self._chunks is None:
            return now_s - self.started_s >= self.lookup_limit_s
        loads = [load for chunk in self._chunks for _, load in chunk]
        if all(load.is_done for load in loads) or now_s >= self._deadline_s:
            return True
        num_bytes = self.num_arrived()
        if num_bytes != self._seen_bytes:
            self._seen_bytes, self._seen_s = num_bytes, now_s
        return now_s - self._seen_s >= self.stall_s
