"""Index and payloads agree, whatever is stored, held, evicted, damaged or refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from random import Random
from threading import Thread

import numpy as np
import pytest

from sglang_ext.chunk_index.cache import ChunkCache, Verify
from sglang_ext.chunk_index.chunking import ChunkSegment, segment_chunk
from sglang_ext.chunk_index.identity import ChunkKey, root_key
from sglang_ext.chunk_index.index import NodeRecord
from sglang_ext.chunk_index.memory_index import MemoryIndex
from sglang_ext.chunk_index.payloads import HostStore
from sglang_ext.chunk_index.spans import Span
from sglang_ext.errors import IndexUnavailable
from tests.strategies import BytesPayload

BYTES_PER_TOKEN = 4
Chunk = tuple[ChunkSegment, ...]
Cache = ChunkCache[BytesPayload]


class Rig:
    """A cache with its index and store in reach, small enough to fill."""

    def __init__(self, budget_tokens: int = 10_000, verify: Verify = "first") -> None:
        self.index = MemoryIndex()
        self.store: HostStore[BytesPayload] = HostStore(budget_tokens * BYTES_PER_TOKEN)
        self.cache: Cache = ChunkCache(self.index, self.store, verify)


def chunk(seed: int, num_tokens: int, namespace: str = "default", segment_len: int = 256) -> Chunk:
    """The segments of `num_tokens` random tokens."""
    tokens = np.random.default_rng(seed).integers(0, 50_000, num_tokens)
    root = root_key(b"model", namespace, b"secret")
    return segment_chunk(tokens, Span(0, num_tokens), root, segment_len)


def payload(segment: ChunkSegment) -> BytesPayload:
    size = segment.span.num_tokens * BYTES_PER_TOKEN
    return BytesPayload(bytearray(Random(segment.key).randbytes(size)))


def store(cache: Cache, segments: Sequence[ChunkSegment], now_ms: int = 0) -> int:
    """Store segments in order; returns how many are cached then."""
    return sum(cache.store(segment, payload(segment), now_ms) for segment in segments)


def num_hits(cache: Cache, *chunks: Chunk, now_ms: int = 0) -> tuple[int, ...]:
    with cache.acquire(chunks, now_ms) as lease:
        return lease.num_hits


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.cache.check_integrity()
    assert rig.cache.stats().num_held == 0


@pytest.mark.parametrize("num_tokens", [1, 15, 40, 255, 256, 257])
def test_a_chunk_of_any_length_is_reused_whole(rig: Rig, num_tokens: int) -> None:
    segments = chunk(1, num_tokens)
    assert num_hits(rig.cache, segments) == (0,)
    assert store(rig.cache, segments) == len(segments)
    with rig.cache.acquire([segments], now_ms=0) as lease:
        assert lease.payloads(0) == [payload(segment) for segment in segments]


def test_chunks_hit_in_any_order_and_between_new_ones(rig: Rig) -> None:
    a, b, c, new = (chunk(seed, 300) for seed in range(4))
    for segments in (a, b, c):
        store(rig.cache, segments)
    assert num_hits(rig.cache, b, new, c, a, b) == (2, 0, 2, 2, 2)


def test_another_namespace_hits_nothing(rig: Rig) -> None:
    store(rig.cache, chunk(1, 300))
    assert num_hits(rig.cache, chunk(1, 300, namespace="other")) == (0,)


def test_evicted_segments_leave_a_leading_part_of_their_chunk() -> None:
    rig = Rig(budget_tokens=64)
    first, second = chunk(1, 40, segment_len=10), chunk(2, 44, segment_len=20)
    assert store(rig.cache, first) == 4
    assert store(rig.cache, second) == 3
    assert num_hits(rig.cache, first, second) == (2, 3)
    assert rig.cache.stats().num_evictions == 2
    rig.cache.check_integrity()


def test_held_segments_survive_eviction_pressure() -> None:
    rig = Rig(budget_tokens=100)
    kept = chunk(0, 50, segment_len=25)
    store(rig.cache, kept)
    with rig.cache.acquire([kept], now_ms=0) as lease:
        for seed in range(1, 30):
            store(rig.cache, chunk(seed, 50, segment_len=25))
            rig.cache.check_integrity()
        assert lease.payloads(0) == [payload(segment) for segment in kept]
    assert rig.cache.stats().num_evictions > 0


def test_pinned_segments_survive_eviction_pressure() -> None:
    rig = Rig(budget_tokens=100)
    (pinned,) = chunk(0, 40)
    assert rig.cache.store(pinned, payload(pinned), now_ms=0, pinned=True)
    for seed in range(1, 10):
        store(rig.cache, chunk(seed, 60))
    assert num_hits(rig.cache, (pinned,)) == (1,)
    rig.cache.check_integrity()


def test_a_segment_never_evicts_its_own_ancestors() -> None:
    rig = Rig(budget_tokens=25)
    segments = chunk(1, 30, segment_len=10)
    assert store(rig.cache, segments) == 2
    assert num_hits(rig.cache, segments) == (2,)
    assert rig.cache.stats().refusals["no_room"] == 1


def test_a_segment_above_the_budget_is_refused_and_nothing_is_evicted() -> None:
    rig = Rig(budget_tokens=100)
    kept = chunk(1, 90)
    store(rig.cache, kept)
    assert store(rig.cache, chunk(2, 101)) == 0
    assert num_hits(rig.cache, kept) == (1,)
    assert rig.cache.stats().refusals == {"too_large": 1, "no_room": 0, "orphan": 0, "busy": 0}
    assert rig.cache.stats().num_evictions == 0


def test_nothing_is_evicted_for_a_segment_that_cannot_fit_anyway() -> None:
    rig = Rig(budget_tokens=100)
    held, idle = chunk(1, 60), chunk(2, 40)
    store(rig.cache, held)
    store(rig.cache, idle)
    with rig.cache.acquire([held], now_ms=0):
        assert store(rig.cache, chunk(3, 50)) == 0
    assert num_hits(rig.cache, held, idle) == (1, 1)
    assert rig.cache.stats().refusals["no_room"] == 1


def test_no_more_is_evicted_than_the_new_segment_needs() -> None:
    rig = Rig(budget_tokens=100)
    for seed in range(10):
        store(rig.cache, chunk(seed, 10))
    store(rig.cache, chunk(99, 15))
    assert rig.cache.stats().num_evictions == 2


def test_an_orphan_is_refused_and_evicts_nothing() -> None:
    rig = Rig(budget_tokens=100)
    store(rig.cache, chunk(2, 100))
    parent, child = chunk(1, 60, segment_len=30)
    assert store(rig.cache, [child]) == 0
    assert rig.cache.stats().refusals["orphan"] == 1
    assert rig.cache.stats().num_entries == 1
    assert store(rig.cache, [parent, child]) == 2
    rig.cache.check_integrity()


def test_storing_again_keeps_the_first_payload(rig: Rig) -> None:
    (segment,) = chunk(1, 40)
    first = payload(segment)
    assert rig.cache.store(segment, first, now_ms=0)
    assert rig.cache.store(segment, BytesPayload(bytearray(7)), now_ms=0)
    with rig.cache.acquire([(segment,)], now_ms=0) as lease:
        assert lease.payloads(0)[0] is first
    assert rig.cache.stats().num_stores == 1


@pytest.mark.parametrize("verify", ["always", "first"])
def test_a_flipped_bit_is_a_miss_and_the_entry_goes(verify: Verify) -> None:
    rig = Rig(verify=verify)
    segments, other = chunk(1, 40, segment_len=10), chunk(2, 20)
    store(rig.cache, segments)
    store(rig.cache, other)
    damaged = rig.store.get(segments[1].key)
    assert damaged is not None
    damaged.data[3] ^= 1
    with rig.cache.acquire([segments, other], now_ms=0) as lease:
        assert lease.num_hits == (4, 1)
        assert lease.payloads(0) == [payload(segments[0])]
        assert lease.num_hits == (1, 1)
        assert lease.payloads(1) == [payload(other[0])]
        assert rig.store.get(segments[1].key) is None
        assert store(rig.cache, segments) == 4
    assert rig.cache.stats().load_failures == 1
    assert num_hits(rig.cache, segments) == (4,)
    rig.cache.check_integrity()


def test_a_missing_payload_is_a_miss_and_the_entry_goes(rig: Rig) -> None:
    segments = chunk(1, 30, segment_len=10)
    store(rig.cache, segments)
    rig.store.drop(segments[0].key)
    with rig.cache.acquire([segments], now_ms=0) as lease:
        assert lease.payloads(0) == []
    assert rig.cache.stats().load_failures == 1
    assert rig.cache.stats().num_entries == 0


@pytest.mark.parametrize(("verify", "is_found"), [("always", True), ("first", False)])
def test_damage_after_the_first_load_is_found_only_by_verifying_always(
    verify: Verify, is_found: bool
) -> None:
    rig = Rig(verify=verify)
    (segment,) = chunk(1, 10)
    stored = payload(segment)
    rig.cache.store(segment, stored, now_ms=0)
    with rig.cache.acquire([(segment,)], now_ms=0) as lease:
        assert len(lease.payloads(0)) == 1
    stored.data[0] ^= 1
    with rig.cache.acquire([(segment,)], now_ms=0) as lease:
        assert (lease.payloads(0) == []) == is_found


def test_never_verifying_serves_what_is_there() -> None:
    rig = Rig(verify="never")
    (segment,) = chunk(1, 10)
    stored = payload(segment)
    rig.cache.store(segment, stored, now_ms=0)
    stored.data[0] ^= 1
    with rig.cache.acquire([(segment,)], now_ms=0) as lease:
        assert lease.payloads(0) == [stored]


def test_a_payload_stored_anew_is_verified_anew(rig: Rig) -> None:
    (segment,) = chunk(1, 10)
    store(rig.cache, [segment])
    with rig.cache.acquire([(segment,)], now_ms=0) as lease:
        lease.payloads(0)
    rig.cache.clear()
    stored = payload(segment)
    rig.cache.store(segment, stored, now_ms=0)
    stored.data[0] ^= 1
    with rig.cache.acquire([(segment,)], now_ms=0) as lease:
        assert lease.payloads(0) == []


def test_a_chunk_damaged_and_held_twice_goes_when_both_let_go(rig: Rig) -> None:
    segments = chunk(1, 20, segment_len=10)
    store(rig.cache, segments)
    damaged = rig.store.get(segments[0].key)
    assert damaged is not None
    damaged.data[0] ^= 1
    with rig.cache.acquire([segments, segments], now_ms=0) as lease:
        assert lease.payloads(0) == []
        assert not rig.cache.store(segments[0], payload(segments[0]), now_ms=0)
        assert lease.payloads(1) == []
        assert rig.cache.store(segments[0], payload(segments[0]), now_ms=0)
    assert rig.cache.stats().refusals["busy"] == 1


def test_a_thousand_leases_leave_nothing_held(rig: Rig) -> None:
    a, b, new = chunk(1, 300), chunk(2, 300), chunk(3, 300)
    store(rig.cache, a)
    store(rig.cache, b)
    for _ in range(1000):
        lease = rig.cache.acquire([a, new, b, a], now_ms=0)
        lease.release()
    assert rig.cache.stats().num_held == 0
    assert (rig.cache.stats().num_hits, rig.cache.stats().num_misses) == (6000, 2000)


def test_releasing_twice_does_not_take_anothers_hold(rig: Rig) -> None:
    segments = chunk(1, 10)
    store(rig.cache, segments)
    first = rig.cache.acquire([segments], now_ms=0)
    with rig.cache.acquire([segments], now_ms=0):
        first.release()
        first.release()
        assert first.num_hits == (0,)
        assert rig.cache.stats().num_held == 1


def test_a_lease_is_released_when_its_request_fails(rig: Rig) -> None:
    segments = chunk(1, 10)
    store(rig.cache, segments)
    with pytest.raises(KeyError), rig.cache.acquire([segments], now_ms=0):
        raise KeyError
    assert rig.cache.stats().num_held == 0


class FailingIndex(MemoryIndex):
    """Publishing fails, by an answer or by an error."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.error = error

    def publish(self, record: NodeRecord, now_ms: int) -> bool:
        if self.error is not None:
            raise self.error
        return False


