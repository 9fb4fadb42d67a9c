"""What a shared tier costs a request, and a start, when its Redis cannot be reached.

Knows how a server's cache is put together: arena, near index, Redis, payload folder. Does not know
entries or what is aimed at. A server without a shared tier stands beside it in every measurement.
"""

from __future__ import annotations

import pathlib
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import Event

from sglang_ext.chunk_index.arena import Arena
from sglang_ext.chunk_index.cache import ChunkCache
from sglang_ext.chunk_index.file_store import FileStore
from sglang_ext.chunk_index.memory_index import MemoryIndex
from sglang_ext.chunk_index.near_index import NearIndex
from sglang_ext.chunk_index.payloads import HostStore
from sglang_ext.chunk_index.prefetch import Path
from sglang_ext.chunk_index.redis_index import RedisIndex
from sglang_ext.chunk_index.redis_link import RedisConfig, RedisLink
from sglang_ext.chunk_index.tier import RemoteTier
from sglang_ext.errors import ServerFailed
from sglang_ext.scripts.bench_disk import RawCodec, RawPayload
from sglang_ext.scripts.bench_entries import SEGMENT_BYTES, SEGMENT_TOKENS, TOKEN_BYTES, now_ms
from sglang_ext.scripts.bench_timing import Stopwatch, Timings

ARENA_BYTES = 1 << 30
READY_S = 30.0
_POLL_S = 0.005
_QUEUE_LEN = 4


@dataclass(frozen=True, slots=True)
class Outage:
    """Waits of requests, on a server with a shared tier that is away and on one without.

    Attributes:
        first: With the tier, until its breaker opened.
        away: With the tier, from then on.
        without: Without one.
    """

    first: Timings
    away: Timings
    without: Timings

    @property
    def added_ms(self) -> float:
        """What the tier adds to a look-up, median."""
        return self.away.p50_ms - self.without.p50_ms

    @property
    def added_p99_ms(self) -> float:
        """What it adds to 99 % of look-ups at most."""
        return self.away.p99_ms - self.without.p50_ms

    @property
    def added_first_ms(self) -> float:
        """The most it adds until the breaker opens."""
        return self.first.slowest_ms - self.without.p50_ms


class Site:
    """A server's cache."""

    def __init__(
        self,
        cache: ChunkCache[RawPayload],
        link: RedisLink | None = None,
        near: NearIndex | None = None,
    ) -> None:
        self._cache = cache
        self._link = link
        self._near = near
        self._is_loaded = Event()
        cache.when_loaded(self._is_loaded.set)

    @property
    def is_asked(self) -> bool:
        """Whether look-ups get as far as Redis. Stale at once."""
        return self._link is not None and self._link.is_available

    def wait_ready(self) -> None:
        """Wait until the shared tier is used.

        Raises:
            ServerFailed: It never is.
        """
        deadline = time.monotonic() + READY_S
        while not all(lower.is_ready for lower in self._cache.lower):
            if time.monotonic() > deadline:
                raise ServerFailed("the shared tier is not ready")
            time.sleep(_POLL_S)

    def look_up(self, paths: Sequence[Path]) -> None:
        """Wait as a request does until what lower tiers have of it is known, and has come."""
        self._is_loaded.clear()
        prefetch = self._cache.prefetch(paths, now_ms())
        while prefetch is not None and not prefetch.check(time.monotonic()):
            self._is_loaded.wait(_POLL_S)
            self._is_loaded.clear()

    def close(self) -> None:
        """End its threads."""
        self._cache.close()
        if self._near is not None:
            self._near.close()
        if self._link is not None:
            self._link.close()


@contextmanager
def site(folder: pathlib.Path, url: str | None = None) -> Iterator[Site]:
    """A server's cache with default limits; with a shared tier if there is a URL."""
    arena = Arena(MemoryIndex(ARENA_BYTES), HostStore[RawPayload]())
    if url is None:
        made = Site(ChunkCache(arena))
    else:
        link = RedisLink(RedisConfig(url=url))
        remote = RedisIndex(link)
        near = NearIndex(remote, remote.changes)
        tier = RemoteTier("shared", near, FileStore(folder, RawCodec()))
        cache = ChunkCache(arena, [tier])
        samples = [(1, TOKEN_BYTES), (SEGMENT_TOKENS, SEGMENT_BYTES)]
        small, large = [(tokens, RawPayload(bytearray(size))) for tokens, size in samples]
        cache.measure((small, large))
        made = Site(cache, link, near)
    try:
        yield made
    finally:
        made.close()


def measure_outage(
    with_tier: Site, without: Site, prompts: Iterator[Sequence[Path]], num_calls: int
) -> Outage:
    """Look-ups of prompts that are in no arena, Redis having just ended.

    Args:
        with_tier: Its Redis was killed.
        without: Has no shared tier.
        prompts: Enough of them.
        num_calls: Look-ups of each, in turn.
    """
    first, away, other = Stopwatch(), Stopwatch(), Stopwatch()
    first.time(with_tier.look_up, next(prompts))
    while with_tier.is_asked:
        first.time(with_tier.look_up, next(prompts))
    for _ in range(num_calls):
        away.time(with_tier.look_up, next(prompts))
        other.time(without.look_up, next(prompts))
    return Outage(first.timings(), away.timings(), other.timings())


def time_start(folder: pathlib.Path, prompt: Sequence[Path], url: str | None = None) -> float:
    """Milliseconds to put a server's cache together and to serve a first look-up with it."""
    started_s = time.perf_counter()
    with site(folder, url) as made:
        made.look_up(prompt)
        return (time.perf_counter() - started_s) * 1e3


@contextmanager
def black_hole() -> Iterator[str]:
    """The URL of a port that answers nothing, not even that nobody is there.

    Raises:
        ServerFailed: This system does not let a full queue of connections drop further ones.
    """
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        place = listener.getsockname()
        for _ in range(_QUEUE_LEN):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(place)
        probe = stack.enter_context(socket.socket())
        probe.settimeout(0.2)
        try:
            probe.connect(place)
        except TimeoutError:
            yield f"redis://127.0.0.1:{place[1]}"
        else:
            raise ServerFailed("a port whose queue is full still takes connections")
