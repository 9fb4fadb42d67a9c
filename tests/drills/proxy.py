"""A TCP proxy in front of one server, which makes what comes back late or slow.

Answers of less than `SMALL_BYTES`, as those of an index are, pass as they come; payloads do not.
All connections share one bandwidth.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from threading import Lock, Thread

SMALL_BYTES = 4096
READ_BYTES = 1 << 20
PIECE_BYTES = 16 * 1024

_Due = tuple[float, bytes]


class Proxy:
    """See the module's docstring; made by `open_proxy`.

    Attributes:
        port: Where it listens, on 127.0.0.1.
        latency_s: How much later a payload comes.
        bytes_per_s: How fast payloads come at most; None is as fast as they can.
    """

    def __init__(self, server_port: int) -> None:
        self.latency_s = 0.0
        self.bytes_per_s: float | None = None
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._lock = Lock()
        self._free_s = 0.0
        self._sockets: list[socket.socket] = []
        Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """End every connection."""
        for connection in (self._listener, *self._sockets):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
                for connection in (client, server):
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets += [client, server]
                answers: SimpleQueue[_Due | None] = SimpleQueue()
                for target, arguments in (
                    (self._ask, (client, server)),
                    (self._listen, (server, answers)),
                    (self._answer, (client, answers)),
                ):
                    Thread(target=target, args=arguments, daemon=True).start()

    def _ask(self, client: socket.socket, server: socket.socket) -> None:
        """Pass on what the client says."""
        with suppress(OSError):
            while data := client.recv(READ_BYTES):
                server.sendall(data)
        with suppress(OSError):
            server.shutdown(socket.SHUT_WR)

    def _listen(self, server: socket.socket, answers: SimpleQueue[_Due | None]) -> None:
        """Note what the server says, and when it is due."""
        with suppress(OSError):
            while data := server.recv(READ_BYTES):
                is_payload = len(data) >= SMALL_BYTES
                answers.put((time.monotonic() + self.latency_s * is_payload, data))
        answers.put(None)

    def _answer(self, client: socket.socket, answers: SimpleQueue[_Due | None]) -> None:
        """Pass it on when it is due."""
        with suppress(OSError):
            while (due := answers.get()) is not None:
                at_s, data = due
                time.sleep(max(0.0, at_s - time.monotonic()))
                step = len(data) if len(data) < SMALL_BYTES else self._piece_bytes()
                for start in range(0, len(data), step):
                    piece = data[start : start + step]
                    if len(data) >= SMALL_BYTES:
                        self._wait_for_room(len(piece))
                    client.sendall(piece)
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)

    def _piece_bytes(self) -> int:
        """What is passed on at once: little of a slow payload, so that it comes evenly."""
        return READ_BYTES if self.bytes_per_s is None else PIECE_BYTES

    def _wait_for_room(self, num_bytes: int) -> None:
        with self._lock:
            if self.bytes_per_s is None:
                return
            now_s = time.monotonic()
            self._free_s = max(now_s, self._free_s) + num_bytes / self.bytes_per_s
            wait_s = self._free_s - now_s
        time.sleep(wait_s)


@contextmanager
def open_proxy(server_port: int) -> Iterator[Proxy]:
    """A proxy for a while."""
    proxy = Proxy(server_port)
    try:
        yield proxy
    finally:
        proxy.close()
