"""What eviction keeps, against least-recently-used, on traces that resemble retrieval.

Numbers beside the assertions are what was measured when they were written; all seeds are fixed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from random import Random
from typing import Protocol

import pytest

from sglang_ext.chunk_index.identity import ChunkKey
from sglang_ext.chunk_index.index import NodeRecord, Publication, Shortage
from sglang_ext.chunk_index.memory_index import MemoryIndex
from tests.strategies import node_record

NUM_DOCUMENTS = 600
NUM_REQUESTS = 900
NUM_WARM = 200  # requests that are not counted
CHUNKS_A_REQUEST = 6
FIFTH, TWENTIETH = 0.2, 0.05  # budgets, as shares of all documents' bytes
US_PER_TOKEN = (100, 2000)  # of two models of one payload size per token

Chunk = tuple[NodeRecord, ...]


class Cache(Protocol):
    """Chunks within a budget."""

    def request(self, chunk: Chunk) -> int:
        """Number of leading segments found; stores the others."""
        ...


class PolicyCache:
    """`MemoryIndex`, used as a cache uses it."""

    def __init__(self, budget_bytes: int) -> None:
        self.index = MemoryIndex(budget_bytes)

    def request(self, chunk: Chunk) -> int:
        (found,) = self.index.match([[segment.key for segment in chunk]], now_ms=0)
        self.index.hold([record.key for record in found])
        for segment in chunk[len(found) :]:
            self.store(segment)
            self.index.hold([segment.key])
        self.index.release([segment.key for segment in reversed(chunk)])
        return len(found)

    def store(self, segment: NodeRecord) -> None:
        granted = self.index.reserve("", segment.payload_bytes, now_ms=0)
        while isinstance(granted, Shortage):
            victims = self.index.victims(granted.num_bytes, "", is_own=granted.is_own)
            assert self.index.evict(victims) == victims != ()
            granted = self.index.reserve("", segment.payload_bytes, now_ms=0)
        assert self.index.publish(segment, 0, granted) is Publication.STORED


class RecencyCache:
    """Least recently used goes first, and every segment after those below it."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.num_bytes = 0
        self.segments: OrderedDict[ChunkKey, int] = OrderedDict()

    def request(self, chunk: Chunk) -> int:
        num_found = 0
        while num_found < len(chunk) and chunk[num_found].key in self.segments:
            num_found += 1
        for segment in reversed(chunk[:num_found]):
            self.segments.move_to_end(segment.key)
        for segment in chunk[num_found:]:
            self.num_bytes += segment.payload_bytes
            while self.num_bytes > self.budget_bytes:
                self.num_bytes -= self.segments.popitem(last=False)[1]
            self.segments[segment.key] = segment.payload_bytes
        for segment in reversed(chunk):
            self.segments.move_to_end(segment.key)
        return num_found


@dataclass(frozen=True)
class Trace:
    """How requests pick their chunks.

    Attributes:
        exponent: Of the documents' popularity, `1 / rank ** exponent`.
        drift: Requests between changes of rank of a tenth of the documents; 0 is never.
        scan_share: Share of chunks that no other request has.
        num_models: Models that documents belong to in turn.
    """

    exponent: float
    drift: int = 0
    scan_share: float = 0.0
    num_models: int = 1

    def documents(self) -> list[Chunk]:
        rng = Random(1)
        return [self.chunk(number, rng) for number in range(NUM_DOCUMENTS)]

    def chunk(self, number: int, rng: Random) -> Chunk:
        """One to four segments of one byte a token, all but the last of 256."""
        model = number % self.num_models
        num_full = rng.choice([0, 0, 1, 1, 2, 3])
        lens = [256] * num_full + [rng.randrange(32, 257)]
        names = [f"{number}.{i}" for i in range(len(lens))]
        return tuple(
            node_record(
                name,
                parent,
                payload_bytes=num_tokens,
                model=str(model),
                compute_us=num_tokens * US_PER_TOKEN[model],
            )
            for name, parent, num_tokens in zip(names, [None, *names], lens, strict=False)
        )

    def requests(self) -> Iterator[list[Chunk]]:
        rng = Random(2)
        documents = self.documents()
        ranked = rng.sample(range(NUM_DOCUMENTS), NUM_DOCUMENTS)
        weights = list(accumulate(1 / (1 + i) ** self.exponent for i in range(NUM_DOCUMENTS)))
        num_documents = NUM_DOCUMENTS
        for i in range(NUM_REQUESTS):
            if self.drift and i % self.drift == 0:
                exchange(ranked, rng)
            num_new = sum(rng.random() < self.scan_share for _ in range(CHUNKS_A_REQUEST))
            num_known = CHUNKS_A_REQUEST - num_new
            picked = dict.fromkeys(rng.choices(ranked, cum_weights=weights, k=num_known))
            scanned = range(num_documents, num_documents + num_new)
            num_documents += num_new
            yield [documents[n] for n in picked] + [self.chunk(n, rng) for n in scanned]


