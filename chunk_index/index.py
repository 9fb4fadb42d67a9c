"""The `ChunkIndex` port: which chunk segments are cached, in what state, and its records.

Knows keys, sizes, owners, quotas and life cycles. Does not know payloads, their tiers, tokens or
clocks: time is passed in as milliseconds since the epoch.

A node's life: bytes reserved → published below a present parent → matched, annotated → evicted,
expired, invalidated or removed. A record that was matched is a hint: its node may be gone by now,
and its payload with it; that costs time, never correctness.

Quotas: an owner with a quota never has more bytes than it, and loses none of them to another owner.
Owners without one share what is left of the budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from sglang_ext.chunk_index.identity import ChunkKey

MAX_DOC_IDS = 64
"""Documents a node may name."""


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """What is known of a cached segment beside its use.

    Attributes:
        key: Its name.
        parent: The segment before it in its chunk; None for a chunk's first.
        num_tokens: Tokens of the segment alone.
        payload_bytes: Size of its payload.
        checksum: xxh3-64 of the payload's bytes; finds damage, and tells apart what two writers
            of one key computed.
        created_ms: When it was published.
        doc_ids: Documents whose invalidation removes it, at most `MAX_DOC_IDS`; `name@version`
            or a plain name.
        expires_ms: From this moment on it is a miss; None never expires.
        owner: Digest of the namespace that stored it, from `identity.owner_id`.
        pinned: Never evicted; expiry, invalidation and removal still apply.
        model: Digest of the model that computed it, from `identity.model_id`.
        compute_us: Predicted microseconds to compute it again; 0 is unknown.
    """

    key: ChunkKey
    parent: ChunkKey | None
    num_tokens: int
    payload_bytes: int
    checksum: int
    created_ms: int
    doc_ids: tuple[str, ...] = ()
    expires_ms: int | None = None
    owner: str = ""
    pinned: bool = False
    model: str = ""
    compute_us: int = 0

    def is_expired(self, now_ms: int) -> bool:
        """Whether its time is up."""
        return self.expires_ms is not None and self.expires_ms <= now_ms


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as it is now, for people and tests.

    Attributes:
        record: What was published, with later annotations.
        last_hit_ms: Time of the last match; None if never matched.
        num_hits: Matches since it was published; may lag behind in a shared index.
    """

    record: NodeRecord
    last_hit_ms: int | None
    num_hits: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """Bytes set aside for one node to come; given back by `cancel`, or used up by `publish`.

    Attributes:
        id: Its name within the index.
        owner: Whose bytes they are.
        num_bytes: How many.
    """

    id: bytes
    owner: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why bytes cannot be reserved now.

    Attributes:
        num_bytes: Bytes that must be evicted first.
        is_own: The owner's quota is used up, so only its own nodes can make room; else the budget.
    """

    num_bytes: int
    is_own: bool


class Publication(Enum):
    """What `publish` did.

    STORED: The node is new and can be matched. PRESENT: The key was there; its record stays.
    ORPHAN: The parent is absent or expired. BUSY: The key itself is expired and not yet collected,
    or removed and still held by a reader of this process.
    """

    STORED = "stored"
    PRESENT = "present"
    ORPHAN = "orphan"
    BUSY = "busy"


@dataclass(frozen=True, slots=True)
class Usage:
    """One owner's share.

    Attributes:
        num_nodes: Nodes that can be matched, expired ones not yet collected included.
        num_bytes: Their payload bytes.
        quota_bytes: Most bytes it may have; None shares the budget with others.
    """

    num_nodes: int
    num_bytes: int
    quota_bytes: int | None


@dataclass(frozen=True, slots=True)
class IndexStats:
    """Totals at this moment.

    Attributes:
        num_nodes: Nodes that can be matched, expired ones not yet collected included.
        num_bytes: Payload bytes of those.
        reserved_bytes: Bytes set aside for nodes to come.
        budget_bytes: Most bytes that published and reserved may be together; None is unlimited.
    """

    num_nodes: int
    num_bytes: int
    reserved_bytes: int
    budget_bytes: int | None


class ChunkIndex(Protocol):
    """Which segments are cached. Adapters are thread-safe; each call is atomic for each node.

    Where records are returned as having left, the caller drops their payloads. Methods with a
    `limit` change at most about that many nodes, so that a shared index is never blocked for long:
    call again until nothing is returned. Every method of a remote index may raise
    `IndexUnavailable`, which callers count as a miss.
    """

    def match(
        self, paths: Sequence[Sequence[ChunkKey]], now_ms: int
    ) -> tuple[tuple[NodeRecord, ...], ...]:
        """For each chunk's key path, first segment first, its leading unexpired nodes.

        Modifies hit statistics and recency of the matched nodes only; a remote index may do that
        later, in batches. The result is a hint.
        """
        ...

    def reserve(self, owner: str, num_bytes: int, now_ms: int) -> Reservation | Shortage:
        """Set bytes aside within the owner's quota and the budget, both or neither.

        Modifies the accounts. A reservation that is neither published nor cancelled, because its
        process died, ends by itself after `keys.RESERVATION_S` in a remote index.
        """
        ...

    def cancel(self, reservation: Reservation) -> None:
        """Give reserved bytes back; nothing if they are used up or ended. Modifies accounts."""
        ...

    def publish(
        self, record: NodeRecord, now_ms: int, reservation: Reservation | None = None
    ) -> Publication:
        """Make a segment findable, its payload being durable already.

        Modifies the index only if STORED; the parent then counts as used. The reservation is used
        up if STORED, and given back otherwise. Without one the bytes are counted unconditionally.
        """
        ...

    def annotate(
        self,
        key: ChunkKey,
        doc_ids: Sequence[str] = (),
        expires_ms: int | None = None,
        *,
        pinned: bool = False,
    ) -> NodeRecord | None:
        """Add documents to a node and pin it; a later expiry replaces an earlier one.

        Modifies the record: documents beyond `MAX_DOC_IDS` are left out; a node that never
        expires stays so, and so does a pinned one. Returns the new record, None if absent.
        """
        ...

    def unpin(self, key: ChunkKey) -> NodeRecord | None:
        """Let a node be evicted again; returns its new record, None if absent."""
        ...

    def show(self, key: ChunkKey) -> NodeView | None:
        """One node; None if absent. Changes nothing; stale at once."""
        ...

    def scan(self) -> Iterator[NodeView]:
        """Every node, in no order. Changes nothing.

        Nodes that come or go meanwhile may be left out, and a node may come twice.
        """
        ...

    def remove(self, key: ChunkKey) -> tuple[NodeRecord, ...]:
        """Remove a node and all below it, pinned or not; returns the records that left.

        Modifies the index; children leave before their parents.
        """
        ...

    def victims(self, num_bytes: int, owner: str, *, is_own: bool) -> tuple[NodeRecord, ...]:
        """Plan an eviction of at least `num_bytes` for `owner`, children before parents.

        Never a node that is pinned or has a pinned node below it (nor, in this process, a held
        one). Of `owner`'s own nodes if `is_own`; else of its own, of owners without a quota, and
        of others what they have beyond their quota. In the order of `policy`. Empty if that much
        cannot be evicted. Changes nothing; a plan, not a promise: `evict` tells. `expire` first.
        """
        ...

    def evict(self, records: Sequence[NodeRecord]) -> tuple[NodeRecord, ...]:
        """Remove, in the order given, each node that is still evictable; returns those that left.

        Modifies the index. A node that was replaced, pinned, held, or got a child outside the plan
        stays.
        """
        ...

    def expire(self, now_ms: int, limit: int) -> tuple[NodeRecord, ...]:
        """Remove expired nodes and all below them; returns the records that left.

        Modifies the index.
        """
        ...

    def invalidate(self, doc_id: str, owner: str, limit: int) -> tuple[NodeRecord, ...]:
        """Remove an owner's nodes that name a document, and all below; returns those that left.

        `name` means the document in every version, `name@version` that version alone. Modifies the
        index. Other owners' nodes stay.
        """
        ...

    def clear(
        self, limit: int, owner: str | None = None, model: str | None = None
    ) -> tuple[NodeRecord, ...]:
        """Remove every node, or all of one owner, or of one model; returns those that left.

        Modifies the index. Quotas stay.
        """
        ...

    def set_quota(self, owner: str, num_bytes: int | None) -> None:
        """Change an owner's quota; None takes it away. Modifies the accounts, evicts nothing."""
        ...

    def usage(self) -> Mapping[str, Usage]:
        """Every owner that has nodes or a quota. Changes nothing; stale at once."""
        ...

    def stats(self) -> IndexStats:
        """Totals. Changes nothing; stale at once."""
        ...

    def check_integrity(self) -> None:
        """Verify every invariant. Changes nothing; not for use while others write.

        Raises:
            AssertionError: One does not hold.
        """
        ...


class HoldingIndex(ChunkIndex, Protocol):
    """An index in this process, whose readers can keep nodes.

    A node removed while held is dead: no longer matched, not in any total but `held_bytes`, and its
    record counts as having left only with the last `release`.
    """

    @property
    def num_held(self) -> int:
        """Nodes with at least one reader, dead ones included. Stale at once."""
        ...

    def is_dead(self, key: ChunkKey) -> bool:
        """Whether a key was removed and still has readers. Changes nothing; stale at once."""
        ...

    def peek(self, paths: Sequence[Sequence[ChunkKey]], now_ms: int) -> tuple[int, ...]:
        """For each path the number of leading unexpired nodes. Changes nothing."""
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
        holds are ignored.
        """
        ...


def document_names(doc_id: str) -> tuple[str, ...]:
    """What a document id is found by: itself, and without its version (after the last `@`)."""
    name, at, _ = doc_id.rpartition("@")
    return (doc_id, name) if at and name else (doc_id,)
