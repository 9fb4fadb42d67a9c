"""The radix tree of chunk keys: parents and children, what protects a node, eviction order.

Knows records and the order of use. Does not know documents, expiry times other than to stop a match
at them, readers' identities, payloads or threads.

A node is *protected* while it is held or pinned or a child of it is protected; all others stand in
one of two queues, each from least to most recently used:

    evicted first → | fresh: not hit since stored | proven: hit since | → evicted last

A use of a node is also a use of its ancestors, and they are queued after it. So every node stands
behind all nodes below it, any leading part of the queues is a leaf-first plan, and eviction needs
no search. Two queues as in segmented LRU (Karedla, Love, Wherry: Caching strategies to improve disk
system performance, IEEE Computer 27(3), 1994).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from sglang_ext.chunk_index.identity import ChunkKey
from sglang_ext.chunk_index.index import NodeRecord

_PROVEN_SHARE = 0.8  # of evictable bytes; the rest gives new nodes time to be hit


@dataclass(slots=True, eq=False)
class Node:
    """A record in the tree with its links and statistics; changed by the tree alone."""

    record: NodeRecord
    parent: Node | None = field(repr=False)
    children: dict[ChunkKey, Node] = field(default_factory=dict, repr=False)
    num_protected_children: int = 0
    num_holds: int = 0
    num_hits: int = 0
    last_hit_ms: int | None = None
    is_proven: bool = False

    @property
    def is_protected(self) -> bool:
        """Whether it, or a node below it, is held or pinned."""
        return self.num_holds > 0 or self.record.pinned or self.num_protected_children > 0


class _Queue:
    """Nodes from least to most recently used, and the sum of their bytes."""

    def __init__(self) -> None:
        self.nodes: OrderedDict[ChunkKey, Node] = OrderedDict()
        self.num_bytes = 0

    def append(self, node: Node) -> None:
        self.nodes[node.record.key] = node
        self.num_bytes += node.record.payload_bytes

    def remove(self, node: Node) -> None:
        del self.nodes[node.record.key]
        self.num_bytes -= node.record.payload_bytes


class RadixTree:
    """All nodes below all roots; a node's key already tells which root it is below."""

    def __init__(self) -> None:
        self._nodes: dict[ChunkKey, Node] = {}
        self._num_bytes = 0
        self._fresh = _Queue()
        self._proven = _Queue()

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    @property
    def num_bytes(self) -> int:
        """Payload bytes of all nodes."""
        return self._num_bytes

    @property
    def evictable_bytes(self) -> int:
        """Payload bytes of the nodes that nothing protects."""
        return self._fresh.num_bytes + self._proven.num_bytes

    def get(self, key: ChunkKey) -> Node | None:
        """The node of that key. Changes nothing."""
        return self._nodes.get(key)

    def match(self, path: Sequence[ChunkKey], now_ms: int) -> int:
        """Number of leading keys of `path` that are present, linked and unexpired.

        Modifies statistics and recency of those.
        """
        matched = self._leading_nodes(path, now_ms)
        for node in reversed(matched):
            if not node.is_protected:
                self._queue_of(node).remove(node)
            node.num_hits += 1
            node.last_hit_ms = now_ms
            node.is_proven = True
            if not node.is_protected:
                self._queue_of(node).append(node)
        return len(matched)

    def insert(self, record: NodeRecord) -> Node | None:
        """Add a node below its parent, which counts as used; None if the parent is absent.

        The key must be new.
        """
        assert record.key not in self._nodes, "a key is inserted once"
        parent = None if record.parent is None else self._nodes.get(record.parent)
        if record.parent is not None and parent is None:
            return None
        node = Node(record, parent)
        self._nodes[record.key] = node
        self._num_bytes += record.payload_bytes
        if parent is not None:
            parent.children[record.key] = node
        self._protect_ancestors(node)
        if not node.is_protected:
            self._unprotect(node)
        return node

    def remove(self, top: Node) -> tuple[Node, ...]:
        """Take a node and all below it out of the tree; returns them, children before parents."""
        removed = _subtree(top)
        for node in removed:
            if not node.is_protected:
                self._queue_of(node).remove(node)
            del self._nodes[node.record.key]
            self._num_bytes -= node.record.payload_bytes
        if top.parent is not None:
            del top.parent.children[top.record.key]
        if top.is_protected:
            self._unprotect_ancestors(top)
        for node in removed:
            node.parent = None
            node.children.clear()
        return removed

    def hold(self, node: Node) -> None:
        """Count one more reader of a node."""
        was_protected = node.is_protected
        node.num_holds += 1
        if not was_protected:
            self._queue_of(node).remove(node)
            self._protect_ancestors(node)

    def release(self, node: Node) -> None:
        """Count one reader less; the last one's leaving is a use."""
        node.num_holds -= 1
        if not node.is_protected:
            self._unprotect(node)

    def victims(self, num_bytes: int) -> tuple[Node, ...]:
        """The nodes to evict for at least `num_bytes`, in order; empty if that is impossible.

        Changes nothing. Time grows with the number of victims only.
        """
        if not 0 < num_bytes <= self.evictable_bytes:
            return ()
        plan: list[Node] = []
        freed = 0
        for node in chain(self._fresh.nodes.values(), self._proven.nodes.values()):
            plan.append(node)
            freed += node.record.payload_bytes
            if freed >= num_bytes:
                break
        return tuple(plan)

    def evict(self, plan: Sequence[Node]) -> None:
        """Remove planned victims, in order, then let the longest unused proven nodes go fresh.

        Without that a past working set, once proven, would leave no room for new nodes to be hit.
        """
        for node in plan:
            assert not node.is_protected, "a victim is unprotected"
            assert not node.children, "a victim is a leaf when its turn comes"
            self.remove(node)
        while self._proven.nodes:
            oldest = next(iter(self._proven.nodes.values()))
            left = self._proven.num_bytes - oldest.record.payload_bytes
            if left < _PROVEN_SHARE * self.evictable_bytes:
                break
            self._proven.remove(oldest)
            oldest.is_proven = False
            self._fresh.append(oldest)

    def check_integrity(self) -> None:
        """Verify links, protection counts, queues, their order and all sums.

        Raises:
            AssertionError: One does not hold.
        """
        queued = [*self._fresh.nodes, *self._proven.nodes]
        position = {key: index for index, key in enumerate(queued)}
        assert len(position) == len(queued), "no node stands in both queues"
        assert position.keys() == {k for k, n in self._nodes.items() if not n.is_protected}
        for key, node in self._nodes.items():
            assert node.record.key == key
            self._check_links(node)
            if not node.is_protected:
                assert key in self._queue_of(node).nodes
                assert all(position[child] < position[key] for child in node.children)
        assert self._num_bytes == sum(node.record.payload_bytes for node in self)
        for queue in (self._fresh, self._proven):
            total = sum(node.record.payload_bytes for node in queue.nodes.values())
            assert queue.num_bytes == total

    def _check_links(self, node: Node) -> None:
        if node.parent is None:
            assert node.record.parent is None
        else:
            assert node.record.parent == node.parent.record.key
            assert node.parent.children[node.record.key] is node
            assert self._nodes[node.record.parent] is node.parent
        for key, child in node.children.items():
            assert self._nodes[key] is child
            assert child.parent is node
        protected = sum(child.is_protected for child in node.children.values())
        assert node.num_protected_children == protected
        assert node.num_holds >= 0

    def _leading_nodes(self, path: Sequence[ChunkKey], now_ms: int) -> list[Node]:
        found: list[Node] = []
        parent: Node | None = None
        for key in path:
            node = self._nodes.get(key)
            if node is None or node.parent is not parent or node.record.is_expired(now_ms):
                break
            found.append(node)
            parent = node
        return found

    def _queue_of(self, node: Node) -> _Queue:
        return self._proven if node.is_proven else self._fresh

    def _protect_ancestors(self, node: Node) -> None:
        """Count a newly protected node in its parent, and so on up to one protected already."""
        while (parent := node.parent) is not None:
            was_protected = parent.is_protected
            parent.num_protected_children += 1
            if was_protected:
                return
            self._queue_of(parent).remove(parent)
            node = parent

    def _unprotect(self, node: Node) -> None:
        """Queue a node that nothing protects any more, as the most recently used."""
        self._queue_of(node).append(node)
        self._unprotect_ancestors(node)

    def _unprotect_ancestors(self, node: Node) -> None:
        """Undo `_protect_ancestors`; queues each ancestor behind the one below it."""
        while (parent := node.parent) is not None:
            parent.num_protected_children -= 1
            if parent.is_protected:
                return
            self._queue_of(parent).append(parent)
            node = parent


def _subtree(top: Node) -> tuple[Node, ...]:
    """A node and all below it, children before parents; a loop, for chains may be long."""
    found = [top]
    for node in found:  # grows while it is read
        found.extend(node.children.values())
    return tuple(reversed(found))
