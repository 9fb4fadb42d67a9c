"""What every `ChunkIndex` adapter promises, whatever is behind it.

A name's first letter is the key's spread byte: names of one chunk share it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from itertools import takewhile
from random import Random
from threading import Barrier
from typing import Literal

import pytest

from sglang_ext.chunk_index.identity import model_id, owner_id
from sglang_ext.chunk_index.index import (
    MAX_DOC_IDS,
    ChunkIndex,
    IndexStats,
    NodeRecord,
    NodeView,
    Publication,
    Reservation,
    Shortage,
    Usage,
)
from sglang_ext.chunk_index.memory_index import MemoryIndex
from sglang_ext.chunk_index.redis_index import RedisIndex
from tests.redis_server import shared_cluster, shared_link, shared_server
from tests.strategies import key_name, named_key, node_record, record_names

Adapter = Callable[[int | None], AbstractContextManager[ChunkIndex]]
"""An empty index with a budget in bytes, for the time of one test."""

MakeIndex = Callable[..., ChunkIndex]


@contextmanager
def memory(budget_bytes: int | None) -> Iterator[ChunkIndex]:
    yield MemoryIndex(budget_bytes)


def redis(kind: Literal["tcp", "unix", "tls"]) -> Adapter:
    """An index on a server of its own; `tls` with a user of few rights."""

    @contextmanager
    def adapter(budget_bytes: int | None) -> Iterator[ChunkIndex]:
        server = shared_server(kind)
        server.cli("FLUSHALL")
        yield RedisIndex(shared_link(server.url), budget_bytes)

    return adapter


@contextmanager
def redis_on_cluster(budget_bytes: int | None) -> Iterator[ChunkIndex]:
    cluster = shared_cluster()
    for server in cluster.masters:
        server.cli("FLUSHALL")
    yield RedisIndex(shared_link(cluster.url), budget_bytes)


ADAPTERS = [
    pytest.param(memory, id="memory"),
    pytest.param(redis("tcp"), id="redis", marks=pytest.mark.redis),
    pytest.param(redis("unix"), id="redis-unix", marks=pytest.mark.redis),
    pytest.param(redis("tls"), id="redis-tls", marks=pytest.mark.redis),
    pytest.param(redis_on_cluster, id="redis-cluster", marks=pytest.mark.redis),
]

ME, YOU = owner_id("me", b"secret"), owner_id("you", b"secret")
CHAIN = (node_record("a"), node_record("a1", "a"), node_record("a2", "a1"))


@pytest.fixture(params=ADAPTERS)
def make_index(request: pytest.FixtureRequest) -> Iterator[MakeIndex]:
    """Makes at most one index a test, which is checked at its end."""
    adapter: Adapter = request.param
    with ExitStack() as stack:

        def make(budget_bytes: int | None = None) -> ChunkIndex:
            index = stack.enter_context(adapter(budget_bytes))
            stack.callback(index.check_integrity)
            stack.callback(settle, index)
            return index

        yield make


@pytest.fixture
def index(make_index: MakeIndex) -> ChunkIndex:
    return make_index()


@pytest.fixture
def _threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def settle(index: ChunkIndex) -> None:
    """Let statistics be written that an adapter may write later."""
    flush = getattr(index, "flush", None)
    if flush is not None:
        flush()


def publish(index: ChunkIndex, *records: NodeRecord) -> None:
    for record in records:
        assert index.publish(record, now_ms=0) is Publication.STORED


def match(index: ChunkIndex, *names: str, now_ms: int = 0) -> int:
    """How many leading nodes of a path are found."""
    (found,) = index.match([[named_key(name) for name in names]], now_ms)
    assert record_names(found) == list(names[: len(found)])
    settle(index)
    return len(found)


def reserve(index: ChunkIndex, num_bytes: int, owner: str = "") -> Reservation:
    reservation = index.reserve(owner, num_bytes, now_ms=0)
    assert isinstance(reservation, Reservation)
    assert (reservation.owner, reservation.num_bytes) == (owner, num_bytes)
    return reservation


def plan(index: ChunkIndex, num_bytes: int, owner: str = "", *, is_own: bool = False) -> list[str]:
    return record_names(index.victims(num_bytes, owner, is_own=is_own))


def drain(index: ChunkIndex, call: Callable[[], Sequence[NodeRecord]]) -> list[str]:
    """Names of what leaves in all calls, children before parents, until nothing does."""
    left: list[NodeRecord] = []
    for _ in range(1000):
        records = call()
        left.extend(records)
        index.check_integrity()
        if not records:
            keys = [record.key for record in left]
            assert all(r.parent not in keys[:at] for at, r in enumerate(left))
            return record_names(left)
    raise AssertionError("it never ended")


def view(index: ChunkIndex, name: str) -> NodeView:
    shown = index.show(named_key(name))
    assert shown is not None
    return shown


class TestMatch:
    def test_each_path_has_its_leading_nodes_in_order(self, index: ChunkIndex) -> None:
        records = (*CHAIN, node_record("b", checksum=2**64 - 1, num_tokens=3, payload_bytes=0))
        publish(index, *records)
        paths = [["a", "a1", "a2"], [], ["x", "a1"], ["b", "b1"], ["a1"], ["a", "a9", "a2"]]
        found = index.match([[named_key(name) for name in path] for path in paths], now_ms=0)
        assert found == (CHAIN, (), (), records[3:], (), CHAIN[:1])

    def test_no_paths_are_no_matches(self, index: ChunkIndex) -> None:
        assert index.match([], now_ms=0) == ()

    def test_a_record_comes_back_as_it_was_published(self, index: ChunkIndex) -> None:
        record = node_record(
            "a",
            num_tokens=256,
            payload_bytes=2**35,
            checksum=2**63 + 1,
            created_ms=1_700_000_000_000,
            doc_ids=("handbook@7", "Grundsätze", "x" * 300),
            expires_ms=1_800_000_000_000,
            owner=ME,
            pinned=True,
            model=model_id(b"model"),
            compute_us=12_345,
        )
        publish(index, record)
        assert index.match([[record.key]], now_ms=0) == ((record,),)
        assert view(index, "a").record == record

    def test_a_match_is_remembered(self, index: ChunkIndex) -> None:
        publish(index, *CHAIN)
        match(index, "a", "a1", now_ms=7)
        match(index, "a", now_ms=9)
        views = [view(index, name) for name in ("a", "a1", "a2")]
        seen = [(each.num_hits, each.last_hit_ms) for each in views]
        assert seen == [(2, 9), (1, 7), (0, None)]

    def test_an_absent_node_is_not_shown(self, index: ChunkIndex) -> None:
        assert index.show(named_key("a")) is None


class TestPublish:
    def test_an_orphan_is_never_published(self, index: ChunkIndex) -> None:
        assert index.publish(node_record("a1", "a"), now_ms=0) is Publication.ORPHAN
        assert index.show(named_key("a1")) is None
        assert index.stats().num_bytes == 0

    def test_a_present_key_keeps_its_record(self, index: ChunkIndex) -> None:
        publish(index, node_record("a", checksum=1))
        again = node_record("a", checksum=2, payload_bytes=7)
        assert index.publish(again, now_ms=0) is Publication.PRESENT
        assert view(index, "a").record.checksum == 1
        assert (index.stats().num_nodes, index.stats().num_bytes) == (1, 100)

    def test_an_expired_key_is_busy_until_it_is_collected(self, index: ChunkIndex) -> None:
        publish(index, node_record("a", expires_ms=10))
        assert index.publish(node_record("a"), now_ms=9) is Publication.PRESENT
        assert index.publish(node_record("a"), now_ms=10) is Publication.BUSY
        assert record_names(index.expire(now_ms=10, limit=9)) == ["a"]
        assert index.publish(node_record("a"), now_ms=10) is Publication.STORED

    def test_an_expired_parent_takes_no_child(self, index: ChunkIndex) -> None:
        publish(index, node_record("a", expires_ms=10))
        assert index.publish(node_record("a1", "a"), now_ms=10) is Publication.ORPHAN

    def test_a_parent_may_have_many_children(self, index: ChunkIndex) -> None:
        names = [f"a{i}" for i in range(1, 200)]
        publish(index, node_record("a"), *(node_record(name, "a") for name in names))
        assert all(match(index, "a", name) == 2 for name in names[::50])
        left = record_names(index.remove(named_key("a")))
        assert sorted(left[:-1]) == sorted(names)
        assert left[-1] == "a"


class TestReservations:
    def test_reserved_bytes_count_until_they_are_cancelled(self, make_index: MakeIndex) -> None:
        index = make_index(budget_bytes=250)
        first = reserve(index, 200)
        assert index.stats() == IndexStats(0, 0, reserved_bytes=200, budget_bytes=250)
        assert index.reserve("", 100, now_ms=0) == Shortage(50, is_own=False)
        index.cancel(first)
        reserve(index, 250)

    def test_publishing_uses_a_reservation_up(self, make_index: MakeIndex) -> None:
        index = make_index(budget_bytes=250)
        reservation = reserve(index, 100, ME)
        record = node_record("a", owner=ME)
        assert index.publish(record, 0, reservation) is Publication.STORED
        assert index.stats() == IndexStats(1, 100, reserved_bytes=0, budget_bytes=250)
        index.cancel(reservation)
        assert index.reserve(ME, 151, now_ms=0) == Shortage(1, is_own=False)

    def test_what_is_not_stored_gives_its_reservation_back(self, make_index: MakeIndex) -> None:
        index = make_index(budget_bytes=300)
        publish(index, node_record("a"), node_record("b", expires_ms=10))
        for record, expected in (
            (node_record("a"), Publication.PRESENT),
            (node_record("b"), Publication.BUSY),
            (node_record("c1", "c"), Publication.ORPHAN),
        ):
            assert index.publish(record, 10, reserve(index, 100)) is expected
            assert index.stats().reserved_bytes == 0
        reserve(index, 100)

    def test_cancelling_twice_gives_back_once(self, make_index: MakeIndex) -> None:
        index = make_index(budget_bytes=200)
        first = reserve(index, 100)
        reserve(index, 100)
        index.cancel(first)
        index.cancel(first)
        assert index.stats().reserved_bytes == 100

    def test_publishing_without_a_reservation_may_exceed_the_budget(
        self, make_index: MakeIndex
    ) -> None:
        index = make_index(budget_bytes=250)
        publish(index, *CHAIN)
        assert index.reserve("", 100, now_ms=0) == Shortage(150, is_own=False)

    def test_what_left_makes_room(self, make_index: MakeIndex) -> None:
        index = make_index(budget_bytes=300)
        publish(index, *CHAIN)
        index.remove(named_key("a2"))
        index.evict(index.victims(100, "", is_own=False))
        reserve(index, 200)

    def test_a_quota_is_asked_before_the_budget(self, make_index: MakeIndex) -> None:
        index = make_index(budget_bytes=100)
        index.set_quota(ME, 150)
        assert index.reserve(ME, 170, now_ms=0) == Shortage(20, is_own=True)
        assert index.reserve(ME, 150, now_ms=0) == Shortage(50, is_own=False)
        assert index.stats().reserved_bytes == 0

    def test_a_refused_reservation_leaves_both_accounts_alone(self, make_index: MakeIndex) -> None:
        index = make_index(budget_bytes=100)
        index.set_quota(ME, 150)
        index.reserve(ME, 150, now_ms=0)
        index.reserve(ME, 170, now_ms=0)
        reserve(index, 100, ME)

    def test_an_owner_never_reserves_beyond_its_quota(self, index: ChunkIndex) -> None:
        index.set_quota(ME, 250)
        publish(index, node_record("a", owner=ME))
        reserve(index, 100, ME)
        assert index.reserve(ME, 100, now_ms=0) == Shortage(50, is_own=True)
        reserve(index, 10_000, YOU)

    def test_a_quota_taken_away_binds_no_more(self, index: ChunkIndex) -> None:
        index.set_quota(ME, 50)
        index.set_quota(ME, None)
        reserve(index, 100, ME)

    def test_a_quota_below_use_evicts_nothing_but_stops_reservations(
        self, index: ChunkIndex
    ) -> None:
        publish(index, *(node_record(name, owner=ME) for name in "abc"))
        index.set_quota(ME, 100)
        assert index.usage() == {ME: Usage(3, 300, 100)}
        assert index.reserve(ME, 10, now_ms=0) == Shortage(210, is_own=True)

    @pytest.mark.usefixtures("_threads_take_turns_often")
    @pytest.mark.parametrize("bound", ["quota", "budget"])
    def test_writers_at_once_never_exceed_a_bound(self, make_index: MakeIndex, bound: str) -> None:
        index = make_index(budget_bytes=3000 if bound == "budget" else None)
        if bound == "quota":
            index.set_quota(ME, 3000)
        barrier = Barrier(8)

        def write(letter: str) -> int:
            barrier.wait()
            num_stored = 0
            for i in range(10):
                granted = index.reserve(ME, 100, now_ms=0)
                if isinstance(granted, Reservation):
                    record = node_record(f"{letter}{i}", owner=ME)
                    assert index.publish(record, 0, granted) is Publication.STORED
                    num_stored += 1
                assert index.stats().num_bytes <= 3000
            return num_stored

        with ThreadPoolExecutor(8) as pool:
            stored = list(pool.map(write, "abcdefgh"))
        assert sum(stored) == 30
        assert index.usage()[ME].num_bytes == 3000
        assert index.stats().reserved_bytes == 0

    @pytest.mark.usefixtures("_threads_take_turns_often")
    def test_writers_that_make_room_and_give_up_leave_sums_that_agree(
        self, make_index: MakeIndex
    ) -> None:
        index = make_index(budget_bytes=1000)
        barrier = Barrier(8)

        def write(letter: str) -> None:
            barrier.wait()
            for i in range(8):
                granted = index.reserve(ME, 100, now_ms=0)
                if isinstance(granted, Shortage):
                    index.evict(index.victims(granted.num_bytes, ME, is_own=granted.is_own))
                elif i % 4 == 3:
                    index.cancel(granted)
                else:
                    index.publish(node_record(f"{letter}{i}", owner=ME), 0, granted)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(write, "abcdefgh"))
        num_nodes = sum(1 for _ in index.scan())
        assert index.stats() == IndexStats(num_nodes, 100 * num_nodes, 0, 1000)
        assert 0 < num_nodes <= 10


class TestAnnotate:
    def test_documents_are_added_once_and_in_order(self, index: ChunkIndex) -> None:
        publish(index, node_record("a", doc_ids=("d1",)))
        record = index.annotate(named_key("a"), ["d2", "d1", "d3"])
        assert record is not None
        assert record.doc_ids == ("d1", "d2", "d3")
        assert index.match([[named_key("a")]], now_ms=0) == ((record,),)

    def test_documents_beyond_the_most_are_left_out(self, index: ChunkIndex) -> None:
        publish(index, node_record("a", doc_ids=("first",)))
        index.annotate(named_key("a"), [f"d{i}" for i in range(MAX_DOC_IDS)])
        doc_ids = view(index, "a").record.doc_ids
        assert doc_ids == ("first", *(f"d{i}" for i in range(MAX_DOC_IDS - 1)))

    def test_an_annotated_document_is_invalidated(self, index: ChunkIndex) -> None:
        publish(index, node_record("a", owner=ME))
        index.annotate(named_key("a"), ["d1@2"])
        assert record_names(index.invalidate("d1", ME, limit=9)) == ["a"]

    @pytest.mark.parametrize(
        ("before", "given", "after"),
        [(10, 20, 20), (20, 10, 20), (10, None, 10), (None, 10, None), (None, None, None)],
    )
    def test_only_a_later_expiry_replaces_one(
        self, index: ChunkIndex, before: int | None, given: int | None, after: int | None
    ) -> None:
        publish(index, node_record("a", expires_ms=before))
        record = index.annotate(named_key("a"), expires_ms=given)
        assert record is not None
        assert record.expires_ms == after
        assert view(index, "a").record == record

    def test_a_node_lives_as_long_as_its_later_expiry(self, index: ChunkIndex) -> None:
        publish(index, node_record("a", expires_ms=10))
        index.annotate(named_key("a"), expires_ms=20)
        assert index.expire(now_ms=19, limit=9) == ()
        assert match(index, "a", now_ms=19) == 1
        assert record_names(index.expire(now_ms=20, limit=9)) == ["a"]

    def test_a_pin_protects_until_it_is_taken_away(self, index: ChunkIndex) -> None:
        publish(index, *CHAIN)
        pinned = index.annotate(named_key("a1"), pinned=True)
        assert pinned is not None
        assert pinned.pinned
        assert plan(index, 1) == ["a2"]
        assert plan(index, 101) == []
        again = index.annotate(named_key("a1"), pinned=False)
        assert again == pinned
        unpinned = index.unpin(named_key("a1"))
        assert unpinned is not None
        assert not unpinned.pinned
        assert view(index, "a1").record == unpinned
        assert plan(index, 300) == ["a2", "a1", "a"]

    def test_unpinning_twice_is_unpinning(self, index: ChunkIndex) -> None:
        publish(index, node_record("a"))
        assert index.unpin(named_key("a")) == node_record("a")
        assert plan(index, 100) == ["a"]

    def test_an_absent_node_is_neither_annotated_nor_unpinned(self, index: ChunkIndex) -> None:
        assert index.annotate(named_key("a"), ["d1"], 10, pinned=True) is None
        assert index.unpin(named_key("a")) is None


class TestRemove:
    def test_removing_a_node_removes_all_below_it(self, index: ChunkIndex) -> None:
        publish(index, *CHAIN, node_record("b"))
        assert index.remove(named_key("a1")) == (CHAIN[2], CHAIN[1])
        assert match(index, "a", "a1", "a2") == 1
        assert match(index, "b") == 1
        assert index.remove(named_key("a1")) == ()

    def test_a_pin_does_not_stop_removal(self, index: ChunkIndex) -> None:
        publish(index, node_record("a"), node_record("a1", "a", pinned=True))
        assert record_names(index.remove(named_key("a"))) == ["a1", "a"]

    def test_removing_a_pinned_node_frees_its_ancestors(self, index: ChunkIndex) -> None:
        publish(index, node_record("a"), node_record("a1", "a", pinned=True))
        index.remove(named_key("a1"))
        assert plan(index, 100) == ["a"]

    def test_a_removed_key_is_published_anew(self, index: ChunkIndex) -> None:
        publish(index, node_record("a", doc_ids=("d1",), owner=ME, pinned=True, expires_ms=10))
        match(index, "a")
        index.remove(named_key("a"))
        publish(index, node_record("a", owner=ME))
        assert (view(index, "a").num_hits, view(index, "a").last_hit_ms) == (0, None)
        assert index.invalidate("d1", ME, limit=9) == index.expire(now_ms=10, limit=9) == ()
        assert plan(index, 100) == ["a"]


class TestVictims:
    def test_children_go_before_parents_and_a_plan_changes_nothing(self, index: ChunkIndex) -> None:
        publish(index, *CHAIN)
        before = index.stats()
        assert plan(index, 250) == ["a2", "a1", "a"]
        assert plan(index, 101) == ["a2", "a1"]
        assert index.stats() == before
        assert match(index, "a", "a1", "a2") == 3

    def test_no_more_go_than_are_needed(self, index: ChunkIndex) -> None:
        publish(index, *(node_record(name) for name in "abcdef"))
        assert plan(index, 1) == ["a"]
        assert plan(index, 200) == ["a", "b"]
        assert plan(index, 201) == ["a", "b", "c"]

    def test_more_than_there_is_cannot_be_evicted(self, index: ChunkIndex) -> None:
        assert plan(index, 1) == []
        publish(index, *CHAIN)
        assert plan(index, 301) == []

    def test_pinned_nodes_and_their_ancestors_are_no_victims(self, index: ChunkIndex) -> None:
        publish(index, *CHAIN, node_record("a3", "a"), node_record("a4", "a3", pinned=True))
        publish(index, node_record("b", pinned=True), node_record("b1", "b"), node_record("c"))
        assert sorted(plan(index, 400)) == ["a1", "a2", "b1", "c"]
        assert plan(index, 401) == []

    def test_never_hit_nodes_go_before_hit_ones(self, index: ChunkIndex) -> None:
        publish(index, node_record("h"), node_record("o"))
        match(index, "h")
        publish(index, node_record("n"))
        assert plan(index, 300) == ["o", "n", "h"]

    def test_publishing_below_a_node_is_a_use_of_it(self, index: ChunkIndex) -> None:
        publish(index, node_record("a"), node_record("b"), node_record("a1", "a"))
        assert plan(index, 300) == ["b", "a1", "a"]

    def test_a_hit_child_keeps_its_ancestors_behind_it(self, index: ChunkIndex) -> None:
        publish(index, *CHAIN, node_record("a3", "a"))
        for _ in range(3):
            match(index, "a", "a1", "a2")
        assert plan(index, 400) == ["a3", "a2", "a1", "a"]

    def test_what_costs_more_to_compute_stays_longer(self, index: ChunkIndex) -> None:
        publish(index, node_record("w1", compute_us=2000), node_record("w2", compute_us=100))
        assert plan(index, 200) == ["w2", "w1"]

    def test_an_own_shortage_takes_own_nodes_only(self, index: ChunkIndex) -> None:
        index.set_quota(ME, 200)
        publish(index, node_record("b", owner=YOU), node_record("c"))
        publish(index, node_record("a", owner=ME), node_record("a1", "a", owner=ME))
        assert plan(index, 150, ME, is_own=True) == ["a1", "a"]
        assert plan(index, 201, ME, is_own=True) == []
        assert plan(index, 100, YOU, is_own=True) == ["b"]

    def test_nobody_takes_from_an_owner_within_its_quota(self, index: ChunkIndex) -> None:
        index.set_quota(YOU, 200)
        publish(index, node_record("a", owner=YOU), node_record("b", owner=YOU))
        publish(index, node_record("c", owner=ME), node_record("d"))
        assert plan(index, 200, ME) == ["c", "d"]
        assert plan(index, 201, ME) == []
        assert plan(index, 400, YOU) == ["a", "b", "c", "d"]

    def test_what_an_owner_has_beyond_its_quota_is_taken(self, index: ChunkIndex) -> None:
        publish(index, *(node_record(name, owner=YOU) for name in "abcde"))
        index.set_quota(YOU, 250)
        assert plan(index, 200, ME) == ["a", "b"]
        assert plan(index, 201, ME) == []
        index.set_quota(YOU, None)
        assert plan(index, 500, ME) == ["a", "b", "c", "d", "e"]

    def test_one_that_makes_room_again_and_again_never_harms_an_owner_with_a_quota(
        self, make_index: MakeIndex
    ) -> None:
        index = make_index(budget_bytes=500)
        index.set_quota(YOU, 200)
        publish(index, node_record("y1", owner=YOU), node_record("y2", owner=YOU))
        for i in range(20):
            granted = index.reserve(ME, 100, now_ms=0)
            while isinstance(granted, Shortage):
                assert index.evict(index.victims(granted.num_bytes, ME, is_own=granted.is_own))
                granted = index.reserve(ME, 100, now_ms=0)
            index.publish(node_record(f"{'abcd'[i % 4]}{i}", owner=ME), 0, granted)
        assert index.usage() == {ME: Usage(3, 300, None), YOU: Usage(2, 200, 200)}


class TestEvict:
    def test_an_evicted_node_is_a_miss_and_its_parent_is_not(self, index: ChunkIndex) -> None:
        publish(index, *CHAIN)
        planned = index.victims(100, "", is_own=False)
        assert index.evict(planned) == planned == (CHAIN[2],)
        assert match(index, "a", "a1", "a2") == 2
        assert index.stats().num_bytes == 200

    def test_a_whole_chain_goes_in_order(self, index: ChunkIndex) -> None:
        publish(index, *CHAIN)
        assert record_names(index.evict(index.victims(300, "", is_own=False))) == ["a2", "a1", "a"]
        assert index.stats().num_nodes == 0

    @pytest.mark.parametrize("spoil", ["pin", "pin below", "publish", "remove", "replace"])
    def test_what_is_no_victim_any_more_stays_and_the_others_go(
        self, index: ChunkIndex, spoil: str
    ) -> None:
        publish(index, *(node_record(name) for name in "fac"))
        planned = index.victims(300, "", is_own=False)
        if spoil == "pin":
            index.annotate(named_key("a"), pinned=True)
        elif spoil == "pin below":
            publish(index, node_record("a1", "a", pinned=True))
        elif spoil == "publish":
            publish(index, node_record("a1", "a"))
        else:
            index.remove(named_key("a"))
        if spoil == "replace":
            publish(index, node_record("a", created_ms=1, checksum=1))
        assert record_names(index.evict(planned)) == ["f", "c"]
        assert match(index, "a") == (spoil != "remove")

    def test_a_plan_without_its_leaf_evicts_nothing(self, index: ChunkIndex) -> None:
        publish(index, *CHAIN)
        assert index.evict(index.victims(300, "", is_own=False)[1:]) == ()
        assert index.stats().num_nodes == 3

    def test_a_victim_named_twice_goes_once(self, index: ChunkIndex) -> None:
        publish(index, *CHAIN)
        assert index.evict(index.victims(100, "", is_own=False) * 2) == CHAIN[2:]
        assert index.evict([]) == ()


class TestExpire:
    def test_a_node_is_a_miss_from_its_expiry_on(self, index: ChunkIndex) -> None:
        publish(index, node_record("a", expires_ms=10), node_record("a1", "a"))
        assert match(index, "a", "a1", now_ms=9) == 2
        assert match(index, "a", "a1", now_ms=10) == 0

    def test_what_is_due_goes_with_all_below_pinned_or_not(self, index: ChunkIndex) -> None:
        publish(index, node_record("a", expires_ms=10, pinned=True), node_record("a1", "a"))
        publish(index, node_record("b", expires_ms=11), node_record("c"))
        assert index.expire(now_ms=9, limit=9) == ()
        assert record_names(index.expire(now_ms=10, limit=9)) == ["a1", "a"]
        assert match(index, "b") == match(index, "c") == 1
        assert index.expire(now_ms=10, limit=9) == ()

    def test_a_new_node_does_not_inherit_the_expiry_of_an_old_one(self, index: ChunkIndex) -> None:
        publish(index, node_record("a", expires_ms=10))
        index.remove(named_key("a"))
        publish(index, node_record("a", expires_ms=20))
        assert index.expire(now_ms=10, limit=9) == ()
        assert record_names(index.expire(now_ms=20, limit=9)) == ["a"]

    @pytest.mark.parametrize("limit", [1, 3, 100])
    def test_calls_with_a_limit_end_when_all_that_is_due_left(
        self, index: ChunkIndex, limit: int
    ) -> None:
        due = publish_family(index, "a", expires_ms=10) + publish_family(index, "b", expires_ms=5)
        publish_family(index, "c")
        left = drain(index, lambda: index.expire(now_ms=10, limit=limit))
        assert sorted(left) == sorted(due)
        assert index.stats().num_nodes == 7


class TestInvalidate:
    def test_an_owners_nodes_of_the_document_go(self, index: ChunkIndex) -> None:
        publish(index, node_record("a", doc_ids=("d1", "d2"), owner=ME))
        publish(index, node_record("a1", "a", owner=ME))
        publish(index, node_record("b", doc_ids=("d2",), owner=ME, pinned=True))
        publish(index, node_record("c", doc_ids=("d1",), owner=YOU))
        assert record_names(index.invalidate("d1", ME, limit=9)) == ["a1", "a"]
        assert match(index, "b") == match(index, "c") == 1
        assert index.invalidate("d1", ME, limit=9) == ()
        assert record_names(index.invalidate("d2", ME, limit=9)) == ["b"]

    def test_a_name_means_every_version_and_a_version_itself(self, index: ChunkIndex) -> None:
        publish(index, *(node_record(name, doc_ids=(f"d@{name}",)) for name in "abc"))
        publish(index, node_record("p", doc_ids=("d",)), node_record("q", doc_ids=("do@a",)))
        assert drain(index, lambda: index.invalidate("d@b", "", limit=9)) == ["b"]
        assert sorted(drain(index, lambda: index.invalidate("d", "", limit=9))) == ["a", "c", "p"]
        assert match(index, "q") == 1

    def test_a_node_of_two_versions_goes_with_either(self, index: ChunkIndex) -> None:
        publish(index, node_record("a", doc_ids=("d@1", "d@2")))
        assert record_names(index.invalidate("d@2", "", limit=9)) == ["a"]
        assert index.invalidate("d", "", limit=9) == ()

    @pytest.mark.parametrize("limit", [1, 3, 100])
    def test_calls_with_a_limit_end_when_all_left(self, index: ChunkIndex, limit: int) -> None:
        left = publish_family(index, "a", doc_ids=("d1@1",)) + publish_family(
            index, "b", doc_ids=("d1",)
        )
        publish_family(index, "c", doc_ids=("d2",))
        assert sorted(drain(index, lambda: index.invalidate("d1", "", limit))) == sorted(left)
        assert index.stats().num_nodes == 7

    def test_a_document_being_removed_is_not_matched_any_more(self, index: ChunkIndex) -> None:
        publish(index, node_record("a", doc_ids=("d1",)))
        publish(index, node_record("a0", "a"))
        publish(index, *(node_record(f"a{i}", f"a{i - 1}") for i in range(1, 30)))
        assert index.invalidate("d1", "", limit=2)
        assert match(index, "a", "a0", "a1") == 0
        assert index.publish(node_record("a!", "a"), now_ms=0) is Publication.ORPHAN


class TestClear:
    def test_everything_goes_pinned_or_not_and_quotas_stay(self, index: ChunkIndex) -> None:
        index.set_quota(ME, 500)
        publish(index, *CHAIN, node_record("p", pinned=True), node_record("m", owner=ME))
        left = drain(index, lambda: index.clear(limit=2))
        assert sorted(left) == ["a", "a1", "a2", "m", "p"]
        assert index.stats() == IndexStats(0, 0, 0, None)
        assert index.usage() == {ME: Usage(0, 0, 500)}

    def test_clearing_an_owner_leaves_the_others(self, index: ChunkIndex) -> None:
        mine = publish_family(index, "a", owner=ME) + publish_family(index, "b", owner=ME)
        publish_family(index, "c", owner=YOU)
        publish_family(index, "d")
        assert sorted(drain(index, lambda: index.clear(3, owner=ME))) == sorted(mine)
        assert index.usage() == {YOU: Usage(7, 700, None), "": Usage(7, 700, None)}

    def test_clearing_a_model_leaves_the_others(self, index: ChunkIndex) -> None:
        old, new = model_id(b"old"), model_id(b"new")
        gone = publish_family(index, "a", model=old) + publish_family(index, "b", model=old)
        kept = publish_family(index, "c", model=new)
        assert sorted(drain(index, lambda: index.clear(3, model=old))) == sorted(gone)
        assert sorted(record_names(each.record for each in index.scan())) == sorted(kept)

    def test_clearing_nothing_is_nothing(self, index: ChunkIndex) -> None:
        assert (
            index.clear(9) == index.clear(9, owner=ME) == index.clear(9, model=model_id(b"m")) == ()
        )


class TestTotals:
    def test_a_scan_sees_every_node_as_show_does(self, index: ChunkIndex) -> None:
        names = [name for letter in "abcdefgh" for name in publish_family(index, letter)]
        match(index, "a", "a1", now_ms=3)
        views = {each.record.key: each for each in index.scan()}
        assert views == {named_key(name): view(index, name) for name in names}
        assert views[named_key("a1")].num_hits == 1

    def test_an_empty_index_has_nothing_to_scan(self, index: ChunkIndex) -> None:
        assert list(index.scan()) == []
        assert index.stats() == IndexStats(0, 0, 0, None)
        assert index.usage() == {}

    def test_usage_names_owners_with_nodes_or_a_quota(self, index: ChunkIndex) -> None:
        index.set_quota(YOU, 1000)
        publish(index, node_record("a", owner=ME), node_record("b", owner=ME, payload_bytes=7))
        assert index.usage() == {ME: Usage(2, 107, None), YOU: Usage(0, 0, 1000)}
        index.remove(named_key("a"))
        index.remove(named_key("b"))
        index.set_quota(YOU, None)
        assert index.usage() == {}

    def test_expired_nodes_count_until_they_are_collected(self, index: ChunkIndex) -> None:
        publish(index, node_record("a", expires_ms=10, owner=ME))
        assert match(index, "a", now_ms=10) == 0
        assert index.stats().num_nodes == index.usage()[ME].num_nodes == 1
        index.expire(now_ms=10, limit=9)
        assert index.stats().num_nodes == 0


def publish_family(index: ChunkIndex, letter: str, **top: object) -> list[str]:
    """Publish a node with `top` fields, two below it, two below each; one owner and model."""
    alike = {name: top[name] for name in ("owner", "model") if name in top}
    records = [node_record(letter, **top)]
    for parent in (letter, f"{letter}1", f"{letter}2"):
        records += [node_record(f"{parent}{i}", parent, **alike) for i in (1, 2)]
    publish(index, *records)
    return record_names(records)


OWNERS = {"a": ME, "b": YOU, "c": "", "d": ME}
MODELS = {letter: model_id(letter.encode()) for letter in OWNERS}


class Model:
    """An index that finds everything by looking at every record; knows no order of eviction."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.records: dict[str, NodeRecord] = {}
        self.reserved: list[Reservation] = []
        self.quotas: dict[str, int] = {}

    def used(self, owner: str | None = None) -> int:
        records = [r.payload_bytes for r in self.records.values() if owner in (None, r.owner)]
        reserved = [r.num_bytes for r in self.reserved if owner in (None, r.owner)]
        return sum(records) + sum(reserved)

    def shortage(self, owner: str, num_bytes: int) -> Shortage | None:
        quota = self.quotas.get(owner)
        if quota is not None and self.used(owner) + num_bytes > quota:
            return Shortage(self.used(owner) + num_bytes - quota, is_own=True)
        missing = self.used() + num_bytes - self.budget_bytes
        return Shortage(missing, is_own=False) if missing > 0 else None

    def publication(self, record: NodeRecord, now_ms: int) -> Publication:
        present = self.records.get(key_name(record.key))
        if present is not None:
            return Publication.BUSY if present.is_expired(now_ms) else Publication.PRESENT
        parent = None if record.parent is None else self.records.get(key_name(record.parent))
        if record.parent is not None and (parent is None or parent.is_expired(now_ms)):
            return Publication.ORPHAN
        return Publication.STORED

    def leading(self, path: Sequence[str], now_ms: int) -> tuple[NodeRecord, ...]:
        found = takewhile(lambda r: r and not r.is_expired(now_ms), map(self.records.get, path))
        return tuple(record for record in found if record is not None)

    def below(self, tops: Iterable[str]) -> set[str]:
        """Those of `tops` that are there, and all nodes whose names begin like one of them."""
        there = tuple(name for name in tops if name in self.records)
        return {name for name in self.records if name.startswith(there)} if there else set()

    def of(self, test: Callable[[NodeRecord], bool]) -> set[str]:
        return self.below(name for name, record in self.records.items() if test(record))

    def evictable(self, owner: str, *, is_own: bool) -> tuple[int, int]:
        """Bytes of nodes that may go whole, and what others have beyond their quotas at most."""
        free = [r for name, r in self.records.items() if not self.is_protected(name)]
        certain = sum(
            r.payload_bytes
            for r in free
            if r.owner == owner or (not is_own and r.owner not in self.quotas)
        )
        others = set() if is_own else self.quotas.keys() - {owner}
        return certain, sum(max(self.used(o) - self.quotas[o], 0) for o in others)

    def is_protected(self, name: str) -> bool:
        return any(self.records[other].pinned for other in self.below([name]))


