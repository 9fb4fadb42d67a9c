"""Shadow checks on a real scheduler: when nobody waits a served prompt is prefilled in full."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from sglang_ext import guard
from sglang_ext.guard import FULL_LEVEL, Guard
from sglang_ext.shadow import ShadowChecks
from tests.harness import Harness

PROMPT = [*range(100, 140), *range(300, 340), *range(500, 540), *range(700, 712)]
BOUNDS = [0, 40, 80, 120]


class Counts:
    """What the checks count, in the place of Prometheus."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, float | None]] = []
        self.levels: dict[str, int] = {}

    def count_shadow(self, strategy: str, result: str, divergence: float | None = None) -> None:
        self.seen.append((strategy, result, divergence))

    def set_levels(self, levels: dict[str, int]) -> None:
        self.levels = dict(levels)


@pytest.fixture
def counts(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    """Every answer is checked."""
    harness.flush()
    yield _watch(harness, monkeypatch, limit=0.5)
    monkeypatch.undo()
    harness.flush()


def _watch(harness: Harness, monkeypatch: pytest.MonkeyPatch, limit: float) -> Counts:
    runtime = harness.runtime
    counts, own = Counts(), Guard(limit)
    checks = ShadowChecks(1.0, own, runtime._full_logits, counts)  # type: ignore[arg-type]
    monkeypatch.setattr(runtime, "_config", replace(runtime._config, shadow_share=1.0))
    monkeypatch.setattr(runtime, "_guard", own)
    monkeypatch.setattr(runtime, "_shadow", checks)
    return counts


def ask(harness: Harness, **params: Any) -> Any:
    answer = harness.ask(PROMPT, {"pic_bounds": BOUNDS, "pic_strategy": "reuse", **params})
    harness.flush_tree()
    return answer


def test_the_check_sees_what_a_full_prefill_says(harness: Harness, counts: Counts) -> None:
    full = harness.ask(PROMPT)
    harness.flush_tree()
    ask(harness)
    counts.seen.clear()
    served = ask(harness)
    ((strategy, result, divergence),) = counts.seen
    expected = torch.log_softmax(full.logits.double(), -1)
    got = torch.log_softmax(served.logits.double(), -1)
    kl = float((expected.exp() * (expected - got)).sum())
    assert strategy == "reuse"
    assert divergence == pytest.approx(kl, rel=0.05, abs=0.005)
    assert result == ("same" if full.logits.argmax() == served.logits.argmax() else "other")


def test_a_plain_request_is_not_checked(harness: Harness, counts: Counts) -> None:
    harness.ask(PROMPT)
    harness.settle()
    assert counts.seen == []


def test_nothing_is_checked_while_a_request_waits(harness: Harness, counts: Counts) -> None:
    ask(harness)
    counts.seen.clear()
    harness.ask(PROMPT, {"pic_bounds": BOUNDS}, max_new_tokens=4)
    assert counts.seen == []
    harness.settle()
    assert len(counts.seen) == 1


def test_a_check_leaves_memory_and_the_prefix_tree_as_they_were(
    harness: Harness, counts: Counts
) -> None:
    ask(harness)
    allocator = harness.scheduler.token_to_kv_pool_allocator
    harness.flush_tree()
    free = allocator.available_size()
    served = ask(harness)
    assert len(counts.seen) >= 2
    assert allocator.available_size() == free
    assert served.report["exact_tokens"] == BOUNDS[1]  # of the first chunk; the tree had nothing


def test_without_room_a_check_is_skipped(
    harness: Harness, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = harness.scheduler.token_to_kv_pool_allocator
    harness.ask(PROMPT, {"pic_bounds": BOUNDS, "pic_strategy": "reuse"})
    monkeypatch.setattr(allocator, "available_size", lambda: len(PROMPT))
    harness.runtime.idle([])
    assert counts.seen[-1] == ("reuse", "skipped", None)


def test_a_strategy_that_is_too_far_off_steps_back_to_full_prefill(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.flush()
    monkeypatch.setattr(guard, "WINDOW", 3)
    counts = _watch(harness, monkeypatch, limit=1e-9)
    levels = []
    for _ in range(7):
        answer = ask(harness)
        levels.append(answer.report["level"])
        if levels[-1] == FULL_LEVEL:
            break
    assert levels == [0, 0, 0, 1, 1, 1, 2]
    assert counts.levels == {"reuse": 2}
    assert answer.report["fallback"] == "diverged"
    assert answer.report["computed_tokens"] == len(PROMPT)
    other = harness.ask(PROMPT, {"pic_bounds": BOUNDS, "pic_strategy": "epic"})
    assert other.report["level"] == 0
    assert other.report["fallback"] is None
    monkeypatch.undo()
    harness.flush()
