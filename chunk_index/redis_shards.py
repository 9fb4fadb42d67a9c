"""What the shards of a shared index say of themselves; changes nothing.

Knows how nodes and counts are read, in one round trip where that is possible. Does not know what
follows from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sglang_ext.chunk_index import keys
from sglang_ext.chunk_index.codec import StoredNode, decode_node
from sglang_ext.chunk_index.identity import KEY_BYTES, ChunkKey
from sglang_ext.chunk_index.keys import NUM_SHARDS
from sglang_ext.chunk_index.redis_calls import Calls
from sglang_ext.chunk_index.redis_commands import Command
from sglang_ext.chunk_index.redis_connection import Reply
from sglang_ext.chunk_index.redis_link import RedisLink
from sglang_ext.chunk_index.redis_replies import (
    as_bytes,
    as_int,
    as_list,
    as_optional_bytes,
    as_pairs,
    as_text,
)
from sglang_ext.chunk_index.redis_scan import scan_hashes, scan_pages

_MGET = 512  # keys of one command
_PAGE = 64  # members of a queue read at a time
_ALL_SHARDS = range(NUM_SHARDS)


@dataclass(frozen=True, slots=True)
class Share:
    """What an owner has in a shard, or in all.

    Attributes:
        num_nodes: Nodes, those being removed included.
        num_bytes: Their payload bytes.
    """

    num_nodes: int
    num_bytes: int


class Shards:
    """Reads nodes and counts."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._calls = link.background()

    def values(self, calls: Calls, wanted: Sequence[ChunkKey]) -> dict[ChunkKey, bytes | None]:
        """The values of nodes, None if absent; one round trip, to all servers at once."""
        groups = self._groups(wanted)
        commands = []
        for group in groups:
            names = list(map(keys.node_key, group))
            commands.append(Command(names[0], ("MGET", *names)))
        found: dict[ChunkKey, bytes | None] = {}
        for group, reply in zip(groups, calls.run(commands) if commands else (), strict=True):
            found.update(zip(group, map(as_optional_bytes, as_list(reply)), strict=True))
        return found

    def nodes(self, wanted: Sequence[ChunkKey]) -> dict[ChunkKey, StoredNode | None]:
        """Nodes, None for what is absent or not ours."""
        values = self.values(self._calls, wanted)
        return {key: decode_node(key, value) for key, value in values.items()}

    def shares(self) -> list[dict[str, Share]]:
        """For each shard what each owner has in it."""
        counts: list[dict[str, list[int]]] = [{} for _ in _ALL_SHARDS]
        hashes = [keys.owners_key(shard) for shard in _ALL_SHARDS]
        for shard, page in scan_hashes(self._calls, hashes):
            for field, number in as_pairs(page):
                name = as_text(field)
                count = counts[shard].setdefault(name[1:], [0, 0])
                count[name[0] == "b"] = as_int(number)
        return [{owner: Share(*count) for owner, count in shard.items()} for shard in counts]

    def models(self) -> list[set[str]]:
        """For each shard the models of its nodes."""
        models: list[set[str]] = [set() for _ in _ALL_SHARDS]
        hashes = [keys.models_key(shard) for shard in _ALL_SHARDS]
        for shard, page in scan_hashes(self._calls, hashes):
            models[shard].update(as_text(model) for model, _ in as_pairs(page))
        return models

    def totals(self) -> tuple[Share, int]:
        """All nodes together, and the bytes reserved for nodes to come; one round trip."""
        names = [keys.totals_key(shard) for shard in _ALL_SHARDS]
        commands = [Command(name, ("HMGET", name, "nodes", "bytes")) for name in names]
        account = keys.ALL_ACCOUNT
        commands.append(Command(account, ("HGET", account, "reserved")))
        *counts, reserved = self._calls.run(commands)
        pairs = [tuple(map(as_int, as_list(count))) for count in counts]
        share = Share(sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs))
        return share, as_int(reserved)

    def having(self, commands: Mapping[int, Command]) -> list[int]:
        """The shards whose command says more than 0; one round trip."""
        replies = self._calls.run(list(commands.values()))
        return [shard for shard, reply in zip(commands, replies, strict=True) if as_int(reply) > 0]

    def members(self, shard: int, owner: str) -> Iterator[tuple[bytes, list[ChunkKey]]]:
        """An owner's nodes in a shard, page by page, each page with the key it stands in."""
        queue, kept = keys.queue_key(shard, owner), keys.kept_key(shard, owner)
        for page in scan_pages(self._calls, "ZSCAN", queue, _PAGE):
            yield queue, as_keys(member for member, _ in as_pairs(page))
        for page in scan_pages(self._calls, "SSCAN", kept, _PAGE):
            yield kept, as_keys(page)

    def _groups(self, wanted: Sequence[ChunkKey]) -> list[Sequence[ChunkKey]]:
        """Keys that one command may name: all, or in a cluster those of one shard."""
        groups: Iterable[Sequence[ChunkKey]] = (wanted,)
        if self._link.is_cluster:
            groups = by_shard(wanted).values()
        return [
            group[start : start + _MGET]
            for group in groups
            for start in range(0, len(group), _MGET)
        ]


def by_shard(wanted: Iterable[ChunkKey]) -> dict[int, list[ChunkKey]]:
    """Keys by their shard, in order."""
    shards: dict[int, list[ChunkKey]] = {}
    for key in wanted:
        shards.setdefault(keys.shard_of(key), []).append(key)
    return shards


def sum_shares(shares: Sequence[Mapping[str, Share]]) -> dict[str, Share]:
    """What each owner has in all shards."""
    total: dict[str, Share] = {}
    for shard in shares:
        for owner, share in shard.items():
            before = total.get(owner, Share(0, 0))
            total[owner] = Share(
                before.num_nodes + share.num_nodes, before.num_bytes + share.num_bytes
            )
    return total


def as_keys(members: Iterable[Reply]) -> list[ChunkKey]:
    """Members of a queue; what is no key is left out."""
    return [ChunkKey(m) for m in map(as_bytes, members) if len(m) == KEY_BYTES]