def exchange(ranked: list[int], rng: Random) -> None:
    """Let a twentieth of the documents change ranks with as many of the most popular tenth."""
    for _ in range(NUM_DOCUMENTS // 20):
        a, b = rng.randrange(NUM_DOCUMENTS), rng.randrange(NUM_DOCUMENTS // 10)
        ranked[a], ranked[b] = ranked[b], ranked[a]


@dataclass(frozen=True)
class Outcome:
    """Shares of what was asked for, after warming up.

    Attributes:
        byte_hit_rate: Payload bytes found.
        saved_cost: Predicted compute time of what was found.
    """

    byte_hit_rate: float
    saved_cost: float


def play(cache: Cache, trace: Trace) -> Outcome:
    found_bytes = found_us = asked_bytes = asked_us = 0
    for at, chunks in enumerate(trace.requests()):
        for chunk in chunks:
            found = chunk[: cache.request(chunk)]
            if at >= NUM_WARM:
                asked_bytes += sum(segment.payload_bytes for segment in chunk)
                asked_us += sum(segment.compute_us for segment in chunk)
                found_bytes += sum(segment.payload_bytes for segment in found)
                found_us += sum(segment.compute_us for segment in found)
    return Outcome(found_bytes / asked_bytes, found_us / asked_us)


@cache
def compare(trace: Trace, budget_share: float) -> tuple[Outcome, Outcome]:
    """Ours, then least recently used; the budget is a share of all documents' bytes."""
    num_bytes = sum(segment.payload_bytes for chunk in trace.documents() for segment in chunk)
    budget_bytes = int(budget_share * num_bytes)
    ours = PolicyCache(budget_bytes)
    outcome = play(ours, trace)
    ours.index.check_integrity()
    assert ours.index.stats().num_bytes <= budget_bytes
    return outcome, play(RecencyCache(budget_bytes), trace)


def byte_hit_ratio(trace: Trace, budget_share: float) -> float:
    ours, recency = compare(trace, budget_share)
    return ours.byte_hit_rate / recency.byte_hit_rate


def saved_cost_ratio(trace: Trace, budget_share: float) -> float:
    ours, recency = compare(trace, budget_share)
    return ours.saved_cost / recency.saved_cost


@pytest.mark.parametrize("exponent", [0.7, 1.1])  # measured 1.12, 1.05
def test_steady_popularity_hits_no_less_than_recency(exponent: float) -> None:
    assert byte_hit_ratio(Trace(exponent), FIFTH) > 0.99


def test_a_working_set_five_times_the_budget_is_hit_more() -> None:
    ours, recency = compare(Trace(0.9), FIFTH)  # 0.615 against 0.576
    assert ours.byte_hit_rate > recency.byte_hit_rate + 0.02
    assert ours.byte_hit_rate > 0.55


def test_a_budget_of_a_twentieth_is_used_better() -> None:
    assert byte_hit_ratio(Trace(0.9), TWENTIETH) > 1.12  # 1.18


def test_a_drifting_hot_set_is_followed() -> None:
    assert byte_hit_ratio(Trace(0.9, drift=50), FIFTH) > 0.99  # 1.03
    assert byte_hit_ratio(Trace(0.9, drift=50), TWENTIETH) > 1.1  # 1.16


def test_a_hot_set_that_changes_too_fast_costs_little() -> None:
    """Where recency guesses better: every 10 requests a tenth of the documents change ranks."""
    assert byte_hit_ratio(Trace(0.9, drift=10), FIFTH) > 0.96  # 0.98


def test_chunks_seen_once_do_not_push_out_what_recurs() -> None:
    assert byte_hit_ratio(Trace(0.9, scan_share=0.3), FIFTH) > 1.12  # 1.17
    assert byte_hit_ratio(Trace(0.9, scan_share=0.3), TWENTIETH) > 1.15  # 1.22


def test_scans_and_drift_together_are_withstood() -> None:
    assert byte_hit_ratio(Trace(0.9, drift=50, scan_share=0.3), FIFTH) > 1.06  # 1.11


def test_of_two_models_the_costly_one_keeps_more() -> None:
    """Of one model, the same popularity saves 1.07 and 1.18 of what recency does."""
    assert saved_cost_ratio(Trace(0.9, num_models=2), FIFTH) > 1.12  # 1.17
    assert saved_cost_ratio(Trace(0.9, num_models=2), TWENTIETH) > 1.25  # 1.32


def test_cost_counts_under_scans_and_drift_too() -> None:
    trace = Trace(0.9, drift=50, scan_share=0.3, num_models=2)
    assert saved_cost_ratio(trace, FIFTH) > 1.15  # 1.22