def test_a_refused_publication_leaves_no_bytes() -> None:
    host: HostStore[BytesPayload] = HostStore(1000)
    cache = ChunkCache(FailingIndex(None), host)
    assert store(cache, chunk(1, 10)) == 0
    assert host.used_bytes == 0
    cache.check_integrity()


def test_an_index_lost_while_publishing_leaves_no_bytes() -> None:
    host: HostStore[BytesPayload] = HostStore(1000)
    cache = ChunkCache(FailingIndex(IndexUnavailable("down")), host)
    with pytest.raises(IndexUnavailable):
        store(cache, chunk(1, 10))
    assert host.used_bytes == 0
    cache.check_integrity()


class VanishingIndex(MemoryIndex):
    """One key is gone between match and hold, as in an index that others write to."""

    def __init__(self, vanished: ChunkKey) -> None:
        super().__init__()
        self.vanished = vanished

    def hold(self, keys: Sequence[ChunkKey]) -> tuple[NodeRecord, ...]:
        return super().hold([key for key in keys if key != self.vanished])


def test_a_segment_gone_between_match_and_hold_ends_the_hits_and_holds_nothing_behind() -> None:
    segments = chunk(1, 30, segment_len=10)
    index = VanishingIndex(ChunkKey(b""))
    cache: Cache = ChunkCache(index, HostStore(1000))
    store(cache, segments)
    index.vanished = segments[1].key
    with cache.acquire([segments], now_ms=0) as lease:
        assert lease.num_hits == (1,)
        assert cache.stats().num_held == 1
    assert cache.stats().num_held == 0


