"""How calls are timed: at a steady pace, beside a bare round trip, and what is said of them.

Knows clocks, sockets and quantiles. Does not know what is called.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event, Thread
from types import TracebackType
from typing import ParamSpec, TypeVar

from sglang_ext.errors import ServerFailed

_READ_BYTES = 1 << 16
_OK = b"+OK\r\n"
_PAIR = b"*2\r\n$-1\r\n"  # an answer of a value, left out here, and of nothing
_KEPT = b"bench:bare"

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timings:
    """Calls of one kind.

    Attributes:
        ms: Milliseconds of each, at least one.
        elapsed_s: Seconds from the making of the stopwatch to the end of the last call.
    """

    ms: tuple[float, ...]
    elapsed_s: float

    @property
    def p50_ms(self) -> float:
        """The median."""
        return self.quantile_ms(0.5)

    @property
    def p99_ms(self) -> float:
        """What 99 % of the calls do not exceed."""
        return self.quantile_ms(0.99)

    @property
    def slowest_ms(self) -> float:
        """The slowest call."""
        return max(self.ms)

    @property
    def rate_per_s(self) -> float:
        """Calls per second."""
        return len(self.ms) / self.elapsed_s

    def quantile_ms(self, share: float) -> float:
        """The least of the measured values that `share` of the calls, (0, 1], do not exceed."""
        return sorted(self.ms)[math.ceil(share * len(self.ms)) - 1]


class Stopwatch:
    """Collects the times of calls, of one thread."""

    def __init__(self) -> None:
        self._ms: list[float] = []
        self._started_s = self._ended_s = time.perf_counter()

    def time(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a call returns; notes how long it took, unless it raises."""
        started_s = time.perf_counter()
        result = call(*args, **kwargs)
        self._ended_s = time.perf_counter()
        self._ms.append((self._ended_s - started_s) * 1e3)
        return result

    def timings(self) -> Timings:
        """What was collected so far."""
        return Timings(tuple(self._ms), self._ended_s - self._started_s)


def pace(
    rate_per_s: float,
    is_over: Callable[[float], bool],
    step: Callable[[], object],
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Take a step every `1 / rate_per_s` seconds; one that is late is made up for.

    Args:
        rate_per_s: Steps per second.
        is_over: Asked before each step, with the seconds since the beginning.
        step: What to do.
        clock: Seconds.
        sleep: Waits for so many seconds.
    """
    started_s = clock()
    due_s = 0.0
    while not is_over(passed_s := clock() - started_s):
        if due_s > passed_s:
            sleep(due_s - passed_s)
        step()
        due_s += 1 / rate_per_s


class Background:
    """Runs something in a thread of its own for as long as a block lasts."""

    def __init__(self, run: Callable[[Event], object]) -> None:
        """Begin with the block.

        Args:
            run: Told by its argument when the block ends; may end before.
        """
        self._run = run
        self._is_over = Event()
        self._failure: BaseException | None = None
        self._thread = Thread(target=self._work, name="bench", daemon=True)

    def __enter__(self) -> Background:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()
        if self._failure is not None and exc is None:
            raise self._failure

    @property
    def is_done(self) -> bool:
        """Whether it ended by itself."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it ends by itself; returns whether it did."""
        self._thread.join(timeout_s)
        return self.is_done

    def _work(self) -> None:
        try:
            self._run(self._is_over)
        except BaseException as exc:
            self._failure = exc


class BareTrips:
    """A socket to Redis with nothing around it: what a round trip of a look-up's size costs.

    Redis is asked for one value and for one name that is absent, with as many bytes as an `MGET` of
    many names has, and answers with as many bytes as that gets.
    """

    def __init__(
        self, place: str | tuple[str, int], names: Sequence[bytes], sizes: Sequence[int]
    ) -> None:
        """Connect, and store the value.

        Args:
            place: Path of a unix socket, or host and port.
            names: What the `MGET` asks for, several of them.
            sizes: Bytes of their values.

        Raises:
            OSError: Nobody listens there.
            ServerFailed: Redis does not take it.
        """
        self._trip = make_bare_trip(names, sizes)
        self._watch = Stopwatch()
        self._buffer = bytearray(_READ_BYTES)
        if isinstance(place, str):
            self._sock = socket.socket(socket.AF_UNIX)
        else:
            self._sock = socket.socket()
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock.connect(place)
        self._exchange(self._trip.set_up, len(_OK))

    def take(self) -> None:
        """One timed round trip.

        Raises:
            OSError: The connection is broken.
            ServerFailed: Redis closed it, or sent something else.
        """
        self._watch.time(self._exchange, self._trip.request, self._trip.num_reply_bytes)

    def timings(self) -> Timings:
        """Of all trips so far."""
        return self._watch.timings()

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

    def _exchange(self, request: bytes, num_reply_bytes: int) -> None:
        """Send a request, and read a reply of known size without looking at it."""
        self._sock.sendall(request)
        while num_reply_bytes > 0:
            num_bytes = self._sock.recv_into(self._buffer)
            num_reply_bytes -= num_bytes
            if num_bytes == 0 or num_reply_bytes < 0:
                raise ServerFailed("Redis answered something else")


@dataclass(frozen=True, slots=True)
class BareTrip:
    """What `BareTrips` sends and gets.

    Attributes:
        set_up: Stores the value.
        request: Asks for it.
        num_reply_bytes: Of the answer to that.
    """

    set_up: bytes
    request: bytes
    num_reply_bytes: int


def make_bare_trip(names: Sequence[bytes], sizes: Sequence[int]) -> BareTrip:
    """The counterpart of an `MGET`; at most a byte or two shorter, never longer.

    Args:
        names: What the `MGET` asks for, several of them.
        sizes: Bytes of their values.
    """
    num_request_bytes = len(pack([b"MGET", *names]))
    num_reply_bytes = sum(map(_bulk_bytes, sizes)) + len(b"*%d\r\n" % len(sizes))
    absent = _fit(num_request_bytes, lambda size: len(pack([b"MGET", _KEPT, b"a" * size])))
    value = _fit(num_reply_bytes, lambda size: len(_PAIR) + _bulk_bytes(size))
    return BareTrip(
        set_up=pack([b"SET", _KEPT, b"v" * value]),
        request=pack([b"MGET", _KEPT, b"a" * absent]),
        num_reply_bytes=len(_PAIR) + _bulk_bytes(value),
    )


def pack(words: Sequence[bytes]) -> bytes:
    """A command as Redis takes it."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in words)


def _bulk_bytes(size: int) -> int:
    """Bytes of a value in a reply."""
    return len(b"$%d\r\n\r\n" % size) + size


def _fit(wanted: int, total: Callable[[int], int]) -> int:
    """The largest size whose total is not above what is wanted."""
    size = max(wanted - total(0), 0)
    while size > 0 and total(size) > wanted:
        size -= 1
    return size
