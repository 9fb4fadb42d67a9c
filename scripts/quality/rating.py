"""How an answer of each synthetic task is rated.

Knows the tasks' names and which score fits which. Does not know how scores are computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sglang_ext.scripts.quality.scores import Metric, score
from sglang_ext.scripts.quality.tasks import TASKS

METRICS: Mapping[str, Metric] = MappingProxyType(
    {task: Metric.VALUE_F1 if task == "multi_value" else Metric.EXACT_MATCH for task in TASKS}
)
"""The score of each task."""


def rate(task: str, prediction: str, answer: str) -> float:
    """A prediction's score in [0, 1] by its task's metric."""
    return score(METRICS[task], prediction, [answer])
