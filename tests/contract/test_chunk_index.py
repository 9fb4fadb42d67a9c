"""What every `ChunkIndex` adapter promises, whatever is behind it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sglang_ext.chunk_index.index import ChunkIndex, NodeRecord
from sglang_ext.chunk_index.memory_index import MemoryIndex
from tests.strategies import named_key, node_record

ADAPTERS: list[Callable[[], ChunkIndex]] = [MemoryIndex]


@pytest.fixture(params=ADAPTERS, ids=lambda adapter: adapter.__name__)
def index(request: pytest.FixtureRequest) -> ChunkIndex:
    adapter: ChunkIndex = request.param()
    return adapter


def publish(index: ChunkIndex, *records: NodeRecord) -> None:
    for record in records:
        assert index.publish(record, now_ms=0)


def match(index: ChunkIndex, *names: str, now_ms: int = 0) -> int:
    (num_hits,) = index.match([[named_key(name) for name in names]], now_ms)
    return num_hits


def names(records: tuple[NodeRecord, ...]) -> list[str]:
    return [record.key.decode().rstrip("_") for record in records]


CHAIN = (node_record("a"), node_record("a1", "a"), node_record("a2", "a1"))


def test_a_match_counts_leading_nodes_of_each_path(index: ChunkIndex) -> None:
    publish(index, *CHAIN, node_record("b"))
    paths = [["a", "a1", "a2"], [], ["x", "a1"], ["b", "x"]]
    keys = [[named_key(name) for name in path] for path in paths]
    assert index.match(keys, now_ms=0) == (3, 0, 0, 1)


def test_a_match_is_remembered(index: ChunkIndex) -> None:
    publish(index, *CHAIN)
    match(index, "a", "a1", now_ms=7)
    match(index, "a", now_ms=9)
    views = [index.show(record.key) for record in CHAIN]
    seen = [(view.num_hits, view.last_hit_ms) for view in views if view is not None]
    assert seen == [(2, 9), (1, 7), (0, None)]


def test_an_orphan_is_never_published(index: ChunkIndex) -> None:
    assert not index.publish(node_record("a1", "a"), now_ms=0)
    assert index.show(named_key("a1")) is None


def test_publishing_again_keeps_the_old_record(index: ChunkIndex) -> None:
    publish(index, node_record("a", checksum=1), node_record("a", checksum=2))
    view = index.show(named_key("a"))
    assert view is not None
    assert view.record.checksum == 1
    assert index.stats().num_nodes == 1


def test_an_absent_node_is_not_shown(index: ChunkIndex) -> None:
    assert index.show(named_key("a")) is None


def test_only_present_nodes_are_held_and_in_order(index: ChunkIndex) -> None:
    publish(index, *CHAIN)
    keys = [named_key(name) for name in ("a1", "x", "a")]
    assert names(index.hold(keys)) == ["a1", "a"]
    assert index.stats().num_held == 2


def test_a_node_held_twice_needs_two_releases(index: ChunkIndex) -> None:
    publish(index, node_record("a"))
    index.hold([named_key("a"), named_key("a")])
    index.release([named_key("a")])
    assert index.victims(1) == ()
    index.release([named_key("a")])
    assert names(index.victims(1)) == ["a"]


def test_releasing_what_nobody_holds_is_ignored(index: ChunkIndex) -> None:
    publish(index, node_record("a"))
    assert index.release([named_key("a"), named_key("x")]) == ()
    assert index.stats().num_held == 0


def test_removing_a_node_removes_all_below_it(index: ChunkIndex) -> None:
    publish(index, *CHAIN, node_record("b"))
    assert names(index.remove(named_key("a1"))) == ["a2", "a1"]
    assert match(index, "a", "a1", "a2") == 1
    assert match(index, "b") == 1
    assert index.remove(named_key("a1")) == ()


def test_a_held_node_is_dead_at_once_and_leaves_with_its_last_reader(index: ChunkIndex) -> None:
    publish(index, *CHAIN)
    key = named_key("a1")
    index.hold([key, key])
    assert names(index.remove(named_key("a"))) == ["a2", "a"]
    assert match(index, "a", "a1") == 0
    assert index.hold([key]) == ()
    view = index.show(key)
    assert view is not None
    assert view.is_dead
    assert index.stats().dead_bytes == 100
    assert index.release([key]) == ()
    assert names(index.release([key])) == ["a1"]
    assert index.show(key) is None


def test_a_dead_key_is_not_published_before_its_readers_left(index: ChunkIndex) -> None:
    publish(index, node_record("a"))
    index.hold([named_key("a")])
    index.remove(named_key("a"))
    assert not index.publish(node_record("a"), now_ms=0)
    assert not index.publish(node_record("a1", "a"), now_ms=0)
    index.release([named_key("a")])
    publish(index, node_record("a"), node_record("a1", "a"))


def test_victims_are_leaf_first_and_a_plan_changes_nothing(index: ChunkIndex) -> None:
    publish(index, *CHAIN)
    before = index.stats()
    assert names(index.victims(250)) == ["a2", "a1", "a"]
    assert names(index.victims(101)) == ["a2", "a1"]
    assert index.stats() == before


def test_held_and_pinned_nodes_and_their_ancestors_are_no_victims(index: ChunkIndex) -> None:
    publish(index, *CHAIN, node_record("b"), node_record("b1", "b", pinned=True), node_record("c"))
    index.hold([named_key("a1")])
    assert names(index.victims(200)) == ["a2", "c"]
    assert index.victims(201) == ()


def test_never_hit_nodes_are_evicted_before_hit_ones(index: ChunkIndex) -> None:
    publish(index, node_record("hit"), node_record("old"))
    match(index, "hit")
    publish(index, node_record("new"))
    assert names(index.victims(300)) == ["old", "new", "hit"]


def test_an_evicted_node_is_a_miss_and_its_parent_is_not(index: ChunkIndex) -> None:
    publish(index, *CHAIN)
    assert index.evict(index.victims(100))
    assert match(index, "a", "a1", "a2") == 2
    assert index.stats().num_bytes == 200


@pytest.mark.parametrize("spoil", ["hold", "publish", "remove", "replace"])
def test_a_spoilt_plan_fails_as_a_whole(index: ChunkIndex, spoil: str) -> None:
    publish(index, node_record("first"), node_record("a"))
    plan = index.victims(200)
    if spoil == "hold":
        index.hold([named_key("a")])
    elif spoil == "publish":
        publish(index, node_record("a1", "a"))
    else:
        index.remove(named_key("a"))
    if spoil == "replace":
        publish(index, node_record("a", created_ms=1))
    before = index.stats()
    assert not index.evict(plan)
    assert index.stats() == before
    assert match(index, "first") == 1


def test_a_plan_without_its_leaf_is_refused(index: ChunkIndex) -> None:
    publish(index, *CHAIN)
    assert not index.evict(index.victims(300)[1:])
    assert index.stats().num_nodes == 3


def test_a_node_is_a_miss_from_its_expiry_on(index: ChunkIndex) -> None:
    publish(index, node_record("a", expires_ms=10), node_record("a1", "a"))
    assert match(index, "a", "a1", now_ms=9) == 2
    assert match(index, "a", "a1", now_ms=10) == 0


def test_an_expired_node_takes_no_child_and_no_second_record(index: ChunkIndex) -> None:
    publish(index, node_record("a", expires_ms=10))
    assert not index.publish(node_record("a1", "a"), now_ms=10)
    assert not index.publish(node_record("a"), now_ms=10)


def test_expiry_removes_what_is_due_with_all_below_pinned_or_not(index: ChunkIndex) -> None:
    publish(index, node_record("a", expires_ms=10, pinned=True), node_record("a1", "a"))
    publish(index, node_record("b", expires_ms=11), node_record("c"))
    assert index.expire(now_ms=9) == ()
    assert names(index.expire(now_ms=10)) == ["a1", "a"]
    assert match(index, "b") == match(index, "c") == 1


def test_a_new_node_does_not_inherit_the_expiry_of_an_old_one(index: ChunkIndex) -> None:
    publish(index, node_record("a", expires_ms=10))
    index.remove(named_key("a"))
    publish(index, node_record("a", expires_ms=20))
    assert index.expire(now_ms=10) == ()
    assert names(index.expire(now_ms=20)) == ["a"]


def test_bookkeeping_of_nodes_gone_does_not_pile_up(index: ChunkIndex) -> None:
    for i in range(200):
        publish(index, node_record("a", expires_ms=1000 + i, doc_ids=("doc",)))
        index.remove(named_key("a"))
    index.check_integrity()
    if isinstance(index, MemoryIndex):
        assert len(index._expiry) < 50
        assert not index._docs


def test_invalidation_removes_an_owners_nodes_of_the_document(index: ChunkIndex) -> None:
    publish(index, node_record("a", doc_ids=("d1", "d2"), owner="me"), node_record("a1", "a"))
    publish(index, node_record("b", doc_ids=("d2",), owner="me"))
    publish(index, node_record("c", doc_ids=("d1",), owner="you"))
    assert names(index.invalidate("d1", owner="me")) == ["a1", "a"]
    assert match(index, "b") == match(index, "c") == 1
    assert index.invalidate("d1", owner="me") == ()
    assert names(index.invalidate("d2", owner="me")) == ["b"]


def test_clearing_removes_all_but_what_is_held(index: ChunkIndex) -> None:
    publish(index, *CHAIN, node_record("p", pinned=True))
    index.hold([named_key("a1")])
    assert sorted(names(index.clear())) == ["a", "a2", "p"]
    assert (index.stats().num_nodes, index.stats().num_dead) == (0, 1)
    assert names(index.release([named_key("a1")])) == ["a1"]
    assert index.stats().dead_bytes == 0


@pytest.fixture(autouse=True)
def _is_sound_afterwards(index: ChunkIndex) -> object:
    yield
    index.check_integrity()
