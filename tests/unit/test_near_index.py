"""The near index against the real in-process index, shared by clients that hear of each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from threading import Thread
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from sglang_ext.chunk_index.identity import ChunkKey
from sglang_ext.chunk_index.index import NodeRecord, Publication
from sglang_ext.chunk_index.memory_index import MemoryIndex
from sglang_ext.chunk_index.near_index import NearIndex, OnKeys, PathEnd, RemoteIndex
from sglang_ext.errors import IndexUnavailable
from tests.strategies import named_key, node_record

NEGATIVE_MS = 100
POSITIVE_MS = 1000
FAR_MS = 10_000_000
PARENTS = {"a": None, "a1": "a", "a2": "a1", "a3": "a1", "b": None, "b1": "b", "c": None}


class Publisher:
    """Carries what clients announce to all subscribers, in order, when a test says so."""

    def __init__(self, echoes: bool = False) -> None:
        self.echoes = echoes
        self.waiting: deque[tuple[object, bool, tuple[ChunkKey, ...]]] = deque()
        self.subscriptions: list[Subscription] = []

    def announce(self, sender: object, is_new: bool, keys: Sequence[ChunkKey]) -> None:
        if keys:
            self.waiting.append((sender, is_new, tuple(keys)))

    def deliver(self, limit: int | None = None) -> None:
        for _ in range(len(self.waiting) if limit is None else min(limit, len(self.waiting))):
            sender, is_new, keys = self.waiting.popleft()
            for subscription in self.subscriptions:
                if self.echoes or subscription.owner is not sender:
                    (subscription.on_new if is_new else subscription.on_gone)(keys)

    def lose(self) -> None:
        self.waiting.clear()
        for subscription in self.subscriptions:
            subscription.on_lost()


class Subscription:
    """A client's `Changes`."""

    def __init__(self, publisher: Publisher, owner: object) -> None:
        self.publisher = publisher
        self.owner = owner

    def subscribe(self, on_gone: OnKeys, on_new: OnKeys, on_lost: Callable[[], None]) -> None:
        self.on_gone, self.on_new, self.on_lost = on_gone, on_new, on_lost
        self.publisher.subscriptions.append(self)

    def close(self) -> None:
        self.publisher.subscriptions.remove(self)


class Client:
    """One server's connection to a shared index; announces what it changes.

    `meanwhile` runs once, after the index did what it was asked and before the answer is returned.
    """

    def __init__(self, shared: MemoryIndex, publisher: Publisher) -> None:
        self.shared = shared
        self.publisher = publisher
        self.is_down = False
        self.meanwhile: Callable[[], object] | None = None
        self.questions: list[list[list[ChunkKey]]] = []
        self.touched: list[ChunkKey] = []
        self.num_flushes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.shared, name)

    def match(
        self, paths: Sequence[Sequence[ChunkKey]], now_ms: int
    ) -> tuple[tuple[NodeRecord, ...], ...]:
        self.questions.append([list(path) for path in paths])
        return self._answer(lambda: self.shared.match(paths, now_ms))

    def touch(self, keys: Sequence[ChunkKey], now_ms: int) -> None:
        self.touched += keys

    def flush(self) -> None:
        self.num_flushes += 1

    def publish(self, record: NodeRecord, now_ms: int, reservation: Any = None) -> Publication:
        def act() -> Publication:
            done = self.shared.publish(record, now_ms, reservation)
            self._announce(True, [record] if done is Publication.STORED else [])
            return done

        return self._answer(act)

    def annotate(self, key: ChunkKey, *args: Any, **kwargs: Any) -> NodeRecord | None:
        return self._changed(lambda: self.shared.annotate(key, *args, **kwargs))

    def unpin(self, key: ChunkKey) -> NodeRecord | None:
        return self._changed(lambda: self.shared.unpin(key))

    def remove(self, key: ChunkKey) -> tuple[NodeRecord, ...]:
        return self._removed(lambda: self.shared.remove(key))

    def evict(self, records: Sequence[NodeRecord]) -> tuple[NodeRecord, ...]:
        return self._removed(lambda: self.shared.evict(records))

    def expire(self, now_ms: int, limit: int) -> tuple[NodeRecord, ...]:
        return self._removed(lambda: self.shared.expire(now_ms, limit))

    def invalidate(self, doc_id: str, owner: str, limit: int) -> tuple[NodeRecord, ...]:
        return self._removed(lambda: self.shared.invalidate(doc_id, owner, limit))

    def clear(
        self, limit: int, owner: str | None = None, model: str | None = None
    ) -> tuple[NodeRecord, ...]:
        return self._removed(lambda: self.shared.clear(limit, owner, model))

    def _announce(self, is_new: bool, records: Sequence[NodeRecord]) -> None:
        self.publisher.announce(self, is_new, [record.key for record in records])

    def _changed(self, act: Callable[[], NodeRecord | None]) -> NodeRecord | None:
        def announced() -> NodeRecord | None:
            record = act()
            self._announce(True, [record] if record else [])
            return record

        return self._answer(announced)

    def _removed(self, act: Callable[[], tuple[NodeRecord, ...]]) -> tuple[NodeRecord, ...]:
        def announced() -> tuple[NodeRecord, ...]:
            left = act()
            self._announce(False, left)
            return left

        return self._answer(announced)

    def _answer(self, act: Callable[[], Any]) -> Any:
        if self.is_down:
            raise IndexUnavailable("down")
        answer = act()
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return answer


