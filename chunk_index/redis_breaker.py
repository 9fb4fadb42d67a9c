"""What failures of Redis mean, and the circuit breaker that spares callers from them.

Knows error replies and the errors of sockets. Does not know connections, or what is called.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from threading import Lock

from sglang_ext.chunk_index.redis_connection import BrokenReply, ErrorReply


@dataclass(frozen=True, slots=True)
class Failure:
    """What a foreign error means here.

    Attributes:
        kind: One word for counters.
        is_outage: Counts against the breaker: the next call would fail too.
        is_moved: The server may be another one by now; ask who has which key.
    """

    kind: str
    is_outage: bool = True
    is_moved: bool = False


_REPLIES = {
    "OOM": Failure("full", is_outage=False),
    "READONLY": Failure("read_only", is_outage=False, is_moved=True),
    "MOVED": Failure("moved", is_outage=False, is_moved=True),
    "ASK": Failure("moved", is_outage=False, is_moved=True),
    "TRYAGAIN": Failure("moved", is_outage=False),
    "CROSSSLOT": Failure("misuse", is_outage=False),
    "CLUSTERDOWN": Failure("cluster_down", is_moved=True),
    "MASTERDOWN": Failure("cluster_down", is_moved=True),
    "NOREPLICAS": Failure("read_only", is_outage=False),
    "LOADING": Failure("loading"),
    "BUSY": Failure("busy"),
    "NOAUTH": Failure("auth"),
    "WRONGPASS": Failure("auth"),
    "NOPERM": Failure("permission", is_outage=False),
}
"""By code; all other error replies are `misuse`: a command that this server does not take."""

_ERRORS: tuple[tuple[type[BaseException], Failure], ...] = (
    (TimeoutError, Failure("timeout")),
    (ConnectionRefusedError, Failure("refused", is_moved=True)),
    (ConnectionError, Failure("lost", is_moved=True)),
    (ssl.SSLError, Failure("tls")),
    (OSError, Failure("unreachable", is_moved=True)),
    (BrokenReply, Failure("protocol")),
)


def failure_of(exc: BaseException) -> Failure:
    """What a foreign error means here."""
    if isinstance(exc, ErrorReply):
        return _REPLIES.get(exc.code, Failure("misuse", is_outage=False))
    for kind, failure in _ERRORS:
        if isinstance(exc, kind):
            return failure
    return Failure("unknown")


class Breaker:
    """Lets calls through until too many failed in a row; open at first."""

    def __init__(self, max_failures: int) -> None:
        self._max_failures = max_failures
        self._lock = Lock()
        self._num_failures = 0
        self._reason: str | None = "not connected yet"
        self.num_openings = 0

    @property
    def is_open(self) -> bool:
        """Whether calls are refused. Stale at once."""
        return self._reason is not None

    @property
    def reason(self) -> str:
        """Why it is open; empty if it is not. Stale at once."""
        return self._reason or ""

    def succeed(self) -> None:
        """Forget earlier failures."""
        if self._num_failures:
            with self._lock:
                self._num_failures = 0

    def fail(self, reason: str) -> bool:
        """Count a failure; returns whether it opened the breaker."""
        with self._lock:
            self._num_failures += 1
            if self._num_failures < self._max_failures or self._reason is not None:
                return False
            self._reason = reason
            self.num_openings += 1
            return True

    def explain(self, reason: str) -> None:
        """Say why it stays open, if it is."""
        with self._lock:
            if self._reason is not None:
                self._reason = reason

    def open(self, reason: str) -> None:
        """Refuse calls."""
        with self._lock:
            self._reason = reason

    def close(self) -> None:
        """Let calls through."""
        with self._lock:
            self._num_failures = 0
            self._reason = None
