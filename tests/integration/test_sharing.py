"""Two servers share one Redis: what one computed, the other reuses, and tenants stay apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_ext.chunk_index.commands import CommandLog, Invalidate
from sglang_ext.chunk_index.identity import owner_id
from sglang_ext.chunk_index.refill import Refill
from sglang_ext.runtime import now_ms
from tests.corpus import Corpus, join
from tests.harness import Harness
from tests.redis_server import RedisServer, redis_server
from tests.tiered import settle_writes, tiered, wait_until

pytestmark = [pytest.mark.server, pytest.mark.redis]


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(scope="module")
def corpus(harness: Harness) -> Corpus:
    return Corpus(harness.scheduler.tokenizer)


@pytest.fixture(autouse=True)
def clean(harness: Harness, redis: RedisServer) -> Iterator[None]:
    harness.flush()
    redis.cli("FLUSHALL")
    yield
    harness.settle()


class Site:
    """What the servers of one deployment have in common."""

    def __init__(self, harness: Harness, redis: RedisServer, folder: Path, stores: str) -> None:
        self._harness = harness
        secret = folder / "secret"
        secret.write_text("a secret of all servers")
        (folder / "kv").mkdir()
        self.folder = folder / "kv"
        where = {"values": {"shared_values": True}, "folder": {"shared_path": str(self.folder)}}
        self.options = {
            "index": redis.url,
            "index_deadline_ms": 2000,  # this machine may be busy
            "secret_file": str(secret),
            **where[stores],
        }

    def server(self, **more: Any) -> Any:
        """The harness as one of the servers, with empty tiers of its own."""
        return tiered(self._harness, **{**self.options, **more})


@pytest.fixture(params=["folder", "values"])
def site(
    harness: Harness, redis: RedisServer, tmp_path: Path, request: pytest.FixtureRequest
) -> Site:
    return Site(harness, redis, tmp_path, request.param)


@pytest.fixture
def by_folder(harness: Harness, redis: RedisServer, tmp_path: Path) -> Site:
    return Site(harness, redis, tmp_path, "folder")


def prompt(corpus: Corpus) -> tuple[list[int], dict[str, Any]]:
    return join(*corpus.chunks(20, 150, 120, 15))


def store(harness: Harness, site: Site, ids: list[int], params: dict[str, Any]) -> Any:
    """Serve a prompt on one server, which then is gone."""
    with site.server() as cache:
        answer = harness.ask(ids, params)
        settle_writes(cache)
    return answer


def test_what_one_server_stored_another_reuses(
    harness: Harness, corpus: Corpus, site: Site
) -> None:
    ids, params = prompt(corpus)
    expected = store(harness, site, ids, params)
    with site.server():
        got = harness.ask(ids, params)
    assert expected.report["outcome"] == "cold"
    assert got.report["outcome"] == "reused"
    assert got.report["computed_tokens"] == 15
    assert got.report["bytes_loaded"]["shared"] == 290 * harness.pool.bytes_per_token
    assert torch.equal(got.logits, expected.logits)


def test_what_was_shared_outlives_a_flush_of_the_server(
    harness: Harness, corpus: Corpus, site: Site
) -> None:
    ids, params = prompt(corpus)
    with site.server() as cache:
        harness.ask(ids, params)
        settle_writes(cache)
        harness.flush()
        assert cache.stats().arena.num_entries == 0
        assert harness.ask(ids, params).report["bytes_loaded"]["shared"] > 0


def test_servers_with_other_secrets_share_nothing(
    harness: Harness, corpus: Corpus, site: Site, tmp_path: Path
) -> None:
    ids, params = prompt(corpus)
    store(harness, site, ids, params)
    other = tmp_path / "other"
    other.write_text("another secret of theirs")
    with site.server(secret_file=str(other)):
        assert harness.ask(ids, params).report["outcome"] == "cold"


def test_a_payload_forged_by_who_can_write_the_folder_is_a_miss(
    harness: Harness, corpus: Corpus, by_folder: Site
) -> None:
    ids, params = prompt(corpus)
    expected = store(harness, by_folder, ids, params)
    for path in by_folder.folder.rglob("*.kv"):
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(bytes(content))
    with by_folder.server() as cache:
        got = harness.ask(ids, params)
        assert torch.equal(got.logits, expected.logits)
        assert got.report["computed_tokens"] > 15
        assert sum(cache.stats().lower[0].tier.load_failures.values()) > 0
        settle_writes(cache)
    with by_folder.server():
        assert harness.ask(ids, params).report["outcome"] == "reused"


def test_an_entry_without_its_payload_costs_one_try_and_is_gone_everywhere(
    harness: Harness, corpus: Corpus, by_folder: Site
) -> None:
    ids, params = prompt(corpus)
    store(harness, by_folder, ids, params)
    for path in by_folder.folder.rglob("*.kv"):
        path.unlink()
    with by_folder.server() as cache:
        once = {**params, "pic_store": "none"}
        reports = [harness.ask(ids, once).report for _ in range(10)]
        assert all(report["computed_tokens"] == 305 for report in reports)
        assert sum(cache.stats().lower[0].tier.load_failures.values()) <= 3
        shared = cache.lower[0].tier
        shared.refresh_totals()
        assert shared.totals().num_nodes == 0


def test_a_command_reaches_the_arena_of_a_server(
    harness: Harness, corpus: Corpus, by_folder: Site
) -> None:
    ids, params = prompt(corpus)
    with by_folder.server() as cache:
        harness.ask(ids, {**params, "pic_doc_ids": ["handbook@1"]})
        assert harness.ask(ids, params).report["outcome"] == "reused"
        settle_writes(cache)
        owner = owner_id("default", b"a secret of all servers")
        wait_until(lambda: harness.runtime.tiers._follower._after is not None)
        CommandLog(harness.runtime.tiers._link).post(Invalidate(owner, "handbook"))
        wait_until(lambda: cache.arena.index.stats().num_nodes == 0)


def test_a_request_invalidates_for_all_servers_and_its_own_new_chunks_stay(
    harness: Harness, corpus: Corpus, by_folder: Site
) -> None:
    ids, params = prompt(corpus)
    own = {**params, "pic_doc_ids": ["handbook@1"]}
    store(harness, by_folder, ids, own)
    with by_folder.server() as cache:
        wait_until(lambda: harness.runtime.tiers._follower._after is not None)
        got = harness.ask(ids, {**own, "pic_invalidate": ["handbook"]})
        assert got.report["outcome"] == "cold"
        settle_writes(cache)
        harness.runtime.tiers._follower.poll()
        assert harness.ask(ids, params).report["outcome"] == "reused"
    with by_folder.server():
        assert harness.ask(ids, params).report["outcome"] == "reused"


def test_another_tenants_chunks_cannot_be_told_from_misses(
    harness: Harness, corpus: Corpus, by_folder: Site
) -> None:
    """What B sees of a text does not depend on whether A has it: hits, counts and phases."""
    cached, fresh = prompt(corpus), prompt(corpus)
    ids, params = cached
    store(harness, by_folder, ids, {**params, "pic_namespace": "a"})
    with by_folder.server() as cache:
        seen = []
        for ids, params in (cached, fresh):
            before = _counters(cache)
            got = harness.ask(ids, {**params, "pic_namespace": "b", "pic_store": "none"})
            after = _counters(cache)
            report = {k: v for k, v in got.report.items() if k != "ms"}
            phases = set(got.report["ms"])
            seen.append((report, phases, [b - a for a, b in zip(before, after, strict=True)]))
        assert seen[0] == seen[1]
        assert seen[0][0]["outcome"] == "cold"


def _counters(cache: Any) -> list[int]:
    stats = cache.stats()
    tiers = [stats.arena, *(lower.tier for lower in stats.lower)]
    names = ("num_hits", "num_misses", "num_stores", "num_evictions", "num_unavailable")
    return [getattr(tier, name) for tier in tiers for name in names]


def test_redis_gone_and_back_costs_hits_only(
    harness: Harness, corpus: Corpus, by_folder: Site, redis: RedisServer
) -> None:
    ids, params = prompt(corpus)
    expected = store(harness, by_folder, ids, params)
    with by_folder.server() as cache:
        redis.kill()
        got = harness.ask(ids, params)
        assert torch.equal(got.logits, expected.logits)
        other = harness.ask(*prompt(corpus))
        assert other.report["outcome"] == "cold"
        redis.restart()
        link = harness.runtime.tiers._link
        assert link.wait_available(10)
        ids, params = prompt(corpus)
        harness.ask(ids, params)
        settle_writes(cache)
        cache.arena.clear()
        assert harness.ask(ids, params).report["bytes_loaded"]["shared"] > 0


def test_an_index_that_lost_everything_is_filled_from_the_arenas(
    harness: Harness, corpus: Corpus, site: Site, redis: RedisServer
) -> None:
    ids, params = prompt(corpus)
    with site.server() as cache:
        harness.ask(ids, params)
        settle_writes(cache)
        refill = Refill(harness.runtime.tiers._link, cache.arena, cache.lower[0].tier)
        assert not refill.is_due()
        redis.cli("FLUSHALL")
        assert refill.is_due()
        assert refill.run(now_ms()) == 3
        assert not refill.is_due()
    with site.server():
        assert harness.ask(ids, params).report["bytes_loaded"]["shared"] > 0


def test_a_server_notices_by_itself_that_the_index_lost_everything(
    harness: Harness, corpus: Corpus, by_folder: Site, redis: RedisServer
) -> None:
    ids, params = prompt(corpus)
    with by_folder.server() as cache:
        harness.ask(ids, params)
        settle_writes(cache)
        wait_until(lambda: redis.cli("EXISTS", "pic1:{all}:mark").strip() == "1")
        redis.kill()
        redis.restart()
        wait_until(lambda: _num_shared(cache) == 3)


def _num_shared(cache: Any) -> int:
    tier = cache.lower[0].tier
    tier.refresh_totals()
    return int(tier.totals().num_nodes)


def test_what_was_invalidated_while_redis_was_away_is_gone_when_it_is_back(
    harness: Harness, corpus: Corpus, by_folder: Site, redis: RedisServer
) -> None:
    ids, params = prompt(corpus)
    store(harness, by_folder, ids, {**params, "pic_doc_ids": ["handbook@1"]})
    with by_folder.server() as cache:
        link = harness.runtime.tiers._link
        redis.pause()
        wait_until(lambda: not link.is_available)
        harness.ask(corpus.chunk(5), {"pic": False, "pic_invalidate": ["handbook"]})
        settle_writes(cache)
        redis.resume()
        assert link.wait_available(10)
        wait_until(lambda: not harness.runtime.tiers._untold and _num_shared(cache) == 0)
        assert harness.ask(ids, params).report["outcome"] == "cold"
