"""Carries out layerwise plans: WarmUp, Probe, choice and Patch inside the model's own layers.

Knows phases, which tokens stand in each, and where their KV is. Does not know chunks' keys, the
cache, how a pass is built (`rows`) or how a model family runs a layer (`layers`).

    tokens      |  exact  |   candidates   must   candidates   |  query (must)  |
    WarmUp                    all          all    all              all
    Probe                     kvdev: as WarmUp; qci: must only, put back afterwards
    Patch                     chosen       all    chosen           all

Candidates carry KV that saw only its own chunk; `must` is computed in any case. Whatever a phase
computes is written over the reused KV, layer by layer, before attention reads it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglang_ext import compat
from sglang_ext.chunk_index.spans import Span, merge_spans
from sglang_ext.layers import Hidden, LayerStack, ObservedBackend, StopLayer, join
from sglang_ext.recompute.layerwise import (
    LayerPlan,
    LayerwiseStrategy,
    ProbeRows,
    Scored,
    count_covered,
)
from sglang_ext.recompute.signals import kv_deviation, query_importance
from sglang_ext.rows import LayerPass, Row, RowRunner

Columns = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LayerJob:
    """One request to compute layer by layer.

    Attributes:
        row: Its tokens and slots; `row.runs` are what is computed in any case, the query last.
        candidates: Tokens with KV that saw only its own chunk; merged, none in `row.runs`.
        query: The query's part of `row.runs`.
        chunks: The prompt's chunks.
        plan: Phases.
        strategy: Chooses among the candidates.
    """

    row: Row
    candidates: tuple[Span, ...]
    query: Span
    chunks: tuple[Span, ...]
    plan: LayerPlan
    strategy: LayerwiseStrategy


@dataclass(slots=True)
class LayerResult:
    """What came of a job.

    Attributes:
        logits: `[vocab]` of the last token.
        patched: For the Patch's layers in order how many there were with the same tokens, and the
            candidates computed there, as columns; the last says what was chosen in the end.
        phase_ms: Milliseconds of `warmup`, `probe` and `patch`.
    """

    logits: Tensor
    patched: list[tuple[int, Columns]] = field(default_factory=list)
    phase_ms: dict[str, float] = field(default_factory=dict)


class LayerwiseExecutor:
    """Runs layerwise jobs; see the module's docstring."""

    def __init__(self, model_runner: Any, rows: RowRunner, stack: LayerStack) -> None:
        self._runner = model_runner
        self._rows = rows
        self._stack = stack

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self._stack.num_layers

    def without(self, layer: int) -> LayerwiseExecutor:
        """One that leaves a layer out: for controls that must be seen as wrong."""
        return LayerwiseExecutor(self._runner, self._rows, _Without(self._stack, layer))

    def run(self, jobs: Sequence[LayerJob], batch: Any) -> list[LayerResult]:
        """Compute jobs whose plans have equal keys, K/V in place.

        Args:
            jobs: Independent of each other.
            batch: The ScheduleBatch they belong to.
        """
        return _Run(self._runner, self._rows, self._stack, jobs, batch).run()


class _Without:
    """A stack with a layer that does nothing."""

    def __init__(self, stack: LayerStack, layer: int) -> None:
        self.num_layers = stack.num_layers
        self.embed, self.logits = stack.embed, stack.logits
        self._stack = stack
        self._left_out = layer

    def run(self, layer: int, hidden: Hidden, forward_batch: Any) -> Hidden:
        if layer == self._left_out:
            return hidden
        return self._stack.run(layer, hidden, forward_batch)


