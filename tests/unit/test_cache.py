"""A chunk stored once is found again in any tier, and no request waits for a tier that is slow."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import numpy as np
import pytest

from sglang_ext.chunk_index.arena import Arena
from sglang_ext.chunk_index.cache import (
    ChunkCache,
    LifeCycle,
    Samples,
    TransferLimits,
    measure_store,
)
from sglang_ext.chunk_index.chunking import ChunkSegment, segment_chunk
from sglang_ext.chunk_index.file_store import FileStore
from sglang_ext.chunk_index.identity import root_key
from sglang_ext.chunk_index.index import ChunkIndex, NodeRecord
from sglang_ext.chunk_index.memory_index import MemoryIndex
from sglang_ext.chunk_index.near_index import NearIndex
from sglang_ext.chunk_index.payloads import HostStore, OnBytes
from sglang_ext.chunk_index.prefetch import Prefetch
from sglang_ext.chunk_index.spans import Span
from sglang_ext.chunk_index.tier import Refusal, Tier
from sglang_ext.chunk_index.transfer import Line
from sglang_ext.errors import PayloadLost, TierUnavailable
from tests.blobs import BytesCodec, random_payload
from tests.strategies import BytesPayload

DEADLINE_S = 10.0
BYTES_PER_TOKEN = 4
NOW_MS = 1_700_000_000_000
SAMPLES: Samples[BytesPayload] = ((1, random_payload(4)), (256, random_payload(1024)))

Chunk = tuple[ChunkSegment, ...]


def until(is_true: Callable[[], bool]) -> None:
    """Wait for other threads; fails after a while."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Disk(FileStore[BytesPayload]):
    """A real folder, which can be made to hang or to seem slow.

    Attributes:
        gate: While closed, every load hangs.
        door: While closed, a load hangs that has read everything.
        gets: Keys of payloads asked for.
        get_s: Seconds that a load takes on the test's clock, and as much again for each KiB.
    """

    def __init__(self, root: Path, clock: Clock) -> None:
        super().__init__(root, BytesCodec())
        self.gate = Event()
        self.gate.set()
        self.door = Event()
        self.door.set()
        self.gets: list[bytes] = []
        self.get_s = 0.0
        self._clock = clock

    def get(self, record: NodeRecord, on_bytes: OnBytes | None = None) -> BytesPayload:
        self.gets.append(record.key)
        assert self.gate.wait(DEADLINE_S)
        self._clock.now_s += self.get_s * (1 + record.payload_bytes / 1024)
        payload = super().get(record, on_bytes)
        assert self.door.wait(DEADLINE_S)
        return payload


class Rig:
    """A cache over an arena and folders, with a clock that the test moves."""

    def __init__(
        self,
        folder: Path,
        names: Sequence[str] = ("disk",),
        budget_tokens: int | None = None,
        limits: TransferLimits | None = None,
        indexes: Sequence[ChunkIndex] = (),
        arena_type: type[Arena[BytesPayload]] = Arena,
    ) -> None:
        self.clock = Clock()
        budget = None if budget_tokens is None else budget_tokens * BYTES_PER_TOKEN
        self.arena = arena_type(MemoryIndex(budget), HostStore())
        self.disks = [Disk(folder / name, self.clock) for name in names]
        indexes = indexes or [MemoryIndex() for _ in names]
        self.tiers = [
            Tier(name, index, disk)
            for name, index, disk in zip(names, indexes, self.disks, strict=True)
        ]
        self.cache = ChunkCache(self.arena, self.tiers, limits, lambda: NOW_MS, self.clock)

    @property
    def disk(self) -> Disk:
        return self.disks[0]

    def measure(self) -> None:
        """Have every tier measured and used; loads cost nothing unless `get_s` says so."""
        for disk in self.disks:
            disk.probe()
        self.cache.measure(SAMPLES)
        self.drain()
        assert all(tier.is_ready for tier in self.cache.stats().lower)
        for disk in self.disks:
            disk.gets.clear()

    def store(self, *chunks: Chunk, **life: Any) -> None:
        """Store chunks and wait until they are written to every tier that is used."""
        for chunk in chunks:
            for segment in chunk:
                assert self.cache.store(segment, payload(segment), NOW_MS, LifeCycle(**life))
        self.drain()

    def store_below(self, *chunks: Chunk, **life: Any) -> None:
        """Have chunks in the lower tiers alone."""
        self.store(*chunks, **life)
        self.arena.clear()

    def drain(self) -> None:
        """Wait until the lower tiers have done what they were told."""
        for tier in self.cache.lower:
            is_done = Event()
            tier.writes.submit(is_done.set)
            assert is_done.wait(DEADLINE_S)

    def prefetch(self, *chunks: Chunk) -> Prefetch[BytesPayload] | None:
        return self.cache.prefetch(paths_of(chunks), NOW_MS)

    def fetch(self, *chunks: Chunk) -> Prefetch[BytesPayload]:
        """Prefetch, wait until it is settled without moving the clock."""
        prefetch = self.prefetch(*chunks)
        assert prefetch is not None
        until(lambda: prefetch.check(self.clock()))
        return prefetch

    def num_here(self, *chunks: Chunk) -> tuple[int, ...]:
        """Leading segments of each chunk in the arena; changes nothing."""
        return self.arena.index.peek(paths_of(chunks), NOW_MS)

    def loaded(self, chunk: Chunk) -> list[BytesPayload]:
        """What a request gets of a chunk from the arena."""
        with self.cache.acquire(paths_of([chunk]), NOW_MS) as lease:
            return lease.payloads(0)

    def record(self, segment: ChunkSegment, tier: int = 0) -> NodeRecord | None:
        """What a lower tier's index has of a segment."""
        view = self.tiers[tier].index.show(segment.key)
        return None if view is None else view.record

    def close(self) -> None:
        for disk in self.disks:
            disk.gate.set()
            disk.door.set()
        self.cache.close()
        self.cache.check_integrity()
        assert self.cache.stats().num_held == 0


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(*args: Any, **kwargs: Any) -> Rig:
        rigs.append(Rig(tmp_path, *args, **kwargs))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    """One disk tier, measured and used."""
    rig = make_rig()
    rig.measure()
    return rig


