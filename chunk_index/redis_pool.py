"""Open connections that wait to be used.

Knows how many there may be. Does not know how they are opened, or what is sent on them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Condition

from sglang_ext.chunk_index.redis_connection import Connection

Grow = Callable[[float], Connection | None]
"""Opens one more connection by a deadline; None leaves that to someone else, who calls `refill`."""


class Pool:
    """Connections to one server for one profile of calls; thread-safe."""

    def __init__(self, limit: int, grow: Grow) -> None:
        """Open nothing yet.

        Args:
            limit: Most connections, those in use included.
            grow: What to do when none is idle.
        """
        self._limit = limit
        self._grow = grow
        self._changed = Condition()
        self._idle: list[Connection] = []
        self._num_open = 0
        self._is_closed = False

    def take(self, deadline: float) -> Connection:
        """A connection for the caller alone, who returns it by `give` or `lose`.

        Raises:
            TimeoutError: None became free in time.
            OSError: One more could not be opened.
            ErrorReply: The server refuses one more.
        """
        connection = self._take_idle() or self._open(self._grow, deadline)
        return connection or self._wait(deadline)

    def refill(self, grow: Grow, deadline: float) -> None:
        """Open one more, if none is idle and one more may be opened; raises as `take`."""
        with self._changed:
            if self._idle:
                return
        connection = self._open(grow, deadline)
        if connection is not None:
            self.give(connection)

    def adopt(self, connection: Connection) -> None:
        """Keep a connection opened elsewhere if none is idle and there is room, else close it."""
        with self._changed:
            is_wanted = not self._idle and self._num_open < self._limit and not self._is_closed
            self._num_open += is_wanted
        if is_wanted:
            self.give(connection)
        else:
            connection.close()

    def give(self, connection: Connection) -> None:
        """Return a connection of which all replies were read."""
        with self._changed:
            if not self._is_closed:
                self._idle.append(connection)
                self._changed.notify()
                return
        self.lose(connection)

    def lose(self, connection: Connection) -> None:
        """Close a connection that is of no use any more."""
        connection.close()
        with self._changed:
            self._num_open -= 1
            self._changed.notify()

    def drop_idle(self) -> None:
        """Close what nobody uses."""
        with self._changed:
            dropped, self._idle = self._idle, []
            self._num_open -= len(dropped)
        for connection in dropped:
            connection.close()

    def close(self) -> None:
        """Close what nobody uses now, and everything else when it is returned."""
        with self._changed:
            self._is_closed = True
        self.drop_idle()

    def _take_idle(self) -> Connection | None:
        """The one used last; those that the server closed meanwhile are dropped."""
        with self._changed:
            while self._idle:
                connection = self._idle.pop()
                if not connection.is_stale():
                    return connection
                connection.close()
                self._num_open -= 1
        return None

    def _open(self, grow: Grow, deadline: float) -> Connection | None:
        """One more connection; None if there are enough, or `grow` leaves it to someone else."""
        with self._changed:
            if self._num_open >= self._limit or self._is_closed:
                return None
            self._num_open += 1
        connection = None
        try:
            connection = grow(deadline)
            return connection
        finally:
            if connection is None:
                with self._changed:
                    self._num_open -= 1

    def _wait(self, deadline: float) -> Connection:
        with self._changed:
            while not self._idle:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or self._is_closed:
                    raise TimeoutError("no connection became free")
                self._changed.wait(left_s)
            return self._idle.pop()
