"""What a request gets, looked at from inside the scheduler: logits, KV, pins, slots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_ext.chunk_index.arena import Arena
from sglang_ext.chunk_index.cache import ChunkCache
from sglang_ext.chunk_index.identity import ChunkKey, root_key
from sglang_ext.chunk_index.index import NodeRecord
from sglang_ext.chunk_index.memory_index import MemoryIndex
from sglang_ext.chunk_index.payloads import HostStore
from sglang_ext.errors import SelfTestFailed
from sglang_ext.fingerprint import _sample, model_fingerprint
from sglang_ext.recompute.selection import PRIOR_STRATEGIES, SelectionParams, token_budget
from sglang_ext.self_test import run_self_test
from sglang_ext.task import cut_prompt
from sglang_ext.tiers import Tiers
from tests.corpus import Corpus, join
from tests.harness import Answer, Ask, Harness, kl_divergence, received

pytestmark = pytest.mark.server

NOISE_KL = 0.01
EVERYTHING = {"pic_n_avg": 100_000, "pic_max_share": 1.0}
KINDS = ("exact_tokens", "reused_tokens", "recomputed_tokens", "computed_tokens")


@pytest.fixture(scope="module")
def corpus(harness: Harness) -> Corpus:
    return Corpus(harness.scheduler.tokenizer)


@pytest.fixture(autouse=True)
def clean(harness: Harness) -> Iterator[None]:
    harness.flush()
    yield
    harness.settle()


def plain(harness: Harness, ids: list[int]) -> Answer:
    """Full prefill of the same ids, out of the way of every other request's exact prefix."""
    return harness.ask(ids, {"pic": False}, fields={"extra_key": f"plain-{len(ids)}-{ids[-1]}"})


def counts(answer: Answer) -> tuple[int, ...]:
    return tuple(answer.report[kind] for kind in KINDS)


@contextmanager
def arena(harness: Harness, num_bytes: int, verify: str = "first") -> Iterator[Any]:
    """Another cache for a while."""
    runtime = harness.runtime
    old = runtime.tiers
    cache: Any = ChunkCache(Arena(MemoryIndex(num_bytes), HostStore(), verify))  # type: ignore[arg-type]
    runtime.tiers, runtime._executor._cache = Tiers(cache), cache
    try:
        yield cache
        cache.check_integrity()
        assert cache.stats().num_held == 0
    finally:
        runtime.tiers, runtime._executor._cache = old, old.cache


# Exactness


def test_everything_selected_is_bit_equal_to_plain_prefill(
    harness: Harness, corpus: Corpus
) -> None:
    ids, params = join(*corpus.chunks(20, 300, 256, 40, 15))
    expected = plain(harness, ids)
    for _ in ("cold", "warm"):
        got = harness.ask(ids, {**params, **EVERYTHING}, fields={"extra_key": "own"})
        assert got.report["selected_tokens"] == len(ids)
        assert torch.equal(got.logits, expected.logits)
        assert torch.equal(got.kv, expected.kv)
        harness.flush_tree()


def test_reuse_alone_is_seen_to_differ(harness: Harness, corpus: Corpus) -> None:
    """The control of the test above: the comparison can fail."""
    ids, params = join(*corpus.chunks(20, 300, 256, 40, 15))
    expected = plain(harness, ids)
    got = harness.ask(ids, {**params, "pic_strategy": "reuse"})
    assert kl_divergence(expected.logits, got.logits) > NOISE_KL


@pytest.mark.parametrize("limits", [{"packs": False}, {"packs": False, "max_rows": 2}])
def test_runs_as_rows_of_their_own_agree_with_packed_rows(
    harness: Harness, corpus: Corpus, limits: dict[str, Any]
) -> None:
    ids, params = join(*corpus.chunks(20, 200, 220, 180, 90, 15))
    asked = {**params, "pic_n_avg": 12}
    harness.ask(ids, asked)
    packed = harness.ask(ids, asked)
    with harness.limits(**limits):
        virtual = harness.ask(ids, asked)
    assert counts(virtual) == counts(packed)
    assert kl_divergence(packed.logits, virtual.logits) < NOISE_KL


