"""Whatever fails and whoever else writes, index and store end in agreement, and nothing raises."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.chunk_index.file_store import FileStore
from sglang_ext.chunk_index.identity import ChunkKey
from sglang_ext.chunk_index.index import NodeRecord, Publication, Reservation, Shortage
from sglang_ext.chunk_index.memory_index import MemoryIndex
from sglang_ext.chunk_index.payloads import HostStore, OnBytes, PayloadStore
from sglang_ext.chunk_index.tier import BATCH, RemoteTier, Tier
from sglang_ext.errors import IndexUnavailable, PayloadLost, TierUnavailable
from tests.blobs import BytesCodec, random_payload, record_of
from tests.strategies import BytesPayload, named_key, node_record, record_names

Store = PayloadStore[BytesPayload]

MODIFYING = ("reserve", "cancel", "publish", "annotate", "remove", "evict", "expire")


class LoggedIndex(MemoryIndex):
    """Writes down what is called, and can be made unavailable method by method.

    Attributes:
        calls: Names of calls that modify, in order; those of the store too if it shares the list.
        broken: Methods that cannot be reached.
        deaf: Methods that do their work, but whose answer gets lost.
        meanwhile: Done once, just before bytes are reserved, as by another writer.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        super().__init__(budget_bytes)
        self.calls: list[str] = []
        self.broken: set[str] = set()
        self.deaf: set[str] = set()
        self.meanwhile: Callable[[], object] | None = None

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if name.startswith("_") or not callable(method) or name == "meanwhile":
            return method

        def call(*args: Any, **kwargs: Any) -> Any:
            if name in self.broken:
                raise IndexUnavailable("down")
            if name in MODIFYING:
                self.calls.append(name)
            answer = method(*args, **kwargs)
            if name in self.deaf:
                raise IndexUnavailable("no answer")
            return answer

        return call

    def reserve(self, owner: str, num_bytes: int, now_ms: int) -> Reservation | Shortage:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return super().reserve(owner, num_bytes, now_ms)


class LoggedStore(HostStore[BytesPayload]):
    """Writes down what is called, and can be made to fail.

    Attributes:
        calls: Names of calls, in order.
        put_error: Raised by the next puts.
        get_error: Raised by the next gets.
    """

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls
        self.put_error: Exception | None = None
        self.get_error: Exception | None = None

    def put(self, record: NodeRecord, payload: BytesPayload) -> None:
        self.calls.append("put")
        if self.put_error is not None:
            raise self.put_error
        super().put(record, payload)

    def get(self, record: NodeRecord, on_bytes: OnBytes | None = None) -> BytesPayload:
        if self.get_error is not None:
            raise self.get_error
        return super().get(record, on_bytes)

    def drop(self, record: NodeRecord) -> None:
        self.calls.append("drop")
        super().drop(record)


class Rig:
    """A tier whose index and store can be watched and broken."""

    def __init__(self, budget_bytes: int | None = None) -> None:
        self.index = LoggedIndex(budget_bytes)
        self.store = LoggedStore(self.index.calls)
        self.tier = Tier("disk", self.index, self.store)

    def keep(self, record: NodeRecord, now_ms: int = 0) -> str | None:
        return self.tier.keep(record, payload_of(record), now_ms)

    def keep_all(self, *names: str, **fields: Any) -> list[NodeRecord]:
        """Keep segments of 10 bytes; `a1` stands below `a`, and so on."""
        records = [segment(name, **fields) for name in names]
        for record in records:
            assert self.keep(record) is None
        self.index.calls.clear()
        return records


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    assert_agrees(rig.tier)


def segment(name: str, num_bytes: int = 10, **fields: Any) -> NodeRecord:
    """A segment's record; a longer name stands below the same name without its last letter."""
    fields.setdefault("parent", name[:-1] or None)
    return record_of(random_payload(num_bytes, seed=len(name)), name, **fields)


def payload_of(record: NodeRecord) -> BytesPayload:
    return random_payload(record.payload_bytes, seed=len(record.key.rstrip(b"_")))


