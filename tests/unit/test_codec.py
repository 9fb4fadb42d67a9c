"""Records survive as bytes, and bytes that are no record of ours are never taken for one."""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.chunk_index import keys
from sglang_ext.chunk_index.codec import (
    BODY_AT,
    BODY_BELOW_PARENT_AT,
    decode_node,
    decode_record,
    encode_body,
    encode_record,
)
from sglang_ext.chunk_index.identity import KEY_BYTES, ChunkKey
from sglang_ext.chunk_index.index import MAX_DOC_IDS, NodeRecord
from tests.strategies import named_key, node_record

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
any_text = st.text(st.characters(), max_size=40)  # lone surrogates too
names = st.sampled_from(["", "me", "0123456789abcdef", "0123456789ABCDEF", "0123456789abcdeg", "ü"])


@st.composite
def records(draw: st.DrawFn) -> NodeRecord:
    key = draw(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES))
    above = draw(st.none() | st.binary(min_size=KEY_BYTES - 1, max_size=KEY_BYTES - 1))
    return NodeRecord(
        key=ChunkKey(key),
        parent=None if above is None else ChunkKey(key[:1] + above),
        num_tokens=draw(uint32),
        payload_bytes=draw(uint64),
        checksum=draw(uint64),
        created_ms=draw(uint64),
        doc_ids=tuple(draw(st.lists(any_text, max_size=4))),
        expires_ms=draw(st.none() | st.integers(0, 2**64 - 2)),
        owner=draw(names),
        pinned=draw(st.booleans()),
        model=draw(names),
        compute_us=draw(uint32),
    )


RECORD = node_record("a", doc_ids=("d@1", "ü"), owner="0123456789abcdef", model="m", expires_ms=7)


@given(records())
def test_a_record_comes_back_as_it_was(record: NodeRecord) -> None:
    value = encode_record(record)
    assert decode_record(record.key, value) == record
    node = decode_node(record.key, value)
    assert node is not None
    assert node.record == record
    assert node.body == encode_body(record)


def test_a_new_node_has_no_uses_and_no_links() -> None:
    node = decode_node(RECORD.key, encode_record(RECORD))
    assert node is not None
    assert (node.num_hits, node.last_use_us, node.priority, node.num_children) == (0, 0, 0, 0)
    assert (node.first_child, node.previous, node.next, node.is_leaving) == (None,) * 3 + (False,)
    assert node.view().last_hit_ms is None


def test_the_layout_is_pinned_so_that_stored_records_stay_readable() -> None:
    record = node_record("a", owner="00000000000000ff", model="ff00000000000000", compute_us=5)
    assert (
        encode_record(record).hex()
        == (
            "50494301" + "00" * 53 + "da057fed"  # head, CRC
            "0a000000" + "6400000000000000" + "00" * 16 + "ff" * 8 + "05000000"
            "ff00000000000000ff" + "ffff00000000000000" + "00"
        )
    )


def test_heads_are_where_scripts_expect_bodies_to_begin() -> None:
    child = node_record("a1", "a")
    assert (BODY_AT, BODY_BELOW_PARENT_AT) == (57, 105)
    assert encode_record(RECORD)[BODY_AT:] == encode_body(RECORD)
    assert encode_record(child)[BODY_BELOW_PARENT_AT:] == encode_body(child)


def test_a_short_record_fits_a_block_of_128_bytes() -> None:
    record = node_record("a", owner="0123456789abcdef", model="fedcba9876543210")
    assert len(encode_record(record)) <= 128 - 4  # Redis adds 4


@pytest.mark.parametrize("record", [RECORD, node_record("a1", "a", doc_ids=("d",))])
def test_every_truncated_value_is_a_miss(record: NodeRecord) -> None:
    value = encode_record(record)
    for size in range(len(value)):
        assert decode_record(record.key, value[:size]) is None
        assert decode_node(record.key, value[:size]) is None
    assert decode_record(record.key, value + b"\0") is None


def test_every_flipped_bit_of_a_body_is_a_miss() -> None:
    value = encode_record(RECORD)
    for bit in range(8 * BODY_AT, 8 * len(value)):
        damaged = bytearray(value)
        damaged[bit // 8] ^= 1 << bit % 8
        assert decode_record(RECORD.key, bytes(damaged)) is None


@pytest.mark.parametrize("magic", [b"PIC\x02", b"PIC\x00", b"pic\x01", b"\0\0\0\0"])
def test_another_version_is_a_miss(magic: bytes) -> None:
    value = magic + encode_record(RECORD)[4:]
    assert decode_record(RECORD.key, value) is None
    assert decode_node(RECORD.key, value) is None


def test_flags_of_a_later_version_are_a_miss() -> None:
    value = bytearray(encode_record(RECORD))
    value[4] |= 0x80
    assert decode_record(RECORD.key, bytes(value)) is None
    assert decode_node(RECORD.key, bytes(value)) is None


def test_a_node_that_is_being_removed_cannot_be_matched() -> None:
    value = bytearray(encode_record(RECORD))
    value[4] |= 2
    assert decode_record(RECORD.key, bytes(value)) is None
    node = decode_node(RECORD.key, bytes(value))
    assert node is not None
    assert node.is_leaving
    assert node.record == RECORD


@given(st.binary(max_size=400))
def test_random_bytes_are_misses(value: bytes) -> None:
    assert decode_record(RECORD.key, value) is None
    assert decode_node(RECORD.key, b"PIC\x01" + value) is None


@given(st.binary(max_size=60))
def test_a_right_crc_over_nonsense_never_raises(rest: bytes) -> None:
    body = encode_body(RECORD)[4:44] + rest
    value = encode_record(RECORD)[:BODY_AT] + zlib.crc32(body).to_bytes(4, "little") + body
    decoded = decode_record(RECORD.key, value)
    assert decoded is None or encode_record(decoded)[BODY_AT:] == value[BODY_AT:]


def test_an_absent_value_is_a_miss() -> None:
    assert decode_record(RECORD.key, None) is None
    assert decode_node(RECORD.key, None) is None


def test_parent_and_child_of_different_shards_are_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="one shard"):
        encode_record(node_record("b1", "a"))


def test_more_documents_than_a_node_may_name_are_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        encode_record(replace(RECORD, doc_ids=("d",) * (MAX_DOC_IDS + 1)))


def test_keys_of_a_chunk_share_a_hash_tag_and_chunks_use_all_shards() -> None:
    tags = set()
    for first in range(256):
        key = ChunkKey(bytes([first]) + bytes(KEY_BYTES - 1))
        shard = keys.shard_of(key)
        tag = b"{%02x}" % shard
        tags.add(tag)
        names = [keys.node_key(key), keys.value_key(key, 1), keys.queue_key(shard, "me")]
        names += [keys.document_key(shard, "me", "d"), keys.totals_key(shard)]
        assert all(name.startswith(b"pic1:" + tag + b":") for name in names)
    assert len(tags) == keys.NUM_SHARDS


def test_a_payload_value_is_named_by_key_and_checksum() -> None:
    assert keys.value_key(named_key("a"), 0x0102) == (
        b"pic1:{21}:v:" + named_key("a") + b"\0\0\0\0\0\0\1\2"
    )
