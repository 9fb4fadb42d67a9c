"""Shadow checks: a share of the requests is prefilled in full as well, when nobody waits.

Knows which answers wait to be checked, and how a check is counted and judged. Does not know how a
prompt is prefilled (it is given a function) or what follows from a level (`guard`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglang_ext.guard import Guard
from sglang_ext.metrics import Metrics

logger = logging.getLogger(__name__)

MAX_WAITING = 8

TokenIds = npt.NDArray[np.int64]
FullPrefill = Callable[[TokenIds], Tensor | None]
"""Takes `[num_tokens]` int64; returns `[vocab]` logits of the last token, None without room."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What PIC answered.

    Attributes:
        strategy: The strategy's name.
        level: The guard's level it was served at.
        token_ids: `[prompt]` int64.
        logits: `[vocab]` of the first token, on the host.
    """

    strategy: str
    level: int
    token_ids: TokenIds
    logits: Tensor


class ShadowChecks:
    """Samples answers and checks them; see the module's docstring.

    Args:
        share: Share of the answers that are checked, 0..1.
        guard: Judges divergences.
        full_prefill: Computes a prompt in full.
        metrics: Takes counts.
    """

    def __init__(
        self, share: float, guard: Guard, full_prefill: FullPrefill, metrics: Metrics
    ) -> None:
        self._share = share
        self._guard = guard
        self._full_prefill = full_prefill
        self._metrics = metrics
        self._random = Random(0)
        self._waiting: deque[Answer] = deque()

    @property
    def num_waiting(self) -> int:
        """Answers that wait to be checked."""
        return len(self._waiting)

    def offer(self, strategy: str, level: int, token_ids: TokenIds, logits: Tensor) -> None:
        """Keep an answer for a check, by chance; the oldest goes if too many wait.

        Args:
            strategy: The strategy's name.
            level: The guard's level it was served at.
            token_ids: `[prompt]` int64.
            logits: `[vocab]` of its first token, any device; copied.
        """
        if self._random.random() >= self._share:
            return
        if len(self._waiting) == MAX_WAITING:
            self._metrics.count_shadow(self._waiting.popleft().strategy, "dropped")
        kept = logits.detach().float().to("cpu", copy=True)
        self._waiting.append(Answer(strategy, level, token_ids, kept))

    def check_one(self, now_ms: int) -> None:
        """Prefill one waiting prompt in full and judge its answer. Takes as long as a prefill."""
        if not self._waiting:
            return
        answer = self._waiting.popleft()
        full = self._full_prefill(answer.token_ids)
        if full is None:
            self._metrics.count_shadow(answer.strategy, "skipped")
            return
        divergence = first_token_kl(full, answer.logits)
        agrees = int(full.argmax()) == int(answer.logits.argmax())
        self._metrics.count_shadow(answer.strategy, "same" if agrees else "other", divergence)
        step = self._guard.observe(answer.strategy, answer.level, divergence, now_ms)
        if step is not None:
            logger.warning(
                "pic strategy=%s steps back to level=%d: mean first-token KL %.3f over its last "
                "checks",
                step.strategy,
                step.level,
                step.mean,
            )
        self._metrics.set_levels(self._guard.levels)


def first_token_kl(full: Tensor, got: Tensor) -> float:
    """KL(full || got) in nats, of two `[vocab]` logits."""
    expected = torch.log_softmax(full.double().cpu(), dim=-1)
    other = torch.log_softmax(got.double().cpu(), dim=-1)
    return float((expected.exp() * (expected - other)).sum())
