"""What the index benchmark puts into an index: made-up chunks, the same for the same seed.

Knows keys and records. Does not know tokens, payloads, or how long anything takes. Half of the
entries are chunks of one segment, half are chunks of `LONG_CHUNK` segments.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from threading import Event

from sglang_ext.chunk_index import keys
from sglang_ext.chunk_index.codec import encode_record
from sglang_ext.chunk_index.identity import DIGEST_BYTES, ChunkKey
from sglang_ext.chunk_index.index import NodeRecord
from sglang_ext.chunk_index.redis_commands import Command, call_script
from sglang_ext.chunk_index.redis_link import RedisLink
from sglang_ext.chunk_index.redis_scripts import load_scripts
from sglang_ext.errors import IndexUnavailable

LONG_CHUNK = 4
PROMPT_SEGMENTS = 64
SEGMENT_TOKENS = 256
TOKEN_BYTES = 23_040
"""Of one token's KV: 30 layers, 3 heads of 64, keys and values, two bytes each."""

SEGMENT_BYTES = SEGMENT_TOKENS * TOKEN_BYTES

OWNERS = tuple(f"{number:016x}" for number in range(1, 5))
MODEL = "00000000000000aa"
COMPUTE_US = 60_000
BULK_BATCH = 256
BULK_THREADS = 2

_SENDER = b"bench000"

Path = tuple[ChunkKey, ...]


@dataclass(frozen=True, slots=True)
class Entries:
    """A population of chunks.

    Attributes:
        num_entries: Segments of all chunks together.
        created_ms: Of every record.
        name: Populations with other names share no keys.
        doc_id: What every record names; empty for nothing.
    """

    num_entries: int
    created_ms: int
    name: str = "fill"
    doc_id: str = ""

    @property
    def num_short(self) -> int:
        """Chunks of one segment."""
        return self.num_entries - LONG_CHUNK * self.num_long

    @property
    def num_long(self) -> int:
        """Chunks of `LONG_CHUNK` segments."""
        return self.num_entries // 2 // LONG_CHUNK

    def path(self, num_segments: int, number: int) -> Path:
        """The keys of one chunk."""
        names = (f"{self.name}:{num_segments}:{number}:{i}" for i in range(num_segments))
        digests = [
            hashlib.blake2b(name.encode(), digest_size=DIGEST_BYTES).digest() for name in names
        ]
        return tuple(ChunkKey(digests[0][:1] + digest) for digest in digests)

    def records(self, num_segments: int, number: int) -> list[NodeRecord]:
        """The records of one chunk, parents first."""
        path = self.path(num_segments, number)
        parents: list[ChunkKey | None] = [None, *path[:-1]]
        return [
            NodeRecord(
                key=key,
                parent=parent,
                num_tokens=SEGMENT_TOKENS,
                payload_bytes=SEGMENT_BYTES,
                checksum=int.from_bytes(key[-8:], "little"),
                created_ms=self.created_ms,
                doc_ids=(self.doc_id,) if self.doc_id else (),
                owner=OWNERS[number % len(OWNERS)],
                model=MODEL,
                compute_us=COMPUTE_US,
            )
            for key, parent in zip(path, parents, strict=True)
        ]

    def chunks(self, start: int = 0, step: int = 1) -> Iterator[list[NodeRecord]]:
        """The records of every chunk, or of every `step`-th from `start` on."""
        for number in range(start, self.num_short, step):
            yield self.records(1, number)
        for number in range(start, self.num_long, step):
            yield self.records(LONG_CHUNK, number)

    def prompts(self, num_segments: int, seed: int) -> Iterator[list[Path]]:
        """Prompts without end: `PROMPT_SEGMENTS` segments in chunks drawn at random, none twice."""
        drawn = random.Random(seed)
        population = range(self.num_short if num_segments == 1 else self.num_long)
        while True:
            numbers = drawn.sample(population, PROMPT_SEGMENTS // num_segments)
            yield [self.path(num_segments, number) for number in numbers]


class Filler:
    """Fills a Redis faster than single publications do.

    It calls the script that `RedisIndex.publish` calls, with the same arguments, but many in one
    round trip, and leaves the accounts to `RedisIndex.reconcile`.
    """

    def __init__(self, link: RedisLink, entries: Entries) -> None:
        self._calls = link.background()
        self._entries = entries
        self._script = load_scripts().publish
        self._num_done = [0] * BULK_THREADS

    @property
    def num_done(self) -> int:
        """Entries published so far."""
        return sum(self._num_done)

    def run(self, is_over: Event) -> None:
        """Publish all entries.

        Raises:
            IndexUnavailable: One could not be published.
        """
        with ThreadPoolExecutor(BULK_THREADS) as pool:
            for done in [pool.submit(self._fill, i, is_over) for i in range(BULK_THREADS)]:
                done.result()

    def _fill(self, thread: int, is_over: Event) -> None:
        chunks = self._entries.chunks(thread, BULK_THREADS)
        while not is_over.is_set():
            batch = [
                record for chunk in islice(chunks, BULK_BATCH // LONG_CHUNK) for record in chunk
            ]
            if not batch:
                return
            replies = self._calls.run([self._publication(record) for record in batch])
            if any(reply != 0 for reply in replies):
                raise IndexUnavailable("an entry was not stored")
            self._num_done[thread] += len(batch)

    def _publication(self, record: NodeRecord) -> Command:
        names = (keys.totals_key(keys.shard_of(record.key)), keys.node_key(record.key))
        value = encode_record(record)
        return call_script(self._script, names, (_SENDER, record.key, value, record.created_ms, 0))


def now_ms() -> int:
    """Milliseconds since the epoch."""
    return int(time.time() * 1e3)