class World:
    """A shared index, a client with a near index, and another client without one."""

    def __init__(self, max_entries: int = 1000, echoes: bool = False) -> None:
        self.shared = MemoryIndex()
        self.publisher = Publisher(echoes)
        self.client = Client(self.shared, self.publisher)
        self.other = Client(self.shared, self.publisher)
        changes = Subscription(self.publisher, self.client)
        self.near = NearIndex(self.client, changes, max_entries, NEGATIVE_MS, POSITIVE_MS)

    def publish(self, *names: str, now_ms: int = 0, **fields: Any) -> None:
        """Publish as the other client does; it is heard at once."""
        for name in names:
            assert self.other.publish(record(name, **fields), now_ms) is Publication.STORED
        self.publisher.deliver()


@pytest.fixture
def world() -> World:
    return World()


def record(name: str, **fields: Any) -> NodeRecord:
    return node_record(name, PARENTS[name], **fields)


def path(name: str) -> list[ChunkKey]:
    """Keys from the top down to `name`."""
    parent = PARENTS[name]
    return [*(path(parent) if parent else []), named_key(name)]


def known(near: NearIndex, name: str, now_ms: int = 0) -> tuple[int, PathEnd]:
    """Hits of a path, and why they end, without asking."""
    result = near.lookup([path(name)], now_ms)
    return len(result.hits[0]), result.ends[0]


def match(near: NearIndex, *names: str, now_ms: int = 0) -> list[int]:
    return [len(run) for run in near.match([path(name) for name in names], now_ms)]


def test_a_known_path_is_not_asked_for_again(world: World) -> None:
    world.publish("a", "a1")
    first = world.near.match([path("a1")], 0)
    assert [r.key for r in first[0]] == path("a1")
    assert world.near.match([path("a1")], 1) == first
    assert len(world.client.questions) == 1


def test_one_question_covers_all_unknown_paths_and_no_known_one(world: World) -> None:
    world.publish("a", "b")
    match(world.near, "a")
    assert match(world.near, "b1", "a", "c") == [1, 1, 0]
    assert world.client.questions[1:] == [[path("b1"), path("c")]]


def test_a_lookup_asks_nobody_and_says_why_hits_end(world: World) -> None:
    world.publish("a")
    world.publish("b", expires_ms=10)
    match(world.near, "a1", "b")
    world.client.is_down = True
    paths = [path("a"), path("a2"), path("b"), path("c"), []]
    result = world.near.lookup(paths, 10)
    assert [len(run) for run in result.hits] == [1, 1, 0, 0, 0]
    ends = [PathEnd.ALL, PathEnd.ABSENT, PathEnd.EXPIRED, PathEnd.UNKNOWN, PathEnd.ALL]
    assert list(result.ends) == ends
    assert not result.is_complete
    assert world.near.lookup(paths[:3], 10).is_complete


def test_only_the_first_absent_key_of_a_path_is_remembered(world: World) -> None:
    world.publish("a")
    match(world.near, "a2")
    assert world.near.near_stats().num_entries == 2


def test_an_absent_key_is_asked_for_again_when_its_time_is_up(world: World) -> None:
    match(world.near, "a")
    world.shared.publish(record("a"), 0)  # nobody tells
    assert match(world.near, "a", now_ms=NEGATIVE_MS - 1) == [0]
    assert match(world.near, "a", now_ms=NEGATIVE_MS) == [1]


