"""Addresses of a Redis that nobody answers at."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

PROBE_S = 0.3
MAX_FILLERS = 16


@contextmanager
def silent_port() -> Iterator[int]:
    """A port that takes every connection and never says anything, for a while."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        yield int(listener.getsockname()[1])


@contextmanager
def dropping_port() -> Iterator[int]:
    """A port whose host drops whatever wants to connect, for a while: its queue is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        port = int(listener.getsockname()[1])
        for _ in range(MAX_FILLERS):
            filler = stack.enter_context(socket.socket())
            filler.settimeout(PROBE_S)
            try:
                filler.connect(("127.0.0.1", port))
            except TimeoutError:
                break
        else:
            raise AssertionError("the queue is never full")
        with suppress(OSError):
            yield port
