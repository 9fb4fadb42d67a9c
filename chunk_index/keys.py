"""Every Redis key of the shared index: names, types, lifetimes, and what is in them.

Knows names only. Does not know values (`codec`), scripts (`lua/`) or connections.

Everything begins with `pic1:`; the 1 is the format's version. A server of another version neither
reads nor deletes what it does not know. Keys are bytes: digests stand in them as they are.

A chunk lies in the shard of its first byte, `key[0] % 64`, and `{T}` stands for the shard's hash
tag, `{00}` to `{3f}`. All keys of a shard are in one slot of a cluster, so one script changes them
together; chunks spread evenly over shards. Digests are BLAKE2b, see `identity`.

    key                          type    contents                                  lifetime
    pic1:{T}:n:<key>             string  a node's record, see below                until removed
    pic1:{T}:v:<key><checksum>   string  payload value, checksum 8 bytes big       VALUE_S, then
                                         endian; only if payloads lie in Redis     the record's
    pic1:{T}:q:<owner>           zset    evictable nodes, score = priority         with its nodes
    pic1:{T}:k:<owner>           set     kept nodes: pinned, or above a pinned     with its nodes
    pic1:{T}:d:<owner>:<name>    set     nodes that name a document; name = hex    with its nodes
                                         SHA-1 of `name@version` or `name`
    pic1:{T}:x                   zset    nodes that expire, score = milliseconds;  with its nodes
                                         score 0 = being removed
    pic1:{T}:o                   hash    n<owner>, b<owner>: nodes and bytes       with its nodes
    pic1:{T}:m                   hash    model: nodes                              with its nodes
    pic1:{T}:t                   hash    nodes, bytes: totals; last: clock;        for ever
                                         age, cost: running means of `policy`
    pic1:{a:<owner>}             hash    an owner's account: quota; used: bytes    while not zero
                                         published and reserved; reserved
    pic1:{a:<owner>}:r           zset    its reservations: id 16 bytes, bytes 8    RESERVATION_S
                                         little endian; score = end in ms
    pic1:{all}                   hash    the account of all, held to the budget    while not zero
    pic1:{all}:r                 zset    the same reservations, for that account   RESERVATION_S
    pic1:{all}:owners            set     owners that have, or had, an account      until reconciled
    pic1:{all}:quotas            hash    owner: quota                              until taken away
    pic1:{all}:servers           zset    servers, score = last heartbeat in ms     SERVER_S
    pic1:{all}:models            hash    server: digest of its model               SERVER_S
    pic1:{all}:log               stream  changes an operator made, see `commands`  trimmed
    pic1:{all}:mark              string  16 random bytes: tells a lost index from  for ever
                                         the one before, see `refill`
    pic1:changes                 channel sender 8 bytes, kind (g gone, n new),     -
                                         keys of 17 bytes

Only heartbeats, reservations and payload values not yet published end by time. `o` is the truth of
what is published; accounts lie in other slots, follow it within a round trip, and are recounted
from it by `RedisIndex.reconcile`. Priorities are microseconds of the server's clock plus the bonus
of `policy`, integers below 2**53. A node's priority is above those of all nodes below it.

A record, all numbers little endian:

    offset  size  field
    0       4     `PIC` and the version, 1
    4       1     flags: 1 pinned, 2 being removed, 4 has a parent
    5       4     hits
    9       8     last hit in ms, if there was one                       changed in place by scripts
    17      4     children
    21      4     children that are pinned or have a pinned node below
    25      8     priority
    33      8     last use, microseconds of the server's clock
    41      16    digest of the first child; zeros are none
    57      48    digests of parent, previous and next sibling; only with a parent
    + 0     4     CRC-32 of all that follows
    + 4     4     tokens
    + 8     8     payload bytes                                          written by `codec`
    + 16    8     checksum of the payload
    + 24    8     created, ms
    + 32    8     expires, ms; 2**64 - 1 never
    + 40    4     microseconds to compute it
    + 44          owner, model: a length byte and UTF-8; 255 and 8 bytes are 16 hex digits
                  documents: a count byte, then each a length of 2 bytes and UTF-8

A key is a spread byte and a digest of 16 bytes. Nodes of a chunk share the spread byte, so links
hold digests only. Children are a linked list: their number is unbounded, values are not.
"""

