"""What makes two chunks the same: cryptographic names for roots and for segments below them.

Knows bytes and token ids. Does not know how prompts are split, what is cached, or how a model's
fingerprint is made. Every digest is 128 bits of BLAKE2b over a framed encoding, so that keys are
equal in every process and on every host, and unequal for inputs that differ anywhere.
"""

from __future__ import annotations

import hashlib
from typing import Any, NewType

import numpy as np
import numpy.typing as npt

from sglang_ext.errors import ShapeError

ChunkKey = NewType("ChunkKey", bytes)
"""Digest of `KEY_BYTES` bytes; a type of its own so that other bytes are not taken for a key."""

KEY_BYTES = 16

_ROOT_TAG = b"pic-root-v1"
_CHILD_TAG = b"pic-node-v1"
_TOKEN_DTYPE = np.dtype("<i4")


def root_key(fingerprint: bytes, namespace: str, secret: bytes, salt: str = "") -> ChunkKey:
    """The key above all chunks of one model and one tenant.

    Args:
        fingerprint: Everything the KV depends on besides tokens: weights, dtypes, rope, TP size.
        namespace: Tenant; without `secret` nobody can compute another tenant's keys.
        secret: Server secret of any length; servers that share an index share it.
        salt: SGLang's `cache_salt` or `extra_key`; requests with different salts share nothing.

    Returns:
        16 bytes; equal only if all four arguments are equal.
    """
    fields = (_ROOT_TAG, fingerprint, _utf8(namespace), _utf8(salt))
    framed = b"".join(_uint64(len(field)) + field for field in fields)
    key = hashlib.blake2b(secret).digest()  # BLAKE2b takes at most 64 bytes of key
    return ChunkKey(hashlib.blake2b(framed, key=key, digest_size=KEY_BYTES).digest())


def child_key(parent: ChunkKey, token_ids: npt.NDArray[np.integer[Any]]) -> ChunkKey:
    """The key of a segment: what precedes it in its chunk, and its tokens.

    Args:
        parent: Key of the segment before it in the same chunk, or the root's key.
        token_ids: `[num_tokens]`, any integer dtype, values within int32, at least one token.

    Returns:
        16 bytes, whatever the dtype, byte order and strides of `token_ids`.

    Raises:
        ShapeError: `token_ids` is empty, not one-dimensional, not integer, or beyond int32.
    """
    assert len(parent) == KEY_BYTES, "every field before the tokens has a fixed width"
    framed = b"".join((_CHILD_TAG, parent, _uint64(token_ids.size), _token_bytes(token_ids)))
    return ChunkKey(hashlib.blake2b(framed, digest_size=KEY_BYTES).digest())


def _token_bytes(token_ids: npt.NDArray[np.integer[Any]]) -> bytes:
    if token_ids.ndim != 1 or token_ids.size == 0 or token_ids.dtype.kind not in "iu":
        got = f"{token_ids.dtype}{list(token_ids.shape)}"
        raise ShapeError(f"token_ids: expected integers [num_tokens >= 1], got {got}")
    ids = token_ids.astype(_TOKEN_DTYPE, copy=False)
    if ids is not token_ids and not np.array_equal(ids, token_ids):
        raise ShapeError("token_ids: expected values within int32, got larger ones")
    return ids.tobytes()


def _uint64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # JSON may carry lone surrogates
