"""Forward passes over chosen tokens of chosen rows: the one place that builds a ForwardBatch.

Knows ScheduleBatch, ForwardBatch, req_to_token rows and the limits of a pass. Does not know chunks,
plans or reports.

A row is a table of slots, and the columns of it to compute. Two layouts reach the backend:

    columns to compute        . . # # . . # . . # #
    virtual   row 0           [0 1)## up to column 4       each run is a sequence of its own that
              row 1           [0 ....... 6)# up to 7       shares the table's row, prefix = the
              row 2           [0 ............. 9)## to 11  columns before it
    packed    row 0               # #     #     # #        one sequence; the backend is told columns

Both rest on K/V being written before attention reads them. Rows that exceed a limit are computed in
several passes in ascending column order, which is exact for causal attention.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglang_ext import compat
from sglang_ext.chunk_index.spans import Span, count_tokens

Forward = Callable[[Any], Any]
"""SGLang's own `ModelRunner.forward` of a ForwardBatch."""


@dataclass(frozen=True, slots=True)
class Row:
    """Columns of one table to compute.

    Attributes:
        req: SGLang's request, for what a ForwardBatch asks of it.
        token_ids: `[table_len]` int64, the token of every column.
        runs: Columns to compute, merged and ascending.
        slots: `[table_len]` int64, the KV slot of every column, on device.
        is_own: The table is the request's own row of req_to_token, not one of a part of it.
        shift: Position of column 0.
    """

    req: Any
    token_ids: npt.NDArray[np.int64]
    runs: tuple[Span, ...]
    slots: Tensor
    is_own: bool = True
    shift: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return count_tokens(self.runs)


