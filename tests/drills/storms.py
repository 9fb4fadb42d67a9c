"""A Redis that has no connection left: idle ones take them all, and the server's own are killed.

Talks to Redis by plain sockets, since `redis-cli` finds no free connection either.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

from tests.redis_server import RedisServer

MAX_CLIENTS = 300
AGAIN_S = 0.02
TIMEOUT_S = 5.0


class Storm:
    """See the module's docstring; made by `connection_storm`.

    Attributes:
        num_killed: Connections of others that were ended.
        num_refused: How often Redis said that it has too many.
    """

    def __init__(self, port: int) -> None:
        self.num_killed = 0
        self.num_refused = 0
        self._port = port
        self._sockets: dict[int, socket.socket] = {}
        self._is_over = Event()
        self._control = self._dial()
        assert self._control is not None, "the first connection is taken"
        say(self._control, f"CONFIG SET maxclients {MAX_CLIENTS}")
        self._thread = Thread(target=self._rage, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give all connections back."""
        self._is_over.set()
        self._thread.join(TIMEOUT_S)
        say(self._control, "CONFIG SET maxclients 10000")
        for connection in self._sockets.values():
            connection.close()

    def _rage(self) -> None:
        """Take what is free, end what is not ours, again and again."""
        while not self._is_over.wait(AGAIN_S):
            while self._dial() is not None:
                pass
            self.num_refused += 1
            for client in self._others():
                self.num_killed += say(self._control, f"CLIENT KILL ID {client}") == ":1"

    def _dial(self) -> socket.socket | None:
        """One more connection, kept; None if Redis has none left."""
        connection = socket.create_connection(("127.0.0.1", self._port), TIMEOUT_S)
        answer = ""
        with suppress(ConnectionError):
            answer = say(connection, "CLIENT ID")
        if not answer.startswith(":"):
            connection.close()
            return None
        self._sockets[int(answer[1:])] = connection
        return connection

    def _others(self) -> list[int]:
        """Clients that are not ours."""
        listing = say(self._control, "CLIENT LIST")
        found = [line.split()[0].removeprefix("id=") for line in listing.splitlines() if line]
        return [int(client) for client in found if int(client) not in self._sockets]


@contextmanager
def connection_storm(redis: RedisServer) -> Iterator[Storm]:
    """A storm for a while."""
    storm = Storm(int(redis.url.rpartition(":")[2]))
    try:
        yield storm
    finally:
        storm.close()


def say(connection: socket.socket, line: str) -> str:
    """Redis's answer to one command of plain words: a line as it comes, or the text of a bulk."""
    connection.sendall(f"{line}\r\n".encode())
    with connection.makefile("rb", buffering=0) as file:
        first = file.readline().decode().rstrip("\r\n")
        if not first.startswith("$"):
            return first
        left, parts = int(first[1:]) + 2, []
        while left > 0 and (part := file.read(left)):
            parts.append(part)
            left -= len(part)
        return b"".join(parts).decode().rstrip("\r\n")
