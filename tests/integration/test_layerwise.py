"""What a request gets from strategies that choose while the layers run: logits, KV and its report.

Answers are held against plain prefill, against full reuse and against the plan, by layer and token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_ext.chunk_index.spans import Span
from sglang_ext.config import config_from_args
from sglang_ext.errors import RequestError, SelfTestFailed
from sglang_ext.frontend import prepare_request
from sglang_ext.layerwise import LayerJob, LayerResult, _Without, columns_of
from sglang_ext.recompute.layerwise import LayerwiseParams, LayerwiseStrategy, Scored
from sglang_ext.recompute.strategies.registry import LAYERWISE_STRATEGIES
from sglang_ext.self_test import run_self_test
from tests.corpus import Corpus, join
from tests.harness import Answer, Ask, Harness, kl_divergence

pytestmark = pytest.mark.server

NOISE_KL = 0.01
NOISE_KV = 0.03
"""Relative L2 distance of KV; bfloat16 makes 0.01 over 30 layers, reuse alone 0.2 and more."""
DEPTH = 30
LENGTHS = (10, 30, 25, 20, 10)
SYSTEM, CONTEXT, QUERY = 10, 75, 10
KINDS = ("exact_tokens", "reused_tokens", "recomputed_tokens", "computed_tokens")
FIRST_PATCHED = {"kvdev": 6, "qci": 1, "cacheblend": 1, "prophetkv": 0, "fusionrag": 0}

strategies = pytest.mark.parametrize("strategy", LAYERWISE_STRATEGIES)


@dataclass(frozen=True)
class Prompt:
    """A prompt, its plain prefill, and what full reuse makes of it when every chunk is cached."""

    ids: list[int]
    params: dict[str, Any]
    plain: Answer
    reuse: Answer


@dataclass(frozen=True)
class Seen:
    """An answer, and what went into and came out of the layers."""

    answer: Answer
    job: LayerJob
    result: LayerResult

    @property
    def chosen(self) -> list[int]:
        """Columns of the candidates computed in the last layer."""
        columns: list[int] = self.result.patched[-1][1].tolist()
        return columns

    @property
    def kept(self) -> list[int]:
        """Columns of the candidates that were not."""
        return sorted({*columns_of(self.job.candidates).tolist()} - {*self.chosen})


@pytest.fixture(scope="module")
def corpus(harness: Harness) -> Corpus:
    return Corpus(harness.scheduler.tokenizer)


@pytest.fixture(autouse=True)
def clean(harness: Harness) -> Iterator[None]:
    harness.flush()
    yield
    harness.settle()


@pytest.fixture(scope="module")
def prompt(harness: Harness, corpus: Corpus) -> Prompt:
    """Exact system text, 75 tokens in three chunks, and a query."""
    ids, params = join(*corpus.chunks(*LENGTHS))
    return Prompt(ids, params, plain(harness, ids), warm(harness, ids, params))


def plain(harness: Harness, ids: list[int]) -> Answer:
    """Full prefill of the same ids, out of the way of every other request's exact prefix."""
    return harness.ask(ids, {"pic": False}, fields={"extra_key": f"plain-{len(ids)}-{ids[-1]}"})


def warm(harness: Harness, ids: list[int], params: dict[str, Any]) -> Answer:
    """Have every chunk cached; returns the answer of full reuse."""
    harness.ask(ids, {**params, "pic_strategy": "reuse"})
    return harness.ask(ids, {**params, "pic_strategy": "reuse", "pic_store": "none"})


def store(harness: Harness, prompt: Prompt) -> None:
    """Have every chunk of a prompt cached."""
    harness.ask(prompt.ids, {**prompt.params, "pic_strategy": "reuse"})


def counts(answer: Answer) -> tuple[int, ...]:
    return tuple(answer.report[kind] for kind in KINDS)


def distance(got: Tensor, expected: Tensor) -> float:
    """Relative L2 distance."""
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def expect_close(got: Answer, expected: Answer) -> None:
    assert kl_divergence(expected.logits, got.logits) < NOISE_KL
    assert distance(got.kv, expected.kv) < NOISE_KV


@contextmanager
def spied(harness: Harness) -> Iterator[list[tuple[LayerJob, LayerResult]]]:
    """What goes through the layers while the context lasts."""
    layerwise = harness.runtime._executor._layerwise
    run = layerwise.run
    pairs: list[tuple[LayerJob, LayerResult]] = []

    def keep(jobs: Any, batch: Any) -> Any:
        results = run(jobs, batch)
        pairs.extend(zip(jobs, results, strict=True))
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layerwise, "run", keep)
        yield pairs


