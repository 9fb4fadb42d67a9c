"""`ChunkIndex` in Redis: one index for many servers and tenants.

Knows which script or read each method needs, and which accounts follow it. Does not know layouts
(`keys`, `codec`), connections (`redis_link`) or payloads.

    match ─────────── request path: one MGET, to each server of a cluster at once
    publish, ... ──── background: one script on one shard, then the accounts of owner and of all
    evict, clear, ... background: `redis_removal`, scripts of at most `BATCH` nodes, shard by shard
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from sglang_ext.chunk_index import keys, policy
from sglang_ext.chunk_index.codec import decode_node, decode_record, encode_body, encode_record
from sglang_ext.chunk_index.hit_buffer import HitBuffer, Hits
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
from sglang_ext.chunk_index.redis_accounts import Accounts
from sglang_ext.chunk_index.redis_changes import SENDER_BYTES, RedisChanges
from sglang_ext.chunk_index.redis_commands import Command, call_script
from sglang_ext.chunk_index.redis_link import RedisLink
from sglang_ext.chunk_index.redis_removal import BATCH, Removal
from sglang_ext.chunk_index.redis_replies import (
    as_bytes,
    as_float,
    as_int,
    as_list,
    as_optional_bytes,
    as_pairs,
    as_text,
)
from sglang_ext.chunk_index.redis_scan import scan_pages
from sglang_ext.chunk_index.redis_scripts import Sender, load_scripts
from sglang_ext.chunk_index.redis_shards import Shards, Share, by_shard, sum_shares
from sglang_ext.errors import IndexUnavailable

_TOUCHES = BATCH // 2  # hits of a script, alone in its round trip: look-ups wait for no more
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
        self._sender = Sender(secrets.token_bytes(SENDER_BYTES))
        self._removal = Removal(
            self._calls, self._sender, self._scripts, self._shards, self._accounts
        )
        self._hits = HitBuffer()
        self._mean_cost = 0.0
        self._changes = RedisChanges(link, self._sender.id)

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
        failure: IndexUnavailable | None = None
        for command in self._touches({hit.key: hit for hit in reversed(self._hits.take())}):
            (reply,) = self._calls.attempt([command])
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
        (reply,) = self._calls.run(
            [self._sender.on_shard(self._scripts.publish, shard, words, name)]
        )
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
            (reply,) = self._calls.run(
                [self._sender.on_shard(script, keys.shard_of(key), words, name)]
            )
            if reply is None or isinstance(reply, bytes):
                return decode_record(key, reply)
        raise IndexUnavailable("a node changed each time it was annotated")

    def unpin(self, key: ChunkKey) -> NodeRecord | None:
        """Let a node be evicted again; modifies its record."""
        command = self._sender.on_shard(self._scripts.unpin, keys.shard_of(key), (key,))
        (reply,) = self._calls.run([command])
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
        return self._removal.remove(key)

    def victims(self, num_bytes: int, owner: str, *, is_own: bool) -> tuple[NodeRecord, ...]:
        """Plan an eviction, children before parents; empty if impossible; changes nothing."""
        return self._removal.victims(num_bytes, owner, is_own=is_own)

    def evict(self, records: Sequence[NodeRecord]) -> tuple[NodeRecord, ...]:
        """Remove each node that is still evictable, in order; returns those that left."""
        return self._removal.evict(records)

    def expire(self, now_ms: int, limit: int) -> tuple[NodeRecord, ...]:
        """Remove expired nodes and all below them; returns the records that left."""
        return self._removal.expire(now_ms, limit)

    def invalidate(self, doc_id: str, owner: str, limit: int) -> tuple[NodeRecord, ...]:
        """Remove an owner's nodes that name a document, and all below; returns those that left."""
        return self._removal.invalidate(doc_id, owner, limit)

    def clear(
        self, limit: int, owner: str | None = None, model: str | None = None
    ) -> tuple[NodeRecord, ...]:
        """Remove every node, or those of an owner, of a model, of both; returns those that left."""
        return self._removal.clear(limit, owner, model)

    def set_quota(self, owner: str, num_bytes: int | None) -> None:
        """Change an owner's quota; modifies the accounts."""
        self._accounts.set_quota(owner, num_bytes)

    def usage(self) -> Mapping[str, Usage]:
        """Every owner that has nodes or a quota; changes nothing."""
        shares = sum_shares(self._shards.shares())
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
            heard.update((as_bytes(server), as_float(at)) for server, at in as_pairs(page))
        for page in scan_pages(self._calls, "HSCAN", keys.MODELS):
            for server, model in as_pairs(page):
                if heard.get(as_bytes(server), 0) >= now_ms - keys.SERVER_S * 1000:
                    living[as_text(server)] = as_text(model)
        return living

    def check_integrity(self) -> None:
        """Verify every invariant; changes nothing. Reads everything."""
        from sglang_ext.chunk_index.redis_audit import audit

        audit(self._link)

    def _touches(self, hits: Mapping[ChunkKey, Hits]) -> Iterator[Command]:
        """Scripts that write hits, each made when it is asked for, so that others run between."""
        for shard, touched in by_shard(hits).items():
            for start in range(0, len(touched), _TOUCHES):
                batch = [hits[key] for key in touched[start : start + _TOUCHES]]
                words = [word for hit in batch for word in (hit.key, hit.num_hits, hit.last_ms)]
                yield self._sender.on_shard(self._scripts.touch, shard, words)

    def _published_bytes(self) -> dict[str, int]:
        """The bytes of every owner that has nodes."""
        return {
            owner: share.num_bytes for owner, share in sum_shares(self._shards.shares()).items()
        }


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