def test_an_expired_segment_is_a_miss_and_gives_its_bytes_back_on_the_next_store(rig: Rig) -> None:
    (timed,), other = chunk(1, 10), chunk(2, 20)
    assert rig.cache.store(timed, payload(timed), now_ms=100, ttl_ms=50)
    assert num_hits(rig.cache, (timed,), now_ms=149) == (1,)
    assert num_hits(rig.cache, (timed,), now_ms=150) == (0,)
    store(rig.cache, other, now_ms=150)
    assert rig.store.used_bytes == 20 * BYTES_PER_TOKEN
    assert rig.cache.store(timed, payload(timed), now_ms=150)


def test_invalidation_by_document_reaches_its_owners_chunks_only(rig: Rig) -> None:
    mine, yours = chunk(1, 300), chunk(1, 300, namespace="you")
    for segments, owner in ((mine, "me"), (yours, "you")):
        for segment in segments:
            rig.cache.store(segment, payload(segment), now_ms=0, doc_ids=["doc"], owner=owner)
    assert rig.cache.invalidate("doc", owner="me") == 2
    assert num_hits(rig.cache, mine, yours) == (0, 2)
    assert rig.cache.invalidate("other", owner="you") == 0


def test_a_chunk_invalidated_while_read_stays_readable_and_then_leaves(rig: Rig) -> None:
    segments = chunk(1, 10)
    store(rig.cache, segments)
    with rig.cache.acquire([segments], now_ms=0) as lease:
        assert rig.cache.clear() == 0
        assert num_hits(rig.cache, segments) == (0,)
        assert not rig.cache.store(segments[0], payload(segments[0]), now_ms=0)
        assert lease.payloads(0) == [payload(segments[0])]
        rig.cache.check_integrity()
    assert rig.store.used_bytes == 0