def assert_agrees(tier: Tier[BytesPayload]) -> None:
    """Index and store have the same segments, and no bytes stay reserved."""
    tier.index.check_integrity()
    indexed = sorted((v.record.key, v.record.checksum) for v in tier.index.scan())
    kept = sorted((record.key, record.checksum) for record in tier.store.records())
    assert indexed == kept
    assert tier.index.stats().reserved_bytes == 0


def names_in(tier: Tier[BytesPayload]) -> list[str]:
    return sorted(record_names(view.record for view in tier.index.scan()))


# What order things change in


def test_bytes_are_reserved_then_the_payload_is_put_then_its_record_is_published(rig: Rig) -> None:
    assert rig.keep(segment("a")) is None
    assert rig.index.calls == ["reserve", "put", "publish"]
    assert rig.tier.stats().num_stores == 1


@pytest.mark.parametrize(
    ("leave", "removal"),
    [
        (lambda tier: tier.collect(10), "expire"),
        (lambda tier: tier.discard(segment("a", expires_ms=9), "damaged"), "remove"),
    ],
)
def test_a_record_leaves_before_its_payload_is_dropped(
    rig: Rig, leave: Callable[[Tier[BytesPayload]], object], removal: str
) -> None:
    rig.keep_all("a", expires_ms=9)
    leave(rig.tier)
    assert rig.index.calls[:2] == [removal, "drop"]
    assert names_in(rig.tier) == []


def test_victims_leave_before_their_payloads_are_dropped_and_before_the_new_one_is_put() -> None:
    rig = Rig(budget_bytes=10)
    rig.keep_all("a")
    assert rig.keep(segment("b")) is None
    order = ["reserve", "expire", "evict", "drop", "reserve", "put", "publish"]
    assert rig.index.calls == order
    assert names_in(rig.tier) == ["b"]
    assert_agrees(rig.tier)


# What the index refuses


def test_a_segment_whose_parent_goes_meanwhile_leaves_no_payload(rig: Rig) -> None:
    (parent,) = rig.keep_all("a")
    rig.index.meanwhile = lambda: rig.tier.discard(parent, "absent")
    assert rig.keep(segment("ab")) == "orphan"
    assert rig.tier.stats().refusals["orphan"] == 1


def test_an_orphan_reserves_nothing_and_evicts_nothing() -> None:
    rig = Rig(budget_bytes=10)
    rig.keep_all("a")
    assert rig.keep(segment("bc")) == "orphan"
    assert rig.index.calls == []
    assert names_in(rig.tier) == ["a"]


# Two writers of one key


@pytest.fixture
def files(tmp_path: Path) -> FileStore[BytesPayload]:
    store = FileStore(tmp_path / "tier", BytesCodec())
    store.probe()
    return store


def test_the_first_publication_wins_and_the_losers_other_bytes_go(
    files: FileStore[BytesPayload],
) -> None:
    index = LoggedIndex()
    one, two = Tier("shared", index, files), Tier("shared", index, files)
    first, second = random_payload(10, seed=1), random_payload(10, seed=2)
    winner, loser = record_of(first), record_of(second, doc_ids=("doc",))
    index.meanwhile = lambda: one.keep(winner, first, now_ms=0)
    assert two.keep(loser, second, now_ms=0) is None
    assert one.load(winner) == first
    assert list(files.records()) == [winner]
    view = index.show(winner.key)
    assert view is not None
    assert view.record == replace(winner, doc_ids=("doc",))
    assert (one.stats().num_stores, two.stats().num_stores) == (1, 0)
    assert_agrees(one)


def test_equal_bytes_of_a_second_writer_stay(files: FileStore[BytesPayload]) -> None:
    index = LoggedIndex()
    one, two = Tier("shared", index, files), Tier("shared", index, files)
    payload = random_payload(10)
    index.meanwhile = lambda: one.keep(record_of(payload), payload, now_ms=0)
    assert two.keep(record_of(payload), payload, now_ms=0) is None
    assert two.load(record_of(payload)) == payload
    assert_agrees(two)