class Walk:
    """Random calls, each compared with the model."""

    def __init__(self, index: ChunkIndex, model: Model, seed: int) -> None:
        self.index = index
        self.model = model
        self.random = Random(seed)
        self.now_ms = 0

    def run(self, num_steps: int) -> None:
        often = [self.publish] * 5 + [self.match, self.make_room]
        seldom = [self.reserve, self.end_reservation, self.annotate, self.unpin, self.set_quota]
        rare = [self.remove, self.expire, self.invalidate, self.clear]
        for step in range(num_steps):
            self.now_ms += self.random.randrange(3)
            self.random.choice([*often * 4, *seldom, *seldom, *rare])()
            if step % 8 == 7:
                self.compare()

    def compare(self) -> None:
        settle(self.index)
        self.index.check_integrity()
        assert {key_name(v.record.key): v.record for v in self.index.scan()} == self.model.records
        num_bytes = sum(record.payload_bytes for record in self.model.records.values())
        reserved = self.model.used() - num_bytes
        expected = IndexStats(len(self.model.records), num_bytes, reserved, self.model.budget_bytes)
        assert self.index.stats() == expected

    def name(self) -> str:
        """`a`, `a1` below it, `a10` below that; of four chunks."""
        digits = [self.random.choice("01") for _ in range(self.random.randrange(4))]
        return "".join([self.random.choice("abcd"), *digits])

    def names_there(self) -> list[str]:
        return sorted(self.model.records) or [self.name()]

    def record(self, name: str) -> NodeRecord:
        documents = self.random.sample(["d", "d@1", "d@2", "e@1"], self.random.randrange(3))
        return node_record(
            name,
            name[:-1] or None,
            payload_bytes=self.random.randrange(1, 100),
            checksum=self.random.getrandbits(64),
            created_ms=self.now_ms,
            doc_ids=tuple(documents),
            expires_ms=self.random.choice([None, None, self.now_ms + 40]),
            owner=OWNERS[name[0]],
            pinned=self.random.random() < 0.1,
            model=MODELS[name[0]],
            compute_us=self.random.randrange(1000),
        )

    def publish(self) -> None:
        name = self.name()
        path = [name[:end] for end in range(1, len(name) + 1)]
        missing = [name for name in path if name not in self.model.records]
        record = self.record(self.random.choice([name, *missing[:1]]))
        reservation = self.reserve_for(record.owner, record.payload_bytes)
        expected = self.model.publication(record, self.now_ms)
        assert self.index.publish(record, self.now_ms, reservation) is expected
        if reservation is not None:
            self.model.reserved.remove(reservation)
        if expected is Publication.STORED:
            self.model.records[key_name(record.key)] = record

    def reserve(self) -> None:
        self.reserve_for(self.random.choice([ME, YOU, ""]), self.random.randrange(150))

    def reserve_for(self, owner: str, num_bytes: int) -> Reservation | None:
        expected = self.model.shortage(owner, num_bytes)
        granted = self.index.reserve(owner, num_bytes, self.now_ms)
        if isinstance(granted, Shortage):
            assert granted == expected
            return None
        assert expected is None
        self.model.reserved.append(granted)
        return granted

    def end_reservation(self) -> None:
        if self.model.reserved:
            self.index.cancel(self.model.reserved.pop())

    def match(self) -> None:
        names = [self.name() for _ in range(3)]
        paths = [[name[:end] for end in range(1, len(name) + 1)] for name in names]
        found = self.index.match([[named_key(n) for n in path] for path in paths], self.now_ms)
        assert found == tuple(self.model.leading(path, self.now_ms) for path in paths)

    def annotate(self) -> None:
        name = self.random.choice(self.names_there())
        given = self.random.choice([None, self.now_ms + 30])
        pinned = self.random.random() < 0.3
        record = self.index.annotate(named_key(name), ["e@2"], given, pinned=pinned)
        before = self.model.records.get(name)
        if before is None:
            assert record is None
            return
        expires_ms = None if before.expires_ms is None else max(before.expires_ms, given or 0)
        expected = replace(
            before,
            doc_ids=tuple(dict.fromkeys((*before.doc_ids, "e@2"))),
            expires_ms=expires_ms,
            pinned=before.pinned or pinned,
        )
        assert record == expected
        self.model.records[name] = expected

    def unpin(self) -> None:
        name = self.random.choice(self.names_there())
        record = self.index.unpin(named_key(name))
        assert (record is None) == (name not in self.model.records)
        if record is not None:
            assert record == replace(self.model.records[name], pinned=False)
            self.model.records[name] = record

    def set_quota(self) -> None:
        owner = self.random.choice([ME, YOU])
        quota = self.random.choice([None, 100, 300])
        self.index.set_quota(owner, quota)
        self.model.quotas.pop(owner, None)
        if quota is not None:
            self.model.quotas[owner] = quota

    def remove(self) -> None:
        name = self.name()
        self.gone(self.index.remove(named_key(name)), self.model.below([name]))

    def expire(self) -> None:
        expected = self.model.of(lambda record: record.is_expired(self.now_ms))
        self.drain(lambda limit: self.index.expire(self.now_ms, limit), expected)

    def invalidate(self) -> None:
        owner, doc_id = self.random.choice([ME, YOU, ""]), self.random.choice(["d", "d@1", "e@2"])
        expected = self.model.of(
            lambda record: (
                record.owner == owner
                and any(doc_id in (named, named.partition("@")[0]) for named in record.doc_ids)
            )
        )
        self.drain(lambda limit: self.index.invalidate(doc_id, owner, limit), expected)

    def clear(self) -> None:
        letter = self.random.choice("abcd")
        if self.random.random() < 0.5:
            expected = self.model.of(lambda record: record.owner == OWNERS[letter])
            self.drain(lambda limit: self.index.clear(limit, owner=OWNERS[letter]), expected)
        else:
            expected = self.model.of(lambda record: record.model == MODELS[letter])
            self.drain(lambda limit: self.index.clear(limit, model=MODELS[letter]), expected)

    def make_room(self) -> None:
        owner, is_own = self.random.choice([ME, YOU, ""]), self.random.random() < 0.3
        num_bytes = self.random.randrange(1, 200)
        planned = self.index.victims(num_bytes, owner, is_own=is_own)
        certain, perhaps = self.model.evictable(owner, is_own=is_own)
        assert planned or num_bytes > certain
        assert not planned or num_bytes <= certain + perhaps
        assert not planned or sum(r.payload_bytes for r in planned[:-1]) < num_bytes
        assert not planned or sum(r.payload_bytes for r in planned) >= num_bytes
        before = {each: self.model.used(each) for each in self.model.quotas}
        assert not any(self.model.is_protected(name) for name in record_names(planned))
        self.gone(self.index.evict(planned), set(record_names(planned)))
        for other in before.keys() - {owner}:
            lost = before[other] - self.model.used(other)
            assert lost <= max(before[other] - self.model.quotas[other], 0)

    def drain(self, call: Callable[[int], Sequence[NodeRecord]], expected: set[str]) -> None:
        limit = self.random.choice([1, 2, 50])
        left: list[NodeRecord] = []
        while records := call(limit):
            left.extend(records)
            assert len(left) <= len(expected)
        self.gone(left, expected)

    def gone(self, records: Sequence[NodeRecord], expected: set[str]) -> None:
        """Every expected record left as it was, children first; the model forgets them."""
        names = record_names(records)
        assert sorted(names) == sorted(expected)
        for name, record in zip(names, records, strict=True):
            assert self.model.records.pop(name) == record
            assert not any(other.startswith(name) for other in self.model.records)


@pytest.mark.parametrize("seed", range(4))
def test_random_calls_do_as_a_plain_dict_does(make_index: MakeIndex, seed: int) -> None:
    Walk(make_index(budget_bytes=800), Model(800), seed).run(num_steps=240)
