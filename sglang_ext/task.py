"""A request's PIC state in the scheduler: what it asked for and how its prompt is cut.

Knows options, chunks and keys. Does not know what is cached or how anything is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_ext.chunk_index.chunking import chunk_spans, segment_chunk
from sglang_ext.chunk_index.identity import RootKey
from sglang_ext.chunk_index.spans import Span
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
        selection: Tokens that the strategy recomputes.
        owner: Digest of the namespace, for the records this request stores.
        is_active: PIC acts on this request; False leaves it to SGLang.
        is_given: The request mentions PIC, so that a line is logged for it.
        is_reported: The report has been handed to SGLang.
    """

    options: RequestOptions
    report: PicReport
    token_ids: npt.NDArray[np.int64]
    chunks: tuple[Chunk, ...] = ()
    selection: tuple[Span, ...] = ()
    owner: str = ""
    is_active: bool = False
    is_given: bool = False
    is_reported: bool = False

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
    strategy = PRIOR_STRATEGIES[options.strategy]
    return strategy([chunk.span for chunk in chunks], options.selection)
