"""The command log on a real Redis: what a server reads after it was away, and what it does then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from sglang_ext.chunk_index import commands
from sglang_ext.chunk_index.arena import Arena
from sglang_ext.chunk_index.commands import (
    Clear,
    Command,
    CommandLog,
    Invalidate,
    Pin,
    Remove,
    Unpin,
    apply,
    decode_command,
    encode_command,
)
from sglang_ext.chunk_index.memory_index import MemoryIndex
from sglang_ext.chunk_index.payloads import HostStore
from sglang_ext.chunk_index.redis_commands import Command as RedisCommand
from sglang_ext.chunk_index.redis_index import RedisIndex
from sglang_ext.chunk_index.redis_link import RedisLink
from sglang_ext.chunk_index.tier import Tier
from sglang_ext.errors import IndexUnavailable
from tests.blobs import random_payload, record_of
from tests.picctl_data import make_store
from tests.redis_server import RedisServer, open_link, redis_server, shared_server
from tests.strategies import BytesPayload, key_name, named_key

pytestmark = pytest.mark.redis

ALL = (
    Invalidate("me", "doc@2"),
    Invalidate("", "\udc80 lone surrogate"),
    Clear(),
    Clear(owner="me"),
    Clear(owner="me", model="m" * 16),
    Remove(named_key("a")),
    Pin((named_key("a"), named_key("b"))),
    Unpin(()),
)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


def test_the_user_of_a_shared_index_may_use_the_log() -> None:
    with open_link(shared_server("tls").url) as link:
        log = CommandLog(link)
        start = log.read(None, limit=10).last_id
        posted = log.post(Clear())
        assert log.read(start, limit=10).ids == (posted,)
        assert log.read("1-1", limit=10).is_log_lost


@pytest.fixture
def link(server: RedisServer) -> Iterator[RedisLink]:
    server.cli("FLUSHALL")
    with open_link(server.url) as link:
        yield link


@pytest.fixture
def log(link: RedisLink) -> CommandLog:
    return CommandLog(link)


def _read_all(log: CommandLog, after: str) -> list[Command]:
    found: list[Command] = []
    while batch := log.read(after, limit=3):
        found += batch.commands
        if batch.last_id == after:
            return found
        assert not batch.has_gap
        after = batch.last_id
    return found


@pytest.mark.parametrize("command", ALL, ids=repr)
def test_every_command_comes_back_as_it_was_posted(log: CommandLog, command: Command) -> None:
    start = log.read(None, limit=10).last_id
    posted_id = log.post(command)
    batch = log.read(start, limit=10)
    assert (batch.commands, batch.ids) == ((command,), (posted_id,))


def test_a_new_reader_gets_only_what_is_posted_from_now_on(log: CommandLog) -> None:
    log.post(Clear())
    batch = log.read(None, limit=10)
    assert batch.commands == ()
    log.post(Remove(named_key("a")))
    assert log.read(batch.last_id, limit=10).commands == (Remove(named_key("a")),)


def test_a_reader_that_was_away_gets_all_in_order_however_few_at_a_time(log: CommandLog) -> None:
    start = log.read(None, limit=10).last_id
    posted = [Invalidate("me", f"doc{number}") for number in range(20)]
    for command in posted:
        log.post(command)
    assert _read_all(log, start) == posted


def test_the_first_command_of_all_is_no_gap_for_who_read_the_empty_log(log: CommandLog) -> None:
    start = log.read(None, limit=10).last_id
    log.post(Clear())
    batch = log.read(start, limit=10)
    assert (batch.commands, batch.has_gap, batch.num_unknown) == ((Clear(),), False, 0)


def test_nothing_new_is_nothing(log: CommandLog) -> None:
    start = log.read(None, limit=10).last_id
    batch = log.read(start, limit=10)
    assert (batch.commands, batch.last_id, batch.has_gap) == ((), start, False)


def test_a_log_trimmed_beyond_the_reader_is_a_gap(log: CommandLog, server: RedisServer) -> None:
    start = log.read(None, limit=10).last_id
    for number in range(5):
        log.post(Invalidate("me", f"doc{number}"))
    server.cli("XTRIM", commands.LOG.decode(), "MAXLEN", "2")
    batch = log.read(start, limit=10)
    assert batch.has_gap
    assert batch.commands == (Invalidate("me", "doc3"), Invalidate("me", "doc4"))
    assert not log.read(batch.last_id, limit=10).has_gap


def test_the_log_is_bounded(link: RedisLink, log: CommandLog) -> None:
    start = log.read(None, limit=1).last_id
    calls = link.background()
    for _ in range(commands.MAX_ENTRIES // 500 + 1):
        words = ("XADD", commands.LOG, "*", commands.FIELD, encode_command(Clear()))
        calls.run([RedisCommand(commands.LOG, words)] * 500)
    log.post(Clear())
    num_entries = calls.call("XLEN", commands.LOG)
    assert isinstance(num_entries, int)
    assert commands.MAX_ENTRIES <= num_entries <= commands.MAX_ENTRIES + 200
    batch = log.read(start, limit=10)
    assert (batch.has_gap, batch.is_log_lost) == (True, False)


def test_a_lost_log_is_a_gap_and_read_on_from_there(log: CommandLog, server: RedisServer) -> None:
    log.post(Clear())
    start = log.read(None, limit=10).last_id
    server.cli("FLUSHALL")
    batch = log.read(start, limit=10)
    assert (batch.commands, batch.has_gap, batch.is_log_lost) == ((), True, True)
    log.post(Remove(named_key("a")))
    after = log.read(batch.last_id, limit=10)
    assert (after.commands, after.has_gap) == ((Remove(named_key("a")),), False)


@pytest.mark.parametrize(
    "content",
    [
        msgspec.msgpack.encode(["explode", [b"me"]]),
        msgspec.msgpack.encode(["remove", [b"too short"]]),
        msgspec.msgpack.encode(["invalidate", [b"me"]]),
        msgspec.msgpack.encode(["invalidate", [b"me", None]]),
        msgspec.msgpack.encode(["clear", [b"me", b"m", b"and more"]]),
        msgspec.msgpack.encode(["pin", [[named_key("a")] * (commands.MAX_KEYS + 1)]]),
        msgspec.msgpack.encode({"name": "clear"}),
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x00" * 200_000,
    ],
)
def test_what_is_no_command_is_counted_and_skipped(
    link: RedisLink, log: CommandLog, content: bytes
) -> None:
    assert decode_command(content) is None
    start = log.read(None, limit=10).last_id
    link.call("XADD", commands.LOG, "*", commands.FIELD, content)
    link.call("XADD", commands.LOG, "*", "another", "field", "and", "more")
    log.post(Clear())
    batch = log.read(start, limit=10)
    assert (batch.commands, batch.num_unknown, batch.has_gap) == ((Clear(),), 2, False)


def test_without_redis_the_log_is_unavailable(log: CommandLog, link: RedisLink) -> None:
    link.close()
    with pytest.raises(IndexUnavailable):
        log.post(Clear())
    with pytest.raises(IndexUnavailable):
        log.read(None, limit=1)


@pytest.fixture
def tiers(tmp_path: Path) -> list[Tier[BytesPayload]]:
    """An arena and a disk tier with the same four segments."""
    disk: Tier[BytesPayload] = Tier("disk", MemoryIndex(), make_store(tmp_path / "disk", None))
    both: list[Tier[BytesPayload]] = [Arena(MemoryIndex(), HostStore()), disk]
    for tier in both:
        for name, parent, fields in (
            ("a", None, {"owner": "me", "model": "m", "doc_ids": ("doc@1",)}),
            ("ab", "a", {"owner": "me", "model": "m"}),
            ("b", None, {"owner": "me", "model": "n"}),
            ("c", None, {"owner": "you", "model": "m", "doc_ids": ("doc@1",)}),
        ):
            payload = random_payload(64, seed=len(name))
            record = record_of(payload, name, parent=parent, **fields)
            assert tier.keep(record, payload, now_ms=1) is None
    return both


@pytest.mark.parametrize(
    ("command", "left"),
    [
        (Invalidate("me", "doc"), ["b", "c"]),
        (Invalidate("me", "doc@2"), ["a", "ab", "b", "c"]),
        (Clear(), []),
        (Clear(owner="me"), ["c"]),
        (Clear(model="m"), ["b"]),
        (Clear(owner="you", model="n"), ["a", "ab", "b", "c"]),
        (Remove(named_key("a")), ["b", "c"]),
        (Remove(named_key("x")), ["a", "ab", "b", "c"]),
    ],
    ids=repr,
)
def test_a_command_empties_entries_and_payloads_alike_in_every_tier(
    tiers: list[Tier[BytesPayload]], command: Command, left: list[str]
) -> None:
    num_left = apply(command, tiers)
    assert num_left == 2 * (4 - len(left))
    for tier in tiers:
        assert sorted(key_name(view.record.key) for view in tier.index.scan()) == left
        assert sorted(key_name(record.key) for record in tier.store.records()) == left


def test_pins_reach_every_tier_and_go_again(tiers: list[Tier[BytesPayload]]) -> None:
    names = (named_key("a"), named_key("x"))
    assert apply(Pin(names), tiers) == 2
    views = [tier.index.show(named_key("a")) for tier in tiers]
    assert all(view is not None and view.record.pinned for view in views)
    assert apply(Unpin(names), tiers) == 2
    views = [tier.index.show(named_key("a")) for tier in tiers]
    assert not any(view is None or view.record.pinned for view in views)


def test_a_tier_that_cannot_be_reached_is_no_error(server: RedisServer) -> None:
    with open_link(server.url) as link:
        tier: Tier[BytesPayload] = Tier("shared", RedisIndex(link), HostStore())
    for command in ALL:
        assert apply(command, [tier]) == 0
