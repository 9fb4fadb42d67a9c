"""The host store keeps payload objects themselves; checksums find every flipped bit."""

from __future__ import annotations

import pytest

from sglang_ext.chunk_index.payloads import HostStore, payload_checksum
from sglang_ext.errors import PayloadLost
from tests.blobs import random_payload, record_of
from tests.strategies import BytesPayload


def test_what_was_put_is_returned_without_a_copy() -> None:
    store: HostStore[BytesPayload] = HostStore()
    payload = random_payload(10)
    store.put(record_of(payload), payload)
    assert store.get(record_of(payload)) is payload


def test_another_payload_of_a_key_replaces_the_first() -> None:
    store: HostStore[BytesPayload] = HostStore()
    first, second = random_payload(6, seed=1), random_payload(9, seed=2)
    store.put(record_of(first), first)
    store.put(record_of(second), second)
    assert store.get(record_of(second)) is second
    assert list(store.records()) == [record_of(second)]
    with pytest.raises(PayloadLost, match="absent"):
        store.get(record_of(first))


def test_records_may_be_dropped_while_they_are_listed() -> None:
    store: HostStore[BytesPayload] = HostStore()
    payload = random_payload(6)
    for name in "abc":
        store.put(record_of(payload, name), payload)
    for record in store.records():
        store.drop(record)
    assert list(store.records()) == []


def test_the_checksum_is_pinned_so_that_stored_ones_stay_valid() -> None:
    assert payload_checksum(BytesPayload(bytearray(b"chunk"))) == 8438847523455501592


@pytest.mark.parametrize("bit", [0, 7, 8 * 99 + 3])
def test_one_flipped_bit_changes_the_checksum(bit: int) -> None:
    some = random_payload(100)
    before = payload_checksum(some)
    some.data[bit // 8] ^= 1 << bit % 8
    assert payload_checksum(some) != before
