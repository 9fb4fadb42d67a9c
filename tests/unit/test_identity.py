"""Keys are the same everywhere for the same input and differ for any other."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.chunk_index.identity import (
    DIGEST_BYTES,
    KEY_BYTES,
    ChunkKey,
    child_key,
    mac_key,
    model_id,
    owner_id,
    root_key,
)
from sglang_ext.errors import ShapeError
from tests.strategies import token_ids

ROOT = root_key(b"fp", "ns", b"s")

root_inputs = st.tuples(
    st.binary(max_size=4), st.text(max_size=4), st.binary(max_size=4), st.text(max_size=4)
)


def ids(*tokens: int) -> npt.NDArray[np.int32]:
    return np.array(tokens, dtype=np.int32)


def test_root_and_child_keys_equal_the_pinned_vectors() -> None:
    assert ROOT.hex() == "b2dd4a0283bedf2cf5a097f1387db8c0"
    assert root_key(b"fp", "ns", b"s", "salt").hex() == "986d5c612a41c0625b89300b99479c93"
    child = child_key(ROOT, None, ids(1, 2, 3))
    assert child.hex() == "3737f0a020f63bace99cb416ac4abe8563"
    assert child_key(ROOT, child, ids(4)).hex() == "3767eabcbde9f0c82cdd281e7d1f464d0f"


def test_digests_of_names_equal_the_pinned_vectors() -> None:
    assert owner_id("ns", b"s") == "f6d237d7c6117335"
    assert model_id(b"fp") == "6fa2ca06df2b3fc0"
    expected = "98cb295bd99fafcdce34bc31921ead628d4f5cfd3201a558414e569f33a44d98"
    assert mac_key(b"s").hex() == expected


def test_processes_with_different_hash_seeds_agree() -> None:
    program = (
        "import numpy as np\n"
        "from sglang_ext.chunk_index.identity import child_key, root_key\n"
        "print(child_key(root_key(b'fp', 'ns', b's'), None, np.arange(300)).hex())"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout.strip()
        for seed in ("1", "2")
    ]
    assert printed == [child_key(ROOT, None, np.arange(300)).hex()] * 2


@given(root_inputs, root_inputs)
def test_roots_are_equal_only_if_all_inputs_are(
    left: tuple[bytes, str, bytes, str], right: tuple[bytes, str, bytes, str]
) -> None:
    assert (root_key(*left) == root_key(*right)) == (left == right)


def test_a_byte_moved_from_one_field_to_the_next_changes_the_root() -> None:
    roots = {
        root_key(b"ab", "c", b"s"),
        root_key(b"a", "bc", b"s"),
        root_key(b"ab", "", b"s", "c"),
        root_key(b"abc", "", b"s"),
    }
    assert len(roots) == 4


def test_a_secret_longer_than_the_hash_key_counts_to_its_last_byte() -> None:
    assert root_key(b"fp", "ns", b"x" * 99 + b"1") != root_key(b"fp", "ns", b"x" * 99 + b"2")


def test_a_namespace_with_a_lone_surrogate_has_a_key_of_its_own() -> None:
    assert root_key(b"fp", "\ud800", b"s") != root_key(b"fp", "\ud801", b"s")


@given(token_ids(max_len=40))
def test_dtype_byte_order_and_strides_do_not_matter(tokens: npt.NDArray[np.int32]) -> None:
    key = child_key(ROOT, None, tokens)
    assert len(key) == KEY_BYTES
    assert child_key(ROOT, None, tokens.astype(np.int64)) == key
    assert child_key(ROOT, None, tokens.astype(">i4")) == key
    assert child_key(ROOT, None, np.repeat(tokens, 2)[::2]) == key


@given(token_ids(max_len=6), token_ids(max_len=6))
def test_children_are_equal_only_if_their_tokens_are(
    left: npt.NDArray[np.int32], right: npt.NDArray[np.int32]
) -> None:
    same = left.tolist() == right.tolist()
    assert (child_key(ROOT, None, left) == child_key(ROOT, None, right)) == same


def test_the_same_tokens_below_another_parent_are_another_child() -> None:
    assert child_key(ROOT, None, ids(1)) != child_key(ROOT, child_key(ROOT, None, ids(2)), ids(1))


def test_who_knows_a_key_but_not_the_root_cannot_name_what_is_below_it() -> None:
    other = root_key(b"fp", "ns", b"another secret")
    parent = child_key(ROOT, None, ids(1))
    assert child_key(ROOT, parent, ids(2)) != child_key(other, parent, ids(2))


def test_one_segment_of_two_tokens_is_not_two_segments_of_one() -> None:
    one = child_key(ROOT, None, ids(1))
    assert child_key(ROOT, None, ids(1, 2)) != child_key(ROOT, one, ids(2))


@pytest.mark.parametrize(
    "tokens",
    [
        np.array([], dtype=np.int32),
        np.array([[1, 2]], dtype=np.int32),
        np.array([1.0, 2.0]),
        np.array([2**31]),
        np.array([2**32 + 1], dtype=np.uint64),
    ],
    ids=["empty", "two-dimensional", "float", "beyond-int32", "wraps-to-1"],
)
def test_tokens_that_int32_cannot_hold_are_refused(tokens: npt.NDArray[Any]) -> None:
    with pytest.raises(ShapeError, match="token_ids"):
        child_key(ROOT, None, tokens)


def test_a_parent_that_is_no_digest_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        child_key(ROOT, ChunkKey(b"short"), ids(1))


@given(st.lists(token_ids(max_len=4), min_size=1, max_size=5))
def test_all_segments_of_a_chunk_have_the_first_byte_of_the_firsts_digest(
    segments: list[npt.NDArray[np.int32]],
) -> None:
    first = key = child_key(ROOT, None, segments[0])
    assert first[0] == first[1]
    for tokens in segments[1:]:
        key = child_key(ROOT, key, tokens)
        assert len(key) == KEY_BYTES
        assert key[0] == first[0]


def test_chunks_spread_over_all_first_bytes() -> None:
    spread = {child_key(ROOT, None, ids(i))[0] for i in range(4000)}
    assert len(spread) == 256


def test_a_key_is_made_of_the_root_and_its_parents_digest_alone() -> None:
    """The spread byte is no part of a name: it cannot make two names of one."""
    key = child_key(ROOT, None, ids(1))
    moved = ChunkKey(bytes([key[0] ^ 1]) + key[1:])
    assert child_key(ROOT, moved, ids(2))[1:] == child_key(ROOT, key, ids(2))[1:]


owner_inputs = st.tuples(st.text(max_size=4), st.binary(max_size=4))


@given(owner_inputs, owner_inputs)
def test_owners_are_equal_only_if_namespace_and_secret_are(
    left: tuple[str, bytes], right: tuple[str, bytes]
) -> None:
    assert (owner_id(*left) == owner_id(*right)) == (left == right)


@given(st.binary(max_size=4), st.binary(max_size=4))
def test_models_and_mac_keys_are_equal_only_if_their_inputs_are(left: bytes, right: bytes) -> None:
    assert (model_id(left) == model_id(right)) == (left == right)
    assert (mac_key(left) == mac_key(right)) == (left == right)


def test_digests_have_their_sizes_and_share_nothing() -> None:
    digests = {owner_id("x", b"x"), model_id(b"x"), mac_key(b"x").hex()[:16]}
    assert {len(digest) for digest in digests} == {16}
    assert len(digests) == 3
    assert len(mac_key(b"")) == 32
    assert len(ROOT) == DIGEST_BYTES


def test_an_owner_with_a_lone_surrogate_has_a_digest_of_its_own() -> None:
    assert owner_id("\ud800", b"s") != owner_id("\ud801", b"s")