def test_a_record_is_asked_for_again_when_its_time_is_up(world: World) -> None:
    world.publish("a")
    match(world.near, "a")
    world.shared.remove(named_key("a"))  # nobody tells
    assert match(world.near, "a", now_ms=POSITIVE_MS - 1) == [1]
    assert match(world.near, "a", now_ms=POSITIVE_MS) == [0]


def test_records_behind_a_gap_are_not_remembered(world: World) -> None:
    world.publish("a", "a1", "a2")
    match(world.near, "a2")
    world.shared.remove(named_key("a1"))  # nobody tells
    world.near.forget([named_key("a1")])
    assert match(world.near, "a2") == [1]
    world.shared.publish(record("a1"), 0)
    world.near.forget([named_key("a1")])
    assert match(world.near, "a1") == [2]
    assert known(world.near, "a2") == (2, PathEnd.UNKNOWN)


def test_a_clock_that_was_set_back_does_not_make_an_absence_last(world: World) -> None:
    match(world.near, "a", now_ms=FAR_MS)
    world.shared.publish(record("a"), 0)
    assert match(world.near, "a", now_ms=0) == [1]


def test_an_announced_publication_lifts_an_absence(world: World) -> None:
    match(world.near, "a")
    world.publish("a")
    assert match(world.near, "a") == [1]


def test_an_announced_removal_is_a_miss(world: World) -> None:
    world.publish("a", "a1", "b")
    match(world.near, "a1", "b")
    world.other.remove(named_key("a"))
    world.publisher.deliver()
    assert match(world.near, "a1", "b") == [0, 1]
    assert world.near.near_stats().num_invalidations == 2


def test_an_announced_new_record_replaces_the_old_one(world: World) -> None:
    world.publish("a")
    match(world.near, "a")
    world.other.annotate(named_key("a"), doc_ids=["d"])
    world.publisher.deliver()
    ((found,),) = world.near.match([path("a")], 0)
    assert found.doc_ids == ("d",)


def test_a_loss_forgets_everything(world: World) -> None:
    world.publish("a")
    match(world.near, "a", "b")
    world.other.remove(named_key("a"))
    world.other.publish(record("b"), 0)
    world.publisher.lose()
    assert world.near.near_stats().num_entries == 0
    assert match(world.near, "a", "b") == [0, 1]
    assert world.near.near_stats().num_losses == 1


def test_what_was_published_here_is_known_without_asking(world: World) -> None:
    match(world.near, "a")
    assert world.near.publish(record("a"), 0) is Publication.STORED
    assert known(world.near, "a") == (1, PathEnd.ALL)


def test_the_record_of_another_writer_is_asked_for(world: World) -> None:
    match(world.near, "a")
    world.shared.publish(record("a", checksum=7), 0)
    assert world.near.publish(record("a", checksum=8), 0) is Publication.PRESENT
    ((found,),) = world.near.match([path("a")], 0)
    assert found.checksum == 7


def test_an_orphan_makes_its_parent_unknown(world: World) -> None:
    world.publish("a")
    match(world.near, "a")
    world.shared.remove(named_key("a"))
    assert world.near.publish(record("a1"), 0) is Publication.ORPHAN
    assert known(world.near, "a") == (0, PathEnd.UNKNOWN)


REMOVALS: dict[str, Callable[[NearIndex], Any]] = {
    "remove": lambda near: near.remove(named_key("a")),
    "evict": lambda near: near.evict(near.victims(200, "", is_own=True)),
    "expire": lambda near: near.expire(50, limit=10),
    "invalidate": lambda near: near.invalidate("d", "", limit=10),
    "clear": lambda near: near.clear(limit=10),
}


@pytest.mark.parametrize("echoes", [False, True])
@pytest.mark.parametrize("removal", REMOVALS)
def test_what_was_removed_here_is_known_to_be_absent(removal: str, echoes: bool) -> None:
    """Also where the announcement of the removal comes back before the answer."""
    world = World(echoes=echoes)
    world.publish("a", "a1", expires_ms=50, doc_ids=("d",))
    assert match(world.near, "a1") == [2]
    world.client.meanwhile = world.publisher.deliver
    left = REMOVALS[removal](world.near)
    assert {r.key for r in left} == set(path("a1"))
    assert known(world.near, "a1") == (0, PathEnd.ABSENT)


