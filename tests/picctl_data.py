"""A shared index and its payloads as servers would have left them, for the tests of `picctl`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from sglang_ext.chunk_index.file_store import FileStore
from sglang_ext.chunk_index.identity import ChunkKey, mac_key, owner_id
from sglang_ext.chunk_index.index import NodeRecord, Publication
from sglang_ext.chunk_index.payloads import PayloadStore, payload_checksum
from tests.blobs import BytesCodec, random_payload

SECRET = "0123456789abcdef0123456789abcdef"
OTHER_SECRET = "another secret of the same length"
MODEL, OLD_MODEL = "a" * 16, "b" * 16
PAYLOAD_BYTES = 512


@dataclass(frozen=True)
class Tenant:
    """Chunks of one namespace, and what they have in common."""

    namespace: str
    num_chunks: int
    model: str = MODEL

    @property
    def owner(self) -> str:
        """How its records name it."""
        return owner_id(self.namespace, SECRET.encode())


DEFAULT = Tenant("default", 60)
ACME = Tenant("acme", 30)
OLD = Tenant("default", 10, OLD_MODEL)
TENANTS = (DEFAULT, ACME, OLD)
NUM_SEGMENTS = 3
NUM_RECORDS = NUM_SEGMENTS * sum(tenant.num_chunks for tenant in TENANTS)


def now_ms() -> int:
    """What `picctl` takes for now."""
    return int(time.time() * 1e3)


def records_of(tenant: Tenant, created_ms: int) -> Iterator[NodeRecord]:
    """Chunks of three segments each; a chunk's segments name one document."""
    for chunk in range(tenant.num_chunks):
        parent: ChunkKey | None = None
        for segment in range(NUM_SEGMENTS):
            name = f"{tenant.namespace} {tenant.model} {chunk} {segment}".encode()
            spread = blake2b(name[: name.rindex(b" ")], digest_size=1).digest()
            key = ChunkKey(spread + blake2b(name, digest_size=16).digest())
            yield NodeRecord(
                key=key,
                parent=parent,
                num_tokens=256,
                payload_bytes=PAYLOAD_BYTES,
                checksum=payload_checksum(payload_of(key)),
                created_ms=created_ms - 1000 * chunk,
                doc_ids=(f"{tenant.namespace}-doc{chunk}@v1",),
                owner=tenant.owner,
                model=tenant.model,
                compute_us=1500,
            )
            parent = key


def payload_of(key: ChunkKey) -> Any:
    """Bytes that depend on the key."""
    return random_payload(PAYLOAD_BYTES, seed=int.from_bytes(key, "big"))


def all_records(created_ms: int) -> list[NodeRecord]:
    """Of every tenant."""
    return [record for tenant in TENANTS for record in records_of(tenant, created_ms)]


def make_store(folder: Path, secret: str | None = SECRET) -> FileStore[Any]:
    """A folder that is ready."""
    key = None if secret is None else mac_key(secret.encode())
    store: FileStore[Any] = FileStore(folder, BytesCodec(), key)
    store.probe()
    return store


def publish_all(index: Any, records: Sequence[NodeRecord]) -> None:
    """Publish records in their order, through accounts as servers do."""
    for record in records:
        reservation = index.reserve(record.owner, record.payload_bytes, record.created_ms)
        published = index.publish(record, record.created_ms, reservation)
        assert published is Publication.STORED


def put_all(store: PayloadStore[Any], records: Sequence[NodeRecord]) -> None:
    """Keep the payload of every record."""
    for record in records:
        store.put(record, payload_of(record.key))
