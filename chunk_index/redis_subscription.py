"""A channel of Redis, listened to by a thread that reconnects by itself.

Knows when messages may have been missed. Does not know what they say.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from threading import Event, Lock, Thread, current_thread

from sglang_ext.chunk_index.redis_calls import FOREIGN
from sglang_ext.chunk_index.redis_connection import Connection, ErrorReply, pack
from sglang_ext.chunk_index.redis_link import RedisLink
from sglang_ext.errors import IndexUnavailable

logger = logging.getLogger(__name__)

PING_S = 1.0
"""A channel that is silent for so long is asked whether it is still there."""

LOST_S = 3.0
"""One that says nothing for so long is lost."""

_RETRY_S = 0.5
_CONNECT_S = 1.0


class Subscription:
    """Messages of one channel, from the moment they are heard."""

    def __init__(
        self,
        link: RedisLink,
        channel: bytes,
        on_message: Callable[[bytes], None],
        on_heard: Callable[[], None],
    ) -> None:
        """Start to listen.

        Args:
            link: Opens the connections.
            channel: What to listen to.
            on_message: Gets each message, in the subscription's thread.
            on_heard: Called, in the same thread, when messages are heard from now on: at the
                beginning, and after each interruption, whose messages are lost.
        """
        self._link = link
        self._channel = channel
        self._on_message = on_message
        self._on_heard = on_heard
        self._is_closed = Event()
        self._lock = Lock()
        self._connection: Connection | None = None
        self._thread = Thread(target=self._run, name="pic-redis-changes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more; nothing is called after this returns, unless it is called from there."""
        self._is_closed.set()
        with self._lock:
            if self._connection is not None:
                self._connection.interrupt()
        if self._thread is not current_thread():
            self._thread.join(2 * _CONNECT_S)

    def _run(self) -> None:
        while not self._is_closed.is_set():
            try:
                self._listen(self._open())
            except IndexUnavailable:
                pass  # counted by the link
            except FOREIGN as exc:
                if not self._is_closed.is_set():
                    self._link.report(exc)
            except Exception:
                if not self._is_closed.is_set():
                    logger.exception("pic redis=%r error on %r", self._link, self._channel)
            finally:
                self._drop()
            self._is_closed.wait(_RETRY_S)

    def _open(self) -> Connection:
        connection = self._link.open_connection(_CONNECT_S)
        with self._lock:
            self._connection = connection
        return connection

    def _drop(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def _listen(self, connection: Connection) -> None:
        """Hand on messages until the connection ends."""
        connection.send(pack([("SUBSCRIBE", self._channel)]), time.monotonic() + _CONNECT_S)
        heard_s = time.monotonic()
        while not self._is_closed.is_set():
            now_s = time.monotonic()
            try:
                (message,) = connection.receive(1, now_s + PING_S)
            except TimeoutError:
                if time.monotonic() - heard_s > LOST_S:
                    raise
                connection.send(pack([("PING",)]), time.monotonic() + _CONNECT_S)
                continue
            heard_s = time.monotonic()
            match message:
                case [b"message", bytes(), bytes(text)]:
                    self._on_message(text)
                case [b"subscribe", *_]:
                    self._on_heard()
                case ErrorReply():
                    raise message
                case _:
                    pass  # the answer to PING
