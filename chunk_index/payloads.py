"""The `PayloadStore` port, where cached KV lies, and the in-process store in host memory.

Knows keys, sizes and opaque payloads. Does not know what is in a payload, which keys are indexed,
or what to evict.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

import xxhash

from sglang_ext.chunk_index.identity import ChunkKey


class Payload(Protocol):
    """The cached KV of one segment, whatever form it has."""

    @property
    def nbytes(self) -> int:
        """Bytes it takes from a store's budget."""
        ...

    def buffer(self) -> memoryview:
        """All its bytes, contiguous, uint8, for checksums; a view where the form allows it."""
        ...


PayloadT = TypeVar("PayloadT", bound=Payload)


def payload_checksum(payload: Payload) -> int:
    """xxh3-64 of the payload's bytes, 0 <= value < 2**64; against damage, not against forgery."""
    return int(xxhash.xxh3_64_intdigest(payload.buffer()))


class PayloadStore(Protocol[PayloadT]):
    """Payloads by key within a byte budget. Never evicts by itself.

    Callers serialise their calls. A tier that can fail answers False or None and does not raise.
    """

    @property
    def budget_bytes(self) -> int:
        """Most bytes it may take. Constant."""
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes taken now, at most `budget_bytes`. Changes with every `put` and `drop`."""
        ...

    def put(self, key: ChunkKey, payload: PayloadT) -> bool:
        """Keep a payload, in place of an older one of that key.

        Returns whether it is durable; False, and nothing changed, if it does not fit or cannot be
        written. Modifies the store; the payload must not change afterwards.
        """
        ...

    def get(self, key: ChunkKey) -> PayloadT | None:
        """The payload, or None if absent or unreadable. Changes nothing.

        What is returned stays readable after `drop`; whether its bytes are right, a checksum tells.
        """
        ...

    def drop(self, key: ChunkKey) -> None:
        """Forget a payload; nothing happens if it is absent. Modifies the store."""
        ...

    def keys(self) -> Iterable[ChunkKey]:
        """Every key kept. Changes nothing; invalid after the next `put` or `drop`."""
        ...


class HostStore(Generic[PayloadT]):
    """Payload objects kept in a dict; see `PayloadStore` for what each method does."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._used_bytes = 0
        self._payloads: dict[ChunkKey, PayloadT] = {}

    @property
    def budget_bytes(self) -> int:
        """Most bytes it may take."""
        return self._budget_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes taken now."""
        return self._used_bytes

    def put(self, key: ChunkKey, payload: PayloadT) -> bool:
        """Keep a payload; False if it does not fit."""
        old = self._payloads.get(key)
        used = self._used_bytes + payload.nbytes - (0 if old is None else old.nbytes)
        if used > self._budget_bytes:
            return False
        self._payloads[key] = payload
        self._used_bytes = used
        return True

    def get(self, key: ChunkKey) -> PayloadT | None:
        """The payload, or None if absent."""
        return self._payloads.get(key)

    def drop(self, key: ChunkKey) -> None:
        """Forget a payload, if it is there."""
        payload = self._payloads.pop(key, None)
        if payload is not None:
            self._used_bytes -= payload.nbytes

    def keys(self) -> Iterable[ChunkKey]:
        """Every key kept."""
        return self._payloads.keys()