class _Phase:
    """A set of tokens of every job, ready to go through layers; tokens are in jobs' order.

    Attributes:
        columns: For each job the columns it computes, ascending.
        offsets: For each job where its tokens begin in the phase's order.
    """

    def __init__(
        self, run: _Run, rows: Sequence[Row], columns: Sequence[Columns], batch: Any
    ) -> None:
        self._run = run
        self.columns = columns
        self.offsets = np.concatenate([[0], np.cumsum([len(own) for own in columns])])
        self.passes = run.rows.open(rows, batch)

    @property
    def token_ids(self) -> Tensor:
        return torch.cat([part.forward_batch.input_ids for part in self.passes])

    def run_layer(
        self,
        layer: int,
        hidden: Hidden,
        before: Callable[[int, Any, Tensor, Tensor, Tensor], None] | None = None,
        after: Callable[[int, Any, Tensor, Tensor, Tensor], None] | None = None,
    ) -> Hidden:
        """One layer over every token; observers get the first token of their pass as well."""
        parts: list[Hidden] = []
        start = 0
        for part in self.passes:
            end = start + part.num_tokens
            with self._watched(part, start, before, after):
                own = hidden.part(start, end)
                parts.append(self._run.stack.run(layer, own, part.forward_batch))
            start = end
        return join(parts)

    def project(self, layer: int, hidden: Hidden) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer for every token; nothing is written, `hidden` is spent."""
        keys: list[Tensor] = []
        values: list[Tensor] = []

        def take(_: int, __: Any, ___: Tensor, k: Tensor, v: Tensor) -> None:
            keys.append(k)
            values.append(v)
            raise StopLayer

        start = 0
        for part in self.passes:
            end = start + part.num_tokens
            with self._watched(part, start, take, None), suppress(StopLayer):
                self._run.stack.run(layer, hidden.part(start, end), part.forward_batch)
            start = end
        return torch.cat(keys), torch.cat(values)

    def logits(self, hidden: Hidden) -> list[Tensor]:
        """Of each job's last token."""
        ends: dict[int, Tensor] = {}
        start = 0
        for part in self.passes:
            end = start + part.num_tokens
            with self._watched(part, start, None, None):
                rows = self._run.stack.logits(hidden.part(start, end), part.forward_batch)
            ends.update(zip(part.rows, rows, strict=True))
            start = end
        return [ends[index] for index in range(len(self.columns))]

    def _watched(self, part: LayerPass, start: int, before: Any, after: Any) -> Any:
        return self._run.watched(
            part,
            before and (lambda *seen: before(start, *seen)),
            after and (lambda *seen: after(start, *seen)),
        )


