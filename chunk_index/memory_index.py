"""`HoldingIndex` in this process: the reference behaviour of every adapter.

Knows the radix tree, dead nodes, accounts, expiry times and documents. Does not know payloads or
clocks.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock

from sglang_ext.chunk_index.identity import ChunkKey
from sglang_ext.chunk_index.index import (
    MAX_DOC_IDS,
    IndexStats,
    NodeRecord,
    NodeView,
    Publication,
    Reservation,
    Shortage,
    Usage,
    document_names,
)
from sglang_ext.chunk_index.radix import Node, RadixTree


class MemoryIndex:
    """A radix tree behind one lock; see `HoldingIndex` for what each method does.

    `limit` is passed by up to one subtree, for subtrees are removed as a whole.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        self._lock = Lock()
        self._tree = RadixTree()
        self._dead: dict[ChunkKey, Node] = {}
        self._num_held = 0
        self._accounts = _Accounts(budget_bytes)
        self._catalog = _Catalog()

    @property
    def num_held(self) -> int:
        """Nodes with at least one reader, dead ones included."""
        return self._num_held

    @property
    def held_bytes(self) -> int:
        """Payload bytes of dead nodes; they count against quota and budget. Stale at once."""
        return self._accounts.total.dead_bytes

    def is_dead(self, key: ChunkKey) -> bool:
        """Whether a key was removed and still has readers."""
        with self._lock:
            return key in self._dead

    def match(
        self, paths: Sequence[Sequence[ChunkKey]], now_ms: int
    ) -> tuple[tuple[NodeRecord, ...], ...]:
        """Leading unexpired nodes of each path; modifies hit statistics and recency."""
        with self._lock:
            return tuple(_records(self._tree.match(path, now_ms)) for path in paths)

    def peek(self, paths: Sequence[Sequence[ChunkKey]], now_ms: int) -> tuple[int, ...]:
        """Numbers of leading unexpired nodes; changes nothing."""
        with self._lock:
            return tuple(len(self._tree.leading(path, now_ms)) for path in paths)

    def hold(self, keys: Sequence[ChunkKey]) -> tuple[NodeRecord, ...]:
        """Keep nodes for a reader; returns the records of those really held."""
        with self._lock:
            nodes = [node for key in keys if (node := self._tree.get(key)) is not None]
            for node in nodes:
                self._num_held += node.num_holds == 0
                self._tree.hold(node)
            return _records(nodes)

    def release(self, keys: Sequence[ChunkKey]) -> tuple[NodeRecord, ...]:
        """Undo `hold`; returns the records of dead nodes that left by it."""
        with self._lock:
            return tuple(record for key in keys if (record := self._release(key)) is not None)

    def reserve(self, owner: str, num_bytes: int, now_ms: int) -> Reservation | Shortage:
        """Set bytes aside within quota and budget; modifies the accounts."""
        with self._lock:
            return self._accounts.reserve(owner, num_bytes)

    def cancel(self, reservation: Reservation) -> None:
        """Give reserved bytes back; modifies the accounts."""
        with self._lock:
            self._accounts.end(reservation)

    def publish(
        self, record: NodeRecord, now_ms: int, reservation: Reservation | None = None
    ) -> Publication:
        """Add a node below a present parent, or say why not; ends the reservation."""
        with self._lock:
            if reservation is not None:
                self._accounts.end(reservation)
            obstacle = self._obstacle(record, now_ms)
            if obstacle is not None:
                return obstacle
            self._tree.insert(record)
            self._catalog.add(record)
            self._accounts.change(record.owner, num_nodes=1, num_bytes=record.payload_bytes)
            return Publication.STORED

    def annotate(
        self,
        key: ChunkKey,
        doc_ids: Sequence[str] = (),
        expires_ms: int | None = None,
        *,
        pinned: bool = False,
    ) -> NodeRecord | None:
        """Add documents, put expiry off, pin; None for `expires_ms` leaves it as it is."""
        with self._lock:
            node = self._tree.get(key)
            if node is None:
                return None
            return self._rewrite(node, _annotated(node.record, doc_ids, expires_ms, pinned))

    def unpin(self, key: ChunkKey) -> NodeRecord | None:
        """Let a node be evicted again; modifies its record."""
        with self._lock:
            node = self._tree.get(key)
            return None if node is None else self._rewrite(node, replace(node.record, pinned=False))

    def show(self, key: ChunkKey) -> NodeView | None:
        """One node that is not dead; changes nothing."""
        with self._lock:
            node = self._tree.get(key)
            return None if node is None else NodeView(node.record, node.last_hit_ms, node.num_hits)

    def scan(self) -> Iterator[NodeView]:
        """Every node that was there at the first step and is when its turn comes."""
        with self._lock:
            keys = [node.record.key for node in self._tree]
        for key in keys:
            view = self.show(key)
            if view is not None:
                yield view

    def remove(self, key: ChunkKey) -> tuple[NodeRecord, ...]:
        """Remove a node and all below it; returns the records that left."""
        with self._lock:
            return self._remove_all([key], limit=1)

    def victims(self, num_bytes: int, owner: str, *, is_own: bool) -> tuple[NodeRecord, ...]:
        """Plan an eviction, children before parents; empty if impossible; changes nothing."""
        with self._lock:
            if is_own:
                return _records(self._tree.victims_of(owner, num_bytes))
            limits = self._accounts.losses(self._tree.owners_apart, owner)
            return _records(self._tree.victims(num_bytes, limits))

    def evict(self, records: Sequence[NodeRecord]) -> tuple[NodeRecord, ...]:
        """Remove each node that is still evictable, in order; returns those that left."""
        with self._lock:
            return tuple(node.record for record in records if (node := self._evict(record)))

    def expire(self, now_ms: int, limit: int) -> tuple[NodeRecord, ...]:
        """Remove expired nodes and all below them; returns the records that left."""
        with self._lock:
            return self._remove_all(self._catalog.take_expired(now_ms), limit)

    def invalidate(self, doc_id: str, owner: str, limit: int) -> tuple[NodeRecord, ...]:
        """Remove an owner's nodes that name a document, and all below; returns those that left."""
        with self._lock:
            return self._remove_all(self._catalog.of_document(owner, doc_id), limit)

    def clear(
        self, limit: int, owner: str | None = None, model: str | None = None
    ) -> tuple[NodeRecord, ...]:
        """Remove every node, or those of an owner, of a model, of both; returns those that left."""
        with self._lock:
            return self._remove_all(self._catalog.of_group(owner, model), limit)

    def set_quota(self, owner: str, num_bytes: int | None) -> None:
        """Change an owner's quota; modifies the accounts."""
        with self._lock:
            self._accounts.set_quota(owner, num_bytes)
            if num_bytes is None:
                self._tree.set_together(owner)
            else:
                self._tree.set_apart(owner)

    def usage(self) -> Mapping[str, Usage]:
        """Every owner that has nodes or a quota; changes nothing."""
        with self._lock:
            return self._accounts.usage()

    def stats(self) -> IndexStats:
        """Totals; changes nothing."""
        with self._lock:
            total = self._accounts.total
            return IndexStats(
                num_nodes=total.num_nodes,
                num_bytes=total.num_bytes,
                reserved_bytes=total.reserved_bytes,
                budget_bytes=total.quota_bytes,
            )

    def check_integrity(self) -> None:
        """Verify the tree and everything kept beside it; changes nothing."""
        with self._lock:
            self._tree.check_integrity()
            for key, node in self._dead.items():
                assert self._tree.get(key) is None, "a dead node is not matched"
                assert node.num_holds > 0, "a dead node has readers"
            held = sum(node.num_holds > 0 for node in self._tree)
            assert self._num_held == held + len(self._dead)
            live = [node.record for node in self._tree]
            self._catalog.check_integrity(live)
            self._accounts.check_integrity(live, _records(self._dead.values()))
            assert set(self._tree.owners_apart) == self._accounts.owners_with_quota()

    def _obstacle(self, record: NodeRecord, now_ms: int) -> Publication | None:
        if record.key in self._dead:
            return Publication.BUSY
        present = self._tree.get(record.key)
        if present is not None:
            is_expired = present.record.is_expired(now_ms)
            return Publication.BUSY if is_expired else Publication.PRESENT
        if record.parent is None:
            return None
        parent = self._tree.get(record.parent)
        is_orphan = parent is None or parent.record.is_expired(now_ms)
        return Publication.ORPHAN if is_orphan else None

    def _rewrite(self, node: Node, record: NodeRecord) -> NodeRecord:
        """Give a node an annotated record."""
        self._catalog.discard(node.record)
        self._tree.replace(node, record)
        self._catalog.add(record)
        return record

    def _release(self, key: ChunkKey) -> NodeRecord | None:
        """Let go of one hold; returns the record if the node left by it."""
        live = self._tree.get(key)
        node = live or self._dead.get(key)
        if node is None or node.num_holds == 0:
            return None
        if live is not None:
            self._tree.release(live)
        else:
            node.num_holds -= 1
        if node.num_holds > 0:
            return None
        self._num_held -= 1
        if live is not None:
            return None
        del self._dead[key]
        self._accounts.change(node.record.owner, dead_bytes=-node.record.payload_bytes)
        return node.record

    def _evict(self, planned: NodeRecord) -> Node | None:
        """Remove a planned victim; None, and nothing changed, if it is one no more."""
        node = self._tree.get(planned.key)
        if node is None or node.is_protected or node.children:
            return None
        if (node.record.checksum, node.record.created_ms) != (planned.checksum, planned.created_ms):
            return None
        self._tree.evict(node)
        self._unlist(node.record)
        return node

    def _remove_all(self, keys: Iterable[ChunkKey], limit: int) -> tuple[NodeRecord, ...]:
        """Remove subtrees until `limit` nodes went; held ones become dead, the others are returned.

        Takes from `keys` one by one, each after the one before it is gone.
        """
        left: list[NodeRecord] = []
        num_removed = 0
        for key in keys:
            top = self._tree.get(key)
            removed = () if top is None else self._tree.remove(top)
            num_removed += len(removed)
            for node in removed:
                self._unlist(node.record)
                if node.num_holds > 0:
                    self._bury(node)
                else:
                    left.append(node.record)
            if left and num_removed >= limit:
                break
        return tuple(left)

    def _unlist(self, record: NodeRecord) -> None:
        self._catalog.discard(record)
        self._accounts.change(record.owner, num_nodes=-1, num_bytes=-record.payload_bytes)

    def _bury(self, node: Node) -> None:
        self._dead[node.record.key] = node
        self._accounts.change(node.record.owner, dead_bytes=node.record.payload_bytes)