def test_cold_and_warm_answers_are_equal(harness: Harness, corpus: Corpus) -> None:
    ids, params = join(*corpus.chunks(20, 300, 256, 40, 15))
    cold = harness.ask(ids, params)
    warm = harness.ask(ids, params)
    assert (cold.report["outcome"], warm.report["outcome"]) == ("cold", "reused")
    assert torch.equal(cold.logits, warm.logits)
    assert torch.equal(cold.kv, warm.kv)


def test_an_answer_does_not_depend_on_who_shares_its_batch(
    harness: Harness, corpus: Corpus
) -> None:
    chunks = corpus.chunks(150, 120, 90, 200)
    query = corpus.chunk(15)
    orders = ([0, 1, 2], [2, 1, 0], [3, 0], [1, 3, 2], [2, 3])
    asks = [Ask(*join(*(chunks[index] for index in order), query)) for order in orders]
    asks += [Ask(corpus.chunk(60), {"pic": False}), Ask(corpus.chunk(45))]
    for ask in asks:
        harness.ask_all([ask])
    harness.flush_tree()
    alone = []
    for ask in asks:
        alone += harness.ask_all([ask])
        harness.flush_tree()
    together = harness.ask_all(asks)
    assert max(answer.batch_size for answer in together) == len(asks)
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.logits, other.logits)
        assert counts(one) == counts(other)


def test_requests_that_miss_the_same_chunk_at_once_compute_it_once(
    harness: Harness, corpus: Corpus
) -> None:
    system, shared, query, other = corpus.chunks(20, 150, 15, 12)
    asks = [Ask(*join(system, shared, query)), Ask(*join(system, shared, other))]
    first, second = harness.ask_all(asks)
    assert first.batch_size == second.batch_size == 2
    assert counts(first)[3] == 20 + 150 + 15
    assert counts(second)[3] == 12
    harness.flush_tree()
    again = harness.ask_all([asks[1]])[0]
    assert torch.equal(second.logits, again.logits)


def test_plain_requests_after_pic_requests_get_exact_kv(harness: Harness, corpus: Corpus) -> None:
    ids, params = join(*corpus.chunks(20, 200, 150, 15))
    before = plain(harness, ids)
    harness.ask(ids, {**params, "pic_strategy": "reuse"})
    after = harness.ask(ids, {"pic": False})
    assert after.cached_tokens == 0, "approximate KV entered the exact tree"
    assert torch.equal(before.kv, after.kv)
    assert torch.equal(before.logits, after.logits)


def test_exact_kv_of_a_pic_request_enters_the_exact_tree(harness: Harness, corpus: Corpus) -> None:
    ids, params = join(*corpus.chunks(20, 200, 150, 15))
    harness.ask(ids, {**params, **EVERYTHING})
    assert harness.ask(ids, {"pic": False}).cached_tokens == len(ids) - 1


# Shapes of prompts


def test_new_order_with_a_new_chunk_reuses_the_others(harness: Harness, corpus: Corpus) -> None:
    first, second, third, new = corpus.chunks(100, 110, 120, 130)
    query = corpus.chunk(15)
    harness.ask(*join(first, second, third, query))
    got = harness.ask(
        *join(second, new, third, first, query),
    )
    report = got.report
    assert report["outcome"] == "reused"
    hits = report["exact_tokens"] + report["reused_tokens"] + report["recomputed_tokens"]
    assert hits == 330
    assert report["computed_tokens"] == 130 + 15


def test_recomputed_tokens_are_what_the_allocation_says(harness: Harness, corpus: Corpus) -> None:
    chunks = corpus.chunks(20, 200, 220, 180, 190, 15)
    ids, params = join(*chunks)
    harness.ask(ids, params)
    for n_avg in (4, 8, 16):
        got = harness.ask(ids, {**params, "pic_n_avg": n_avg})
        spans = [chunk.span for chunk in _cut(harness, ids, params)]
        budget = token_budget(spans, SelectionParams(n_avg))
        assert got.report["selected_tokens"] == budget == 6 * n_avg
        tail_in_query = min(15, _tail(spans, n_avg))
        assert got.report["recomputed_tokens"] == budget - tail_in_query


def _cut(harness: Harness, ids: list[int], params: dict[str, Any]) -> Any:
    root = root_key(b"", "test", b"secret")
    return cut_prompt(np.array(ids), tuple(params["pic_bounds"]), root, 256)