class _Run:
    """One run of jobs with equal keys."""

    def __init__(
        self,
        runner: Any,
        rows: RowRunner,
        stack: LayerStack,
        jobs: Sequence[LayerJob],
        batch: Any,
    ) -> None:
        self.rows = rows
        self.stack = stack
        self._runner = runner
        self._backend = ObservedBackend(runner.attn_backend)
        self._keys: list[Tensor] = runner.token_to_kv_pool.k_buffer
        self._values: list[Tensor] = runner.token_to_kv_pool.v_buffer
        self._jobs = jobs
        self._batch = batch
        self._plan = jobs[0].plan
        self._must = [columns_of(job.row.runs) for job in jobs]
        self._candidates = [columns_of(job.candidates) for job in jobs]
        self._ms: dict[str, float] = {}

    def run(self) -> list[LayerResult]:
        plan, num_layers = self._plan, self.stack.num_layers
        everything = self._phase_of(self._candidates)
        layer, hidden = 0, None
        if plan.first_patched > 0 or self._ranks:
            started = time.perf_counter()
            hidden = self.stack.embed(everything.token_ids)
            for layer in range(plan.warmup):
                hidden = everything.run_layer(layer, hidden)
            self._took("warmup", started)
            if plan.warmup == num_layers:
                return self._results(everything.logits(hidden), [(0, self._candidates)])
        started = time.perf_counter()
        hidden, chosen = self._probe(everything, hidden)
        self._took("probe", started)
        if (
            plan.first_patched == num_layers
        ):  # the Probe was the last to compute, and it computed all
            assert hidden is not None
            return self._results(everything.logits(hidden), [(0, self._candidates)])
        started = time.perf_counter()
        results = self._patch(everything, hidden, chosen)
        self._took("patch", started)
        for result in results:
            result.phase_ms = dict(self._ms)
        return results

    @property
    def _ranks(self) -> bool:
        """Whether there is anything to choose."""
        return any(0 < count < len(own) for count, own in self._counts(self._plan.first_patched))

    def _counts(self, layer: int) -> list[tuple[int, Columns]]:
        return [
            (count_covered(job.plan.coverage_of(layer), len(own)), own)
            for job, own in zip(self._jobs, self._candidates, strict=True)
        ]

    def _probe(
        self, everything: _Phase, hidden: Hidden | None
    ) -> tuple[Hidden | None, list[Columns]]:
        """Choose every job's tokens; returns hidden states at the Patch's first layer as well."""
        plan = self._plan
        counts = self._counts(plan.first_patched)
        scores: list[Tensor] | None = None
        if plan.rows is ProbeRows.ALL:
            if plan.probe == 0 and self._ranks:
                assert hidden is not None
                scores = self._project_deviation(everything, plan.warmup, hidden)
            for layer in range(plan.warmup, plan.first_patched):
                assert hidden is not None
                hidden, deviation = self._run_measured(everything, layer, hidden)
                scores = deviation if scores is None else _added(scores, deviation)
        elif self._ranks:
            scores = self._importance(everything, hidden)
        return hidden, [
            self._choose(index, scores, own, count) for index, (count, own) in enumerate(counts)
        ]

    def _choose(
        self, index: int, scores: list[Tensor] | None, columns: Columns, count: int
    ) -> Columns:
        if count == 0 or count == len(columns):
            return columns[:count]
        assert scores is not None
        job = self._jobs[index]
        device = scores[index].device
        scored = Scored(scores[index], torch.from_numpy(columns).to(device), job.chunks, job.plan)
        kept: Columns = job.strategy.choose(scored, count).cpu().numpy()
        chosen: Columns = columns[kept]
        return chosen

    def _patch(
        self, everything: _Phase, hidden: Hidden | None, chosen: list[Columns]
    ) -> list[LayerResult]:
        plan, num_layers = self._plan, self.stack.num_layers
        phase = self._phase_of(chosen)
        if hidden is None:
            hidden = self.stack.embed(phase.token_ids)
        else:
            hidden = hidden.take(_places(everything, phase, hidden.output.device))
        stages: list[tuple[int, list[Columns]]] = []
        layers_so_far = 0
        for layer in range(plan.first_patched, num_layers):
            has_filter = layer - plan.first_patched < len(plan.filters)
            narrows = has_filter and layer + 1 < num_layers
            layers_so_far += 1
            if not narrows:
                hidden = phase.run_layer(layer, hidden)
                continue
            hidden, scores = self._run_measured(phase, layer, hidden, chosen)
            wanted = [count for count, _ in self._counts(layer + 1)]
            kept = [
                self._choose(index, scores, own, min(count, len(own)))
                for index, (own, count) in enumerate(zip(chosen, wanted, strict=True))
            ]
            stages.append((layers_so_far, chosen))
            layers_so_far = 0
            smaller = self._phase_of(kept)
            hidden = hidden.take(_places(phase, smaller, hidden.output.device))
            phase, chosen = smaller, kept
        stages.append((layers_so_far, chosen))
        return self._results(phase.logits(hidden), stages)

    def _run_measured(
        self, phase: _Phase, layer: int, hidden: Hidden, candidates: list[Columns] | None = None
    ) -> tuple[Hidden, list[Tensor]]:
        """Run a layer and see how far candidates' KV moves, for each job `[num_candidates]`."""
        own = self._candidates if candidates is None else candidates
        slots = self._slots(own)
        old_keys, old_values = self._keys[layer][slots], self._values[layer][slots]
        hidden = phase.run_layer(layer, hidden)
        deviation = kv_deviation(
            self._keys[layer][slots], self._values[layer][slots], old_keys, old_values
        )
        return hidden, _by_job(deviation, own)

    def _project_deviation(self, phase: _Phase, layer: int, hidden: Hidden) -> list[Tensor]:
        keys, values = phase.project(layer, hidden.clone())
        slots = self._slots(self._candidates)
        places = torch.from_numpy(_rows_in(phase, self._candidates)).to(keys.device)
        deviation = kv_deviation(
            keys[places].to(self._keys[layer].dtype),
            values[places].to(self._values[layer].dtype),
            self._keys[layer][slots],
            self._values[layer][slots],
        )
        return _by_job(deviation, self._candidates)

    def _importance(self, everything: _Phase, hidden: Hidden | None) -> list[Tensor]:
        """What the query attends to, for each job `[num_candidates]`; `hidden` stays as it is."""
        plan = self._plan
        is_alone = plan.rows is ProbeRows.QUERY_ALONE
        phase = self._query_phase() if is_alone else self._phase_of(None)
        if hidden is None:
            hidden = self.stack.embed(phase.token_ids)
        else:
            hidden = hidden.take(_places(everything, phase, hidden.output.device))
        device = hidden.output.device
        totals = [torch.zeros(len(own), device=device) for own in self._candidates]
        places = [torch.from_numpy(own).to(device) for own in self._candidates]

        def measure(start: int, layer: Any, q: Tensor, _: Tensor, __: Tensor) -> None:
            queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
            for index, job in enumerate(self._jobs):
                first, columns = self._queries_in(phase, index, start, len(queries))
                if not len(columns):
                    continue
                reach = int(columns[-1]) + 1
                weights = query_importance(
                    queries[first : first + len(columns)],
                    self._keys[layer.layer_id][job.row.slots[:reach]],
                    torch.from_numpy(columns).to(device),
                    layer.scaling,
                    window=layer.sliding_window_size if layer.sliding_window_size > -1 else None,
                    soft_cap=layer.logit_cap or None,
                )
                totals[index] += weights[places[index]] * len(columns)

        last = plan.warmup + plan.probe - 1
        for layer in range(plan.warmup, plan.warmup + plan.probe):
            is_measured = not is_alone or layer == last
            hidden = phase.run_layer(layer, hidden, after=measure if is_measured else None)
        return totals

    def _queries_in(
        self, phase: _Phase, index: int, start: int, num_tokens: int
    ) -> tuple[int, Columns]:
        """Where a job's queries begin in a pass of `num_tokens` from `start`, and their columns."""
        own = phase.columns[index]
        query = self._jobs[index].query
        first = int(np.searchsorted(own, query.start)) + int(phase.offsets[index])
        end = int(np.searchsorted(own, query.end)) + int(phase.offsets[index])
        first, end = max(first, start), min(end, start + num_tokens)
        if first >= end:
            return 0, own[:0]
        offset = int(phase.offsets[index])
        return first - start, own[first - offset : end - offset]

    def _phase_of(self, chosen: Sequence[Columns] | None) -> _Phase:
        """Chosen candidates, none if None, and what is computed in any case."""
        rows, columns = [], []
        for index, (job, must) in enumerate(zip(self._jobs, self._must, strict=True)):
            own = must if chosen is None else np.union1d(must, chosen[index])
            columns.append(own)
            rows.append(replace(job.row, runs=spans_of(own)))
        return _Phase(self, rows, columns, self._batch)

    def _query_phase(self) -> _Phase:
        """Every query by itself: it sees nothing but itself."""
        rows, columns = [], []
        for job in self._jobs:
            start, end = job.query
            rows.append(
                Row(
                    job.row.req,
                    job.row.token_ids[start:end],
                    (Span(0, end - start),),
                    job.row.slots[start:end],
                    is_own=False,
                    shift=start,
                )
            )
            columns.append(np.arange(start, end))
        return _Phase(self, rows, columns, self._batch)

    def _slots(self, columns: Sequence[Columns]) -> Tensor:
        return torch.cat(
            [
                job.row.slots[torch.from_numpy(own).to(job.row.slots.device)]
                for job, own in zip(self._jobs, columns, strict=True)
            ]
        )

    def watched(self, part: LayerPass, before: Any, after: Any) -> Any:
        """A context in which layers of a pass may run."""
        return _Watched(self._runner, self.rows, self._backend, part, before, after)

    def _took(self, phase: str, started: float) -> None:
        self._ms[phase] = self._ms.get(phase, 0.0) + (time.perf_counter() - started) * 1e3

    def _results(
        self, logits: Sequence[Tensor], stages: Sequence[tuple[int, Sequence[Columns]]]
    ) -> list[LayerResult]:
        return [
            LayerResult(
                own, [(num_layers, chosen[index]) for num_layers, chosen in stages], dict(self._ms)
            )
            for index, own in enumerate(logits)
        ]


