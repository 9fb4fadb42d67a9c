"""Transfers happen in order, within bounds, once, and never keep anyone waiting."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from threading import Event, Thread, get_ident
from typing import Any

import pytest

from sglang_ext.chunk_index.index import NodeRecord
from sglang_ext.chunk_index.memory_index import MemoryIndex
from sglang_ext.chunk_index.payloads import HostStore, OnBytes
from sglang_ext.chunk_index.tier import Tier
from sglang_ext.chunk_index.transfer import CostModel
from sglang_ext.chunk_index.transfer_queues import Load, LoadQueue, Workers, WriteQueue
from sglang_ext.errors import PayloadLost, TierUnavailable
from tests.blobs import random_payload, record_of
from tests.strategies import BytesPayload, key_name, named_key

DEADLINE_S = 10.0
PAYLOAD = random_payload(10)


def until(is_true: Callable[[], bool]) -> None:
    """Wait for other threads; fails after a while."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


class GatedStore(HostStore[BytesPayload]):
    """Works only while its gate is open, as a tier that hangs.

    Attributes:
        gate: Whether it is open.
        gets: Names of payloads asked for, in order, at the moment they were.
        puts: Likewise of those put.
        error: Raised instead of working.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate = Event()
        self.gate.set()
        self.gets: list[str] = []
        self.puts: list[str] = []
        self.error: Exception | None = None

    def get(self, record: NodeRecord, on_bytes: OnBytes | None = None) -> BytesPayload:
        self.gets.append(key_name(record.key))
        if on_bytes is not None:
            on_bytes(4)
        self._pass()
        payload = super().get(record)
        if on_bytes is not None:
            on_bytes(payload.nbytes - 4)
        return payload

    def put(self, record: NodeRecord, payload: BytesPayload) -> None:
        self.puts.append(key_name(record.key))
        self._pass()
        super().put(record, payload)

    def _pass(self) -> None:
        assert self.gate.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error


class Clock:
    """A clock that a test moves.

    Attributes:
        step_s: How far it moves by itself with every look at it.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.step_s = 0.0

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


class Rig:
    """A tier with its queues, which a test can hold up."""

    def __init__(self) -> None:
        self.store = GatedStore()
        self.tier = Tier("disk", MemoryIndex(), self.store)
        self.cost = CostModel()
        self.clock = Clock()
        self.now_ms = 0
        self.loads = LoadQueue(self.tier, self.cost, 2, max_bytes=25, clock=self.clock)
        self.writes = WriteQueue(self.tier, max_bytes=25, now_ms=lambda: self.now_ms)

    def keep(self, *names: str) -> list[NodeRecord]:
        """Have segments in the tier; a longer name stands below a shorter one."""
        records = [segment(name) for name in names]
        for record in records:
            assert self.tier.keep(record, PAYLOAD, now_ms=0) is None
        self.store.puts.clear()
        return records

    def has(self, name: str) -> bool:
        return self.tier.index.show(named_key(name)) is not None


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.store.gate.set()
    rig.loads.close(DEADLINE_S)
    rig.writes.close(DEADLINE_S)
    rig.tier.index.check_integrity()


def segment(name: str, **fields: Any) -> NodeRecord:
    return record_of(PAYLOAD, name, parent=name[:-1] or None, **fields)


# Workers


def test_one_thread_runs_jobs_in_the_order_they_were_given() -> None:
    done: list[int] = []
    workers = Workers("test", num_threads=1)
    for number in range(100):
        workers.submit(lambda number=number: done.append(number))
    workers.close(DEADLINE_S)
    assert done == list(range(100))


def test_a_failing_job_is_logged_and_the_next_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    is_done = Event()
    workers = Workers("test", num_threads=1)
    workers.submit(lambda: 1 / 0)
    workers.submit(is_done.set)
    assert is_done.wait(DEADLINE_S)
    workers.close(DEADLINE_S)
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_closing_does_not_wait_for_a_job_that_hangs() -> None:
    gate = Event()
    workers = Workers("test", num_threads=1)
    workers.submit(lambda: gate.wait(DEADLINE_S))
    started = time.monotonic()
    workers.close(0.01)
    assert time.monotonic() - started < DEADLINE_S / 2
    gate.set()


def test_what_a_job_held_is_let_go_when_it_ends() -> None:
    class Held:
        pass

    workers = Workers("test", num_threads=1)
    held = Held()
    gone = weakref.ref(held)
    workers.submit(lambda held=held: None)
    del held
    until(lambda: gone() is None)
    workers.close(DEADLINE_S)


# Loads


def test_listeners_are_called_once_whenever_they_come() -> None:
    told: list[str] = []
    load: Load[BytesPayload] = Load(segment("a"))
    load.when_done(lambda: told.append("early"))
    assert told == []
    load.finish(PAYLOAD)
    load.when_done(lambda: told.append("late"))
    assert told == ["early", "late"]
    assert load.payload is PAYLOAD


