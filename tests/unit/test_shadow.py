"""A share of the answers is compared with a full prefill, and every comparison is counted."""

from __future__ import annotations

import logging
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from sglang_ext.guard import WINDOW, Guard
from sglang_ext.shadow import MAX_WAITING, ShadowChecks, first_token_kl

IDS = np.arange(5)
LEFT, RIGHT = torch.tensor([4.0, 0.0, 0.0]), torch.tensor([0.0, 4.0, 0.0])


class Counts:
    """What the checks count."""

    def __init__(self) -> None:
        self.results: Counter[str] = Counter()
        self.divergences: list[float] = []
        self.levels: dict[str, int] = {}

    def count_shadow(self, strategy: str, result: str, divergence: float | None = None) -> None:
        self.results[result] += 1
        if divergence is not None:
            self.divergences.append(divergence)

    def set_levels(self, levels: dict[str, int]) -> None:
        self.levels = dict(levels)


def make(share: float, full: Tensor | None = LEFT) -> tuple[ShadowChecks, Counts, Guard]:
    counts, guard = Counts(), Guard(0.5)
    return ShadowChecks(share, guard, lambda _: full, counts), counts, guard  # type: ignore[arg-type]


def test_a_share_of_the_answers_is_kept() -> None:
    checks, counts, _ = make(0.3)
    for _ in range(1000):
        checks.offer("qci", 0, IDS, LEFT)
    kept = checks.num_waiting + counts.results["dropped"]
    assert 240 < kept < 360


def test_without_a_share_nothing_is_kept() -> None:
    checks, _, _ = make(0.0)
    for _ in range(100):
        checks.offer("qci", 0, IDS, LEFT)
    assert checks.num_waiting == 0


def test_only_so_many_wait_and_the_rest_are_counted() -> None:
    checks, counts, _ = make(1.0)
    for _ in range(MAX_WAITING + 3):
        checks.offer("qci", 0, IDS, LEFT)
    assert checks.num_waiting == MAX_WAITING
    assert counts.results == {"dropped": 3}


def test_an_equal_answer_has_no_divergence() -> None:
    checks, counts, _ = make(1.0)
    checks.offer("qci", 0, IDS, LEFT)
    checks.check_one(0)
    assert counts.results == {"same": 1}
    assert counts.divergences == [pytest.approx(0.0, abs=1e-9)]
    assert checks.num_waiting == 0


def test_another_answer_diverges_as_far_as_the_formula_says() -> None:
    checks, counts, _ = make(1.0)
    checks.offer("qci", 0, IDS, RIGHT)
    checks.check_one(0)
    heavy, light = np.exp(4) / (np.exp(4) + 2), 1 / (np.exp(4) + 2)
    expected = heavy * np.log(heavy / light) + light * np.log(light / heavy)
    assert counts.results == {"other": 1}
    assert counts.divergences == [pytest.approx(expected)]


def test_a_prompt_that_finds_no_room_is_skipped_and_counted() -> None:
    checks, counts, guard = make(1.0, full=None)
    checks.offer("qci", 0, IDS, LEFT)
    checks.check_one(0)
    assert counts.results == {"skipped": 1}
    assert guard.levels == {}


def test_with_nothing_waiting_nothing_is_done() -> None:
    checks, counts, _ = make(1.0)
    checks.check_one(0)
    assert not counts.results


def test_an_answer_is_a_copy() -> None:
    checks, counts, _ = make(1.0)
    logits = LEFT.clone()
    checks.offer("qci", 0, IDS, logits)
    logits.copy_(RIGHT)
    checks.check_one(0)
    assert counts.results == {"same": 1}


def test_too_far_for_a_while_steps_back_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    checks, counts, guard = make(1.0)
    with caplog.at_level(logging.WARNING):
        for _ in range(WINDOW):
            checks.offer("qci", 0, IDS, RIGHT)
            checks.check_one(0)
    assert guard.levels == counts.levels == {"qci": 1}
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert "strategy=qci steps back to level=1" in lines[0]


def test_divergence_is_that_of_the_distributions_not_of_their_scale() -> None:
    assert first_token_kl(LEFT, LEFT + 100) == pytest.approx(0.0, abs=1e-9)
    assert first_token_kl(LEFT, RIGHT) > 1
