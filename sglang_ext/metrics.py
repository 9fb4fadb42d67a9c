"""Prometheus metrics of the scheduler process, under SGLang's `--enable-metrics`.

Knows metric names and labels, reports and cache totals. Without `--enable-metrics` every call does
nothing. `docs/operations.md` says what each metric means and when to act.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_ext import compat
from sglang_ext.chunk_index.cache import CacheStats
from sglang_ext.chunk_index.redis_link import LinkStats
from sglang_ext.chunk_index.tier import TierStats
from sglang_ext.report import PicReport

SHARE_BUCKETS = (0.01, 0.02, 0.05, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
KL_BUCKETS = (0.001, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One exported metric.

    Attributes:
        kind: `Counter`, `Gauge` or `Histogram`.
        name: As exported, without the suffixes Prometheus adds.
        help: What it is.
        labels: Beside `model_name`.
        buckets: Of a histogram.
    """

    kind: str
    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


SPECS: Mapping[str, MetricSpec] = {
    "active": MetricSpec(
        "Gauge", "sglang_pic_active", "1 while PIC serves, 0 with the reason why not.", ("reason",)
    ),
    "requests": MetricSpec(
        "Counter",
        "sglang_pic_requests",
        "Requests by strategy, outcome and reason of a full prefill.",
        ("strategy", "outcome", "fallback"),
    ),
    "tokens": MetricSpec(
        "Counter",
        "sglang_pic_tokens",
        "Prompt tokens by what was done: exact, reused, recomputed, computed.",
        ("kind",),
    ),
    "share": MetricSpec(
        "Histogram",
        "sglang_pic_recomputed_share",
        "Recomputed share of the tokens of cached chunks, of requests that hit.",
        (),
        SHARE_BUCKETS,
    ),
    "phase": MetricSpec(
        "Histogram",
        "sglang_pic_phase_seconds",
        "Time of a request's phases: load, lookup, misses, place, warmup, probe, patch; own is our "
        "part of all.",
        ("phase",),
        SECONDS_BUCKETS,
    ),
    "shadow_checks": MetricSpec(
        "Counter",
        "sglang_pic_shadow_checks",
        "Answers compared with a full prefill: the same first token, another, skipped for want of "
        "room, dropped since too many waited.",
        ("strategy", "result"),
    ),
    "shadow_kl": MetricSpec(
        "Histogram",
        "sglang_pic_shadow_kl",
        "First-token KL of checked answers to full prefill, nats.",
        ("strategy",),
        KL_BUCKETS,
    ),
    "level": MetricSpec(
        "Gauge",
        "sglang_pic_strategy_level",
        "0 as asked, 1 with twice the budget, 2 full prefill, after shadow checks.",
        ("strategy",),
    ),
    "segments": MetricSpec(
        "Counter", "sglang_pic_segments", "Segments looked up, by result.", ("tier", "result")
    ),
    "loaded": MetricSpec(
        "Counter",
        "sglang_pic_loaded_bytes",
        "Bytes of chunk KV: host, placed in prompts; other tiers, brought into host memory.",
        ("tier",),
    ),
    "left": MetricSpec(
        "Counter",
        "sglang_pic_left_segments",
        "Cached segments of lower tiers that were not waited for: declined, since computing them "
        "is faster, or late.",
        ("why",),
    ),
    "stores": MetricSpec(
        "Counter",
        "sglang_pic_stores",
        "Segments offered to the cache: stored, or refused and why.",
        ("tier", "result"),
    ),
    "evictions": MetricSpec(
        "Counter", "sglang_pic_evictions", "Segments evicted to make room.", ("tier",)
    ),
    "failures": MetricSpec(
        "Counter",
        "sglang_pic_load_failures",
        "Hits whose KV was missing or damaged, by reason; each became a miss.",
        ("tier", "reason"),
    ),
    "unavailable": MetricSpec(
        "Counter",
        "sglang_pic_tier_unavailable",
        "Calls that failed since a tier's index or store could not be reached; each was a miss.",
        ("tier",),
    ),
    "ready": MetricSpec(
        "Gauge", "sglang_pic_tier_ready", "1 once a tier was written, read and measured.", ("tier",)
    ),
    "queued": MetricSpec(
        "Gauge", "sglang_pic_write_queue_bytes", "Bytes that wait to be written.", ("tier",)
    ),
    "unwritten": MetricSpec(
        "Counter",
        "sglang_pic_unwritten_segments",
        "Segments not written to a tier since its queue was full.",
        ("tier",),
    ),
    "index_up": MetricSpec(
        "Gauge", "sglang_pic_shared_index_up", "1 while look-ups in the shared index are tried."
    ),
    "index_failures": MetricSpec(
        "Counter",
        "sglang_pic_shared_index_failures",
        "Failed calls and connections of the shared index, by kind.",
        ("kind",),
    ),
    "index_openings": MetricSpec(
        "Counter",
        "sglang_pic_shared_index_openings",
        "Times the shared index was given up for a while after failures in a row.",
    ),
    "entries": MetricSpec(
        "Gauge", "sglang_pic_index_entries", "Segments in a tier's index.", ("tier",)
    ),
    "bytes": MetricSpec("Gauge", "sglang_pic_index_bytes", "Bytes of chunk KV kept.", ("tier",)),
    "budget": MetricSpec(
        "Gauge", "sglang_pic_index_budget_bytes", "Most bytes of chunk KV kept.", ("tier",)
    ),
    "held": MetricSpec(
        "Gauge", "sglang_pic_index_held", "Segments in use at this moment; 0 when idle."
    ),
}


