"""`ChunkIndex` in this process: the reference behaviour of every adapter.

Knows the radix tree, dead nodes, expiry times and documents. Does not know payloads or clocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from threading import Lock

from sglang_ext.chunk_index.identity import ChunkKey
from sglang_ext.chunk_index.index import IndexStats, NodeRecord, NodeView
from sglang_ext.chunk_index.radix import Node, RadixTree


class MemoryIndex:
    """A radix tree behind one lock; see `ChunkIndex` for what each method does."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._tree = RadixTree()
        self._dead: dict[ChunkKey, Node] = {}
        self._num_held = 0
        self._expiry: list[tuple[int, ChunkKey]] = []  # heap; entries of nodes gone stay a while
        self._docs: dict[tuple[str, str], dict[ChunkKey, None]] = {}  # (owner, doc id) → keys

    def match(self, paths: Sequence[Sequence[ChunkKey]], now_ms: int) -> tuple[int, ...]:
        """Leading unexpired nodes of each path; modifies hit statistics and recency."""
        with self._lock:
            return tuple(self._tree.match(path, now_ms) for path in paths)

    def hold(self, keys: Sequence[ChunkKey]) -> tuple[NodeRecord, ...]:
        """Keep nodes for a reader; returns the records of those really held."""
        with self._lock:
            nodes = [node for key in keys if (node := self._tree.get(key)) is not None]
            for node in nodes:
                self._num_held += node.num_holds == 0
                self._tree.hold(node)
            return tuple(node.record for node in nodes)

    def release(self, keys: Sequence[ChunkKey]) -> tuple[NodeRecord, ...]:
        """Undo `hold`; returns the records of dead nodes that left by it."""
        with self._lock:
            return tuple(record for key in keys if (record := self._release(key)) is not None)

    def publish(self, record: NodeRecord, now_ms: int) -> bool:
        """Add a node below a present parent; an old record of the same key stays."""
        with self._lock:
            if record.key in self._dead:
                return False
            present = self._tree.get(record.key)
            if present is not None:
                return not present.record.is_expired(now_ms)
            parent = None if record.parent is None else self._tree.get(record.parent)
            if parent is not None and parent.record.is_expired(now_ms):
                return False
            if self._tree.insert(record) is None:
                return False
            self._remember(record)
            return True

    def show(self, key: ChunkKey) -> NodeView | None:
        """One node, dead ones included; changes nothing."""
        with self._lock:
            node = self._tree.get(key) or self._dead.get(key)
            if node is None:
                return None
            return NodeView(
                record=node.record,
                last_hit_ms=node.last_hit_ms,
                num_hits=node.num_hits,
                num_holds=node.num_holds,
                is_dead=key in self._dead,
            )

    def remove(self, key: ChunkKey) -> tuple[NodeRecord, ...]:
        """Remove a node and all below it; returns the records that left."""
        with self._lock:
            return self._remove_all([key])

    def victims(self, num_bytes: int) -> tuple[NodeRecord, ...]:
        """Plan an eviction, leaf first; empty if impossible; changes nothing."""
        with self._lock:
            return tuple(node.record for node in self._tree.victims(num_bytes))

    def evict(self, records: Sequence[NodeRecord]) -> bool:
        """Carry out a plan of `victims` as a whole, or not at all."""
        with self._lock:
            plan: dict[ChunkKey, Node] = {}
            for record in records:
                node = self._tree.get(record.key)
                if node is None or node.record != record or node.is_protected:
                    return False
                if not node.children.keys() <= plan.keys():
                    return False
                plan[record.key] = node
            self._tree.evict(tuple(plan.values()))
            for node in plan.values():
                self._forget(node.record)
            return True

    def expire(self, now_ms: int) -> tuple[NodeRecord, ...]:
        """Remove expired nodes and all below them; returns the records that left."""
        with self._lock:
            due: list[ChunkKey] = []
            while self._expiry and self._expiry[0][0] <= now_ms:
                expires_ms, key = heapq.heappop(self._expiry)
                node = self._tree.get(key)
                if node is not None and node.record.expires_ms == expires_ms:
                    due.append(key)
            return self._remove_all(due)

    def invalidate(self, doc_id: str, owner: str) -> tuple[NodeRecord, ...]:
        """Remove an owner's nodes that name a document, and all below; returns those that left."""
        with self._lock:
            return self._remove_all(list(self._docs.get((owner, doc_id), ())))

    def clear(self) -> tuple[NodeRecord, ...]:
        """Remove every node; returns the records that left."""
        with self._lock:
            return self._remove_all([n.record.key for n in self._tree if n.parent is None])

    def stats(self) -> IndexStats:
        """Totals; changes nothing."""
        with self._lock:
            return IndexStats(
                num_nodes=len(self._tree),
                num_bytes=self._tree.num_bytes,
                num_held=self._num_held,
                num_dead=len(self._dead),
                dead_bytes=sum(node.record.payload_bytes for node in self._dead.values()),
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
            docs = {(r.owner, doc, r.key) for r in self._records() for doc in r.doc_ids}
            assert docs == {(*doc, key) for doc, keys in self._docs.items() for key in keys}
            assert all(self._docs.values()), "a document without nodes is forgotten"
            timed = {(r.expires_ms, r.key) for r in self._records() if r.expires_ms is not None}
            assert timed <= set(self._expiry)

    def _records(self) -> Iterable[NodeRecord]:
        return (node.record for node in self._tree)

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
        return node.record

    def _remove_all(self, keys: Iterable[ChunkKey]) -> tuple[NodeRecord, ...]:
        """Remove subtrees; held nodes become dead, the records of all others are returned."""
        left: list[NodeRecord] = []
        for key in keys:
            top = self._tree.get(key)
            if top is None:
                continue  # it went with a node above it
            for node in self._tree.remove(top):
                self._forget(node.record)
                if node.num_holds > 0:
                    self._dead[node.record.key] = node
                else:
                    left.append(node.record)
        return tuple(left)

    def _remember(self, record: NodeRecord) -> None:
        for doc_id in record.doc_ids:
            self._docs.setdefault((record.owner, doc_id), {})[record.key] = None
        if record.expires_ms is None:
            return
        heapq.heappush(self._expiry, (record.expires_ms, record.key))
        if len(self._expiry) > 2 * len(self._tree) + 16:  # mostly nodes that are gone
            self._expiry = [
                (r.expires_ms, r.key) for r in self._records() if r.expires_ms is not None
            ]
            heapq.heapify(self._expiry)

    def _forget(self, record: NodeRecord) -> None:
        for doc_id in set(record.doc_ids):
            keys = self._docs[record.owner, doc_id]
            del keys[record.key]
            if not keys:
                del self._docs[record.owner, doc_id]
