"""The Lua scripts, read from `lua/`, and how they are called.

Knows which file opens which. Does not know what they do: each file says so at its top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib.resources import files

from sglang_ext.chunk_index import keys, policy
from sglang_ext.chunk_index.redis_commands import Command, Script, call_script
from sglang_ext.chunk_index.redis_connection import Argument

START_AGE_US = 300_000_000
"""Mean age of victims that a shard assumes until it has seen some; five minutes. A guess that only
says what a hit is worth until then: the mean forgets it within about 64 victims."""

MAX_LIFTS = 32
"""Ancestors that move to make way for one that rises; bounds a script on a long chunk."""

_OPENED_BY = {"reserve": "account", "settle": "account", "heartbeat": None}


@dataclass(frozen=True, slots=True)
class Scripts:
    """One for each atomic operation, named as its file."""

    publish: Script
    touch: Script
    annotate: Script
    unpin: Script
    remove: Script
    evict: Script
    expire: Script
    invalidate: Script
    prune: Script
    reserve: Script
    settle: Script
    heartbeat: Script


@dataclass(frozen=True, slots=True)
class Sender:
    """Calls scripts of shards in the name of one index object.

    Attributes:
        id: 8 bytes that announcements of its changes carry.
    """

    id: bytes

    def on_shard(
        self, script: Script, shard: int, words: Sequence[Argument], *names: bytes
    ) -> Command:
        """A call of a script that `lua/shard.lua` opens; `names` are keys it declares besides."""
        return call_script(script, (keys.totals_key(shard), *names), (self.id, *words))


def load_scripts() -> Scripts:
    """Read all files."""
    return Scripts(**{field.name: _load(field.name) for field in fields(Scripts)})


def _load(name: str) -> Script:
    opening = _OPENED_BY.get(name, "shard")
    parts = [_constants()] if opening == "shard" else []
    parts += [_read(part) for part in (opening, name) if part is not None]
    return Script.of(name, "\n".join(parts))


def _constants() -> str:
    constants = {
        "MAX_HITS": policy.MAX_HITS,
        "MAX_WORTH_LOSS": policy.MAX_WORTH_LOSS,
        "MAX_WORTH_GAIN": policy.MAX_WORTH_GAIN,
        "SMOOTHING": policy.SMOOTHING,
        "START_AGE": START_AGE_US,
        "MAX_LIFTS": MAX_LIFTS,
    }
    return "\n".join(f"local {name} = {value!r}" for name, value in constants.items())


def _read(name: str) -> str:
    return (files(__package__) / "lua" / f"{name}.lua").read_text(encoding="utf-8")
