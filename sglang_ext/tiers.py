"""Builds a server's chunk cache from its configuration: arena, disk, shared tier, housekeeping.

Knows which classes stand behind which options. Nothing here waits: what cannot be reached at start
is used once it can, and until then every request is served without it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from sglang_ext.chunk_index.arena import Arena
from sglang_ext.chunk_index.cache import (
    CLOSE_TIMEOUT_S,
    ChunkCache,
    Samples,
    TransferLimits,
)
from sglang_ext.chunk_index.commands import Clear, Command, CommandLog
from sglang_ext.chunk_index.file_store import FileStore
from sglang_ext.chunk_index.identity import mac_key, owner_id
from sglang_ext.chunk_index.index import ChunkIndex, NodeRecord
from sglang_ext.chunk_index.log_follower import LogFollower
from sglang_ext.chunk_index.memory_index import MemoryIndex
from sglang_ext.chunk_index.near_index import NearIndex
from sglang_ext.chunk_index.payloads import HostStore, PayloadStore
from sglang_ext.chunk_index.redis_index import RedisIndex
from sglang_ext.chunk_index.redis_link import LinkStats, RedisConfig, RedisLink
from sglang_ext.chunk_index.redis_store import RedisStore
from sglang_ext.chunk_index.refill import Refill
from sglang_ext.chunk_index.tier import RemoteTier, Tier
from sglang_ext.chunk_index.transfer_queues import WriteQueue
from sglang_ext.chunk_index.upkeep import Chore, Upkeep
from sglang_ext.errors import IndexUnavailable, TierUnavailable
from sglang_ext.kv_pool import KvPool, SegmentCodec, SegmentKV
from sglang_ext.tier_config import DiskConfig, IndexConfig, SharedConfig

logger = logging.getLogger(__name__)

FLUSH_S = 1.0
TOTALS_S = 2.0
COLLECT_S = 5.0
HEARTBEAT_S = 10.0
MEASURE_S = 60.0
RETRY_S = 2.0
FOLLOW_S = 1.0
REFILL_S = 5.0
MAX_UNTOLD = 1024
SWEEP_S = 600.0
ORPHAN_S = 3600.0
"""Age from which a payload without a record is taken for a dead writer's."""

POSITION_NAME = "commands-read"
"""File in the disk tier's folder: where this server stands in the command log."""


def build_cache(config: IndexConfig) -> ChunkCache[SegmentKV]:
    """The arena alone."""
    return ChunkCache(_build_arena(config))