def _tail(spans: list[Any], n_avg: int) -> int:
    chosen = PRIOR_STRATEGIES["daric"](spans, SelectionParams(n_avg))
    return chosen[-1].num_tokens


def test_one_chunk_without_keeping_is_an_ordinary_request(harness: Harness, corpus: Corpus) -> None:
    ids = list(corpus.chunk(120))
    got = harness.ask(ids, {"pic_bounds": [0]})
    assert (got.report["outcome"], got.report["fallback"]) == ("full", "single_chunk")
    assert torch.equal(got.logits, plain(harness, ids).logits)


def test_one_chunk_that_is_kept_behaves_as_prefix_matching(
    harness: Harness, corpus: Corpus
) -> None:
    head, tail, other = corpus.chunks(512, 40, 50)
    harness.ask([*head, *tail], {"pic_store": "all"})
    harness.flush_tree()
    ids = [*head, *other]
    got = harness.ask(ids, {"pic_store": "all"})
    assert got.report["exact_tokens"] == 512
    assert got.report["computed_tokens"] == 50
    assert kl_divergence(plain(harness, ids).logits, got.logits) < NOISE_KL


def test_two_chunks_reuse_a_first_chunk_exactly(harness: Harness, corpus: Corpus) -> None:
    document, query, other = corpus.chunks(200, 15, 18)
    harness.ask(*join(document, query))
    ids, params = join(document, other)
    got = harness.ask(ids, params)
    assert counts(got)[:2] == (200 - got.report["recomputed_tokens"], 0)
    assert kl_divergence(plain(harness, ids).logits, got.logits) < NOISE_KL


def test_a_chunk_that_occurs_several_times_is_computed_once(
    harness: Harness, corpus: Corpus
) -> None:
    system, twice, query = corpus.chunks(20, 150, 15)
    ids, params = join(system, twice, twice, twice, query)
    got = harness.ask(ids, params)
    assert harness.cache.stats().arena.num_entries == 2
    assert got.report["reused_tokens"] + got.report["recomputed_tokens"] == 300
    again = harness.ask(ids, params)
    assert torch.equal(got.logits, again.logits)


def test_a_prompt_that_ends_in_a_cached_chunk_computes_its_last_token(
    harness: Harness, corpus: Corpus
) -> None:
    system, first, second, query = corpus.chunks(20, 100, 120, 15)
    harness.ask(*join(system, first, second, query))
    ids, params = join(system, second, first)
    got = harness.ask(ids, {**params, "pic_strategy": "reuse"})
    assert counts(got) == (20, 219, 1, 0)
    assert torch.isfinite(got.logits).all()


def test_a_partly_cached_chunk_computes_only_its_missing_segments(
    harness: Harness, corpus: Corpus
) -> None:
    system, long, query = corpus.chunks(20, 600, 15)
    ids, params = join(system, long, query)
    whole = harness.ask(ids, params)
    chunk = harness.runtime._make_task(_as_received(ids, params)).chunks[1]
    arena = harness.cache.arena
    arena.drop(arena.index.remove(chunk.segments[2].key))
    got = harness.ask(ids, params)
    assert got.report["computed_tokens"] == 88 + 15
    assert kl_divergence(whole.logits, got.logits) < NOISE_KL
    assert harness.ask(ids, params).report["computed_tokens"] == 15


def record_of(harness: Harness, key: ChunkKey) -> NodeRecord:
    view = harness.cache.arena.index.show(key)
    assert view is not None
    return view.record


def _as_received(ids: list[int], params: dict[str, Any]) -> Any:
    return received(Ask(ids, params))


@pytest.mark.parametrize("num_tokens", [1, 15, 40, 255, 256, 257])
def test_chunks_of_any_length_are_reused(harness: Harness, corpus: Corpus, num_tokens: int) -> None:
    system, chunk, query = corpus.chunks(20, num_tokens, 15)
    ids, params = join(system, chunk, query)
    harness.ask(ids, params)
    got = harness.ask(ids, {**params, "pic_strategy": "reuse"})
    assert counts(got) == (20, num_tokens, 0, 15)


def test_a_chunk_larger_than_the_arena_is_served_and_not_kept(
    harness: Harness, corpus: Corpus
) -> None:
    ids, params = join(*corpus.chunks(20, 200, 300, 15))
    in_large = harness.ask(ids, params)
    with arena(harness, harness.pool.bytes_per_token * 100) as cache:
        for _ in range(2):
            got = harness.ask(ids, params)
            assert torch.equal(got.logits, in_large.logits)
        assert cache.stats().arena.refusals["too_large"] > 0
        assert cache.stats().arena.used_bytes <= cache.stats().arena.budget_bytes


