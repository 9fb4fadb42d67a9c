"""Hits are counted once each, kept in the order of last use, and never without bound."""

from __future__ import annotations

from sglang_ext.chunk_index.hit_buffer import HitBuffer, Hits
from tests.strategies import named_key


def add(buffer: HitBuffer, *names: str, now_ms: int = 0) -> None:
    buffer.add([named_key(name) for name in names], now_ms)


def taken(buffer: HitBuffer) -> list[str]:
    return [hit.key.decode().rstrip("_") for hit in buffer.take()]


def test_hits_of_one_key_add_up_and_the_last_time_counts() -> None:
    buffer = HitBuffer()
    add(buffer, "a", now_ms=7)
    add(buffer, "a", now_ms=9)
    add(buffer, "a", now_ms=8)
    assert buffer.take() == [Hits(named_key("a"), 3, 9)]


def test_what_was_taken_is_not_taken_again() -> None:
    buffer = HitBuffer()
    add(buffer, "a")
    buffer.take()
    assert buffer.take() == []


def test_the_longest_unused_comes_first() -> None:
    buffer = HitBuffer()
    for name in ("a", "b", "c", "a"):
        add(buffer, name)
    assert taken(buffer) == ["b", "c", "a"]


def test_within_a_chunk_the_deepest_comes_first() -> None:
    buffer = HitBuffer()
    add(buffer, "a", "a1", "a2", "b", "b1")
    assert taken(buffer) == ["a2", "a1", "a", "b1", "b"]


def test_a_full_buffer_counts_what_it_has_and_nothing_new() -> None:
    buffer = HitBuffer(max_keys=2)
    add(buffer, "a")
    add(buffer, "b")
    add(buffer, "c")
    add(buffer, "a")
    assert taken(buffer) == ["b", "a"]
    add(buffer, "c")
    assert taken(buffer) == ["c"]
