"""Carries out the plans of one extend batch: look up, compute misses, place, patch.

Knows the order in which KV must be ready, and what to do when something is not: a request whose
KV cannot be prepared is computed in full by the same passes. Does not know how a pass is built
(`rows`), how KV is copied (`kv_pool`), or which tokens deserve what (`recompute`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglang_ext.chunk_index.arena import Lease
from sglang_ext.chunk_index.cache import ChunkCache
from sglang_ext.chunk_index.identity import ChunkKey
from sglang_ext.chunk_index.spans import Span, clip_spans, subtract_spans
from sglang_ext.errors import PlanInfeasible
from sglang_ext.kv_pool import KvPool, Piece, SegmentKV
from sglang_ext.layerwise import (
    LayerJob,
    LayerResult,
    LayerwiseExecutor,
    columns_of,
    spans_of,
)
from sglang_ext.recompute.planning import (
    Chunk,
    Miss,
    Placement,
    PromptPlan,
    place_segments,
    plan_prompt,
    resolve_hits,
)
from sglang_ext.recompute.strategies.registry import LAYERWISE_STRATEGIES
from sglang_ext.report import Outcome, PicReport, Reason
from sglang_ext.rows import Forward, Row, RowRunner
from sglang_ext.task import PicTask

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Job:
    """One request of the batch.

    Attributes:
        req: SGLang's request.
        task: Its PIC state; None for a request that PIC does not touch.
        token_ids: `[kv_len]` int64, tokens up to the end of this extend.
        prefix_len: Tokens whose slots belong to SGLang's tree; never written.
        slots: `[kv_len]` int64, the request's slots.
        payloads: KV of this prompt's segments, cached ones and those just computed.
        plan: What happens to each token; None for a full prefill.
        replan: The same plan with other tokens selected.
    """

    req: Any
    task: PicTask | None
    token_ids: npt.NDArray[np.int64]
    prefix_len: int
    slots: Tensor
    payloads: dict[ChunkKey, SegmentKV] = field(default_factory=dict)
    plan: PromptPlan | None = None
    replan: Callable[[tuple[Span, ...]], PromptPlan] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def full_runs(self) -> tuple[Span, ...]:
        return (Span(self.prefix_len, self.num_tokens),)


class PicExecutor:
    """Executes extend batches that hold at least one active `PicTask`."""

    def __init__(
        self,
        rows: RowRunner,
        pool: KvPool,
        cache: ChunkCache[SegmentKV],
        req_to_token: Tensor,
        now_ms: Callable[[], int],
        layerwise: LayerwiseExecutor | None = None,
    ) -> None:
        self._rows = rows
        self._pool = pool
        self._cache = cache
        self._req_to_token = req_to_token
        self._now_ms = now_ms
        self._layerwise = layerwise

    def run(self, batch: Any, forward: Forward) -> Tensor:
        """Compute the batch, K/V in place.

        Args:
            batch: SGLang's ScheduleBatch in extend mode. Not modified but for the requests'
                reports and their `skip_radix_cache_insert`.
            forward: SGLang's own forward of a ForwardBatch.

        Returns:
            `[batch_size, vocab]` logits of each request's last token.
        """
        began = time.perf_counter()
        others_ms = self._rows.forward_ms + self._pool.copy_ms
        computed: dict[ChunkKey, SegmentKV] = {}
        jobs = [self._make_job(index, req, batch) for index, req in enumerate(batch.reqs)]
        rows = [
            Row(job.req, job.token_ids, self._prepare(job, computed, batch, forward), job.slots)
            for job in jobs
        ]
        logits: dict[int, Tensor] = {}
        layerwise_ms = self._run_layerwise(jobs, rows, batch, logits)
        others = [index for index in range(len(jobs)) if index not in logits]
        started = time.perf_counter()
        ends = self._rows.run([rows[index] for index in others], batch, forward) if others else []
        ended = time.perf_counter()
        logits.update(zip(others, ends, strict=True))
        for index in others:
            task = active_task(jobs[index].req)
            if task is not None:
                task.report.phase_ms["patch"] = (ended - started) * 1e3
        others_ms = self._rows.forward_ms + self._pool.copy_ms - others_ms + layerwise_ms
        tasks = [task for task in map(active_task, batch.reqs) if task is not None]
        for task in tasks:
            phases = task.report.phase_ms
            own_ms = ((ended - began) * 1e3 - others_ms) / len(tasks)
            phases["own"] = phases.get("own", 0.0) + own_ms
        return torch.stack([logits[index] for index in range(len(jobs))])

    def _run_layerwise(
        self,
        jobs: Sequence[_Job],
        rows: list[Row],
        batch: Any,
        logits: dict[int, Tensor],
    ) -> float:
        """Run the jobs whose tokens are chosen layer by layer, those of equal phases together.

        Adds each job's logits by its index and fills in its report; returns milliseconds. Jobs
        that cannot be run so get a row that computes them in full.
        """
        groups: dict[Hashable, list[tuple[int, LayerJob]]] = {}
        for index, (job, row) in enumerate(zip(jobs, rows, strict=True)):
            layer_job = _layer_job(job, row)
            if layer_job is not None:
                alone = index if self._rows.limits.isolates else None
                groups.setdefault((layer_job.plan.key, alone), []).append((index, layer_job))
        if not groups:
            return 0.0
        assert self._layerwise is not None, "tasks get phases where layers can be run"
        started = time.perf_counter()
        for members in groups.values():
            try:
                results = self._layerwise.run([layer_job for _, layer_job in members], batch)
            except Exception as exc:
                logger.exception("pic fallback=%s in layers", Reason.ERROR.value)
                for index, _ in members:
                    deactivate(jobs[index].req, Reason.ERROR, f"{type(exc).__name__}: {exc}")
                    rows[index] = replace(rows[index], runs=jobs[index].full_runs)
                continue
            for (index, layer_job), result in zip(members, results, strict=True):
                logits[index] = result.logits
                _finish_layerwise(jobs[index], layer_job, result, self._layerwise.num_layers)
        return (time.perf_counter() - started) * 1e3

    def run_full(self, batch: Any, forward: Forward) -> Tensor:
        """Compute the batch in full, in passes of the usual size; returns as `run` does."""
        jobs = [self._make_job(index, req, batch) for index, req in enumerate(batch.reqs)]
        rows = [Row(job.req, job.token_ids, job.full_runs, job.slots) for job in jobs]
        return torch.stack(self._rows.run(rows, batch, forward))

    def _make_job(self, index: int, req: Any, batch: Any) -> _Job:
        prefix_len = int(batch.prefix_lens[index])
        kv_len = prefix_len + int(batch.extend_lens[index])
        token_ids = np.asarray(req.full_untruncated_fill_ids[:kv_len], dtype=np.int64)
        slots = self._req_to_token[req.kv.req_pool_idx, :kv_len].long()
        return _Job(req, active_task(req), token_ids, prefix_len, slots)

    def _prepare(
        self, job: _Job, computed: dict[ChunkKey, SegmentKV], batch: Any, forward: Forward
    ) -> tuple[Span, ...]:
        """Bring a request's KV into place; returns what is left to compute in context."""
        task = job.task
        if task is None:
            return job.full_runs
        try:
            plan = self._prepare_active(job, task, computed, batch, forward)
        except Exception as exc:
            logger.exception("rid=%s pic fallback=%s", job.req.rid, Reason.ERROR.value)
            deactivate(job.req, Reason.ERROR, f"{type(exc).__name__}: {exc}")
            return job.full_runs
        job.req.skip_radix_cache_insert = not plan.is_exact
        return plan.runs

    def _prepare_active(
        self,
        job: _Job,
        task: PicTask,
        computed: dict[ChunkKey, SegmentKV],
        batch: Any,
        forward: Forward,
    ) -> PromptPlan:
        if job.num_tokens < len(task.token_ids):
            raise PlanInfeasible("chunked", f"{job.num_tokens} of {len(task.token_ids)} tokens")
        report = task.report
        prefetch, task.prefetch = task.prefetch, None  # its memory goes with this pass
        loaded = {} if prefetch is None else prefetch.payloads
        with _timed(report, "lookup"):
            lease = self._cache.acquire(task.paths, self._now_ms())
        with lease:
            with _timed(report, "lookup"):
                at_hand = {**loaded, **computed}
                chunks, indices = task.choose_chunks(lease.num_hits, at_hand)
                self._load(job, chunks, indices, lease)
                known = [key for key in at_hand if key not in job.payloads]
                job.payloads.update((key, at_hand[key]) for key in known)
                num_hits = [lease.num_hits[index] for index in indices]
                hits = resolve_hits(chunks, num_hits, known, job.prefix_len)
                job.replan = partial(
                    plan_prompt,
                    chunks,
                    hits,
                    prefix_len=job.prefix_len,
                    num_tokens=job.num_tokens,
                    keeps_query=task.keeps_query,
                )
                plan = job.plan = job.replan(task.selection)
            with _timed(report, "misses"):
                self._compute_misses(job, task, plan, computed, batch, forward)
            with _timed(report, "place"):
                report.bytes_loaded["host"] = self._place_all(job, plan)
            _fill_report(report, plan, bool(known) or any(num_hits))
            self._annotate(task, chunks, hits)
        return plan

    def _load(
        self,
        job: _Job,
        chunks: Sequence[Chunk],
        indices: Sequence[int],
        lease: Lease[SegmentKV],
    ) -> None:
        for index, chunk in zip(indices, chunks, strict=True):
            payloads = lease.payloads(index)
            for segment, payload in zip(chunk.segments, payloads, strict=False):
                job.payloads[segment.key] = payload

    def _annotate(self, task: PicTask, chunks: Sequence[Chunk], hits: Sequence[int]) -> None:
        """Let a request's documents, life time and pin apply to what it found, as if stored."""
        if not task.life.is_given or not task.keeps_chunks:
            return
        kept = chunks if task.keeps_query else chunks[:-1]
        for chunk, num_hits in zip(kept, hits, strict=False):
            if task.is_own(chunk):
                for segment in chunk.segments[:num_hits]:
                    self._cache.annotate(segment, self._now_ms(), task.life)

    def _compute_misses(
        self,
        job: _Job,
        task: PicTask,
        plan: PromptPlan,
        computed: dict[ChunkKey, SegmentKV],
        batch: Any,
        forward: Forward,
    ) -> None:
        """Compute every miss once; one that needs another's segments waits for its pass."""
        waiting: list[Miss] = []
        for miss in plan.misses:
            is_ready = all(segment.key in job.payloads for segment in miss.cached)
            if waiting and not is_ready:
                self._compute_together(job, task, waiting, computed, batch, forward)
                waiting = []
            waiting.append(miss)
        if waiting:
            self._compute_together(job, task, waiting, computed, batch, forward)

    def _compute_together(
        self,
        job: _Job,
        task: PicTask,
        misses: Sequence[Miss],
        computed: dict[ChunkKey, SegmentKV],
        batch: Any,
        forward: Forward,
    ) -> None:
        rows = []
        for miss in misses:
            span = miss.chunk_span
            context = place_segments(miss.cached, span, job.prefix_len)
            self._place(job, [placement._replace(delta=0) for placement in context])
            local = Span(miss.start - span.start, span.num_tokens)
            table = job.slots[span.start : span.end]
            ids = job.token_ids[span.start : span.end]
            rows.append(Row(job.req, ids, (local,), table, is_own=False))
        started = time.perf_counter()
        self._rows.run(rows, batch, forward)
        captured = [
            (miss, segment, self._pool.capture(job.slots[segment.span.start : segment.span.end]))
            for miss in misses
            for segment in miss.missing
        ]
        num_tokens = sum(run.num_tokens for row in rows for run in row.runs)
        self._cache.compute_cost.observe(num_tokens, (time.perf_counter() - started) * 1e3)
        own = {segment.key for chunk in task.chunks for segment in chunk.segments}
        for miss, segment, payload in captured:
            job.payloads[segment.key] = computed[segment.key] = payload
            is_query = miss.chunk_span.end == task.chunks[-1].span.end
            is_kept = task.keeps_query or (task.keeps_chunks and not is_query)
            if is_kept and segment.key in own:
                self._cache.store(segment, payload, self._now_ms(), task.life)

    def _place_all(self, job: _Job, plan: PromptPlan) -> int:
        """Place hits and fresh misses at their positions; returns the bytes written."""
        fresh = [
            placement
            for miss in plan.misses
            if miss.is_used
            for placement in place_segments(miss.missing, miss.chunk_span, job.prefix_len)
        ]
        return self._place(job, [*plan.placements, *fresh], plan.runs)

    def _place(
        self, job: _Job, placements: Sequence[Placement], overwritten: Sequence[Span] = ()
    ) -> int:
        """Write the parts of placements that are not computed afterwards anyway."""
        pieces: list[Piece] = []
        spans: list[Span] = []
        for placement in placements:
            payload = job.payloads[placement.segment.key]
            origin = placement.segment.span.start
            for span in subtract_spans([placement.span], clip_spans(overwritten, *placement.span)):
                pieces.append(
                    Piece(payload, span.start - origin, span.end - origin, placement.delta)
                )
                spans.append(span)
        if not pieces:
            return 0
        slots = torch.cat([job.slots[span.start : span.end] for span in spans])
        self._pool.place(pieces, slots)
        return int(slots.numel()) * self._pool.bytes_per_token


