"""What the index in this process promises beyond every `ChunkIndex`: readers keep nodes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from sglang_ext.chunk_index.identity import ChunkKey
from sglang_ext.chunk_index.index import (
    HoldingIndex,
    IndexStats,
    NodeRecord,
    Publication,
    Reservation,
    Shortage,
    Usage,
)
from sglang_ext.chunk_index.memory_index import MemoryIndex
from tests.strategies import key_name, named_key, node_record, record_names

CHAIN = (node_record("a"), node_record("a1", "a"), node_record("a2", "a1"))


@pytest.fixture
def index() -> Iterator[MemoryIndex]:
    """An index with a budget of 1000 bytes, checked at the end."""
    index = MemoryIndex(budget_bytes=1000)
    yield index
    index.check_integrity()


def publish(index: MemoryIndex, *records: NodeRecord) -> None:
    for record in records:
        assert index.publish(record, now_ms=0) is Publication.STORED


def keys(*names: str) -> list[ChunkKey]:
    return [named_key(name) for name in names]


def plan(index: MemoryIndex, num_bytes: int, owner: str = "", *, is_own: bool = False) -> list[str]:
    return record_names(index.victims(num_bytes, owner, is_own=is_own))


def test_it_is_an_index_whose_readers_can_hold(index: MemoryIndex) -> None:
    holding: HoldingIndex = index
    assert holding.num_held == 0


def test_only_present_nodes_are_held_and_in_order(index: MemoryIndex) -> None:
    publish(index, *CHAIN)
    assert record_names(index.hold(keys("a1", "x", "a"))) == ["a1", "a"]
    assert index.num_held == 2
    assert index.release(keys("a", "a1")) == ()
    assert index.num_held == 0


def test_a_node_held_twice_needs_two_releases(index: MemoryIndex) -> None:
    publish(index, node_record("a"))
    assert record_names(index.hold(keys("a", "a"))) == ["a", "a"]
    assert index.num_held == 1
    index.release(keys("a"))
    assert plan(index, 1) == []
    index.release(keys("a"))
    assert plan(index, 1) == ["a"]


def test_releasing_what_nobody_holds_is_ignored(index: MemoryIndex) -> None:
    publish(index, node_record("a"))
    assert index.release(keys("a", "x")) == ()
    index.hold(keys("a"))
    assert index.num_held == 1


def test_held_nodes_and_their_ancestors_are_no_victims(index: MemoryIndex) -> None:
    publish(index, *CHAIN, node_record("b"))
    planned = index.victims(400, "", is_own=False)
    index.hold(keys("a1"))
    assert plan(index, 200) == ["a2", "b"]
    assert plan(index, 201) == []
    assert sorted(record_names(index.evict(planned))) == ["a2", "b"]


def test_the_last_release_is_a_use(index: MemoryIndex) -> None:
    publish(index, node_record("a"))
    index.hold(keys("a"))
    publish(index, node_record("b"))
    index.release(keys("a"))
    assert plan(index, 200) == ["b", "a"]


def test_a_removed_node_is_dead_and_leaves_with_its_last_reader(index: MemoryIndex) -> None:
    publish(index, *CHAIN)
    index.hold(keys("a1", "a1"))
    assert record_names(index.remove(named_key("a"))) == ["a2", "a"]
    assert index.is_dead(named_key("a1"))
    assert not index.is_dead(named_key("a"))
    assert index.match([keys("a", "a1")], now_ms=0) == ((),)
    assert index.show(named_key("a1")) is None
    assert index.hold(keys("a1")) == ()
    assert list(index.scan()) == []
    assert index.num_held == 1
    assert index.release(keys("a1")) == ()
    assert record_names(index.release(keys("a1"))) == ["a1"]
    assert not index.is_dead(named_key("a1"))
    assert index.num_held == 0


def test_a_dead_key_is_busy_before_its_readers_left(index: MemoryIndex) -> None:
    publish(index, node_record("a"))
    index.hold(keys("a"))
    index.remove(named_key("a"))
    assert index.publish(node_record("a"), now_ms=0) is Publication.BUSY
    assert index.publish(node_record("a1", "a"), now_ms=0) is Publication.ORPHAN
    assert index.annotate(named_key("a"), ["d1"]) is None
    index.release(keys("a"))
    publish(index, node_record("a"), node_record("a1", "a"))


def test_dead_bytes_count_against_budget_and_quota_alone(index: MemoryIndex) -> None:
    index.set_quota("me", 500)
    publish(index, node_record("a", owner="me", payload_bytes=400))
    index.hold(keys("a"))
    index.remove(named_key("a"))
    assert index.held_bytes == 400
    assert index.stats() == IndexStats(0, 0, 0, 1000)
    assert index.usage() == {"me": Usage(0, 0, 500)}
    assert index.reserve("me", 200, now_ms=0) == Shortage(100, is_own=True)
    assert index.reserve("you", 700, now_ms=0) == Shortage(100, is_own=False)
    index.release(keys("a"))
    assert index.held_bytes == 0
    assert isinstance(index.reserve("me", 500, now_ms=0), Reservation)


def test_dead_bytes_of_an_owner_beyond_its_quota_are_not_taken_twice(index: MemoryIndex) -> None:
    publish(index, *(node_record(name, owner="me") for name in "abcd"))
    index.set_quota("me", 300)
    assert plan(index, 100, "you") == ["a"]
    index.hold(keys("b"))
    index.remove(named_key("b"))
    assert plan(index, 100, "you") == ["a"]
    assert plan(index, 101, "you") == []


@pytest.mark.parametrize("how", ["clear", "expire", "invalidate"])
def test_dead_nodes_do_not_end_a_call_with_a_limit_too_soon(index: MemoryIndex, how: str) -> None:
    fields: dict[str, Any] = {"expires_ms": 10, "doc_ids": ("d1",)}
    publish(index, *(node_record(name, **fields) for name in "abcd"))
    index.hold(keys("a", "b"))
    calls = {
        "clear": lambda: index.clear(1),
        "expire": lambda: index.expire(10, 1),
        "invalidate": lambda: index.invalidate("d1", "", 1),
    }
    assert [record_names(calls[how]()) for _ in range(3)] == [["c"], ["d"], []]
    assert record_names(index.release(keys("b", "a"))) == ["b", "a"]


def test_a_peek_counts_leading_nodes_and_changes_nothing(index: MemoryIndex) -> None:
    publish(index, *CHAIN, node_record("b", expires_ms=10))
    before = [index.show(record.key) for record in CHAIN], plan(index, 400)
    paths = [keys("a", "a1", "x"), keys("x"), keys("b"), []]
    assert index.peek(paths, now_ms=9) == (2, 0, 1, 0)
    assert index.peek(paths, now_ms=10) == (2, 0, 0, 0)
    assert ([index.show(record.key) for record in CHAIN], plan(index, 400)) == before


def test_of_nodes_hit_as_often_the_longest_unused_goes_first(index: MemoryIndex) -> None:
    publish(index, *(node_record(name) for name in "abc"))
    for name in "cab":
        index.match([keys(name)], now_ms=0)
    assert plan(index, 300) == ["c", "a", "b"]


def test_an_owner_and_a_model_together_clear_what_belongs_to_both(index: MemoryIndex) -> None:
    for name, owner, model in (("a", "me", "m"), ("b", "me", "n"), ("c", "you", "m")):
        publish(index, node_record(name, owner=owner, model=model))
    assert record_names(index.clear(9, owner="me", model="m")) == ["a"]
    assert sorted(key_name(view.record.key) for view in index.scan()) == ["b", "c"]


def test_quotas_sort_nodes_that_were_there_before_them(index: MemoryIndex) -> None:
    publish(index, node_record("a", owner="me"), node_record("b", owner="you"))
    index.set_quota("me", 100)
    index.check_integrity()
    assert plan(index, 100, "you") == ["b"]
    index.set_quota("me", None)
    index.check_integrity()
    assert plan(index, 200, "you") == ["a", "b"]


def test_a_scan_goes_on_while_nodes_come_and_go(index: MemoryIndex) -> None:
    publish(index, *CHAIN, node_record("b"))
    scan = index.scan()
    seen = [next(scan).record.key]
    index.remove(named_key("a1"))
    publish(index, node_record("c"))
    seen += [view.record.key for view in scan]
    assert seen == keys("a", "b")


def test_bookkeeping_of_nodes_gone_does_not_pile_up(index: MemoryIndex) -> None:
    for i in range(200):
        publish(index, node_record("a", expires_ms=1000 + i, doc_ids=("doc@1",), owner=str(i)))
        index.annotate(named_key("a"), [f"d{i}"], expires_ms=2000 + i)
        index.remove(named_key("a"))
    catalog, accounts = index._catalog, index._accounts
    assert len(catalog._due) < 50
    assert [catalog._documents, catalog._groups, catalog._expiry] == [{}, {}, {}]
    assert [accounts._owners, accounts._reservations] == [{}, {}]


@pytest.fixture
def _threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_threads_take_turns_often")
def test_threads_that_do_everything_at_once_leave_an_index_that_agrees() -> None:
    index = MemoryIndex(budget_bytes=2000)
    index.set_quota("me", 700)
    barrier = Barrier(8)

    def work(thread: int) -> None:
        barrier.wait()
        owner = ("me", "you")[thread % 2]
        for i in range(40):
            path = [f"{thread % 3}", f"{thread % 3}{i % 5}", f"{thread % 3}{i % 5}x"]
            (found,) = index.match([keys(*path)], now_ms=i)
            held = index.hold([record.key for record in found])
            for name, parent in zip(path, [None, *path], strict=False):
                store(index, node_record(name, parent, owner=owner, expires_ms=i + 20))
            index.annotate(named_key(path[1]), [f"d{i}"])
            index.release([record.key for record in held])
            index.expire(i, limit=2)
            index.invalidate(f"d{i - 3}", owner, limit=2)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    index.check_integrity()
    assert index.num_held == 0
    assert index.stats().reserved_bytes == index.held_bytes == 0
    assert index.stats().num_bytes <= 2000
    assert index.usage()["me"].num_bytes <= 700


def store(index: MemoryIndex, record: NodeRecord) -> None:
    """Publish a record with a reservation, making room once."""
    granted = index.reserve(record.owner, record.payload_bytes, now_ms=0)
    if isinstance(granted, Shortage):
        victims: Sequence[NodeRecord] = index.victims(
            granted.num_bytes, record.owner, is_own=granted.is_own
        )
        index.evict(victims)
        granted = index.reserve(record.owner, record.payload_bytes, now_ms=0)
    if isinstance(granted, Reservation):
        index.publish(record, 0, granted)
