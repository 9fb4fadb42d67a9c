"""Chores run in order, again and again, whatever one of them does."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from threading import Event

import pytest

from sglang_ext.chunk_index.upkeep import Chore, Upkeep
from sglang_ext.errors import IndexUnavailable, TierUnavailable

DEADLINE_S = 10.0
NEVER = float("inf")


def until(is_true: Callable[[], bool]) -> None:
    """Wait for other threads; fails after a while."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


def test_every_chore_is_done_at_once_in_the_order_given() -> None:
    done: list[str] = []
    chores = [Chore(name, NEVER, lambda name=name: done.append(name)) for name in "abc"]
    upkeep = Upkeep(chores)
    until(lambda: len(done) == 3)
    upkeep.close(DEADLINE_S)
    assert done == ["a", "b", "c"]


def test_a_chore_comes_again_after_its_interval_and_one_without_any_does_not() -> None:
    done: list[str] = []
    upkeep = Upkeep(
        [
            Chore("once", NEVER, lambda: done.append("once")),
            Chore("often", 0.001, lambda: done.append("often")),
        ]
    )
    until(lambda: done.count("often") >= 3)
    upkeep.close(DEADLINE_S)
    assert done.count("once") == 1


def test_an_interval_begins_when_the_chore_ends() -> None:
    starts: list[float] = []
    ends: list[float] = []

    def work() -> None:
        starts.append(time.monotonic())
        until(lambda: time.monotonic() >= starts[-1] + 0.02)
        ends.append(time.monotonic())

    upkeep = Upkeep([Chore("work", 0.02, work)])
    until(lambda: len(ends) >= 3)
    upkeep.close(DEADLINE_S)
    assert all(start - end >= 0.019 for end, start in zip(ends, starts[1:], strict=False))


@pytest.mark.parametrize(
    "error", [IndexUnavailable("down"), TierUnavailable("EIO"), RuntimeError("a fault of ours")]
)
def test_a_failing_chore_is_tried_again_stops_no_other_and_is_named(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    done: list[str] = []

    def fail() -> None:
        done.append("fail")
        raise error

    upkeep = Upkeep([Chore("bad", 0.001, fail), Chore("good", 0.001, lambda: done.append("good"))])
    until(lambda: done.count("good") >= 3 and done.count("fail") >= 3)
    upkeep.close(DEADLINE_S)
    assert "bad" in caplog.messages[0]
    is_ours = isinstance(error, RuntimeError)
    assert {record.levelname for record in caplog.records} == {"ERROR" if is_ours else "WARNING"}
    assert is_ours or len(caplog.records) == 1  # what is away for long is said once


def test_closing_ends_the_waiting_between_chores() -> None:
    is_done = Event()
    upkeep = Upkeep([Chore("rare", 3600.0, is_done.set)])
    assert is_done.wait(DEADLINE_S)
    started = time.monotonic()
    upkeep.close(DEADLINE_S)
    assert time.monotonic() - started < DEADLINE_S / 2


def test_no_chore_begins_after_closing() -> None:
    has_begun, may_end, is_late = Event(), Event(), Event()

    def hang() -> None:
        has_begun.set()
        may_end.wait(DEADLINE_S)

    upkeep = Upkeep([Chore("hang", NEVER, hang), Chore("late", 0.0, is_late.set)])
    assert has_begun.wait(DEADLINE_S)
    started = time.monotonic()
    upkeep.close(0.01)  # does not wait for what hangs
    assert time.monotonic() - started < DEADLINE_S / 2
    may_end.set()
    upkeep.close(DEADLINE_S)
    assert not is_late.is_set()


def test_without_chores_it_idles_until_closed() -> None:
    started = time.monotonic()
    Upkeep([]).close(DEADLINE_S)
    assert time.monotonic() - started < DEADLINE_S / 2
