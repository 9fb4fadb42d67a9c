"""Attention for CPUs whose cost is (new tokens) × (context), in torch operators.

SGLang's `torch_native` pads the queries of an extend to the whole context, so that one new token
over a long prefix costs as much as prefilling it all. Here each query is met once by the columns
it may see. Queries are taken in blocks, masked; a block's keys end at its last query's own column.
A row without a prefix is causal as it stands and needs no mask.

    ordinary row      columns   [0 ........... prefix)[prefix ....... kv_len)
                      queries                         q q q q | q q q q | q q
    packed row        columns   [0 .................................. kv_len)
    (`pack_next`)     queries      q q       q | q          q q | q      q q

Knows req_to_token rows, KV pools and masks; does not know why a row is packed. Cross-attention and
encoder-only layers are left to the parent class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

CONTIGUOUS_BLOCK = 256
SCATTERED_BLOCK = 64
"""Queries of a block. Scattered ones end at very different columns: small blocks see fewer keys."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of an extend batch.

    Attributes:
        start: Index of its first query in the batch's token order.
        end: Index after its last query.
        slots: `[kv_len]` int64, the KV pool slots of its columns.
        columns: `[num_queries]` int64, each query's own column; None for the last ones in order.
    """

    start: int
    end: int
    slots: Tensor
    columns: Tensor | None


@dataclass(frozen=True, slots=True)
class Metadata:
    """The plan of one batch, for all layers.

    Attributes:
        rows: Its sequences.
        masks: Masks made so far, by row, first query, window and dtype.
    """

    rows: tuple[Row, ...] = ()
    masks: dict[tuple[int, int, int | None, torch.dtype], Tensor] = field(default_factory=dict)


class PicCpuAttnBackend(TorchNativeAttnBackend):
    """Attention backend `pic_cpu`; see the module's docstring."""

    supports_packed_rows = True

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._next: tuple[Tensor, Sequence[Tensor]] | None = None
        self.metadata = Metadata()
        """Plan of the current batch; `init_forward_metadata` makes it, and it may be put back."""

    def pack_next(self, columns: Tensor, tables: Sequence[Tensor]) -> None:
        """Say what the rows of the next extend are. Holds for one `init_forward_metadata`.

        Args:
            columns: `[num_tokens]` int64, where the queries stand, all rows concatenated,
                ascending within a row. Each query sees the columns up to and including its own.
            tables: For each row the KV slots of its columns, `[table_len]` int64; they are used
                instead of the row's entry in req_to_token.
        """
        self._next = columns, tables

    def unpack(self) -> None:
        """Take back what `pack_next` said, should no batch have used it."""
        self._next = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Gather each row's slots once for all layers; a new plan takes the old one's place."""
        super().init_forward_metadata(forward_batch)
        columns, tables = self._next or (None, None)
        self._next = None
        kv_lens = forward_batch.seq_lens.tolist()
        if forward_batch.forward_mode.is_decode_or_idle():
            new_lens = [1] * len(kv_lens)
        else:
            new_lens = forward_batch.extend_seq_lens_cpu
        if tables is None:
            table = self.req_to_token_pool.req_to_token
            tables = [table[index] for index in forward_batch.req_pool_indices.tolist()]
        rows: list[Row] = []
        start = 0
        for slots, kv_len, new_len in zip(tables, kv_lens, new_lens, strict=True):
            end = start + new_len
            own = None if columns is None else columns[start:end]
            if own is not None and int(own[0]) == kv_len - new_len:
                own = None  # ascending to the row's end: nothing is left out
            rows.append(Row(start, end, slots[:kv_len].long(), own))
            start = end
        self.metadata = Metadata(tuple(rows))

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> Tensor:
        """Write the new K/V, then attend row by row; see `AttentionBackend.forward_extend`."""
        if layer.is_cross_attention or layer.attn_type == AttentionType.ENCODER_ONLY:
            out: Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
            return out
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> Tensor:
        """One query a row over its whole context; see `AttentionBackend.forward_decode`."""
        if layer.is_cross_attention:
            out: Tensor = super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
            return out
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    def _forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
    ) -> Tensor:
        if save_kv_cache and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(
                layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v
            )
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = queries.new_empty((queries.shape[0], layer.tp_q_head_num, layer.v_head_dim))
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        window = layer.sliding_window_size
        window = window if window is not None and window > -1 else None
        for index, row in enumerate(self.metadata.rows):
            self._attend(
                index,
                row,
                queries[row.start : row.end].transpose(0, 1),
                keys[row.slots].to(q.dtype).transpose(0, 1),
                values[row.slots].to(q.dtype).transpose(0, 1),
                layer.scaling,
                window,
                out[row.start : row.end],
            )
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _attend(
        self,
        index: int,
        row: Row,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scaling: float,
        window: int | None,
        out: Tensor,
    ) -> None:
        """Attention of one row; `q` `[heads, new, dim]`, `k`, `v` `[kv_heads, kv_len, dim]`."""
        new, kv_len = q.shape[1], k.shape[1]
        sees_all = row.columns is None and (window is None or kv_len <= window)
        if sees_all and new == 1:
            out.copy_(_attend_one(q, k, v, scaling))
            return
        if sees_all and new == kv_len:
            out.copy_(_attend_causal(q, k, v, scaling))
            return
        columns, block_len = row.columns, SCATTERED_BLOCK
        if columns is None:
            columns = torch.arange(kv_len - new, kv_len, device=q.device)
            block_len = CONTIGUOUS_BLOCK
        for start in range(0, new, block_len):
            end = min(start + block_len, new)
            key = (index, start, window, q.dtype)
            mask = self.metadata.masks.get(key)
            if mask is None:
                mask = _column_mask(columns[start:end], window, q.dtype)
                self.metadata.masks[key] = mask
            visible = mask.shape[1]
            block = scaled_dot_product_attention(
                q[None, :, start:end],
                k[None, :, :visible],
                v[None, :, :visible],
                attn_mask=mask,
                scale=scaling,
                enable_gqa=q.shape[0] != k.shape[0],
            )
            out[start:end].copy_(block[0].transpose(0, 1))


def _column_mask(own: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """`[len(own), last column + 1]`, 0 where a query may look and -inf elsewhere."""
    columns = torch.arange(int(own[-1]) + 1, device=own.device)
    hidden = columns > own.unsqueeze(1)
    if window is not None:
        hidden |= columns < (own - window).unsqueeze(1)
    return torch.zeros(hidden.shape, dtype=dtype, device=own.device).masked_fill_(
        hidden, float("-inf")
    )


def _attend_one(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """One query over every key; the query heads of a KV head share one pass over its keys.

    Args:
        q: `[heads, 1, dim]`.
        k: `[kv_heads, kv_len, dim]`.
        v: `[kv_heads, kv_len, v_dim]`.
        scaling: Factor on the scores.

    Returns:
        `[1, heads, v_dim]`.
    """
    heads, kv_heads = q.shape[0], k.shape[0]
    folded = q.reshape(1, kv_heads, heads // kv_heads, q.shape[-1])
    out = scaled_dot_product_attention(folded, k[None], v[None], scale=scaling)
    return out.reshape(1, heads, v.shape[-1])


def _attend_causal(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """Query i over keys 0..i; `[new, heads, v_dim]`, arguments as in `_attend_one`."""
    out = scaled_dot_product_attention(
        q[None],
        k[None],
        v[None],
        is_causal=True,
        scale=scaling,
        enable_gqa=q.shape[0] != k.shape[0],
    )
    return out[0].transpose(0, 1)
