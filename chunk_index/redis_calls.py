"""Calls of Redis: commands on their way to the servers concerned, and replies on theirs back.

Knows that each call has a deadline and a breaker, and that scripts may be unknown. Does not know
how connections are opened, or what commands mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol, TypeAlias

from sglang_ext.chunk_index.redis_breaker import Breaker, failure_of
from sglang_ext.chunk_index.redis_commands import Command
from sglang_ext.chunk_index.redis_connection import (
    Argument,
    BrokenReply,
    Connection,
    ErrorReply,
    Reply,
    pack,
)
from sglang_ext.chunk_index.redis_pool import Pool
from sglang_ext.chunk_index.redis_topology import Server, Topology
from sglang_ext.errors import IndexUnavailable

FOREIGN = (OSError, ErrorReply, BrokenReply)
"""What connections raise; `redis_breaker` says what each means."""

_SCAN_COUNT = 512

_Routes: TypeAlias = list[tuple[Server, list[int]]]
_Route: TypeAlias = Callable[[Sequence[Command]], _Routes]


class Caller(Protocol):
    """What calls need of the link that made them."""

    @property
    def topology(self) -> Topology:
        """Who has which key. Stale at once."""
        ...

    def wake(self) -> None:
        """Look after pools and breakers now."""
        ...

    def report(self, exc: BaseException) -> IndexUnavailable:
        """Count and log a failure; returns it in our own terms, not raised."""
        ...

    def count_refusal(self) -> None:
        """A breaker refused a call."""
        ...

    def count_round_trip(self) -> None:
        """A server answered."""
        ...


class Calls:
    """Sends commands, each call within one deadline; made by a link, used by any thread.

    A call of scripts takes two deadlines if a server does not have them.
    """

    def __init__(
        self,
        link: Caller,
        breaker: Breaker,
        pool_of: Callable[[Server], Pool],
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
        return self._attempt(commands, self._link.topology.route)

    def scan_keys(self, pattern: bytes) -> Iterator[bytes]:
        """All keys of all servers that match a pattern, page by page; raises as `run`."""
        for place in range(len(self._link.topology.servers)):
            cursor: Reply = b"0"
            while isinstance(cursor, bytes):
                command = Command(b"", ("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT))
                (reply,) = self._attempt([command], partial(self._link.topology.route_to, place))
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
            self._link.count_refusal()
            raise IndexUnavailable(f"Redis is not asked: {self._breaker.reason}")
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
        waiting: list[tuple[Server, list[int], Connection]] = []
        for server, places in route(commands):
            packed = pack([commands[place].packed() for place in places])
            try:
                waiting.append((server, places, self._send(server, packed, deadline)))
            except FOREIGN as exc:
                _fill(replies, places, exc)
        for server, places, connection in waiting:
            try:
                got = self._receive(server, connection, len(places), deadline)
            except FOREIGN as exc:
                _fill(replies, places, exc)
            else:
                for place, reply in zip(places, got, strict=True):
                    replies[place] = reply
        return replies

    def _send(self, server: Server, packed: bytes, deadline: float) -> Connection:
        """The connection that the commands are on their way by."""
        connection = self._pool_of(server).take(deadline)
        try:
            connection.send(packed, deadline)
        except BaseException:
            self._lose(server, connection)
            raise
        return connection

    def _receive(
        self, server: Server, connection: Connection, num_replies: int, deadline: float
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

    def _lose(self, server: Server, connection: Connection) -> None:
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


def _is_unknown_script(reply: object) -> bool:
    return isinstance(reply, ErrorReply) and reply.code == "NOSCRIPT"


def _fill(replies: list[Reply | BaseException], places: Sequence[int], exc: BaseException) -> None:
    for place in places:
        replies[place] = exc