def test_annotations_made_here_are_known_without_asking(world: World) -> None:
    world.publish("a")
    world.near.annotate(named_key("a"), ["d"], expires_ms=9, pinned=True)
    (found,) = world.near.lookup([path("a")], 0).hits[0]
    assert (found.doc_ids, found.pinned) == (("d",), True)
    world.near.unpin(named_key("a"))
    (found,) = world.near.lookup([path("a")], 0).hits[0]
    assert not found.pinned
    assert world.near.annotate(named_key("b"), ["d"]) is None
    assert known(world.near, "b") == (0, PathEnd.ABSENT)


def test_a_lost_payload_is_a_miss_from_then_on_even_if_the_remote_is_down(world: World) -> None:
    """The time starts when it is next looked for, however long the payload was waited for."""
    world.publish("a")
    match(world.near, "a")
    world.client.is_down = True
    with pytest.raises(IndexUnavailable):
        world.near.remove(named_key("a"))
    assert match(world.near, "a", now_ms=FAR_MS) == [0]
    assert known(world.near, "a", FAR_MS + NEGATIVE_MS - 1) == (0, PathEnd.ABSENT)
    assert known(world.near, "a", FAR_MS + NEGATIVE_MS) == (0, PathEnd.UNKNOWN)


def test_a_failed_call_leaves_no_false_knowledge(world: World) -> None:
    world.publish("a")
    match(world.near, "a", "b")
    world.client.is_down = True
    with pytest.raises(IndexUnavailable):
        world.near.publish(record("b"), 0)
    with pytest.raises(IndexUnavailable):
        world.near.evict([record("a")])
    assert known(world.near, "a") == known(world.near, "b") == (0, PathEnd.UNKNOWN)


def test_without_the_remote_known_hits_are_served_and_the_rest_are_misses(world: World) -> None:
    world.publish("a", "a1", "b")
    match(world.near, "a", "b")
    world.client.is_down = True
    assert match(world.near, "a1", "b", "c") == [1, 1, 0]
    result = world.near.find([path("a1"), path("b")], 0)
    assert not result.is_complete
    assert isinstance(result.failure, IndexUnavailable)
    assert world.near.find([path("b")], 0).is_complete
    stats = world.near.near_stats()
    assert (stats.num_remote_lookups, stats.num_failures) == (3, 2)


def test_without_the_remote_a_match_of_nothing_known_fails(world: World) -> None:
    world.client.is_down = True
    with pytest.raises(IndexUnavailable):
        match(world.near, "a", "b")


def test_a_removal_announced_during_a_question_is_not_overlooked(world: World) -> None:
    world.publish("a", "b")

    def meanwhile() -> None:
        world.other.remove(named_key("a"))
        world.publisher.deliver()

    world.client.meanwhile = meanwhile
    assert match(world.near, "a", "b") == [1, 1]  # what was true when it was asked
    assert known(world.near, "a") == (0, PathEnd.UNKNOWN)
    assert known(world.near, "b") == (1, PathEnd.ALL)


def test_a_publication_announced_during_a_question_is_not_overlooked(world: World) -> None:
    world.client.meanwhile = lambda: world.publish("a")
    assert match(world.near, "a", "b") == [0, 0]
    assert known(world.near, "a") == (0, PathEnd.UNKNOWN)
    assert known(world.near, "b") == (0, PathEnd.ABSENT)


def test_own_changes_during_a_question_are_not_overlooked(world: World) -> None:
    """Two threads of one server; nothing is announced to itself."""
    world.publish("a")

    def meanwhile() -> None:
        world.near.remove(named_key("a"))
        world.near.publish(record("b"), 0)

    world.client.meanwhile = meanwhile
    assert match(world.near, "a", "b") == [1, 0]
    assert known(world.near, "a") == (0, PathEnd.ABSENT)
    assert known(world.near, "b") == (1, PathEnd.ALL)


def test_a_loss_during_a_question_leaves_nothing_known(world: World) -> None:
    world.publish("a")
    world.client.meanwhile = world.publisher.lose
    assert match(world.near, "a", "b") == [1, 0]
    assert world.near.near_stats().num_entries == 0


def test_more_changes_than_are_kept_in_mind_put_an_answer_in_doubt(world: World) -> None:
    world.publish("a")

    def meanwhile() -> None:
        world.other.remove(named_key("a"))
        many = [named_key(f"x{i}") for i in range(20_000)]
        world.publisher.announce(world.other, False, many)
        world.publisher.deliver()

    world.client.meanwhile = meanwhile
    assert match(world.near, "a") == [1]
    assert known(world.near, "a") == (0, PathEnd.UNKNOWN)
    world.publish("b")
    match(world.near, "b")
    assert known(world.near, "b") == (1, PathEnd.ALL)  # asked after all of them