@dataclass(slots=True)
class _Account:
    """One owner's bytes, or all owners'."""

    quota_bytes: int | None = None
    num_nodes: int = 0
    num_bytes: int = 0
    dead_bytes: int = 0
    reserved_bytes: int = 0

    @property
    def used_bytes(self) -> int:
        return self.num_bytes + self.dead_bytes + self.reserved_bytes

    def missing(self, num_bytes: int) -> int:
        """How many bytes stand in the way of that many more; not positive if none do."""
        return 0 if self.quota_bytes is None else self.used_bytes + num_bytes - self.quota_bytes


class _Accounts:
    """Bytes of each owner and of all, and the reservations among them."""

    def __init__(self, budget_bytes: int | None) -> None:
        self.total = _Account(budget_bytes)
        self._owners: dict[str, _Account] = {}
        self._reservations: dict[bytes, Reservation] = {}
        self._num_reservations = 0

    def reserve(self, owner: str, num_bytes: int) -> Reservation | Shortage:
        """Set bytes aside in both accounts, or in neither."""
        missing = self._owners.get(owner, _Account()).missing(num_bytes)
        if missing > 0:
            return Shortage(missing, is_own=True)
        missing = self.total.missing(num_bytes)
        if missing > 0:
            return Shortage(missing, is_own=False)
        self._num_reservations += 1
        reservation = Reservation(self._num_reservations.to_bytes(8, "big"), owner, num_bytes)
        self._reservations[reservation.id] = reservation
        self.change(owner, reserved_bytes=num_bytes)
        return reservation

    def end(self, reservation: Reservation) -> None:
        """Give a reservation's bytes back, once."""
        ended = self._reservations.pop(reservation.id, None)
        if ended is not None:
            self.change(ended.owner, reserved_bytes=-ended.num_bytes)

    def change(
        self,
        owner: str,
        *,
        num_nodes: int = 0,
        num_bytes: int = 0,
        dead_bytes: int = 0,
        reserved_bytes: int = 0,
    ) -> None:
        """Add to an owner's account and to the total; an owner with nothing is forgotten."""
        account = self._owners.setdefault(owner, _Account())
        for each in (account, self.total):
            each.num_nodes += num_nodes
            each.num_bytes += num_bytes
            each.dead_bytes += dead_bytes
            each.reserved_bytes += reserved_bytes
        self._forget_if_empty(owner)

    def set_quota(self, owner: str, num_bytes: int | None) -> None:
        """Change an owner's quota."""
        self._owners.setdefault(owner, _Account()).quota_bytes = num_bytes
        self._forget_if_empty(owner)

    def losses(self, owners: Iterable[str], winner: str) -> dict[str, int]:
        """The most bytes each of those owners, who have quotas, may lose for `winner`.

        Who may lose nothing is left out. Source of the rule: `ChunkIndex.victims`.
        """
        losses: dict[str, int] = {}
        for owner in owners:
            account = self._owners[owner]
            most = account.used_bytes if owner == winner else account.missing(0)
            if most > 0:
                losses[owner] = most
        return losses

    def usage(self) -> dict[str, Usage]:
        """Owners with nodes or a quota."""
        return {
            owner: Usage(account.num_nodes, account.num_bytes, account.quota_bytes)
            for owner, account in self._owners.items()
            if account.num_nodes > 0 or account.quota_bytes is not None
        }

    def owners_with_quota(self) -> set[str]:
        """Owners that have one."""
        return {o for o, account in self._owners.items() if account.quota_bytes is not None}

    def check_integrity(self, live: Sequence[NodeRecord], dead: Sequence[NodeRecord]) -> None:
        """Verify every sum against the records and reservations there are."""
        again = _Accounts(self.total.quota_bytes)
        for owner, account in self._owners.items():
            again.set_quota(owner, account.quota_bytes)
        for record in live:
            again.change(record.owner, num_nodes=1, num_bytes=record.payload_bytes)
        for record in dead:
            again.change(record.owner, dead_bytes=record.payload_bytes)
        for reservation in self._reservations.values():
            again.change(reservation.owner, reserved_bytes=reservation.num_bytes)
        assert self._owners == again._owners
        assert self.total == again.total

    def _forget_if_empty(self, owner: str) -> None:
        if self._owners[owner] == _Account():
            del self._owners[owner]