def look(harness: Harness, ids: list[int], params: dict[str, Any]) -> Seen:
    """Ask for one prompt and look into its layers."""
    with spied(harness) as pairs:
        answer = harness.ask(ids, params)
    assert answer.report["fallback"] is None, answer.report
    ((job, result),) = pairs
    return Seen(answer, job, result)


@contextmanager
def layers(harness: Harness, layerwise: Any) -> Iterator[None]:
    """Another executor of layers for a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness.runtime._executor, "_layerwise", layerwise)
        yield


# The two ends


@pytest.mark.parametrize(
    ("strategy", "phases"),
    [
        *[(name, {"pic_coverage": 1.0}) for name in LAYERWISE_STRATEGIES],
        *[(name, {"pic_warmup": DEPTH, "pic_probe": 0}) for name in ("kvdev", "qci")],
        ("kvdev", {"pic_warmup": 0, "pic_probe": 0, "pic_coverage": 1.0}),
        ("cacheblend", {"pic_coverage": 1.0, "pic_gradual": True}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_everything_computed_is_plain_prefill_and_enters_the_exact_tree(
    harness: Harness, prompt: Prompt, strategy: str, phases: dict[str, Any]
) -> None:
    store(harness, prompt)
    got = harness.ask(prompt.ids, {**prompt.params, "pic_strategy": strategy, **phases})
    expect_close(got, prompt.plain)
    assert (got.report["outcome"], got.report["fallback"]) == ("reused", None)
    assert counts(got) == (SYSTEM, 0, CONTEXT, QUERY)
    assert got.report["recomputed_share"] == 1.0
    assert harness.ask(prompt.ids, {"pic": False}).cached_tokens == len(prompt.ids) - 1


def test_reuse_and_a_layer_left_out_are_seen_to_differ(harness: Harness, prompt: Prompt) -> None:
    """Controls of the test above: both comparisons can fail."""
    store(harness, prompt)
    asked = {**prompt.params, "pic_strategy": "kvdev", "pic_coverage": 1.0}
    with layers(harness, harness.runtime._executor._layerwise.without(3)):
        without = harness.ask(prompt.ids, asked)
    harness.flush_tree()
    for wrong in (prompt.reuse, without):
        assert kl_divergence(prompt.plain.logits, wrong.logits) > NOISE_KL
        assert distance(wrong.kv, prompt.plain.kv) > 3 * NOISE_KV
    assert torch.equal(without.kv[:3], harness.ask(prompt.ids, asked).kv[:3])


@strategies
def test_no_phase_at_all_is_bit_equal_to_reuse(
    harness: Harness, prompt: Prompt, strategy: str
) -> None:
    store(harness, prompt)
    nothing = {"pic_warmup": 0, "pic_probe": 0, "pic_coverage": 0.0}
    got = harness.ask(prompt.ids, {**prompt.params, "pic_strategy": strategy, **nothing})
    assert torch.equal(got.logits, prompt.reuse.logits)
    assert torch.equal(got.kv, prompt.reuse.kv)
    assert counts(got) == counts(prompt.reuse) == (SYSTEM, CONTEXT, 0, QUERY)
    assert got.report["recomputed_share"] == 0.0
    assert harness.ask(prompt.ids, {"pic": False}).cached_tokens == 0


# Between them: by layer and token


@strategies
def test_layers_and_tokens_are_computed_where_the_plan_says(
    harness: Harness, prompt: Prompt, strategy: str
) -> None:
    store(harness, prompt)
    asked = {**prompt.params, "pic_strategy": strategy, "pic_coverage": 0.2}
    seen = look(harness, prompt.ids, asked)
    kv, first = seen.answer.kv, FIRST_PATCHED[strategy]
    assert len(seen.chosen) == 15
    assert len(seen.kept) == CONTEXT - 15
    reuse = prompt.reuse.kv
    assert torch.equal(kv[first:][:, :, seen.kept], reuse[first:][:, :, seen.kept])
    moved = (kv[first:][:, :, seen.chosen] != reuse[first:][:, :, seen.chosen]).any(4).any(3)
    assert moved[max(first, 1) - first :].any(1).all()  # layer 0 sees no context
    assert first == 0 or distance(kv[:first], prompt.plain.kv[:first]) < NOISE_KV
    assert torch.equal(kv[:, :, :SYSTEM], reuse[:, :, :SYSTEM])
    true = prompt.plain.kv[:, :, seen.chosen]
    assert distance(kv[:, :, seen.chosen], true) < distance(reuse[:, :, seen.chosen], true)


def test_the_published_points_are_what_a_report_says(harness: Harness, prompt: Prompt) -> None:
    store(harness, prompt)
    for strategy, expected in {
        "kvdev": ("kvdev", 4, 2, 0.05, 4),
        "qci": ("qci", 1, 8, 0.15, 12),
        "cacheblend": ("kvdev", 1, 0, 0.15, 12),
        "prophetkv": ("qci", 0, DEPTH, 0.20, 15),
        "fusionrag": ("qci", 0, DEPTH, 0.15, 12),
    }.items():
        signal, warmup, probe, coverage, num_chosen = expected
        report = harness.ask(prompt.ids, {**prompt.params, "pic_strategy": strategy}).report
        assert report["plan"] == {
            "signal": signal,
            "warmup": warmup,
            "probe": probe,
            "coverage": coverage,
        }
        assert report["selected_tokens"] == report["recomputed_tokens"] == num_chosen
        assert {"warmup", "probe", "patch"} <= set(report["ms"])


def test_the_recomputed_share_by_hand(harness: Harness, prompt: Prompt) -> None:
    store(harness, prompt)
    got = harness.ask(prompt.ids, {**prompt.params, "pic_strategy": "kvdev"})
    # 6 layers of 75 tokens, 24 layers of 5 % of them
    assert got.report["recomputed_share"] == round((6 * 75 + 24 * 4) / (30 * 75), 6)
    assert counts(got) == (SYSTEM, CONTEXT - 4, 4, QUERY)


@pytest.mark.parametrize(
    ("strategy", "phases"),
    [
        ("kvdev", (0, 2, 0.1)),
        ("kvdev", (2, 0, 0.33)),
        ("kvdev", (3, 4, 0.0)),
        ("qci", (3, 2, 0.3)),
        ("prophetkv", (2, 5, 0.01)),
        ("fusionrag", (0, 3, 0.6)),
    ],
)
def test_the_recomputed_share_is_the_plans(
    harness: Harness, prompt: Prompt, strategy: str, phases: tuple[int, int, float]
) -> None:
    store(harness, prompt)
    keys = dict(zip(("pic_warmup", "pic_probe", "pic_coverage"), phases, strict=True))
    got = harness.ask(prompt.ids, {**prompt.params, "pic_strategy": strategy, **keys})
    plan = LAYERWISE_STRATEGIES[strategy].plan(LayerwiseParams(*phases), DEPTH)
    assert got.report["recomputed_share"] == round(plan.share(DEPTH, CONTEXT, QUERY), 6)
    assert sum(counts(got)) == len(prompt.ids)


def test_gradual_choice_narrows_layer_by_layer(harness: Harness, prompt: Prompt) -> None:
    store(harness, prompt)
    asked = {**prompt.params, "pic_strategy": "cacheblend", "pic_gradual": True}
    seen = look(harness, prompt.ids, asked)
    steps = [(num_layers, len(columns)) for num_layers, columns in seen.result.patched]
    assert steps == [(1, 18), (1, 16), (1, 14), (26, 12)]
    sets = [{*columns.tolist()} for _, columns in seen.result.patched]
    assert sets[3] < sets[2] < sets[1] < sets[0]
    expected = (75 + 18 + 16 + 14 + 26 * 12) / (30 * 75)
    assert seen.answer.report["recomputed_share"] == round(expected, 6)
    assert counts(seen.answer) == (SYSTEM, CONTEXT - 12, 12, QUERY)
    dropped, reuse = sorted(sets[0] - sets[3]), prompt.reuse.kv
    assert torch.equal(seen.answer.kv[4:][:, :, dropped], reuse[4:][:, :, dropped])
    assert not torch.equal(seen.answer.kv[1][:, dropped], reuse[1][:, dropped])


class EveryOther(LayerwiseStrategy):
    """Every second token of the last document, and a note of what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Scored, int]] = []

    def choose(self, scored: Scored, count: int) -> Tensor:
        self.asked.append((scored, count))
        start = scored.chunks[-2].start
        is_wanted = (scored.columns >= start) & ((scored.columns - start) % 2 == 0)
        return torch.nonzero(is_wanted).flatten()[:count]


