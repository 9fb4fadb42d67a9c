"""A blob is its record's payload to the bit, or it is lost, and nothing is allocated for it."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.chunk_index.blob import LEAF_BYTES, MAX_HEAD_BYTES, BlobFormat, Head
from sglang_ext.chunk_index.index import NodeRecord
from sglang_ext.errors import PayloadLost, TierUnavailable
from tests.blobs import MAC_KEY, BytesCodec, random_payload, record_of
from tests.strategies import BytesPayload, named_key

PAYLOAD = random_payload(5000)
RECORD = record_of(PAYLOAD, "a1", parent="a", doc_ids=("doc@1", "文"), created_ms=7)
MAGIC = b"PICKV\x01\r\n"

every_key = pytest.mark.parametrize("key", [None, MAC_KEY], ids=["plain", "mac"])


@dataclass
class Bytes:
    """A blob in memory."""

    data: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.data)

    def read(self, start: int, into: memoryview) -> None:
        assert start + into.nbytes <= len(self.data)
        into[:] = self.data[start : start + into.nbytes]


def blob_of(
    payload: BytesPayload = PAYLOAD, record: NodeRecord = RECORD, key: bytes | None = None
) -> bytes:
    return BlobFormat(key).write_head(record, b"bytes", payload.buffer()) + bytes(payload.data)


def load(
    blob: bytes, record: NodeRecord = RECORD, key: bytes | None = None, codec: Any = None
) -> BytesPayload:
    return BlobFormat(key).load(Bytes(blob), record, codec or BytesCodec(), LEAF_BYTES)


def reason(call: Callable[[], object]) -> str:
    with pytest.raises(PayloadLost) as caught:
        call()
    return caught.value.reason


def why_lost(blob: bytes, record: NodeRecord = RECORD, key: bytes | None = None) -> str:
    """Why a blob is lost; nothing may have been allocated unless its body is what is wrong."""
    codec = BytesCodec()
    lost = reason(lambda: load(blob, record, key, codec))
    assert codec.num_allocated == 0
    return lost


def sealed(header: bytes, key: bytes = b"") -> bytes:
    """A head with the right tag around any header, as the format's description says."""
    data = MAGIC + len(header).to_bytes(4, "little") + header
    tag = hashlib.blake2b(data, key=key, digest_size=32, person=b"pic-head-v1").digest()
    return (data + tag).ljust(-(-len(data + tag) // 4096) * 4096, b"\0")


def header_of(blob: bytes) -> dict[str, Any]:
    length = int.from_bytes(blob[8:12], "little")
    header: dict[str, Any] = msgspec.msgpack.decode(blob[12 : 12 + length])
    return header


def flip(blob: bytes, bit: int) -> bytes:
    flipped = bytearray(blob)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


@every_key
def test_a_head_tells_the_record_and_the_form(key: bytes | None) -> None:
    head = BlobFormat(key).read_head(blob_of(key=key))
    assert head == Head(RECORD, b"bytes", head.mac, 4096)
    assert len(head.mac) == (32 if key else 0)


@pytest.mark.parametrize(
    ("key", "digest"),
    [(None, "4b3db33dd72bff9b"), (MAC_KEY, "2ac1ad314cfa9eb1")],
    ids=["plain", "mac"],
)
def test_the_head_is_pinned_so_that_stored_blobs_stay_valid(key: bytes | None, digest: str) -> None:
    payload = random_payload(LEAF_BYTES + 1)
    blob = blob_of(payload, record_of(payload), key)
    assert hashlib.sha256(blob[: -payload.nbytes]).hexdigest()[:16] == digest


def test_the_head_is_made_as_its_description_says() -> None:
    blob = blob_of()
    assert blob.startswith(MAGIC)
    assert sealed(msgspec.msgpack.encode(header_of(blob))) == blob[:4096]
    assert blob[4096:] == PAYLOAD.data


def test_every_field_of_a_record_is_kept() -> None:
    assert {field.name for field in fields(NodeRecord)} | {"form", "mac"} == set(
        header_of(blob_of())
    )


@pytest.mark.parametrize("num_bytes", [0, 1, LEAF_BYTES, LEAF_BYTES + 1, 3 * LEAF_BYTES])
@every_key
def test_a_body_of_any_size_is_loaded_whole(key: bytes | None, num_bytes: int) -> None:
    payload = random_payload(num_bytes)
    record = record_of(payload)
    assert load(blob_of(payload, record, key), record, key) == payload


@every_key
def test_a_flipped_bit_anywhere_in_the_head_is_found(key: bytes | None) -> None:
    blob = blob_of(key=key)
    for byte in range(4096):
        lost = why_lost(flip(blob, 8 * byte + byte % 8), key=key)
        assert lost in ({"damaged", "forged", "foreign"} if byte == 5 else {"damaged", "forged"})


@pytest.mark.parametrize("byte", [0, 1, 2499, 4999])
@every_key
def test_a_flipped_bit_in_the_body_is_found(key: bytes | None, byte: int) -> None:
    blob = flip(blob_of(key=key), 8 * (4096 + byte))
    assert reason(lambda: load(blob, key=key)) == "damaged"


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 11, 12, 13, 300, 4095, 4096, 4097, 9095])
@every_key
def test_a_blob_cut_anywhere_is_truncated(key: bytes | None, num_bytes: int) -> None:
    assert why_lost(blob_of(key=key)[:num_bytes], key=key) == "truncated"


