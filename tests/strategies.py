"""Hypothesis strategies shared by the tests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from sglang_ext.chunk_index.identity import KEY_BYTES, ChunkKey
from sglang_ext.chunk_index.index import NodeRecord
from sglang_ext.chunk_index.spans import Span


@st.composite
def chunk_spans(
    draw: st.DrawFn, min_chunks: int = 1, max_chunks: int = 12, max_len: int = 40
) -> tuple[Span, ...]:
    """A random partition of a prompt into chunks of 1..`max_len` tokens, in order."""
    lens = draw(st.lists(st.integers(1, max_len), min_size=min_chunks, max_size=max_chunks))
    ends = list(accumulate(lens))
    return tuple(Span(end - length, end) for end, length in zip(ends, lens, strict=True))


def spans(max_end: int = 60) -> st.SearchStrategy[Span]:
    """Any span within `[0, max_end)`, empty ones included."""
    ends = st.tuples(st.integers(0, max_end), st.integers(0, max_end))
    return ends.map(lambda pair: Span(min(pair), max(pair)))


def token_ids(max_len: int = 600) -> st.SearchStrategy[npt.NDArray[np.int32]]:
    """`[1..max_len]` int32 token ids over the whole range."""
    limits = np.iinfo(np.int32)
    return npst.arrays(
        np.int32,
        st.integers(1, max_len),
        elements=st.integers(limits.min, limits.max),
        fill=st.integers(0, 3),
    )


@dataclass
class BytesPayload:
    """A payload of plain bytes, which a test may damage."""

    data: bytearray

    @property
    def nbytes(self) -> int:
        """Its size."""
        return len(self.data)

    def buffer(self) -> memoryview:
        """Its bytes, in place."""
        return memoryview(self.data)


def node_record(name: str, parent: str | None = None, **fields: Any) -> NodeRecord:
    """A record with a readable key; `fields` replace the defaults."""
    record = NodeRecord(
        key=named_key(name),
        parent=None if parent is None else named_key(parent),
        num_tokens=10,
        payload_bytes=100,
        checksum=0,
        created_ms=0,
    )
    return replace(record, **fields)


def named_key(name: str) -> ChunkKey:
    """A key that shows its name in failure messages; names of one chunk share the first letter."""
    return ChunkKey(name.encode().ljust(KEY_BYTES, b"_"))


def key_name(key: ChunkKey) -> str:
    """The name a key was made of by `named_key`."""
    return key.decode().rstrip("_")


def record_names(records: Iterable[NodeRecord]) -> list[str]:
    """The names of records' keys, in order."""
    return [key_name(record.key) for record in records]
