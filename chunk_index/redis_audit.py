"""Verifies a shared index as a whole, and everything kept beside it; for tests and for doubt.

Knows every invariant that `keys` describes. Does not know how it is kept. Reads all keys, and is
right only while nobody writes. Values of ours that cannot be decoded are foreign, and left out.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Mapping

from sglang_ext.chunk_index import keys
from sglang_ext.chunk_index.codec import StoredNode, decode_node
from sglang_ext.chunk_index.identity import KEY_BYTES, ChunkKey
from sglang_ext.chunk_index.index import NodeRecord, document_names
from sglang_ext.chunk_index.keys import NODE_PREFIX_LEN, NUM_SHARDS
from sglang_ext.chunk_index.redis_link import RedisLink
from sglang_ext.chunk_index.redis_replies import as_bytes, as_pairs
from sglang_ext.chunk_index.redis_scan import scan_pages

_Sets = dict[bytes, dict[bytes, float]]
"""By the key of a set or sorted set: members with their scores, 0 in a set."""


def audit(link: RedisLink) -> None:
    """Verify every invariant.

    Raises:
        AssertionError: One does not hold; the message says which.
    """
    nodes = _nodes(link)
    for node in nodes.values():
        _check_links(node, nodes)
    _check_sets(link, nodes)
    _check_counts(link, nodes)
    _check_accounts(link, nodes)


def _nodes(link: RedisLink) -> dict[ChunkKey, StoredNode]:
    """All nodes that are ours."""
    nodes: dict[ChunkKey, StoredNode] = {}
    for name in set(link.background().scan_keys(keys.PREFIX + b"{??}:n:*")):
        key = ChunkKey(name[NODE_PREFIX_LEN:])
        if len(key) == KEY_BYTES and name == keys.node_key(key) and _type(link, name) == "string":
            node = decode_node(key, as_bytes(link.call("GET", name)))
            if node is not None:
                nodes[key] = node
    return nodes


def _check_links(node: StoredNode, nodes: Mapping[ChunkKey, StoredNode]) -> None:
    """Parent and children agree, also on protection and priority."""
    record = node.record
    assert record.parent is None or record.parent in nodes, "every parent is there"
    children = _children(node, nodes)
    assert len(children) == node.num_children, "children are counted"
    num_protected = sum(child.is_protected for child in children)
    assert num_protected == node.num_protected_children, "protected children are counted"
    assert all(child.priority < node.priority for child in children), "parents go last"
    if record.parent is not None:
        siblings = nodes[record.parent].num_children
        assert siblings > 0, "a parent has children"


def _children(node: StoredNode, nodes: Mapping[ChunkKey, StoredNode]) -> list[StoredNode]:
    """The nodes directly below a node, by its list."""
    children: list[StoredNode] = []
    at, before = node.first_child, None
    while at is not None:
        child = nodes.get(at)
        assert child is not None, "every child is there"
        assert child.record.parent == node.record.key, "children name their parent"
        assert child.previous == before, "the list of children can be walked both ways"
        assert len(children) < node.num_children, "the list of children ends"
        children.append(child)
        at, before = child.next, at
    return children


def _check_sets(link: RedisLink, nodes: Mapping[ChunkKey, StoredNode]) -> None:
    """Queues, kept nodes, documents and expiry times hold exactly what the nodes say."""
    expected: _Sets = {}
    for key, node in nodes.items():
        for name, score in _memberships(node):
            expected.setdefault(name, {})[key] = score
    found: _Sets = {}
    for kind in (b"q:*", b"k:*", b"d:*", b"x"):
        for name in set(link.background().scan_keys(keys.PREFIX + b"{??}:" + kind)):
            found[name] = _members(link, name)
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, members in expected.items():
        assert found[name] == members, name


def _memberships(node: StoredNode) -> Iterable[tuple[bytes, float]]:
    """Where a node stands, with its score."""
    record = node.record
    shard = keys.shard_of(record.key)
    if node.is_protected:
        yield keys.kept_key(shard, record.owner), 0
    else:
        yield keys.queue_key(shard, record.owner), node.priority
    for doc_id in record.doc_ids:
        for name in document_names(doc_id):
            yield keys.document_key(shard, record.owner, name), 0
    if node.is_leaving:
        yield keys.expiry_key(shard), 0
    elif record.expires_ms is not None:
        yield keys.expiry_key(shard), record.expires_ms


def _check_counts(link: RedisLink, nodes: Mapping[ChunkKey, StoredNode]) -> None:
    """Every shard's sums by owner, by model and in all."""
    for shard in range(NUM_SHARDS):
        records = [node.record for key, node in nodes.items() if keys.shard_of(key) == shard]
        owners: Counter[bytes] = Counter()
        models: Counter[bytes] = Counter()
        for record in records:
            owners[b"n" + record.owner.encode()] += 1
            owners[b"b" + record.owner.encode()] += record.payload_bytes
            models[record.model.encode()] += 1
        totals = _hash(link, keys.totals_key(shard))
        assert _hash(link, keys.owners_key(shard)) == _texts(owners), f"owners of shard {shard}"
        assert _hash(link, keys.models_key(shard)) == _texts(models), f"models of shard {shard}"
        assert int(totals.get(b"nodes", b"0")) == len(records), f"nodes of shard {shard}"
        assert int(totals.get(b"bytes", b"0")) == _bytes(records), f"bytes of shard {shard}"


def _check_accounts(link: RedisLink, nodes: Mapping[ChunkKey, StoredNode]) -> None:
    """What is used is what is published and reserved, for every owner and for all."""
    published: Counter[bytes] = Counter()
    for node in nodes.values():
        published[keys.account_key(node.record.owner)] += node.record.payload_bytes
        published[keys.ALL_ACCOUNT] += node.record.payload_bytes
    quotas = {
        keys.account_key(owner.decode()): quota for owner, quota in _hash(link, keys.QUOTAS).items()
    }
    names = {
        name
        for pattern in (b"{a:*}", b"{all}")
        for name in link.background().scan_keys(keys.PREFIX + pattern)
    }
    for name in names | published.keys() | quotas.keys():
        account = _hash(link, name)
        reserved = sum(
            struct.unpack("<Q", reservation[16:])[0] for reservation in _members(link, name + b":r")
        )
        assert int(account.get(b"reserved", b"0")) == reserved, f"reserved in {name!r}"
        assert int(account.get(b"used", b"0")) == published[name] + reserved, f"used in {name!r}"
        assert account.get(b"quota") == quotas.get(name), f"quota of {name!r}"


def _hash(link: RedisLink, name: bytes) -> dict[bytes, bytes]:
    pages = scan_pages(link.background(), "HSCAN", name)
    return {as_bytes(field): as_bytes(value) for page in pages for field, value in as_pairs(page)}


def _members(link: RedisLink, name: bytes) -> dict[bytes, float]:
    """The members of a set or sorted set, with their scores."""
    if _type(link, name) == "set":
        pages = scan_pages(link.background(), "SSCAN", name)
        return {as_bytes(member): 0 for page in pages for member in page}
    pages = scan_pages(link.background(), "ZSCAN", name)
    return {
        as_bytes(member): float(as_bytes(score))
        for page in pages
        for member, score in as_pairs(page)
    }


def _type(link: RedisLink, name: bytes) -> str:
    return as_bytes(link.call("TYPE", name)).decode()


def _texts(counts: Counter[bytes]) -> dict[bytes, bytes]:
    return {name: str(number).encode() for name, number in counts.items()}


def _bytes(records: Iterable[NodeRecord]) -> int:
    return sum(record.payload_bytes for record in records)