def chunk(seed: int, num_tokens: int, namespace: str = "default", segment_len: int = 256) -> Chunk:
    """The segments of `num_tokens` random tokens."""
    tokens = np.random.default_rng(seed).integers(0, 50_000, num_tokens)
    root = root_key(b"model", namespace, b"secret")
    return segment_chunk(tokens, Span(0, num_tokens), root, segment_len)


def payload(segment: ChunkSegment) -> BytesPayload:
    size = segment.span.num_tokens * BYTES_PER_TOKEN
    return BytesPayload(bytearray(Random(segment.key).randbytes(size)))


def payloads(chunk: Sequence[ChunkSegment]) -> list[BytesPayload]:
    return [payload(segment) for segment in chunk]


def paths_of(chunks: Sequence[Chunk]) -> list[list[Any]]:
    return [[segment.key for segment in chunk] for chunk in chunks]


# The arena alone


@pytest.mark.parametrize("num_tokens", [1, 15, 40, 255, 256, 257])
def test_a_chunk_of_any_length_is_reused_whole(
    make_rig: Callable[..., Rig], num_tokens: int
) -> None:
    rig = make_rig(names=())
    some = chunk(1, num_tokens)
    assert rig.loaded(some) == []
    rig.store(some)
    assert rig.loaded(some) == payloads(some)
    assert rig.cache.stats().lower == ()