def test_a_working_set_larger_than_the_arena_keeps_hitting(
    harness: Harness, corpus: Corpus
) -> None:
    system, query = corpus.chunks(20, 15)
    documents = corpus.chunks(*[60] * 10)
    with arena(harness, harness.pool.bytes_per_token * 300) as cache:
        for turn in range(30):
            chosen = [documents[(turn * step) % 10] for step in (1, 1, 3)]
            harness.ask(*join(system, *chosen, query))
            assert cache.stats().arena.used_bytes <= cache.stats().arena.budget_bytes
        assert cache.stats().arena.num_evictions > 0
        assert cache.stats().arena.num_hits > 0


def test_an_exact_prefix_up_to_the_query_makes_the_request_exact(
    harness: Harness, corpus: Corpus
) -> None:
    ids, params = join(*corpus.chunks(20, 200, 150, 15))
    exact = harness.ask(ids, {"pic": False})
    got = harness.ask(ids, params)
    assert got.report["outcome"] == "exact"
    assert counts(got) == (len(ids) - 1, 0, 0, 1)
    assert kl_divergence(exact.logits, got.logits) < NOISE_KL


def test_an_exact_prefix_inside_a_chunk_leaves_only_its_remainder(
    harness: Harness, corpus: Corpus
) -> None:
    system, first, second, query = corpus.chunks(20, 200, 150, 15)
    ids, params = join(system, first, second, query)
    harness.ask(ids, {**params, "pic_strategy": "reuse"})
    harness.ask(ids[:100], {"pic": False})
    got = harness.ask(ids, {**params, "pic_strategy": "reuse"})
    assert got.cached_tokens == 100
    assert counts(got) == (100, 20 + 200 + 150 - 100, 0, 15)


def test_prompts_above_the_chunked_prefill_size_keep_their_reuse(
    harness: Harness, corpus: Corpus
) -> None:
    ids, params = join(*corpus.chunks(20, *[40] * 30, 15))
    unchunked = harness.ask(ids, params)
    harness.flush()
    with harness.limits(max_tokens=512):
        cold = harness.ask(ids, params)
        assert harness.cache.stats().arena.num_entries == 31
        warm = harness.ask(ids, params)
        full = harness.ask(ids, {**params, **EVERYTHING})
    assert warm.report["computed_tokens"] == 15
    assert kl_divergence(unchunked.logits, cold.logits) < NOISE_KL
    assert kl_divergence(unchunked.logits, warm.logits) < NOISE_KL
    assert kl_divergence(plain(harness, ids).logits, full.logits) < NOISE_KL


def test_misses_are_computed_without_a_free_row(harness: Harness, corpus: Corpus) -> None:
    ids, params = join(*corpus.chunks(20, 100, 300, 120, 15))
    expected = harness.ask(ids, params)
    harness.cache.arena.clear()
    pool = harness.scheduler.req_to_token_pool
    taken = pool.alloc_rows(pool.available_size() - 1)
    try:
        with harness.limits(packs=False):
            got = harness.ask(ids, params)
    finally:
        pool.free_rows(taken)
    assert got.report["outcome"] == "cold"
    assert kl_divergence(expected.logits, got.logits) < NOISE_KL
    assert harness.ask(ids, params).report["outcome"] == "reused"


