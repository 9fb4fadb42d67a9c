"""Prompts into chunks, chunks into segments: the units that the index names and stores.

Knows token offsets and keys. Does not know delimiters, tokenizers or what is cached.

    prompt    |0 . . . . . . b0 . . . . . . . . . . . b1 . . . . . num_tokens|
    chunks    |<- chunk 1 ->|<------- chunk 2 ------>|<---- query ---->|
    segments                |<- segment_len ->|<rest>|                           local_start 0, 256
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_ext.chunk_index.identity import ChunkKey, RootKey, child_key
from sglang_ext.chunk_index.spans import Span


@dataclass(frozen=True, slots=True)
class ChunkSegment:
    """One node's worth of a chunk, where it stands in this prompt.

    Attributes:
        key: Name of the segment's tokens and all tokens before them in the chunk.
        parent: Key of the segment before it in the chunk; None directly below the root.
        span: Token positions in the prompt.
        local_start: Position of its first token within the chunk, the one its KV is stored at.
    """

    key: ChunkKey
    parent: ChunkKey | None
    span: Span
    local_start: int

    @property
    def local_end(self) -> int:
        """Chunk-local position behind its last token."""
        return self.local_start + self.span.num_tokens


def chunk_spans(num_tokens: int, bounds: Sequence[int]) -> tuple[Span, ...]:
    """Cut a prompt into chunks: a partition of `[0, num_tokens)` without empty spans.

    Tokens before the first bound are chunk 1.

    Args:
        num_tokens: Length of the prompt in tokens; 0 has no chunks.
        bounds: Offsets of chunk starts, validated by the caller: sorted, unique, 0 <= b < length.
    """
    edges = sorted({0, *bounds, num_tokens})
    return tuple(Span(start, end) for start, end in pairwise(edges))


def segment_chunk(
    token_ids: npt.NDArray[np.integer[Any]], span: Span, root: RootKey, segment_len: int
) -> tuple[ChunkSegment, ...]:
    """Cut one chunk into segments that start at its first token; only the last may be short.

    Args:
        token_ids: `[prompt_len]`, any integer dtype, values within int32; the whole prompt.
        span: The chunk within the prompt; an empty one has no segments.
        root: Key of model and tenant, from `root_key`.
        segment_len: Most tokens a segment has, at least 1.

    Raises:
        ShapeError: `token_ids` is not one-dimensional, not integer, or beyond int32.
    """
    segments: list[ChunkSegment] = []
    parent: ChunkKey | None = None
    for start in range(span.start, span.end, segment_len):
        end = min(start + segment_len, span.end)
        key = child_key(root, parent, token_ids[start:end])
        segments.append(ChunkSegment(key, parent, Span(start, end), start - span.start))
        parent = key
    return tuple(segments)
