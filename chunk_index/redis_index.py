"""`ChunkIndex` in Redis: one index for many servers and tenants.

Knows which script or read each method needs, and which accounts follow it. Does not know layouts
(`keys`, `codec`), connections (`redis_link`) or payloads.

    match ─────────── request path: one MGET, to each server of a cluster at once
    publish, ... ──── background: one script on one shard, then the accounts of owner and of all
    expire, clear ─── background: scripts of at most `BATCH` nodes, shard by shard

What a script removed is returned even if a later one fails; then accounts may be wrong until
`reconcile`. A reply that is lost is a node of which nobody knows whether it left: then its payload
stays behind, to be swept.
"""

from __future__ import annotations

import random
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from sglang_ext.chunk_index import keys, policy
from sglang_ext.chunk_index.codec import (
    decode_node,
    decode_record,
    encode_body,
    encode_record,
    identity_of,
)
from sglang_ext.chunk_index.hit_buffer import HitBuffer
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
)
from sglang_ext.chunk_index.keys import NUM_SHARDS
from sglang_ext.chunk_index.redis_accounts import Accounts
from sglang_ext.chunk_index.redis_changes import SENDER_BYTES, RedisChanges
from sglang_ext.chunk_index.redis_commands import Command, Script, call_script
from sglang_ext.chunk_index.redis_connection import Argument, Reply
from sglang_ext.chunk_index.redis_link import RedisLink
from sglang_ext.chunk_index.redis_replies import (
    as_bytes,
    as_int,
    as_list,
    as_optional_bytes,
    as_pairs,
    as_text,
)
from sglang_ext.chunk_index.redis_scan import scan_pages
from sglang_ext.chunk_index.redis_scripts import load_scripts
from sglang_ext.chunk_index.redis_shards import Shards, Share, by_shard
from sglang_ext.chunk_index.redis_victims import Candidate, Queue, merge_queues, plan_victims
from sglang_ext.errors import IndexUnavailable

BATCH = 64
"""Nodes of one script call, which then runs for about a millisecond."""

_SCRIPTS_AT_ONCE = 16  # of one round trip, so that others are served between
_MAX_QUEUES = 256  # beyond it, victims come from that many queues taken at random
_MAX_ATTEMPTS = 8  # to annotate a node that others annotate at the same time
_PUBLICATIONS = (Publication.STORED, Publication.PRESENT, Publication.ORPHAN, Publication.BUSY)


