"""Changes that an operator made, and the log by which they reach every server.

A change of the shared index reaches that index at once. What a server keeps for itself, its arena
and its local disk, must follow, also if the server could not be reached at that moment. So changes
are posted to a log, a Redis stream, which every server reads from where it stood.

    picctl ── 1. changes ──► shared index
       └───── 2. posts ────► log: Invalidate, Clear, Remove ... ◄── reads ── each server: applies

Knows what a change is, how it is written, and where a reader stands. Does not know connections, or
when a server reads. Commands are data: each is one of a fixed list, and an unknown one is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from sglang_ext.chunk_index import keys
from sglang_ext.chunk_index.identity import KEY_BYTES, ChunkKey
from sglang_ext.chunk_index.redis_replies import as_int, as_list, as_text
from sglang_ext.chunk_index.tier import Tier
from sglang_ext.errors import IndexUnavailable

if TYPE_CHECKING:
    from sglang_ext.chunk_index.redis_connection import Reply
    from sglang_ext.chunk_index.redis_link import RedisLink

LOG = keys.ALL_ACCOUNT + b":log"
"""The stream; each entry has one field, `FIELD`, which holds one command."""

FIELD = b"c"

MAX_ENTRIES = 10_000
"""Entries kept, about: Redis trims in blocks."""

MAX_KEYS = 256
"""Keys that one `Pin` or `Unpin` names at most, so that no entry is unbounded."""

_MAX_WIRE_BYTES = 128 * 1024
_NOTHING = b""


@dataclass(frozen=True, slots=True)
class Invalidate:
    """Remove what an owner stored for a document; see `ChunkIndex.invalidate`."""

    owner: str
    doc_id: str

    def apply(self, tier: Tier[Any]) -> int:
        """Carry it out in one tier; returns how many nodes left."""
        return tier.invalidate(self.doc_id, self.owner)


@dataclass(frozen=True, slots=True)
class Clear:
    """Remove everything, or one owner's, or one model's, or both together."""

    owner: str | None = None
    model: str | None = None

    def apply(self, tier: Tier[Any]) -> int:
        """Carry it out in one tier; returns how many nodes left."""
        return tier.clear(self.owner, self.model)


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove a node and all below it."""

    key: ChunkKey

    def apply(self, tier: Tier[Any]) -> int:
        """Carry it out in one tier; returns how many nodes left."""
        with suppress(IndexUnavailable):
            return tier.drop(tier.index.remove(self.key))
        return 0


@dataclass(frozen=True, slots=True)
class Pin:
    """Never evict these nodes, at most `MAX_KEYS`."""

    keys: tuple[ChunkKey, ...]

    def apply(self, tier: Tier[Any]) -> int:
        """Carry it out in one tier; returns how many of the nodes are there."""
        return _count_present(lambda key: tier.index.annotate(key, pinned=True), self.keys)


@dataclass(frozen=True, slots=True)
class Unpin:
    """Let these nodes be evicted again, at most `MAX_KEYS`."""

    keys: tuple[ChunkKey, ...]

    def apply(self, tier: Tier[Any]) -> int:
        """Carry it out in one tier; returns how many of the nodes are there."""
        return _count_present(tier.index.unpin, self.keys)


Command: TypeAlias = Invalidate | Clear | Remove | Pin | Unpin


@dataclass(frozen=True, slots=True)
class CommandBatch:
    """What a reader of the log gets.

    Attributes:
        commands: In the order they were posted.
        last_id: Where the reader stands now; what it reads after next.
        has_gap: Commands before these may have been missed: the log was trimmed beyond where the
            reader stood, or lost. Only a reader that forgets all it keeps is right then.
        num_unknown: Entries that are no command this version knows, skipped.
        ids: For each command what `post` returned to who posted it.
        is_log_lost: There is a gap because the whole log is gone, with the index it belongs to; at
            most what was posted since the last read is missing.
    """

    commands: tuple[Command, ...]
    last_id: str
    has_gap: bool
    num_unknown: int = 0
    ids: tuple[str, ...] = ()
    is_log_lost: bool = False


def apply(command: Command, tiers: Sequence[Tier[Any]]) -> int:
    """Carry a command out in tiers of this process; returns how many nodes were affected.

    Modifies the tiers; one that is unavailable counts it, as for every other change.
    """
    return sum(command.apply(tier) for tier in tiers)


def encode_command(command: Command) -> bytes:
    """A command as msgpack: its name, then its fields, text as bytes, for it may be no UTF-8."""
    values = [getattr(command, field.name) for field in fields(command)]
    wire = _Wire(_NAMES[type(command)], [_to_wire(value) for value in values])
    encoded = msgspec.msgpack.encode(wire)
    assert len(encoded) <= _MAX_WIRE_BYTES, "names and batches of keys are bounded"
    return encoded


