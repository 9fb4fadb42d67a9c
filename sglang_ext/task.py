"""A request's PIC state in the scheduler: what it asked for and how its prompt is cut.

Knows options, chunks and keys. Does not know what is cached or how anything is computed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from sglang_ext.chunk_index.cache import LifeCycle
from sglang_ext.chunk_index.chunking import chunk_spans, segment_chunk
from sglang_ext.chunk_index.identity import ChunkKey, RootKey
from sglang_ext.chunk_index.prefetch import Prefetch
from sglang_ext.chunk_index.spans import Span
from sglang_ext.kv_pool import SegmentKV
from sglang_ext.recompute.layerwise import LayerPlan
from sglang_ext.recompute.planning import Chunk
from sglang_ext.recompute.selection import PRIOR_STRATEGIES
from sglang_ext.report import PicReport
from sglang_ext.request import RequestOptions, StorePolicy


@dataclass(slots=True)
class PicTask:
    """Attached to SGLang's request when it arrives.

    Attributes:
        options: What the request asked for.
        report: What the client will be told.
        token_ids: `[prompt]` int64; empty for a request that PIC does not touch.
        chunks: The prompt's chunks with their index keys; empty likewise.
        pool_chunks: The same chunks with the keys they have in the shared pool; empty without one.
        selection: Tokens that the strategy recomputes; empty for a layerwise one.
        layer_plan: Phases of a layerwise strategy; None for a prior one.
        life: Whose the segments are that this request stores, and how long they live.
        prefetch: What is being loaded for it from lower tiers.
        is_active: PIC acts on this request; False leaves it to SGLang.
        is_given: The request mentions PIC, so that a line is logged for it.
        is_reported: The report has been handed to SGLang.
    """

    options: RequestOptions
    report: PicReport
    token_ids: npt.NDArray[np.int64]
    chunks: tuple[Chunk, ...] = ()
    pool_chunks: tuple[Chunk, ...] = ()
    selection: tuple[Span, ...] = ()
    layer_plan: LayerPlan | None = None
    life: LifeCycle = field(default_factory=LifeCycle)
    prefetch: Prefetch[SegmentKV] | None = None
    is_active: bool = False
    is_given: bool = False
    is_reported: bool = False

    @property
    def paths(self) -> list[list[ChunkKey]]:
        """The segments' keys of every chunk, and behind them those of every chunk in the pool."""
        return [
            [segment.key for segment in chunk.segments]
            for chunk in (*self.chunks, *self.pool_chunks)
        ]

    def is_own(self, chunk: Chunk) -> bool:
        """Whether a chunk is named as the request's own, and not as the pool's."""
        return not self.pool_chunks or chunk in self.chunks

    def choose_chunks(
        self, num_hits: Sequence[int], known: Collection[ChunkKey]
    ) -> tuple[tuple[Chunk, ...], tuple[int, ...]]:
        """For each chunk the name under which more of it is there: its own, or the pool's.

        Args:
            num_hits: For each of `paths` its leading segments that are cached.
            known: Keys of segments that are at hand beside the cache.

        Returns:
            The chunks, and for each its index in `paths`.
        """
        chosen: list[tuple[Chunk, int]] = []
        for index, own in enumerate(self.chunks):
            in_pool = index + len(self.chunks)
            best = own, index
            if self.pool_chunks:
                pooled = self.pool_chunks[index]
                own_count = _count_hits(own, num_hits[index], known)
                if _count_hits(pooled, num_hits[in_pool], known) > own_count:
                    best = pooled, in_pool
            chosen.append(best)
        return tuple(chunk for chunk, _ in chosen), tuple(index for _, index in chosen)

    @property
    def keeps_query(self) -> bool:
        """The query's segments are stored as well."""
        return self.options.store is StorePolicy.ALL

    @property
    def keeps_chunks(self) -> bool:
        """Chunks other than the query are stored."""
        return self.options.store is not StorePolicy.NONE


def cut_prompt(
    token_ids: npt.NDArray[np.int64], bounds: tuple[int, ...], root: RootKey, segment_len: int
) -> tuple[Chunk, ...]:
    """Chunks of a prompt with their segments; bounds behind a truncated prompt are dropped."""
    num_tokens = len(token_ids)
    spans = chunk_spans(num_tokens, [bound for bound in bounds if bound < num_tokens])
    return tuple(Chunk(span, segment_chunk(token_ids, span, root, segment_len)) for span in spans)


def select_tokens(chunks: tuple[Chunk, ...], options: RequestOptions) -> tuple[Span, ...]:
    """What the request's strategy recomputes, for the whole prompt."""
    strategy = PRIOR_STRATEGIES.get(options.strategy)
    if strategy is None:
        return ()  # a layerwise strategy chooses while it computes
    return strategy([chunk.span for chunk in chunks], options.selection)


def _count_hits(chunk: Chunk, num_hits: int, known: Collection[ChunkKey]) -> int:
    behind = takewhile(lambda segment: segment.key in known, chunk.segments[num_hits:])
    return num_hits + sum(1 for _ in behind)
