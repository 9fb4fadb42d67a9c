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

from sglang_ext.chunk_index.identity import KEY_BYTES, ChunkKey, child_key, root_key
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
    assert child_key(ROOT, ids(1, 2, 3)).hex() == "e526d01276981b9af6b9b3152e1d8f68"


def test_processes_with_different_hash_seeds_agree() -> None:
    program = (
        "import numpy as np\n"
        "from sglang_ext.chunk_index.identity import child_key, root_key\n"
        "print(child_key(root_key(b'fp', 'ns', b's'), np.arange(300)).hex())"
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
    assert printed == [child_key(ROOT, np.arange(300)).hex()] * 2


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
    key = child_key(ROOT, tokens)
    assert len(key) == KEY_BYTES
    assert child_key(ROOT, tokens.astype(np.int64)) == key
    assert child_key(ROOT, tokens.astype(">i4")) == key
    assert child_key(ROOT, np.repeat(tokens, 2)[::2]) == key


@given(token_ids(max_len=6), token_ids(max_len=6))
def test_children_are_equal_only_if_their_tokens_are(
    left: npt.NDArray[np.int32], right: npt.NDArray[np.int32]
) -> None:
    same = left.tolist() == right.tolist()
    assert (child_key(ROOT, left) == child_key(ROOT, right)) == same


def test_the_same_tokens_below_another_parent_are_another_child() -> None:
    assert child_key(ROOT, ids(1)) != child_key(child_key(ROOT, ids(2)), ids(1))


def test_one_segment_of_two_tokens_is_not_two_segments_of_one() -> None:
    assert child_key(ROOT, ids(1, 2)) != child_key(child_key(ROOT, ids(1)), ids(2))


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
        child_key(ROOT, tokens)


def test_a_parent_that_is_no_digest_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        child_key(ChunkKey(b"short"), ids(1))
