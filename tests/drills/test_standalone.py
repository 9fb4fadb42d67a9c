"""Drills on one Redis and a shared folder: the index fails, and payloads are not what they were.

One server lives through all of them. The folder is a small file system of its own, where mounting
is permitted, so that one drill can fill it.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.chunk_index.identity import owner_id
from sglang_ext.chunk_index.index import NodeRecord
from sglang_ext.chunk_index.keys import RESERVATION_S
from sglang_ext.tiers import ORPHAN_S
from tests.blobs import random_payload
from tests.drills.disk import SmallDisk, full, small_disk
from tests.drills.drill import (
    DELIMITER,
    FAILURES,
    STORES,
    UNAVAILABLE,
    Case,
    Outcome,
    Run,
    Served,
    StartRun,
    open_server,
)
from tests.drills.shelf import (
    RawPayload,
    Shelf,
    in_place_of,
    open_shelf,
    raw,
    renamed,
)
from tests.drills.storms import connection_storm
from tests.drills.writers import Place, begin_and_hang, die_writing, process, publish_all
from tests.redis_server import RedisServer, redis_server, wait_until
from tests.strategies import node_record

pytestmark = [pytest.mark.server, pytest.mark.redis]

SECRET = "a secret of all servers"
DISK_BYTES = 600 << 20
PAUSE_S = 10.0
RECOVERY_S = 10.0
NUM_RIVAL_KEYS = 150
RESERVED_AGO_MS = (RESERVATION_S - 10) * 1000
"""Age of a dead writer's reservations, so that they end soon."""
NUM_FAILURES = 3
"""To wait for, so that more than one payload was met."""


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(scope="module")
def disk() -> Iterator[SmallDisk]:
    with small_disk(DISK_BYTES) as disk:
        yield disk