def test_a_payload_on_its_way_is_asked_for_once(rig: Rig) -> None:
    (record,) = rig.keep("a")
    rig.store.gate.clear()
    loads = [rig.loads.start(record) for _ in range(5)]
    until(lambda: rig.store.gets == ["a"])
    loads.append(rig.loads.start(record))
    rig.store.gate.set()
    assert loads[0] is not None
    assert all(load is loads[0] for load in loads)
    until(lambda: loads[0].is_done)  # type: ignore[union-attr]
    assert loads[0].payload == PAYLOAD
    assert rig.store.gets == ["a"]


def test_a_load_is_joined_until_its_listeners_have_put_the_payload_elsewhere(rig: Rig) -> None:
    (record,) = rig.keep("a")
    joined: list[Load[BytesPayload] | None] = []
    is_told = Event()
    rig.store.gate.clear()
    load = rig.loads.start(record)
    assert load is not None

    def join() -> None:
        joined.append(rig.loads.start(record))
        is_told.set()

    load.when_done(join)
    rig.store.gate.set()
    assert is_told.wait(DEADLINE_S)
    assert joined == [load]
    assert rig.store.gets == ["a"]


def test_a_payload_that_has_come_is_asked_for_again(rig: Rig) -> None:
    (record,) = rig.keep("a")
    first = rig.loads.start(record)
    assert first is not None
    until(lambda: first.is_done)
    until(lambda: rig.loads.start(record) is not first)
    until(lambda: rig.store.gets == ["a", "a"])


def test_another_writers_bytes_of_the_same_key_are_another_load(rig: Rig) -> None:
    (record,) = rig.keep("a")
    rig.store.gate.clear()
    first, other = (rig.loads.start(replace(record, checksum=n)) for n in (record.checksum, 7))
    assert first is not other


def test_no_more_bytes_are_under_way_than_allowed_but_one_load_always_is(rig: Rig) -> None:
    a, b, c = rig.keep("a", "b", "c")
    large = record_of(random_payload(1000), "x")
    for records, refused in (([large], a), ([a, b], c), ([b, c], a)):
        rig.store.gate.clear()
        assert all(rig.loads.start(record) is not None for record in records)
        assert rig.loads.start(refused) is None
        rig.store.gate.set()
        until(lambda: not rig.loads._in_flight)


def test_bytes_are_counted_as_they_come(rig: Rig) -> None:
    a, b = rig.keep("a", "b")
    rig.store.gate.clear()
    rig.loads.start(a)
    until(lambda: rig.loads.num_arrived == 4)
    rig.loads.start(b)
    until(lambda: rig.loads.num_arrived == 8)
    rig.store.gate.set()
    until(lambda: rig.loads.num_arrived == 20)


@pytest.mark.parametrize(
    "error", [PayloadLost("damaged"), TierUnavailable("EIO"), RuntimeError("a fault of ours")]
)
def test_a_failure_ends_the_load_teaches_nothing_and_leaves_room(
    rig: Rig, error: Exception
) -> None:
    (record,) = rig.keep("a")
    rig.store.error = error
    rig.clock.step_s = 0.1
    is_told = Event()
    load = rig.loads.start(record)
    assert load is not None
    load.when_done(is_told.set)
    assert is_told.wait(DEADLINE_S)
    assert (load.is_done, load.payload) == (True, None)
    assert not rig.cost.is_known
    until(lambda: not rig.loads._in_flight)


def test_a_failing_listener_does_not_keep_the_payload_from_being_loaded_again(rig: Rig) -> None:
    (record,) = rig.keep("a")
    rig.store.gate.clear()
    load = rig.loads.start(record)
    assert load is not None
    load.when_done(lambda: 1 / 0)
    rig.store.gate.set()
    until(lambda: rig.loads.start(record) is not load)


def test_as_many_loads_run_at_once_as_there_are_threads(rig: Rig) -> None:
    a, b, _ = rig.keep("a", "b", "c")
    rig.store.gate.clear()
    rig.loads.start(a)
    rig.loads.start(b)
    until(lambda: sorted(rig.store.gets) == ["a", "b"])


def test_the_cost_of_a_load_is_learned_without_the_time_it_waited_for_its_turn(rig: Rig) -> None:
    (record,) = rig.keep("a")
    rig.store.gate.clear()
    load = rig.loads.start(record)
    until(lambda: rig.store.gets == ["a"])
    rig.clock.now_s += 0.5
    rig.store.gate.set()
    until(lambda: load.is_done)  # type: ignore[union-attr]
    assert rig.cost.predict_ms(10) == pytest.approx(500.0)


# Writes


def test_writes_keep_their_order_so_that_parents_come_first(rig: Rig) -> None:
    rig.store.gate.clear()
    assert rig.writes.offer(segment("a"), PAYLOAD)
    assert rig.writes.offer(segment("ab"), PAYLOAD)
    rig.store.gate.set()
    until(lambda: rig.writes.num_bytes == 0)
    assert rig.store.puts == ["a", "ab"]
    assert rig.has("ab")
    assert rig.tier.stats().refusals["orphan"] == 0


