"""Payload values on a real Redis: kept with their record, and lost or unavailable, never wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_ext.chunk_index.index import NodeRecord, Publication
from sglang_ext.chunk_index.keys import VALUE_S, value_key
from sglang_ext.chunk_index.redis_index import RedisIndex
from sglang_ext.chunk_index.redis_link import RedisLink
from sglang_ext.chunk_index.redis_store import RedisStore
from sglang_ext.errors import PayloadLost, TierUnavailable
from tests.blobs import MAC_KEY, BytesCodec, random_payload, record_of
from tests.redis_server import (
    START_S,
    RedisServer,
    open_link,
    redis_cluster,
    redis_server,
    wait_until,
)
from tests.strategies import BytesPayload

pytestmark = pytest.mark.redis

PAYLOAD = random_payload(9000)
RECORD = record_of(PAYLOAD)
NAME = value_key(RECORD.key, RECORD.checksum)
LARGE = random_payload((3 << 20) + 5)


@dataclass
class Rig:
    """A store on a server, with its codec and its link in reach."""

    server: RedisServer
    link: RedisLink
    mac_key: bytes | None = None

    def __post_init__(self) -> None:
        self.codec = BytesCodec()
        self.store: RedisStore[BytesPayload] = RedisStore(self.link, self.codec, self.mac_key)

    def put(self, name: str = "a", payload: BytesPayload = PAYLOAD) -> NodeRecord:
        record = record_of(payload, name)
        self.store.put(record, payload)
        return record

    def ttl(self) -> object:
        """Seconds the payload has left; -1 for ever, -2 it is gone."""
        return self.link.call("TTL", NAME)

    def value(self) -> bytes:
        value = self.link.call("GET", NAME)
        assert isinstance(value, bytes)
        return value

    def why_lost(self, record: NodeRecord = RECORD) -> str:
        with pytest.raises(PayloadLost) as caught:
            self.store.get(record)
        return caught.value.reason


@pytest.fixture(scope="module")
def linked_server() -> Iterator[tuple[RedisServer, RedisLink]]:
    with redis_server() as server, open_link(server.url) as link:
        yield server, link


@pytest.fixture
def rig(linked_server: tuple[RedisServer, RedisLink]) -> Rig:
    server, link = linked_server
    server.cli("FLUSHALL")
    return Rig(server, link)


@pytest.fixture
def own_rig() -> Iterator[Rig]:
    """On a server that the test may stop."""
    with redis_server() as server, open_link(server.url, background_deadline_ms=500) as link:
        yield Rig(server, link)


def test_a_probe_leaves_nothing_behind(rig: Rig) -> None:
    rig.store.probe()
    assert rig.server.cli("DBSIZE") == "0"


def test_a_probe_says_what_a_user_may_not_do(rig: Rig) -> None:
    rig.server.cli("ACL", "SETUSER", "reader", "on", ">secret", "~pic1:*", "+@all", "-set")
    url = rig.server.url.replace("redis://", "redis://reader:secret@")
    with open_link(url) as link, pytest.raises(TierUnavailable, match="NOPERM"):
        RedisStore(link, rig.codec).probe()


def test_a_payload_that_is_not_published_ends_by_itself(rig: Rig) -> None:
    rig.put()
    ttl = rig.ttl()
    assert isinstance(ttl, int)
    assert VALUE_S - 60 < ttl <= VALUE_S


def test_a_published_payload_stays_until_its_record_leaves(rig: Rig) -> None:
    index = RedisIndex(rig.link)
    rig.put()
    assert index.publish(RECORD, now_ms=0) is Publication.STORED
    assert rig.ttl() == -1
    assert rig.store.get(RECORD) == PAYLOAD
    assert index.remove(RECORD.key) == (RECORD,)
    assert rig.ttl() == -2
    assert rig.why_lost() == "absent"


def test_a_second_writer_does_not_end_what_the_first_published(rig: Rig) -> None:
    index = RedisIndex(rig.link)
    rig.put()
    index.publish(RECORD, now_ms=0)
    rig.put()
    assert rig.ttl() == -1  # this writer may die before it publishes
    assert index.publish(RECORD, now_ms=0) is Publication.PRESENT
    assert rig.ttl() == -1


def test_an_evicted_record_takes_its_payload_along_and_no_other(rig: Rig) -> None:
    index = RedisIndex(rig.link)
    other = random_payload(9000, seed=1)
    rig.put()
    loser = rig.put(payload=other)
    index.publish(RECORD, now_ms=0)
    assert index.publish(loser, now_ms=0) is Publication.PRESENT
    assert index.evict(index.victims(1, RECORD.owner, is_own=False)) == (RECORD,)
    assert rig.why_lost() == "absent"
    assert rig.store.get(loser) == other


def test_a_payload_too_large_is_refused_and_not_sent(rig: Rig) -> None:
    store = RedisStore(rig.link, rig.codec, max_value_bytes=4096 + 9000)
    before = rig.link.stats().num_round_trips
    larger = random_payload(9001)
    with pytest.raises(TierUnavailable, match="too large"):
        store.put(record_of(larger), larger)
    assert rig.link.stats().num_round_trips == before
    store.put(RECORD, PAYLOAD)
    assert store.get(RECORD) == PAYLOAD


def test_a_value_too_large_is_foreign_and_not_fetched(rig: Rig) -> None:
    rig.put()
    rig.link.call("SETRANGE", NAME, 100 << 20, b"x")
    before = rig.link.stats().num_round_trips
    assert rig.why_lost() == "foreign"
    assert rig.link.stats().num_round_trips == before + 1
    assert rig.codec.num_allocated == 0


@pytest.mark.parametrize("mac_key", [None, MAC_KEY], ids=["plain", "mac"])
def test_one_flipped_bit_anywhere_is_found(rig: Rig, mac_key: bytes | None) -> None:
    keyed = Rig(rig.server, rig.link, mac_key)
    keyed.put()
    value = keyed.value()
    for byte in (1, 5, 9, 60, 350, 4000, 4096, 9000, len(value) - 1):
        flipped = bytearray(value)
        flipped[byte] ^= 0x10
        keyed.link.call("SET", NAME, bytes(flipped))
        assert keyed.why_lost() in {"damaged", "forged", "foreign"}
    keyed.link.call("SET", NAME, value)
    assert keyed.store.get(RECORD) == PAYLOAD


@pytest.mark.parametrize("num_bytes", [1, 12, 4095, 4096, 13095])
def test_a_cut_value_is_truncated_and_allocates_nothing(rig: Rig, num_bytes: int) -> None:
    rig.put()
    rig.link.call("SET", NAME, rig.value()[:num_bytes])
    assert rig.why_lost() == "truncated"
    assert rig.codec.num_allocated == 0


def test_the_value_of_another_record_is_foreign_and_not_listed(rig: Rig) -> None:
    other = rig.put("b", random_payload(9000, seed=1))
    rig.link.call("SET", NAME, rig.link.call("GET", value_key(other.key, other.checksum)))
    assert rig.why_lost() == "foreign"
    assert list(rig.store.records()) == [other]


def test_a_value_of_a_writer_without_the_key_is_forged(rig: Rig) -> None:
    rig.put()
    assert Rig(rig.server, rig.link, MAC_KEY).why_lost() == "forged"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(data=st.binary(min_size=1, max_size=300), is_padded=st.booleans())
def test_a_value_of_random_bytes_is_lost_and_nothing_else(
    rig: Rig, data: bytes, is_padded: bool
) -> None:
    rig.link.call("SET", NAME, data.ljust(4096 + 9000, b"\0") if is_padded else data)
    assert rig.why_lost() in {"truncated", "damaged", "foreign"}


def test_what_is_no_value_of_ours_is_neither_listed_nor_touched(rig: Rig) -> None:
    foreign = [b"pic1:{5f}:v:short", NAME + b"x", b"pic2" + NAME[4:], b"pic1:{00}:n:" + RECORD.key]
    for name in foreign:
        rig.link.call("SET", name, b"x")
    rig.link.call("SADD", value_key(RECORD.key, 1), b"a set")
    rig.put()
    assert list(rig.store.records()) == [RECORD]
    assert rig.server.cli("DBSIZE") == str(len(foreign) + 2)


def test_a_value_that_leaves_while_it_is_read_is_lost(rig: Rig) -> None:
    record = rig.put(payload=LARGE)
    with pytest.raises(PayloadLost, match="absent"):
        rig.store.get(record, lambda _: rig.store.drop(record))


def test_a_full_server_is_unavailable_for_writing_and_works_again_later() -> None:
    with redis_server("--maxmemory", "32mb") as server, open_link(server.url) as link:
        rig = Rig(server, link)

        def is_refused(number: int) -> bool:
            try:
                rig.put(f"{number}", LARGE)
            except TierUnavailable as exc:
                return "OOM" in str(exc)
            return False

        num_kept = next(number for number in range(20) if is_refused(number))
        kept = [record_of(LARGE, f"{number}") for number in range(num_kept)]
        assert num_kept > 1
        assert all(rig.store.get(record) == LARGE for record in kept)
        for record in kept:
            rig.store.drop(record)
        wait_until(lambda: not is_refused(99), START_S)  # memory is freed in the background
        assert list(rig.store.records()) == [record_of(LARGE, "99")]


def test_a_server_that_stands_still_is_unavailable_until_it_goes_on(own_rig: Rig) -> None:
    record = own_rig.put(payload=LARGE)
    own_rig.server.pause()
    with pytest.raises(TierUnavailable):
        own_rig.store.get(record)
    with pytest.raises(TierUnavailable):
        own_rig.put("b")
    own_rig.store.drop(record)
    assert list(own_rig.store.records()) == []
    own_rig.server.resume()
    assert own_rig.link.wait_available(20)
    own_rig.put("b")
    assert own_rig.store.get(record_of(PAYLOAD, "b")) == PAYLOAD


def test_a_server_that_stands_still_in_mid_read_is_unavailable(own_rig: Rig) -> None:
    record = own_rig.put(payload=LARGE)
    told: list[int] = []

    def pause(num_bytes: int) -> None:
        told.append(num_bytes)
        own_rig.server.pause()

    with pytest.raises(TierUnavailable):
        own_rig.store.get(record, pause)
    assert told == [1 << 20]


def test_a_restarted_server_has_lost_its_payloads(own_rig: Rig) -> None:
    own_rig.put()
    own_rig.server.kill()
    with pytest.raises(TierUnavailable):
        own_rig.store.get(RECORD)
    own_rig.server.start()
    own_rig.link.wait_available(20)
    assert own_rig.why_lost() == "absent"


def test_a_cluster_keeps_payloads_with_their_nodes() -> None:
    with redis_cluster() as cluster, open_link(cluster.url) as link:
        store = RedisStore(link, BytesCodec(), MAC_KEY)
        index = RedisIndex(link)
        records = [replace(RECORD, key=bytes([n]) + RECORD.key[1:]) for n in range(64)]
        for record in records:
            store.put(record, PAYLOAD)
            assert index.publish(record, now_ms=0) is Publication.STORED
        sizes = [server.cli("DBSIZE") for server in cluster.servers]
        assert "0" not in sizes
        assert sorted(store.records(), key=lambda record: record.key) == records
        assert all(store.get(record) == PAYLOAD for record in records)
        index.remove(records[0].key)
        with pytest.raises(PayloadLost, match="absent"):
            store.get(records[0])
