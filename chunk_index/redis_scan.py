"""Values of any size, read page by page.

Knows cursors. Does not know what is in the values. What comes or goes meanwhile may be left out,
and an element may come twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

from sglang_ext.chunk_index.redis_calls import Calls
from sglang_ext.chunk_index.redis_commands import Command
from sglang_ext.chunk_index.redis_connection import Reply
from sglang_ext.chunk_index.redis_replies import as_bytes, as_list

PAGE = 512
"""Elements asked for at a time."""

Verb: TypeAlias = Literal["HSCAN", "SSCAN", "ZSCAN"]


def scan_pages(calls: Calls, verb: Verb, key: bytes, count: int = PAGE) -> Iterator[list[Reply]]:
    """The pages of one value; raises as `Calls.run`."""
    cursor: bytes | None = b"0"
    while cursor is not None:
        (reply,) = calls.run([Command(key, (verb, key, cursor, "COUNT", count))])
        cursor, page = _page(reply)
        yield page


def scan_hashes(calls: Calls, hashes: Sequence[bytes]) -> Iterator[tuple[int, list[Reply]]]:
    """The pages of several hashes, read side by side, each with its place in `hashes`."""
    cursors: dict[int, bytes] = dict.fromkeys(range(len(hashes)), b"0")
    while cursors:
        commands = [
            Command(hashes[place], ("HSCAN", hashes[place], cursor, "COUNT", PAGE))
            for place, cursor in cursors.items()
        ]
        for place, reply in zip(list(cursors), calls.run(commands), strict=True):
            cursor, page = _page(reply)
            if cursor is None:
                del cursors[place]
            else:
                cursors[place] = cursor
            yield place, page


def _page(reply: Reply) -> tuple[bytes | None, list[Reply]]:
    """The next cursor, None at the end, and the elements."""
    cursor, page = as_list(reply)
    position = as_bytes(cursor)
    return None if position == b"0" else position, as_list(page)