def decode_command(data: bytes) -> Command | None:
    """The command in an entry; None if it is not one that this version knows."""
    if len(data) > _MAX_WIRE_BYTES:
        return None
    try:
        wire = msgspec.msgpack.decode(data, type=_Wire)
        return _READERS[wire.name](*wire.values)
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError, RecursionError):
        return None


class CommandLog:
    """Posts commands, and reads them; every method may raise `IndexUnavailable`."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    def post(self, command: Command) -> str:
        """Append a command for all servers, and forget the oldest ones; returns its id."""
        return self._append(encode_command(command))

    def read(self, after: str | None, limit: int) -> CommandBatch:
        """The next commands, at most `limit`.

        Modifies the log only if it is empty: then it gets an entry that says nothing, so that a
        reader has a place to stand on.

        Args:
            after: The `last_id` before; None means from now on, and returns no commands.
            limit: Entries to read; call again while as many come.
        """
        if after is None:
            return CommandBatch((), self._newest(), has_gap=False)
        reply = self._link.call("XRANGE", LOG, after, "+", "COUNT", limit + 1)
        entries = [_entry(each) for each in as_list(reply)]
        has_gap = not entries or entries[0].id != after
        is_log_lost = has_gap and as_int(self._link.call("XLEN", LOG)) < MAX_ENTRIES
        entries = entries[:limit] if has_gap else entries[1:]
        if not entries:
            last_id = self._newest() if has_gap else after
            return CommandBatch((), last_id, has_gap, is_log_lost=is_log_lost)
        said = [entry for entry in entries if entry.content != _NOTHING]
        decoded = [(entry.id, decode_command(entry.content)) for entry in said]
        known = [(at, command) for at, command in decoded if command is not None]
        return CommandBatch(
            commands=tuple(command for _, command in known),
            last_id=entries[-1].id,
            has_gap=has_gap,
            num_unknown=len(said) - len(known),
            ids=tuple(at for at, _ in known),
            is_log_lost=is_log_lost,
        )

    def _newest(self) -> str:
        """The id of the last entry; makes one that says nothing if there is none."""
        entries = as_list(self._link.call("XREVRANGE", LOG, "+", "-", "COUNT", 1))
        return _entry(entries[0]).id if entries else self._append(_NOTHING)

    def _append(self, content: bytes) -> str:
        words = (LOG, "MAXLEN", "~", MAX_ENTRIES, "*", FIELD, content)
        return as_text(self._link.call("XADD", *words))


class _Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A command as it is written."""

    name: str
    values: list[bytes | list[bytes] | None]


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of the stream; one of another form has a content that is no command."""

    id: str
    content: bytes


def _entry(reply: Reply) -> _Entry:
    name, pairs = as_list(reply)
    match pairs:
        case [bytes(field), bytes(content)] if field == FIELD:
            return _Entry(as_text(name), content)
    return _Entry(as_text(name), b"?")


def _count_present(change: Callable[[ChunkKey], object], names: Sequence[ChunkKey]) -> int:
    num_present = 0
    with suppress(IndexUnavailable):
        for name in names:
            num_present += change(name) is not None
    return num_present


def _to_wire(value: Any) -> bytes | list[bytes] | None:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    return list(value) if isinstance(value, tuple) else value


def _text(value: Any) -> str:
    if not isinstance(value, bytes):
        raise ValueError("expected text")
    return value.decode("utf-8", "surrogatepass")


def _optional_text(value: Any) -> str | None:
    return None if value is None else _text(value)


def _key(value: Any) -> ChunkKey:
    if not isinstance(value, bytes) or len(value) != KEY_BYTES:
        raise ValueError("expected a key")
    return ChunkKey(value)


def _keys(value: Any) -> tuple[ChunkKey, ...]:
    if not isinstance(value, list) or len(value) > MAX_KEYS:
        raise ValueError("expected keys")
    return tuple(map(_key, value))


def _read_invalidate(owner: Any, doc_id: Any) -> Command:
    return Invalidate(_text(owner), _text(doc_id))


def _read_clear(owner: Any, model: Any) -> Command:
    return Clear(_optional_text(owner), _optional_text(model))


def _read_remove(key: Any) -> Command:
    return Remove(_key(key))


def _read_pin(names: Any) -> Command:
    return Pin(_keys(names))


def _read_unpin(names: Any) -> Command:
    return Unpin(_keys(names))


_NAMES: Mapping[type[Command], str] = {
    Invalidate: "invalidate",
    Clear: "clear",
    Remove: "remove",
    Pin: "pin",
    Unpin: "unpin",
}

_READERS: Mapping[str, Callable[..., Command]] = {
    "invalidate": _read_invalidate,
    "clear": _read_clear,
    "remove": _read_remove,
    "pin": _read_pin,
    "unpin": _read_unpin,
}