def test_what_is_offered_beyond_the_bound_is_counted_and_not_written(rig: Rig) -> None:
    rig.store.gate.clear()
    assert [rig.writes.offer(segment(name), PAYLOAD) for name in "abcd"] == [
        True,
        True,
        False,
        False,
    ]
    assert (rig.writes.num_bytes, rig.writes.num_dropped) == (20, 2)
    rig.store.gate.set()
    until(lambda: rig.writes.num_bytes == 0)
    assert [name for name in "abcd" if rig.has(name)] == ["a", "b"]
    assert rig.writes.offer(segment("c"), PAYLOAD)


def test_one_payload_is_taken_whatever_its_size(rig: Rig) -> None:
    large = random_payload(1000)
    rig.store.gate.clear()
    assert rig.writes.offer(record_of(large, "x"), large)
    assert not rig.writes.offer(segment("a"), PAYLOAD)


def test_annotations_come_behind_the_writes_before_them(rig: Rig) -> None:
    rig.store.gate.clear()
    rig.writes.offer(segment("a"), PAYLOAD)
    rig.writes.annotate(segment("a", doc_ids=("doc",)))
    rig.store.gate.set()
    rig.writes.close(DEADLINE_S)
    view = rig.tier.index.show(named_key("a"))
    assert view is not None
    assert view.record.doc_ids == ("doc",)


def test_a_change_removes_what_was_offered_before_it_and_nothing_after(rig: Rig) -> None:
    rig.store.gate.clear()
    rig.writes.offer(segment("a"), PAYLOAD)
    rig.writes.change(lambda tier: tier.clear())
    rig.writes.offer(segment("b"), PAYLOAD)
    assert rig.writes.is_changing
    rig.store.gate.set()
    rig.writes.close(DEADLINE_S)
    assert not rig.writes.is_changing
    assert (rig.has("a"), rig.has("b")) == (False, True)


def test_a_failing_change_is_over_too(rig: Rig) -> None:
    rig.writes.change(lambda tier: 1 / 0)
    until(lambda: not rig.writes.is_changing)


def test_other_jobs_run_in_the_writing_thread_behind_the_writes(rig: Rig) -> None:
    seen: list[tuple[int, bool]] = []
    rig.store.gate.clear()
    rig.writes.offer(segment("a"), PAYLOAD)
    rig.writes.submit(lambda: seen.append((get_ident(), rig.has("a"))))
    rig.store.gate.set()
    rig.writes.close(DEADLINE_S)
    assert [is_there for _, is_there in seen] == [True]
    assert seen[0][0] != get_ident()


@pytest.mark.parametrize("error", [TierUnavailable("ENOSPC"), RuntimeError("a fault of ours")])
def test_a_write_that_fails_gives_its_bytes_back_and_the_next_is_written(
    rig: Rig, error: Exception
) -> None:
    rig.store.error = error
    rig.writes.offer(segment("a"), PAYLOAD)
    until(lambda: rig.writes.num_bytes == 0)
    rig.store.error = None
    rig.writes.offer(segment("b"), PAYLOAD)
    until(lambda: rig.has("b"))
    assert not rig.has("a")


def test_a_write_happens_at_the_time_it_is_carried_out(rig: Rig) -> None:
    rig.tier.keep(segment("a", expires_ms=5), PAYLOAD, now_ms=0)
    rig.store.gate.clear()
    rig.writes.offer(segment("x"), PAYLOAD)
    rig.writes.offer(segment("a", expires_ms=50), PAYLOAD)
    rig.now_ms = 5
    rig.store.gate.set()
    rig.writes.close(DEADLINE_S)
    assert rig.tier.match([[named_key("a")]], now_ms=49) == ((segment("a", expires_ms=50),),)
    assert rig.tier.stats().num_stores == 3  # the one that expired meanwhile was stored anew


def test_closing_ends_behind_what_was_offered(rig: Rig) -> None:
    rig.store.gate.clear()
    rig.writes.offer(segment("a"), PAYLOAD)
    rig.writes.offer(segment("b"), PAYLOAD)
    closing = Thread(target=rig.writes.close, args=(DEADLINE_S,))
    closing.start()
    until(lambda: rig.store.puts == ["a"])
    assert closing.is_alive()
    rig.store.gate.set()
    closing.join()
    assert rig.has("a")
    assert rig.has("b")


def test_closing_a_queue_whose_tier_hangs_waits_no_longer_than_told(rig: Rig) -> None:
    rig.store.gate.clear()
    rig.writes.offer(segment("a"), PAYLOAD)
    started = time.monotonic()
    rig.writes.close(0.01)
    assert time.monotonic() - started < DEADLINE_S / 2
    assert not rig.has("a")