from __future__ import annotations

import hashlib

from sglang_ext.chunk_index.identity import ChunkKey

PREFIX = b"pic1:"
NUM_SHARDS = 64

RESERVATION_S = 60
"""After this time reserved bytes that were neither published nor cancelled are given back."""

VALUE_S = 600
"""After this time a payload value is gone whose record was not published."""

SERVER_S = 60
"""A server without a heartbeat for so long is dead."""

CHANGES = PREFIX + b"changes"
ALL_ACCOUNT = PREFIX + b"{all}"
ALL_RESERVATIONS = ALL_ACCOUNT + b":r"
OWNERS = ALL_ACCOUNT + b":owners"
QUOTAS = ALL_ACCOUNT + b":quotas"
SERVERS = ALL_ACCOUNT + b":servers"
MODELS = ALL_ACCOUNT + b":models"
MARK = ALL_ACCOUNT + b":mark"

_SHARD_PREFIXES = tuple(PREFIX + b"{%02x}:" % shard for shard in range(NUM_SHARDS))
_NODE_PREFIXES = tuple(_SHARD_PREFIXES[first % NUM_SHARDS] + b"n:" for first in range(256))

SHARD_PREFIX_LEN = len(_SHARD_PREFIXES[0])
NODE_PREFIX_LEN = len(_NODE_PREFIXES[0])


def shard_of(key: ChunkKey) -> int:
    """The shard a chunk lies in."""
    return key[0] % NUM_SHARDS


def node_key(key: ChunkKey) -> bytes:
    """A node's record."""
    return _NODE_PREFIXES[key[0]] + key


def value_key(key: ChunkKey, checksum: int) -> bytes:
    """A payload value; put with `VALUE_S`, kept by its record's publication."""
    return _SHARD_PREFIXES[key[0] % NUM_SHARDS] + b"v:" + key + checksum.to_bytes(8, "big")


def queue_key(shard: int, owner: str) -> bytes:
    """An owner's evictable nodes in a shard."""
    return _SHARD_PREFIXES[shard] + b"q:" + owner.encode()


def kept_key(shard: int, owner: str) -> bytes:
    """An owner's nodes in a shard that eviction must leave."""
    return _SHARD_PREFIXES[shard] + b"k:" + owner.encode()


def document_key(shard: int, owner: str, name: str) -> bytes:
    """An owner's nodes in a shard that name a document; see `index.document_names`."""
    digest = hashlib.sha1(name.encode("utf-8", "surrogatepass"), usedforsecurity=False)
    return b"%bd:%b:%b" % (_SHARD_PREFIXES[shard], owner.encode(), digest.hexdigest().encode())


def expiry_key(shard: int) -> bytes:
    """A shard's nodes that expire, or are being removed."""
    return _SHARD_PREFIXES[shard] + b"x"


def owners_key(shard: int) -> bytes:
    """Nodes and bytes of each owner in a shard."""
    return _SHARD_PREFIXES[shard] + b"o"


def models_key(shard: int) -> bytes:
    """Nodes of each model in a shard."""
    return _SHARD_PREFIXES[shard] + b"m"


def totals_key(shard: int) -> bytes:
    """A shard's totals, clock and running means."""
    return _SHARD_PREFIXES[shard] + b"t"


def account_key(owner: str) -> bytes:
    """An owner's account."""
    return PREFIX + b"{a:%b}" % owner.encode()


def reservations_key(owner: str) -> bytes:
    """The reservations of an owner's account."""
    return account_key(owner) + b":r"