def test_hundreds_of_tiny_misses_share_a_pass(harness: Harness, corpus: Corpus) -> None:
    ids, params = join(*corpus.chunks(20, *[1] * 300, 15))
    passes: list[int] = []
    rows = harness.runtime._executor._rows
    build = rows._build

    def count(sequences: Any, batch: Any) -> Any:
        passes.append(len(sequences))
        return build(sequences, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_build", count)
        assert harness.ask(ids, params).report["outcome"] == "cold"
    assert len(passes) == 2
    got = harness.ask(ids, {**params, "pic_strategy": "reuse"})
    assert counts(got) == (20, 300, 0, 15)


def test_more_misses_than_rows_are_computed_in_waves(harness: Harness, corpus: Corpus) -> None:
    ids, params = join(*corpus.chunks(20, *[30] * 12, 15))
    expected = harness.ask(ids, params)
    harness.cache.arena.clear()
    with harness.limits(isolates=False, max_rows=3, packs=False):
        got = harness.ask(ids, params)
    assert got.report["outcome"] == "cold"
    assert kl_divergence(expected.logits, got.logits) < NOISE_KL


# Keeping


def test_what_is_kept_follows_pic_store(harness: Harness, corpus: Corpus) -> None:
    ids, params = join(*corpus.chunks(20, 100, 15))
    harness.ask(ids, {**params, "pic_store": "none"})
    assert harness.cache.stats().arena.num_entries == 0
    harness.ask(ids, params)
    assert harness.cache.stats().arena.num_entries == 2
    harness.ask(ids, {**params, "pic_store": "all"})
    assert harness.cache.stats().arena.num_entries == 3
    got = harness.ask(ids, {**params, "pic_strategy": "reuse"})
    assert counts(got) == (20, 114, 1, 0)


def test_documents_can_be_invalidated_and_expire(
    harness: Harness, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, params = join(*corpus.chunks(20, 100, 15))
    harness.ask(ids, {**params, "pic_doc_ids": ["handbook"], "pic_ttl_s": 60})
    assert harness.ask(ids, params).report["outcome"] == "reused"
    later = harness.runtime._executor._now_ms() + 61_000
    monkeypatch.setattr(harness.runtime._executor, "_now_ms", lambda: later)
    assert harness.ask(ids, {**params, "pic_store": "none"}).report["outcome"] == "cold"


def test_namespaces_do_not_see_each_other(harness: Harness, corpus: Corpus) -> None:
    ids, params = join(*corpus.chunks(20, 100, 15))
    harness.ask(ids, {**params, "pic_namespace": "a"})
    assert harness.ask(ids, {**params, "pic_namespace": "a"}).report["outcome"] == "reused"
    assert harness.ask(ids, {**params, "pic_namespace": "b"}).report["outcome"] == "cold"
    salted = harness.ask(ids, {**params, "pic_namespace": "a"}, fields={"cache_salt": "s"})
    assert salted.report["outcome"] == "cold"


def test_changed_weights_are_another_model(harness: Harness, corpus: Corpus) -> None:
    ids, params = join(*corpus.chunks(20, 100, 15))
    harness.ask(ids, params)
    weight = next(harness.scheduler.tp_worker.model_runner.model.parameters())
    old = weight[0, 0].clone()
    fingerprint = harness.runtime._fingerprint
    with torch.no_grad():
        weight[0, 0] = old + 1
    try:
        harness.runtime.weights_changed()
        assert harness.runtime._fingerprint != fingerprint
        assert harness.ask(ids, params).report["outcome"] == "cold"
    finally:
        with torch.no_grad():
            weight[0, 0] = old
        harness.runtime.weights_changed()
    assert harness.runtime._fingerprint == fingerprint


# Failure


def test_a_corrupt_payload_is_a_miss(harness: Harness, corpus: Corpus) -> None:
    ids, params = join(*corpus.chunks(20, 100, 120, 15))
    expected = harness.ask(ids, params)
    chunk = harness.runtime._make_task(_as_received(ids, params)).chunks[1]
    with torch.inference_mode():
        stored = harness.cache.arena.store
        payload = stored.get(record_of(harness, chunk.segments[0].key))
        payload.data[3, 0, 5] += 1
    got = harness.ask(ids, params)
    assert got.report["computed_tokens"] == 100 + 15
    assert torch.equal(got.logits, expected.logits)
    assert harness.cache.stats().arena.load_failures["damaged"] >= 1


def test_a_vanished_payload_is_a_miss(harness: Harness, corpus: Corpus) -> None:
    ids, params = join(*corpus.chunks(20, 100, 120, 15))
    expected = harness.ask(ids, params)
    chunk = harness.runtime._make_task(_as_received(ids, params)).chunks[2]
    harness.cache.arena.store.drop(record_of(harness, chunk.segments[0].key))
    got = harness.ask(ids, params)
    assert got.report["computed_tokens"] == 120 + 15
    assert torch.equal(got.logits, expected.logits)


@pytest.mark.parametrize("broken", ["acquire", "place", "capture", "plan", "run"])
def test_an_exception_of_ours_is_a_full_prefill_for_that_request(
    harness: Harness, corpus: Corpus, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    ids, params = join(*corpus.chunks(20, 100, 120, 15))
    expected = plain(harness, ids)
    executor = harness.runtime._executor

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        if broken == "acquire":
            patch.setattr(harness.cache, "acquire", fail)
        elif broken in ("place", "capture"):
            patch.setattr(executor._pool, broken, fail)
        elif broken == "plan":
            patch.setattr("sglang_ext.extend.plan_prompt", fail)
        else:
            patch.setattr(executor._rows, "run", fail)
        if broken == "capture":
            patch.setattr(harness, "_record", _record_logits_only(harness))
        got = harness.ask(ids, params)
    assert got.report["fallback"] == "internal_error"
    assert "injected" in got.report["detail"]
    assert sum(counts(got)) == len(ids)
    assert torch.equal(got.logits, expected.logits)
    assert harness.ask(ids, {"pic": False}).cached_tokens == len(ids) - 1


def _record_logits_only(harness: Harness) -> Any:
    def record(batch: Any, result: Any) -> None:
        logits = result.logits_output.next_token_logits.float().cpu()
        for index, req in enumerate(batch.reqs):
            harness._prefills[req.rid] = (logits[index], torch.empty(0), len(batch.reqs))

    return record


def test_one_request_that_fails_leaves_its_batch_alone(
    harness: Harness, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = join(*corpus.chunks(20, 100, 15))
    bad = join(*corpus.chunks(20, 110, 15))
    expected = harness.ask(*good)
    original = harness.runtime._executor._place_all

    def place(job: Any, plan: Any) -> int:
        if job.num_tokens == len(bad[0]):
            raise RuntimeError("injected")
        return int(original(job, plan))

    monkeypatch.setattr(harness.runtime._executor, "_place_all", place)
    answers = harness.ask_all([Ask(*good), Ask(*bad)])
    assert [answer.report["fallback"] for answer in answers] == [None, "internal_error"]
    assert torch.equal(answers[0].logits, expected.logits)


def test_a_request_aborted_in_the_queue_leaves_nothing_behind(
    harness: Harness, corpus: Corpus
) -> None:
    from sglang.srt.managers.io_struct import AbortReq

    asks = [Ask(*join(*corpus.chunks(20, 100, 15)), max_new_tokens=4) for _ in range(4)]
    reqs = harness.submit(asks)
    harness.scheduler.abort_request(AbortReq(rid=reqs[1].rid))
    harness.step()
    harness.scheduler.abort_request(AbortReq(rid=reqs[2].rid))
    for _ in range(12):
        harness.step()
    assert harness.scheduler.is_fully_idle()


def test_a_retracted_request_is_prefilled_again(harness: Harness, corpus: Corpus) -> None:
    ids, params = join(*corpus.chunks(20, 100, 120, 15))
    expected = harness.ask(ids, params, max_new_tokens=8)
    (req,) = harness.submit([Ask(ids, params, max_new_tokens=8)])
    for _ in range(4):
        harness.step()
    running = harness.scheduler.running_batch
    assert req in running.reqs
    running.release_req(0, 0, harness.server_args)
    running.filter_batch(keep_indices=[])
    harness.scheduler._add_request_to_queue(req, is_retracted=True)
    while not req.finished():
        harness.step()
    # What decoding computed is computed anew by a prefill: a near tie may fall otherwise later on.
    assert tuple(req.output_ids)[:5] == expected.output_ids[:5]
    assert len(req.output_ids) == 8
    harness._prefills.clear()


def test_a_retracted_request_with_logprobs_is_served(harness: Harness, corpus: Corpus) -> None:
    ids, params = join(*corpus.chunks(20, 100, 120, 15))
    fields = {"return_logprob": True}
    harness.ask(ids, params, max_new_tokens=8, fields=fields)
    (req,) = harness.submit([Ask(ids, params, max_new_tokens=8, fields=fields)])
    for _ in range(4):
        harness.step()
    running = harness.scheduler.running_batch
    running.release_req(0, 0, harness.server_args)
    running.filter_batch(keep_indices=[])
    harness.scheduler._add_request_to_queue(req, is_retracted=True)
    while not req.finished():
        harness.step()
    assert len(req.output_ids) == 8
    harness._prefills.clear()


def test_namespaces_do_not_share_exact_prefixes(harness: Harness, corpus: Corpus) -> None:
    ids = list(corpus.chunk(80))
    harness.ask(ids, {"pic": False, "pic_namespace": "a"})
    assert harness.ask(ids, {"pic": False, "pic_namespace": "a"}).cached_tokens == 79
    assert harness.ask(ids, {"pic": False, "pic_namespace": "b"}).cached_tokens == 0
    assert harness.ask(ids, {"pic": False}).cached_tokens == 0


def test_quantised_and_odd_weights_have_a_fingerprint() -> None:
    for dtype in (torch.int32, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float16):
        weight = torch.ones(7, 5).to(dtype)
        other = weight.clone()
        other[3, 2] = 0
        assert _sample(weight) != _sample(other)
        swapped = weight.clone()
        swapped[0, 0], swapped[6, 4] = 0, 1
        assert _sample(swapped) != _sample(other)
    assert _sample(torch.empty(0)) == b""


def test_a_fingerprint_does_not_depend_on_the_number_of_threads(harness: Harness) -> None:
    runner = harness.scheduler.tp_worker.model_runner
    num_threads = torch.get_num_threads()
    fingerprints = set()
    try:
        for num in (1, 2, 3, 4):
            torch.set_num_threads(num)
            fingerprints.add(model_fingerprint(runner))
    finally:
        torch.set_num_threads(num_threads)
    assert len(fingerprints) == 1


def test_many_requests_covered_by_the_exact_prefix_hold_nothing(
    harness: Harness, corpus: Corpus
) -> None:
    ids, params = join(*corpus.chunks(5, 20, 6))
    harness.ask(ids, {"pic": False})
    for _ in range(100):
        harness.ask(ids, params)
    assert harness.cache.stats().num_held == 0


def test_requests_that_need_every_prompt_token_wait_for_a_batch_of_their_own(
    harness: Harness, corpus: Corpus
) -> None:
    pic = Ask(*join(*corpus.chunks(20, 100, 15)))
    logprobs = Ask(corpus.chunk(30), fields={"return_logprob": True, "logprob_start_len": 0})
    both = harness.ask_all([pic, logprobs])
    assert [answer.batch_size for answer in both] == [1, 1]
    assert both[1].report["fallback"] == "input_logprobs"


# The self-test


def test_the_self_test_passes_on_this_model(harness: Harness) -> None:
    rows = harness.runtime._executor._rows
    run_self_test(harness.scheduler, rows, harness.pool, harness.runtime._layerwise)
    with harness.limits(packs=False, max_rows=3):
        run_self_test(harness.scheduler, rows, harness.pool, None)


def test_the_self_test_sees_keys_one_position_off(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = harness.pool.place

    def place_one_off(pieces: Any, slots: Any) -> None:
        place([piece._replace(delta=piece.delta + 1) for piece in pieces], slots)

    monkeypatch.setattr(harness.pool, "place", place_one_off)
    with pytest.raises(SelfTestFailed, match="re-encoded keys"):
        run_self_test(harness.scheduler, harness.runtime._executor._rows, harness.pool, None)


def test_the_self_test_sees_a_skipped_run(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = harness.runtime._executor._rows
    split = rows._split

    def skip_second(row: Any) -> Any:
        for piece in split(row):
            runs = tuple(run for run in piece.runs if run.start != 32)
            yield replace(piece, runs=runs or piece.runs)

    monkeypatch.setattr(rows, "_split", skip_second)
    with pytest.raises(SelfTestFailed, match="every run"):
        run_self_test(harness.scheduler, rows, harness.pool, None)


def test_the_self_test_sees_a_strategy_whose_tokens_are_not_computed(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second layer writes nothing, which only running layer by layer can go wrong in."""
    layerwise = harness.runtime._layerwise
    run = layerwise._stack.run

    def skip_every_second(layer: int, hidden: Any, forward_batch: Any) -> Any:
        return run(layer, hidden, forward_batch) if layer % 2 else hidden

    monkeypatch.setattr(layerwise._stack, "run", skip_every_second)
    rows = harness.runtime._executor._rows
    with pytest.raises(SelfTestFailed, match="layers with tokens chosen by"):
        run_self_test(harness.scheduler, rows, harness.pool, layerwise)
