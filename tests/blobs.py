"""Payloads of plain bytes for the tests of stores, with the codec that makes them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from sglang_ext.chunk_index.index import NodeRecord
from sglang_ext.chunk_index.payloads import payload_checksum
from sglang_ext.errors import PayloadLost
from tests.strategies import BytesPayload, node_record

MAC_KEY = b"k" * 32


@dataclass
class BytesCodec:
    """Makes `BytesPayload`s, and counts them.

    Attributes:
        form: What this process calls its payloads; it takes no others.
        num_allocated: Payloads made.
    """

    form: bytes = b"bytes"
    num_allocated: int = 0

    def describe(self, payload: BytesPayload) -> bytes:
        """Its own form, whatever the payload."""
        return self.form

    def allocate(self, form: bytes, num_tokens: int, num_bytes: int) -> BytesPayload:
        """Zeros to be filled."""
        if form != self.form:
            raise PayloadLost("foreign", "another form")
        self.num_allocated += 1
        return BytesPayload(bytearray(num_bytes))


def random_payload(num_bytes: int, seed: int = 0) -> BytesPayload:
    """The same bytes for the same seed."""
    return BytesPayload(bytearray(Random(seed).randbytes(num_bytes)))


def record_of(payload: BytesPayload, name: str = "a", **fields: Any) -> NodeRecord:
    """The record a payload is put with; `fields` replace the defaults."""
    return node_record(
        name, payload_bytes=payload.nbytes, checksum=payload_checksum(payload), **fields
    )
