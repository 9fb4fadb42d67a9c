"""Proves on the loaded model and backend what PIC rests on, before the first request.

Knows the claims and their controls. Runs through the same passes and copies that requests use, on
slots borrowed from the allocator, and gives everything back.

    chosen rows    computing some runs again over right KV gives back logits, K and V
    all rows       computing every run as a row of its own gives them too, from nothing
    re-encoding    K computed at local positions, rotated by Δ, is K computed at the new positions
    layers         computing every token layer by layer gives them from nothing, and every signal's
                   choice gives them over right KV
    controls       the same with one stale run, with Δ off by one, and with one layer left out must
                   be seen as wrong
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sglang_ext.borrowed import borrowed_batch
from sglang_ext.chunk_index.spans import Span
from sglang_ext.errors import SelfTestFailed
from sglang_ext.kv_pool import KvPool, Piece, SegmentKV
from sglang_ext.layerwise import LayerJob, LayerwiseExecutor
from sglang_ext.recompute.layerwise import LayerwiseParams
from sglang_ext.recompute.strategies.registry import LAYERWISE_STRATEGIES
from sglang_ext.rows import Row, RowRunner

NUM_TOKENS = 96
CHUNK = Span(32, 64)
QUERY = Span(80, 96)
STALE = Span(40, 56)
CHOSEN = (Span(16, 24), Span(56, 72), Span(80, 96))
EVERY = tuple(Span(start, start + 16) for start in range(0, NUM_TOKENS, 16))

# Relative L2 distance. Two correct computations differ by rounding that grows over layers; a wrong
# one differs by a sizeable part of the values themselves.
TOLERANCE = {torch.float32: 0.005, torch.float16: 0.03, torch.bfloat16: 0.06}


class _State(NamedTuple):
    logits: Tensor
    kv: Tensor


def run_self_test(
    scheduler: Any, rows: RowRunner, pool: KvPool, layerwise: LayerwiseExecutor | None
) -> None:
    """Check every claim and control.

    Args:
        scheduler: SGLang's scheduler, idle.
        rows: Runs passes.
        pool: Copies KV.
        layerwise: Runs layers one by one; None where nothing does.

    Raises:
        SelfTestFailed: Says which claim or control, the distance and the bound.
    """
    generator = np.random.default_rng(0)
    vocab = int(scheduler.model_config.vocab_size)
    token_ids = generator.integers(1, vocab, NUM_TOKENS, dtype=np.int64)
    runner = scheduler.tp_worker.model_runner
    is_dummy = str(scheduler.server_args.load_format) == "dummy"
    with torch.inference_mode(), borrowed_batch(scheduler, token_ids) as (batch, slots):
        test = _SelfTest(rows, pool, batch, slots, token_ids, runner.forward)
        test.check_rows(has_stale_control=not is_dummy)
        if layerwise is not None:
            test.check_layers(layerwise, has_control=not is_dummy)
        test.check_reencoding()
    runner.shared_read_done_event = None


class _SelfTest:
    def __init__(
        self,
        rows: RowRunner,
        pool: KvPool,
        batch: Any,
        slots: Tensor,
        token_ids: np.ndarray[Any, np.dtype[np.int64]],
        forward: Any,
    ) -> None:
        self._rows = rows
        self._pool = pool
        self._batch = batch
        self._slots = slots
        self._token_ids = token_ids
        self._forward = forward

    def check_rows(self, has_stale_control: bool) -> None:
        plain = self._compute((Span(0, NUM_TOKENS),))
        bound = TOLERANCE[plain.kv.dtype]
        chosen = self._compute(CHOSEN)
        _expect_close("rows that compute chosen runs", chosen, plain, bound)
        self._forget(plain)
        every = self._compute(EVERY)
        _expect_close("rows that compute every run", every, plain, bound)
        if has_stale_control:
            self._spoil(STALE)
            stale = self._compute((Span(STALE.end, NUM_TOKENS),))
            _expect_far("control with a stale run", stale, plain, bound)

    def check_layers(self, layerwise: LayerwiseExecutor, has_control: bool) -> None:
        plain = self._compute((Span(0, NUM_TOKENS),))
        bound = TOLERANCE[plain.kv.dtype]
        for name in LAYERWISE_STRATEGIES:
            chosen = self._compute_layers(layerwise, name, coverage=0.5)
            _expect_close(f"layers with tokens chosen by {name}", chosen, plain, bound)
        self._forget(plain)
        every = self._compute_layers(layerwise, "kvdev", coverage=1.0)
        _expect_close("layers with every token computed", every, plain, bound)
        if has_control and layerwise.num_layers > 1:
            self._forget(plain)
            without = self._compute_layers(layerwise.without(0), "kvdev", coverage=1.0)
            _expect_far("control with one layer left out", without, plain, bound)
            self._compute((Span(0, NUM_TOKENS),))

    def check_reencoding(self) -> None:
        table = self._slots[CHUNK.start : CHUNK.end]
        local = self._compute_chunk(shift=0)
        direct = self._compute_chunk(shift=CHUNK.start)
        bound = TOLERANCE[direct.dtype]
        for delta, expects_close in ((CHUNK.start, True), (CHUNK.start + 1, False)):
            self._pool.place([Piece(SegmentKV(local), 0, CHUNK.num_tokens, delta)], table)
            moved = self._pool.capture(table).data
            distance = max(_distance(moved[:, part], direct[:, part]) for part in (0, 1))
            if expects_close and not distance <= bound:
                _fail("re-encoded keys and values", distance, f"at most {bound}")
            if not expects_close and not distance > bound:
                _fail("control with keys moved one position too far", distance, f"above {bound}")

    def _compute(self, runs: tuple[Span, ...]) -> _State:
        row = Row(self._batch.reqs[0], self._token_ids, runs, self._slots)
        logits = self._rows.run([row], self._batch, self._forward)[0].float().cpu()
        return _State(logits, self._pool.capture(self._slots).data)

    def _compute_layers(self, layerwise: LayerwiseExecutor, name: str, coverage: float) -> _State:
        """Everything before the query is candidate; nothing of it is known to be right."""
        strategy = LAYERWISE_STRATEGIES[name]
        depth = layerwise.num_layers
        base = strategy.base
        warmup = min(base.warmup, max(1, depth - 2))
        probe = min(base.probe, depth - warmup) if base.probe else None
        params = LayerwiseParams(warmup, probe, coverage)
        job = LayerJob(
            row=Row(self._batch.reqs[0], self._token_ids, (QUERY,), self._slots),
            candidates=(Span(0, QUERY.start),),
            query=QUERY,
            chunks=(Span(0, CHUNK.start), CHUNK, Span(CHUNK.end, QUERY.start), QUERY),
            plan=strategy.plan(params, depth),
            strategy=strategy,
        )
        logits = layerwise.run([job], self._batch)[0].logits.float().cpu()
        return _State(logits, self._pool.capture(self._slots).data)

    def _forget(self, state: _State) -> None:
        """Zeros instead of the prompt's KV."""
        nothing = SegmentKV(torch.zeros_like(state.kv))
        self._pool.place([Piece(nothing, 0, NUM_TOKENS, 0)], self._slots)

    def _compute_chunk(self, shift: int) -> Tensor:
        table = self._slots[CHUNK.start : CHUNK.end]
        ids = self._token_ids[CHUNK.start : CHUNK.end]
        runs = (Span(0, CHUNK.num_tokens),)
        row = Row(self._batch.reqs[0], ids, runs, table, is_own=False, shift=shift)
        self._rows.run([row], self._batch, self._forward)
        return self._pool.capture(table).data

    def _spoil(self, span: Span) -> None:
        """Put the KV of the prompt's first tokens where this span's belongs."""
        source = self._pool.capture(self._slots[: span.num_tokens])
        slots = self._slots[span.start : span.end]
        self._pool.place([Piece(source, 0, span.num_tokens, 0)], slots)


def _expect_close(claim: str, got: _State, expected: _State, bound: float) -> None:
    distance = _state_distance(got, expected)
    if not distance <= bound:
        _fail(claim, distance, f"at most {bound}")


def _expect_far(claim: str, got: _State, expected: _State, bound: float) -> None:
    distance = _state_distance(got, expected)
    if not distance > bound:
        _fail(claim, distance, f"above {bound}")


def _state_distance(got: _State, expected: _State) -> float:
    last = Span(STALE.end, NUM_TOKENS)
    return max(
        _distance(got.logits, expected.logits),
        _distance(got.kv[:, :, last.start : last.end], expected.kv[:, :, last.start : last.end]),
    )


def _distance(got: Tensor, expected: Tensor) -> float:
    """Relative L2 distance; NaN where something is not finite, which passes no comparison."""
    difference = torch.linalg.vector_norm(got.float() - expected.float())
    return float(difference / torch.linalg.vector_norm(expected.float()))


def _fail(claim: str, distance: float, expected: str) -> None:
    raise SelfTestFailed(
        f"self-test: {claim}: relative distance {distance:.4g}, expected {expected}"
    )
