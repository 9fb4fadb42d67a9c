"""A payload as bytes, for the stores below host memory: a head that says what it is, and the body.

    |magic 8|header length 4|header|tag 32|zeros|  a multiple of 4096 bytes: the head
    |payload|                                      the body

The header is msgpack with the record, the payload's form, and the body's MAC if there is a key. The
tag is BLAKE2b over everything before it, keyed if there is a key: so a head can be trusted alone,
before its body is read. The body is checked by the record's xxh3-64 against damage, and by its MAC
against forgery.

Knows bytes and how they are checked. Does not know where a blob lies. Nothing in it is believed, or
sized by, before it was checked; nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Protocol

import msgspec
import xxhash
from msgspec import Meta

from sglang_ext.chunk_index.identity import KEY_BYTES, ChunkKey
from sglang_ext.chunk_index.index import NodeRecord
from sglang_ext.chunk_index.payloads import OnBytes, PayloadCodec, PayloadT
from sglang_ext.errors import PayloadLost, TierUnavailable

ALIGNMENT = 4096
"""A head's size is a multiple of it, so that the body lies on a page."""

MAX_HEAD_BYTES = 64 * 1024
MAX_FORM_BYTES = 256

LEAF_BYTES = 1 << 20
"""The body's MAC is made of one for each piece of this size, so that pieces hash in parallel."""

MAC_THREADS = 4

_MAGIC = b"PICKV\x01\r\n"  # the name, the format's version, and what text transfers destroy
_NAME_BYTES = 5
_PRELUDE_BYTES = len(_MAGIC) + 4
_TAG_BYTES = 32
_HEAD, _BODY = b"pic-head-v1", b"pic-body-v1"

