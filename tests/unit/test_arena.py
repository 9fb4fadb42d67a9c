"""Segments in host memory: held while read, verified as told, in agreement under threads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random
from threading import Thread
from typing import Any

import pytest

from sglang_ext.chunk_index.arena import Arena, Lease, Verify
from sglang_ext.chunk_index.identity import ChunkKey
from sglang_ext.chunk_index.index import NodeRecord
from sglang_ext.chunk_index.memory_index import MemoryIndex
from sglang_ext.chunk_index.payloads import HostStore
from sglang_ext.chunk_index.tier import BATCH
from tests.blobs import random_payload, record_of
from tests.strategies import BytesPayload, key_name

Chunk = Sequence[NodeRecord]


class Rig:
    """An arena with its index and store in reach, small enough to fill."""

    def __init__(self, budget_bytes: int | None = None, verify: Verify = "first") -> None:
        self.index = MemoryIndex(budget_bytes)
        self.store: HostStore[BytesPayload] = HostStore()
        self.arena = Arena(self.index, self.store, verify)

    def keep(self, record: NodeRecord, now_ms: int = 0) -> str | None:
        return self.arena.keep(record, payload_of(record), now_ms)

    def keep_all(self, chunk: Chunk, now_ms: int = 0) -> int:
        """Keep segments in order; returns how many are there then."""
        return sum(self.keep(record, now_ms) is None for record in chunk)

    def acquire(self, *chunks: Chunk, now_ms: int = 0) -> Lease[BytesPayload]:
        return self.arena.acquire([[record.key for record in chunk] for chunk in chunks], now_ms)

    def num_hits(self, *chunks: Chunk, now_ms: int = 0) -> tuple[int, ...]:
        with self.acquire(*chunks, now_ms=now_ms) as lease:
            return lease.num_hits

    def kept(self, record: NodeRecord) -> BytesPayload:
        """The payload object itself, to be damaged."""
        return self.store.get(record)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    assert_sound(rig)


def assert_sound(rig: Rig) -> None:
    """Index and store agree, and nothing is held or reserved."""
    rig.arena.check_integrity()
    assert len(list(rig.store.records())) == rig.arena.stats().num_entries
    assert rig.index.num_held == rig.index.stats().reserved_bytes == 0


def chunk(name: str, *sizes: int, **fields: Any) -> list[NodeRecord]:
    """The records of a chunk whose segments have so many bytes; 3 of 10 without any."""
    records: list[NodeRecord] = []
    for position, size in enumerate(sizes or (10, 10, 10)):
        parent = key_name(records[-1].key) if records else None
        own = f"{name}{position or ''}"
        payload = random_payload(size, seed=len(own) + size)
        records.append(record_of(payload, own, parent=parent, **fields))
    return records


def payload_of(record: NodeRecord) -> BytesPayload:
    return random_payload(record.payload_bytes, len(key_name(record.key)) + record.payload_bytes)


def payloads_of(records: Chunk) -> list[BytesPayload]:
    return [payload_of(record) for record in records]


# Hits


def test_chunks_hit_in_any_order_and_between_new_ones(rig: Rig) -> None:
    a, b, c, new = (chunk(name, 10, 10) for name in "abcn")
    for some in (a, b, c):
        rig.keep_all(some)
    assert rig.num_hits(b, new, c, a, b) == (2, 0, 2, 2, 2)
    assert (rig.arena.stats().num_hits, rig.arena.stats().num_misses) == (8, 2)


def test_a_lease_gives_every_chunks_payloads_in_order(rig: Rig) -> None:
    a, b = chunk("a"), chunk("b", 7, 8)
    rig.keep_all(a)
    rig.keep_all(b)
    with rig.acquire(b, a) as lease:
        assert lease.payloads(0) == payloads_of(b)
        assert lease.payloads(1) == payloads_of(a)


def test_evicted_segments_leave_a_leading_part_of_their_chunk() -> None:
    rig = Rig(budget_bytes=64)
    first, second = chunk("a", 10, 10, 10, 10), chunk("b", 20, 20, 4)
    assert rig.keep_all(first) == 4
    assert rig.keep_all(second) == 3
    assert rig.num_hits(first, second) == (2, 3)
    assert rig.arena.stats().num_evictions == 2
    assert_sound(rig)


def test_storing_again_keeps_the_first_payload(rig: Rig) -> None:
    (record,) = chunk("a", 40)
    first, other = payload_of(record), random_payload(40, seed=99)
    assert rig.arena.keep(record, first, now_ms=0) is None
    assert rig.arena.keep(record_of(other), other, now_ms=0) is None
    with rig.acquire([record]) as lease:
        assert lease.payloads(0)[0] is first
    assert rig.arena.stats().num_stores == 1


# What is held or pinned stays


def test_held_segments_survive_eviction_pressure() -> None:
    rig = Rig(budget_bytes=100)
    kept = chunk("a", 25, 25)
    rig.keep_all(kept)
    with rig.acquire(kept) as lease:
        for name in "bcdefghijklmnop":
            rig.keep_all(chunk(name, 25, 25))
            rig.arena.check_integrity()
        assert lease.payloads(0) == payloads_of(kept)
    assert rig.arena.stats().num_evictions > 0
    assert_sound(rig)


def test_pinned_segments_survive_eviction_pressure() -> None:
    rig = Rig(budget_bytes=100)
    pinned = chunk("a", 40, pinned=True)
    rig.keep_all(pinned)
    for name in "bcdefghij":
        rig.keep_all(chunk(name, 60))
    assert rig.num_hits(pinned) == (1,)
    assert_sound(rig)


def test_a_segment_never_evicts_its_own_ancestors() -> None:
    rig = Rig(budget_bytes=25)
    records = chunk("a")
    assert rig.keep_all(records) == 2
    assert rig.num_hits(records) == (2,)
    assert rig.arena.stats().refusals["no_room"] == 1
    assert_sound(rig)


def test_nothing_is_evicted_for_a_segment_that_cannot_fit_beside_what_is_held() -> None:
    rig = Rig(budget_bytes=100)
    held, idle = chunk("a", 60), chunk("b", 40)
    rig.keep_all(held)
    rig.keep_all(idle)
    with rig.acquire(held):
        assert rig.keep_all(chunk("c", 50)) == 0
    assert rig.num_hits(held, idle) == (1, 1)
    assert rig.arena.stats().refusals["no_room"] == 1


def test_an_orphan_is_refused_until_its_parent_is_there(rig: Rig) -> None:
    parent, child = chunk("a", 30, 30)
    assert rig.keep(child) == "orphan"
    assert rig.arena.stats().refusals["orphan"] == 1
    assert rig.arena.stats().num_entries == 0
    assert rig.keep_all([parent, child]) == 2


# Leases


def test_a_thousand_leases_leave_nothing_held(rig: Rig) -> None:
    a, b, new = (chunk(name, 10, 10) for name in "abn")
    rig.keep_all(a)
    rig.keep_all(b)
    for _ in range(1000):
        rig.acquire(a, new, b, a).release()
    assert rig.index.num_held == 0
    assert (rig.arena.stats().num_hits, rig.arena.stats().num_misses) == (6000, 2000)


def test_releasing_twice_does_not_take_anothers_hold(rig: Rig) -> None:
    records = chunk("a", 10)
    rig.keep_all(records)
    first = rig.acquire(records)
    with rig.acquire(records):
        first.release()
        first.release()
        assert first.num_hits == (0,)
        assert rig.index.num_held == 1


def test_a_lease_is_released_when_its_request_fails(rig: Rig) -> None:
    records = chunk("a", 10)
    rig.keep_all(records)
    with pytest.raises(KeyError), rig.acquire(records):
        raise KeyError
    assert rig.index.num_held == 0


class VanishingIndex(MemoryIndex):
    """One key is gone between match and hold, as when another thread evicts."""

    vanished: ChunkKey | None = None

    def hold(self, keys: Sequence[ChunkKey]) -> tuple[NodeRecord, ...]:
        return super().hold([key for key in keys if key != self.vanished])


def test_a_segment_gone_between_match_and_hold_ends_the_hits_and_holds_nothing_behind() -> None:
    index = VanishingIndex()
    arena: Arena[BytesPayload] = Arena(index, HostStore())
    records = chunk("a")
    for record in records:
        assert arena.keep(record, payload_of(record), now_ms=0) is None
    index.vanished = records[1].key
    with arena.acquire([[record.key for record in records]], now_ms=0) as lease:
        assert lease.num_hits == (1,)
        assert index.num_held == 1
    assert index.num_held == 0


def test_a_chunk_removed_while_read_stays_readable_and_then_leaves(rig: Rig) -> None:
    (record,) = chunk("a", 10)
    rig.keep(record)
    with rig.acquire([record]) as lease:
        assert rig.arena.clear() == 0
        assert rig.num_hits([record]) == (0,)
        assert rig.keep(record) == "busy"
        assert lease.payloads(0) == [payload_of(record)]
        rig.arena.check_integrity()
    assert list(rig.store.records()) == []
    assert rig.keep(record) is None


def test_a_child_refused_below_a_removed_parent_does_not_take_the_parents_readers_hold(
    rig: Rig,
) -> None:
    parent, child = chunk("a", 10, 10)
    rig.keep(parent)
    with rig.acquire([parent]) as lease:
        rig.arena.clear()
        assert rig.keep(child) == "orphan"
        assert rig.index.num_held == 1
        assert lease.payloads(0) == [payload_of(parent)]


def test_a_payload_that_expires_while_read_is_not_replaced_under_its_reader(rig: Rig) -> None:
    """Not even if so much expired at once that it was not collected yet."""
    (record,) = chunk("a", 10, expires_ms=5)
    rig.keep(record)
    for number in range(BATCH):
        rig.keep(record_of(random_payload(1), f"x{number}", expires_ms=4))
    other = random_payload(10, seed=99)
    with rig.acquire([record]) as lease:
        assert rig.arena.keep(record_of(other), other, now_ms=5) == "busy"
        assert lease.payloads(0) == [payload_of(record)]
    assert rig.arena.stats().load_failures == {}


# Damage


@pytest.mark.parametrize("verify", ["always", "first"])
def test_a_flipped_bit_is_a_miss_and_the_entry_goes_with_all_below_it(verify: Verify) -> None:
    rig = Rig(verify=verify)
    records, other = chunk("a", 10, 10, 10, 10), chunk("b", 20)
    rig.keep_all(records)
    rig.keep_all(other)
    rig.kept(records[1]).data[3] ^= 1
    with rig.acquire(records, other) as lease:
        assert lease.num_hits == (4, 1)
        assert lease.payloads(0) == payloads_of(records[:1])
        assert lease.num_hits == (1, 1)
        assert lease.payloads(1) == payloads_of(other)
        assert rig.keep_all(records) == 4
    assert rig.arena.stats().load_failures == {"damaged": 1}
    assert rig.num_hits(records) == (4,)
    assert_sound(rig)


def test_a_missing_payload_is_a_miss_and_the_entry_goes(rig: Rig) -> None:
    records = chunk("a")
    rig.keep_all(records)
    rig.store.drop(records[0])
    with rig.acquire(records) as lease:
        assert lease.payloads(0) == []
    assert rig.arena.stats().load_failures == {"absent": 1}
    assert rig.arena.stats().num_entries == 0


@pytest.mark.parametrize(("verify", "is_found"), [("always", True), ("first", False)])
def test_damage_after_the_first_load_is_found_only_by_verifying_always(
    verify: Verify, is_found: bool
) -> None:
    rig = Rig(verify=verify)
    records = chunk("a", 10)
    rig.keep_all(records)
    with rig.acquire(records) as lease:
        assert len(lease.payloads(0)) == 1
    rig.kept(records[0]).data[0] ^= 1
    with rig.acquire(records) as lease:
        assert (lease.payloads(0) == []) == is_found


def test_never_verifying_serves_what_is_there() -> None:
    rig = Rig(verify="never")
    records = chunk("a", 10)
    rig.keep_all(records)
    damaged = rig.kept(records[0])
    damaged.data[0] ^= 1
    with rig.acquire(records) as lease:
        assert lease.payloads(0) == [damaged]


def test_a_payload_stored_anew_is_verified_anew(rig: Rig) -> None:
    records = chunk("a", 10)
    rig.keep_all(records)
    with rig.acquire(records) as lease:
        lease.payloads(0)
    rig.arena.clear()
    rig.keep_all(records)
    rig.kept(records[0]).data[0] ^= 1
    with rig.acquire(records) as lease:
        assert lease.payloads(0) == []


@pytest.mark.parametrize(("verify", "is_found"), [("always", True), ("first", False)])
def test_what_was_verified_on_its_way_is_not_verified_again_at_its_first_load(
    verify: Verify, is_found: bool
) -> None:
    rig = Rig(verify=verify)
    (record,) = chunk("a", 10)
    payload = payload_of(record)
    assert rig.arena.keep_verified(record, payload, now_ms=0) is None
    payload.data[0] ^= 1
    with rig.acquire([record]) as lease:
        assert (lease.payloads(0) == []) == is_found


def test_a_verified_copy_does_not_vouch_for_the_payload_that_is_there_already(rig: Rig) -> None:
    (record,) = chunk("a", 10)
    rig.keep(record)
    rig.kept(record).data[0] ^= 1
    assert rig.arena.keep_verified(record, payload_of(record), now_ms=0) is None
    with rig.acquire([record]) as lease:
        assert lease.payloads(0) == []


def test_a_verified_payload_that_is_refused_leaves_no_trace(rig: Rig) -> None:
    _, child = chunk("a", 10, 10)
    assert rig.arena.keep_verified(child, payload_of(child), now_ms=0) == "orphan"


def test_a_chunk_damaged_and_held_twice_goes_when_both_let_go(rig: Rig) -> None:
    records = chunk("a", 10, 10)
    rig.keep_all(records)
    rig.kept(records[0]).data[0] ^= 1
    with rig.acquire(records, records) as lease:
        assert lease.payloads(0) == []
        assert rig.keep(records[0]) == "busy"
        assert lease.payloads(1) == []
        assert rig.keep(records[0]) is None
    assert rig.arena.stats().refusals["busy"] == 1


# Time


def test_an_expired_segment_is_a_miss_and_gives_its_bytes_back_on_the_next_store(rig: Rig) -> None:
    timed, other = chunk("a", 10, expires_ms=150), chunk("b", 20)
    rig.keep_all(timed)
    assert rig.num_hits(timed, now_ms=149) == (1,)
    assert rig.num_hits(timed, now_ms=150) == (0,)
    rig.keep_all(other, now_ms=150)
    assert rig.arena.stats().used_bytes == 20
    assert rig.keep_all(chunk("a", 10), now_ms=150) == 1


# Threads


class Interrupted(MemoryIndex):
    """Lets something happen once, just after bytes were reserved, as in another thread."""

    meanwhile: Callable[[], object] | None = None

    def reserve(self, owner: str, num_bytes: int, now_ms: int) -> Any:
        answer = super().reserve(owner, num_bytes, now_ms)
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return answer


def test_two_threads_with_other_bytes_for_one_key_leave_the_first_payload_readable() -> None:
    index = Interrupted()
    store: HostStore[BytesPayload] = HostStore()
    arena = Arena(index, store)
    payloads = [random_payload(10, seed) for seed in range(2)]
    records = [record_of(payload) for payload in payloads]
    other = Thread(target=lambda: arena.keep(records[1], payloads[1], now_ms=0))

    def interrupt() -> None:
        other.start()
        other.join(0.05)  # it either waits for us, or is done by then

    index.meanwhile = interrupt
    assert arena.keep(records[0], payloads[0], now_ms=0) is None
    other.join()
    arena.check_integrity()
    (view,) = index.scan()
    assert arena.load(view.record) == payloads[records.index(view.record)]
    assert index.stats().reserved_bytes == 0


class SlowDrop(HostStore[BytesPayload]):
    """Lets something happen once, just before a payload is dropped, as in another thread."""

    meanwhile: Callable[[], object] | None = None

    def drop(self, record: NodeRecord) -> None:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        super().drop(record)


def test_a_payload_stored_again_while_it_is_removed_is_not_dropped() -> None:
    index, store = MemoryIndex(), SlowDrop()
    arena = Arena(index, store)
    (record,) = chunk("a", 10)
    assert arena.keep(record, payload_of(record), now_ms=0) is None
    other = Thread(target=lambda: arena.keep(record, payload_of(record), now_ms=0))

    def interrupt() -> None:
        other.start()
        other.join(0.05)

    store.meanwhile = interrupt
    arena.discard(record, "removed")
    other.join()
    arena.check_integrity()
    assert arena.load(record) == payload_of(record)


@pytest.fixture
def _eager_threads() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("_eager_threads")
def test_threads_leave_index_and_payloads_in_agreement() -> None:
    rig = Rig(budget_bytes=2000)
    chunks = [chunk(name, 250, 50) for name in "abcdefghijkl"]
    failures: list[BaseException] = []

    def serve(seed: int) -> None:
        rng = Random(seed)
        try:
            for now_ms in range(60):
                prompt = rng.sample(chunks, 3)
                with rig.acquire(*prompt, now_ms=now_ms) as lease:
                    for i, records in enumerate(prompt):
                        loaded = lease.payloads(i)
                        assert loaded == payloads_of(records[: len(loaded)])
                        rig.keep_all(records[len(loaded) :], now_ms)
                if rng.random() < 0.1:
                    rig.arena.discard(rng.choice(chunks)[0], "removed")
        except BaseException as error:
            failures.append(error)

    threads = [Thread(target=serve, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert_sound(rig)
    assert rig.arena.stats().load_failures.keys() == {"removed"}


def test_a_working_set_five_times_the_budget_still_hits_and_leaks_nothing() -> None:
    """32 KiB of budget, 160 KiB of chunks, partly and wholly cached ones at random."""
    rng = Random(5)
    rig = Rig(budget_bytes=32 * 1024)
    chunks: list[list[NodeRecord]] = []
    for number in range(56):
        size = rng.randrange(400, 6400)
        sizes = [1024] * (size // 1024) + ([size % 1024] if size % 1024 else [])
        chunks.append(chunk(chr(0x4E00 + number), *sizes))
    assert sum(record.payload_bytes for records in chunks for record in records) >= 160 * 1024
    for now_ms in range(600):
        if now_ms == 400:
            before = rig.arena.stats()
        prompt = [rng.choice(chunks) for _ in range(3)]
        with rig.acquire(*prompt, now_ms=now_ms) as lease:
            for i, records in enumerate(prompt):
                loaded = lease.payloads(i)
                assert loaded == payloads_of(records[: len(loaded)])
                rig.keep_all(records[len(loaded) :], now_ms)
                assert rig.arena.stats().used_bytes <= 32 * 1024
        if now_ms % 20 == 0:
            rig.arena.check_integrity()
    after = rig.arena.stats()
    assert after.num_hits - before.num_hits > 0.1 * (after.num_misses - before.num_misses)
    assert after.num_evictions > 100
    assert after.load_failures == {}
    assert rig.index.num_held == 0
    rig.arena.clear()
    assert_sound(rig)
    assert rig.arena.stats().num_entries == 0


def test_disagreement_between_index_and_store_is_found(rig: Rig) -> None:
    (record,) = chunk("a", 10)
    rig.keep(record)
    rig.store.drop(record)
    with pytest.raises(AssertionError):
        rig.arena.check_integrity()
    rig.store.put(replace(record, checksum=1), payload_of(record))
    with pytest.raises(AssertionError):
        rig.arena.check_integrity()
    rig.store.put(record, payload_of(record))
