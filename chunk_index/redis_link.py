"""The way to Redis: a deadline for every call, a circuit breaker, and who has which key.

Knows servers, their pools and their failures; the only place that opens connections. Does not know
what commands mean.

Two profiles of calls. The request path never connects: it takes an open connection or fails within
its few milliseconds. Background calls connect if they must. Each has a breaker: after
`max_failures` failures in a row its calls fail at once, until the link's own thread, which tries
every `probe_s`, finds all servers answering. Both are open until it first did, so that a server
that cannot be reached costs nothing at start.

                   ┌─ request_path(): Calls ─ Breaker ─┐
    RedisLink ─────┤                                   ├─ Server ─ Pool ─ Connection
     its thread:   └─ background():   Calls ─ Breaker ─┘    one, or the masters of a cluster
     probes, refills pools, learns who has which slot
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from threading import Condition, Event, Lock, Thread

from sglang_ext.chunk_index.redis_breaker import Breaker, failure_of
from sglang_ext.chunk_index.redis_calls import FOREIGN, Calls
from sglang_ext.chunk_index.redis_commands import NUM_SLOTS
from sglang_ext.chunk_index.redis_connection import (
    Address,
    Argument,
    Connection,
    ErrorReply,
    Reply,
    connect,
    pack,
    parse_url,
)
from sglang_ext.chunk_index.redis_pool import Pool
from sglang_ext.chunk_index.redis_topology import Server, Topology, slot_ranges
from sglang_ext.errors import IndexUnavailable

logger = logging.getLogger(__name__)

_LOG_AGAIN_S = 60.0  # a kind of failure is logged once in this time
_MOVED_PAUSE_S = 0.1  # least time between two questions who has which slot
_IDLE_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class RedisConfig:
    """Where Redis is, and how long it may take.

    Attributes:
        url: See `redis_connection.parse_url`; not shown, for it may hold a password.
        password: In place of the URL's.
        ca_file: Certificates that TLS trusts, in place of the URL's.
        deadline_ms: Most milliseconds of a call on the request path.
        background_deadline_ms: Most milliseconds of any other call, connecting included.
        max_connections: Most open connections to one server, subscriptions not counted.
        max_failures: So many failures in a row open a breaker.
        probe_s: Seconds from one attempt to close the breakers to the next.
    """

    url: str = field(repr=False)
    password: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    deadline_ms: float = 5
    background_deadline_ms: float = 1000
    max_connections: int = 8
    max_failures: int = 3
    probe_s: float = 1.0


@dataclass(frozen=True, slots=True)
class LinkStats:
    """Counters since the link was made, and its state now.

    Attributes:
        is_available: Whether calls of the request path are tried at all.
        num_servers: Servers in use: one, or the masters of a cluster.
        num_round_trips: Exchanges with a server that were answered.
        num_refusals: Calls that a breaker refused.
        num_failures: Failures of commands and of the link's own attempts, by kind.
        num_openings: How often a breaker opened.
        last_error: The last failure in words; empty if there was none.
    """

    is_available: bool
    num_servers: int
    num_round_trips: int
    num_refusals: int
    num_failures: Mapping[str, int]
    num_openings: int
    last_error: str


class RedisLink:
    """Connections to one Redis server or cluster; thread-safe."""

    def __init__(self, config: RedisConfig) -> None:
        """Start to connect, in the background.

        Raises:
            ConfigError: The URL is wrong, or a certificate cannot be read.
        """
        self._config = config
        self._endpoint = parse_url(config.url, config.password, config.ca_file)
        self._request_breaker = Breaker(config.max_failures)
        self._background_breaker = Breaker(config.max_failures)
        self._request_path = Calls(
            self, self._request_breaker, lambda server: server.request_pool, config.deadline_ms
        )
        self._background = Calls(
            self,
            self._background_breaker,
            lambda server: server.background_pool,
            config.background_deadline_ms,
        )
        self._topology = Topology()
        self._lock = Lock()
        self._failures: Counter[str] = Counter()
        self._logged_s: dict[str, float] = {}
        self._num_round_trips = 0
        self._num_refusals = 0
        self._last_error = ""
        self._is_moved = False
        self._is_closed = Event()
        self._is_awake = Event()
        self._became_available = Condition()
        self._thread = Thread(target=self._work, name="pic-redis", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"RedisLink({', '.join(map(str, self._endpoint.seeds))})"

    def request_path(self) -> Calls:
        """Calls that a request waits for."""
        return self._request_path

    def background(self) -> Calls:
        """All other calls."""
        return self._background

    def call(self, *words: Argument) -> Reply:
        """One command in the background; see `Calls.call`."""
        return self._background.call(*words)

    @property
    def is_available(self) -> bool:
        """Whether all calls are tried. Stale at once."""
        return not (self._request_breaker.is_open or self._background_breaker.is_open)

    @property
    def topology(self) -> Topology:
        """For `Calls`: who has which key. Stale at once."""
        return self._topology

    @property
    def num_servers(self) -> int:
        """Servers in use: one, or the masters of a cluster. Stale at once."""
        return len(self._topology.servers)

    @property
    def is_cluster(self) -> bool:
        """Whether keys of different slots need different commands. Stale at once."""
        return bool(self._topology.slots)

    def wait_available(self, timeout_s: float) -> bool:
        """Wait until all calls are tried; returns whether they are."""
        with self._became_available:
            return self._became_available.wait_for(lambda: self.is_available, timeout_s)

    def stats(self) -> LinkStats:
        """Counters and state. Changes nothing, asks nobody."""
        with self._lock:
            return LinkStats(
                is_available=self.is_available,
                num_servers=self.num_servers,
                num_round_trips=self._num_round_trips,
                num_refusals=self._num_refusals,
                num_failures=dict(self._failures),
                num_openings=(
                    self._request_breaker.num_openings + self._background_breaker.num_openings
                ),
                last_error=self._last_error,
            )

    def open_connection(self, timeout_s: float) -> Connection:
        """A connection to the first server that takes it, of no pool; the caller closes it.

        Raises:
            IndexUnavailable: None could be opened.
        """
        known = [server.address for server in self._topology.servers]
        failure = IndexUnavailable("Redis: no server is known")
        for address in known or self._endpoint.seeds:
            try:
                return self._connect(address, time.monotonic() + timeout_s)
            except FOREIGN as exc:
                failure = self.report(exc)
        raise failure

    def close(self) -> None:
        """Close every connection; all calls fail from now on."""
        self._is_closed.set()
        self.wake()
        for breaker in (self._request_breaker, self._background_breaker):
            breaker.open("the link is closed")
        self._thread.join(2 * self._config.background_deadline_ms / 1000)
        for server in self._topology.servers:
            server.close()

    def wake(self) -> None:
        """For `Calls`: look after pools and breakers now."""
        self._is_awake.set()

    def count_refusal(self) -> None:
        """For `Calls`: a breaker refused a call."""
        self._num_refusals += 1

    def count_round_trip(self) -> None:
        """For `Calls`: a server answered."""
        self._num_round_trips += 1

    def report(self, exc: BaseException) -> IndexUnavailable:
        """Count and log a failure; returns it in our own terms, not raised."""
        failure = failure_of(exc)
        unavailable = IndexUnavailable(f"Redis: {failure.kind}: {str(exc)[:200]}")
        unavailable.__cause__ = exc
        now_s = time.monotonic()
        with self._lock:
            self._failures[failure.kind] += 1
            self._last_error = str(unavailable)
            is_news = now_s - self._logged_s.get(failure.kind, -_LOG_AGAIN_S) >= _LOG_AGAIN_S
            if is_news:
                self._logged_s[failure.kind] = now_s
        if is_news:
            logger.warning("pic redis=%r %s", self, unavailable)
        if failure.is_moved:
            self._is_moved = True
            self.wake()
        return unavailable

    def _work(self) -> None:
        """The link's thread: connect, close breakers, keep an idle connection for requests."""
        probed_s = float("-inf")
        while not self._is_closed.is_set():
            if self._pause_s(probed_s) <= 0:
                probed_s = time.monotonic()
                self._guard(self._probe)
            if self.is_available:
                self._guard(self._refill)
            self._is_awake.wait(max(self._pause_s(probed_s), 0))
            self._is_awake.clear()

    def _pause_s(self, probed_s: float) -> float:
        """Seconds until a probe is due."""
        if not self.is_available:
            interval_s = self._config.probe_s
        elif self._is_moved:
            interval_s = _MOVED_PAUSE_S
        else:
            return _IDLE_PAUSE_S
        return probed_s + interval_s - time.monotonic()

    def _guard(self, step: Callable[[float], None]) -> None:
        """Take a step of the thread, which no failure may end."""
        try:
            step(time.monotonic() + self._config.background_deadline_ms / 1000)
        except FOREIGN as exc:
            reason = str(self.report(exc))
            for breaker in (self._request_breaker, self._background_breaker):
                breaker.explain(reason)
        except Exception:
            logger.exception("pic redis=%r error in its thread", self)

    def _probe(self, deadline: float) -> None:
        """Find out who has which slot and whether all answer; then let calls through."""
        self._is_moved = False
        topology = self._discover(deadline)
        for server in topology.servers:
            connection = self._connect(server.address, deadline)
            try:
                self._ask(connection, deadline, "PING")
            except BaseException:
                connection.close()
                raise
            server.request_pool.adopt(connection)
        self._replace_topology(topology)
        if self._is_closed.is_set():
            return
        was_available = self.is_available
        self._request_breaker.close()
        self._background_breaker.close()
        if not was_available:
            logger.info("pic redis=%r is available, servers=%d", self, len(topology.servers))
            with self._became_available:
                self._became_available.notify_all()

    def _discover(self, deadline: float) -> Topology:
        """Ask the first server that answers, those in use before the seeds."""
        known = [server.address for server in self._topology.servers]
        failure: BaseException | None = None
        for address in dict.fromkeys((*known, *self._endpoint.seeds)):
            try:
                connection = self._connect(address, deadline)
                try:
                    return self._topology_by(connection, address, deadline)
                finally:
                    connection.close()
            except FOREIGN as exc:
                failure = exc
                deadline = time.monotonic() + self._config.background_deadline_ms / 1000
        assert failure is not None, "there is a seed"
        raise failure

    def _topology_by(self, connection: Connection, address: Address, deadline: float) -> Topology:
        """What one server says of all."""
        if not (self._endpoint.is_cluster or self._is_cluster(connection, deadline)):
            return Topology((self._server(address),))
        slots: list[Server | None] = [None] * NUM_SLOTS
        servers: dict[Address, Server] = {}
        for first, last, master in slot_ranges(self._ask(connection, deadline, "CLUSTER", "SLOTS")):
            at = Address(master.host or address.host, master.port)
            server = servers.setdefault(at, self._server(at))
            slots[first : last + 1] = [server] * (last + 1 - first)
        return Topology(tuple(servers.values()), tuple(slots))

    def _is_cluster(self, connection: Connection, deadline: float) -> bool:
        """Whether a server is part of a cluster; one that does not tell is not."""
        try:
            answer = self._ask(connection, deadline, "INFO", "cluster")
        except ErrorReply:
            return False
        return isinstance(answer, bytes) and b"cluster_enabled:1" in answer

    def _ask(self, connection: Connection, deadline: float, *words: str) -> Reply:
        connection.send(pack([words]), deadline)
        (reply,) = connection.receive(1, deadline)
        if isinstance(reply, ErrorReply):
            raise reply
        return reply

    def _server(self, address: Address) -> Server:
        """The server at an address, with the pools it has if it is in use."""
        for server in self._topology.servers:
            if server.address == address:
                return server
        limit = self._config.max_connections
        request_pool = Pool(max(limit // 2, 1), self._ask_for_refill)
        background_pool = Pool(max(limit - limit // 2, 1), partial(self._connect, address))
        return Server(address, request_pool, background_pool)

    def _replace_topology(self, topology: Topology) -> None:
        """Use these servers from now on, and close what leads to others."""
        left = set(self._topology.servers) - set(topology.servers)
        self._topology = topology
        for server in left:
            server.close()

    def _refill(self, deadline: float) -> None:
        """Open a connection for requests wherever none is idle."""
        for server in self._topology.servers:
            server.request_pool.refill(partial(self._connect, server.address), deadline)

    def _ask_for_refill(self, deadline: float) -> None:
        """The request path's way to one more connection: let the thread open it."""
        self.wake()

    def _connect(self, address: Address, deadline: float) -> Connection:
        return connect(address, self._endpoint.access, deadline)
