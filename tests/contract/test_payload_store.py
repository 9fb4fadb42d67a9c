"""What every `PayloadStore` promises, wherever the bytes lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_ext.chunk_index.file_store import FileStore
from sglang_ext.chunk_index.payloads import HostStore, PayloadStore
from sglang_ext.chunk_index.redis_link import RedisLink
from sglang_ext.chunk_index.redis_store import RedisStore
from sglang_ext.errors import PayloadLost
from tests.blobs import MAC_KEY, BytesCodec, random_payload, record_of
from tests.redis_server import RedisServer, open_link, redis_server
from tests.strategies import BytesPayload, named_key

Store = PayloadStore[BytesPayload]
Adapter = Callable[[pytest.FixtureRequest], Store]


def host(request: pytest.FixtureRequest) -> Store:
    return HostStore()


def file(request: pytest.FixtureRequest) -> Store:
    return _file_store(request, None)


def file_with_mac(request: pytest.FixtureRequest) -> Store:
    return _file_store(request, MAC_KEY)


def _file_store(request: pytest.FixtureRequest, mac_key: bytes | None) -> Store:
    folder: Path = request.getfixturevalue("tmp_path")
    store = FileStore(folder, BytesCodec(), mac_key)
    store.probe()
    return store


def redis(request: pytest.FixtureRequest) -> Store:
    server, link = request.getfixturevalue("linked_server")
    server.cli("FLUSHALL")
    return RedisStore(link, BytesCodec(), MAC_KEY)


SHARED = [
    pytest.param(file, id="file"),
    pytest.param(file_with_mac, id="file-mac"),
    pytest.param(redis, id="redis", marks=pytest.mark.redis),
]
"""Stores in which several writers of one key may meet."""

ADAPTERS = [pytest.param(host, id="host"), *SHARED]


@pytest.fixture(scope="module")
def linked_server() -> Iterator[tuple[RedisServer, RedisLink]]:
    """A server whose user may do no more than a shared index needs."""
    with redis_server(has_acl_user=True) as server, open_link(server.url) as link:
        yield server, link


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Store:
    adapter: Adapter = request.param
    return adapter(request)


every_store = pytest.mark.parametrize("store", ADAPTERS, indirect=True)
every_shared_store = pytest.mark.parametrize("store", SHARED, indirect=True)


def reason_of(store: Store, *args: object, **fields: object) -> str:
    """Why a payload that was asked for is lost."""
    with pytest.raises(PayloadLost) as caught:
        store.get(*args, **fields)  # type: ignore[arg-type]
    return caught.value.reason


@every_store
def test_a_probe_of_a_store_that_can_be_used_leaves_nothing_behind(store: Store) -> None:
    store.probe()
    assert list(store.records()) == []


@every_store
@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, 4097, (5 << 20) + 3])
def test_a_payload_comes_back_bit_identical(store: Store, num_bytes: int) -> None:
    payload = random_payload(num_bytes)
    record = record_of(payload)
    store.put(record, payload)
    assert store.get(record).data == random_payload(num_bytes).data


@every_store
@pytest.mark.parametrize("num_bytes", [1, 4096, (5 << 20) + 3])
def test_every_byte_is_reported_once(store: Store, num_bytes: int) -> None:
    payload = random_payload(num_bytes)
    record = record_of(payload)
    store.put(record, payload)
    told: list[int] = []
    store.get(record, told.append)
    assert sum(told) == num_bytes


@every_store
def test_what_was_never_put_is_absent(store: Store) -> None:
    payload = random_payload(10)
    store.put(record_of(payload), payload)
    assert reason_of(store, record_of(payload, "b")) == "absent"


@every_store
def test_a_record_never_finds_the_payload_of_another_writer(store: Store) -> None:
    payload = random_payload(10)
    record = record_of(payload)
    store.put(record, payload)
    assert reason_of(store, replace(record, checksum=record.checksum ^ 1)) == "absent"


@every_shared_store
def test_two_payloads_of_one_key_are_kept_apart(store: Store) -> None:
    payloads = [random_payload(100, seed) for seed in range(2)]
    records = [record_of(payload) for payload in payloads]
    for record, payload in zip(records, payloads, strict=True):
        store.put(record, payload)
    assert [store.get(record) for record in records] == payloads
    store.drop(records[0])
    assert reason_of(store, records[0]) == "absent"
    assert store.get(records[1]) == payloads[1]


@every_store
def test_a_dropped_payload_is_absent_and_others_stay(store: Store) -> None:
    payload = random_payload(10)
    mine, other = record_of(payload), record_of(payload, "b")
    store.put(mine, payload)
    store.put(other, payload)
    store.drop(mine)
    store.drop(mine)
    assert reason_of(store, mine) == "absent"
    assert list(store.records()) == [other]


@every_store
def test_dropping_a_record_of_another_payload_drops_nothing(store: Store) -> None:
    payload = random_payload(10)
    record = record_of(payload)
    store.put(record, payload)
    store.drop(replace(record, checksum=record.checksum ^ 1))
    assert store.get(record) == payload


@every_store
def test_a_payload_stays_readable_after_drop(store: Store) -> None:
    payload = random_payload(5000)
    record = record_of(payload)
    store.put(record, payload)
    got = store.get(record)
    store.drop(record)
    assert got.data == random_payload(5000).data


@every_store
def test_records_come_back_as_they_were_put(store: Store) -> None:
    payload = random_payload(10)
    full = record_of(
        payload,
        "b1",
        parent="b",
        num_tokens=256,
        created_ms=1_700_000_000_000,
        doc_ids=("données@2", "文書", "\ud800", ""),
        expires_ms=2**53,
        owner="0123456789abcdef",
        pinned=True,
        model="fedcba9876543210",
        compute_us=2**32,
    )
    long = record_of(payload, "c", doc_ids=tuple(f"{i}-{'d' * 200}" for i in range(64)))
    records = [record_of(payload), full, long]
    for record in records:
        store.put(record, payload)
    assert sorted(store.records(), key=lambda record: record.key) == records
    assert store.get(long) == payload


@every_store
def test_checksums_of_every_width_are_names(store: Store) -> None:
    payload = random_payload(10)
    records = [record_of(payload), replace(record_of(payload, "b"), checksum=0)]
    records.append(replace(record_of(payload, "c"), checksum=2**64 - 1))
    for record in records:
        store.put(record, payload)
    assert sorted(store.records(), key=lambda record: record.key) == records


@every_store
def test_an_annotated_record_still_finds_its_payload(store: Store) -> None:
    payload = random_payload(10)
    record = record_of(payload)
    store.put(record, payload)
    changed = replace(record, doc_ids=("doc",), expires_ms=9, pinned=True, created_ms=5)
    assert store.get(changed) == payload


@every_store
def test_putting_again_changes_nothing(store: Store) -> None:
    payload = random_payload(10)
    record = record_of(payload)
    store.put(record, payload)
    store.put(record, payload)
    assert list(store.records()) == [record]
    assert store.get(record) == payload


@every_store
def test_threads_do_not_disturb_each_other(store: Store) -> None:
    def use(number: int) -> bool:
        payload = random_payload(100_000 + number, number)
        record = record_of(payload, f"{number}")
        same = record_of(random_payload(50_000), "same")
        for _ in range(5):
            store.put(record, payload)
            store.put(same, random_payload(50_000))
            is_right = store.get(record) == payload and store.get(same).nbytes == 50_000
            store.drop(record)
        return is_right

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(use, range(4)))
    assert [record.key for record in store.records()] == [named_key("same")]
