"""Prometheus metrics of the scheduler process, under SGLang's `--enable-metrics`.

Knows metric names and labels. Without `--enable-metrics` every call does nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_ext import compat
from sglang_ext.report import PicReport


@dataclass(frozen=True, slots=True)
class _Collectors:
    active: Any
    requests: Any
    tokens: Any


class Metrics:
    """Counts what reports say."""

    def __init__(self, collectors: _Collectors | None, labels: dict[str, str]) -> None:
        self._collectors = collectors
        self._labels = labels

    @classmethod
    def create(cls, scheduler: Any) -> Metrics:
        """Metrics of a scheduler; imports prometheus_client only if they are wanted.

        The import fixes where values live, and SGLang sets that up before it.
        """
        if not scheduler.metrics_reporter.enable_metrics:
            return cls(None, {})
        from prometheus_client import Counter, Gauge

        view, _ = compat.resolved_options(scheduler.server_args)
        labels = {"model_name": str(view.served_model_name)}
        names = list(labels)
        collectors = _Collectors(
            active=Gauge(
                "sglang_pic_active",
                "1 while requests are served with PIC, 0 with the reason why not.",
                [*names, "reason"],
                multiprocess_mode="mostrecent",
            ),
            requests=Counter(
                "sglang_pic_requests",
                "Requests by strategy, outcome and reason of a full prefill.",
                [*names, "strategy", "outcome", "fallback"],
            ),
            tokens=Counter(
                "sglang_pic_tokens",
                "Prompt tokens by what was done: exact, reused, recomputed, computed.",
                [*names, "kind"],
            ),
        )
        return cls(collectors, labels)

    def set_active(self, off_reason: str | None) -> None:
        """Say whether PIC serves, or why not."""
        if self._collectors is not None:
            gauge = self._collectors.active.labels(**self._labels, reason=off_reason or "")
            gauge.set(0 if off_reason else 1)

    def count(self, report: PicReport) -> None:
        """Count one request, once."""
        if self._collectors is None:
            return
        self._collectors.requests.labels(
            **self._labels,
            strategy=report.strategy,
            outcome=report.outcome.value,
            fallback=report.fallback.value if report.fallback else "",
        ).inc()
        for kind in ("exact", "reused", "recomputed", "computed"):
            tokens = self._collectors.tokens.labels(**self._labels, kind=kind)
            tokens.inc(getattr(report, kind))