class LayerPass(NamedTuple):
    """A pass that is run layer by layer.

    Attributes:
        forward_batch: SGLang's; its `positions` and `out_cache_loc` say which tokens.
        metadata: The attention backend's plan of it.
        rows: Indices of the rows it holds parts of.
    """

    forward_batch: Any
    metadata: Any
    rows: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens it computes."""
        return int(self.forward_batch.input_ids.shape[0])


@dataclass(frozen=True, slots=True)
class PassLimits:
    """What one forward pass may hold.

    Attributes:
        max_tokens: Tokens computed in a pass, at least 1.
        max_rows: Sequences of a pass, at least 1.
        packs: The backend takes packed rows with tables of their own.
        isolates: A pass serves one request only, so that its answer does not depend on others.
    """

    max_tokens: int
    max_rows: int
    packs: bool
    isolates: bool


class RowRunner:
    """Runs rows through the model; see the module's docstring."""

    def __init__(self, model_runner: Any, limits: PassLimits) -> None:
        self._runner = model_runner
        self._pool = model_runner.req_to_token_pool
        self.limits = limits
        self.forward_ms = 0.0
        """Time spent in SGLang's forward so far; callers take differences."""

    def run(self, rows: Sequence[Row], batch: Any, forward: Forward) -> list[Tensor]:
        """Compute every row's runs, writing K/V of each layer in place.

        Args:
            rows: Independent of each other: none reads what another computes.
            batch: The ScheduleBatch they belong to, read for what a pass inherits from it.
            forward: SGLang's forward.

        Returns:
            For each row the logits `[vocab]` of its last computed token.
        """
        logits: list[Tensor | None] = [None] * len(rows)
        for part in self._passes(rows):
            ends = self._run_pass([row for _, row in part], batch, forward)
            for (index, _), last in zip(part, ends, strict=True):
                logits[index] = last
        return [row_logits for row_logits in logits if row_logits is not None]

    def open(self, rows: Sequence[Row], batch: Any) -> list[LayerPass]:
        """Prepare passes over every row's runs, to be run layer by layer.

        Tokens stand in the order of rows and columns, over all passes together. Only for backends
        that take packed rows.

        Args:
            rows: Independent of each other.
            batch: The ScheduleBatch they belong to.
        """
        backend = self._runner.attn_backend
        opened = []
        for part in self._passes(rows):
            own = [row for _, row in part]
            sequences = [(row, row.req.kv.req_pool_idx, row.runs) for row in own]
            forward_batch, columns = self._build(sequences, batch)
            backend.pack_next(columns, [row.slots for row in own])
            try:
                backend.init_forward_metadata(forward_batch)
            finally:
                backend.unpack()
            indices = tuple(index for index, _ in part)
            opened.append(LayerPass(forward_batch, backend.metadata, indices))
        return opened

    def use(self, layer_pass: LayerPass) -> None:
        """Make the backend attend as a prepared pass needs it."""
        self._runner.attn_backend.metadata = layer_pass.metadata

    def _passes(self, rows: Sequence[Row]) -> Iterator[list[tuple[int, Row]]]:
        part: list[tuple[int, Row]] = []
        for index, row in enumerate(rows):
            for piece in self._split(row):
                if part and (part[-1][0] == index or not self._fits([*part, (index, piece)])):
                    yield part
                    part = []
                part.append((index, piece))
        if part:
            yield part

    def _fits(self, part: Sequence[tuple[int, Row]]) -> bool:
        rows = [row for _, row in part]
        if sum(row.num_tokens for row in rows) > self.limits.max_tokens:
            return False
        if self.limits.isolates and any(row.req is not rows[0].req for row in rows):
            return False
        if sum(self._num_sequences(row) for row in rows) > self.limits.max_rows:
            return False
        num_borrowed = 0 if self.limits.packs else sum(not row.is_own for row in rows)
        return num_borrowed <= max(1, int(self._pool.available_size()))

    def _num_sequences(self, row: Row) -> int:
        return 1 if self.limits.packs else len(row.runs)

    def _split(self, row: Row) -> Iterator[Row]:
        """Parts of a row that fit a pass each, in ascending order."""
        runs: list[Span] = []
        room = self.limits.max_tokens
        for run in row.runs:
            start = run.start
            while start < run.end:
                if room == 0 or (not self.limits.packs and len(runs) == self.limits.max_rows):
                    yield replace(row, runs=tuple(runs))
                    runs, room = [], self.limits.max_tokens
                end = min(run.end, start + room)
                runs.append(Span(start, end))
                room -= end - start
                start = end
        yield replace(row, runs=tuple(runs))

    def _run_pass(self, rows: Sequence[Row], batch: Any, forward: Forward) -> list[Tensor]:
        if self.limits.packs:
            owners = [row.req.kv.req_pool_idx for row in rows]
            sequences = [(row, owner, row.runs) for row, owner in zip(rows, owners, strict=True)]
            forward_batch, columns = self._build(sequences, batch)
            self._runner.attn_backend.pack_next(columns, [row.slots for row in rows])
            try:
                output = self._forward(forward_batch, forward)
            finally:
                self._runner.attn_backend.unpack()
        else:
            with _BorrowedTables(self._pool, rows) as tables:
                sequences = [
                    (row, table, (run,))
                    for row, table in zip(rows, tables, strict=True)
                    for run in row.runs
                ]
                forward_batch, _ = self._build(sequences, batch)
                output = self._forward(forward_batch, forward)
        logits = output.logits_output.next_token_logits
        ends = np.cumsum([self._num_sequences(row) for row in rows]) - 1
        return [logits[int(end)] for end in ends]

    def _forward(self, forward_batch: Any, forward: Forward) -> Any:
        """One eager pass: neither packed columns nor virtual rows fit a captured graph."""
        runner = self._runner
        graphs, runner.prefill_cuda_graph_runner = runner.prefill_cuda_graph_runner, None
        started = time.perf_counter()
        try:
            return forward(forward_batch)
        finally:
            self.forward_ms += (time.perf_counter() - started) * 1e3
            runner.prefill_cuda_graph_runner = graphs

    def _build(
        self, sequences: list[tuple[Row, int, tuple[Span, ...]]], batch: Any
    ) -> tuple[Any, Tensor]:
        device = self._runner.device
        columns = [
            np.concatenate([np.arange(run.start, run.end) for run in runs])
            for _, _, runs in sequences
        ]
        lens = [len(own) for own in columns]
        kv_lens = [runs[-1].end for _, _, runs in sequences]
        prefix_lens = [kv_len - new for kv_len, new in zip(kv_lens, lens, strict=True)]
        ids = [row.token_ids[own] for (row, _, _), own in zip(sequences, columns, strict=True)]
        places = [own + row.shift for (row, _, _), own in zip(sequences, columns, strict=True)]
        tables = torch.tensor([table for _, table, _ in sequences], dtype=torch.int64)
        all_columns = torch.from_numpy(np.concatenate(columns)).to(device)
        positions = torch.from_numpy(np.concatenate(places)).to(device)
        slots = [
            row.slots[torch.from_numpy(own).to(device)]
            for (row, _, _), own in zip(sequences, columns, strict=True)
        ]
        part = copy(batch)
        part.reqs = [row.req for row, _, _ in sequences]
        part.input_ids = torch.from_numpy(np.concatenate(ids)).to(device)
        part.prefill_input_ids_cpu = None
        part.req_pool_indices = tables.to(device)
        part.req_pool_indices_cpu = tables
        part.prefix_lens = prefix_lens
        part.extend_lens = lens
        part.extend_num_tokens = sum(lens)
        part.seq_lens_cpu = torch.tensor(kv_lens, dtype=torch.int64)
        part.seq_lens = part.seq_lens_cpu.to(device)
        part.seq_lens_sum = sum(kv_lens)
        part.orig_seq_lens = part.seq_lens.to(torch.int32)
        part.out_cache_loc = torch.cat(slots)
        part.return_logprob = False
        part.top_logprobs_nums = None
        part.token_ids_logprobs = None
        part.extend_logprob_start_lens = lens
        part.extend_input_logprob_token_ids = None
        part.is_prefill_only = True
        part.sampling_info = None
        part.spec_info = None
        part.has_grammar = False
        part.multimodal_inputs = [None] * len(lens)
        starts = np.concatenate([[0], np.cumsum(lens)[:-1]]).astype(np.int32)
        forward_batch = compat.new_forward_batch(
            part, self._runner, positions, torch.from_numpy(starts).to(device)
        )
        return forward_batch, all_columns


class _BorrowedTables:
    """Rows of req_to_token for one pass: the request's own, or borrowed ones for other tables.

    Where no row is free, the request's own is overwritten and restored; a pass then holds one such
    row, and no other row of that request.
    """

    def __init__(self, pool: Any, rows: Sequence[Row]) -> None:
        self._pool = pool
        self._rows = rows
        self._borrowed: list[int] = []
        self._saved: list[tuple[int, Tensor]] = []

    def __enter__(self) -> list[int]:
        try:
            return [self._table_of(row) for row in self._rows]
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exc_info: object) -> None:
        for table, columns in reversed(self._saved):
            self._pool.req_to_token[table, : columns.numel()] = columns
        if self._borrowed:
            self._pool.free_rows(self._borrowed)

    def _table_of(self, row: Row) -> int:
        own: int = row.req.kv.req_pool_idx
        if row.is_own:
            return own
        borrowed = self._pool.alloc_rows(1)
        if borrowed is None:
            table = own
            saved = self._pool.req_to_token[table, : row.slots.numel()].clone()
            self._saved.append((table, saved))
        else:
            self._borrowed += borrowed
            table = borrowed[0]
        self._pool.req_to_token[table, : row.slots.numel()] = row.slots.to(torch.int32)
        return table
