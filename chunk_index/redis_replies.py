"""Replies of Redis taken for what they should be; anything else is `IndexUnavailable`.

Knows types. Does not know commands.
"""

from __future__ import annotations

from collections.abc import Iterator

from sglang_ext.chunk_index.redis_connection import Reply
from sglang_ext.errors import IndexUnavailable


def as_int(reply: Reply) -> int:
    """A number, also one that is written in digits; nothing is 0."""
    if reply is None:
        return 0
    if isinstance(reply, int):
        return reply
    try:
        return int(as_bytes(reply))
    except ValueError as exc:
        raise malformed(reply) from exc


def as_float(reply: Reply) -> float:
    """A number written in digits."""
    try:
        return float(as_bytes(reply))
    except ValueError as exc:
        raise malformed(reply) from exc


def as_bytes(reply: Reply) -> bytes:
    """A string."""
    if not isinstance(reply, bytes):
        raise malformed(reply)
    return reply


def as_optional_bytes(reply: Reply) -> bytes | None:
    """A string, or nothing."""
    return None if reply is None else as_bytes(reply)


def as_text(reply: Reply) -> str:
    """A string in UTF-8."""
    try:
        return as_bytes(reply).decode()
    except UnicodeDecodeError as exc:
        raise malformed(reply) from exc


def as_list(reply: Reply) -> list[Reply]:
    """An array."""
    if not isinstance(reply, list):
        raise malformed(reply)
    return reply


def as_pairs(reply: Reply) -> Iterator[tuple[Reply, Reply]]:
    """An array of alternating names and values."""
    flat = as_list(reply)
    if len(flat) % 2:
        raise malformed(reply)
    return zip(flat[::2], flat[1::2], strict=True)


def malformed(reply: Reply) -> IndexUnavailable:
    """What to raise for a reply that is none of ours; does not tell its contents."""
    return IndexUnavailable(f"Redis: protocol: unexpected reply of type {type(reply).__name__}")
