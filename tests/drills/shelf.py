"""The shared index and folder as another server with the same secret could use them.

Payloads are plain bytes with the form their writer gave them, so that a test can look at what a
server stored, and put something else in its place.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_ext.chunk_index.file_store import FileStore
from sglang_ext.chunk_index.identity import mac_key
from sglang_ext.chunk_index.index import NodeRecord, Publication, Reservation
from sglang_ext.chunk_index.payloads import payload_checksum
from sglang_ext.chunk_index.redis_index import RedisIndex
from tests.redis_server import open_link

TOKEN_AXIS = 2


@dataclass(frozen=True)
class RawPayload:
    """Bytes and what their writer calls them.

    Attributes:
        form: Such as `bfloat16 30 2 75 3 64`.
        data: All bytes.
    """

    form: bytes
    data: bytearray

    @property
    def nbytes(self) -> int:
        """How many bytes."""
        return len(self.data)

    def buffer(self) -> memoryview:
        """All bytes, without a copy."""
        return memoryview(self.data)

    def numbers(self) -> npt.NDArray[np.uint16]:
        """`[layers, 2, tokens, heads, dim]`, the bits of each bfloat16; shares the bytes."""
        shape = [int(word) for word in self.form.split()[1:]]
        return np.frombuffer(self.data, np.uint16).reshape(shape)


class RawCodec:
    """Takes payloads of any form; see `PayloadCodec`."""

    def describe(self, payload: RawPayload) -> bytes:
        """What its writer called it."""
        return payload.form

    def allocate(self, form: bytes, num_tokens: int, num_bytes: int) -> RawPayload:
        """Zeros to be filled."""
        return RawPayload(form, bytearray(num_bytes))


def raw(form: bytes, numbers: npt.NDArray[np.uint16]) -> RawPayload:
    """A payload of these numbers."""
    return RawPayload(form, bytearray(np.ascontiguousarray(numbers).tobytes()))


def in_place_of(payload: RawPayload, other: RawPayload) -> RawPayload:
    """Another chunk's KV as long as a payload's: cut, or repeated from its beginning."""
    num_tokens = payload.numbers().shape[TOKEN_AXIS]
    numbers = other.numbers()
    tokens = np.arange(num_tokens) % numbers.shape[TOKEN_AXIS]
    return raw(payload.form, np.take(numbers, tokens, axis=TOKEN_AXIS))


class Shelf:
    """See the module's docstring; made by `open_shelf`."""

    def __init__(self, index: RedisIndex, store: FileStore[RawPayload]) -> None:
        self.index = index
        self.store = store

    def records(self) -> list[NodeRecord]:
        """What is published."""
        return [view.record for view in self.index.scan()]

    def payload(self, record: NodeRecord) -> RawPayload:
        """A record's payload, every byte checked."""
        return self.store.get(record)

    def is_published(self, record: NodeRecord) -> bool:
        """Whether a record's key has this very record."""
        view = self.index.show(record.key)
        return view is not None and view.record.checksum == record.checksum

    def replace(self, record: NodeRecord, payload: RawPayload) -> NodeRecord | None:
        """Publish something else under a record's key; None if another writer was faster."""
        new = renamed(record, payload)
        for gone in self.index.remove(record.key):
            self.store.drop(gone)
        self.store.put(new, payload)
        return new if self.index.publish(new, now_ms()) is Publication.STORED else None

    def begin(self, record: NodeRecord, payload: RawPayload, at_ms: int) -> None:
        """Reserve and put, as a writer does before it publishes."""
        reservation = self.index.reserve(record.owner, record.payload_bytes, at_ms)
        assert isinstance(reservation, Reservation)
        self.store.put(record, payload)


@contextmanager
def open_shelf(url: str, folder: Path, secret: str) -> Iterator[Shelf]:
    """A shelf for a while."""
    with open_link(url) as link:
        store: FileStore[Any] = FileStore(folder, RawCodec(), mac_key(secret.encode()))
        yield Shelf(RedisIndex(link), store)


def renamed(record: NodeRecord, payload: RawPayload) -> NodeRecord:
    """A record for another payload of the same size."""
    return replace(record, checksum=payload_checksum(payload), created_ms=now_ms())


def now_ms() -> int:
    """Milliseconds since the epoch."""
    return int(time.time() * 1e3)
