"""The host store counts every byte and never takes more than its budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.chunk_index.payloads import HostStore, payload_checksum
from tests.strategies import BytesPayload, named_key

A, B = named_key("a"), named_key("b")


def payload(num_bytes: int) -> BytesPayload:
    return BytesPayload(bytearray(num_bytes))


def test_what_was_put_is_returned_as_it_is() -> None:
    store: HostStore[BytesPayload] = HostStore(10)
    kept = payload(10)
    assert store.put(A, kept)
    assert store.get(A) is kept
    assert store.get(B) is None


def test_a_payload_beyond_the_budget_is_refused_and_changes_nothing() -> None:
    store: HostStore[BytesPayload] = HostStore(10)
    old = payload(6)
    assert store.put(A, old)
    assert not store.put(B, payload(5))
    assert not store.put(A, payload(11))
    assert store.get(A) is old
    assert (store.used_bytes, list(store.keys())) == (6, [A])


def test_a_replaced_payload_gives_its_bytes_back() -> None:
    store: HostStore[BytesPayload] = HostStore(10)
    assert store.put(A, payload(6))
    assert store.put(A, payload(9))
    assert store.used_bytes == 9


def test_dropping_twice_gives_bytes_back_once() -> None:
    store: HostStore[BytesPayload] = HostStore(10)
    store.put(A, payload(6))
    store.put(B, payload(1))
    store.drop(A)
    store.drop(A)
    assert store.used_bytes == 1


def test_the_checksum_is_pinned_so_that_stored_ones_stay_valid() -> None:
    assert payload_checksum(BytesPayload(bytearray(b"chunk"))) == 8438847523455501592


@pytest.mark.parametrize("bit", [0, 7, 8 * 99 + 3])
def test_one_flipped_bit_changes_the_checksum(bit: int) -> None:
    some = payload(100)
    before = payload_checksum(some)
    some.data[bit // 8] ^= 1 << bit % 8
    assert payload_checksum(some) != before


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abc"), st.integers(0, 8))))
def test_used_bytes_are_the_sum_of_what_is_kept(steps: list[tuple[bool, str, int]]) -> None:
    store: HostStore[BytesPayload] = HostStore(12)
    for is_put, name, size in steps:
        if is_put:
            store.put(named_key(name), payload(size))
        else:
            store.drop(named_key(name))
        kept = [found for key in [*store.keys()] if (found := store.get(key)) is not None]
        assert store.used_bytes == sum(one.nbytes for one in kept) <= store.budget_bytes
