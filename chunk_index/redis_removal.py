"""How nodes leave a shared index: removed, evicted, expired, invalidated, cleared.

Knows scripts of at most `BATCH` nodes, repeated shard by shard, and that accounts follow. Does not
know payloads: the caller drops those of the records that are returned.

What a script removed is returned even if a later one fails; then accounts may be wrong until they
are reconciled. If a reply is lost, nobody knows whether its nodes left, and their payloads stay
behind, to be swept.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from sglang_ext.chunk_index import keys
from sglang_ext.chunk_index.codec import decode_node, identity_of
from sglang_ext.chunk_index.identity import ChunkKey
from sglang_ext.chunk_index.index import NodeRecord
from sglang_ext.chunk_index.keys import NUM_SHARDS
from sglang_ext.chunk_index.redis_accounts import Accounts
from sglang_ext.chunk_index.redis_calls import Calls
from sglang_ext.chunk_index.redis_commands import Command
from sglang_ext.chunk_index.redis_connection import Reply
from sglang_ext.chunk_index.redis_replies import as_bytes, as_int, as_list, as_pairs
from sglang_ext.chunk_index.redis_scripts import Scripts, Sender
from sglang_ext.chunk_index.redis_shards import Shards, Share, by_shard, sum_shares
from sglang_ext.chunk_index.redis_victims import Candidate, Queue, merge_queues, plan_victims
from sglang_ext.errors import IndexUnavailable

BATCH = 64
"""Nodes of one script call, which then runs for about a millisecond."""

_SCRIPTS_AT_ONCE = 2  # of one round trip, so that others are served between
_MAX_QUEUES = 256  # beyond it, victims come from that many queues taken at random


class Removal:
    """The removing methods of `ChunkIndex`, which says what each does."""

    def __init__(
        self, calls: Calls, sender: Sender, scripts: Scripts, shards: Shards, accounts: Accounts
    ) -> None:
        self._calls = calls
        self._sender = sender
        self._scripts = scripts
        self._shards = shards
        self._accounts = accounts
        self._random = random.Random(sender.id)

    def remove(self, key: ChunkKey) -> tuple[NodeRecord, ...]:
        """Remove a node and all below it; returns the records that left."""
        shard = keys.shard_of(key)
        left: list[NodeRecord] = []
        while not self._remove_batch(shard, [key], left):
            pass
        return tuple(left)

    def victims(self, num_bytes: int, owner: str, *, is_own: bool) -> tuple[NodeRecord, ...]:
        """Plan an eviction, children before parents; empty if impossible; changes nothing.

        With very many queues it looks at some of them, taken at random: shards are alike.
        """
        if num_bytes <= 0:
            return ()
        shares = self._shards.shares()
        losses: Mapping[str, int | None] = {owner: None}
        if not is_own:
            losses = _losses(sum_shares(shares), self._accounts.quotas(), owner)
        places = [
            (shard, name)
            for shard, owners in enumerate(shares)
            for name in owners
            if name in losses
        ]
        page = _first_page(num_bytes, _total(shares), len(places))
        if len(places) > _MAX_QUEUES:
            some = self._random.sample(places, _MAX_QUEUES)
            plan = self._plan(some, page * len(places) // _MAX_QUEUES, num_bytes, losses)
            if plan:
                return plan
        return self._plan(places, page, num_bytes, losses)

    def evict(self, records: Sequence[NodeRecord]) -> tuple[NodeRecord, ...]:
        """Remove each node that is still evictable, in order; returns those that left."""
        planned = {record.key: record for record in records}
        batches: list[tuple[int, list[ChunkKey]]] = []
        for shard, wanted in by_shard(planned).items():
            for start in range(0, len(wanted), BATCH):
                batches.append((shard, wanted[start : start + BATCH]))
        left: list[NodeRecord] = []
        for start in range(0, len(batches), _SCRIPTS_AT_ONCE):
            commands = [
                self._sender.on_shard(
                    self._scripts.evict,
                    shard,
                    [word for key in wanted for word in (key, identity_of(planned[key]))],
                )
                for shard, wanted in batches[start : start + _SCRIPTS_AT_ONCE]
            ]
            self._carry_out(commands, left)
        gone = {record.key: record for record in left}
        return tuple(gone[key] for key in planned if key in gone)

    def expire(self, now_ms: int, limit: int) -> tuple[NodeRecord, ...]:
        """Remove expired nodes and all below them; returns the records that left."""
        names = {shard: keys.expiry_key(shard) for shard in range(NUM_SHARDS)}
        due = self._shards.having(
            {
                shard: Command(name, ("ZCOUNT", name, "-inf", now_ms))
                for shard, name in names.items()
            }
        )
        return self._drain(
            due,
            lambda shard, most: self._sender.on_shard(self._scripts.expire, shard, (most, now_ms)),
            limit,
        )

    def invalidate(self, doc_id: str, owner: str, limit: int) -> tuple[NodeRecord, ...]:
        """Remove an owner's nodes that name a document, and all below; returns those that left."""
        names = {shard: keys.document_key(shard, owner, doc_id) for shard in range(NUM_SHARDS)}
        due = self._shards.having(
            {shard: Command(name, ("EXISTS", name)) for shard, name in names.items()}
        )
        return self._drain(
            due,
            lambda shard, most: self._sender.on_shard(
                self._scripts.invalidate, shard, (most,), names[shard]
            ),
            limit,
        )

    def clear(
        self, limit: int, owner: str | None = None, model: str | None = None
    ) -> tuple[NodeRecord, ...]:
        """Remove every node, or those of an owner, of a model, of both; returns those that left."""
        left: list[NodeRecord] = []
        try:
            for shard, page in self._pages_to_clear(owner, model):
                while page and len(left) < limit and not self._remove_batch(shard, page, left):
                    pass
                if len(left) >= limit:
                    break
        except IndexUnavailable:
            if not left:
                raise
        return tuple(left)

    def _plan(
        self,
        places: Sequence[tuple[int, str]],
        page: int,
        num_bytes: int,
        losses: Mapping[str, int | None],
    ) -> tuple[NodeRecord, ...]:
        """An eviction from some queues; forgets members of them that are not there any more."""
        absent: dict[bytes, list[ChunkKey]] = {}

        def noting_absent(candidates: Iterator[Candidate]) -> Iterator[Candidate]:
            for candidate in candidates:
                if candidate.node is None:
                    name = keys.queue_key(candidate.queue.shard, candidate.queue.owner)
                    absent.setdefault(name, []).append(candidate.key)
                yield candidate

        queues = [Queue(shard, owner, page) for shard, owner in places]
        candidates = noting_absent(merge_queues(self._calls, self._shards, queues))
        plan = plan_victims(candidates, num_bytes, losses)
        for name, members in absent.items():
            self._prune(name, members)
        return plan

    def _pages_to_clear(
        self, owner: str | None, model: str | None
    ) -> Iterator[tuple[int, list[ChunkKey]]]:
        """The keys to remove, page by page, each with its shard."""
        models = None if model is None else self._shards.models()
        for shard, shares in enumerate(self._shards.shares()):
            if models is not None and model not in models[shard]:
                continue
            for name in shares:
                if owner in (None, name):
                    for page in self._pages_of(shard, name, model):
                        yield shard, page

    def _pages_of(self, shard: int, owner: str, model: str | None) -> Iterator[list[ChunkKey]]:
        """An owner's keys in a shard, of one model or of all; forgets those without a node."""
        for place, page in self._shards.members(shard, owner):
            nodes = self._shards.nodes(page)
            self._prune(place, [key for key, node in nodes.items() if node is None])
            yield [
                key
                for key, node in nodes.items()
                if node is not None and model in (None, node.record.model)
            ]

    def _prune(self, place: bytes, members: Sequence[ChunkKey]) -> None:
        """Forget members of a queue that are not there, as after keys were deleted by hand."""
        if members:
            shard = keys.shard_of(members[0])
            self._calls.run(
                [self._sender.on_shard(self._scripts.prune, shard, members[:BATCH], place)]
            )

    def _remove_batch(self, shard: int, wanted: Sequence[ChunkKey], left: list[NodeRecord]) -> bool:
        """Remove some nodes and what is below; returns whether nothing of them remains."""
        command = self._sender.on_shard(self._scripts.remove, shard, (BATCH, *wanted))
        (is_done,) = self._carry_out([command], left)
        return is_done

    def _drain(
        self, due: Sequence[int], step: Callable[[int, int], Command], limit: int
    ) -> tuple[NodeRecord, ...]:
        """Repeat a bounded removal on shards until it is done there, or `limit` nodes left."""
        left: list[NodeRecord] = []
        waiting = list(due)
        while waiting and len(left) < limit:
            now, waiting = waiting[:_SCRIPTS_AT_ONCE], waiting[_SCRIPTS_AT_ONCE:]
            most = min(max((limit - len(left)) // len(now), 1), BATCH)
            are_done = self._carry_out([step(shard, most) for shard in now], left)
            waiting += [shard for shard, is_done in zip(now, are_done, strict=True) if not is_done]
        return tuple(left)

    def _carry_out(self, commands: Sequence[Command], left: list[NodeRecord]) -> list[bool]:
        """Run removals, and add the records that left to `left`; returns whether each is done.

        One that fails is done, so that nobody waits for it.

        Raises:
            IndexUnavailable: One failed, and nothing is in `left`, so that nothing is lost by that.
        """
        failure: IndexUnavailable | None = None
        are_done: list[bool] = []
        removed: Counter[str] = Counter()
        for reply in self._attempt(commands):
            if isinstance(reply, IndexUnavailable):
                failure = reply
                are_done.append(True)
                continue
            is_done, records = _as_removal(reply)
            are_done.append(is_done)
            left += records
            for record in records:
                removed[record.owner] -= record.payload_bytes
        if removed:
            self._accounts.settle(removed)
        if failure is not None and not left:
            raise failure
        return are_done

    def _attempt(self, commands: Sequence[Command]) -> list[Reply | IndexUnavailable]:
        """Replies, and failures in their places, also if nothing could be sent."""
        try:
            return self._calls.attempt(commands)
        except IndexUnavailable as exc:
            return [exc for _ in commands]


def _losses(
    shares: Mapping[str, Share], quotas: Mapping[str, int], winner: str
) -> dict[str, int | None]:
    """What each owner may lose for `winner`, None meaning all; see `ChunkIndex.victims`."""
    losses: dict[str, int | None] = {}
    for owner, share in shares.items():
        quota = quotas.get(owner)
        if owner == winner or quota is None:
            losses[owner] = None
        elif share.num_bytes > quota:
            losses[owner] = share.num_bytes - quota
    return losses


def _total(shares: Sequence[Mapping[str, Share]]) -> Share:
    owners = sum_shares(shares).values()
    return Share(sum(o.num_nodes for o in owners), sum(o.num_bytes for o in owners))


def _first_page(num_bytes: int, total: Share, num_queues: int) -> int:
    """Members to read of each queue at first, if nodes and priorities are spread evenly."""
    num_victims = num_bytes * total.num_nodes // max(total.num_bytes, 1) + 1
    return min(2 * num_victims // max(num_queues, 1) + 2, BATCH)


def _as_removal(reply: Reply) -> tuple[bool, list[NodeRecord]]:
    """What a removing script returns: whether it is done, and the records that left."""
    is_done, *flat = as_list(reply)
    records: list[NodeRecord] = []
    for key, value in as_pairs(flat):
        node = decode_node(ChunkKey(as_bytes(key)), as_bytes(value))
        if node is not None:  # else it is damaged, and nobody can say what its payload was
            records.append(node.record)
    return as_int(is_done) == 1, records
