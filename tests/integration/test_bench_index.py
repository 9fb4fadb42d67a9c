"""The index benchmark on real servers, with few entries."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Event

import pytest

from sglang_ext.chunk_index.memory_index import MemoryIndex
from sglang_ext.chunk_index.redis_index import RedisIndex
from sglang_ext.scripts.bench_entries import Entries, Filler, now_ms
from sglang_ext.scripts.bench_index import linked, main
from sglang_ext.scripts.bench_outage import black_hole, site
from sglang_ext.scripts.redis_process import redis_process

pytestmark = pytest.mark.redis

BACKENDS = ("redis-tcp", "redis-unix", "memory")
OPERATIONS = ("publish", "reserve", "invalidate", "evict", "match evicting", "match at rest")


def test_a_small_run_measures_every_operation(tmp_path: Path) -> None:
    out = tmp_path / "build" / "bench-index.json"
    args = ["--quick", "--entries", "3000", "--seconds", "0.3", "--no-check", "--out", str(out)]
    assert main(args) == 0
    content = json.loads(out.read_text())
    rows = {(row["backend"], row["op"], row["prompt"]): row for row in content["rows"]}
    for backend in BACKENDS:
        for prompt in ("64x1", "16x4"):
            assert rows[backend, "match", prompt]["num_calls"] > 10
            is_remote = rows[backend, "match", prompt]["bare_rtt_ms"] is not None
            assert is_remote == backend.startswith("redis")
    for backend in BACKENDS[1:]:
        assert {op for known, op, _ in rows if known == backend} == {"match", *OPERATIONS}
    assert 100 < content["bytes_per_entry"] < 1000
    assert content["near_cache_p50_us"] > 0
    assert content["redis_down_added_ms"] > 0
    assert content["disk_load_share"] > 0
    assert not list(out.parent.glob("bench-index-*")), "payloads are removed"


def test_the_bulk_fill_leaves_what_single_publications_leave() -> None:
    entries = Entries(500, now_ms())
    reference = MemoryIndex()
    for chunk in entries.chunks():
        for record in chunk:
            reference.publish(record, record.created_ms)
    with redis_process() as redis, linked(redis.tcp_url) as link:
        Filler(link, entries).run(Event())
        index = RedisIndex(link)
        index.reconcile()
        index.check_integrity()
        assert index.usage() == reference.usage()
        assert {v.record.key: v.record for v in index.scan()} == {
            v.record.key: v.record for v in reference.scan()
        }


def test_a_site_whose_address_swallows_everything_answers_as_one_without(tmp_path: Path) -> None:
    prompt = next(Entries(1000, now_ms()).prompts(1, seed=1))
    with black_hole() as url, site(tmp_path, url) as made:
        made.wait_ready()
        assert not made.is_asked
        made.look_up(prompt)
