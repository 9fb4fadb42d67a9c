"""Exported metrics, their documentation and the dashboard agree."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from sglang_ext.chunk_index.cache import CacheStats, TransferStats
from sglang_ext.chunk_index.redis_link import LinkStats
from sglang_ext.chunk_index.tier import REFUSALS, TierStats
from sglang_ext.metrics import SPECS, Metrics
from sglang_ext.report import Outcome, PicReport, Reason

DOCS = Path(__file__).resolve().parents[2] / "docs"
SUFFIXES = {"Counter": ("_total",), "Gauge": ("",), "Histogram": ("_bucket", "_sum", "_count")}
EXPORTED = {spec.name + suffix for spec in SPECS.values() for suffix in SUFFIXES[spec.kind]}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    registry = CollectorRegistry()
    for kind in ("Counter", "Gauge", "Histogram"):
        _use_registry(monkeypatch, kind, registry)
    return registry


def _use_registry(monkeypatch: pytest.MonkeyPatch, kind: str, registry: Any) -> None:
    import prometheus_client

    original = getattr(prometheus_client, kind)
    monkeypatch.setattr(
        prometheus_client, kind, lambda *args, **kw: original(*args, **kw, registry=registry)
    )


@pytest.fixture
def metrics(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> Metrics:
    from types import SimpleNamespace

    monkeypatch.setattr(
        "sglang_ext.metrics.compat.resolved_options",
        lambda args: (SimpleNamespace(served_model_name="m"), None),
    )
    scheduler = SimpleNamespace(
        metrics_reporter=SimpleNamespace(enable_metrics=True), server_args=None
    )
    return Metrics.create(scheduler)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, {"model_name": "m", **labels})


def tier_stats(name: str, **changes: Any) -> TierStats:
    zeros = dict.fromkeys(REFUSALS, 0)
    fields = {
        "num_entries": 0,
        "used_bytes": 0,
        "budget_bytes": 100,
        "num_hits": 0,
        "num_misses": 0,
        "num_evictions": 0,
        "num_stores": 0,
        "load_failures": {},
        "num_unavailable": 0,
        **changes,
        "refusals": {**zeros, **changes.pop("refusals", {})},
    }
    return TierStats(name, **fields)


def stats(**changes: Any) -> CacheStats:
    return CacheStats(tier_stats("host", **changes), num_held=0)


def lower_stats(num_unwritten: int, **changes: Any) -> CacheStats:
    disk = TransferStats(tier_stats("disk", **changes), True, 4096, num_unwritten, 0.5)
    return CacheStats(tier_stats("host"), num_held=0, lower=(disk,))


def test_a_report_is_counted_as_it_says(registry: CollectorRegistry, metrics: Metrics) -> None:
    report = PicReport("daric", outcome=Outcome.REUSED, exact=3, reused=10, recomputed=2)
    report.recomputed_share, report.bytes_loaded = 2 / 12, {"host": 640, "disk": 64}
    report.declined, report.late = 3, 2
    report.phase_ms = {"patch": 20.0}
    metrics.count(report)
    labels = {"strategy": "daric", "outcome": "reused", "fallback": ""}
    assert value(registry, "sglang_pic_requests_total", **labels) == 1
    assert value(registry, "sglang_pic_tokens_total", kind="reused") == 10
    assert value(registry, "sglang_pic_recomputed_share_bucket", le="0.15") == 0
    assert value(registry, "sglang_pic_recomputed_share_bucket", le="0.2") == 1
    assert value(registry, "sglang_pic_phase_seconds_sum", phase="patch") == pytest.approx(0.02)
    assert value(registry, "sglang_pic_loaded_bytes_total", tier="host") == 640
    assert value(registry, "sglang_pic_loaded_bytes_total", tier="disk") == 64
    assert value(registry, "sglang_pic_left_segments_total", why="declined") == 3
    assert value(registry, "sglang_pic_left_segments_total", why="late") == 2


def test_a_full_prefill_is_counted_by_reason(registry: CollectorRegistry, metrics: Metrics) -> None:
    report = PicReport("daric", prompt_tokens=7)
    report.fall_back(Reason.LORA)
    metrics.count(report)
    labels = {"strategy": "daric", "outcome": "full", "fallback": "lora"}
    assert value(registry, "sglang_pic_requests_total", **labels) == 1
    assert value(registry, "sglang_pic_tokens_total", kind="computed") == 7


def test_cache_totals_become_counters_that_only_grow(
    registry: CollectorRegistry, metrics: Metrics
) -> None:
    metrics.observe(stats(num_hits=2, num_stores=1, num_entries=4, refusals={"no_room": 1}))
    metrics.observe(stats(num_hits=5, num_stores=1, num_entries=3, refusals={"no_room": 3}))
    assert value(registry, "sglang_pic_segments_total", tier="host", result="hit") == 5
    assert value(registry, "sglang_pic_stores_total", tier="host", result="stored") == 1
    assert value(registry, "sglang_pic_stores_total", tier="host", result="no_room") == 3
    assert value(registry, "sglang_pic_index_entries", tier="host") == 3
    assert value(registry, "sglang_pic_index_budget_bytes", tier="host") == 100


def test_every_tier_has_its_own_counters(registry: CollectorRegistry, metrics: Metrics) -> None:
    metrics.observe(lower_stats(1, load_failures={"damaged": 1}, num_unavailable=2))
    metrics.observe(lower_stats(4, load_failures={"damaged": 2, "absent": 1}, num_unavailable=2))
    assert value(registry, "sglang_pic_unwritten_segments_total", tier="disk") == 4
    failures = "sglang_pic_load_failures_total"
    assert value(registry, failures, tier="disk", reason="damaged") == 2
    assert value(registry, failures, tier="disk", reason="absent") == 1
    assert value(registry, "sglang_pic_tier_unavailable_total", tier="disk") == 2
    assert value(registry, "sglang_pic_tier_ready", tier="disk") == 1
    assert value(registry, "sglang_pic_write_queue_bytes", tier="disk") == 4096
    assert value(registry, failures, tier="host", reason="damaged") is None


def test_the_way_to_redis_has_its_own_counters(
    registry: CollectorRegistry, metrics: Metrics
) -> None:
    failing = LinkStats(True, 1, 5, 0, {"timeout": 2}, 0, "")
    metrics.observe(stats(), failing)
    metrics.observe(
        stats(), replace(failing, is_available=False, num_failures={"timeout": 5}, num_openings=1)
    )
    assert value(registry, "sglang_pic_shared_index_up") == 0
    assert value(registry, "sglang_pic_shared_index_failures_total", kind="timeout") == 5
    assert value(registry, "sglang_pic_shared_index_openings_total") == 1


def test_activity_has_a_reason(registry: CollectorRegistry, metrics: Metrics) -> None:
    metrics.set_active("self-test: broken")
    assert value(registry, "sglang_pic_active", reason="self-test: broken") == 0


def test_the_dashboard_shows_every_metric_and_only_those_that_exist() -> None:
    dashboard = json.loads((DOCS / "grafana" / "sglang-pic.json").read_text(encoding="utf-8"))
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    shown = {name for expr in expressions for name in re.findall(r"sglang_pic_\w+", expr)}
    assert shown <= EXPORTED
    missing = {spec.name for spec in SPECS.values()} - {_base(name) for name in shown}
    assert not missing


def _base(name: str) -> str:
    return next(
        spec.name
        for spec in SPECS.values()
        if name in {spec.name + suffix for suffix in SUFFIXES[spec.kind]}
    )


def test_operations_says_what_every_metric_means() -> None:
    text = (DOCS / "operations.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(sglang_pic_\w+)`", text))
    expected = {spec.name + ("_total" if spec.kind == "Counter" else "") for spec in SPECS.values()}
    assert named == expected


def test_every_reason_and_outcome_is_documented() -> None:
    text = (DOCS / "reasons.md").read_text(encoding="utf-8")
    for name in [*Reason, *Outcome]:
        assert f"`{name.value}`" in text