def _layer_job(job: _Job, row: Row) -> LayerJob | None:
    """What of a job is computed layer by layer; None if nothing is to be chosen."""
    task = active_task(job.req)
    if task is None or task.layer_plan is None or job.plan is None or job.plan.is_exact:
        return None
    last = row.runs[-1]
    chunks = tuple(chunk.span for chunk in task.chunks)
    return LayerJob(
        row=row,
        candidates=job.plan.approximate,
        query=Span(max(last.start, chunks[-1].start), last.end),
        chunks=chunks,
        plan=task.layer_plan,
        strategy=LAYERWISE_STRATEGIES[task.options.strategy],
    )


def _finish_layerwise(job: _Job, layer_job: LayerJob, result: LayerResult, num_layers: int) -> None:
    """Say in a job's report what its layers computed."""
    task = active_task(job.req)
    assert task is not None
    assert job.replan is not None
    assert job.plan is not None
    layers = layer_job.plan
    hits = columns_of(job.plan.approximate_hits)
    hits = hits[np.isin(hits, columns_of(layer_job.candidates))]
    final = job.replan(spans_of(result.patched[-1][1]))
    report = task.report
    report.set_counts(final.counts, final.num_selected)
    full = layers.first_patched * len(hits)
    patched = sum(count * int(np.isin(hits, own).sum()) for count, own in result.patched)
    report.recomputed_share = (full + patched) / (num_layers * len(hits)) if len(hits) else 0.0
    report.plan = {
        "signal": layers.signal.value,
        "warmup": layers.warmup,
        "probe": layers.probe,
        "coverage": layers.coverage,
    }
    report.phase_ms.update(result.phase_ms)
    job.req.skip_radix_cache_insert = not final.is_exact