_Lists = dict[tuple[str, str], OrderedDict[ChunkKey, None]]
"""Keys in the order they were listed; unlike a dict, each finds its first at once after removals.
No list is empty."""


class _Catalog:
    """Which live nodes name a document, belong to an owner and model, or expire when."""

    def __init__(self) -> None:
        self._documents: _Lists = {}  # by owner and name
        self._groups: _Lists = {}  # by owner and model
        self._expiry: dict[ChunkKey, int] = {}
        self._due: list[tuple[int, ChunkKey]] = []  # heap; entries of nodes gone stay a while

    def add(self, record: NodeRecord) -> None:
        """List a record."""
        self._groups.setdefault((record.owner, record.model), OrderedDict())[record.key] = None
        for name in _document_names(record):
            self._documents.setdefault((record.owner, name), OrderedDict())[record.key] = None
        if record.expires_ms is not None:
            self._add_expiry(record.key, record.expires_ms)

    def discard(self, record: NodeRecord) -> None:
        """Undo `add` of the same record."""
        _discard(self._groups, (record.owner, record.model), record.key)
        for name in _document_names(record):
            _discard(self._documents, (record.owner, name), record.key)
        self._expiry.pop(record.key, None)

    def take_expired(self, now_ms: int) -> Iterator[ChunkKey]:
        """Expired nodes, the earliest first; each must be removed before the next is taken."""
        while self._due and self._due[0][0] <= now_ms:
            expires_ms, key = heapq.heappop(self._due)
            if self._expiry.get(key) == expires_ms:
                yield key

    def of_document(self, owner: str, name: str) -> Iterator[ChunkKey]:
        """Nodes that name a document; each must be removed before the next is taken."""
        yield from _first_again_and_again(self._documents.get((owner, name)))

    def of_group(self, owner: str | None, model: str | None) -> Iterator[ChunkKey]:
        """Nodes of an owner and model, None being any; each must be removed before the next."""
        for group in list(self._groups):
            if owner in (None, group[0]) and model in (None, group[1]):
                yield from _first_again_and_again(self._groups.get(group))

    def check_integrity(self, live: Iterable[NodeRecord]) -> None:
        """Verify that exactly the live records are listed."""
        again = _Catalog()
        for record in live:
            again.add(record)
        for lists, expected in (
            (self._groups, again._groups),
            (self._documents, again._documents),
        ):
            assert lists.keys() == expected.keys(), "a list without nodes is forgotten"
            assert all(lists[at].keys() == expected[at].keys() for at in lists)
        assert self._expiry == again._expiry
        assert {(at, key) for key, at in self._expiry.items()} <= set(self._due)

    def _add_expiry(self, key: ChunkKey, expires_ms: int) -> None:
        self._expiry[key] = expires_ms
        heapq.heappush(self._due, (expires_ms, key))
        if len(self._due) > 2 * len(self._expiry) + 16:  # mostly nodes that are gone
            self._due = [(at, key) for key, at in self._expiry.items()]
            heapq.heapify(self._due)


def _first_again_and_again(keys: OrderedDict[ChunkKey, None] | None) -> Iterator[ChunkKey]:
    """The first key, as long as there is one: whoever takes it removes it."""
    while keys:
        yield next(iter(keys))


def _discard(lists: _Lists, at: tuple[str, str], key: ChunkKey) -> None:
    del lists[at][key]
    if not lists[at]:
        del lists[at]


def _document_names(record: NodeRecord) -> set[str]:
    return {name for doc_id in record.doc_ids for name in document_names(doc_id)}


def _annotated(
    record: NodeRecord, doc_ids: Sequence[str], expires_ms: int | None, pinned: bool
) -> NodeRecord:
    """A record with what `ChunkIndex.annotate` adds to it."""
    if record.expires_ms is not None and expires_ms is not None:
        expires_ms = max(record.expires_ms, expires_ms)
    else:
        expires_ms = record.expires_ms
    return replace(
        record,
        doc_ids=tuple(dict.fromkeys((*record.doc_ids, *doc_ids)))[:MAX_DOC_IDS],
        expires_ms=expires_ms,
        pinned=record.pinned or pinned,
    )


def _records(nodes: Iterable[Node]) -> tuple[NodeRecord, ...]:
    return tuple(node.record for node in nodes)