def test_a_removal_by_others_during_an_own_publication_is_not_overlooked(world: World) -> None:
    def meanwhile() -> None:
        world.other.remove(named_key("a"))
        world.publisher.deliver()

    world.client.meanwhile = meanwhile
    assert world.near.publish(record("a"), 0) is Publication.STORED
    assert known(world.near, "a") == (0, PathEnd.UNKNOWN)


def test_a_publication_by_others_during_an_own_removal_is_not_overlooked(world: World) -> None:
    world.publish("a")
    world.client.meanwhile = lambda: world.publish("a")
    world.near.remove(named_key("a"))
    assert known(world.near, "a") == (0, PathEnd.UNKNOWN)


def test_no_lock_is_held_during_a_question(world: World) -> None:
    world.publish("a")
    match(world.near, "a")
    found: list[tuple[int, PathEnd]] = []

    def meanwhile() -> None:
        thread = Thread(target=lambda: found.append(known(world.near, "a")), daemon=True)
        thread.start()
        thread.join(10)

    world.client.meanwhile = meanwhile
    match(world.near, "b")
    assert found == [(1, PathEnd.ALL)]


def test_forgotten_keys_are_asked_for(world: World) -> None:
    world.publish("a")
    match(world.near, "a", "b")
    world.near.forget([*path("a"), *path("b")])
    assert known(world.near, "a") == known(world.near, "b") == (0, PathEnd.UNKNOWN)
    assert world.shared.show(named_key("a")) is not None


def test_the_longest_unused_keys_are_forgotten_first() -> None:
    world = World(max_entries=2)
    world.publish("a", "b", "c")
    match(world.near, "a", "b")
    known(world.near, "a")
    match(world.near, "c")
    assert known(world.near, "b") == (0, PathEnd.UNKNOWN)
    assert known(world.near, "a") == known(world.near, "c") == (1, PathEnd.ALL)
    world.near.check_integrity()


@pytest.mark.parametrize("now_ms", [0, 1])
def test_absent_keys_do_not_make_the_memory_grow(now_ms: int) -> None:
    world = World(max_entries=10)
    for i in range(100):
        world.near.match([[named_key(f"x{i}")]], now_ms)
        world.near.remove(named_key(f"y{i}"))
    assert world.near.near_stats().num_entries == 10


def test_hits_without_a_question_reach_the_statistics_and_asked_ones_are_not_counted_twice(
    world: World,
) -> None:
    world.publish("a", "a1", "b")
    match(world.near, "a", "b")
    assert world.client.touched == []  # the index counted them when it was asked
    match(world.near, "a1", "b")
    assert world.client.touched == path("b")
    world.client.is_down = True
    match(world.near, "a2", now_ms=POSITIVE_MS - 1)
    assert world.client.touched == [*path("b"), *path("a1")]
    known(world.near, "a")
    assert len(world.client.touched) == 3  # who only looks reports by `touch`
    world.near.flush()
    assert world.client.num_flushes == 1


def test_a_near_index_is_itself_a_remote_index_whatever_is_behind_it(world: World) -> None:
    near = NearIndex(MemoryIndex(), None)
    near.publish(record("a"), 0)
    assert match(near, "a") == [1]
    near.flush()
    assert isinstance(near, RemoteIndex)
    assert not isinstance(MemoryIndex(), RemoteIndex)


def test_counters_tell_what_was_answered_here(world: World) -> None:
    world.publish("a", "a1")
    match(world.near, "a1", "b")
    match(world.near, "a1", "b")
    stats = world.near.near_stats()
    assert (stats.num_entries, stats.num_hits, stats.num_negative_hits) == (3, 2, 1)
    assert (stats.num_remote_lookups, stats.num_failures) == (1, 0)


def test_a_closed_near_index_knows_nothing_and_listens_no_more(world: World) -> None:
    world.publish("a")
    match(world.near, "a")
    world.near.close()
    assert known(world.near, "a") == (0, PathEnd.UNKNOWN)
    assert world.publisher.subscriptions == []