def test_a_working_set_five_times_the_budget_still_hits_and_leaks_nothing() -> None:
    """32 KiB of budget, 160 KiB of chunks, partly and wholly cached ones at random."""
    rng = Random(5)
    rig = Rig(budget_tokens=32 * 1024 // BYTES_PER_TOKEN)
    lens = [rng.randrange(100, 1600) for _ in range(56)]
    chunks = [chunk(seed, num_tokens) for seed, num_tokens in enumerate(lens)]
    assert sum(lens) * BYTES_PER_TOKEN >= 160 * 1024
    for now_ms in range(600):
        if now_ms == 400:
            before = rig.cache.stats()
        prompt = [rng.choice(chunks) for _ in range(3)]
        with rig.cache.acquire(prompt, now_ms) as lease:
            for i, segments in enumerate(prompt):
                loaded = lease.payloads(i)
                assert loaded == [payload(segment) for segment in segments[: len(loaded)]]
                store(rig.cache, segments[len(loaded) :], now_ms)
                assert rig.store.used_bytes <= rig.store.budget_bytes
        if now_ms % 20 == 0:
            rig.cache.check_integrity()
    after = rig.cache.stats()
    assert after.num_hits - before.num_hits > 0.1 * (after.num_misses - before.num_misses)
    assert after.num_evictions > 100
    assert after.load_failures == after.num_held == 0
    rig.cache.clear()
    rig.cache.check_integrity()
    assert rig.store.used_bytes == rig.cache.stats().num_entries == 0


@pytest.fixture
def _eager_threads() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("_eager_threads")
def test_threads_leave_index_and_payloads_in_agreement() -> None:
    rig = Rig(budget_tokens=2000)
    chunks = [chunk(seed, 300) for seed in range(12)]
    failures: list[BaseException] = []

    def serve(seed: int) -> None:
        rng = Random(seed)
        try:
            for now_ms in range(60):
                prompt = rng.sample(chunks, 3)
                with rig.cache.acquire(prompt, now_ms) as lease:
                    for i, segments in enumerate(prompt):
                        loaded = lease.payloads(i)
                        assert loaded == [payload(s) for s in segments[: len(loaded)]]
                        store(rig.cache, segments[len(loaded) :], now_ms)
        except BaseException as error:
            failures.append(error)

    threads = [Thread(target=serve, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    rig.cache.check_integrity()
    assert rig.cache.stats().num_held == 0