_Count = Annotated[int, Meta(ge=0)]
_Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every field of a `NodeRecord`, and what is needed beside it; none has a default."""

    key: _Key
    parent: _Key | None
    num_tokens: _Count
    payload_bytes: _Count
    checksum: _Count
    created_ms: int
    doc_ids: tuple[bytes, ...]
    expires_ms: int | None
    owner: str
    pinned: bool
    model: str
    compute_us: _Count
    form: Annotated[bytes, Meta(max_length=MAX_FORM_BYTES)]
    mac: Annotated[bytes, Meta(max_length=_TAG_BYTES)]


@dataclass(frozen=True, slots=True)
class Head:
    """What a blob says of itself, its tag being right.

    Attributes:
        record: As it was put.
        form: From `PayloadCodec.describe`.
        mac: Of the body; empty if it was written without a key.
        num_bytes: Size of the head, where the body begins.
    """

    record: NodeRecord
    form: bytes
    mac: bytes
    num_bytes: int

    def check_size(self, num_bytes: int) -> None:
        """Compare with the size of the whole blob.

        Raises:
            PayloadLost: `truncated` or `damaged`; it is shorter or longer than head and body.
        """
        expected = self.num_bytes + self.record.payload_bytes
        if num_bytes != expected:
            reason = "truncated" if num_bytes < expected else "damaged"
            raise PayloadLost(reason, f"{num_bytes} bytes, expected {expected}")

    def check_record(self, record: NodeRecord) -> None:
        """Compare with the record that was asked for, in what no annotation changes.

        Raises:
            PayloadLost: `foreign`; it is another's payload.
        """
        for name in ("key", "checksum", "num_tokens", "payload_bytes"):
            if getattr(self.record, name) != getattr(record, name):
                raise PayloadLost("foreign", f"its {name} is not the record's")


class Source(Protocol):
    """Where one blob is read from, piece by piece."""

    @property
    def num_bytes(self) -> int:
        """Size of the whole blob."""
        ...

    def read(self, start: int, into: memoryview) -> None:
        """Fill `into` with the blob's bytes from `start` on.

        Raises:
            PayloadLost: `truncated`; it ends before that.
        """
        ...


class BlobFormat:
    """Writes and checks blobs; thread-safe.

    With a key every blob must carry tags made with it, else it is `forged`; without one, blobs of
    writers that have a key are `damaged`.
    """

    def __init__(self, mac_key: bytes | None = None) -> None:
        self._key = mac_key or b""
        self._pool = ThreadPoolExecutor(MAC_THREADS, "pic-mac") if mac_key else None

    def write_head(self, record: NodeRecord, form: bytes, body: memoryview) -> bytes:
        """What comes before a body. Changes nothing; hashes the body if there is a key.

        Raises:
            TierUnavailable: The record's document ids are too long for a head.
        """
        assert len(form) <= MAX_FORM_BYTES, "the codec's form is too long"
        assert body.nbytes == record.payload_bytes, "the record is another payload's"
        header = _pack(record, form, self._mac_of(body))
        prelude = _MAGIC + len(header).to_bytes(4, "little")
        num_bytes = _head_bytes(len(header))
        if num_bytes > MAX_HEAD_BYTES:
            raise TierUnavailable(f"a payload's head is {num_bytes} bytes, more than a store takes")
        return (prelude + header + self._tag(prelude + header)).ljust(num_bytes, b"\0")

    def read_head(self, blob: bytes | bytearray) -> Head:
        """Check and decode the head of a blob, of which `blob` has at least the whole head.

        Raises:
            PayloadLost: `foreign`, of another version; `forged`, without the key's tag; `damaged`
                or `truncated`.
        """
        end = _PRELUDE_BYTES + _header_bytes(blob)
        num_bytes = _head_bytes(end - _PRELUDE_BYTES)
        if len(blob) < num_bytes:
            raise PayloadLost("truncated", "it ends in its head")
        if not hmac.compare_digest(self._tag(bytes(blob[:end])), blob[end : end + _TAG_BYTES]):
            raise PayloadLost("forged" if self._key else "damaged", "its head's tag is wrong")
        if any(blob[end + _TAG_BYTES : num_bytes]):
            raise PayloadLost("damaged", "bytes behind its head's tag")
        header = _unpack(bytes(blob[_PRELUDE_BYTES:end]))
        return Head(_record_of(header), header.form, header.mac, num_bytes)

    def load_head(self, source: Source) -> Head:
        """Read a blob's head alone, and compare its sizes with the blob's; raises as `load`."""
        start = _read(source, 0, ALIGNMENT)
        rest = _head_bytes(_header_bytes(start)) - ALIGNMENT
        head = self.read_head(start + _read(source, ALIGNMENT, rest))
        head.check_size(source.num_bytes)
        return head

    def load(
        self,
        source: Source,
        record: NodeRecord,
        codec: PayloadCodec[PayloadT],
        block_bytes: int,
        on_bytes: OnBytes | None = None,
    ) -> PayloadT:
        """Read a whole blob into a new payload, hashing each block as soon as it is read.

        Args:
            source: Read from front to end.
            record: What it must be the payload of.
            codec: Makes the payload, once the head was found to be right.
            block_bytes: Read at once; a multiple of `LEAF_BYTES`.
            on_bytes: Told of each block of the body.

        Raises:
            PayloadLost: It is not the record's, or not whole.
        """
        assert block_bytes % LEAF_BYTES == 0
        head = self.load_head(source)
        head.check_record(record)
        payload = codec.allocate(head.form, record.num_tokens, record.payload_bytes)
        body = payload.buffer()
        assert body.nbytes == record.payload_bytes, "the codec allocated another size"
        checksum = xxhash.xxh3_64()
        leaves: list[Future[bytes]] = []
        for start in range(0, body.nbytes, block_bytes):
            block = body[start : start + block_bytes]
            source.read(head.num_bytes + start, block)
            leaves += self._hash_leaves(body, start, block.nbytes)
            checksum.update(block)
            if on_bytes is not None:
                on_bytes(block.nbytes)
        if checksum.intdigest() != record.checksum:
            raise PayloadLost("damaged", "its checksum is wrong")
        if not hmac.compare_digest(self._root(leaves), head.mac if self._key else b""):
            raise PayloadLost("forged", "its body's tag is wrong")
        return payload

    def _tag(self, data: bytes) -> bytes:
        """Authenticates a head with a key; finds damage without."""
        return hashlib.blake2b(data, key=self._key, digest_size=_TAG_BYTES, person=_HEAD).digest()

    def _mac_of(self, body: memoryview) -> bytes:
        return self._root(self._hash_leaves(body, 0, body.nbytes))

    def _hash_leaves(self, body: memoryview, start: int, num_bytes: int) -> list[Future[bytes]]:
        """Begin to hash the leaves of a stretch of the body; none without a key."""
        if self._pool is None:
            return []
        starts = range(start, start + num_bytes, LEAF_BYTES)
        return [self._pool.submit(self._leaf, body, at) for at in starts]

    def _leaf(self, body: memoryview, start: int) -> bytes:
        leaf = body[start : start + LEAF_BYTES]
        is_last = start + LEAF_BYTES >= body.nbytes
        return self._node(leaf, depth=0, offset=start // LEAF_BYTES, is_last=is_last)

    def _root(self, leaves: Sequence[Future[bytes]]) -> bytes:
        if not self._key:
            return b""
        digests = b"".join(leaf.result() for leaf in leaves)
        return self._node(digests, depth=1, offset=0, is_last=True)

    def _node(self, data: bytes | memoryview, depth: int, offset: int, *, is_last: bool) -> bytes:
        """BLAKE2's own tree hashing: two levels, any number of leaves (RFC 7693, §2.5)."""
        return hashlib.blake2b(
            data,
            key=self._key,
            digest_size=_TAG_BYTES,
            person=_BODY,
            fanout=0,
            depth=2,
            leaf_size=LEAF_BYTES,
            inner_size=_TAG_BYTES,
            node_depth=depth,
            node_offset=offset,
            last_node=is_last,
        ).digest()