def deactivate(req: Any, reason: Reason, detail: str | None = None) -> None:
    """Leave a request to an ordinary prefill from here on; its KV will be exact."""
    task: PicTask = req.pic
    task.is_active = False
    task.report.fall_back(reason, detail)
    req.skip_radix_cache_insert = False


def settle(req: Any) -> None:
    """Leave to SGLang what PIC can no longer serve, before it is admitted or computed."""
    task = active_task(req)
    if task is None:
        return
    if len(req.origin_input_ids) != len(task.token_ids):
        deactivate(req, Reason.PROMPT_CHANGED)
    elif req.return_logprob and req.output_ids:
        # After a retraction SGLang wants the logprobs of generated tokens from the prefill.
        deactivate(req, Reason.INPUT_LOGPROBS)


def active_task(req: Any) -> PicTask | None:
    """A request's task if PIC acts on it now."""
    task: PicTask | None = getattr(req, "pic", None)
    return task if task is not None and task.is_active else None


def _fill_report(report: PicReport, plan: PromptPlan, has_hits: bool) -> None:
    report.set_counts(plan.counts, plan.num_selected)
    report.recomputed_share = plan.recomputed_share
    if has_hits:
        report.outcome = Outcome.REUSED
    elif plan.misses:
        report.outcome = Outcome.COLD
    else:
        report.outcome = Outcome.EXACT


@contextmanager
def _timed(report: PicReport, phase: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        elapsed = (time.perf_counter() - started) * 1e3
        report.phase_ms[phase] = report.phase_ms.get(phase, 0.0) + elapsed
