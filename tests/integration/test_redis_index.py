"""What the shared index promises beyond `ChunkIndex`: several processes, full and foreign servers.

A name's first letter is the key's spread byte: names of one chunk share it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from random import Random
from threading import Barrier

import pytest

from sglang_ext.chunk_index import keys, policy
from sglang_ext.chunk_index.codec import StoredNode, decode_node, encode_record
from sglang_ext.chunk_index.identity import ChunkKey, owner_id
from sglang_ext.chunk_index.index import (
    NodeRecord,
    Publication,
    Reservation,
    Shortage,
    Usage,
)
from sglang_ext.chunk_index.near_index import Changes, RemoteIndex
from sglang_ext.chunk_index.redis_index import BATCH, RedisIndex
from sglang_ext.chunk_index.redis_link import RedisLink
from sglang_ext.chunk_index.redis_scripts import MAX_LIFTS, START_AGE_US
from sglang_ext.errors import IndexUnavailable
from tests.redis_server import (
    RedisServer,
    open_link,
    redis_server,
    shared_cluster,
    shared_link,
    shared_server,
    wait_until,
)
from tests.strategies import named_key, node_record, record_names

pytestmark = pytest.mark.redis

HEARD_S = 10.0
HASTY = {"deadline_ms": 300, "background_deadline_ms": 300}
ME, YOU = owner_id("me", b"secret"), owner_id("you", b"secret")
CHAIN = (node_record("a"), node_record("a1", "a"), node_record("a2", "a1"))


@pytest.fixture
def server() -> RedisServer:
    """The server of all tests, empty."""
    running = shared_server("tcp")
    running.cli("FLUSHALL")
    return running


@pytest.fixture
def link(server: RedisServer) -> RedisLink:
    return shared_link(server.url)


@pytest.fixture
def index(link: RedisLink) -> Iterator[RedisIndex]:
    """Checked at the end of a test that did not fail on its own."""
    index = RedisIndex(link)
    yield index
    index.check_integrity()


def publish(index: RedisIndex, *records: NodeRecord) -> None:
    for record in records:
        assert index.publish(record, now_ms=0) is Publication.STORED


def match(index: RedisIndex, *names: str, now_ms: int = 0) -> list[str]:
    (found,) = index.match([[named_key(name) for name in names]], now_ms)
    return record_names(found)


def long_chunk(length: int, **fields: object) -> list[NodeRecord]:
    """Segments of one chunk, each below the one before."""
    names = [f"a{number}" for number in range(length)]
    return [
        node_record(name, above, **fields)
        for above, name in zip([None, *names], names, strict=False)
    ]


def stored(link: RedisLink, name: str) -> StoredNode:
    key = named_key(name)
    value = link.call("GET", keys.node_key(key))
    assert isinstance(value, bytes)
    node = decode_node(key, value)
    assert node is not None
    return node


class TestPorts:
    def test_it_is_what_a_near_index_asks(self, index: RedisIndex) -> None:
        changes: Changes = index.changes
        assert isinstance(index, RemoteIndex)
        assert changes is index.changes


class TestKeys:
    def test_all_keys_begin_with_the_version(self, index: RedisIndex, server: RedisServer) -> None:
        index.set_quota(ME, 1000)
        index.reserve(ME, 100, now_ms=0)
        record = node_record("a", owner=ME, doc_ids=("d@1",), expires_ms=9)
        publish(index, record, node_record("a1", "a", pinned=True))
        index.heartbeat("server", "model", now_ms=0)
        names = server.cli("--scan").splitlines()
        assert len(names) >= 14
        assert all(name.startswith("pic1:") for name in names)

    def test_nothing_of_a_node_stays_behind(self, index: RedisIndex, link: RedisLink) -> None:
        record = node_record("a", owner=ME, doc_ids=("d@1",), expires_ms=9)
        publish(index, record, node_record("a1", "a", pinned=True, doc_ids=("e",)))
        index.remove(named_key("a"))
        assert set(link.background().scan_keys(b"*")) <= {
            keys.totals_key(keys.shard_of(named_key("a"))),
            keys.OWNERS,
        }

    def test_an_entry_takes_less_than_400_bytes(self, server: RedisServer) -> None:
        with redis_server() as empty, open_link(empty.url) as link:
            index = RedisIndex(link)
            random = Random(1)
            before = used_memory(empty)
            num_nodes = 4096
            for _ in range(num_nodes):
                key = ChunkKey(random.randbytes(17))
                record = NodeRecord(key, None, 256, 8 << 20, random.getrandbits(64), 1, owner=ME)
                assert index.publish(record, 1) is Publication.STORED
            assert (used_memory(empty) - before) / num_nodes < 400


def used_memory(server: RedisServer) -> int:
    (line,) = [x for x in server.cli("INFO", "memory").splitlines() if x.startswith("used_memory:")]
    return int(line.partition(":")[2])


class TestForeignKeys:
    @pytest.mark.parametrize("value", ["garbage", "", "PIC", "PIC\x02" + "x" * 200, "x" * 100_000])
    def test_foreign_values_are_misses_and_stay(
        self, index: RedisIndex, link: RedisLink, value: str
    ) -> None:
        publish(index, *CHAIN)
        name = keys.node_key(named_key("b"))
        link.call("SET", name, value)
        assert match(index, "b") == []
        assert index.show(named_key("b")) is None
        assert index.publish(node_record("b"), now_ms=0) is Publication.BUSY
        assert index.publish(node_record("b1", "b"), now_ms=0) is Publication.ORPHAN
        assert index.annotate(named_key("b"), ["d"], pinned=True) is None
        assert index.unpin(named_key("b")) is None
        assert index.remove(named_key("b")) == ()
        assert index.evict([node_record("b")]) == ()
        assert link.call("GET", name) == value.encode()
        assert match(index, "a", "a1", "a2") == ["a", "a1", "a2"]

    def test_keys_of_another_type_are_misses_and_stay(
        self, index: RedisIndex, link: RedisLink
    ) -> None:
        publish(index, *CHAIN)
        name = keys.node_key(named_key("b"))
        link.call("LPUSH", name, "x")
        (found,) = index.match([[named_key("b")]], now_ms=0)
        assert found == ()
        assert index.publish(node_record("b"), now_ms=0) is Publication.BUSY
        assert index.remove(named_key("b")) == ()
        assert link.call("TYPE", name) == b"list"
        assert link.is_available

    def test_another_version_beside_it_is_left_alone(
        self, index: RedisIndex, link: RedisLink
    ) -> None:
        publish(index, *CHAIN)
        link.call("SET", "pic2:{21}:n:" + "a" * 17, "x")
        link.call("SET", "other application", "x")
        while index.clear(limit=100):
            pass
        assert link.call("EXISTS", "pic2:{21}:n:" + "a" * 17) == 1
        assert link.call("EXISTS", "other application") == 1

    def test_nodes_deleted_by_hand_end_no_walk(self, link: RedisLink) -> None:
        index = RedisIndex(link)
        publish(index, *CHAIN, node_record("a3", "a"), node_record("b"), node_record("b1", "b"))
        link.call("UNLINK", keys.node_key(named_key("a1")))  # a parent and sibling
        link.call("UNLINK", keys.node_key(named_key("b1")))  # a child
        assert match(index, "a", "a1", "a2") == ["a"]
        publish(index, node_record("a4", "a"))
        assert "b1" not in record_names(index.victims(400, "", is_own=False))
        assert {"a", "a4"} <= set(record_names(index.remove(named_key("a"))))
        assert record_names(index.remove(named_key("b"))) == ["b"]
        left = [name for _ in range(9) for name in record_names(index.clear(limit=10))]
        assert set(left) <= {"a2", "a3"}
        assert list(index.scan()) == []


class TestScripts:
    def test_scripts_that_the_server_forgot_are_sent_again(
        self, index: RedisIndex, server: RedisServer
    ) -> None:
        for name in ("a", "b", "c"):
            server.cli("SCRIPT", "FLUSH")
            publish(index, node_record(name))
            index.reserve("", 1, now_ms=0)
        server.cli("SCRIPT", "FLUSH")
        assert len(index.evict(index.victims(300, "", is_own=False))) == 3

    def test_priorities_are_those_of_the_policy(self, index: RedisIndex, link: RedisLink) -> None:
        publish(index, node_record("a", compute_us=1000), node_record("b", compute_us=1500))
        for _ in range(2):
            match(index, "a")
        index.flush()
        mean = policy.smoothed(1000 / 100, 1500 / 100)
        for name, num_hits, compute_us in (("a", 2, 1000), ("b", 0, 1500)):
            node = stored(link, name)
            assert node.num_hits == num_hits
            extra = node.priority - node.last_use_us
            shard_mean = 10.0 if name == "a" else mean
            worth = policy.worth(compute_us, 100, shard_mean)
            assert extra == policy.bonus(num_hits, worth, START_AGE_US)

    def test_the_clock_of_a_shard_never_stands_still(
        self, index: RedisIndex, link: RedisLink
    ) -> None:
        publish(index, *(node_record(f"a{i}", payload_bytes=0) for i in range(50)))
        uses = [stored(link, f"a{i}").last_use_us for i in range(50)]
        assert all(before < after for before, after in pairwise(uses))
        assert abs(uses[0] / 1e6 - time.time()) < 60

    def test_a_servers_clock_that_goes_back_does_not_reorder_uses(
        self, index: RedisIndex, link: RedisLink
    ) -> None:
        ahead = int((time.time() + 3600) * 1e6)
        name = keys.totals_key(keys.shard_of(named_key("a")))
        link.call("HSET", name, "last", ahead)  # as a server said before it failed over
        publish(index, node_record("a"), node_record("a1"))
        uses = [stored(link, each).last_use_us for each in ("a", "a1")]
        assert ahead < uses[0] < uses[1] < ahead + 1000

    def test_victims_teach_a_shard_how_long_unused_nodes_stay(
        self, index: RedisIndex, link: RedisLink
    ) -> None:
        publish(index, *(node_record(f"a{i}") for i in range(200)))
        name = keys.totals_key(keys.shard_of(named_key("a")))
        index.evict(index.victims(200 * 100, "", is_own=False))
        age = link.call("HGET", name, "age")
        assert isinstance(age, bytes)
        assert 0 < float(age) < START_AGE_US / 10  # they had been unused for milliseconds


class TestLongChunks:
    def test_a_chunk_longer_than_any_batch_is_removed_as_a_whole(self, index: RedisIndex) -> None:
        chunk = long_chunk(3 * BATCH)
        publish(index, *chunk)
        left = record_names(index.remove(named_key("a0")))
        assert left == record_names(chunk)[::-1]
        assert index.stats().num_nodes == 0

    def test_a_node_with_more_children_than_a_batch_is_removed_as_a_whole(
        self, index: RedisIndex
    ) -> None:
        children = [node_record(f"a{i}", "a") for i in range(3 * BATCH)]
        publish(index, node_record("a"), *children)
        left = record_names(index.remove(named_key("a")))
        assert left[-1] == "a"
        assert sorted(left[:-1]) == sorted(record_names(children))

    def test_what_is_being_removed_is_no_hit_takes_no_child_and_goes_with_expiry(
        self, index: RedisIndex
    ) -> None:
        top, *chunk = long_chunk(BATCH)
        publish(index, replace(top, doc_ids=("d",)), *chunk)
        assert record_names(index.invalidate("d", "", limit=4)) == ["a63", "a62", "a61", "a60"]
        index.check_integrity()
        assert match(index, "a0", "a1") == []
        assert index.show(top.key) is None
        assert index.publish(node_record("a!", "a0"), now_ms=0) is Publication.ORPHAN
        assert index.publish(top, now_ms=0) is Publication.BUSY
        assert index.annotate(top.key, pinned=True) is None
        left: list[str] = []
        while records := index.expire(now_ms=0, limit=7):  # another process goes on
            left += record_names(records)
            index.check_integrity()
        assert left == [f"a{number}" for number in range(59, -1, -1)]
        assert index.stats().num_nodes == 0

    def test_a_chunk_longer_than_priorities_are_lifted_is_evicted_leaf_first(
        self, index: RedisIndex
    ) -> None:
        chunk = long_chunk(2 * MAX_LIFTS + 9)
        publish(index, *chunk, node_record("b"))
        plan = index.victims(len(chunk) * 100 + 100, "", is_own=False)
        names = record_names(plan)
        assert [name for name in names if name != "b"] == record_names(chunk)[::-1]
        assert record_names(index.evict(plan)) == names

    def test_a_hit_of_a_long_chunk_keeps_all_of_it(self, index: RedisIndex) -> None:
        chunk = long_chunk(2 * BATCH)
        publish(index, *chunk, node_record("b"))
        index.match([[record.key for record in chunk]], now_ms=0)
        index.flush()
        plan = record_names(index.victims(len(chunk) * 100 + 100, "", is_own=False))
        assert plan == ["b", *record_names(chunk)[::-1]]


class TestDocuments:
    def test_documents_of_any_name_are_found_as_everywhere(self, index: RedisIndex) -> None:
        names = ("@", "a@", "@b", "a@b@c", "x\0y@1", "line\n@1", "ü@1", "\ud800@1", "", "a" * 9000)
        publish(index, node_record("a", doc_ids=names))
        index.check_integrity()  # compares with `document_names`
        assert index.annotate(named_key("a"), ["z@1", "a@b"]) is not None
        index.check_integrity()
        assert record_names(index.invalidate("\ud800", "", limit=9)) == ["a"]

    @pytest.mark.parametrize("offset", [105, 120, 125, 140, 148, 149, 150])
    def test_a_damaged_record_is_a_miss_and_hides_nothing(
        self, link: RedisLink, offset: int
    ) -> None:
        index = RedisIndex(link)
        publish(index, *CHAIN, node_record("b"))
        name = keys.node_key(named_key("a2"))
        link.call("SETRANGE", name, offset, b"\xfe")  # in its body, so that the CRC is wrong
        assert match(index, "a", "a1", "a2") == ["a", "a1"]
        assert index.show(named_key("a2")) is None
        assert record_names(index.remove(named_key("a"))) == ["a1", "a"]
        assert record_names(index.clear(limit=9)) == ["b"]


class TestStatistics:
    def test_hits_are_written_by_flush_and_not_before(self, index: RedisIndex) -> None:
        publish(index, *CHAIN)
        match(index, "a", "a1", now_ms=5)
        index.touch([named_key("a")], now_ms=9)
        before = index.show(named_key("a"))
        index.flush()
        after = index.show(named_key("a"))
        assert before is not None
        assert after is not None
        assert (before.num_hits, before.last_hit_ms) == (0, None)
        assert (after.num_hits, after.last_hit_ms) == (2, 9)

    def test_hits_of_nodes_that_left_are_lost_without_harm(self, index: RedisIndex) -> None:
        publish(index, *CHAIN)
        match(index, "a", "a1", "a2")
        index.remove(named_key("a1"))
        index.flush()
        assert match(index, "a", "a1") == ["a"]

    def test_hits_that_cannot_be_written_are_told_and_forgotten(self) -> None:
        with redis_server() as server, open_link(server.url, background_deadline_ms=100) as link:
            index = RedisIndex(link)
            publish(index, *CHAIN)
            match(index, "a")
            server.pause()
            with pytest.raises(IndexUnavailable):
                index.flush()
            server.resume()
            assert link.wait_available(HEARD_S)
            index.flush()


class TestPayloadValues:
    def test_a_value_stays_with_its_record_and_goes_with_it(
        self, index: RedisIndex, link: RedisLink
    ) -> None:
        record = node_record("a", checksum=2**63 + 5)
        name = keys.value_key(record.key, record.checksum)
        link.call("SET", name, "payload", "EX", keys.VALUE_S)
        publish(index, record)
        assert link.call("TTL", name) == -1
        index.remove(record.key)
        assert link.call("EXISTS", name) == 0

    def test_a_value_put_again_by_another_writer_of_the_same_bytes_stays(
        self, index: RedisIndex, link: RedisLink
    ) -> None:
        record = node_record("a", checksum=7)
        name = keys.value_key(record.key, record.checksum)
        publish(index, record)
        link.call("SET", name, "payload", "EX", keys.VALUE_S)
        assert index.publish(record, now_ms=0) is Publication.PRESENT
        assert link.call("TTL", name) == -1

    def test_a_value_of_other_bytes_ends_by_itself(
        self, index: RedisIndex, link: RedisLink
    ) -> None:
        publish(index, node_record("a", checksum=7))
        other = node_record("a", checksum=8)
        name = keys.value_key(other.key, other.checksum)
        link.call("SET", name, "payload", "EX", keys.VALUE_S)
        assert index.publish(other, now_ms=0) is Publication.PRESENT
        assert 0 < int(str(link.call("TTL", name))) <= keys.VALUE_S


class TestAccounts:
    def test_a_reservation_whose_process_died_ends_by_itself(self, link: RedisLink) -> None:
        index = RedisIndex(link, budget_bytes=100)
        assert isinstance(index.reserve(ME, 100, now_ms=0), Reservation)
        soon = keys.RESERVATION_S * 1000
        assert index.reserve(YOU, 1, now_ms=soon - 1) == Shortage(1, is_own=False)
        assert isinstance(index.reserve(YOU, 100, now_ms=soon), Reservation)

    def test_a_reservation_that_ended_is_not_given_back_twice(self, link: RedisLink) -> None:
        index = RedisIndex(link, budget_bytes=100)
        late = index.reserve(ME, 100, now_ms=0)
        assert isinstance(late, Reservation)
        in_time = index.reserve(ME, 100, now_ms=keys.RESERVATION_S * 1000)
        assert isinstance(in_time, Reservation)
        index.cancel(late)
        assert index.stats().reserved_bytes == 100
        assert index.publish(node_record("a", owner=ME), 0, late) is Publication.STORED
        assert index.stats().reserved_bytes == 100
        index.cancel(in_time)
        index.check_integrity()

    def test_accounts_that_a_crash_left_wrong_are_recounted(
        self, link: RedisLink, server: RedisServer
    ) -> None:
        index = RedisIndex(link, budget_bytes=1000)
        index.set_quota(ME, 500)
        publish(index, node_record("a", owner=ME), node_record("b", owner=YOU))
        assert isinstance(index.reserve(ME, 50, now_ms=int(time.time() * 1000)), Reservation)
        account = keys.account_key(ME).decode()
        server.cli("HINCRBY", account, "used", "300")  # removed, and not given back
        server.cli("UNLINK", keys.account_key(YOU).decode())  # published, and not counted
        server.cli("HINCRBY", keys.ALL_ACCOUNT.decode(), "used", "-100")
        with pytest.raises(AssertionError):
            index.check_integrity()
        assert index.reserve(ME, 200, now_ms=0) == Shortage(150, is_own=True)
        assert index.reconcile() == 3
        index.check_integrity()
        assert index.reconcile() == 0
        assert isinstance(index.reserve(ME, 200, now_ms=0), Reservation)
        assert index.usage()[ME] == Usage(1, 100, 500)

    def test_an_account_without_anything_is_forgotten(
        self, index: RedisIndex, link: RedisLink
    ) -> None:
        publish(index, node_record("a", owner=ME))
        index.remove(named_key("a"))
        index.reconcile()
        assert list(link.background().scan_keys(b"pic1:{a*")) == []
        assert link.call("EXISTS", keys.OWNERS) == 0

    def test_recounting_ends_reservations_whose_time_is_up(self, index: RedisIndex) -> None:
        index.reserve(ME, 70, now_ms=0)  # long ago by the clock of Redis
        assert index.stats().reserved_bytes == 70
        index.reconcile()
        assert index.stats().reserved_bytes == 0


class TestManyOwners:
    def test_victims_are_found_among_more_queues_than_are_looked_at(self, link: RedisLink) -> None:
        index = RedisIndex(link)
        for number in range(40):
            for letter in "abcdefgh":
                publish(index, node_record(f"{letter}{number}", owner=f"owner-{number}"))
        plan = index.victims(10 * 100, "owner-0", is_own=False)
        assert len(plan) == 10
        assert len(index.victims(320 * 100, "owner-0", is_own=False)) == 320
        assert index.victims(320 * 100 + 1, "owner-0", is_own=False) == ()
        assert len(index.usage()) == 40
        assert len(index.clear(limit=1000)) == 320


class TestFullServer:
    def test_a_full_server_still_answers_and_can_be_emptied(self) -> None:
        options = ("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
        with redis_server(*options) as server, open_link(server.url) as link:
            index = RedisIndex(link)
            publish(index, *CHAIN, node_record("p", pinned=True, doc_ids=("d",)))
            granted = index.reserve("", 10, now_ms=0)
            assert isinstance(granted, Reservation)
            server.cli("CONFIG", "SET", "maxmemory", "1")
            with pytest.raises(IndexUnavailable, match="full: OOM"):
                index.publish(node_record("b"), now_ms=0)
            with pytest.raises(IndexUnavailable, match="full: OOM"):
                index.reserve("", 10, now_ms=0)
            assert match(index, "a", "a1", "a2") == ["a", "a1", "a2"]
            assert link.is_available  # full is no outage
            index.cancel(granted)
            assert record_names(index.evict(index.victims(100, "", is_own=False))) == ["a2"]
            assert record_names(index.remove(named_key("a"))) == ["a1", "a"]
            assert record_names(index.invalidate("d", "", limit=9)) == ["p"]
            server.cli("CONFIG", "SET", "maxmemory", "0")
            index.check_integrity()
            assert index.stats().reserved_bytes == 0
            publish(index, node_record("b"))


class TestOutage:
    def test_a_server_restarted_in_mid_use_is_an_empty_index(self) -> None:
        with redis_server() as server, open_link(server.url, probe_s=0.2) as link:
            index = RedisIndex(link, budget_bytes=1000)
            publish(index, *CHAIN)
            granted = index.reserve("", 100, now_ms=0)
            assert isinstance(granted, Reservation)
            server.restart()
            wait_until(lambda: _attempt(lambda: match(index, "a")) == [], HEARD_S)
            assert index.stats().num_nodes == 0
            publish(index, node_record("a"))
            assert index.publish(node_record("b"), 0, granted) is Publication.STORED
            index.check_integrity()

    def test_every_method_tells_that_redis_is_away(self) -> None:
        with redis_server() as server, open_link(server.url, **HASTY) as link:
            index = RedisIndex(link)
            publish(index, *CHAIN)
            plan = index.victims(100, "", is_own=False)
            match(index, "a")
            server.pause()
            key = named_key("a")
            calls = [
                lambda: match(index, "a"),
                lambda: index.reserve("", 1, 0),
                lambda: index.publish(node_record("b"), 0),
                lambda: index.annotate(key, ["d"]),
                lambda: index.unpin(key),
                lambda: index.show(key),
                lambda: list(index.scan()),
                lambda: index.remove(key),
                lambda: index.victims(1, "", is_own=False),
                lambda: index.evict(plan),
                lambda: index.expire(0, 1),
                lambda: index.invalidate("d", "", 1),
                lambda: index.clear(1),
                lambda: index.set_quota("", 1),
                lambda: index.usage(),
                lambda: index.stats(),
                lambda: index.flush(),
                lambda: index.reconcile(),
                lambda: index.heartbeat("s", "m", 0),
                lambda: index.servers(0),
            ]
            for call in calls:
                with pytest.raises(IndexUnavailable):
                    call()
            index.cancel(Reservation(bytes(16), "", 1))  # ends by itself
            server.resume()

    def test_what_left_is_returned_even_if_one_master_is_away(self) -> None:
        cluster = shared_cluster()
        for master in cluster.masters:
            master.cli("FLUSHALL")
        paused = cluster.masters[0]
        with open_link(cluster.url, background_deadline_ms=1000) as link:
            index = RedisIndex(link)
            keys_of_all_shards = [ChunkKey(bytes([first]) * 17) for first in range(64)]
            records = [NodeRecord(key, None, 1, 100, 0, 0) for key in keys_of_all_shards]
            publish(index, *records)
            plan = index.victims(6400, "", is_own=False)
            paused.pause()
            try:
                left = index.evict(plan)
            finally:
                paused.resume()
            cluster.wait_whole(cluster.servers)  # it may have been taken for dead meanwhile
            assert 0 < len(left) < len(plan) == 64
            assert link.wait_available(HEARD_S)
            # On resuming it may have carried out what it was sent while paused, unheard.
            assert len(index.evict(plan)) <= 64 - len(left)
            assert index.stats().num_nodes == 0
            index.reconcile()
            index.check_integrity()


def _attempt(call: object) -> object:
    with suppress(IndexUnavailable):
        return call()  # type: ignore[operator]
    return None


class TestChanges:
    def test_others_learn_of_changes_and_the_author_does_not(self, link: RedisLink) -> None:
        here, there = RedisIndex(link), RedisIndex(link)
        heard: list[tuple[str, list[str]]] = []
        own: list[Sequence[ChunkKey]] = []
        beginnings: list[str] = []

        def note(kind: str, changed: Sequence[ChunkKey]) -> None:
            heard.append((kind, [key.decode().rstrip("_") for key in changed]))

        there.changes.subscribe(
            lambda gone: note("gone", gone),
            lambda new: note("new", new),
            lambda: beginnings.append("there"),
        )
        here.changes.subscribe(own.append, own.append, lambda: beginnings.append("here"))
        try:
            wait_until(lambda: len(beginnings) == 2, HEARD_S)
            publish(here, *CHAIN, node_record("b", expires_ms=5, doc_ids=("d",)))
            here.annotate(named_key("a"), pinned=True)
            here.unpin(named_key("a"))
            here.evict(here.victims(100, "", is_own=True))
            here.expire(now_ms=5, limit=10)
            here.remove(named_key("a"))
            expected = [
                *(("new", [name]) for name in ("a", "a1", "a2", "b")),
                *(("gone", ["a"]), ("gone", ["a"])),
                *(("gone", ["a2"]), ("gone", ["b"]), ("gone", ["a1", "a"])),
            ]
            wait_until(lambda: len(heard) >= len(expected), HEARD_S, lambda: str(heard))
            assert heard == expected
            assert own == []
        finally:
            here.changes.close()
            there.changes.close()

    def test_reads_and_hits_announce_nothing(self, link: RedisLink) -> None:
        here, there = RedisIndex(link), RedisIndex(link)
        heard: list[Sequence[ChunkKey]] = []
        beginnings: list[int] = []
        publish(here, *CHAIN)
        there.changes.subscribe(heard.append, heard.append, lambda: beginnings.append(1))
        try:
            wait_until(lambda: beginnings, HEARD_S)
            match(here, "a", "a1")
            here.flush()
            here.unpin(named_key("a"))  # not pinned
            list(here.scan())
            publish(here, node_record("b"))
            wait_until(lambda: heard, HEARD_S)
            assert heard == [[named_key("b")]]
        finally:
            there.changes.close()

    def test_announcements_of_others_programs_are_ignored(
        self, link: RedisLink, server: RedisServer
    ) -> None:
        index = RedisIndex(link)
        heard: list[Sequence[ChunkKey]] = []
        beginnings: list[int] = []
        index.changes.subscribe(heard.append, heard.append, lambda: beginnings.append(1))
        try:
            wait_until(lambda: beginnings, HEARD_S)
            for message in (
                "",
                "x",
                "senders_",
                "senders_g",
                "senders_g" + "x" * 16,
                "senders_?" + "x" * 17,
            ):
                link.call("PUBLISH", keys.CHANGES, message)
            link.call("PUBLISH", keys.CHANGES, "senders_g" + "x" * 17)
            wait_until(lambda: heard, HEARD_S)
            assert heard == [[b"x" * 17]]
        finally:
            index.changes.close()


class TestServers:
    def test_servers_live_as_long_as_they_say_so(self, index: RedisIndex) -> None:
        index.heartbeat("one", "model-a", now_ms=1_000)
        index.heartbeat("two", "model-b", now_ms=2_000)
        assert index.servers(now_ms=3_000) == {"one": "model-a", "two": "model-b"}
        index.heartbeat("two", "model-c", now_ms=40_000)
        assert index.servers(now_ms=1_000 + keys.SERVER_S * 1000) == {
            "one": "model-a",
            "two": "model-c",
        }
        assert index.servers(now_ms=1_001 + keys.SERVER_S * 1000) == {"two": "model-c"}
        index.heartbeat("three", "model-d", now_ms=90_000)
        assert index.servers(now_ms=0) == {"two": "model-c", "three": "model-d"}  # "one" is gone


class TestSeveralProcesses:
    def test_two_indexes_writing_at_once_stay_sound(self, server: RedisServer) -> None:
        """Threads over two links publish, hit, pin, remove, evict and invalidate the same nodes."""
        with open_link(server.url) as first, open_link(server.url) as second:
            indexes = [RedisIndex(first, 6000), RedisIndex(second, 6000)]
            barrier = Barrier(6)
            before = sys.getswitchinterval()
            sys.setswitchinterval(1e-5)
            try:
                with ThreadPoolExecutor(6) as pool:
                    work = [
                        pool.submit(_meddle, indexes[seed % 2], seed, barrier) for seed in range(6)
                    ]
                    for each in work:
                        each.result()
            finally:
                sys.setswitchinterval(before)
            indexes[0].reconcile()
            indexes[0].check_integrity()
            total = indexes[1].stats()
            assert total.num_bytes + total.reserved_bytes <= 6000
            assert total.reserved_bytes == 0
            while indexes[0].clear(limit=100):
                pass
            indexes[1].check_integrity()
            assert indexes[1].stats().num_nodes == 0

    def test_keys_are_the_same_for_every_process(self, index: RedisIndex, link: RedisLink) -> None:
        """A value as another process wrote it is a hit; the layout does not depend on a process."""
        record = node_record("a", owner=ME, doc_ids=("d",))
        publish(index, record)
        value = link.call("GET", keys.node_key(record.key))
        assert isinstance(value, bytes)
        assert value[57:] == encode_record(record)[57:]
        assert match(RedisIndex(link), "a") == ["a"]


def _meddle(index: RedisIndex, seed: int, barrier: Barrier) -> None:
    """Random calls on few nodes, the same for every thread."""
    random = Random(seed)
    barrier.wait()
    for _ in range(120):
        digits = [random.choice("01") for _ in range(random.randrange(4))]
        name = "".join([random.choice("ab"), *digits])
        owner = {"a": ME, "b": YOU}[name[0]]
        step = random.randrange(12)
        if step < 6:
            record = node_record(name, name[:-1] or None, owner=owner, doc_ids=("d",))
            granted = index.reserve(owner, 100, now_ms=0)
            if isinstance(granted, Reservation):
                index.publish(record, 0, granted)
            else:
                index.evict(index.victims(granted.num_bytes, owner, is_own=granted.is_own))
        elif step < 8:
            match(index, *(name[:end] for end in range(1, len(name) + 1)))
            index.flush()
        elif step == 8:
            index.annotate(named_key(name), [f"e{seed}"], pinned=random.random() < 0.5)
        elif step == 9:
            index.unpin(named_key(name))
        elif step == 10:
            index.remove(named_key(name))
        else:
            index.invalidate("d", owner, limit=2)


def test_recorded_vectors_of_scripts_and_codec_agree(index: RedisIndex, link: RedisLink) -> None:
    """Every number a script writes is read back by the codec, at its largest sensible value."""
    publish(index, node_record("a", payload_bytes=2**40, created_ms=2**42, compute_us=2**32 - 1))
    publish(index, node_record("a1", "a", checksum=2**64 - 1, expires_ms=2**42, pinned=True))
    index.touch([named_key("a1")] * 1000, now_ms=2**42)
    index.flush()
    parent, child = stored(link, "a"), stored(link, "a1")
    assert (child.num_hits, child.last_hit_ms) == (1000, 2**42)
    assert (parent.num_children, parent.num_protected_children) == (1, 1)
    assert parent.first_child == child.record.key
    assert child.record.checksum == 2**64 - 1
    assert json.dumps(index.stats().num_bytes) == str(2**40 + 100)