class Tiers:
    """A server's cache with all that runs beside it."""

    def __init__(
        self,
        cache: ChunkCache[SegmentKV],
        upkeep: Upkeep | None = None,
        follower: LogFollower | None = None,
        link: RedisLink | None = None,
        retire: Callable[[str], object] | None = None,
    ) -> None:
        self.cache = cache
        self._upkeep = upkeep
        self._follower = follower
        self._link = link
        self._retire = retire
        self._untold: deque[Command] = deque(maxlen=MAX_UNTOLD)

    @property
    def link_stats(self) -> LinkStats | None:
        """The way to Redis as it is now; None without one."""
        return None if self._link is None else self._link.stats()

    def carry_out(self, command: Command) -> None:
        """Change all tiers of this server, and soon those of all others."""
        self.cache.apply(command.apply)
        if self._follower is not None:
            self._shared_writes.submit(partial(self._tell, command))

    def retire_model(self, model: str) -> None:
        """Forget what a model computed that this server serves no more, unless another does."""
        self.cache.apply_local(lambda tier: tier.clear(model=model))
        if self._retire is not None:
            self._shared_writes.submit(partial(self._retire, model))

    def refill_if_lost(self, refill: Refill[SegmentKV]) -> None:
        """Fill a shared index that lost its records with what this server has, in its own thread.

        Raises:
            IndexUnavailable: It cannot be asked.
        """
        if refill.is_due():
            self._shared_writes.submit(lambda: refill.run(_now_ms()))

    def start_upkeep(self, chores: Sequence[Chore]) -> None:
        """Start the thread that looks after the tiers."""
        self._upkeep = Upkeep(chores)

    def close(self) -> None:
        """End all threads."""
        if self._upkeep is not None:
            self._upkeep.close(CLOSE_TIMEOUT_S)
        self.cache.close()
        for lower in self.cache.lower:
            if isinstance(lower.tier.index, NearIndex):
                lower.tier.index.close()
        if self._link is not None:
            self._link.close()

    @property
    def _shared_writes(self) -> WriteQueue[SegmentKV]:
        return self.cache.lower[-1].writes

    def tell_again(self) -> None:
        """Carry out in the shared tier, and tell other servers, what could not be told before.

        Raises:
            IndexUnavailable: It cannot be told yet.
        """
        while self._untold:
            command = self._untold[0]
            command.apply(self.cache.lower[-1].tier)
            self._post(command)
            self._untold.popleft()

    def _tell(self, command: Command) -> None:
        try:
            self._post(command)
        except IndexUnavailable as exc:
            self._untold.append(command)
            logger.warning("pic command waits for the shared index: %s", exc)

    def _post(self, command: Command) -> None:
        assert self._follower is not None
        assert self._link is not None
        if not self._link.is_available:
            raise IndexUnavailable(self._link.stats().last_error)
        self._follower.post(command)


def start_tiers(config: IndexConfig, pool: KvPool, model: Callable[[], str]) -> Tiers:
    """The whole cache with its threads.

    Args:
        config: What to build.
        pool: Whose payloads are kept.
        model: Digest of the model served now.
    """
    arena, codec = _build_arena(config), pool.codec
    lower: list[Tier[SegmentKV]] = []
    chores: list[Chore] = []
    if config.disk is not None:
        disk, disk_chores = _build_disk(config.disk, config, codec)
        lower.append(disk)
        chores += disk_chores
    shared: _Shared | None = None
    if config.shared is not None:
        shared = _build_shared(config.shared, config, codec, model)
        lower.append(shared.tier)
        chores += shared.chores
    limits = TransferLimits(stall_ms=config.stall_ms)
    cache = ChunkCache(arena, lower, limits)
    if not lower:
        return Tiers(cache)
    samples = _take_samples(pool, config.segment_len)
    chores[:0] = [
        Chore("measure", MEASURE_S, lambda: cache.measure(samples)),
        Chore("measure unused", RETRY_S, lambda: cache.measure_unused(samples)),
    ]
    if shared is None:
        return Tiers(cache, Upkeep(chores))
    follower = LogFollower(
        CommandLog(shared.link),
        lambda command: cache.apply_local(command.apply),
        lambda: cache.apply_local(Clear().apply),
        None if config.disk is None else config.disk.path / POSITION_NAME,
    )
    tiers = Tiers(cache, None, follower, shared.link, shared.retire)
    refill = Refill(shared.link, arena, shared.tier)
    chores += [
        Chore("follow commands", FOLLOW_S, follower.poll),
        Chore("tell commands", FOLLOW_S, tiers.tell_again),
        Chore("refill shared", REFILL_S, lambda: tiers.refill_if_lost(refill)),
    ]
    tiers.start_upkeep(chores)
    return tiers


def _build_arena(config: IndexConfig) -> Arena[SegmentKV]:
    return Arena(_local_index(config.arena_bytes, config), HostStore(), config.verify)


def _local_index(num_bytes: int, config: IndexConfig) -> MemoryIndex:
    index = MemoryIndex(num_bytes)
    for namespace, quota in config.quotas.items():
        index.set_quota(owner_id(namespace, config.secret), quota)
    return index


