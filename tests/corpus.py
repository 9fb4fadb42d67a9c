"""Real prose as token ids, cut to any length: the documents of the integration tests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from pydoc_data.topics import topics
from typing import Any

Ids = tuple[int, ...]


class Corpus:
    """Chunks of prose, never overlapping, so that no two are equal."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids = _prose(tokenizer)
        self._next = 0

    def text(self, text: str) -> Ids:
        """Ids of a text by itself."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def chunk(self, num_tokens: int) -> Ids:
        """The next `num_tokens` of prose."""
        start = self._next
        self._next += num_tokens
        assert self._next <= len(self._ids), "the corpus is used up"
        return self._ids[start : self._next]

    def chunks(self, *lengths: int) -> list[Ids]:
        """Several in a row."""
        return [self.chunk(length) for length in lengths]


@lru_cache(maxsize=1)
def _prose(tokenizer: Any) -> Ids:
    return tuple(tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics))))


def join(*chunks: Sequence[int]) -> tuple[list[int], dict[str, list[int]]]:
    """One prompt of chunks: its ids, and the `custom_params` that say where they start."""
    ids = [token for chunk in chunks for token in chunk]
    starts = [0, *accumulate(len(chunk) for chunk in chunks)][:-1]
    return ids, {"pic_bounds": starts}