def _read(source: Source, start: int, num_bytes: int) -> bytearray:
    """Some bytes of a blob, if it has them."""
    if source.num_bytes < start + num_bytes:
        raise PayloadLost("truncated", "it ends in its head")
    data = bytearray(num_bytes)
    if num_bytes:
        source.read(start, memoryview(data))
    return data


def _header_bytes(blob: bytes | bytearray) -> int:
    """Length of the header a blob declares, its magic being right and the length possible."""
    if len(blob) < _PRELUDE_BYTES:
        raise PayloadLost("truncated", "it ends in its head")
    magic = blob[: len(_MAGIC)]
    if magic != _MAGIC:
        is_ours = magic[:_NAME_BYTES] == _MAGIC[:_NAME_BYTES]
        is_other = is_ours and magic[_NAME_BYTES] != _MAGIC[_NAME_BYTES]
        raise PayloadLost("foreign" if is_other else "damaged", "it has another magic")
    num_bytes = int.from_bytes(blob[len(_MAGIC) : _PRELUDE_BYTES], "little")
    if _head_bytes(num_bytes) > MAX_HEAD_BYTES:
        raise PayloadLost("damaged", f"a header of {num_bytes} bytes")
    return num_bytes


def _head_bytes(header_bytes: int) -> int:
    """Size of a head: its parts, rounded up."""
    return -(-(_PRELUDE_BYTES + header_bytes + _TAG_BYTES) // ALIGNMENT) * ALIGNMENT


def _pack(record: NodeRecord, form: bytes, mac: bytes) -> bytes:
    header = _Header(
        key=record.key,
        parent=record.parent,
        num_tokens=record.num_tokens,
        payload_bytes=record.payload_bytes,
        checksum=record.checksum,
        created_ms=record.created_ms,
        doc_ids=tuple(doc_id.encode("utf-8", "surrogatepass") for doc_id in record.doc_ids),
        expires_ms=record.expires_ms,
        owner=record.owner,
        pinned=record.pinned,
        model=record.model,
        compute_us=record.compute_us,
        form=form,
        mac=mac,
    )
    return msgspec.msgpack.encode(header)


def _unpack(data: bytes) -> _Header:
    try:
        return msgspec.msgpack.decode(data, type=_Header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise PayloadLost("damaged", "its header cannot be decoded") from exc


def _record_of(header: _Header) -> NodeRecord:
    try:
        doc_ids = tuple(doc_id.decode("utf-8", "surrogatepass") for doc_id in header.doc_ids)
    except UnicodeDecodeError as exc:
        raise PayloadLost("damaged", "its documents cannot be decoded") from exc
    return NodeRecord(
        key=ChunkKey(header.key),
        parent=None if header.parent is None else ChunkKey(header.parent),
        num_tokens=header.num_tokens,
        payload_bytes=header.payload_bytes,
        checksum=header.checksum,
        created_ms=header.created_ms,
        doc_ids=doc_ids,
        expires_ms=header.expires_ms,
        owner=header.owner,
        pinned=header.pinned,
        model=header.model,
        compute_us=header.compute_us,
    )
