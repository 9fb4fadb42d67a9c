"""The radix tree of chunk keys: parents and children, what protects a node, eviction order.

Knows records and the order of use. Does not know documents, quotas, expiry times other than to stop
a match at them, readers' identities, payloads, clocks or threads.

A node is *protected* while it is held or pinned or a child of it is protected. All others stand in
a queue by their priority, see `policy`, whose clock counts uses here. Owners that were set apart
have a queue each, all others share one:

    evicted first → | lowest priority . . . . . . . . . highest priority | → evicted last
                       deepest nodes        their ancestors, always behind them

A priority is one integer, `(time of last use + bonus) << 40 | serial number`. So no two are equal,
and what is lifted above its child takes the child's value and a newer number. Every node, queued or
not, is above all nodes below it: any leading part of the queues is a leaf-first plan, and eviction
needs no search.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sortedcontainers import SortedDict

from sglang_ext.chunk_index import policy
from sglang_ext.chunk_index.identity import ChunkKey
from sglang_ext.chunk_index.index import NodeRecord

_START_AGE = 64.0
"""Uses, until the first victims tell. Small, because what is hit before then keeps its bonus: with
1024, fifty nodes hit once and never again left no room for new ones in the next 500 accesses, with
64 it takes ten. In a large index it is soon forgotten, for the mean follows some hundred victims.
"""

_SERIAL_BITS = 40


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
    last_use: int = 0
    priority: int = 0

    @property
    def is_protected(self) -> bool:
        """Whether it, or a node below it, is held or pinned."""
        return self.num_holds > 0 or self.record.pinned or self.num_protected_children > 0


class _Queue:
    """Unprotected nodes by priority, the sum of their bytes, and how old its victims were.

    The age is the queue's own: an owner with a small quota, whose nodes leave soon, must not make
    the hits of others count less.
    """

    def __init__(self) -> None:
        self.nodes: SortedDict = SortedDict()  # priority → Node
        self.num_bytes = 0
        self.age = _START_AGE

    def add(self, node: Node) -> None:
        self.nodes[node.priority] = node
        self.num_bytes += node.record.payload_bytes

    def remove(self, node: Node) -> None:
        del self.nodes[node.priority]
        self.num_bytes -= node.record.payload_bytes

    def leading(self, max_bytes: int) -> Iterator[Node]:
        """Nodes in order, up to the first that `max_bytes` has no room for."""
        for node in self.nodes.values():
            max_bytes -= node.record.payload_bytes
            if max_bytes < 0:
                return
            yield node


class RadixTree:
    """All nodes below all roots; a node's key already tells which root it is below."""

    def __init__(self) -> None:
        self._nodes: dict[ChunkKey, Node] = {}
        self._num_bytes = 0
        self._shared = _Queue()
        self._apart: dict[str, _Queue] = {}  # by owner
        self._time = 0  # uses so far
        self._serial = 0
        self._mean_cost = 0.0

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
        return self._shared.num_bytes + sum(queue.num_bytes for queue in self._apart.values())

    @property
    def owners_apart(self) -> tuple[str, ...]:
        """Owners that `set_apart` gave a queue of their own."""
        return tuple(self._apart)

    def get(self, key: ChunkKey) -> Node | None:
        """The node of that key. Changes nothing."""
        return self._nodes.get(key)

    def leading(self, path: Sequence[ChunkKey], now_ms: int) -> list[Node]:
        """The nodes of leading keys that are present, linked and unexpired. Changes nothing."""
        found: list[Node] = []
        parent: Node | None = None
        for key in path:
            node = self._nodes.get(key)
            if node is None or node.parent is not parent or node.record.is_expired(now_ms):
                break
            found.append(node)
            parent = node
        return found

    def match(self, path: Sequence[ChunkKey], now_ms: int) -> list[Node]:
        """As `leading`; modifies statistics and recency of what it returns.

        The deepest is used first, so that parents are used after their children.
        """
        matched = self.leading(path, now_ms)
        for node in matched:
            node.num_hits += 1
            node.last_hit_ms = now_ms
        self._use(matched)
        return matched

    def insert(self, record: NodeRecord) -> Node | None:
        """Add a node below its parent, which counts as used; None if the parent is absent.

        The key must be new.
        """
        assert record.key not in self._nodes, "a key is inserted once"
        parent = None if record.parent is None else self._nodes.get(record.parent)
        if record.parent is not None and parent is None:
            return None
        self._learn_cost(record)
        node = Node(record, parent)
        self._nodes[record.key] = node
        self._num_bytes += record.payload_bytes
        node.priority = self._next_priority(node)
        if parent is not None:
            parent.children[record.key] = node
            self._use([parent])
            self._lift_ancestors(node)
        if node.is_protected:
            self._protect_ancestors(node)
        else:
            self._queue_of(node).add(node)
        return node

    def replace(self, node: Node, record: NodeRecord) -> None:
        """Give a node a new record of the same key, parent, size and owner; pins take effect."""
        was_protected = node.is_protected
        node.record = record
        if node.is_protected and not was_protected:
            self._queue_of(node).remove(node)
            self._protect_ancestors(node)
        elif was_protected and not node.is_protected:
            self._unprotect(node)

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
        if node.num_holds == 1:
            self._use([node])
        node.num_holds -= 1
        if not node.is_protected:
            self._unprotect(node)

    def set_apart(self, owner: str) -> None:
        """Give an owner a queue of its own; looks at every node in the shared one."""
        if owner not in self._apart:
            self._apart[owner] = _Queue()
            self._requeue(self._shared, owner)

    def set_together(self, owner: str) -> None:
        """Undo `set_apart`, if it was done."""
        queue = self._apart.pop(owner, None)
        if queue is not None:
            self._requeue(queue, owner)

    def victims(self, num_bytes: int, limits: Mapping[str, int]) -> tuple[Node, ...]:
        """The nodes to evict for at least `num_bytes`, in order; empty if that is impossible.

        Changes nothing. Time grows with the number of victims and of `limits` only, unless nodes of
        one owner stand below another's.

        Args:
            num_bytes: Bytes wanted.
            limits: Owners set apart that may lose nodes, and the most bytes each may lose. Owners
                not set apart may lose everything.
        """
        parts = [(self._apart[owner], most) for owner, most in limits.items()]
        parts.append((self._shared, self._shared.num_bytes))
        if num_bytes > sum(min(queue.num_bytes, most) for queue, most in parts):
            return ()
        queued = [queue.leading(most) for queue, most in parts]
        return _plan(num_bytes, heapq.merge(*queued, key=lambda node: node.priority))

    def victims_of(self, owner: str, num_bytes: int) -> tuple[Node, ...]:
        """As `victims`, of one owner; looks at others' nodes too if it is not set apart."""
        queue = self._apart.get(owner, self._shared)
        if num_bytes > queue.num_bytes:
            return ()
        return _plan(num_bytes, (n for n in queue.nodes.values() if n.record.owner == owner))

    def evict(self, victim: Node) -> None:
        """Remove an unprotected leaf; modifies the running mean of victims' ages too."""
        assert not victim.is_protected, "a victim is unprotected"
        assert not victim.children, "a victim is a leaf when its turn comes"
        queue = self._queue_of(victim)
        queue.age = policy.smoothed(queue.age, self._time - victim.last_use)
        self.remove(victim)

    def check_integrity(self) -> None:
        """Verify links, protection counts, queues, their order and all sums.

        Raises:
            AssertionError: One does not hold.
        """
        queues = [self._shared, *self._apart.values()]
        queued = {node.record.key: node for q in queues for node in q.nodes.values()}
        assert queued == {key: node for key, node in self._nodes.items() if not node.is_protected}
        assert len({node.priority for node in self}) == len(self), "no two priorities are equal"
        for key, node in self._nodes.items():
            assert node.record.key == key
            self._check_links(node)
            assert all(child.priority < node.priority for child in node.children.values())
        assert self._num_bytes == sum(node.record.payload_bytes for node in self)
        for queue in queues:
            assert all(node.priority == at for at, node in queue.nodes.items())
            assert all(self._queue_of(node) is queue for node in queue.nodes.values())
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

    def _learn_cost(self, record: NodeRecord) -> None:
        if record.compute_us > 0:
            cost = record.compute_us / max(record.payload_bytes, 1)
            self._mean_cost = policy.smoothed(self._mean_cost, cost)

    def _next_priority(self, node: Node) -> int:
        """Count a use of a node; the priority it has by that."""
        self._time += 1
        node.last_use = self._time
        record = node.record
        worth = policy.worth(record.compute_us, record.payload_bytes, self._mean_cost)
        age = self._queue_of(node).age
        return self._unique(self._time + policy.bonus(node.num_hits, worth, age))

    def _unique(self, value: int) -> int:
        """A priority that no other node has, above all given before for the same value."""
        self._serial += 1
        return value << _SERIAL_BITS | self._serial

    def _use(self, path: Sequence[Node]) -> None:
        """Count a use of a part of a chain, the deepest first; nobody's priority falls by it."""
        below: Node | None = None
        for node in reversed(path):
            priority = max(node.priority, self._next_priority(node))
            if below is not None and priority < below.priority:
                priority = self._unique(below.priority >> _SERIAL_BITS)
            self._move(node, priority)
            below = node
        if path:
            self._lift_ancestors(path[0])

    def _lift_ancestors(self, node: Node) -> None:
        """Let no ancestor stand below a node whose priority rose."""
        while (parent := node.parent) is not None and parent.priority < node.priority:
            self._move(parent, self._unique(node.priority >> _SERIAL_BITS))
            node = parent

    def _move(self, node: Node, priority: int) -> None:
        """Give a node another priority, and its place by it if it is queued."""
        if node.is_protected:
            node.priority = priority
            return
        queue = self._queue_of(node)
        queue.remove(node)
        node.priority = priority
        queue.add(node)

    def _queue_of(self, node: Node) -> _Queue:
        return self._apart.get(node.record.owner, self._shared)

    def _requeue(self, queue: _Queue, owner: str) -> None:
        """Take an owner's nodes out of a queue and put them where they belong now."""
        for node in [n for n in queue.nodes.values() if n.record.owner == owner]:
            queue.remove(node)
            self._queue_of(node).add(node)

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
        """Queue a node that nothing protects any more, and ancestors that it alone protected."""
        self._queue_of(node).add(node)
        self._unprotect_ancestors(node)

    def _unprotect_ancestors(self, node: Node) -> None:
        """Undo `_protect_ancestors`."""
        while (parent := node.parent) is not None:
            parent.num_protected_children -= 1
            if parent.is_protected:
                return
            self._queue_of(parent).add(parent)
            node = parent


def _plan(num_bytes: int, nodes: Iterable[Node]) -> tuple[Node, ...]:
    """Leading nodes of at least `num_bytes`, without those that would leave a child behind."""
    plan: list[Node] = []
    num_planned: dict[ChunkKey, int] = {}  # children in the plan, by parent
    for node in nodes:
        if num_bytes <= 0:
            break
        if num_planned.get(node.record.key, 0) < len(node.children):
            continue  # a child of another owner stays
        plan.append(node)
        num_bytes -= node.record.payload_bytes
        if node.record.parent is not None:
            num_planned[node.record.parent] = num_planned.get(node.record.parent, 0) + 1
    return tuple(plan) if num_bytes <= 0 else ()


def _subtree(top: Node) -> tuple[Node, ...]:
    """A node and all below it, children before parents; a loop, for chains may be long."""
    found = [top]
    for node in found:  # grows while it is read
        found.extend(node.children.values())
    return tuple(reversed(found))
