"""What is sent to Redis: commands, scripts, and the slot of a key in a cluster.

Knows how a command is written. Does not know servers or replies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sglang_ext.chunk_index.redis_connection import Argument, key_slot

NUM_SLOTS = 16384


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script; sent in full only to a server that does not have it.

    Attributes:
        name: Of its file.
        text: All of it.
        sha: What a server that has it calls it.
    """

    name: str
    text: bytes = field(repr=False)
    sha: str

    @staticmethod
    def of(name: str, text: str) -> Script:
        """The script of that text."""
        encoded = text.encode()
        sha = hashlib.sha1(encoded, usedforsecurity=False).hexdigest()
        return Script(name, encoded, sha)


@dataclass(frozen=True, slots=True)
class Command:
    """One command, or call of a script.

    Attributes:
        key: A key of the command; decides which server gets it.
        words: The whole command; of a script, keys and arguments with their number before them.
        script: The script to call.
    """

    key: bytes
    words: tuple[Argument, ...]
    script: Script | None = None

    def packed(self) -> tuple[Argument, ...]:
        """What is sent first."""
        return self.words if self.script is None else ("EVALSHA", self.script.sha, *self.words)

    def in_full(self) -> Command:
        """The same with the script's text."""
        assert self.script is not None, "only scripts are unknown to a server"
        return Command(self.key, ("EVAL", self.script.text, *self.words))


def call_script(
    script: Script, keys: Sequence[bytes], arguments: Iterable[Argument] = ()
) -> Command:
    """A call of a script; all its keys are in the slot of the first."""
    return Command(keys[0], (len(keys), *keys, *arguments), script)


def slot_of(key: bytes) -> int:
    """A key's slot in a cluster: of its hash tag, or of all of it."""
    return key_slot(key)
