"""The way to Redis: a deadline for every call, a circuit breaker, and who has which key.

Knows servers, their pools and their failures; the only place that opens connections. Does not know
what commands mean.

Two profiles of calls. The request path never connects: it takes an open connection or fails within
its few milliseconds. Background calls connect if they must. Each has a breaker: after
`max_failures` failures in a row its calls fail at once, until the link's own thread, which tries
every `probe_s`, finds all servers answering. Both are open until it first did, so that a server
that cannot be reached costs nothing at start.

                   ┌─ request_path(): Calls ─ Breaker ─┐
    RedisLink ─────┤                                   ├─ _Server ─ Pool ─ Connection
     its thread:   └─ background():   Calls ─ Breaker ─┘    one, or the masters of a cluster
     probes, refills pools, learns who has which slot
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Condition, Event, Lock, Thread
from typing import TypeAlias

import hiredis

from sglang_ext.chunk_index.redis_breaker import Breaker, failure_of
from sglang_ext.chunk_index.redis_commands import NUM_SLOTS, Command, slot_of
from sglang_ext.chunk_index.redis_connection import (
    Address,
    Argument,
    Connection,
    ErrorReply,
    Reply,
    Target,
    connect,
    pack,
    parse_url,
    resolve,
)
from sglang_ext.chunk_index.redis_pool import Pool
from sglang_ext.errors import IndexUnavailable

logger = logging.getLogger(__name__)

_LOG_AGAIN_S = 60.0  # a kind of failure is logged once in this time
_MOVED_PAUSE_S = 0.1  # least time between two questions who has which slot
_IDLE_PAUSE_S = 60.0
_SCAN_COUNT = 512
_FOREIGN = (OSError, ErrorReply, hiredis.HiredisError, MemoryError)


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


class _Server:
    """A server in use: where it is, and a pool for each profile."""

    def __init__(self, address: Address, request_pool: Pool, background_pool: Pool) -> None:
        self.address = address
        self.request_pool = request_pool
        self.background_pool = background_pool

    def drop_idle(self) -> None:
        self.request_pool.drop_idle()
        self.background_pool.drop_idle()

    def close(self) -> None:
        self.request_pool.close()
        self.background_pool.close()


@dataclass(frozen=True, slots=True)
class _Topology:
    """Which server has which slot; without slots the first has all."""

    servers: tuple[_Server, ...] = ()
    slots: tuple[_Server | None, ...] = ()

    def route(self, commands: Sequence[Command]) -> list[tuple[_Server, list[int]]]:
        """For each server that is needed, the places of its commands.

        Always in the same order of servers: callers that hold a connection to one and wait for one
        to the next can never wait for each other.

        Raises:
            IndexUnavailable: Nobody has a slot.
        """
        if not self.slots and self.servers:
            return [(self.servers[0], list(range(len(commands))))]
        places: dict[_Server, list[int]] = {}
        for place, command in enumerate(commands):
            server = self.slots[slot_of(command.key)] if self.slots else None
            if server is None:
                raise IndexUnavailable("no server of the cluster has the slot")
            places.setdefault(server, []).append(place)
        return [(server, places[server]) for server in self.servers if server in places]


_Route: TypeAlias = Callable[[Sequence[Command]], list[tuple[_Server, list[int]]]]


class Calls:
    """Sends commands, each call within one deadline; made by a link, used by any thread.

    A call of scripts takes two deadlines if a server does not have them.
    """

    def __init__(
        self,
        link: RedisLink,
        breaker: Breaker,
        pool_of: Callable[[_Server], Pool],
        deadline_ms: float,
    ) -> None:
        self._link = link
        self._breaker = breaker
        self._pool_of = pool_of
        self._deadline_s = deadline_ms / 1000

    def call(self, *words: Argument) -> Reply:
        """The reply of one command, whose second word is a key; raises as `run`."""
        key = words[1] if len(words) > 1 else b""
        (reply,) = self.run([Command(key if isinstance(key, bytes) else str(key).encode(), words)])
        return reply

    def run(self, commands: Sequence[Command]) -> list[Reply]:
        """The commands' replies, in their order, sent at once to every server concerned.

        Raises:
            IndexUnavailable: The deadline passed, a server cannot be reached, or it refused one
                of the commands; the others may have been carried out.
        """
        replies: list[Reply] = []
        for reply in self.attempt(commands):
            if isinstance(reply, IndexUnavailable):
                raise reply
            replies.append(reply)
        return replies

    def attempt(self, commands: Sequence[Command]) -> list[Reply | IndexUnavailable]:
        """As `run`, with what kept a command from being carried out in its reply's place.

        Raises:
            IndexUnavailable: Nothing was sent.
        """
        return self._attempt(commands, self._link.route)

    def scan_keys(self, pattern: bytes) -> Iterator[bytes]:
        """All keys of all servers that match a pattern, page by page; raises as `run`."""
        for place in range(self._link.num_servers):
            cursor: Reply = b"0"
            while isinstance(cursor, bytes):
                command = Command(b"", ("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT))
                (reply,) = self._attempt([command], partial(self._link.route_to, place))
                if isinstance(reply, IndexUnavailable):
                    raise reply
                assert isinstance(reply, list), "SCAN returns a cursor and a page"
                cursor, page = reply
                assert isinstance(page, list), "a page is an array"
                yield from (key for key in page if isinstance(key, bytes))
                cursor = None if cursor == b"0" else cursor

    def _attempt(
        self, commands: Sequence[Command], route: _Route
    ) -> list[Reply | IndexUnavailable]:
        if self._breaker.is_open:
            raise self._link.refusal(self._breaker)
        replies = self._exchange(commands, route, time.monotonic() + self._deadline_s)
        unknown = [place for place, reply in enumerate(replies) if _is_unknown_script(reply)]
        if unknown:
            in_full = [commands[place].in_full() for place in unknown]
            again = self._exchange(in_full, route, time.monotonic() + self._deadline_s)
            for place, reply in zip(unknown, again, strict=True):
                replies[place] = reply
        return self._translated(replies)

    def _exchange(
        self, commands: Sequence[Command], route: _Route, deadline: float
    ) -> list[Reply | BaseException]:
        """One round trip to each server concerned, all of them at the same time."""
        replies: list[Reply | BaseException] = [None] * len(commands)
        waiting: list[tuple[_Server, list[int], Connection]] = []
        for server, places in route(commands):
            packed = pack([commands[place].packed() for place in places])
            try:
                waiting.append((server, places, self._send(server, packed, deadline)))
            except _FOREIGN as exc:
                _fill(replies, places, exc)
        for server, places, connection in waiting:
            try:
                got = self._receive(server, connection, len(places), deadline)
            except _FOREIGN as exc:
                _fill(replies, places, exc)
            else:
                for place, reply in zip(places, got, strict=True):
                    replies[place] = reply
        return replies

    def _send(self, server: _Server, packed: bytes, deadline: float) -> Connection:
        """The connection that the commands are on their way by."""
        connection = self._pool_of(server).take(deadline)
        try:
            connection.send(packed, deadline)
        except BaseException:
            self._lose(server, connection)
            raise
        return connection

    def _receive(
        self, server: _Server, connection: Connection, num_replies: int, deadline: float
    ) -> list[Reply]:
        """The replies; the connection goes back to its pool only if all were read."""
        try:
            replies = connection.receive(num_replies, deadline)
        except BaseException:
            self._lose(server, connection)
            raise
        if any(isinstance(reply, ErrorReply) and failure_of(reply).is_moved for reply in replies):
            self._lose(server, connection)  # a new one may lead to another server
        else:
            self._pool_of(server).give(connection)
        self._link.count_round_trip()
        return replies

    def _lose(self, server: _Server, connection: Connection) -> None:
        """Close a connection, and those beside it, which likely fail as well."""
        self._pool_of(server).lose(connection)
        server.drop_idle()
        self._link.wake()

    def _translated(
        self, replies: Sequence[Reply | BaseException]
    ) -> list[Reply | IndexUnavailable]:
        """Failures in our own terms; tells breaker and link of them."""
        outage: str | None = None
        translated: list[Reply | IndexUnavailable] = []
        reported: dict[int, IndexUnavailable] = {}  # one failure of a server fails many commands
        for reply in replies:
            if not isinstance(reply, BaseException):
                translated.append(reply)
                continue
            if id(reply) not in reported:
                reported[id(reply)] = self._link.report(reply)
            translated.append(reported[id(reply)])
            if failure_of(reply).is_outage:
                outage = str(reported[id(reply)])
        if outage is None:
            self._breaker.succeed()
        elif self._breaker.fail(outage):
            self._link.wake()
        return translated


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
        self._topology = _Topology()
        self._targets: dict[Address, tuple[Target, ...]] = {}
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
        """A connection to any server in use, of no pool; the caller closes it.

        Raises:
            IndexUnavailable: It could not be opened.
        """
        addresses = [server.address for server in self._topology.servers]
        try:
            return self._connect(
                (addresses or list(self._endpoint.seeds))[0], time.monotonic() + timeout_s
            )
        except _FOREIGN as exc:
            raise self.report(exc) from exc

    def close(self) -> None:
        """Close every connection; all calls fail from now on."""
        self._is_closed.set()
        self.wake()
        for breaker in (self._request_breaker, self._background_breaker):
            breaker.open("the link is closed")
        self._thread.join(2 * self._config.background_deadline_ms / 1000)
        for server in self._topology.servers:
            server.close()

    def route(self, commands: Sequence[Command]) -> list[tuple[_Server, list[int]]]:
        """For `Calls`: who gets which commands."""
        return self._topology.route(commands)

    def route_to(self, place: int, commands: Sequence[Command]) -> list[tuple[_Server, list[int]]]:
        """For `Calls`: all commands to one server."""
        servers = self._topology.servers
        if place >= len(servers):
            raise IndexUnavailable("Redis: moved: the cluster has fewer servers than before")
        return [(servers[place], list(range(len(commands))))]

    def wake(self) -> None:
        """For `Calls`: look after pools and breakers now."""
        self._is_awake.set()

    def refusal(self, breaker: Breaker) -> IndexUnavailable:
        """For `Calls`: what an open breaker says."""
        self._num_refusals += 1
        return IndexUnavailable(f"Redis is not asked: {breaker.reason}")

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
        except _FOREIGN as exc:
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

    def _discover(self, deadline: float) -> _Topology:
        """Ask the first server that answers, those in use before the seeds."""
        known = [server.address for server in self._topology.servers]
        failure: BaseException | None = None
        for address in dict.fromkeys((*known, *self._endpoint.seeds)):
            try:
                self._targets[address] = resolve(address)
                connection = self._connect(address, deadline)
                try:
                    return self._topology_by(connection, address, deadline)
                finally:
                    connection.close()
            except _FOREIGN as exc:
                failure = exc
                deadline = time.monotonic() + self._config.background_deadline_ms / 1000
        assert failure is not None, "there is a seed"
        raise failure

    def _topology_by(self, connection: Connection, address: Address, deadline: float) -> _Topology:
        """What one server says of all."""
        if not (self._endpoint.is_cluster or self._is_cluster(connection, deadline)):
            return _Topology((self._server(address),))
        slots: list[_Server | None] = [None] * NUM_SLOTS
        servers: dict[Address, _Server] = {}
        for first, last, master in _slot_ranges(
            self._ask(connection, deadline, "CLUSTER", "SLOTS")
        ):
            at = Address(master.host or address.host, master.port)
            server = servers.setdefault(at, self._server(at))
            slots[first : last + 1] = [server] * (last + 1 - first)
        return _Topology(tuple(servers.values()), tuple(slots))

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

    def _server(self, address: Address) -> _Server:
        """The server at an address, with the pools it has if it is in use."""
        for server in self._topology.servers:
            if server.address == address:
                return server
        limit = self._config.max_connections
        request_pool = Pool(max(limit // 2, 1), self._ask_for_refill)
        background_pool = Pool(max(limit - limit // 2, 1), partial(self._connect, address))
        return _Server(address, request_pool, background_pool)

    def _replace_topology(self, topology: _Topology) -> None:
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
        if address not in self._targets:
            self._targets[address] = resolve(address)
        return connect(self._targets[address], self._endpoint.access, deadline)


def _is_unknown_script(reply: object) -> bool:
    return isinstance(reply, ErrorReply) and reply.code == "NOSCRIPT"


def _fill(replies: list[Reply | BaseException], places: Sequence[int], exc: BaseException) -> None:
    for place in places:
        replies[place] = exc


def _slot_ranges(answer: Reply) -> list[tuple[int, int, Address]]:
    """First slot, last slot and master of each range; the master's host may be empty."""
    ranges: list[tuple[int, int, Address]] = []
    for entry in answer if isinstance(answer, list) else []:
        match entry:
            case [int(first), int(last), [bytes() | None as host, int(port), *_], *_]:
                if not 0 <= first <= last < NUM_SLOTS:
                    break
                ranges.append((first, last, Address((host or b"").decode(), port)))
            case _:
                break
    else:
        if ranges:
            return ranges
    raise ErrorReply("CLUSTERDOWN the server does not say who has which slot")