def test_another_namespace_hits_nothing(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(names=())
    rig.store(chunk(1, 300))
    assert rig.num_here(chunk(1, 300, namespace="other")) == (0,)


def test_without_lower_tiers_there_are_no_threads_and_nothing_to_wait_for(
    make_rig: Callable[..., Rig],
) -> None:
    before = threading.active_count()
    rig = make_rig(names=())
    assert threading.active_count() == before
    assert rig.prefetch(chunk(1, 300)) is None


def test_a_refused_segment_is_told(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(names=(), budget_tokens=100)
    (large,) = chunk(1, 101)
    assert not rig.cache.store(large, payload(large), NOW_MS)
    assert rig.cache.stats().arena.refusals["too_large"] == 1


def test_a_record_says_whose_it_is_how_long_it_lives_and_what_it_costs(rig: Rig) -> None:
    (segment,) = chunk(1, 100)
    rig.cache.compute_cost.renew(Line(1.0, 0.5))
    rig.store((segment,), owner="me", model="m", doc_ids=("doc",), ttl_ms=50, pinned=True)
    expected = NodeRecord(
        key=segment.key,
        parent=None,
        num_tokens=100,
        payload_bytes=400,
        checksum=rig.arena.index.match([[segment.key]], NOW_MS)[0][0].checksum,
        created_ms=NOW_MS,
        doc_ids=("doc",),
        expires_ms=NOW_MS + 50,
        owner="me",
        pinned=True,
        model="m",
        compute_us=51_000,
    )
    assert rig.record(segment) == expected
    assert list(rig.disk.records()) == [expected]


# Down and up again


@pytest.mark.parametrize("num_tokens", [1, 255, 256, 257, 2000])
def test_what_is_written_behind_comes_back_bit_identical(rig: Rig, num_tokens: int) -> None:
    some = chunk(1, num_tokens)
    rig.store_below(some)
    assert rig.loaded(some) == []
    prefetch = rig.fetch(some)
    assert [prefetch.payloads[segment.key] for segment in some] == payloads(some)
    assert prefetch.num_bytes == {0: num_tokens * BYTES_PER_TOKEN}
    until(lambda: rig.num_here(some) == (len(some),))
    assert rig.loaded(some) == payloads(some)


def test_a_restarted_server_finds_what_the_one_before_stored(
    make_rig: Callable[..., Rig],
) -> None:
    before, after = make_rig(), make_rig()
    some, other = chunk(1, 2000), chunk(2, 300)
    before.measure()
    before.store(some, other)
    before.cache.close()
    after.measure()
    assert after.tiers[0].adopt() == len(some) + len(other)
    after.fetch(other, some)
    until(lambda: after.num_here(some, other) == (len(some), len(other)))
    assert after.loaded(some) == payloads(some)


def test_only_what_the_arena_lacks_is_loaded(rig: Rig) -> None:
    some = chunk(1, 1000)
    rig.store_below(some)
    rig.cache.store(some[0], payload(some[0]), NOW_MS)
    prefetch = rig.fetch(some)
    assert sorted(rig.disk.gets) == sorted(segment.key for segment in some[1:])
    assert set(prefetch.payloads) == {segment.key for segment in some[1:]}


def test_there_is_nothing_to_wait_for_if_the_arena_has_everything(rig: Rig) -> None:
    some, other = chunk(1, 300), chunk(2, 300)
    rig.store(some, other)
    assert rig.prefetch(some, other) is None
    stats = rig.cache.stats().lower[0].tier
    assert (stats.num_hits, stats.num_misses) == (0, 0)  # it was not even asked


def test_there_is_nothing_to_wait_for_if_no_tier_has_more(rig: Rig) -> None:
    some = chunk(1, 300)
    rig.store(some[:1])
    assert rig.prefetch(some, chunk(2, 300)) is None


def test_a_tier_that_was_not_measured_is_neither_written_nor_read(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig()
    rig.disk.probe()
    some = chunk(1, 300)
    rig.store_below(some)
    assert list(rig.disk.records()) == []
    assert rig.prefetch(some) is None
    assert not rig.cache.stats().lower[0].is_ready


def test_a_segment_too_large_for_the_arena_is_still_written_behind(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(budget_tokens=100)
    rig.measure()
    (large,) = chunk(1, 101)
    assert not rig.cache.store(large, payload(large), NOW_MS)
    rig.drain()
    assert rig.record(large) is not None


def test_closing_writes_what_waits(rig: Rig) -> None:
    some = chunk(1, 2000)
    for segment in some:
        rig.cache.store(segment, payload(segment), NOW_MS)
    rig.cache.close()
    assert len(list(rig.disk.records())) == len(some)


def test_something_is_known_of_a_chunk_in_any_tier(rig: Rig) -> None:
    here, below = chunk(1, 300), chunk(2, 300)
    rig.store_below(below)
    rig.store(here)
    rig.tiers[0].discard(rig.record(here[0]), "removed")  # type: ignore[arg-type]
    assert rig.cache.knows(paths_of([here]), NOW_MS)
    assert rig.cache.knows(paths_of([below]), NOW_MS)
    assert not rig.cache.knows(paths_of([chunk(3, 300)]), NOW_MS)


# Payloads that do not come


def test_a_lost_payload_ends_its_chunk_there_and_its_record_goes(rig: Rig) -> None:
    some = chunk(1, 1000)
    rig.store_below(some)
    lost = rig.record(some[2])
    assert lost is not None
    rig.disk.drop(lost)
    prefetch = rig.fetch(some)
    assert set(prefetch.payloads) == {segment.key for segment in some[:2]}
    until(lambda: rig.num_here(some) == (2,))
    assert [rig.record(segment) is None for segment in some] == [False, False, True, True]
    assert rig.cache.stats().lower[0].tier.load_failures["absent"] >= 1
    assert rig.prefetch(some) is None


def test_a_damaged_payload_is_never_served(rig: Rig, tmp_path: Path) -> None:
    some = chunk(1, 200)
    rig.store_below(some)
    (file,) = tmp_path.rglob("*.kv")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    prefetch = rig.prefetch(some)
    assert prefetch is not None
    until(lambda: prefetch.check(rig.clock()))
    assert prefetch.payloads == {}
    assert rig.loaded(some) == []
    assert rig.cache.stats().lower[0].tier.load_failures == {"damaged": 1}


def test_of_a_chunk_no_more_is_begun_once_the_queue_is_full(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(limits=TransferLimits(load_bytes=700 * BYTES_PER_TOKEN))
    rig.measure()
    some = chunk(1, 900)  # three whole segments and a short one, which would fit again
    rig.store_below(some)
    rig.disk.gate.clear()
    prefetch = rig.prefetch(some)
    assert prefetch is not None
    assert prefetch.num_declined == 2
    rig.disk.gate.set()
    until(lambda: prefetch.check(rig.clock()))
    assert set(prefetch.payloads) == {segment.key for segment in some[:2]}
    assert len(rig.disk.gets) == 2
    assert rig.cache.stats().arena.refusals["orphan"] == 0


# How long a request waits


def test_a_tier_that_hangs_is_waited_for_until_the_stall_limit_and_no_longer(rig: Rig) -> None:
    some = chunk(1, 600)
    rig.store_below(some)
    rig.disk.gate.clear()
    started = time.monotonic()
    prefetch = rig.prefetch(some)
    assert prefetch is not None
    assert not prefetch.check(0.049)
    assert prefetch.check(0.051)
    assert prefetch.num_late == len(some)
    assert prefetch.payloads == {}
    assert time.monotonic() - started < DEADLINE_S / 2  # no call waited for the tier


def test_no_request_waits_longer_than_computing_would_take(rig: Rig) -> None:
    some = chunk(1, 40)
    rig.store_below(some)
    rig.cache.compute_cost.renew(Line(0.0, 1.0))
    rig.disk.gate.clear()
    prefetch = rig.prefetch(some)
    assert prefetch is not None
    assert not prefetch.check(0.039)
    assert prefetch.check(0.041)


def test_many_requests_for_one_chunk_on_a_tier_that_hangs_ask_for_it_once(rig: Rig) -> None:
    some = chunk(1, 200)
    rig.store_below(some)
    rig.disk.gate.clear()
    prefetches = [rig.prefetch(some) for _ in range(20)]
    rig.disk.gate.set()
    for prefetch in prefetches:
        assert prefetch is not None
        until(lambda prefetch=prefetch: prefetch.check(rig.clock()))  # type: ignore[misc]
        assert list(prefetch.payloads.values()) == payloads(some)
    assert len(rig.disk.gets) == 1


def test_what_comes_too_late_is_in_the_arena_for_the_next_request(rig: Rig) -> None:
    some = chunk(1, 600)
    rig.store_below(some)
    rig.disk.gate.clear()
    prefetch = rig.prefetch(some)
    assert prefetch is not None
    assert prefetch.check(0.051)
    rig.disk.gate.set()
    until(lambda: rig.num_here(some) == (len(some),))
    assert prefetch.payloads == {}
    assert rig.prefetch(some) is None
    assert rig.loaded(some) == payloads(some)


def test_the_stall_limit_is_twice_a_slow_tiers_own_fixed_cost(rig: Rig) -> None:
    rig.disk.get_s = 0.2
    rig.cache.measure(SAMPLES)
    rig.drain()
    some = chunk(1, 200)
    rig.store_below(some)
    rig.disk.gate.clear()
    started = rig.clock()
    prefetch = rig.prefetch(some)
    assert prefetch is not None
    assert rig.cache.stats().lower[0].load_fixed_ms == pytest.approx(200)
    assert not prefetch.check(started + 0.399)
    assert prefetch.check(started + 0.401)


def test_a_listener_hears_of_every_load(rig: Rig) -> None:
    some = chunk(1, 200)
    rig.store_below(some)
    has_loaded = Event()
    rig.cache.when_loaded(has_loaded.set)
    prefetch = rig.prefetch(some)
    assert prefetch is not None
    assert has_loaded.wait(DEADLINE_S)
    assert prefetch.check(rig.clock())


# Whether loading pays


def test_a_tier_slower_than_computing_is_left_alone_and_that_is_told(rig: Rig) -> None:
    some = chunk(1, 600)
    rig.store_below(some)
    rig.disk.get_s = 1.0
    rig.cache.measure(SAMPLES)
    rig.drain()
    rig.disk.gets.clear()
    rig.cache.compute_cost.renew(Line(0.0, 1.0))
    prefetch = rig.prefetch(some)
    assert prefetch is not None
    assert prefetch.num_declined == len(some)
    assert prefetch.check(rig.clock())
    assert prefetch.payloads == {}
    assert rig.disk.gets == []


def test_loads_that_turn_out_slow_end_loading_and_a_new_measurement_begins_it_again(
    rig: Rig,
) -> None:
    rig.disk.get_s = 0.001
    rig.cache.measure(SAMPLES)
    rig.cache.compute_cost.renew(Line(0.0, 1.0))
    chunks = [chunk(seed, 200) for seed in range(10)]
    rig.store_below(*chunks)
    assert rig.fetch(chunks[0]).num_declined == 0
    rig.disk.get_s = 2.0
    num_tried = 0
    for some in chunks[1:]:
        prefetch = rig.prefetch(some)
        assert prefetch is not None
        if prefetch.num_declined:
            break
        num_tried += 1
        until(lambda some=some: rig.num_here(some) == (1,))  # type: ignore[misc]
    assert 1 <= num_tried <= 3
    rig.disk.get_s = 0.001
    rig.cache.measure(SAMPLES)
    rig.drain()
    assert rig.fetch(chunks[-1]).num_declined == 0


# Measuring


def test_a_tier_that_fails_is_named_once_and_used_as_soon_as_it_works(
    make_rig: Callable[..., Rig], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    obstacle = tmp_path / "disk"
    obstacle.write_text("a file where the folder should be")
    rig = make_rig()
    for _ in range(3):
        rig.cache.measure(SAMPLES)
    rig.drain()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "tier=disk is disabled" in caplog.messages[0]
    assert not rig.cache.stats().lower[0].is_ready
    obstacle.unlink()
    rig.cache.measure_unused(SAMPLES)
    rig.drain()
    assert "tier=disk is ready" in caplog.messages[-1]
    some = chunk(1, 300)
    rig.store_below(some)
    assert len(rig.fetch(some).payloads) == len(some)


def test_a_tier_in_use_is_not_measured_with_the_unused_ones(rig: Rig) -> None:
    rig.cache.measure_unused(SAMPLES)
    rig.drain()
    assert rig.disk.gets == []


def test_measuring_finds_what_a_load_costs_and_leaves_nothing_behind(tmp_path: Path) -> None:
    clock = Clock()
    disk = Disk(tmp_path / "disk", clock)
    disk.probe()

    class Throttled(HostStore[BytesPayload]):
        def get(self, record: NodeRecord, on_bytes: OnBytes | None = None) -> BytesPayload:
            clock.now_s += 0.002 + record.payload_bytes * 1e-5
            return super().get(record, on_bytes)

    line = measure_store(Throttled(), SAMPLES, NOW_MS, clock)
    assert line.fixed_ms == pytest.approx(2.0)
    assert line.ms_per_unit == pytest.approx(0.01)
    measure_store(disk, SAMPLES, NOW_MS, clock)
    assert list(disk.records()) == []


def test_a_store_that_gives_nothing_back_fails_its_measurement(
    tmp_path: Path,
) -> None:
    class Forgetful(HostStore[BytesPayload]):
        def get(self, record: NodeRecord, on_bytes: OnBytes | None = None) -> BytesPayload:
            raise PayloadLost("absent")

    store = Forgetful()
    with pytest.raises(PayloadLost):
        measure_store(store, SAMPLES, NOW_MS, Clock())
    assert list(store.records()) == []
    (tmp_path / "file").touch()
    with pytest.raises(TierUnavailable):
        measure_store(Disk(tmp_path / "file", Clock()), SAMPLES, NOW_MS, Clock())


# Several tiers


def test_what_a_slow_tier_has_alone_gets_into_the_faster_one_too(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(names=("disk", "shared"))
    rig.measure()
    some = chunk(1, 600)
    rig.store_below(some)
    rig.tiers[0].clear()
    prefetch = rig.fetch(some)
    assert prefetch.num_bytes == {1: 600 * BYTES_PER_TOKEN}
    until(lambda: all(rig.record(segment) is not None for segment in some))
    assert rig.disk.gets == []


def test_bytes_are_told_by_the_tiers_place_even_if_a_faster_one_is_not_used(
    make_rig: Callable[..., Rig], tmp_path: Path
) -> None:
    (tmp_path / "disk").touch()
    rig = make_rig(names=("disk", "shared"))
    rig.cache.measure(SAMPLES)
    rig.drain()
    assert [tier.is_ready for tier in rig.cache.stats().lower] == [False, True]
    some = chunk(1, 200)
    rig.store_below(some)
    prefetch = rig.fetch(some)
    assert prefetch.num_bytes == {1: 200 * BYTES_PER_TOKEN}
    assert rig.cache.lower[1].tier.name == "shared"
    until(lambda: rig.num_here(some) == (1,))
    rig.drain()
    assert rig.cache.stats().lower[0].tier.refusals["unavailable"] == 0  # nothing was offered


def test_a_chunk_that_two_tiers_share_out_comes_whole(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(names=("disk", "shared"))
    rig.measure()
    some = chunk(1, 1000)
    rig.store_below(some)
    rig.tiers[0].discard(rig.record(some[2]), "removed")  # type: ignore[arg-type]
    prefetch = rig.fetch(some)
    assert [prefetch.payloads[segment.key] for segment in some] == payloads(some)
    assert prefetch.num_bytes == {0: 512 * BYTES_PER_TOKEN, 1: 488 * BYTES_PER_TOKEN}
    until(lambda: rig.num_here(some) == (4,))


def test_annotations_reach_every_tier(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(names=("disk", "shared"))
    rig.measure()
    (segment,) = chunk(1, 200)
    rig.store((segment,), doc_ids=("one",))
    rig.cache.annotate(segment, NOW_MS, LifeCycle(doc_ids=("two",), pinned=True))
    rig.drain()
    views = [rig.arena.index.show(segment.key), *(t.index.show(segment.key) for t in rig.tiers)]
    assert [view is not None and view.record.doc_ids for view in views] == [("one", "two")] * 3
    assert all(view is not None and view.record.pinned for view in views)


# Removals


def test_a_change_reaches_every_tier_behind_the_writes_before_it(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(names=("disk", "shared"))
    rig.measure()
    (old,), (new,) = chunk(1, 200), chunk(2, 200)
    rig.cache.store(old, payload(old), NOW_MS, LifeCycle(owner="me", doc_ids=("doc",)))
    rig.cache.apply(lambda tier: tier.invalidate("doc", "me"))
    rig.cache.store(new, payload(new), NOW_MS, LifeCycle(owner="me", doc_ids=("doc",)))
    rig.drain()
    assert rig.num_here((old,), (new,)) == (0, 1)
    for tier in range(2):
        assert rig.record(old, tier) is None
        assert rig.record(new, tier) is not None
        assert len(list(rig.disks[tier].records())) == 1


def test_a_local_change_leaves_the_shared_tier_alone(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(names=("disk", "shared"))
    rig.measure()
    (old,), (new,) = chunk(1, 200), chunk(2, 200)
    rig.store((old,), model="old")
    rig.store((new,), model="new")
    rig.cache.apply_local(lambda tier: tier.clear(model="old"))
    rig.drain()
    assert rig.num_here((old,), (new,)) == (0, 1)
    assert (rig.record(old, 0), rig.record(new, 0) is None) == (None, False)
    assert rig.record(old, 1) is not None


def test_what_is_being_removed_is_not_looked_up_any_more(rig: Rig) -> None:
    some = chunk(1, 200)
    rig.store_below(some)
    gate = Event()
    rig.cache.lower[0].writes.submit(lambda: gate.wait(DEADLINE_S))  # much is to be written
    rig.cache.apply(lambda tier: tier.clear())
    assert rig.prefetch(some) is None
    assert not rig.cache.knows(paths_of([some]), NOW_MS)
    gate.set()
    rig.drain()
    assert rig.prefetch(some) is None
    assert rig.num_here(some) == (0,)
    rig.store_below(some)
    assert len(rig.fetch(some).payloads) == 1


def test_what_is_on_its_way_while_it_is_removed_does_not_come_back(rig: Rig) -> None:
    some = chunk(1, 200)
    rig.store_below(some)
    rig.disk.door.clear()
    prefetch = rig.prefetch(some)
    assert prefetch is not None
    until(lambda: rig.cache.lower[0].loads.num_arrived == 800)
    rig.cache.apply(lambda tier: tier.clear())
    has_loaded = Event()
    rig.cache.when_loaded(has_loaded.set)
    rig.disk.door.set()
    assert has_loaded.wait(DEADLINE_S)
    rig.drain()
    assert prefetch.check(rig.clock())
    assert list(prefetch.payloads.values()) == payloads(some)  # for the request that began before
    assert rig.num_here(some) == (0,)
    assert rig.record(some[0]) is None


# Bounds


def test_bytes_that_a_prefetch_keeps_alive_are_given_back_when_it_is_dropped(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(budget_tokens=300)
    rig.measure()
    a, b = chunk(1, 200), chunk(2, 200)
    rig.store_below(a)
    rig.store_below(b)
    first = rig.fetch(a)
    second = rig.prefetch(b)
    assert second is not None
    assert (second.num_declined, second.check(rig.clock())) == (1, True)
    assert rig.num_here(b) == (0,)
    del first
    assert len(rig.fetch(b).payloads) == 1


def test_no_more_is_loaded_for_a_prompt_than_the_arena_may_hold(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(budget_tokens=300)
    rig.measure()
    a, b = chunk(1, 200), chunk(2, 200)
    rig.store_below(a)
    rig.store_below(b)
    prefetch = rig.fetch(a, b)
    assert prefetch.num_declined == 1
    assert len(prefetch.payloads) == 1


def test_what_waits_to_be_written_is_bounded_and_told(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(limits=TransferLimits(write_bytes=1000))
    rig.measure()
    gate = Event()
    rig.cache.lower[0].writes.submit(lambda: gate.wait(DEADLINE_S))
    chunks = [chunk(seed, 200) for seed in range(3)]
    for (segment,) in chunks:
        rig.cache.store(segment, payload(segment), NOW_MS)
    stats = rig.cache.stats().lower[0]
    assert (stats.queued_bytes, stats.num_unwritten) == (800, 2)
    gate.set()
    rig.drain()
    assert rig.cache.stats().lower[0].queued_bytes == 0
    assert rig.cache.stats().lower[0].tier.num_entries == 1
    assert rig.num_here(*chunks) == (1, 1, 1)


# An index that must be asked


class Remote(MemoryIndex):
    """An index behind a network that can hang.

    Attributes:
        gate: While closed, every match hangs.
        num_asked: Matches begun.
        touched: Keys whose hits were told.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate = Event()
        self.gate.set()
        self.num_asked = 0
        self.touched: list[bytes] = []

    def touch(self, keys: Sequence[bytes], now_ms: int) -> None:
        self.touched += keys

    def flush(self) -> None:
        self.touched.clear()

    def match(self, paths: Any, now_ms: int) -> tuple[tuple[NodeRecord, ...], ...]:
        self.num_asked += 1
        assert self.gate.wait(DEADLINE_S)
        return super().match(paths, now_ms)


@pytest.fixture
def remote() -> Iterator[Remote]:
    remote = Remote()
    yield remote
    remote.gate.set()


@pytest.fixture
def far(make_rig: Callable[..., Rig], remote: Remote) -> Rig:
    """A shared tier whose index knows nothing yet of what others stored there."""
    writer = make_rig(names=("shared",), indexes=[remote])
    writer.measure()
    writer.store(chunk(1, 600))
    far = make_rig(names=("shared",), indexes=[NearIndex(remote, None)])
    far.measure()
    return far


def test_a_lookup_that_must_ask_happens_in_another_thread(far: Rig, remote: Remote) -> None:
    some = chunk(1, 600)
    remote.gate.clear()
    prefetch = far.prefetch(some)
    assert prefetch is not None
    until(lambda: remote.num_asked == 1)
    assert not prefetch.check(0.019)
    remote.gate.set()
    until(lambda: prefetch.check(0.019))
    assert [prefetch.payloads[segment.key] for segment in some] == payloads(some)


def test_a_lookup_that_hangs_is_waited_for_until_its_limit(far: Rig, remote: Remote) -> None:
    some = chunk(1, 600)
    remote.gate.clear()
    prefetch = far.prefetch(some)
    assert prefetch is not None
    until(lambda: remote.num_asked == 1)
    assert not prefetch.check(0.0199)
    assert prefetch.check(0.0201)
    assert prefetch.payloads == {}


def test_a_lookup_nobody_waits_for_any_more_loads_nothing(far: Rig, remote: Remote) -> None:
    first, second = chunk(1, 600), chunk(9, 600)
    remote.gate.clear()
    asking = far.prefetch(second)
    waiting = far.prefetch(first)  # behind the other
    assert asking is not None
    assert waiting is not None
    assert waiting.check(0.021)
    assert far.cache._lookups is not None
    has_looked = Event()
    far.cache._lookups.submit(has_looked.set)
    until(lambda: remote.num_asked == 1)
    remote.gate.set()
    assert has_looked.wait(DEADLINE_S)
    assert remote.num_asked == 1  # for the one that came first
    assert far.cache._prefetch_budget.num_bytes == 0


def test_only_the_tiers_that_must_be_asked_are_asked_in_another_thread(
    make_rig: Callable[..., Rig], remote: Remote
) -> None:
    writer = make_rig(names=("shared",), indexes=[remote])
    some = chunk(1, 600)
    writer.measure()
    writer.store(some)
    near = NearIndex(remote, None)
    rig = make_rig(names=("disk", "shared"), indexes=[MemoryIndex(), near])
    rig.measure()
    rig.store_below(some[:1])
    near.forget([segment.key for segment in some])
    prefetch = rig.fetch(some)
    assert [prefetch.payloads[segment.key] for segment in some] == payloads(some)
    assert prefetch.num_bytes == {0: 256 * BYTES_PER_TOKEN, 1: 344 * BYTES_PER_TOKEN}


def test_what_was_answered_once_is_known_without_asking_and_counted(
    far: Rig, remote: Remote
) -> None:
    some = chunk(1, 600)
    far.fetch(some)
    until(lambda: far.num_here(some) == (3,))
    far.arena.clear()
    remote.flush()
    num_asked = remote.num_asked
    before = far.tiers[0].stats().num_hits
    remote.gate.clear()
    assert len(far.fetch(some).payloads) == 3
    assert remote.num_asked == num_asked
    assert remote.touched == [segment.key for segment in some]
    assert far.tiers[0].stats().num_hits == before + 3


def test_a_listener_hears_of_a_lookup_that_found_nothing(far: Rig) -> None:
    has_looked = Event()
    far.cache.when_loaded(has_looked.set)
    prefetch = far.prefetch(chunk(5, 100))
    assert prefetch is not None
    assert has_looked.wait(DEADLINE_S)
    assert prefetch.check(0.0)
    assert prefetch.is_empty


def test_a_prefetch_whose_lookup_had_to_ask_is_let_go_with_its_request(
    far: Rig, remote: Remote
) -> None:
    some = chunk(1, 600)
    prefetch = far.fetch(some)
    budget = far.cache._prefetch_budget
    assert budget.num_bytes == 600 * BYTES_PER_TOKEN
    del prefetch
    until(lambda: budget.num_bytes == 0)


# Landing


class PausedArena(Arena[BytesPayload]):
    """Lets something happen before the first payload is kept, as another thread would."""

    meanwhile: Callable[[], object] | None = None

    def keep_verified(
        self, record: NodeRecord, payload: BytesPayload, now_ms: int
    ) -> Refusal | None:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return super().keep_verified(record, payload, now_ms)


def test_parents_land_before_their_children_whatever_thread_has_them(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(arena_type=PausedArena)
    rig.measure()
    some = chunk(1, 500)
    rig.store_below(some)
    children_come, has_come = Event(), Event()
    plain_get = rig.disk.get

    def get(record: NodeRecord, on_bytes: OnBytes | None = None) -> BytesPayload:
        if record.parent is not None:
            assert children_come.wait(DEADLINE_S)
        return plain_get(record, on_bytes)

    def let_the_child_come() -> None:
        children_come.set()
        until(lambda: rig.cache.lower[0].loads.num_arrived == 500 * BYTES_PER_TOKEN)
        has_come.wait(0.05)  # its thread either waits for us, or has tried to land it by then

    rig.disk.get = get  # type: ignore[method-assign]
    assert isinstance(rig.arena, PausedArena)
    rig.arena.meanwhile = let_the_child_come
    rig.fetch(some)
    until(lambda: rig.num_here(some) == (2,))
    assert rig.cache.stats().arena.refusals["orphan"] == 0


def test_another_writers_bytes_in_the_arena_win_over_late_ones(rig: Rig) -> None:
    (segment,) = chunk(1, 200)
    rig.store_below((segment,))
    rig.disk.gate.clear()
    prefetch = rig.prefetch((segment,))
    assert prefetch is not None
    assert prefetch.check(0.051)
    computed = random_payload(800, seed=7)
    assert rig.cache.store(segment, computed, NOW_MS)
    rig.disk.gate.set()
    until(lambda: rig.cache.lower[0].loads.num_arrived == 800)
    rig.drain()
    assert rig.loaded((segment,)) == [computed]
    record = rig.record(segment)
    assert record is not None
    assert rig.tiers[0].load(replace(record)) == payload(segment)