def test_threads_that_change_and_match_at_once_end_in_agreement() -> None:
    world = World()
    names = sorted(PARENTS)

    def act(seed: int) -> None:
        rng = Random(seed)
        for _ in range(400):
            name = rng.choice(names)
            index = rng.choice([world.near, world.other])
            match(world.near, *rng.sample(names, 3))
            index.publish(record(name), 0) if rng.random() < 0.7 else index.remove(named_key(name))
            if seed == 0:
                world.publisher.deliver()

    threads = [Thread(target=act, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    world.publisher.deliver()
    assert_agrees(world.near, world.shared, 0)


def assert_agrees(near: NearIndex, shared: MemoryIndex, now_ms: int) -> None:
    paths = [path(name) for name in PARENTS]
    assert near.match(paths, now_ms) == shared.match(paths, now_ms)
    near.check_integrity()


class NearMachine(RuleBasedStateMachine):
    """Three clients of one index, two of them with a near index, in any interleaving."""

    max_entries = 100
    echoes = False
    names = st.sampled_from(sorted(PARENTS))

    def __init__(self) -> None:
        super().__init__()
        self.shared = MemoryIndex()
        self.publisher = Publisher(self.echoes)
        self.clients = [Client(self.shared, self.publisher) for _ in range(3)]
        self.nears = [self.make_near(client) for client in self.clients[:2]]
        self.indexes: list[Any] = [*self.nears, self.clients[2]]
        self.now_ms = 0

    def make_near(self, client: Client) -> NearIndex:
        changes = Subscription(self.publisher, client)
        return NearIndex(client, changes, self.max_entries, FAR_MS, FAR_MS)

    def change(self, data: st.DataObject) -> None:
        """One change by any client."""
        index = data.draw(st.sampled_from(self.indexes))
        name = data.draw(self.names)
        kinds = ["publish"] * 4 + ["remove", "annotate", "unpin", "evict", "rest"]
        kind = data.draw(st.sampled_from(kinds))
        if kind == "publish":
            expires_ms = data.draw(st.sampled_from([None, None, self.now_ms + 2]))
            fields = {"checksum": data.draw(st.integers(0, 9)), "expires_ms": expires_ms}
            index.publish(record(name, doc_ids=(name[0],), **fields), self.now_ms)
        elif kind == "annotate":
            pinned = data.draw(st.booleans())
            index.annotate(named_key(name), ["d"], self.now_ms + 3, pinned=pinned)
        elif kind == "evict":
            index.evict(index.victims(data.draw(st.integers(1, 400)), "", is_own=True))
        elif kind == "rest":
            self.change_many(index, name, data.draw(st.integers(0, 3)))
        else:
            getattr(index, kind)(named_key(name))

    def change_many(self, index: Any, name: str, which: int) -> None:
        if which == 0:
            index.clear(limit=100)
        elif which == 1:
            index.invalidate(name[0], "", limit=100)
        else:
            index.expire(self.now_ms, limit=100)

    @rule(data=st.data())
    def change_something(self, data: st.DataObject) -> None:
        self.change(data)

    @rule(near=st.integers(0, 1), names=st.lists(names, min_size=1, max_size=4))
    def match(self, near: int, names: list[str]) -> None:
        match(self.nears[near], *names, now_ms=self.now_ms)

    @rule(near=st.integers(0, 1), name=names, heard=st.integers(0, 5), data=st.data())
    def change_during_the_next_call(
        self, near: int, name: str, heard: int, data: st.DataObject
    ) -> None:
        def meanwhile() -> None:
            self.change(data)
            self.publisher.deliver(heard)

        self.clients[near].meanwhile = meanwhile
        match(self.nears[near], name, now_ms=self.now_ms)

    @rule(heard=st.integers(1, 5))
    def hear(self, heard: int) -> None:
        self.publisher.deliver(heard)

    @rule()
    def lose(self) -> None:
        self.publisher.lose()

    @rule()
    def time_passes(self) -> None:
        self.now_ms += 1

    @rule()
    def agrees_when_all_is_heard(self) -> None:
        self.publisher.deliver()
        for client in self.clients:
            client.meanwhile = None
        for near in self.nears:
            assert_agrees(near, self.shared, self.now_ms)

    def teardown(self) -> None:
        self.agrees_when_all_is_heard()


class EchoMachine(NearMachine):
    """As `NearMachine`; clients hear of their own changes too."""

    echoes = True


class SmallMachine(NearMachine):
    """As `NearMachine`, with room for three keys."""

    max_entries = 3


MACHINE_SETTINGS = settings(
    max_examples=150, stateful_step_count=30, deadline=None, derandomize=True
)
TestNearMachine = NearMachine.TestCase
TestEchoMachine = EchoMachine.TestCase
TestSmallMachine = SmallMachine.TestCase
for machine in (TestNearMachine, TestEchoMachine, TestSmallMachine):
    machine.settings = MACHINE_SETTINGS
