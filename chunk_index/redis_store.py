"""`RedisStore`: payloads as Redis values, for small deployments.

    pic1:{T}:v:<key><checksum>    a blob; see `keys`

Knows how a blob is put, and read in pieces. Does not know servers or connections, nor the index,
whose scripts keep a value when its record is published, and remove it with its record: a value that
is never published ends by itself after `keys.VALUE_S`.

A value is read in blocks, each a call with a deadline of its own, and its length is asked before
anything of it is fetched.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Generic, Protocol

from sglang_ext.chunk_index.blob import LEAF_BYTES, BlobFormat
from sglang_ext.chunk_index.identity import KEY_BYTES, ChunkKey
from sglang_ext.chunk_index.index import NodeRecord
from sglang_ext.chunk_index.keys import PREFIX, VALUE_S, value_key
from sglang_ext.chunk_index.payloads import OnBytes, PayloadCodec, PayloadT
from sglang_ext.errors import IndexUnavailable, PayloadLost, TierUnavailable

logger = logging.getLogger(__name__)

READ_BYTES = LEAF_BYTES
MAX_VALUE_BYTES = 16 << 20

_PATTERN = PREFIX + b"{??}:v:*"


class ValueCalls(Protocol):
    """What is asked of a connection; each call within a deadline of its own."""

    def call(self, *words: bytes | str | int | float) -> object:
        """The reply of one command, whose second word is a key.

        Raises:
            IndexUnavailable: There is none, or it is an error.
        """
        ...

    def scan_keys(self, pattern: bytes) -> Iterator[bytes]:
        """The keys of every server that match, some perhaps twice; raises as `call`."""
        ...


class ValueLink(Protocol):
    """The way to Redis, as `redis_link.RedisLink` has it."""

    def background(self) -> ValueCalls:
        """Calls that no request waits for."""
        ...


class _ValueSource:
    """A value as a blob."""

    def __init__(self, calls: ValueCalls, name: bytes) -> None:
        self._calls = calls
        self._name = name
        num_bytes = calls.call("STRLEN", name)
        if not isinstance(num_bytes, int) or num_bytes == 0:
            raise PayloadLost("absent")
        self.num_bytes = num_bytes

    def read(self, start: int, into: memoryview) -> None:
        """Fill `into` with one call."""
        data = self._calls.call("GETRANGE", self._name, start, start + into.nbytes - 1)
        if not isinstance(data, bytes) or len(data) != into.nbytes:
            raise PayloadLost("truncated" if data else "absent", "it changed meanwhile")
        into[:] = data


class RedisStore(Generic[PayloadT]):
    """A `PayloadStore` in Redis; see there for what each method does."""

    def __init__(
        self,
        link: ValueLink,
        codec: PayloadCodec[PayloadT],
        mac_key: bytes | None = None,
        max_value_bytes: int = MAX_VALUE_BYTES,
    ) -> None:
        """Asks nothing.

        Args:
            link: The way to Redis; the caller closes it.
            codec: How payloads are described and made.
            mac_key: From `identity.mac_key`; servers with the same one trust each other's values.
            max_value_bytes: Largest value, its head included; a larger one would block the server
                for others while it is sent.
        """
        self._calls = link.background()
        self._codec = codec
        self._format = BlobFormat(mac_key)
        self._max_value_bytes = max_value_bytes

    def probe(self) -> None:
        """Write, read and remove a small value.

        Raises:
            TierUnavailable: One of it cannot be done; the message says why, in one line.
        """
        name = value_key(ChunkKey(secrets.token_bytes(KEY_BYTES)), 0)
        data = secrets.token_bytes(64)
        with _translated():
            self._calls.call("SET", name, data, "EX", VALUE_S)
            if self._calls.call("GETRANGE", name, 0, -1) != data:
                raise TierUnavailable("Redis: reads back other bytes than were written")
            self._calls.call("UNLINK", name)

    def put(self, record: NodeRecord, payload: PayloadT) -> None:
        """Keep a payload until it is published, for `keys.VALUE_S` at most.

        One of the same name stays as it is, and how long it stays: it may be published already.
        """
        body = payload.buffer()
        head = self._format.write_head(record, self._codec.describe(payload), body)
        num_bytes = len(head) + body.nbytes
        if num_bytes > self._max_value_bytes:
            limit = self._max_value_bytes
            raise TierUnavailable(f"a value of {num_bytes} bytes is too large, at most {limit}")
        with _translated():
            value = b"".join((head, body))
            self._calls.call("SET", _name(record), value, "EX", VALUE_S, "NX")

    def get(self, record: NodeRecord, on_bytes: OnBytes | None = None) -> PayloadT:
        """The payload of a record, every byte checked."""
        with _translated():
            source = _ValueSource(self._calls, _name(record))
            if source.num_bytes > self._max_value_bytes:
                raise PayloadLost("foreign", f"a value of {source.num_bytes} bytes")
            return self._format.load(source, record, self._codec, READ_BYTES, on_bytes)

    def drop(self, record: NodeRecord) -> None:
        """Forget a payload, if it is there and Redis can be reached."""
        with suppress(IndexUnavailable):
            self._calls.call("UNLINK", _name(record))

    def records(self) -> Iterator[NodeRecord]:
        """What is kept; reads every value's head. Ends early if Redis cannot be reached."""
        try:
            for name in self._calls.scan_keys(_PATTERN):
                record = self._record_at(name)
                if record is not None:
                    yield record
        except IndexUnavailable as exc:
            logger.warning("pic store: cannot list values: %s", exc)

    def _record_at(self, name: bytes) -> NodeRecord | None:
        """The record of a whole payload that has its name; None of anything else."""
        with suppress(PayloadLost, IndexUnavailable):  # the next page tells of an outage
            head = self._format.load_head(_ValueSource(self._calls, name))
            return head.record if _name(head.record) == name else None
        return None


def _name(record: NodeRecord) -> bytes:
    return value_key(record.key, record.checksum)


@contextmanager
def _translated() -> Iterator[None]:
    """Turn what the link says into `TierUnavailable`."""
    try:
        yield
    except IndexUnavailable as exc:
        raise TierUnavailable(str(exc)) from exc