@pytest.fixture(scope="module")
def place(redis: RedisServer, disk: SmallDisk, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(redis.url, disk.path / "kv", SECRET)


@pytest.fixture(scope="module")
def served(
    model_path: str, place: Place, cases: list[Case], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "secret").write_text(SECRET)
    options = {
        "--pic-index": place.url,
        "--pic-index-deadline-ms": "100",  # this machine may be busy
        "--pic-secret-file": str(folder / "secret"),
        "--pic-shared-path": str(place.folder),
        "--pic-arena-mib": "24",
    }
    words = itertools.chain.from_iterable(options.items())
    with open_server(model_path, folder / "log", *words) as served:
        yield served


@pytest.fixture
def shelf(place: Place) -> Iterator[Shelf]:
    with open_shelf(place.url, place.folder, place.secret) as shelf:
        yield shelf


@pytest.fixture(autouse=True)
def clean(served: Served, redis: RedisServer, place: Place) -> None:
    """Nothing is cached anywhere, and the server knows it."""
    redis.cli("FLUSHALL")
    redis.cli("CLIENT", "KILL", "TYPE", "pubsub")  # tells it that it may have missed something
    for path in place.folder.rglob("*.kv"):
        path.unlink()
    served.client.flush()


@pytest.fixture
def drill(served: Served, start_run: StartRun) -> Callable[[str], AbstractContextManager[Run]]:
    """Begins a drill on the server."""
    return lambda name: start_run(name, served)


Drill = Callable[[str], AbstractContextManager[Run]]


@contextmanager
def paused(redis: RedisServer) -> Iterator[None]:
    redis.pause()
    try:
        yield
    finally:
        redis.resume()


def files(folder: Path) -> list[Path]:
    """Every payload file there is now."""
    return sorted(folder.rglob("*.kv"))


def unfinished(folder: Path) -> list[Path]:
    """What dead writers left, and live ones are at."""
    return sorted(folder.rglob(".tmp-*"))


def load_all(served: Served, cases: list[Case], namespace: str) -> list[Outcome]:
    """Every prompt once, by itself with an empty arena; those that came from the shared tier."""
    outcomes = []
    for number, case in enumerate(cases):
        served.client.flush()
        outcomes.append(served.attempt(number, case, pic_namespace=namespace))
    loaded = [outcome for outcome in outcomes if outcome.shared_bytes]
    assert len(loaded) > len(cases) // 2, outcomes
    return loaded


def test_without_a_fault_nothing_fails_and_waits_are_noise(drill: Drill) -> None:
    """The row that all others are to be compared with."""
    with drill("no fault") as run:
        run.warm()
        with run.fault():
            run.more(12)
        run.recover()
    assert run.rise(UNAVAILABLE, tier="shared") == run.rise(FAILURES, tier="shared") == 0


# The index fails


def test_a_redis_that_is_killed_and_comes_back_empty_costs_hits_only(
    drill: Drill, redis: RedisServer
) -> None:
    with drill("Redis killed, back empty") as run:
        run.warm()
        with run.fault():
            redis.kill()
            run.more(12)
            redis.start()
        run.recover()
    assert run.rise(UNAVAILABLE, tier="shared") > 0
    assert run.has_recovered_within(RECOVERY_S)


def test_a_redis_that_stands_still_stops_no_request(drill: Drill, redis: RedisServer) -> None:
    with drill("Redis stopped for 10 s") as run:
        run.warm()
        with run.fault(), paused(redis):
            run.last(PAUSE_S)
        run.recover()
    during = [o for o in run.outcomes if run.is_within_fault(o)]
    assert len(during) >= 3, "requests that began and ended while it stood still"
    assert run.rise(UNAVAILABLE, tier="shared") > 0
    assert run.has_recovered_within(RECOVERY_S)


def test_a_redis_that_becomes_a_replica_refuses_writes_only(
    drill: Drill, redis: RedisServer
) -> None:
    with redis_server() as other, drill("Redis demoted to a replica") as run:
        _follow(other, redis)
        run.warm()
        with run.fault():
            other.cli("REPLICAOF", "NO", "ONE")
            _follow(redis, other)
            run.more(12)
            redis.cli("REPLICAOF", "NO", "ONE")
        run.recover()
        assert run.rise(STORES, tier="shared", result="unavailable") > 0
        assert run.has_recovered_within(RECOVERY_S)


def _follow(replica: RedisServer, master: RedisServer) -> None:
    """Make a server the replica of another, and wait until it has what that has."""
    replica.cli("REPLICAOF", "127.0.0.1", master.url.rpartition(":")[2])
    wait_until(
        lambda: "master_link_status:up" in replica.cli("INFO", "replication", check=False),
        20,
        replica.log,
    )


def test_a_storm_of_connections_costs_hits_only(drill: Drill, redis: RedisServer) -> None:
    with drill("connection storm") as run:
        run.warm()
        with run.fault(), connection_storm(redis) as storm:
            run.more(12)
        run.recover()
    assert storm.num_killed > 0
    assert storm.num_refused > 0
    assert run.rise(UNAVAILABLE, tier="shared") > 0
    assert run.has_recovered_within(RECOVERY_S)


# Payloads fail


def test_a_full_shared_folder_refuses_writes_only(drill: Drill, disk: SmallDisk) -> None:
    assert disk.problem is None, disk.problem
    with drill("shared folder full") as run:
        run.warm()
        with run.fault(), full(disk.path):
            run.more(12)
        run.recover()
    assert run.rise(STORES, tier="shared", result="unavailable") > 0
    assert run.has_recovered_within(RECOVERY_S)


def test_truncated_payloads_are_misses(drill: Drill, place: Place) -> None:
    _damage("payloads truncated", "truncated", drill, lambda: _truncate(files(place.folder)))


def test_payloads_with_a_flipped_bit_are_misses(drill: Drill, place: Place) -> None:
    _damage("payloads bit-flipped", "damaged", drill, lambda: _flip(files(place.folder)))


def test_payloads_of_other_chunks_are_misses(drill: Drill, place: Place) -> None:
    _damage("payloads swapped", "foreign", drill, lambda: _swap(files(place.folder)))


def test_payloads_of_another_model_are_misses(drill: Drill, shelf: Shelf) -> None:
    def replace_all() -> int:
        forms = itertools.cycle([(b"bfloat16", b"float16"), (b" 30 2 ", b" 15 4 ")])
        pairs = zip(_with_others_kv(shelf), forms, strict=False)
        return sum(
            shelf.replace(record, replace(payload, form=payload.form.replace(*form))) is not None
            for (record, payload), form in pairs
        )

    _damage("payloads of another model", "foreign", drill, replace_all)


def test_a_wrong_payload_that_nothing_tells_from_a_right_one_is_seen_by_the_drills(
    served: Served, cases: list[Case], shelf: Shelf
) -> None:
    """What all other drills rely on: here a holder of the secret serves other chunks' KV."""
    with Run("wrong payloads", served, cases) as run:
        run.warm()
    assert run.row.wrong == run.row.lost == 0
    _wait_stored(shelf, cases, run.name)
    for record, payload in _with_others_kv(shelf):
        assert shelf.replace(record, payload) is not None
    outcomes = load_all(served, cases, run.name)
    assert all(outcome.is_wrong for outcome in outcomes), [outcome.kl for outcome in outcomes]


def _wait_stored(shelf: Shelf, cases: list[Case], namespace: str) -> None:
    """Wait until every chunk of every prompt is shared."""
    chunks = {chunk for case in cases for chunk in case.text.split(DELIMITER)[:-1]}
    owner = owner_id(namespace, SECRET.encode())
    wait_until(lambda: sum(record.owner == owner for record in shelf.records()) == len(chunks), 20)


def _damage(name: str, reason: str, drill: Drill, damage: Callable[[], int]) -> None:
    """A drill in which all payloads get damaged; `damage` says how many."""
    with drill(name) as run:
        run.warm()
        with run.fault():
            num_damaged = damage()
        run.until(
            lambda: run.rise(FAILURES, tier="shared", reason=reason) >= NUM_FAILURES,
            f"no payload was found {reason}",
        )
        run.recover()
    assert run.rise(FAILURES, tier="shared") <= num_damaged, (
        "each was met once, then its entry went"
    )


def _truncate(paths: list[Path]) -> int:
    for path in paths:
        os.truncate(path, path.stat().st_size * 2 // 3)
    return len(paths)


def _flip(paths: list[Path]) -> int:
    """The greatest bit of a number's exponent in each file."""
    for path in paths:
        with path.open("r+b") as file:
            file.seek(path.stat().st_size * 2 // 3 | 1)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 0x40]))
    return len(paths)


def _swap(paths: list[Path]) -> int:
    """Each file gets its neighbour's content, whole at every moment."""
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, contents[1:] + contents[:1], strict=True):
        other = path.with_name("swapped")
        other.write_bytes(content)
        other.replace(path)
    return len(paths)


def _with_others_kv(shelf: Shelf) -> list[tuple[NodeRecord, RawPayload]]:
    """For each record KV of its size that belongs to another chunk."""
    records = shelf.records()
    payloads = [shelf.payload(record) for record in records]
    others = payloads[1:] + payloads[:1]
    return [
        (record, in_place_of(own, other))
        for record, own, other in zip(records, payloads, others, strict=True)
    ]


# Other writers


def test_what_a_killed_writer_left_is_never_seen_and_goes(
    drill: Drill, shelf: Shelf, place: Place
) -> None:
    with drill("writer killed before it published") as run:
        run.warm()
        stock = [(renamed(*pair), pair[1]) for pair in _with_others_kv(shelf)]
        with run.fault():
            for record, _ in stock:
                shelf.index.remove(record.key)
            _kill_a_writer(place, stock)
            assert shelf.index.stats().reserved_bytes > 0
            _kill_in_the_middle(place)
        run.recover()
        run.until(lambda: shelf.index.stats().reserved_bytes == 0, "reserved bytes never ended")
    orphans = {(record.key, record.checksum) for record, _ in stock}
    assert not orphans & {(record.key, record.checksum) for record in shelf.records()}
    num_swept = shelf.store.sweep(shelf.is_published, ORPHAN_S, time.time() + ORPHAN_S + 1)
    assert num_swept > len(orphans)
    assert not unfinished(place.folder)
    assert not orphans & {(record.key, record.checksum) for record in shelf.store.records()}
    assert all(shelf.payload(record).nbytes for record in shelf.records())


def _kill_a_writer(place: Place, stock: list[tuple[NodeRecord, RawPayload]]) -> None:
    """Kill one that has put payloads."""
    has_begun = get_context("spawn").Event()
    with process(begin_and_hang, place, stock, RESERVED_AGO_MS, has_begun) as writer:
        assert has_begun.wait(60)
        writer.kill()
        writer.join()


def _kill_in_the_middle(place: Place) -> None:
    """Let one be killed while its payload is half written."""
    payload = RawPayload(b"unfinished", bytearray(4 << 20))
    record = _sized(node_record("unfinished"), payload)
    with process(die_writing, place, record, payload, RESERVED_AGO_MS) as writer:
        writer.join(60)
        assert writer.exitcode == -signal.SIGXFSZ
    assert unfinished(place.folder)


def test_two_writers_of_each_chunk_leave_one_whole_payload(
    drill: Drill, served: Served, cases: list[Case], shelf: Shelf, place: Place
) -> None:
    with drill("two writers of each chunk") as run:
        run.warm()
        stock = [(record, shelf.payload(record)) for record in shelf.records()]
        small = [node_record(f"rival {number}", owner="rivals") for number in range(NUM_RIVAL_KEYS)]
        stocks = []
        for writer in range(2):
            pairs = [(record, _noisy(payload, writer)) for record, payload in stock]
            pairs += [(record, _small(number, writer)) for number, record in enumerate(small)]
            stocks.append([(_sized(*pair), pair[1]) for pair in pairs])
        with run.fault():
            for record, _ in stock:
                for gone in shelf.index.remove(record.key):
                    shelf.store.drop(gone)
            _race(place, stocks)
        run.recover()
    assert run.rise(FAILURES, tier="shared") == 0
    outcomes = load_all(served, cases, run.name)
    assert not any(outcome.is_wrong for outcome in outcomes), [outcome.kl for outcome in outcomes]
    records = {record.key: record for record in shelf.records()}
    assert {record.key for record, _ in stocks[0]} <= records.keys()
    assert all(shelf.payload(record).nbytes for record in records.values())
    kept = [(record.key, record.checksum) for record in shelf.store.records()]
    assert sorted(kept) == sorted((r.key, r.checksum) for r in records.values()), "one each"


def _race(place: Place, stocks: list[list[tuple[NodeRecord, RawPayload]]]) -> None:
    barrier = get_context("spawn").Barrier(len(stocks))
    with (
        process(publish_all, place, stocks[0], barrier) as one,
        process(publish_all, place, stocks[1], barrier) as other,
    ):
        one.join(60)
        other.join(60)
        assert one.exitcode == other.exitcode == 0


def _noisy(payload: RawPayload, seed: int) -> RawPayload:
    """The same KV but for the last bit of some numbers, as another batch size computes it."""
    numbers = payload.numbers()
    is_other = np.random.default_rng(seed).random(numbers.shape) < 0.05
    return raw(payload.form, numbers ^ is_other.astype(np.uint16))


def _small(number: int, writer: int) -> RawPayload:
    return RawPayload(b"small", random_payload(2048, seed=2 * number + writer).data)


def _sized(record: NodeRecord, payload: RawPayload) -> NodeRecord:
    return replace(renamed(record, payload), payload_bytes=payload.nbytes)
