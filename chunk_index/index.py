"""The `ChunkIndex` port: which chunk segments are cached, in what state, and its records.

Knows keys, sizes, life cycles and who is reading. Does not know payloads, their tiers, tokens or
clocks: time is passed in as milliseconds of any one clock.

A node's life: published below a present parent → matched and held by readers → evicted, expired,
invalidated or removed. One that is held at that moment is dead: no longer matched, but its record
(and so its payload) stays until the last holder releases it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sglang_ext.chunk_index.identity import ChunkKey


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """What is fixed about a cached segment when it is published.

    Attributes:
        key: Its name.
        parent: The segment before it in its chunk; None directly below the root.
        num_tokens: Tokens of the segment alone.
        payload_bytes: Size of its payload.
        checksum: xxh3-64 of the payload's bytes; finds damage, names nothing.
        created_ms: When it was published.
        doc_ids: Documents whose invalidation removes it.
        expires_ms: From this moment on it is a miss; None never expires.
        owner: Digest of the namespace that stored it.
        pinned: Never evicted; expiry, invalidation and removal still apply.
    """

    key: ChunkKey
    parent: ChunkKey | None
    num_tokens: int
    payload_bytes: int
    checksum: int
    created_ms: int
    doc_ids: tuple[str, ...]
    expires_ms: int | None
    owner: str
    pinned: bool

    def is_expired(self, now_ms: int) -> bool:
        """Whether its time is up."""
        return self.expires_ms is not None and self.expires_ms <= now_ms


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as it is now, for people and tests.

    Attributes:
        record: What was published.
        last_hit_ms: Time of the last match; None if never matched.
        num_hits: Matches since it was published; may lag behind in a shared index.
        num_holds: Readers at this moment.
        is_dead: Removed, and kept for its readers only.
    """

    record: NodeRecord
    last_hit_ms: int | None
    num_hits: int
    num_holds: int
    is_dead: bool


@dataclass(frozen=True, slots=True)
class IndexStats:
    """Totals at this moment.

    Attributes:
        num_nodes: Nodes that can be matched, expired ones not yet collected included.
        num_bytes: Payload bytes of those.
        num_held: Nodes with at least one reader, dead ones included.
        num_dead: Removed nodes kept for their readers.
        dead_bytes: Payload bytes of those.
    """

    num_nodes: int
    num_bytes: int
    num_held: int
    num_dead: int
    dead_bytes: int


class ChunkIndex(Protocol):
    """Which segments are cached. Adapters are thread-safe and each call is atomic.

    Where records are returned as having left, they have no reader: the caller may drop their
    payloads. Every method of a remote index may raise `IndexUnavailable`, which callers count as a
    miss.
    """

    def match(self, paths: Sequence[Sequence[ChunkKey]], now_ms: int) -> tuple[int, ...]:
        """For each chunk's key path, top segment first, the number of leading unexpired nodes.

        Modifies hit statistics and recency of the matched nodes only. The result is a hint: any
        node may be gone right after; `hold` tells.
        """
        ...

    def hold(self, keys: Sequence[ChunkKey]) -> tuple[NodeRecord, ...]:
        """Keep nodes for a reader; returns the records of those really held, in order.

        Modifies the nodes' reader counts, once per occurrence of a key; a key that is not present
        or dead is left out. The result stays valid until `release`.
        """
        ...

    def release(self, keys: Sequence[ChunkKey]) -> tuple[NodeRecord, ...]:
        """Undo `hold`, once per occurrence of a key; returns the records that left by it.

        Modifies reader counts and recency; a dead node leaves with its last reader. Keys nobody
        holds are ignored: a shared index may have lost its holds.
        """
        ...

    def publish(self, record: NodeRecord, now_ms: int) -> bool:
        """Make a segment findable, its payload being durable already.

        Returns whether the key can be matched now. Modifies the index unless the key is present:
        then the old record stays. False, and nothing changed, if the parent is absent, dead or
        expired, or if the key itself is dead or expired and not yet collected.
        """
        ...

    def show(self, key: ChunkKey) -> NodeView | None:
        """One node, dead ones included; None if absent. Changes nothing; stale at once."""
        ...

    def remove(self, key: ChunkKey) -> tuple[NodeRecord, ...]:
        """Remove a node and all below it, pinned or not; returns the records that left.

        Modifies the index; held nodes are dead at once and leave through `release`.
        """
        ...

    def victims(self, num_bytes: int) -> tuple[NodeRecord, ...]:
        """Plan an eviction of at least `num_bytes`, children before parents; empty if impossible.

        Only nodes without a held or pinned node at or below them: first those not hit since they
        were stored, then the others, least recently used first. Changes nothing. Any later `hold`,
        `publish` or removal may spoil the plan; `evict` tells. `expire` first: what is expired
        need not be chosen.
        """
        ...

    def evict(self, records: Sequence[NodeRecord]) -> bool:
        """Carry out a plan of `victims` as a whole, or not at all.

        Modifies the index if every record is still present, unheld, unpinned and without children
        outside the plan; else returns False and changes nothing. All records have left if True.
        """
        ...

    def expire(self, now_ms: int) -> tuple[NodeRecord, ...]:
        """Remove expired nodes and all below them; returns the records that left.

        Modifies the index; held nodes as in `remove`.
        """
        ...

    def invalidate(self, doc_id: str, owner: str) -> tuple[NodeRecord, ...]:
        """Remove an owner's nodes that name a document, and all below; returns those that left.

        Modifies the index; held nodes as in `remove`. Other owners' nodes stay.
        """
        ...

    def clear(self) -> tuple[NodeRecord, ...]:
        """Remove every node; returns the records that left. Held nodes as in `remove`."""
        ...

    def stats(self) -> IndexStats:
        """Totals. Changes nothing; stale at once."""
        ...

    def check_integrity(self) -> None:
        """Verify every invariant. Changes nothing.

        Raises:
            AssertionError: One does not hold.
        """
        ...