@pytest.mark.parametrize("strategy", ["kvdev", "prophetkv"])
def test_a_strategy_is_told_where_candidates_stand_and_is_obeyed(
    harness: Harness, prompt: Prompt, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    store(harness, prompt)
    own = EveryOther()
    monkeypatch.setattr(LAYERWISE_STRATEGIES[strategy], "choose", own.choose, raising=False)
    asked = {**prompt.params, "pic_strategy": strategy, "pic_coverage": 0.1}
    seen = look(harness, prompt.ids, asked)
    ((scored, count),) = own.asked
    assert count == 8
    assert scored.scores.shape == (CONTEXT,)
    assert scored.scores.dtype == torch.float32
    assert scored.scores.isfinite().all()
    assert scored.columns.tolist() == list(range(SYSTEM, SYSTEM + CONTEXT))
    assert scored.chunks[-2:] == (Span(65, 85), Span(85, 95))
    assert scored.plan.coverage == 0.1
    assert seen.chosen == list(range(65, 81, 2))


# Shapes of prompts


def _fresh(harness: Harness, corpus: Corpus) -> tuple[list[int], dict[str, Any]]:
    """Nothing is cached, and nothing stays."""
    ids, params = join(*corpus.chunks(*LENGTHS))
    return ids, {**params, "pic_store": "none"}


def _with_a_miss(harness: Harness, corpus: Corpus) -> tuple[list[int], dict[str, Any]]:
    """Another order, with one chunk that is not cached."""
    system, first, second, query, new = corpus.chunks(10, 30, 25, 10, 15)
    harness.ask(*join(system, first, second, query))
    ids, params = join(system, second, new, first, query)
    return ids, {**params, "pic_store": "none"}


def _prefix_inside_a_chunk(harness: Harness, corpus: Corpus) -> tuple[list[int], dict[str, Any]]:
    """An exact prefix ends in the second of three chunks."""
    ids, params = join(*corpus.chunks(*LENGTHS))
    warm(harness, ids, params)
    harness.ask(ids[:50], {"pic": False})
    return ids, params


def _prefix_inside_a_miss(harness: Harness, corpus: Corpus) -> tuple[list[int], dict[str, Any]]:
    """An exact prefix ends in a chunk that is not cached: its rest is computed in context."""
    system, first, second, query = corpus.chunks(10, 30, 25, 10)
    harness.ask(*join(system, second, query))
    ids, params = join(system, first, second, query)
    harness.ask(ids[:23], {"pic": False})
    return ids, {**params, "pic_store": "none"}


def _cached_query(harness: Harness, corpus: Corpus) -> tuple[list[int], dict[str, Any]]:
    """All but the prompt's last token is cached."""
    ids, params = join(*corpus.chunks(*LENGTHS))
    harness.ask(ids, {**params, "pic_strategy": "reuse", "pic_store": "all"})
    return ids, {**params, "pic_store": "all"}


def _twice(harness: Harness, corpus: Corpus) -> tuple[list[int], dict[str, Any]]:
    """One chunk stands in two places."""
    system, twice, other, query = corpus.chunks(10, 25, 20, 10)
    ids, params = join(system, twice, other, twice, query)
    warm(harness, ids, params)
    return ids, params


def _two_tokens(harness: Harness, corpus: Corpus) -> tuple[list[int], dict[str, Any]]:
    """One of two tokens can be chosen, and the query is one token."""
    ids, params = join(*corpus.chunks(10, 2, 1))
    warm(harness, ids, params)
    return ids, params


SHAPES = {
    # shape: (how it is made, (exact, reused + recomputed, computed) tokens, candidates)
    "fresh": (_fresh, (0, 0, 95), 75),
    "with_a_miss": (_with_a_miss, (10, 55, 25), 70),
    "prefix_inside_a_chunk": (_prefix_inside_a_chunk, (50, 35, 10), 35),
    "prefix_inside_a_miss": (_prefix_inside_a_miss, (23, 25, 27), 25),
    "cached_query": (_cached_query, (10, 85, 0), 84),
    "twice": (_twice, (10, 70, 10), 70),
    "two_tokens": (_two_tokens, (10, 2, 1), 2),
}


@pytest.mark.parametrize(
    ("strategy", "shape"),
    [
        *((strategy, shape) for strategy in ("kvdev", "qci") for shape in SHAPES),
        ("fusionrag", "cached_query"),
        ("fusionrag", "prefix_inside_a_miss"),
        ("cacheblend", "prefix_inside_a_chunk"),
    ],
)
def test_prompts_of_any_shape_are_served(
    harness: Harness, corpus: Corpus, strategy: str, shape: str
) -> None:
    make, kinds, num_candidates = SHAPES[shape]
    ids, params = make(harness, corpus)
    expected = plain(harness, ids)
    reuse = harness.ask(ids, {**params, "pic_strategy": "reuse"})
    own = {**params, "pic_strategy": strategy}
    seen = look(harness, ids, {**own, "pic_coverage": 0.3})
    whole = look(harness, ids, {**own, "pic_coverage": 1.0})

    assert len(columns_of(seen.job.candidates)) == num_candidates
    assert len(seen.chosen) == -(-3 * num_candidates // 10)
    for each in (seen.answer, whole.answer):
        exact, reused, recomputed, computed = counts(each)
        assert (exact, reused + recomputed, computed) == kinds
    first, kept = FIRST_PATCHED[strategy], seen.kept
    assert torch.equal(seen.answer.kv[first:][:, :, kept], reuse.kv[first:][:, :, kept])
    expect_close(whole.answer, expected)
    assert counts(whole.answer)[1] == 0
    assert harness.ask(ids, {"pic": False}).cached_tokens == len(ids) - 1


@pytest.mark.parametrize("shape", ["with_a_miss", "fresh"])
def test_a_miss_is_a_candidate_and_no_part_of_the_share(
    harness: Harness, corpus: Corpus, shape: str
) -> None:
    ids, params = SHAPES[shape][0](harness, corpus)
    hits = {*range(10, 35), *range(50, 80)} if shape == "with_a_miss" else set()
    asked = {**params, "pic_strategy": "kvdev", "pic_coverage": 0.5}
    seen = look(harness, ids, asked)
    num_hit = len(hits.intersection(seen.chosen))
    assert len(seen.chosen) > num_hit
    assert seen.answer.report["recomputed_tokens"] == num_hit
    share = (6 * len(hits) + 24 * num_hit) / (30 * len(hits)) if hits else 0.0
    assert seen.answer.report["recomputed_share"] == round(share, 6)


def test_a_prompt_covered_by_the_exact_prefix_needs_no_layers(
    harness: Harness, prompt: Prompt
) -> None:
    harness.ask(prompt.ids, {"pic": False})
    with spied(harness) as pairs:
        got = harness.ask(prompt.ids, {**prompt.params, "pic_strategy": "kvdev"})
    assert pairs == []
    assert got.report["outcome"] == "exact"
    assert counts(got) == (len(prompt.ids) - 1, 0, 0, 1)
    assert got.report["recomputed_share"] == 0.0


@strategies
def test_cold_and_warm_answers_are_equal(harness: Harness, prompt: Prompt, strategy: str) -> None:
    asked = {**prompt.params, "pic_strategy": strategy}
    cold = harness.ask(prompt.ids, asked)
    again = harness.ask(prompt.ids, asked)
    assert (cold.report["outcome"], again.report["outcome"]) == ("cold", "reused")
    assert torch.equal(cold.logits, again.logits)
    assert torch.equal(cold.kv, again.kv)
    assert counts(cold) == (0, 0, 0, len(prompt.ids))


@strategies
def test_a_prompt_above_the_limit_of_a_pass_is_computed_in_several(
    harness: Harness, prompt: Prompt, strategy: str
) -> None:
    store(harness, prompt)
    asked = {**prompt.params, "pic_strategy": strategy, "pic_coverage": 0.3}
    whole = look(harness, prompt.ids, asked)
    with harness.limits(max_tokens=32):
        split = look(harness, prompt.ids, asked)
        full = harness.ask(prompt.ids, {**asked, "pic_coverage": 1.0})
    expect_close(full, prompt.plain)
    assert counts(split.answer) == counts(whole.answer)
    both = {*split.chosen} & {*whole.chosen}
    assert len(both) >= 0.9 * len(whole.chosen)  # near ties fall otherwise in other passes
    first = FIRST_PATCHED[strategy]
    kept = split.kept
    assert torch.equal(split.answer.kv[first:][:, :, kept], prompt.reuse.kv[first:][:, :, kept])


@pytest.mark.parametrize("max_tokens", [4, 9])
def test_a_query_above_the_limit_of_a_pass_looks_ahead_in_several(
    harness: Harness, prompt: Prompt, max_tokens: int
) -> None:
    store(harness, prompt)
    asked = {**prompt.params, "pic_strategy": "prophetkv", "pic_probe": 3}
    whole = look(harness, prompt.ids, asked)
    with harness.limits(max_tokens=max_tokens):
        split = look(harness, prompt.ids, asked)
    assert len({*split.chosen} & {*whole.chosen}) >= 0.9 * len(whole.chosen)


# Batches


def test_an_answer_does_not_depend_on_who_shares_its_batch(
    harness: Harness, corpus: Corpus
) -> None:
    system, first, second, third, query = corpus.chunks(10, 30, 25, 20, 10)
    asked: list[dict[str, Any]] = [
        {"pic_strategy": "kvdev"},
        {"pic_strategy": "kvdev", "pic_coverage": 0.5},
        {"pic_strategy": "qci"},
        {"pic_strategy": "cacheblend", "pic_gradual": True},
        {"pic_strategy": "fusionrag"},
        {"pic_strategy": "daric"},
    ]
    orders = [(first, second), (second, third), (third, first), (second, first), (first, third)]
    asks = []
    for index, own in enumerate(asked):
        ids, params = join(system, *orders[index % len(orders)], query)
        asks.append(Ask(ids, {**params, **own}))
    asks.append(Ask(corpus.chunk(30), {"pic": False}))
    for ask in asks[:3]:
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
        assert torch.equal(one.kv, other.kv)
        assert counts(one) == counts(other)
        assert one.report["recomputed_share"] == other.report["recomputed_share"]


def test_requests_of_equal_phases_share_passes_with_a_coverage_of_their_own(
    harness: Harness, corpus: Corpus
) -> None:
    system, first, second, query = corpus.chunks(10, 25, 20, 10)
    asks = []
    for index, coverage in enumerate((1.0, 0.0, 0.4)):
        ids, params = join(system, *((first, second), (second, first), (first,))[index], query)
        asks.append(Ask(ids, {**params, "pic_strategy": "kvdev", "pic_coverage": coverage}))
    alone = []
    for ask in asks:
        harness.ask_all([ask])
        harness.flush_tree()
        alone += harness.ask_all([ask])
        harness.flush_tree()
    calls: list[int] = []
    layerwise = harness.runtime._executor._layerwise
    run = layerwise.run

    def count(jobs: Any, batch: Any) -> Any:
        calls.append(len(jobs))
        return run(jobs, batch)

    with pytest.MonkeyPatch.context() as patch, harness.limits(isolates=False):
        patch.setattr(layerwise, "run", count)
        together = harness.ask_all(asks)
    assert calls == [3]
    for one, other in zip(alone, together, strict=True):
        expect_close(other, one)
        assert counts(one) == counts(other)
        assert one.report["recomputed_share"] == other.report["recomputed_share"]
    expect_close(together[0], plain(harness, list(asks[0].ids)))


# Failure


@pytest.mark.parametrize(
    ("strategy", "broken"),
    [("qci", "embed"), ("kvdev", "run"), ("qci", "run"), ("kvdev", "choose"), ("qci", "logits")],
)
def test_an_error_inside_the_layers_is_a_full_prefill(
    harness: Harness,
    prompt: Prompt,
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
    strategy: str,
) -> None:
    store(harness, prompt)
    asked = {**prompt.params, "pic_strategy": strategy}
    expected = harness.ask(prompt.ids, asked)
    owner: Any = harness.runtime._executor._layerwise._stack
    if broken == "choose":
        owner = LAYERWISE_STRATEGIES[strategy]
    original, calls = getattr(owner, broken), []

    def fail_once(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == (8 if broken == "run" else 1):
            raise RuntimeError("injected")
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, broken, fail_once, raising=False)
        got = harness.ask(prompt.ids, asked)
    assert got.report["fallback"] == "internal_error"
    assert "injected" in got.report["detail"]
    assert got.report["outcome"] == "full"
    assert counts(got) == (0, 0, 0, len(prompt.ids))
    assert got.report["recomputed_share"] == 0.0
    assert torch.equal(got.logits, prompt.plain.logits)
    assert torch.equal(got.kv, prompt.plain.kv)
    assert harness.ask(prompt.ids, {"pic": False}).cached_tokens == len(prompt.ids) - 1
    harness.flush_tree()
    again = harness.ask(prompt.ids, asked)
    assert torch.equal(again.logits, expected.logits)
    assert torch.equal(again.kv, expected.kv)


def test_an_error_inside_the_layers_leaves_right_answers_to_the_batch(
    harness: Harness, prompt: Prompt, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = join(*corpus.chunks(10, 30, 10))
    expected = plain(harness, other[0])
    stack = harness.runtime._executor._layerwise._stack

    def fail(*args: Any) -> Any:
        raise RuntimeError("injected")

    monkeypatch.setattr(stack, "run", fail)
    everything = {"pic_n_avg": 100_000, "pic_max_share": 1.0}
    answers = harness.ask_all(
        [
            Ask(prompt.ids, {**prompt.params, "pic_strategy": "qci"}),
            Ask(other[0], {**other[1], **everything}),
            Ask(other[0], {"pic": False}, fields={"extra_key": "own"}),
        ]
    )
    assert answers[0].report["fallback"] == "internal_error"
    assert answers[1].report["fallback"] is None
    for got, right in zip(answers, (prompt.plain, expected, expected), strict=True):
        expect_close(got, right)


def test_keys_placed_one_position_off_are_seen(
    harness: Harness, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control of what is compared with the KV of reuse."""
    store(harness, prompt)
    place = harness.pool.place

    def place_one_off(pieces: Any, slots: Any) -> None:
        place([piece._replace(delta=piece.delta + 1) for piece in pieces], slots)

    asked = {**prompt.params, "pic_strategy": "cacheblend"}
    right = look(harness, prompt.ids, asked)
    monkeypatch.setattr(harness.pool, "place", place_one_off)
    wrong = look(harness, prompt.ids, asked)
    kept = sorted({*wrong.kept} & {*right.kept})
    for part, is_keys in ((0, True), (1, False)):
        got, reuse = wrong.answer.kv[1:, part][:, kept], prompt.reuse.kv[1:, part][:, kept]
        assert (distance(got, reuse) > 3 * NOISE_KV) is is_keys
        assert torch.equal(got, reuse) is not is_keys


def test_a_retracted_request_is_prefilled_again(harness: Harness, prompt: Prompt) -> None:
    asked = {**prompt.params, "pic_strategy": "kvdev"}
    expected = harness.ask(prompt.ids, asked, max_new_tokens=8)
    (req,) = harness.submit([Ask(prompt.ids, asked, max_new_tokens=8)])
    for _ in range(4):
        harness.step()
    running = harness.scheduler.running_batch
    assert req in running.reqs
    running.release_req(0, 0, harness.server_args)
    running.filter_batch(keep_indices=[])
    harness.scheduler._add_request_to_queue(req, is_retracted=True)
    with spied(harness) as pairs:
        while not req.finished():
            harness.step()
    ((job, _),) = pairs
    assert job.query.start == SYSTEM + CONTEXT
    assert job.query.end > len(prompt.ids)  # generated tokens stand behind the query
    # What decoding computed is computed anew by a prefill: a near tie may fall otherwise later on.
    assert tuple(req.output_ids)[:4] == expected.output_ids[:4]
    assert len(req.output_ids) == 8
    harness._prefills.clear()


def test_a_request_aborted_in_the_queue_leaves_nothing_behind(
    harness: Harness, corpus: Corpus
) -> None:
    from sglang.srt.managers.io_struct import AbortReq

    asks = []
    for _ in range(3):
        ids, params = join(*corpus.chunks(10, 30, 10))
        asks.append(Ask(ids, {**params, "pic_strategy": "qci"}, max_new_tokens=4))
    reqs = harness.submit(asks)
    harness.scheduler.abort_request(AbortReq(rid=reqs[1].rid))
    harness.step()
    harness.scheduler.abort_request(AbortReq(rid=reqs[2].rid))
    for _ in range(10):
        harness.step()
    assert harness.scheduler.is_fully_idle()


# Refusals


REFUSED = [
    ("kvdev", {"pic_warmup": 31}, "pic_warmup: got 31, expected 0 to 30 layers"),
    ("kvdev", {"pic_warmup": 28}, None),
    ("kvdev", {"pic_warmup": 29}, "pic_probe: got 2, expected 0 to 1 layers behind a warm-up"),
    ("kvdev", {"pic_warmup": 0, "pic_probe": 1}, "pic_probe: got 1, expected with a warm-up of 0"),
    ("qci", {"pic_probe": 0}, "pic_probe: got 0, expected at least 1 layer of the query"),
    ("qci", {"pic_warmup": 23}, "pic_probe: got 8, expected 0 to 7 layers behind a warm-up of 23"),
    ("prophetkv", {"pic_warmup": 30}, None),
    ("daric", {"pic_warmup": 900, "pic_probe": 900}, None),
]


@pytest.mark.parametrize(("strategy", "phases", "message"), REFUSED)
def test_phases_that_do_not_fit_the_model_are_refused_before_a_request_is_sent(
    harness: Harness, strategy: str, phases: dict[str, int], message: str | None
) -> None:
    from sglang.srt.managers.io_struct import GenerateReqInput

    config = config_from_args({"enable_pic": True})
    assert config is not None
    manager = SimpleNamespace(tokenizer=None, model_config=harness.scheduler.model_config)
    custom = {"pic_strategy": strategy, **phases}
    obj = GenerateReqInput(input_ids=[5, 6, 7], sampling_params={"custom_params": custom})
    obj.normalize_batch_and_arguments()
    if message is None:
        assert prepare_request(manager, obj, config) is obj
        return
    with pytest.raises(RequestError) as caught:  # a ValueError, which is answered with 400
        prepare_request(manager, obj, config)
    assert isinstance(caught.value, ValueError)
    assert str(caught.value).startswith(message)


def test_phases_that_do_not_fit_and_reach_the_scheduler_are_a_full_prefill(
    harness: Harness, prompt: Prompt
) -> None:
    asked = {**prompt.params, "pic_strategy": "kvdev", "pic_warmup": 0, "pic_probe": 1}
    got = harness.ask(prompt.ids, asked)
    assert (got.report["outcome"], got.report["fallback"]) == ("full", "layerwise_plan")
    assert got.report["detail"].startswith("pic_probe: got 1, expected with a warm-up of 0")
    assert torch.equal(got.logits, prompt.plain.logits)
    assert harness.cache.stats().arena.num_entries == 0


def test_a_model_without_layers_to_run_refuses_only_what_needs_them(
    harness: Harness, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness.runtime, "_layerwise", None)
    got = harness.ask(prompt.ids, {**prompt.params, "pic_strategy": "qci"})
    assert (got.report["outcome"], got.report["fallback"]) == ("full", "layerwise_unsupported")
    assert torch.equal(got.logits, prompt.plain.logits)
    harness.flush_tree()
    other = harness.ask(prompt.ids, {**prompt.params, "pic_strategy": "daric"})
    assert (other.report["outcome"], other.report["fallback"]) == ("cold", None)


# The self-test


def check(harness: Harness, layerwise: Any) -> None:
    run_self_test(harness.scheduler, harness.runtime._executor._rows, harness.pool, layerwise)


def test_the_self_test_passes_with_layers(harness: Harness) -> None:
    check(harness, harness.runtime._executor._layerwise)


def test_the_self_test_sees_a_layer_that_does_nothing(harness: Harness) -> None:
    with pytest.raises(SelfTestFailed, match="layers with"):
        check(harness, harness.runtime._executor._layerwise.without(DEPTH - 1))


def test_the_self_test_sees_that_its_control_is_blind(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: Any, layer: int, hidden: Any, forward_batch: Any) -> Any:
        return self._stack.run(layer, hidden, forward_batch)

    monkeypatch.setattr(_Without, "run", run)
    with pytest.raises(SelfTestFailed, match="control with one layer left out"):
        check(harness, harness.runtime._executor._layerwise)


def test_the_self_test_sees_a_choice_that_is_written_to_the_wrong_tokens(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_ext import layerwise

    places = layerwise._places
    monkeypatch.setattr(layerwise, "_places", lambda *args: places(*args).roll(1))
    with pytest.raises(SelfTestFailed, match="layers with tokens chosen by"):
        check(harness, harness.runtime._executor._layerwise)


# Quality


def test_more_coverage_brings_answers_on_prose_closer_to_full_prefill(
    harness: Harness, corpus: Corpus
) -> None:
    totals = {0.0: 0.0, 0.5: 0.0, 1.0: 0.0}
    for _ in range(8):
        ids, params = join(*corpus.chunks(10, 20, 20, 20, 15))  # text that goes on
        expected = plain(harness, ids)
        totals[0.0] += kl_divergence(expected.logits, warm(harness, ids, params).logits) / 8
        for coverage in (0.5, 1.0):
            asked = {**params, "pic_strategy": "prophetkv", "pic_coverage": coverage}
            got = harness.ask(ids, asked)
            totals[coverage] += kl_divergence(expected.logits, got.logits) / 8
    assert totals[0.0] > 1.5 * totals[0.5]
    assert totals[0.5] > 2 * totals[1.0]
    assert totals[1.0] < NOISE_KL