def test_a_key_that_another_writer_stored_and_that_is_expired_refuses_and_keeps_its_payload(
    files: FileStore[BytesPayload],
) -> None:
    index = LoggedIndex()
    one, two = Tier("shared", index, files), Tier("shared", index, files)
    first, second = random_payload(10, seed=1), random_payload(10, seed=2)
    expired = record_of(first, expires_ms=5)
    index.meanwhile = lambda: one.keep(expired, first, now_ms=0)
    assert two.keep(record_of(second), second, now_ms=5) == "busy"
    assert two.stats().refusals["busy"] == 1
    assert list(files.records()) == [expired]
    assert_agrees(one)


def test_storing_again_puts_nothing_and_adds_documents_expiry_and_pin(rig: Rig) -> None:
    rig.keep_all("a", expires_ms=5, doc_ids=("one",))
    again = replace(segment("a"), expires_ms=9, doc_ids=("two",), pinned=True)
    assert rig.keep(again) is None
    assert rig.index.calls == ["annotate"]
    view = rig.index.show(again.key)
    assert view is not None
    assert view.record == replace(again, doc_ids=("one", "two"))
    assert rig.tier.stats().num_stores == 1


def test_there_is_nothing_to_annotate_without_documents_expiry_or_pin(rig: Rig) -> None:
    rig.keep_all("a")
    rig.tier.annotate(segment("a"))
    assert rig.index.calls == []


# An index or a store that cannot be reached


@pytest.mark.parametrize("method", ["show", "reserve", "publish"])
def test_an_index_lost_while_storing_leaves_no_payload_and_no_record(rig: Rig, method: str) -> None:
    rig.index.broken = {method}
    assert rig.keep(segment("a")) == "unavailable"
    rig.index.broken = set()
    assert rig.tier.stats().num_unavailable == 1
    assert rig.tier.stats().refusals["unavailable"] == 1
    assert list(rig.store.records()) == list(rig.index.scan()) == []
    end_reservations(rig)


@pytest.mark.parametrize("method", ["expire", "victims", "evict"])
def test_an_index_lost_while_making_room_leaves_what_there_was(method: str) -> None:
    rig = Rig(budget_bytes=10)
    rig.keep_all("a")
    rig.index.broken = {method}
    assert rig.keep(segment("b")) == "unavailable"
    rig.index.broken = set()
    assert names_in(rig.tier) == ["a"]
    assert_agrees(rig.tier)


def test_a_payload_stays_if_nobody_can_tell_whether_it_was_published(rig: Rig) -> None:
    """One too many is found by a sweep; one too few would be a lost hit."""
    rig.index.meanwhile = lambda: rig.index.broken.update({"publish", "show"})
    assert rig.keep(segment("a")) == "unavailable"
    rig.index.broken = set()
    assert record_names(rig.store.records()) == ["a"]
    rig.store.drop(segment("a"))
    end_reservations(rig)


def test_a_publication_whose_answer_got_lost_keeps_its_payload(rig: Rig) -> None:
    rig.index.deaf = {"publish"}
    assert rig.keep(segment("a")) == "unavailable"
    rig.index.deaf = set()
    assert rig.tier.load(segment("a")) == payload_of(segment("a"))


def test_a_store_that_cannot_be_written_gives_the_bytes_back(rig: Rig) -> None:
    rig.store.put_error = TierUnavailable("ENOSPC")
    assert rig.keep(segment("a")) == "unavailable"
    assert rig.index.calls == ["reserve", "put", "cancel"]
    assert rig.tier.stats().refusals["unavailable"] == rig.tier.stats().num_unavailable == 1


def test_an_unexpected_error_while_writing_gives_the_bytes_back_too(rig: Rig) -> None:
    rig.store.put_error = MemoryError()
    with pytest.raises(MemoryError):
        rig.keep(segment("a"))


def test_neither_writing_nor_giving_back_is_still_only_a_refusal(rig: Rig) -> None:
    rig.store.put_error = TierUnavailable("EIO")
    rig.index.broken = {"cancel"}
    assert rig.keep(segment("a")) == "unavailable"
    rig.index.broken = set()
    end_reservations(rig)