class _Watched:
    """SGLang's layer context with this pass's metadata and observers."""

    def __init__(
        self,
        runner: Any,
        rows: RowRunner,
        backend: ObservedBackend,
        part: LayerPass,
        before: Any,
        after: Any,
    ) -> None:
        self._rows = rows
        self._part = part
        self._context = compat.layer_context(runner, part.forward_batch, backend)
        self._watch = backend.watch(before, after)

    def __enter__(self) -> None:
        self._rows.use(self._part)
        self._context.__enter__()
        self._watch.__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        self._watch.__exit__(*exc_info)
        self._context.__exit__(*exc_info)


def columns_of(spans: Sequence[Span]) -> Columns:
    """Every column of spans, in order."""
    parts = [np.arange(span.start, span.end, dtype=np.int64) for span in spans]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def spans_of(columns: Columns) -> tuple[Span, ...]:
    """Ascending columns as merged spans."""
    if not len(columns):
        return ()
    breaks = np.flatnonzero(np.diff(columns) != 1) + 1
    starts = columns[np.concatenate([[0], breaks])]
    ends = columns[np.concatenate([breaks - 1, [len(columns) - 1]])] + 1
    return merge_spans([Span(int(s), int(e)) for s, e in zip(starts, ends, strict=True)])


def _by_job(values: Tensor, columns: Sequence[Columns]) -> list[Tensor]:
    return list(torch.split(values, [len(own) for own in columns]))


def _rows_in(phase: _Phase, columns: Sequence[Columns]) -> Columns:
    """Where columns of each job stand in a phase's order of tokens."""
    rows: Columns = np.concatenate(
        [
            np.searchsorted(own, wanted) + offset
            for own, wanted, offset in zip(phase.columns, columns, phase.offsets[:-1], strict=True)
        ]
    ).astype(np.int64)
    return rows


def _places(phase: _Phase, smaller: _Phase, device: torch.device) -> Tensor:
    """Where the tokens of a smaller phase stand in another."""
    return torch.from_numpy(_rows_in(phase, smaller.columns)).to(device)


def _added(scores: list[Tensor], more: list[Tensor]) -> list[Tensor]:
    return [own + other for own, other in zip(scores, more, strict=True)]
