"""The `PayloadStore` port, where cached KV lies, and the in-process store in host memory.

Knows records and payloads as bytes. Does not know what the bytes mean, which records are indexed,
or what to evict: the index counts bytes, a store only keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

import xxhash

from sglang_ext.chunk_index.identity import ChunkKey
from sglang_ext.chunk_index.index import NodeRecord
from sglang_ext.errors import PayloadLost


class Payload(Protocol):
    """The cached KV of one segment, whatever form it has."""

    @property
    def nbytes(self) -> int:
        """Bytes it takes from a budget."""
        ...

    def buffer(self) -> memoryview:
        """All its bytes, contiguous, format `B`, without a copy; writable until it is shared."""
        ...


PayloadT = TypeVar("PayloadT", bound=Payload)

OnBytes = Callable[[int], None]
"""Told, from the loading thread, how many more bytes have arrived."""


class PayloadCodec(Protocol[PayloadT]):
    """How this process's payloads are described to others, and made from bytes."""

    def describe(self, payload: PayloadT) -> bytes:
        """What `allocate` needs beside the bytes, such as dtype and shape; at most 256 bytes."""
        ...

    def allocate(self, form: bytes, num_tokens: int, num_bytes: int) -> PayloadT:
        """A payload of that form whose `buffer`, of `num_bytes`, the caller fills.

        Raises:
            PayloadLost: `foreign`; the form is not one of this model, or its size differs from
                `num_bytes`. Nothing was allocated then.
        """
        ...


def payload_checksum(payload: Payload) -> int:
    """xxh3-64 of the payload's bytes, 0 <= value < 2**64; against damage, not against forgery."""
    return int(xxhash.xxh3_64_intdigest(payload.buffer()))


class PayloadStore(Protocol[PayloadT]):
    """Payloads by record. Thread-safe; never evicts by itself.

    Two writers of one key may compute different bytes, so a store tells payloads apart by key and
    checksum, and a record is found only with the payload it was made for.
    """

    def probe(self) -> None:
        """Find out whether the store can be used, and make what it needs. Modifies nothing else.

        Raises:
            TierUnavailable: It cannot be written or read; one line says why.
        """
        ...

    def put(self, record: NodeRecord, payload: PayloadT) -> None:
        """Keep a payload; when this returns it is durable, or nothing was changed.

        Modifies the store; the payload must not change afterwards.

        Raises:
            TierUnavailable: It cannot be written: no room, no permission, not reachable, too large.
        """
        ...

    def get(self, record: NodeRecord, on_bytes: OnBytes | None = None) -> PayloadT:
        """The payload of a record, checked against it as far as the store checks. Changes nothing.

        What is returned stays readable after `drop`.

        Raises:
            PayloadLost: It is absent, damaged, or not the record's.
            TierUnavailable: The store cannot tell now.
        """
        ...

    def drop(self, record: NodeRecord) -> None:
        """Forget a payload; nothing happens if it is absent or the store is unreachable."""
        ...

    def records(self) -> Iterator[NodeRecord]:
        """What is kept, as it was put, in no order, unreadable ones left out. Changes nothing."""
        ...


class HostStore(Generic[PayloadT]):
    """Payload objects kept in a dict, unchecked; see `PayloadStore` for what each method does."""

    def __init__(self) -> None:
        self._kept: dict[ChunkKey, tuple[NodeRecord, PayloadT]] = {}

    def probe(self) -> None:
        """Memory can always be used."""

    def put(self, record: NodeRecord, payload: PayloadT) -> None:
        """Keep a payload."""
        self._kept[record.key] = record, payload

    def get(self, record: NodeRecord, on_bytes: OnBytes | None = None) -> PayloadT:
        """The payload of a record."""
        kept, payload = self._kept.get(record.key, (None, None))
        if kept is None or payload is None or kept.checksum != record.checksum:
            raise PayloadLost("absent")
        if on_bytes is not None:
            on_bytes(payload.nbytes)
        return payload

    def drop(self, record: NodeRecord) -> None:
        """Forget a payload, if it is there."""
        kept, _ = self._kept.get(record.key, (None, None))
        if kept is not None and kept.checksum == record.checksum:
            del self._kept[record.key]

    def records(self) -> Iterator[NodeRecord]:
        """What is kept."""
        return iter([record for record, _ in list(self._kept.values())])
