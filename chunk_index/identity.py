"""What makes two chunks the same: cryptographic names for roots and for segments below them.

Knows bytes and token ids. Does not know how prompts are split, what is cached, or how a model's
fingerprint is made. Every digest is 128 bits of BLAKE2b over a framed encoding, so that keys are
equal in every process and on every host, and unequal for inputs that differ anywhere.

    root       |digest 16 bytes|               of model, namespace, secret and salt
    segment    |spread|digest 16 bytes|        of root, what precedes it in its chunk, and tokens

The spread byte is the first of the digest of a chunk's first segment, and all segments below that
have it: a shared index keeps a chunk in one place by it, and spreads chunks evenly.
"""

from __future__ import annotations

import hashlib
from typing import Any, NewType

import numpy as np
import numpy.typing as npt

from sglang_ext.errors import ShapeError

RootKey = NewType("RootKey", bytes)
"""`DIGEST_BYTES` bytes above all chunks of one model and one tenant."""

ChunkKey = NewType("ChunkKey", bytes)
"""`KEY_BYTES` bytes; a type of its own so that other bytes are not taken for a key."""

DIGEST_BYTES = 16
KEY_BYTES = 1 + DIGEST_BYTES

_ROOT_TAG = b"pic-root-v1"
_CHILD_TAG = b"pic-node-v1"
_NO_PARENT = bytes(DIGEST_BYTES)
_OWNER, _MODEL, _MAC = b"pic-owner-v1", b"pic-model-v1", b"pic-mac-v1"
_TOKEN_DTYPE = np.dtype("<i4")


def root_key(fingerprint: bytes, namespace: str, secret: bytes, salt: str = "") -> RootKey:
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
    digest = hashlib.blake2b(framed, key=_sized(secret), digest_size=DIGEST_BYTES)
    return RootKey(digest.digest())


def child_key(
    root: RootKey, parent: ChunkKey | None, token_ids: npt.NDArray[np.integer[Any]]
) -> ChunkKey:
    """The key of a segment: what precedes it in its chunk, and its tokens.

    The root, which stands in no shared index, enters every key: who reads one key cannot test
    guesses of the tokens below it.

    Args:
        root: Key of model and tenant, from `root_key`.
        parent: Key of the segment before it in the same chunk; None for a chunk's first.
        token_ids: `[num_tokens]`, any integer dtype, values within int32, at least one token.

    Returns:
        17 bytes, whatever the dtype, byte order and strides of `token_ids`.

    Raises:
        ShapeError: `token_ids` is empty, not one-dimensional, not integer, or beyond int32.
    """
    assert len(root) == DIGEST_BYTES, "every field before the tokens has a fixed width"
    assert parent is None or len(parent) == KEY_BYTES
    above = _NO_PARENT if parent is None else parent[1:]
    framed = b"".join((_CHILD_TAG, root, above, _uint64(token_ids.size), _token_bytes(token_ids)))
    digest = hashlib.blake2b(framed, digest_size=DIGEST_BYTES).digest()
    return ChunkKey((digest if parent is None else parent)[:1] + digest)


def owner_id(namespace: str, secret: bytes) -> str:
    """Names a namespace in records and accounts without telling it: 16 hex digits."""
    digest = hashlib.blake2b(_utf8(namespace), key=_sized(secret), digest_size=8, person=_OWNER)
    return digest.hexdigest()


def model_id(fingerprint: bytes) -> str:
    """Names a model in records: 16 hex digits of its fingerprint's digest."""
    return hashlib.blake2b(fingerprint, digest_size=8, person=_MODEL).hexdigest()


def mac_key(secret: bytes) -> bytes:
    """32 bytes that authenticate payloads of servers that share a secret."""
    return hashlib.blake2b(key=_sized(secret), digest_size=32, person=_MAC).digest()


def _token_bytes(token_ids: npt.NDArray[np.integer[Any]]) -> bytes:
    if token_ids.ndim != 1 or token_ids.size == 0 or token_ids.dtype.kind not in "iu":
        got = f"{token_ids.dtype}{list(token_ids.shape)}"
        raise ShapeError(f"token_ids: expected integers [num_tokens >= 1], got {got}")
    ids = token_ids.astype(_TOKEN_DTYPE, copy=False)
    if ids is not token_ids and not np.array_equal(ids, token_ids):
        raise ShapeError("token_ids: expected values within int32, got larger ones")
    return ids.tobytes()


def _sized(secret: bytes) -> bytes:
    """Any secret as a BLAKE2b key, which has at most 64 bytes."""
    return hashlib.blake2b(secret).digest()


def _uint64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # JSON may carry lone surrogates