def _build_disk(
    disk: DiskConfig, config: IndexConfig, codec: SegmentCodec
) -> tuple[Tier[SegmentKV], list[Chore]]:
    store = FileStore(disk.path, codec)
    tier: Tier[SegmentKV] = Tier("disk", _local_index(disk.num_bytes, config), store)
    return tier, [
        Chore("adopt disk", float("inf"), lambda: _adopt(tier)),
        Chore("collect disk", COLLECT_S, lambda: tier.collect(_now_ms())),
        Chore(
            "sweep disk",
            SWEEP_S,
            lambda: store.sweep(partial(_is_indexed, tier.index), ORPHAN_S, time.time()),
        ),
    ]


def _adopt(tier: Tier[SegmentKV]) -> None:
    with contextlib.suppress(TierUnavailable):  # measuring says so
        tier.store.probe()
    started = time.monotonic()
    num_adopted = tier.adopt()
    elapsed_s = time.monotonic() - started
    logger.info("pic tier=disk adopted=%d seconds=%.1f", num_adopted, elapsed_s)


@dataclass(frozen=True, slots=True)
class _Shared:
    """What there is of a shared tier.

    Attributes:
        tier: Its index and store.
        link: The way to Redis.
        chores: What keeps it in order.
        retire: Removes what a model computed, unless a living server serves it.
    """

    tier: Tier[SegmentKV]
    link: RedisLink
    chores: list[Chore]
    retire: Callable[[str], object]


def _build_shared(
    shared: SharedConfig, config: IndexConfig, codec: SegmentCodec, model: Callable[[], str]
) -> _Shared:
    link = RedisLink(
        RedisConfig(url=shared.url, password=shared.password, deadline_ms=shared.deadline_ms)
    )
    remote = RedisIndex(link, shared.num_bytes)
    index = NearIndex(remote, remote.changes, max_entries=shared.near_entries)
    key = mac_key(config.secret)
    store: PayloadStore[SegmentKV]
    chores: list[Chore] = []
    if shared.path is None:
        store = RedisStore(link, codec, key)
    else:
        store = files = FileStore(shared.path, codec, key, mode=_file_mode(shared.path))
        chores.append(
            Chore(
                "sweep shared",
                SWEEP_S,
                lambda: files.sweep(partial(_is_indexed, remote), ORPHAN_S, time.time()),
            )
        )
    tier: RemoteTier[SegmentKV] = RemoteTier("shared", index, store)
    server = f"{socket.gethostname()}:{os.getpid()}"
    chores += [
        Chore("flush hits", FLUSH_S, remote.flush),
        Chore("totals", TOTALS_S, tier.refresh_totals),
        Chore("collect shared", COLLECT_S, lambda: tier.collect(_now_ms())),
        Chore("heartbeat", HEARTBEAT_S, lambda: remote.heartbeat(server, model(), _now_ms())),
        Chore("reconcile", SWEEP_S, remote.reconcile),
    ]

    def retire(old_model: str) -> None:
        remote.heartbeat(server, model(), _now_ms())
        if old_model not in remote.servers(_now_ms()).values():
            tier.clear(model=old_model)

    return _Shared(tier, link, chores, retire)


def _file_mode(folder: Path) -> int:
    """Mode of payload files: whoever may use the folder may use them as well."""
    try:
        return 0o600 | (folder.stat().st_mode & 0o066)
    except OSError:
        return 0o600


def _is_indexed(index: ChunkIndex, record: NodeRecord) -> bool:
    """Whether a payload is the one that its key's record names, and no loser of a race."""
    view = index.show(record.key)
    return view is not None and view.record.checksum == record.checksum


def _take_samples(pool: KvPool, segment_len: int) -> Samples[SegmentKV]:
    """A payload of one token and one of a full segment, of whatever the first slots hold."""
    small, large = (pool.capture(torch.arange(n)) for n in (1, max(2, segment_len)))
    return (1, small), (max(2, segment_len), large)


def _now_ms() -> int:
    return int(time.time() * 1e3)