def test_a_blob_cut_in_a_long_head_is_truncated() -> None:
    record = replace(RECORD, doc_ids=("d" * 9000,))
    blob = blob_of(record=record)
    assert load(blob, record) == PAYLOAD
    for num_bytes in (4096, 4097, 8192, 12287):
        assert why_lost(blob[:num_bytes], record) == "truncated"


@every_key
def test_bytes_behind_the_body_are_damage(key: bytes | None) -> None:
    assert why_lost(blob_of(key=key) + b"x", key=key) == "damaged"


def test_another_version_is_foreign() -> None:
    blob = blob_of()
    assert why_lost(blob[:5] + b"\x02" + blob[6:]) == "foreign"


@pytest.mark.parametrize("name", ["key", "checksum", "num_tokens", "payload_bytes"])
def test_the_payload_of_another_record_is_foreign(name: str) -> None:
    other = named_key("b") if name == "key" else getattr(RECORD, name) + 1
    assert why_lost(blob_of(), replace(RECORD, **{name: other})) == "foreign"


def test_the_payload_of_another_form_is_foreign() -> None:
    codec = BytesCodec(b"other")
    assert reason(lambda: load(blob_of(), codec=codec)) == "foreign"
    assert codec.num_allocated == 0


@pytest.mark.parametrize("length", [MAX_HEAD_BYTES - 43, 2**31, 2**32 - 1])
def test_a_huge_declared_header_allocates_nothing(length: int) -> None:
    blob = MAGIC + length.to_bytes(4, "little") + bytes(9000)
    tracemalloc.start()
    try:
        assert why_lost(blob) == "damaged"
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_a_huge_declared_payload_allocates_nothing() -> None:
    header = header_of(blob_of()) | {"payload_bytes": 2**62}
    blob = sealed(msgspec.msgpack.encode(header)) + bytes(5000)
    assert why_lost(blob, replace(RECORD, payload_bytes=2**62)) == "truncated"


