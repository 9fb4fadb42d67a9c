"""The CPU attention backend on SGLang's own pools, against a loop over queries in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from sglang_ext.cpu.attention import CONTIGUOUS_BLOCK, SCATTERED_BLOCK, PicCpuAttnBackend

MAX_LEN = 3 * CONTIGUOUS_BLOCK
NUM_SLOTS = 4 * MAX_LEN
DIM = 16
SCALING = 0.25
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}  # values are around 1


@dataclass(frozen=True)
class Tokens:
    """One row of a batch.

    Attributes:
        columns: Columns of the new tokens, ascending; the row ends behind the last one.
    """

    columns: tuple[int, ...]

    @property
    def kv_len(self) -> int:
        return self.columns[-1] + 1


def ordinary(prefix_len: int, num_new: int) -> Tokens:
    return Tokens(tuple(range(prefix_len, prefix_len + num_new)))


class Setup:
    """A backend over pools of random KV; a row's slots are scattered."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        heads: int = 6,
        kv_heads: int = 2,
        window: int = -1,
        v_dim: int = DIM,
        num_layers: int = 1,
    ) -> None:
        self.generator = torch.Generator().manual_seed(7)
        self.tables = ReqToTokenPool(6, MAX_LEN, "cpu", enable_memory_saver=False)
        self.kv = MHATokenToKVPool(
            size=NUM_SLOTS,
            page_size=1,
            dtype=dtype,
            head_num=kv_heads,
            head_dim=DIM,
            v_head_dim=v_dim,
            layer_num=num_layers,
            device="cpu",
            enable_memory_saver=False,
        )
        for buffer in (*self.kv.k_buffer, *self.kv.v_buffer):
            buffer.copy_(self.random(*buffer.shape))
        self.dtype, self.heads, self.kv_heads, self.v_dim = dtype, heads, kv_heads, v_dim
        self.layers = [self.layer(layer_id, window) for layer_id in range(num_layers)]
        self.backend = PicCpuAttnBackend(
            SimpleNamespace(device="cpu", req_to_token_pool=self.tables, token_to_kv_pool=self.kv)
        )

    def layer(self, layer_id: int, window: int) -> RadixAttention:
        return RadixAttention(
            self.heads,
            DIM,
            SCALING,
            self.kv_heads,
            layer_id,
            v_head_dim=self.v_dim,
            sliding_window_size=window,
        )

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def plan(
        self, rows: Sequence[Tokens], mode: ForwardMode = ForwardMode.EXTEND, packs: bool = False
    ) -> Any:
        """Give rows their slots and let the backend prepare; returns the batch."""
        slots = 1 + torch.randperm(NUM_SLOTS, generator=self.generator).to(torch.int32)
        indices = [1 + (5 * index + 2) % 6 for index in range(len(rows))]
        for index, row in zip(indices, rows, strict=True):
            own, slots = slots[: row.kv_len], slots[row.kv_len :]
            self.tables.req_to_token[index, : row.kv_len] = own
        written = [
            self.tables.req_to_token[index, list(row.columns)].long()
            for index, row in zip(indices, rows, strict=True)
        ]
        batch = SimpleNamespace(
            rows=rows,
            req_pool_indices=torch.tensor(indices, dtype=torch.int64),
            seq_lens=torch.tensor([row.kv_len for row in rows], dtype=torch.int64),
            extend_seq_lens_cpu=[len(row.columns) for row in rows],
            out_cache_loc=torch.cat(written),
            forward_mode=mode,
        )
        if packs:
            columns = torch.tensor([column for row in rows for column in row.columns])
            tables = [self.tables.req_to_token[index].clone() for index in indices]
            self.backend.pack_next(columns, tables)
        self.backend.init_forward_metadata(batch)
        return batch

    def new_tokens(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Random q `[tokens, heads * DIM]`, k and v of the batch's new tokens."""
        num_tokens = len(batch.out_cache_loc)
        return (
            self.random(num_tokens, self.heads * DIM).to(self.dtype),
            self.random(num_tokens, self.kv_heads, DIM).to(self.dtype),
            self.random(num_tokens, self.kv_heads, self.v_dim).to(self.dtype),
        )

    def run(self, batch: Any, qkv: tuple[Tensor, Tensor, Tensor], layer_id: int = 0) -> Tensor:
        is_decode = batch.forward_mode.is_decode()
        forward = self.backend.forward_decode if is_decode else self.backend.forward_extend
        out: Tensor = forward(*qkv, self.layers[layer_id], batch)
        return out

    def reference(self, batch: Any, q: Tensor, layer_id: int = 0) -> Tensor:
        """Softmax attention of each query over the columns up to its own, in float64."""
        window = self.layers[layer_id].sliding_window_size
        queries = q.double().view(-1, self.heads, DIM)
        group = self.heads // self.kv_heads
        out = []
        token = 0
        for index, row in zip(batch.req_pool_indices.tolist(), batch.rows, strict=True):
            slots = self.tables.req_to_token[index, : row.kv_len].long()
            keys = self.kv.get_key_buffer(layer_id)[slots].double()
            values = self.kv.get_value_buffer(layer_id)[slots].double()
            for column in row.columns:
                first = max(0, column - window) if window > -1 else 0
                seen = slice(first, column + 1)  # the window counts columns before one's own
                k = keys[seen].repeat_interleave(group, dim=1)
                v = values[seen].repeat_interleave(group, dim=1)
                scores = torch.einsum("hd,khd->hk", queries[token], k) * SCALING
                out.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v).flatten())
                token += 1
        return torch.stack(out)

    def check(
        self, rows: Sequence[Tokens], mode: ForwardMode = ForwardMode.EXTEND, packs: bool = False
    ) -> None:
        """Compare one batch with the reference."""
        batch = self.plan(rows, mode, packs)
        qkv = self.new_tokens(batch)
        out = self.run(batch, qkv)
        assert out.dtype == self.dtype
        assert out.shape == (len(batch.out_cache_loc), self.heads * self.v_dim)
        assert torch.equal(self.kv.get_key_buffer(0)[batch.out_cache_loc], qkv[1])
        assert torch.equal(self.kv.get_value_buffer(0)[batch.out_cache_loc], qkv[2])
        bound = TOLERANCE[self.dtype]
        torch.testing.assert_close(
            out.double(), self.reference(batch, qkv[0]), rtol=bound, atol=bound
        )


