"""Plans an eviction from the queues of all shards; changes nothing.

Knows the order of queues, and how much of each owner may go. Does not know accounts or scripts.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sglang_ext.chunk_index import keys
from sglang_ext.chunk_index.codec import StoredNode, decode_node
from sglang_ext.chunk_index.identity import ChunkKey
from sglang_ext.chunk_index.index import NodeRecord
from sglang_ext.chunk_index.redis_calls import Calls
from sglang_ext.chunk_index.redis_commands import Command
from sglang_ext.chunk_index.redis_replies import as_bytes, as_float, as_list, as_pairs
from sglang_ext.chunk_index.redis_shards import Shards

_MAX_PAGE = 64


@dataclass(slots=True)
class Queue:
    """An owner's evictable nodes in one shard, read from the front.

    Attributes:
        shard: The shard.
        owner: The owner.
        page: Members to read next time.
        num_read: Members read so far.
        is_at_end: All were read.
        front: Read and not yet taken: priority and key.
    """

    shard: int
    owner: str
    page: int
    num_read: int = 0
    is_at_end: bool = False
    front: deque[tuple[float, ChunkKey]] = field(default_factory=deque)


@dataclass(frozen=True, slots=True)
class Candidate:
    """The next node of all queues.

    Attributes:
        queue: It stands there.
        key: Its key.
        node: None if it is not there any more.
    """

    queue: Queue
    key: ChunkKey
    node: StoredNode | None


def plan_victims(
    candidates: Iterator[Candidate], num_bytes: int, losses: Mapping[str, int | None]
) -> tuple[NodeRecord, ...]:
    """The first candidates that may go, until they have `num_bytes`; empty if they never do.

    Args:
        candidates: In the order of eviction.
        num_bytes: How much must go.
        losses: Most bytes that an owner may lose, None being all; others lose nothing.
    """
    plan: list[NodeRecord] = []
    left = dict(losses)
    num_planned_children: Counter[ChunkKey] = Counter()
    for candidate in candidates:
        node = candidate.node
        if node is None or node.is_protected or node.record.owner not in left:
            continue
        record = node.record
        if node.num_children != num_planned_children[record.key]:
            continue  # something below it stays
        most = left[record.owner]
        if most is not None:
            if record.payload_bytes > most:
                del left[record.owner]  # what follows of this owner stays as well
                continue
            left[record.owner] = most - record.payload_bytes
        plan.append(record)
        num_bytes -= record.payload_bytes
        if num_bytes <= 0:
            return tuple(plan)
        if record.parent is not None:
            num_planned_children[record.parent] += 1
    return ()


def merge_queues(calls: Calls, shards: Shards, queues: Sequence[Queue]) -> Iterator[Candidate]:
    """The nodes of all queues, lowest priority first; reads and decodes no more than it must."""
    values: dict[ChunkKey, bytes | None] = {}
    heap: list[tuple[float, int]] = []
    empty = list(range(len(queues)))
    while empty or heap:
        if empty:
            values.update(_read(calls, shards, [queues[place] for place in empty]))
            for place in empty:
                if queues[place].front:
                    heapq.heappush(heap, (queues[place].front[0][0], place))
            empty = []
            continue
        _, place = heapq.heappop(heap)
        queue = queues[place]
        _, key = queue.front.popleft()
        yield Candidate(queue, key, decode_node(key, values.pop(key, None)))
        if queue.front:
            heapq.heappush(heap, (queue.front[0][0], place))
        elif not queue.is_at_end:
            empty.append(place)


def _read(calls: Calls, shards: Shards, queues: Sequence[Queue]) -> dict[ChunkKey, bytes | None]:
    """Read the next page of each queue, and the nodes in it as stored; two round trips."""
    commands = []
    for queue in queues:
        name = keys.queue_key(queue.shard, queue.owner)
        last = queue.num_read + queue.page - 1
        commands.append(Command(name, ("ZRANGE", name, queue.num_read, last, "WITHSCORES")))
    for queue, reply in zip(queues, calls.run(commands), strict=True):
        page = [
            (as_float(score), ChunkKey(as_bytes(key))) for key, score in as_pairs(as_list(reply))
        ]
        queue.front.extend(page)
        queue.num_read += len(page)
        queue.is_at_end = len(page) < queue.page
        queue.page = min(2 * queue.page, _MAX_PAGE)
    return shards.values(calls, [key for queue in queues for _, key in queue.front])
