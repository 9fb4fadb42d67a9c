"""Requests served from lower tiers, and from none when those are slow, broken or full."""

from __future__ import annotations

import gc
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_ext.errors import TierUnavailable
from sglang_ext.kv_pool import SegmentKV
from tests.corpus import Corpus, join
from tests.harness import Ask, Harness
from tests.tiered import settle_writes, tiered, wait_until

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def corpus(harness: Harness) -> Corpus:
    return Corpus(harness.scheduler.tokenizer)


@pytest.fixture(autouse=True)
def clean(harness: Harness) -> Iterator[None]:
    harness.flush()
    yield
    harness.settle()


@pytest.fixture
def disk(harness: Harness, tmp_path: Path) -> Iterator[Any]:
    with tiered(harness, disk_path=str(tmp_path / "kv")) as cache:
        yield cache


class Gate:
    """A store whose loads wait until they are let through."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.is_open = threading.Event()
        self.num_gets = 0

    def get(self, record: Any, on_bytes: Any = None) -> Any:
        self.num_gets += 1
        assert self.is_open.wait(30)
        return self.store.get(record, on_bytes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def prompt(corpus: Corpus) -> tuple[list[int], dict[str, Any]]:
    return join(*corpus.chunks(20, 150, 120, 15))


def warm(harness: Harness, cache: Any, ids: list[int], params: dict[str, Any]) -> Any:
    """Serve a prompt twice, and leave its chunks in the lower tiers alone."""
    harness.ask(ids, params)
    answer = harness.ask(ids, params)
    settle_writes(cache)
    cache.arena.clear()
    return answer


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def test_what_left_the_arena_comes_back_from_disk(
    harness: Harness, corpus: Corpus, disk: Any
) -> None:
    ids, params = prompt(corpus)
    expected = warm(harness, disk, ids, params)
    got = harness.ask(ids, params)
    assert got.report["outcome"] == "reused"
    assert got.report["computed_tokens"] == 15
    assert got.report["bytes_loaded"]["disk"] == 290 * harness.pool.bytes_per_token
    assert got.report["ms"]["load"] > 0
    assert torch.equal(got.logits, expected.logits)
    again = harness.ask(ids, params)
    assert again.report["bytes_loaded"].get("disk", 0) == 0


def test_a_restarted_server_finds_what_the_last_one_kept(
    harness: Harness, corpus: Corpus, tmp_path: Path
) -> None:
    ids, params = prompt(corpus)
    with tiered(harness, disk_path=str(tmp_path)) as cache:
        expected = warm(harness, cache, ids, params)
    with tiered(harness, disk_path=str(tmp_path)) as cache:
        wait_until(lambda: cache.stats().lower[0].tier.num_entries == 3)
        got = harness.ask(ids, params)
    assert got.report["outcome"] == "reused"
    assert torch.equal(got.logits, expected.logits)
    with tiered(harness, disk_path=str(tmp_path), disk_gib=1e-6) as cache:
        assert harness.ask(ids, params).report["outcome"] == "cold"
        assert cache.stats().lower[0].tier.used_bytes <= 1100


def test_a_tier_unusable_at_start_is_named_and_serving_goes_on(
    harness: Harness, corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "kv"
    path.write_text("no folder")
    with tiered(harness, are_used=False, disk_path=str(path)) as cache:
        wait_until(lambda: "tier=disk is disabled" in caplog.text)
        assert str(path) in caplog.text
        ids, params = prompt(corpus)
        assert harness.ask(ids, params).report["outcome"] == "cold"
        assert harness.ask(ids, params).report["outcome"] == "reused"
        assert not cache.stats().lower[0].is_ready


def test_a_working_set_five_times_the_arena_keeps_hitting_and_gives_memory_back(
    harness: Harness, corpus: Corpus, tmp_path: Path
) -> None:
    """32 MiB of arena, 160 MiB of chunks, a disk tier that holds them all."""
    mib = 1 << 20
    num_documents = 160 * mib // (200 * harness.pool.bytes_per_token) + 1
    documents = corpus.chunks(*[200] * num_documents)
    system, query = corpus.chunks(20, 15)
    params = {"pic_strategy": "reuse"}
    with tiered(harness, disk_path=str(tmp_path), arena_mib=32, disk_gib=0.25) as cache:
        for _ in range(2):
            reports = []
            for start in range(0, num_documents, 3):
                chosen = documents[start : start + 3]
                ids, bounds = join(system, *reversed(chosen), query)
                reports.append(harness.ask(ids, {**bounds, **params}).report)
                assert cache.stats().arena.used_bytes <= 32 * mib
            settle_writes(cache)
            assert {report["fallback"] for report in reports} == {None}
        loaded = sum(report["bytes_loaded"]["disk"] for report in reports)
        assert loaded > 100 * mib
        # A busy machine may read a file too late for its request; most are in time.
        assert statistics.median(report["computed_tokens"] for report in reports) == 15
        assert cache.stats().arena.num_evictions > 0
        assert _kept_bytes() > 24 * mib
        cache.arena.clear()
        assert cache.stats().arena.used_bytes == 0
        assert _kept_bytes() < 16 * mib  # samples that measure tiers, and what a thread held last


def _kept_bytes() -> int:
    """Bytes of all payloads that anything still refers to."""
    gc.collect()
    return sum(kept.nbytes for kept in gc.get_objects() if type(kept) is SegmentKV)


def test_a_flush_empties_arena_and_disk(harness: Harness, corpus: Corpus, tmp_path: Path) -> None:
    ids, params = prompt(corpus)
    with tiered(harness, disk_path=str(tmp_path)) as cache:
        warm(harness, cache, ids, params)
        assert len(files(tmp_path)) == 3
        harness.flush()
        wait_until(lambda: not files(tmp_path))
        assert cache.stats().lower[0].tier.used_bytes == 0
        assert harness.ask(ids, params).report["outcome"] == "cold"


@pytest.mark.parametrize("damage", ["delete", "truncate", "flip", "swap", "directory"])
def test_a_damaged_file_is_a_miss_and_its_entry_goes(
    harness: Harness, corpus: Corpus, tmp_path: Path, damage: str
) -> None:
    ids, params = prompt(corpus)
    with tiered(harness, disk_path=str(tmp_path)) as cache:
        expected = warm(harness, cache, ids, params)
        _damage(files(tmp_path), damage)
        got = harness.ask(ids, params)
        assert torch.equal(got.logits, expected.logits)
        if damage == "directory":
            assert cache.stats().lower[0].tier.num_unavailable > 0
        else:
            assert sum(cache.stats().lower[0].tier.load_failures.values()) > 0
            settle_writes(cache)
            cache.arena.clear()
            assert harness.ask(ids, params).report["computed_tokens"] == 15


def _damage(paths: list[Path], damage: str) -> None:
    contents = [path.read_bytes() for path in paths]
    for index, path in enumerate(paths):
        if damage == "truncate":
            path.write_bytes(contents[index][:-100])
        elif damage == "flip":
            path.write_bytes(contents[index][:-9] + b"\xff" + contents[index][-8:])
        elif damage == "swap":
            path.write_bytes(contents[index - 1])
        else:
            path.unlink()
            if damage == "directory":
                path.mkdir()


def test_a_slow_tier_is_not_waited_for_longer_than_it_can_pay(
    harness: Harness, corpus: Corpus, disk: Any
) -> None:
    ids, params = prompt(corpus)
    expected = warm(harness, disk, ids, params)
    tier = disk.lower[0].tier
    tier.store = gate = Gate(tier.store)
    try:
        got = harness.ask(ids, params)
    finally:
        gate.is_open.set()
    assert got.report["late_segments"] == 3
    assert got.report["computed_tokens"] == 20 + 150 + 120 + 15
    assert got.report["ms"]["load"] < 50 + 5000  # the stall limit, and a machine that is busy
    assert torch.equal(got.logits, expected.logits)
    wait_until(lambda: disk.arena.index.stats().num_nodes == 3)


def test_a_payload_on_its_way_is_asked_for_once(
    harness: Harness, corpus: Corpus, disk: Any
) -> None:
    ids, params = prompt(corpus)
    warm(harness, disk, ids, params)
    tier = disk.lower[0].tier
    tier.store = gate = Gate(tier.store)
    threading.Timer(0.02, gate.is_open.set).start()
    answers = harness.ask_all([Ask(ids, params)] * 3)
    assert gate.num_gets == 3
    assert len({tuple(answer.output_ids) for answer in answers}) == 1


def test_other_requests_run_while_one_waits(harness: Harness, corpus: Corpus, disk: Any) -> None:
    ids, params = prompt(corpus)
    warm(harness, disk, ids, params)
    other, other_params = join(*corpus.chunks(10, 12))
    disk.limits = disk.limits.__class__(stall_ms=20_000)
    disk.compute_cost.renew(disk.compute_cost._line.__class__(20_000.0, 0.0))
    tier = disk.lower[0].tier
    tier.store = gate = Gate(tier.store)
    first, second = harness.submit([Ask(ids, params), Ask(other, other_params)])
    while not second.finished():
        harness.step()
    assert not first.finished()
    gate.is_open.set()
    while not first.finished():
        harness.step()
    assert first.customized_info["pic"][0]["outcome"] == "reused"
    harness._prefills.clear()


def test_waiting_for_a_load_takes_no_core(harness: Harness, corpus: Corpus, disk: Any) -> None:
    ids, params = prompt(corpus)
    warm(harness, disk, ids, params)
    disk.limits = disk.limits.__class__(stall_ms=20_000)
    disk.compute_cost.renew(disk.compute_cost._line.__class__(20_000.0, 0.0))
    tier = disk.lower[0].tier
    tier.store = gate = Gate(tier.store)
    (req,) = harness.submit([Ask(ids, params)])
    harness.step()
    started, began = time.thread_time(), time.monotonic()
    while time.monotonic() - began < 1.0:
        harness.step()
    busy_share = (time.thread_time() - started) / (time.monotonic() - began)
    gate.is_open.set()
    while not req.finished():
        harness.step()
    harness._prefills.clear()
    assert busy_share < 0.5  # a loop that polls takes all of it


def test_an_abort_while_loading_leaves_nothing_behind(
    harness: Harness, corpus: Corpus, disk: Any
) -> None:
    from sglang.srt.managers.io_struct import AbortReq

    ids, params = prompt(corpus)
    warm(harness, disk, ids, params)
    tier = disk.lower[0].tier
    tier.store = gate = Gate(tier.store)
    (req,) = harness.submit([Ask(ids, params)])
    harness.step()
    harness.scheduler.abort_request(AbortReq(rid=req.rid))
    gate.is_open.set()
    del req
    for _ in range(5):
        harness.step()
    assert harness.scheduler.is_fully_idle()
    wait_until(lambda: disk._prefetch_budget.num_bytes == 0)


def test_a_tier_that_fails_costs_nothing_but_its_hits(
    harness: Harness, corpus: Corpus, tmp_path: Path
) -> None:
    ids, params = prompt(corpus)
    with tiered(harness, disk_path=str(tmp_path / "kv")) as cache:
        expected = warm(harness, cache, ids, params)
        shutil.rmtree(tmp_path / "kv")
        (tmp_path / "kv").write_text("a file where the folder was")
        got = harness.ask(ids, params)
        assert torch.equal(got.logits, expected.logits)
        assert harness.ask(ids, params).report["outcome"] == "reused"
        settle_writes(cache)


def test_a_tier_that_is_slower_than_computing_is_not_used(
    harness: Harness, corpus: Corpus, disk: Any
) -> None:
    ids, params = prompt(corpus)
    warm(harness, disk, ids, params)
    for _ in range(20):
        disk.lower[0].cost.observe(1 << 20, 60_000)
    got = harness.ask(ids, params)
    assert got.report["declined_segments"] == 3
    assert got.report["computed_tokens"] == 20 + 150 + 120 + 15
    assert "load" not in got.report["ms"]


def test_a_request_can_invalidate_a_document_and_purge_its_namespace(
    harness: Harness, corpus: Corpus, disk: Any
) -> None:
    ids, params = prompt(corpus)
    own = {**params, "pic_namespace": "a"}
    harness.ask(ids, {**own, "pic_doc_ids": ["handbook@1"]})
    harness.ask(ids, {**params, "pic_namespace": "b", "pic_doc_ids": ["handbook@1"]})
    assert harness.ask(ids, own).report["outcome"] == "reused"
    settle_writes(disk)
    other = {**own, "pic_invalidate": ["handbook@2"]}
    assert harness.ask(ids, other).report["outcome"] == "reused"
    assert harness.ask(ids, {**own, "pic_invalidate": ["handbook"]}).report["outcome"] == "cold"
    assert harness.ask(ids, own).report["outcome"] == "reused"
    harness.ask(corpus.chunk(5), {"pic": False, "pic_namespace": "a", "pic_purge": True})
    assert harness.ask(ids, own).report["outcome"] == "cold"
    assert harness.ask(ids, {**params, "pic_namespace": "b"}).report["outcome"] == "reused"


def test_what_a_request_finds_gets_its_documents_too(
    harness: Harness, corpus: Corpus, disk: Any
) -> None:
    ids, params = prompt(corpus)
    harness.ask(ids, {**params, "pic_doc_ids": ["v1"]})
    harness.ask(ids, {**params, "pic_doc_ids": ["v2"]})
    got = harness.ask(ids, {**params, "pic_invalidate": ["v2"]})
    assert got.report["outcome"] == "cold"


def test_a_shared_pool_is_read_by_all_and_written_by_its_owner(
    harness: Harness, corpus: Corpus, tmp_path: Path
) -> None:
    ids, params = prompt(corpus)
    with tiered(harness, disk_path=str(tmp_path), shared_pool="common") as cache:
        assert harness.ask(ids, {**params, "pic_namespace": "a"}).report["outcome"] == "cold"
        assert harness.ask(ids, {**params, "pic_namespace": "b"}).report["outcome"] == "cold"
        harness.ask(ids, {**params, "pic_namespace": "common"})
        others = {**params, "pic_namespace": "c"}
        got = harness.ask(ids, others)
        assert got.report["outcome"] == "reused"
        assert got.report["computed_tokens"] == 15
        settle_writes(cache)
        cache.arena.clear()
        assert harness.ask(ids, others).report["bytes_loaded"]["disk"] > 0
        owners = set(cache.arena.index.usage())
        assert owners == {harness.runtime._owner_of("common")}


def test_a_quota_holds_and_protects(harness: Harness, corpus: Corpus, tmp_path: Path) -> None:
    per_token = harness.pool.bytes_per_token
    mib = 400 * per_token / (1 << 20)
    quota = f"a={mib * 0.5:.4f}"
    with tiered(
        harness, disk_path=str(tmp_path), arena_mib=mib, quota=quota, disk_gib=mib / 1024
    ) as cache:
        ids, params = join(*corpus.chunks(20, 90, 15))
        harness.ask(ids, {**params, "pic_namespace": "a"})
        for _ in range(6):
            other, other_params = join(*corpus.chunks(20, 120, 15))
            harness.ask(other, {**other_params, "pic_namespace": "b"})
        assert harness.ask(ids, {**params, "pic_namespace": "a"}).report["outcome"] == "reused"
        for _ in range(4):
            other, other_params = join(*corpus.chunks(20, 120, 15))
            harness.ask(other, {**other_params, "pic_namespace": "a"})
        usage = cache.arena.index.usage()[harness.runtime._owner_of("a")]
        assert 0 < usage.num_bytes <= 200 * per_token


def test_a_store_that_is_full_is_named_once_and_refused(
    harness: Harness, corpus: Corpus, disk: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: Any) -> None:
        raise TierUnavailable("ENOSPC")

    tier = disk.lower[0].tier
    put, tier.store.put = tier.store.put, full
    try:
        for _ in range(2):
            harness.ask(*prompt(corpus))
        settle_writes(disk)
    finally:
        tier.store.put = put
    assert tier.stats().refusals["unavailable"] > 2
    assert sum("ENOSPC" in record.getMessage() for record in caplog.records) == 1
    assert harness.ask(*prompt(corpus)).report["outcome"] == "cold"