class RedisIndex:
    """The shared index as one process sees it; see `ChunkIndex` for what each method does."""

    def __init__(self, link: RedisLink, budget_bytes: int | None = None) -> None:
        """Ask nothing yet.

        Args:
            link: The way to Redis; the caller closes it.
            budget_bytes: Most bytes that this process lets published and reserved be together;
                should be the same for all.
        """
        self._link = link
        self._calls = link.background()
        self._scripts = load_scripts()
        self._shards = Shards(link)
        self._accounts = Accounts(self._calls, self._scripts, budget_bytes)
        self._sender = secrets.token_bytes(SENDER_BYTES)
        self._hits = HitBuffer()
        self._mean_cost = 0.0
        self._random = random.Random(self._sender)
        self._changes = RedisChanges(link, self._sender)

    @property
    def changes(self) -> RedisChanges:
        """What others announce."""
        return self._changes

    def match(
        self, paths: Sequence[Sequence[ChunkKey]], now_ms: int
    ) -> tuple[tuple[NodeRecord, ...], ...]:
        """Leading unexpired nodes of each path; hits are counted here until `flush`."""
        wanted = list(dict.fromkeys(key for path in paths for key in path))
        values = self._shards.values(self._link.request_path(), wanted)
        found = tuple(_leading(path, values, now_ms) for path in paths)
        self._hits.add([record.key for records in found for record in records], now_ms)
        return found

    def touch(self, keys: Sequence[ChunkKey], now_ms: int) -> None:
        """Count a hit of each key, later; parents before their children."""
        self._hits.add(keys, now_ms)

    def flush(self) -> None:
        """Write hit statistics that were kept back; modifies statistics and recency.

        Raises:
            IndexUnavailable: Some could not be written; they are lost.
        """
        hits = {hit.key: hit for hit in reversed(self._hits.take())}
        batches: list[Command] = []
        for shard, touched in by_shard(hits).items():
            for start in range(0, len(touched), BATCH):
                batch = [hits[key] for key in touched[start : start + BATCH]]
                words = [word for hit in batch for word in (hit.key, hit.num_hits, hit.last_ms)]
                batches.append(self._on_shard(self._scripts.touch, shard, words))
        failure: IndexUnavailable | None = None
        for start in range(0, len(batches), _SCRIPTS_AT_ONCE):
            for reply in self._calls.attempt(batches[start : start + _SCRIPTS_AT_ONCE]):
                failure = reply if isinstance(reply, IndexUnavailable) else failure
        if failure is not None:
            raise failure

    def reserve(self, owner: str, num_bytes: int, now_ms: int) -> Reservation | Shortage:
        """Set bytes aside within quota and budget; modifies the accounts."""
        return self._accounts.reserve(owner, num_bytes, now_ms)

    def cancel(self, reservation: Reservation) -> None:
        """Give reserved bytes back; modifies the accounts."""
        self._accounts.cancel(reservation)

    def publish(
        self, record: NodeRecord, now_ms: int, reservation: Reservation | None = None
    ) -> Publication:
        """Add a node below a present parent, or say why not; ends the reservation."""
        shard = keys.shard_of(record.key)
        name = keys.node_key(record.key)
        words = (record.key, encode_record(record), now_ms, self._mean_cost)
        (reply,) = self._calls.run([self._on_shard(self._scripts.publish, shard, words, name)])
        publication = _PUBLICATIONS[as_int(reply)]
        is_stored = publication is Publication.STORED
        if is_stored and record.compute_us > 0:
            cost = record.compute_us / max(record.payload_bytes, 1)
            self._mean_cost = policy.smoothed(self._mean_cost, cost)
        if is_stored or reservation is not None:
            num_bytes = record.payload_bytes if is_stored else 0
            self._accounts.settle({record.owner: num_bytes}, reservation)
        return publication

    def annotate(
        self,
        key: ChunkKey,
        doc_ids: Sequence[str] = (),
        expires_ms: int | None = None,
        *,
        pinned: bool = False,
    ) -> NodeRecord | None:
        """Add documents, put expiry off, pin; None for `expires_ms` leaves it as it is."""
        name = keys.node_key(key)
        for _ in range(_MAX_ATTEMPTS):
            node = decode_node(key, as_optional_bytes(self._calls.call("GET", name)))
            if node is None or node.is_leaving:
                return None
            record = _annotated(node.record, doc_ids, expires_ms, pinned)
            if record == node.record:
                return record
            words = (key, node.body, encode_body(record), int(pinned))
            script = self._scripts.annotate
            (reply,) = self._calls.run([self._on_shard(script, keys.shard_of(key), words, name)])
            if reply is None or isinstance(reply, bytes):
                return decode_record(key, reply)
        raise IndexUnavailable("a node changed each time it was annotated")

    def unpin(self, key: ChunkKey) -> NodeRecord | None:
        """Let a node be evicted again; modifies its record."""
        script = self._on_shard(self._scripts.unpin, keys.shard_of(key), (key,))
        (reply,) = self._calls.run([script])
        return decode_record(key, as_optional_bytes(reply))

    def show(self, key: ChunkKey) -> NodeView | None:
        """One node that is not being removed; changes nothing. Hits lag until `flush`."""
        value = as_optional_bytes(self._calls.call("GET", keys.node_key(key)))
        node = decode_node(key, value)
        return None if node is None or node.is_leaving else node.view()

    def scan(self) -> Iterator[NodeView]:
        """Every node, read page by page; changes nothing."""
        for shard, shares in enumerate(self._shards.shares()):
            for owner in shares:
                for _, page in self._shards.members(shard, owner):
                    for node in self._shards.nodes(page).values():
                        if node is not None and not node.is_leaving:
                            yield node.view()

    def remove(self, key: ChunkKey) -> tuple[NodeRecord, ...]:
        """Remove a node and all below it; returns the records that left."""
        shard = keys.shard_of(key)
        left: list[NodeRecord] = []
        is_done = False
        while not is_done:
            is_done, batch = self._remove_batch(shard, [key], bool(left))
            left += batch
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
            losses = _losses(_sum(shares), self._accounts.quotas(), owner)
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
                self._on_shard(
                    self._scripts.evict,
                    shard,
                    [word for key in wanted for word in (key, identity_of(planned[key]))],
                )
                for shard, wanted in batches[start : start + _SCRIPTS_AT_ONCE]
            ]
            for _, batch in self._carry_out(commands, bool(left)):
                left += batch
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
            lambda shard, most: self._on_shard(self._scripts.expire, shard, (most, now_ms)),
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
            lambda shard, most: self._on_shard(
                self._scripts.invalidate, shard, (most,), names[shard]
            ),
            limit,
        )

    def clear(
        self, limit: int, owner: str | None = None, model: str | None = None
    ) -> tuple[NodeRecord, ...]:
        """Remove every node, or those of an owner, of a model, of both; returns those that left."""
        left: list[NodeRecord] = []
        for shard, page in self._pages_to_clear(owner, model):
            is_done = False
            while not is_done and len(left) < limit:
                is_done, batch = self._remove_batch(shard, page, bool(left))
                left += batch
            if len(left) >= limit:
                break
        return tuple(left)

    def set_quota(self, owner: str, num_bytes: int | None) -> None:
        """Change an owner's quota; modifies the accounts."""
        self._accounts.set_quota(owner, num_bytes)

    def usage(self) -> Mapping[str, Usage]:
        """Every owner that has nodes or a quota; changes nothing."""
        shares = _sum(self._shards.shares())
        quotas = self._accounts.quotas()
        nothing = Share(0, 0)
        usage: dict[str, Usage] = {}
        for owner in shares.keys() | quotas.keys():
            share = shares.get(owner, nothing)
            usage[owner] = Usage(share.num_nodes, share.num_bytes, quotas.get(owner))
        return usage

    def stats(self) -> IndexStats:
        """Totals; changes nothing."""
        total, reserved_bytes = self._shards.totals()
        return IndexStats(
            num_nodes=total.num_nodes,
            num_bytes=total.num_bytes,
            reserved_bytes=reserved_bytes,
            budget_bytes=self._accounts.budget_bytes,
        )

    def reconcile(self) -> int:
        """Recount the accounts from what is published, as after a crash; returns how many were off.

        Modifies accounts; ends reservations whose time is up by the clock of Redis.
        """
        seconds, _ = as_list(self._calls.call("TIME"))
        return self._accounts.reconcile(self._published_bytes, as_int(seconds) * 1000)

    def heartbeat(self, server_id: str, model: str, now_ms: int) -> None:
        """Say that a server lives and which model it serves; modifies the list of servers."""
        dead_ms = now_ms - keys.SERVER_S * 1000
        words = (server_id.encode(), model.encode(), now_ms, dead_ms)
        self._calls.run([call_script(self._scripts.heartbeat, (keys.SERVERS, keys.MODELS), words)])

    def servers(self, now_ms: int) -> dict[str, str]:
        """The model of every server that lives; changes nothing."""
        living: dict[str, str] = {}
        heard: dict[bytes, float] = {}
        for page in scan_pages(self._calls, "ZSCAN", keys.SERVERS):
            heard.update((as_bytes(server), float(as_bytes(at))) for server, at in as_pairs(page))
        for page in scan_pages(self._calls, "HSCAN", keys.MODELS):
            for server, model in as_pairs(page):
                if heard.get(as_bytes(server), 0) >= now_ms - keys.SERVER_S * 1000:
                    living[as_text(server)] = as_text(model)
        return living

    def check_integrity(self) -> None:
        """Verify every invariant; changes nothing. Reads everything."""
        from sglang_ext.chunk_index.redis_audit import audit

        audit(self._link)

    def _published_bytes(self) -> dict[str, int]:
        """The bytes of every owner that has nodes."""
        return {owner: share.num_bytes for owner, share in _sum(self._shards.shares()).items()}

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
        shares = self._shards.shares()
        models = self._shards.models() if model is not None else [{""}] * NUM_SHARDS
        for shard in range(NUM_SHARDS):
            if model is not None and model not in models[shard]:
                continue
            for name in shares[shard]:
                if owner in (None, name):
                    for place, page in self._shards.members(shard, name):
                        nodes = self._shards.nodes(page)
                        self._prune(place, [key for key, node in nodes.items() if node is None])
                        yield (
                            shard,
                            [
                                key
                                for key, node in nodes.items()
                                if node is not None and model in (None, node.record.model)
                            ],
                        )

    def _prune(self, place: bytes, members: Sequence[ChunkKey]) -> None:
        """Forget members of a queue that are not there, as after keys were deleted by hand."""
        if members:
            shard = keys.shard_of(members[0])
            self._calls.run([self._on_shard(self._scripts.prune, shard, members[:BATCH], place)])

    def _remove_batch(
        self, shard: int, wanted: Sequence[ChunkKey], has_left: bool
    ) -> tuple[bool, list[NodeRecord]]:
        """Remove some nodes and what is below; says whether nothing of them remains."""
        if not wanted:
            return True, []
        command = self._on_shard(self._scripts.remove, shard, (BATCH, *wanted))
        outcomes = self._carry_out([command], has_left)
        return outcomes[0] if outcomes else (True, [])

    def _drain(
        self, due: Sequence[int], step: Callable[[int, int], Command], limit: int
    ) -> tuple[NodeRecord, ...]:
        """Repeat a bounded removal on shards until it is done there, or `limit` nodes left."""
        left: list[NodeRecord] = []
        waiting = list(due)
        while waiting and len(left) < limit:
            now, waiting = waiting[:_SCRIPTS_AT_ONCE], waiting[_SCRIPTS_AT_ONCE:]
            most = min(max((limit - len(left)) // len(now), 1), BATCH)
            outcomes = self._carry_out([step(shard, most) for shard in now], bool(left))
            for shard, (is_done, batch) in zip(now, outcomes, strict=False):
                left += batch
                if not is_done:
                    waiting.append(shard)
        return tuple(left)

    def _carry_out(
        self, commands: Sequence[Command], has_left: bool
    ) -> list[tuple[bool, list[NodeRecord]]]:
        """Run removals; for each whether it is done, and the records that left by it.

        One that fails is done, so that nobody waits for it; it raises only if nothing left by any,
        here or (`has_left`) before, for then nothing is lost by that.
        """
        outcomes: list[tuple[bool, list[NodeRecord]]] = []
        failure: IndexUnavailable | None = None
        try:
            replies = self._calls.attempt(commands)
        except IndexUnavailable as exc:
            replies = [exc] * len(commands)
        for reply in replies:
            if isinstance(reply, IndexUnavailable):
                failure = reply
                outcomes.append((True, []))
            else:
                outcomes.append(_as_removal(reply))
        removed: Counter[str] = Counter()
        for _, records in outcomes:
            for record in records:
                removed[record.owner] -= record.payload_bytes
        if removed:
            self._accounts.settle(removed)
        elif failure is not None and not has_left:
            raise failure
        return outcomes

    def _on_shard(
        self, script: Script, shard: int, words: Sequence[Argument], *names: bytes
    ) -> Command:
        """A call of a script of a shard; see `lua/shard.lua`."""
        return call_script(script, (keys.totals_key(shard), *names), (self._sender, *words))


def _leading(
    path: Sequence[ChunkKey], values: Mapping[ChunkKey, bytes | None], now_ms: int
) -> tuple[NodeRecord, ...]:
    """The path's leading nodes that are there, linked and unexpired."""
    records: list[NodeRecord] = []
    parent: ChunkKey | None = None
    for key in path:
        record = decode_record(key, values[key])
        if record is None or record.parent != parent or record.is_expired(now_ms):
            break
        records.append(record)
        parent = key
    return tuple(records)


def _annotated(
    record: NodeRecord, doc_ids: Sequence[str], expires_ms: int | None, pinned: bool
) -> NodeRecord:
    """A record with what `ChunkIndex.annotate` adds to it."""
    if record.expires_ms is None or expires_ms is None:
        expires_ms = record.expires_ms
    else:
        expires_ms = max(record.expires_ms, expires_ms)
    return replace(
        record,
        doc_ids=tuple(dict.fromkeys((*record.doc_ids, *doc_ids)))[:MAX_DOC_IDS],
        expires_ms=expires_ms,
        pinned=record.pinned or pinned,
    )


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


def _sum(shares: Sequence[Mapping[str, Share]]) -> dict[str, Share]:
    """What each owner has in all shards."""
    total: dict[str, Share] = {}
    for shard in shares:
        for owner, share in shard.items():
            before = total.get(owner, Share(0, 0))
            total[owner] = Share(
                before.num_nodes + share.num_nodes, before.num_bytes + share.num_bytes
            )
    return total


def _total(shares: Sequence[Mapping[str, Share]]) -> Share:
    owners = _sum(shares).values()
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