def end_reservations(rig: Rig) -> None:
    """Give back what an unavailable index could not be told of; a remote one does so by itself."""
    for number in range(1, 9):
        rig.index.cancel(Reservation(number.to_bytes(8, "big"), "", 10))


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("match", lambda tier: tier.match([[named_key("a"), named_key("ab")]], 0) == ((),)),
        ("expire", lambda tier: tier.collect(0) == 0),
        ("invalidate", lambda tier: tier.invalidate("doc", "") == 0),
        ("clear", lambda tier: tier.clear() == 0),
        ("annotate", lambda tier: tier.annotate(segment("a", pinned=True)) is None),
        ("show", lambda tier: tier.discard(segment("a"), "absent") is None),
        ("remove", lambda tier: tier.discard(segment("a"), "absent") is None),
    ],
)
def test_an_unavailable_index_changes_nothing_and_never_raises(
    rig: Rig, method: str, call: Callable[[Tier[BytesPayload]], bool]
) -> None:
    rig.keep_all("a")
    rig.index.broken = {method}
    assert call(rig.tier)
    assert rig.tier.stats().num_unavailable == 1
    rig.index.broken = set()
    assert names_in(rig.tier) == ["a"]


def test_trouble_is_counted_each_time_and_logged_once_per_kind(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    rig.index.broken = {"match"}
    for _ in range(3):
        rig.tier.match([[named_key("a")]], now_ms=0)
    assert len(caplog.messages) == 1
    assert "tier=disk" in caplog.messages[0]
    rig.store.get_error = TierUnavailable("EIO")
    for _ in range(3):
        rig.tier.load(segment("a"))
    assert len(caplog.messages) == 2
    rig.store.get_error = PayloadLost("damaged")
    for _ in range(3):
        rig.tier.load(segment("a"))
    assert len(caplog.messages) == 3
    assert rig.tier.stats().num_unavailable == 6
    assert rig.tier.stats().load_failures == {"damaged": 3}


# Loads


def test_a_payload_is_loaded_with_its_bytes_told(rig: Rig) -> None:
    (record,) = rig.keep_all("a")
    told: list[int] = []
    assert rig.tier.load(record, told.append) == payload_of(record)
    assert sum(told) == record.payload_bytes


def test_a_lost_payload_takes_its_record_and_all_below_it(rig: Rig) -> None:
    records = rig.keep_all("a", "ab", "abc", "x")
    rig.store.drop(records[1])
    assert rig.tier.load(records[1]) is None
    assert names_in(rig.tier) == ["a", "x"]
    assert rig.tier.stats().load_failures == {"absent": 1}


def test_a_store_that_cannot_tell_costs_a_miss_and_no_record(rig: Rig) -> None:
    (record,) = rig.keep_all("a")
    rig.store.get_error = TierUnavailable("EIO")
    assert rig.tier.load(record) is None
    assert names_in(rig.tier) == ["a"]
    assert (rig.tier.stats().load_failures, rig.tier.stats().num_unavailable) == ({}, 1)


def test_discarding_leaves_what_another_writer_put_in_its_place(rig: Rig) -> None:
    (present,) = rig.keep_all("a")
    rig.tier.discard(replace(present, checksum=present.checksum ^ 1), "absent")
    assert names_in(rig.tier) == ["a"]
    assert rig.tier.stats().load_failures == {"absent": 1}


def test_what_was_found_and_what_was_not_is_counted(rig: Rig) -> None:
    rig.keep_all("a", "ab", "x")
    paths = [["a", "ab", "abc"], ["x"], ["y"]]
    found = rig.tier.match([[named_key(name) for name in path] for path in paths], now_ms=0)
    assert [record_names(run) for run in found] == [["a", "ab"], ["x"], []]
    assert (rig.tier.stats().num_hits, rig.tier.stats().num_misses) == (3, 2)


# Room


def test_only_as_much_is_evicted_as_the_new_segment_needs_and_leaves_go_first() -> None:
    rig = Rig(budget_bytes=60)
    rig.keep_all("a", "ab", "abc", "abcd", "x", "y")
    assert rig.keep(segment("z", 15)) is None
    assert names_in(rig.tier) == ["a", "ab", "x", "y", "z"]
    assert rig.tier.stats().num_evictions == 2
    assert rig.tier.stats().used_bytes == 55
    assert_agrees(rig.tier)


def test_a_segment_above_the_budget_evicts_nothing() -> None:
    rig = Rig(budget_bytes=20)
    rig.keep_all("a", "x")
    assert rig.keep(segment("y", 21)) == "too_large"
    assert names_in(rig.tier) == ["a", "x"]
    assert rig.tier.stats().refusals["too_large"] == 1


def test_nothing_is_evicted_for_a_segment_that_cannot_fit_anyway() -> None:
    rig = Rig(budget_bytes=20)
    rig.keep_all("a", pinned=True)
    rig.keep_all("x")
    assert rig.keep(segment("y", 11)) == "no_room"
    assert names_in(rig.tier) == ["a", "x"]
    assert_agrees(rig.tier)


def test_a_segment_never_evicts_those_above_it_even_if_they_are_the_oldest() -> None:
    rig = Rig(budget_bytes=40)
    rig.keep_all("a", "ab", "x", "y")
    assert rig.keep(segment("abc")) is None
    assert names_in(rig.tier) == ["a", "ab", "abc", "y"]
    assert_agrees(rig.tier)


def test_a_chunk_that_fills_the_tier_keeps_its_leading_part() -> None:
    rig = Rig(budget_bytes=20)
    rig.keep_all("a", "ab")
    assert rig.keep(segment("abc")) == "no_room"
    assert names_in(rig.tier) == ["a", "ab"]
    assert rig.tier.stats().num_evictions == 0


def test_an_owner_with_a_quota_evicts_its_own_segments_only() -> None:
    rig = Rig(budget_bytes=100)
    rig.index.set_quota("me", 20)
    rig.keep_all("x", "y", owner="you")
    rig.keep_all("a", "b", owner="me")
    assert rig.keep(segment("c", owner="me")) is None
    assert names_in(rig.tier) == ["b", "c", "x", "y"]
    assert rig.index.usage()["me"].num_bytes == 20
    assert_agrees(rig.tier)


def test_a_quota_full_of_pinned_segments_refuses_though_the_budget_has_room() -> None:
    rig = Rig(budget_bytes=100)
    rig.index.set_quota("me", 10)
    rig.keep_all("a", owner="me", pinned=True)
    assert rig.keep(segment("b", owner="me")) == "no_room"
    assert rig.keep(segment("b", owner="you")) is None


def test_an_owner_within_its_quota_loses_nothing_to_others() -> None:
    rig = Rig(budget_bytes=40)
    rig.index.set_quota("me", 20)
    rig.keep_all("a", "b", owner="me")
    for name in "stuvwxyz":
        assert rig.keep(segment(name, owner="you")) is None
    assert names_in(rig.tier) == ["a", "b", "y", "z"]
    assert_agrees(rig.tier)


# Time, documents, owners


def test_expired_segments_make_room_before_anything_is_evicted() -> None:
    rig = Rig(budget_bytes=20)
    rig.keep_all("a")
    rig.keep_all("x", expires_ms=5)
    assert rig.keep(segment("y"), now_ms=5) is None
    assert names_in(rig.tier) == ["a", "y"]
    assert rig.tier.stats().num_evictions == 0


def test_an_expired_segment_is_stored_anew_at_once(rig: Rig) -> None:
    rig.keep_all("a", expires_ms=5)
    assert rig.keep(segment("a"), now_ms=5) is None
    assert rig.tier.match([[named_key("a")]], now_ms=99) == ((segment("a"),),)


def test_a_key_that_is_expired_and_not_collected_is_busy_before_anything_is_put(rig: Rig) -> None:
    """Its payload would take the place of one that a reader may be using."""
    rig.keep_all("a", expires_ms=5)
    for number in range(BATCH):
        name = chr(0x4E00 + number)
        earlier = replace(record_of(payload_of(segment("x")), name), expires_ms=4, parent=None)
        assert rig.keep(earlier) is None
    rig.index.calls.clear()
    assert rig.keep(segment("a"), now_ms=5) == "busy"
    assert "put" not in rig.index.calls
    assert rig.tier.collect(now_ms=5) == 1


def test_collecting_takes_exactly_what_is_expired_and_all_below(rig: Rig) -> None:
    rig.keep_all("x")
    rig.keep_all("a", expires_ms=5)
    rig.keep_all("ab")
    assert rig.tier.collect(now_ms=4) == 0
    assert rig.tier.collect(now_ms=5) == 2
    assert names_in(rig.tier) == ["x"]


def test_invalidation_reaches_its_owners_segments_and_all_below(rig: Rig) -> None:
    rig.keep_all("a", "ab", owner="me", doc_ids=("doc@1",))
    rig.keep_all("abc", owner="me")
    rig.keep_all("x", owner="you", doc_ids=("doc@1",))
    assert rig.tier.invalidate("doc@2", owner="me") == 0
    assert rig.tier.invalidate("doc", owner="me") == 3
    assert names_in(rig.tier) == ["x"]


def test_clearing_reaches_everything_or_one_owner_or_one_model(rig: Rig) -> None:
    rig.keep_all("a", owner="me", model="old")
    rig.keep_all("b", owner="me", model="new")
    rig.keep_all("c", owner="you", model="old")
    assert rig.tier.clear(model="old") == 2
    assert names_in(rig.tier) == ["b"]
    assert rig.tier.clear(owner="you") == 0
    assert rig.tier.clear(owner="me") == 1


def test_a_removal_of_any_size_ends_in_one_call(rig: Rig) -> None:
    num_segments = 2 * BATCH + 3
    for number in range(num_segments):
        assert rig.keep(node_record(f"{number}")) is None
    assert rig.tier.clear() == num_segments


# After a restart


def restarted(
    files: FileStore[BytesPayload], budget_bytes: int | None = None
) -> Tier[BytesPayload]:
    """A tier over what an earlier run left behind, not yet adopted."""
    return Tier("disk", MemoryIndex(budget_bytes), files)


def fill(files: FileStore[BytesPayload], *names: str) -> list[NodeRecord]:
    records = [segment(name, created_ms=created) for created, name in enumerate(names)]
    for record in records:
        files.put(record, payload_of(record))
    return records


def test_what_an_earlier_run_stored_is_found_again_with_the_same_bytes(
    files: FileStore[BytesPayload],
) -> None:
    records = fill(files, "abc", "ab", "a", "x")  # children are older than their parents
    tier = restarted(files)
    assert tier.adopt() == 4
    paths = [[named_key(name) for name in ("a", "ab", "abc")], [named_key("x")]]
    (chunk, other) = tier.match(paths, now_ms=0)
    assert chunk == (records[2], records[1], records[0])
    assert other == (records[3],)
    assert [tier.load(record) for record in chunk] == [payload_of(record) for record in chunk]
    assert_agrees(tier)


def test_segments_that_lost_a_parent_are_dropped(files: FileStore[BytesPayload]) -> None:
    fill(files, "a", "abc", "abcd", "xy")
    tier = restarted(files)
    assert tier.adopt() == 1
    assert record_names(files.records()) == ["a"]
    assert_agrees(tier)


def test_segments_that_name_each_other_as_parents_are_dropped(
    files: FileStore[BytesPayload],
) -> None:
    for name, parent in (("a", "b"), ("b", "a"), ("c", "c")):
        record = segment(name, parent=None)
        files.put(replace(record, parent=named_key(parent)), payload_of(record))
    tier = restarted(files)
    assert tier.adopt() == 0
    assert list(files.records()) == []


def test_of_two_payloads_of_one_key_one_is_adopted_with_all_below_it(
    files: FileStore[BytesPayload],
) -> None:
    for seed in range(2):
        payload = random_payload(10, seed)
        files.put(record_of(payload, "a", created_ms=seed), payload)
    fill(files, "ab")
    tier = restarted(files, budget_bytes=20)
    assert tier.adopt() == 2
    assert names_in(tier) == ["a", "ab"]
    assert_agrees(tier)


def test_adopting_evicts_nothing_for_what_it_drops(files: FileStore[BytesPayload]) -> None:
    """A second payload of a key, and a child whose parent is too large."""
    fill(files, "x", "y")
    second = random_payload(10, seed=9)
    files.put(record_of(second, "x", created_ms=5), second)
    large = random_payload(30)
    files.put(record_of(large, "a"), large)
    fill(files, "ab")
    tier = restarted(files, budget_bytes=20)
    assert tier.adopt() == 2
    assert names_in(tier) == ["x", "y"]
    assert tier.stats().num_evictions == 0
    assert_agrees(tier)


def test_adopting_keeps_to_the_budget_and_prefers_what_is_newer(
    files: FileStore[BytesPayload],
) -> None:
    fill(files, *"abcdefgh")
    tier = restarted(files, budget_bytes=35)
    tier.adopt()
    assert names_in(tier) == ["f", "g", "h"]
    assert_agrees(tier)


def test_a_segment_that_expired_while_nobody_ran_is_a_miss_and_is_collected(
    files: FileStore[BytesPayload],
) -> None:
    record = segment("a", created_ms=1, expires_ms=5)
    files.put(record, payload_of(record))
    tier = restarted(files)
    tier.adopt()
    assert tier.match([[record.key]], now_ms=9) == ((),)
    assert tier.collect(now_ms=9) == 1
    assert list(files.records()) == []


def test_a_folder_that_cannot_be_listed_adopts_nothing(tmp_path: Path) -> None:
    assert restarted(FileStore(tmp_path / "missing", BytesCodec())).adopt() == 0


# A tier over a network


class CountingIndex(MemoryIndex):
    """Counts how often its totals are asked for."""

    num_asked = 0

    def stats(self) -> Any:
        self.num_asked += 1
        return super().stats()


def test_totals_of_a_remote_tier_are_those_last_asked_for() -> None:
    index = CountingIndex(100)
    tier: RemoteTier[BytesPayload] = RemoteTier("shared", index, HostStore())
    tier.refresh_totals()
    assert tier.keep(segment("a"), payload_of(segment("a")), now_ms=0) is None
    assert (tier.stats().num_entries, tier.stats().budget_bytes) == (0, 100)
    assert index.num_asked == 1
    tier.refresh_totals()
    assert tier.stats().num_entries == 1


def test_totals_of_an_unavailable_index_stay_what_they_were() -> None:
    index = LoggedIndex(100)
    tier: RemoteTier[BytesPayload] = RemoteTier("shared", index, HostStore())
    tier.refresh_totals()
    index.broken = {"stats"}
    tier.refresh_totals()
    assert tier.stats().budget_bytes == 100
    assert tier.stats().num_unavailable == 1


class Refusing(MemoryIndex):
    """Answers every publication alike."""

    def __init__(self, answer: Publication) -> None:
        super().__init__()
        self.answer = answer

    def publish(
        self, record: NodeRecord, now_ms: int, reservation: Reservation | None = None
    ) -> Publication:
        if reservation is not None:
            self.cancel(reservation)
        return self.answer


@pytest.mark.parametrize(
    ("answer", "refusal"),
    [(Publication.ORPHAN, "orphan"), (Publication.BUSY, "busy"), (Publication.PRESENT, None)],
)
def test_a_publication_that_is_not_stored_leaves_no_payload(
    files: FileStore[BytesPayload], answer: Publication, refusal: str | None
) -> None:
    tier = Tier("shared", Refusing(answer), files)
    assert tier.keep(segment("a"), payload_of(segment("a")), now_ms=0) == refusal
    assert list(files.records()) == []
    assert tier.stats().num_stores == 0


def test_a_spoilt_plan_is_made_anew(files: FileStore[BytesPayload]) -> None:
    """Victims that were annotated, replaced or read since they were chosen stay."""

    class Spoiling(MemoryIndex):
        spoil: ChunkKey | None = None

        def evict(self, records: Sequence[NodeRecord]) -> tuple[NodeRecord, ...]:
            key, self.spoil = self.spoil, None
            if key is not None:
                self.annotate(key, pinned=True)
            return super().evict(records)

    index = Spoiling(30)
    tier = Tier("disk", index, files)
    for name in "abc":
        assert tier.keep(segment(name), payload_of(segment(name)), now_ms=0) is None
    index.spoil = named_key("a")
    assert tier.keep(segment("d", 20), random_payload(20, seed=1), now_ms=0) is None
    assert names_in(tier) == ["a", "d"]
    assert_agrees(tier)