class Metrics:
    """Counts what reports and the cache say."""

    def __init__(self, collectors: Mapping[str, Any], model_name: str) -> None:
        self._collectors = collectors
        self._model_name = model_name
        self._last: CacheStats | None = None
        self._last_link: LinkStats | None = None

    @classmethod
    def create(cls, scheduler: Any) -> Metrics:
        """Metrics of a scheduler; imports prometheus_client only if they are wanted.

        The import fixes where values live, and SGLang sets that up before it.
        """
        if not scheduler.metrics_reporter.enable_metrics:
            return cls({}, "")
        import prometheus_client

        collectors: dict[str, Any] = {}
        for key, spec in SPECS.items():
            options: dict[str, Any] = {}
            if spec.kind == "Gauge":
                options["multiprocess_mode"] = "mostrecent"
            if spec.buckets:
                options["buckets"] = spec.buckets
            collector = getattr(prometheus_client, spec.kind)
            collectors[key] = collector(
                spec.name, spec.help, ["model_name", *spec.labels], **options
            )
        view, _ = compat.resolved_options(scheduler.server_args)
        return cls(collectors, str(view.served_model_name))

    def set_active(self, off_reason: str | None) -> None:
        """Say whether PIC serves, or why not."""
        if self._collectors:
            self._of("active", reason=off_reason or "").set(0 if off_reason else 1)

    def count(self, report: PicReport) -> None:
        """Count one request, once."""
        if not self._collectors:
            return
        fallback = report.fallback.value if report.fallback else ""
        outcome = report.outcome.value
        self._of("requests", strategy=report.strategy, outcome=outcome, fallback=fallback).inc()
        for kind in ("exact", "reused", "recomputed", "computed"):
            self._of("tokens", kind=kind).inc(getattr(report, kind))
        if report.reused + report.recomputed:
            self._of("share").observe(report.recomputed_share)
        for phase, value in report.phase_ms.items():
            self._of("phase", phase=phase).observe(value / 1e3)
        for tier, num_bytes in report.bytes_loaded.items():
            self._of("loaded", tier=tier).inc(num_bytes)
        self._of("left", why="declined").inc(report.declined)
        self._of("left", why="late").inc(report.late)

    def count_shadow(self, strategy: str, result: str, divergence: float | None = None) -> None:
        """Count a shadow check; `divergence` in nats."""
        if not self._collectors:
            return
        self._of("shadow_checks", strategy=strategy, result=result).inc()
        if divergence is not None:
            self._of("shadow_kl", strategy=strategy).observe(divergence)

    def set_levels(self, levels: Mapping[str, int]) -> None:
        """Say at which level each strategy is."""
        if self._collectors:
            for strategy, level in levels.items():
                self._of("level", strategy=strategy).set(level)

    def observe(self, stats: CacheStats, link: LinkStats | None = None) -> None:
        """Bring gauges and counters to the cache's totals, and to those of the way to Redis."""
        if not self._collectors:
            return
        last, self._last = self._last, stats
        self._observe_link(link)
        self._of("held").set(stats.num_held)
        self._observe_tier(stats.arena, last.arena if last else None)
        same_tiers = last is not None and len(last.lower) == len(stats.lower)
        for index, lower in enumerate(stats.lower):
            old = last.lower[index] if last is not None and same_tiers else None
            name = lower.tier.name
            self._observe_tier(lower.tier, old.tier if old else None)
            self._of("ready", tier=name).set(lower.is_ready)
            self._of("queued", tier=name).set(lower.queued_bytes)
            grown = lower.num_unwritten - (old.num_unwritten if old else 0)
            self._of("unwritten", tier=name).inc(grown)

    def _observe_link(self, link: LinkStats | None) -> None:
        if link is None:
            return
        last, self._last_link = self._last_link, link
        self._of("index_up").set(link.is_available)
        for kind, total in link.num_failures.items():
            grown = total - (last.num_failures.get(kind, 0) if last else 0)
            self._of("index_failures", kind=kind).inc(grown)
        self._of("index_openings").inc(link.num_openings - (last.num_openings if last else 0))

    def _observe_tier(self, stats: TierStats, last: TierStats | None) -> None:
        tier = stats.name
        self._of("entries", tier=tier).set(stats.num_entries)
        self._of("bytes", tier=tier).set(stats.used_bytes)
        self._of("budget", tier=tier).set(stats.budget_bytes or 0)
        for key, labels, name in (
            ("segments", {"result": "hit"}, "num_hits"),
            ("segments", {"result": "miss"}, "num_misses"),
            ("stores", {"result": "stored"}, "num_stores"),
            ("evictions", {}, "num_evictions"),
            ("unavailable", {}, "num_unavailable"),
        ):
            grown = getattr(stats, name) - (getattr(last, name) if last else 0)
            self._of(key, tier=tier, **labels).inc(grown)
        for key, label, name in (
            ("stores", "result", "refusals"),
            ("failures", "reason", "load_failures"),
        ):
            before = getattr(last, name) if last else {}
            for reason, total in getattr(stats, name).items():
                self._of(key, tier=tier, **{label: reason}).inc(total - before.get(reason, 0))

    def _of(self, key: str, **labels: str) -> Any:
        return self._collectors[key].labels(model_name=self._model_name, **labels)