@pytest.mark.parametrize(
    "change",
    [
        {"unknown": 1},
        {"num_tokens": -1},
        {"num_tokens": 10.0},
        {"num_tokens": "10"},
        {"num_tokens": True},
        {"payload_bytes": None},
        {"pinned": 0},
        {"key": b"short"},
        {"key": "x" * 17},
        {"parent": b""},
        {"doc_ids": [1]},
        {"doc_ids": [b"\xff"]},
        {"doc_ids": {}},
        {"form": bytes(257)},
        {"owner": b"me"},
    ],
    ids=str,
)
def test_a_header_of_other_fields_or_types_is_damaged(change: dict[str, Any]) -> None:
    blob = sealed(msgspec.msgpack.encode(header_of(blob_of()) | change)) + PAYLOAD.data
    assert why_lost(blob) == "damaged"


@pytest.mark.parametrize("name", [field.name for field in fields(NodeRecord)])
def test_a_header_without_a_field_is_damaged(name: str) -> None:
    header = header_of(blob_of())
    del header[name]
    assert why_lost(sealed(msgspec.msgpack.encode(header)) + PAYLOAD.data) == "damaged"


def test_document_ids_too_long_for_a_head_are_refused() -> None:
    record = replace(RECORD, doc_ids=("d" * MAX_HEAD_BYTES,))
    with pytest.raises(TierUnavailable, match="head"):
        blob_of(record=record)


def test_a_blob_of_a_writer_without_the_key_is_forged() -> None:
    assert why_lost(blob_of(), key=MAC_KEY) == "forged"
    assert why_lost(blob_of(key=b"x" * 32), key=MAC_KEY) == "forged"


def test_a_blob_of_a_writer_with_a_key_is_not_read_without() -> None:
    assert why_lost(blob_of(key=MAC_KEY)) == "damaged"


def test_a_forger_who_computes_the_checksum_again_is_found() -> None:
    other = random_payload(5000, seed=1)
    forged = blob_of(other, record_of(other, "a1"))
    record = replace(RECORD, checksum=xxhash.xxh3_64_intdigest(other.data))
    assert load(forged, record) == other
    assert why_lost(forged, record, MAC_KEY) == "forged"


@pytest.mark.parametrize("change", ["other", "swapped", "moved"])
def test_a_body_of_equal_checksum_is_not_taken_for_the_one_that_was_written(change: str) -> None:
    """xxh3 collisions can be made: the head here is genuine and has the forged body's checksum."""
    payload = random_payload(2 * LEAF_BYTES)
    first, second = payload.data[:LEAF_BYTES], payload.data[LEAF_BYTES:]
    changed = {
        "other": flip(bytes(payload.data), 8 * LEAF_BYTES),
        "swapped": second + first,
        "moved": bytes(payload.data[1:]) + b"\0",
    }[change]
    record = replace(record_of(payload), checksum=xxhash.xxh3_64_intdigest(changed))
    head = BlobFormat(MAC_KEY).write_head(record, b"bytes", payload.buffer())
    assert reason(lambda: load(head + changed, record, MAC_KEY)) == "forged"


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
headers = st.binary(max_size=200) | values.map(msgspec.msgpack.encode)
some_headers = st.dictionaries(st.sampled_from(sorted(header_of(blob_of()))), values).map(
    lambda change: msgspec.msgpack.encode(header_of(blob_of()) | change)
)


@given(st.binary(max_size=200), st.sampled_from([b"", MAGIC, MAGIC[:6], MAGIC + b"\x10\0\0\0"]))
def test_random_bytes_are_lost_and_nothing_else(data: bytes, start: bytes) -> None:
    for blob in (start + data, (start + data).ljust(9096, b"\0")):
        assert why_lost(blob) in {"truncated", "damaged", "foreign"}


@given(headers)
def test_random_headers_with_a_right_tag_are_lost_and_nothing_else(header: bytes) -> None:
    for key in (b"", MAC_KEY):
        assert why_lost(sealed(header, key) + PAYLOAD.data, key=key or None) == "damaged"


@given(some_headers)
def test_random_fields_with_a_right_tag_are_lost_or_change_nothing(header: bytes) -> None:
    with suppress(PayloadLost):
        assert load(sealed(header) + PAYLOAD.data) == PAYLOAD
