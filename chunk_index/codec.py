"""Node records ↔ bytes; the layout is drawn in `keys`.

Knows offsets, and checks every size and the CRC before it believes anything. Does not know keys'
names, scripts or connections. The head is changed in place by scripts, the body is written here.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from sglang_ext.chunk_index.identity import DIGEST_BYTES, ChunkKey
from sglang_ext.chunk_index.index import MAX_DOC_IDS, NodeRecord, NodeView

MAX_NAME_BYTES = 32
"""Of an owner or a model."""

MAX_DOC_ID_BYTES = 0xFFFF

_MAGIC = b"PIC\x01"
_PINNED, _LEAVING, _HAS_PARENT = 1, 2, 4
_KNOWN_FLAGS = _PINNED | _LEAVING | _HAS_PARENT
_NO_LINK = bytes(DIGEST_BYTES)
_NEVER = 2**64 - 1
_MAX_UINT32 = 2**32 - 1
_HEX, _HEX_BYTES = 255, 8

_HEAD = struct.Struct("<4sBIQIIQQ16s")
_LINKS = struct.Struct("<16s16s16s")
_BODY = struct.Struct("<IIQQQQI")
_IDENTITY = struct.Struct("<QQ")
_CRC = struct.Struct("<I")
_DOC_LEN = struct.Struct("<H")

BODY_AT = _HEAD.size
"""Offset of the body of a node without a parent."""

BODY_BELOW_PARENT_AT = _HEAD.size + _LINKS.size
"""Offset of the body of a node with a parent."""

_MIN_BODY = _BODY.size + 3  # three counts of nothing


@dataclass(frozen=True, slots=True)
class StoredNode:
    """All that a node's value says.

    Attributes:
        record: What was published, with later annotations.
        num_hits: Matches since.
        last_hit_ms: Time of the last one; 0 if there was none.
        num_children: Nodes directly below.
        num_protected_children: Those that are pinned or have a pinned node below.
        priority: When it is evicted, see `policy`.
        last_use_us: When it was last used.
        is_leaving: Being removed: cannot be matched, takes no child.
        first_child: Head of the list of nodes directly below.
        previous: The sibling before it in that list of its parent.
        next: The sibling after it.
        body: What `encode_body` makes of the record.
    """

    record: NodeRecord
    num_hits: int
    last_hit_ms: int
    num_children: int
    num_protected_children: int
    priority: int
    last_use_us: int
    is_leaving: bool
    first_child: ChunkKey | None
    previous: ChunkKey | None
    next: ChunkKey | None
    body: bytes

    @property
    def is_protected(self) -> bool:
        """Whether it, or a node below it, is pinned."""
        return self.record.pinned or self.num_protected_children > 0

    def view(self) -> NodeView:
        """For people and tests."""
        last_hit_ms = self.last_hit_ms if self.num_hits > 0 else None
        return NodeView(self.record, last_hit_ms, self.num_hits)


def encode_record(record: NodeRecord) -> bytes:
    """A new node's value: no use, no links but its parent, then its body.

    Parent and child must have the same spread byte.
    """
    flags = _PINNED if record.pinned else 0
    if record.parent is None:
        head = _HEAD.pack(_MAGIC, flags, 0, 0, 0, 0, 0, 0, _NO_LINK)
        return head + encode_body(record)
    assert record.parent[0] == record.key[0], "a chunk's segments lie in one shard"
    head = _HEAD.pack(_MAGIC, flags | _HAS_PARENT, 0, 0, 0, 0, 0, 0, _NO_LINK)
    links = _LINKS.pack(record.parent[1:], _NO_LINK, _NO_LINK)
    return head + links + encode_body(record)


def encode_body(record: NodeRecord) -> bytes:
    """The part of a value that scripts leave as it is."""
    numbers = _BODY.pack(
        0,
        record.num_tokens,
        record.payload_bytes,
        record.checksum,
        record.created_ms,
        _NEVER if record.expires_ms is None else record.expires_ms,
        min(record.compute_us, _MAX_UINT32),
    )
    names = _encode_name(record.owner) + _encode_name(record.model)
    rest = numbers[_CRC.size :] + names + _encode_documents(record.doc_ids)
    return _CRC.pack(zlib.crc32(rest)) + rest


def identity_of(record: NodeRecord) -> bytes:
    """The part of a body that tells two records of one key apart: checksum and creation."""
    return _IDENTITY.pack(record.checksum, record.created_ms)


def decode_record(key: ChunkKey, value: bytes | None) -> NodeRecord | None:
    """The record in a value; None if it cannot be matched.

    That is: absent, being removed, of another format, damaged, or not ours.
    """
    if value is None or len(value) < BODY_AT or value[:4] != _MAGIC:
        return None
    flags = value[4]
    if flags & ~_KNOWN_FLAGS or flags & _LEAVING:
        return None
    return _decode(key, value, flags)


def decode_node(key: ChunkKey, value: bytes | None) -> StoredNode | None:
    """All of a value, also if the node is being removed; None as for `decode_record`."""
    if value is None or len(value) < BODY_AT or value[:4] != _MAGIC or value[4] & ~_KNOWN_FLAGS:
        return None
    _, flags, hits, hit_ms, children, protected, priority, used_us, first = _HEAD.unpack_from(value)
    record = _decode(key, value, flags)
    if record is None:
        return None
    previous = following = _NO_LINK
    if record.parent is not None:
        _, previous, following = _LINKS.unpack_from(value, BODY_AT)
    return StoredNode(
        record=record,
        num_hits=hits,
        last_hit_ms=hit_ms,
        num_children=children,
        num_protected_children=protected,
        priority=priority,
        last_use_us=used_us,
        is_leaving=bool(flags & _LEAVING),
        first_child=_linked(key, first),
        previous=_linked(key, previous),
        next=_linked(key, following),
        body=value[BODY_AT if record.parent is None else BODY_BELOW_PARENT_AT :],
    )


def _decode(key: ChunkKey, value: bytes, flags: int) -> NodeRecord | None:
    """The record in a value whose magic and flags were checked; None if anything else is wrong."""
    parent: ChunkKey | None = None
    at = BODY_AT
    if flags & _HAS_PARENT:
        parent = ChunkKey(key[:1] + value[at : at + DIGEST_BYTES])
        at = BODY_BELOW_PARENT_AT
    if len(value) < at + _MIN_BODY:
        return None
    crc, tokens, size, checksum, created, expires, compute = _BODY.unpack_from(value, at)
    if zlib.crc32(value[at + _CRC.size :]) != crc:
        return None
    try:
        owner, at = _decode_name(value, at + _BODY.size)
        model, at = _decode_name(value, at)
        doc_ids = _decode_documents(value, at) if value[at] or at + 1 != len(value) else ()
    except (IndexError, struct.error, ValueError):  # the CRC is right: written by another program
        return None
    return NodeRecord(
        key,
        parent,
        tokens,
        size,
        checksum,
        created,
        doc_ids,
        None if expires == _NEVER else expires,
        owner,
        bool(flags & _PINNED),
        model,
        compute,
    )


def _encode_name(name: str) -> bytes:
    if len(name) == 2 * _HEX_BYTES:
        try:
            packed = bytes.fromhex(name)
        except ValueError:
            packed = b""
        if packed.hex() == name:
            return b"\xff" + packed
    encoded = name.encode()
    assert len(encoded) <= MAX_NAME_BYTES, "owners and models are digests"
    return bytes([len(encoded)]) + encoded


def _decode_name(value: bytes, at: int) -> tuple[str, int]:
    """A name and the offset behind it."""
    size = value[at]
    at += 1
    if size == _HEX:
        end = at + _HEX_BYTES
        return _slice(value, at, end).hex(), end
    return _slice(value, at, at + size).decode(), at + size


def _encode_documents(doc_ids: tuple[str, ...]) -> bytes:
    assert len(doc_ids) <= MAX_DOC_IDS, "a node names a bounded number of documents"
    encoded = [doc_id.encode("utf-8", "surrogatepass") for doc_id in doc_ids]
    assert all(len(doc_id) <= MAX_DOC_ID_BYTES for doc_id in encoded), "names, not contents"
    framed = (_DOC_LEN.pack(len(doc_id)) + doc_id for doc_id in encoded)
    return bytes([len(doc_ids)]) + b"".join(framed)


def _decode_documents(value: bytes, at: int) -> tuple[str, ...]:
    """The documents, which must end where the value ends."""
    doc_ids: list[str] = []
    num_documents = value[at]
    at += 1
    for _ in range(num_documents):
        (size,) = _DOC_LEN.unpack_from(value, at)
        at += _DOC_LEN.size
        doc_ids.append(_slice(value, at, at + size).decode("utf-8", "surrogatepass"))
        at += size
    if at != len(value):
        raise ValueError("bytes behind the documents")
    return tuple(doc_ids)


def _slice(value: bytes, start: int, end: int) -> bytes:
    if end > len(value):
        raise IndexError("beyond the value")
    return value[start:end]


def _linked(key: ChunkKey, digest: bytes) -> ChunkKey | None:
    return None if digest == _NO_LINK else ChunkKey(key[:1] + digest)