ROWS = {
    "no_prefix": [ordinary(0, 37)],
    "prefix": [ordinary(50, 20)],
    "one_token_alone": [ordinary(0, 1)],
    "one_token_over_a_prefix": [ordinary(300, 1)],
    "several_blocks": [ordinary(31, 2 * CONTIGUOUS_BLOCK + 5)],
    "whole_blocks": [ordinary(0, 2 * CONTIGUOUS_BLOCK)],
    "several_rows": [ordinary(40, 9), ordinary(0, 30), ordinary(77, 1), ordinary(3, 300)],
}
PACKED = {
    "scattered": [Tokens((0, 1, 7, 30, 31, 32, 59))],
    "last_only": [Tokens((59,))],
    "first_and_last": [Tokens((0, 59))],
    "several_blocks": [Tokens(tuple(range(2, MAX_LEN, 2)))],
    "whole_blocks": [Tokens(tuple(range(3, 3 + 4 * SCATTERED_BLOCK, 2)))],
    "unbroken": [Tokens(tuple(range(20, 50)))],
    "several_rows": [Tokens((4, 5, 9)), Tokens((0,)), Tokens((2, 40, 41, 90))],
}
HEADS = {"gqa": (6, 2), "mha": (4, 4), "mqa": (5, 1)}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_new_tokens_in_order_see_the_prefix_and_each_other(
    rows: list[Tokens], heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    Setup(dtype, heads, kv_heads).check(rows)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("rows", PACKED.values(), ids=PACKED)
def test_packed_tokens_see_the_columns_up_to_their_own(
    rows: list[Tokens], heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    Setup(dtype, heads, kv_heads).check(rows, packs=True)


@pytest.mark.parametrize("window", [0, 1, 8, 255, 10_000])
@pytest.mark.parametrize("packs", [False, True], ids=["ordinary", "packed"])
def test_a_sliding_window_hides_older_columns(window: int, packs: bool) -> None:
    rows = PACKED if packs else ROWS
    for row in rows.values():
        Setup(window=window).check(row, packs=packs)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("window", [-1, 8])
def test_decode_sees_each_rows_own_context(
    window: int, heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    # Around the window's edge, too: with 8 columns before its own, a query sees 9.
    rows = [ordinary(99, 1), ordinary(0, 1), *(ordinary(prefix, 1) for prefix in (7, 8, 9, 10))]
    Setup(dtype, heads, kv_heads, window).check(rows, ForwardMode.DECODE)


def test_keys_and_values_may_differ_in_size() -> None:
    Setup(v_dim=24).check(ROWS["several_rows"])
    Setup(v_dim=24).check([ordinary(9, 1)], ForwardMode.DECODE)


@given(
    columns=st.lists(st.sets(st.integers(0, 80), min_size=1, max_size=20), min_size=1, max_size=3),
    window=st.sampled_from([-1, 0, 5]),
)
@settings(max_examples=25)
def test_any_packed_columns_agree_with_the_reference(columns: list[set[int]], window: int) -> None:
    Setup(window=window).check([Tokens(tuple(sorted(own))) for own in columns], packs=True)


def test_layers_with_different_windows_share_a_batch() -> None:
    setup = Setup(num_layers=3)
    setup.layers = [setup.layer(0, -1), setup.layer(1, 3), setup.layer(2, -1)]
    batch = setup.plan(ROWS["several_rows"])
    for layer_id in range(3):
        qkv = setup.new_tokens(batch)
        out = setup.run(batch, qkv, layer_id)
        torch.testing.assert_close(
            out.double(), setup.reference(batch, qkv[0], layer_id), rtol=2e-6, atol=2e-6
        )


def test_packing_holds_for_one_batch() -> None:
    setup = Setup()
    setup.check([Tokens((1, 9))], packs=True)
    setup.check([ordinary(8, 2)])


def test_packed_rows_bring_their_own_slots() -> None:
    setup = Setup()
    batch = setup.plan([Tokens((1, 9))], packs=True)
    expected = [row.slots.clone() for row in setup.backend.metadata.rows]
    setup.backend.pack_next(torch.tensor([1, 9]), expected)
    setup.tables.req_to_token.zero_()
    setup.backend.init_forward_metadata(batch)
    assert torch.equal(setup.backend.metadata.rows[0].slots, expected[0])


def test_packing_can_be_taken_back() -> None:
    setup = Setup()
    setup.backend.pack_next(torch.tensor([0, 4]), [torch.arange(5)])
    setup.backend.unpack()
    setup.check([ordinary(3, 2)])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_packing_every_column_is_bit_equal_to_an_ordinary_row(dtype: torch.dtype) -> None:
    outs = []
    for packs in (False, True):
        setup = Setup(dtype)
        batch = setup.plan([ordinary(0, 300)], packs=packs)
        outs.append(setup.run(batch, setup.new_tokens(batch)))
    assert torch.equal(*outs)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_rows_result_does_not_depend_on_who_shares_its_batch(dtype: torch.dtype) -> None:
    setup = Setup(dtype)
    rows = [ordinary(40, 9), ordinary(0, 30), ordinary(77, 1)]
    batch = setup.plan(rows)
    q, k, v = setup.new_tokens(batch)
    together = setup.run(batch, (q, k, v))
    start = 0
    for index, row in enumerate(rows):
        end = start + len(row.columns)
        part = SimpleNamespace(
            req_pool_indices=batch.req_pool_indices[index : index + 1],
            seq_lens=batch.seq_lens[index : index + 1],
            extend_seq_lens_cpu=[end - start],
            out_cache_loc=batch.out_cache_loc[start:end],
            forward_mode=ForwardMode.EXTEND,
        )
        setup.backend.init_forward_metadata(part)
        alone = setup.run(part, (q[start:end], k[start:end], v[start:end]))
        assert torch.equal(alone, together[start:end])
        start = end


def test_nothing_is_written_when_the_cache_is_not_to_be_saved() -> None:
    setup = Setup()
    batch = setup.plan([ordinary(5, 3)])
    q, k, v = setup.new_tokens(batch)
    before = setup.kv.get_key_buffer(0).clone()
    out = setup.backend.forward_extend(q, k, v, setup.layers[0], batch, save_kv_cache=False)
    assert torch.equal(setup.kv.get_key_buffer(0), before)
    torch.testing.assert_close(out.double(), setup.reference(batch, q), rtol=2e-6, atol=2e-6)


def test_only_the_new_tokens_slots_are_written() -> None:
    setup = Setup()
    batch = setup.plan([ordinary(5, 3)])
    before = setup.kv.get_key_buffer(0).clone()
    setup.run(batch, setup.new_tokens(batch))
    changed = (setup.kv.get_key_buffer(0) != before).flatten(1).any(1).nonzero().flatten()
    assert sorted(changed.tolist()) == sorted(batch.out_cache_loc.tolist())


def test_an_idle_batch_has_no_rows() -> None:
    setup = Setup()
    batch = SimpleNamespace(
        req_pool_indices=torch.empty(0, dtype=torch.int64),
        seq_lens=torch.empty(0, dtype=torch.int64),
        extend_seq_lens_cpu=None,
        out_cache_loc=torch.empty(0, dtype=torch.int64),
        forward_mode=ForwardMode.IDLE,
    )
    setup.backend.init_forward_metadata(batch)
    out = setup.run(batch, setup.new_tokens(batch))
    assert out.shape == (0, setup.heads * DIM)
