"""`Arena`: the tier in host memory, whose segments a request can hold while it reads them.

Knows leases and when a checksum is compared. Does not know other tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import takewhile
from threading import RLock
from types import TracebackType
from typing import Generic, Literal

from sglang_ext.chunk_index.identity import ChunkKey
from sglang_ext.chunk_index.index import HoldingIndex, NodeRecord
from sglang_ext.chunk_index.payloads import OnBytes, PayloadStore, PayloadT, payload_checksum
from sglang_ext.chunk_index.tier import BATCH, Refusal, Tier

Verify = Literal["always", "first", "never"]
"""When a payload's checksum is compared: on every load, on its first load, or not at all."""


class Lease(Generic[PayloadT]):
    """Cached leading segments of a prompt's chunks, held until `release` or the end of `with`.

    Belongs to one request; not shared between threads. Hits are hints: `payloads` may find fewer.
    """

    def __init__(self, arena: Arena[PayloadT], runs: Iterable[tuple[NodeRecord, ...]]) -> None:
        self._arena = arena
        self._runs = list(runs)

    def __enter__(self) -> Lease[PayloadT]:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    @property
    def num_hits(self) -> tuple[int, ...]:
        """For each chunk the number of leading segments held now; all 0 after `release`."""
        return tuple(len(run) for run in self._runs)

    def payloads(self, chunk_index: int) -> list[PayloadT]:
        """The chunk's leading payloads, in order, each verified as the arena was told to.

        Modifies the lease and the arena if one is missing or damaged: the hits end before it, it
        is removed with all below it, and nothing behind it is held any more. What is returned
        stays readable after `release`.
        """
        run = self._runs[chunk_index]
        loaded: list[PayloadT] = []
        for record in run:
            payload = self._arena.load(record)
            if payload is None:
                self._runs[chunk_index] = run[: len(loaded)]
                self._arena.release(run[len(loaded) :])
                break
            loaded.append(payload)
        return loaded

    def release(self) -> None:
        """Hold nothing any more; a second call does nothing."""
        records = [record for run in self._runs for record in run]
        self._runs = [()] * len(self._runs)
        self._arena.release(records)


class Arena(Tier[PayloadT]):
    """A tier over an index and a store of this process; see `Tier`.

    Both answer at once, so a lock makes what changes the two one step: its store, unlike a shared
    one, keeps a single payload of each key.
    """

    index: HoldingIndex

    def __init__(
        self, index: HoldingIndex, store: PayloadStore[PayloadT], verify: Verify = "first"
    ) -> None:
        super().__init__("host", index, store)
        self._verify = verify
        self._change = RLock()
        self._verified: set[tuple[ChunkKey, int]] = set()

    def acquire(self, paths: Sequence[Sequence[ChunkKey]], now_ms: int) -> Lease[PayloadT]:
        """Hold every cached leading segment of every chunk's key path.

        Modifies hit statistics, recency and reader counts; the lease must be released.
        """
        hits = [[record.key for record in run] for run in self.match(paths, now_ms)]
        held = {record.key: record for record in self.index.hold([k for run in hits for k in run])}
        runs = [tuple(held[key] for key in takewhile(held.__contains__, keys)) for keys in hits]
        behind = [keys[len(run) :] for keys, run in zip(hits, runs, strict=True)]
        idle = [key for keys in behind for key in keys if key in held]
        self._remove(partial(self.index.release, idle))
        return Lease(self, runs)

    def load(self, record: NodeRecord, on_bytes: OnBytes | None = None) -> PayloadT | None:
        """A record's payload, its checksum compared as the arena was told; None if lost."""
        payload = super().load(record, on_bytes)
        name = record.key, record.checksum
        if payload is None or self._verify == "never" or name in self._verified:
            return payload
        if payload_checksum(payload) != record.checksum:
            self.discard(record, "damaged")
            return None
        if self._verify == "first":
            self._verified.add(name)
        return payload

    def keep_verified(self, record: NodeRecord, payload: PayloadT, now_ms: int) -> Refusal | None:
        """`keep` a payload whose checksum was compared just now, so that its first load is not."""
        with self._change:
            is_new = self.index.show(record.key) is None
            refusal = self.keep(record, payload, now_ms)
            if is_new and refusal is None and self._verify == "first":
                self._verified.add((record.key, record.checksum))
        return refusal

    def release(self, records: Sequence[NodeRecord]) -> None:
        """Let go of held records; dead ones leave with their last reader."""
        self._remove(partial(self.index.release, [record.key for record in records]))

    def drop(self, records: Sequence[NodeRecord]) -> int:
        """Drop the payloads of records that left the index; returns how many."""
        for record in records:
            self._verified.discard((record.key, record.checksum))
        return super().drop(records)

    def check_integrity(self) -> None:
        """Verify that index and store agree to the byte; not for use while others write.

        Raises:
            AssertionError: They do not, or the index is broken by itself.
        """
        self.index.check_integrity()
        indexed = {view.record.key: view.record for view in self.index.scan()}
        kept = {record.key: record for record in self.store.records()}
        assert indexed.keys() <= kept.keys()
        assert len(kept) - len(indexed) <= self.index.num_held  # dead ones have readers
        for key, record in indexed.items():
            assert kept[key].checksum == record.checksum
        totals = self.index.stats()
        assert totals.num_bytes == sum(record.payload_bytes for record in indexed.values())
        assert totals.budget_bytes is None or totals.num_bytes <= totals.budget_bytes
        assert {key for key, _ in self._verified} <= kept.keys()

    def _keep(self, record: NodeRecord, payload: PayloadT, now_ms: int) -> Refusal | None:
        with self._change:
            self._remove(partial(self.index.expire, now_ms, BATCH))
            view = self.index.show(record.key)
            is_due = view is not None and view.record.is_expired(now_ms)
            if is_due or self.index.is_dead(record.key):
                return "busy"  # a reader may have the payload that ours would replace
            return super()._keep(record, payload, now_ms)

    def _remove(self, take: Callable[[], Sequence[NodeRecord]]) -> int:
        with self._change:
            return super()._remove(take)
