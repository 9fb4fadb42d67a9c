"""Connections to Redis servers: where, with what right, bytes out and replies in.

Knows URLs, sockets, TLS, and that each step ends by its deadline, a moment of `time.monotonic`.
Does not know commands beyond the greeting, retries, or which server has which key.

After an exception of a method the connection is of no use: what was half read is never looked at
again. One is harmless: `TimeoutError` of `receive` for one reply, which may still come.
"""

from __future__ import annotations

import re
import select
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar
from urllib.parse import parse_qsl, unquote

import hiredis

from sglang_ext.errors import ConfigError

Reply: TypeAlias = "bytes | int | list[Reply] | ErrorReply | None"
Argument: TypeAlias = "bytes | memoryview | str | int | float"

MAX_REPLY_BYTES = 256 << 20
"""Most bytes read for one call; more is taken for a broken server."""

MAX_LATE_BYTES = 1 << 20
"""Most bytes read after the deadline, if they have arrived by then."""

DEFAULT_PORT = 6379

_SCHEMES = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster")
_READ_BYTES = 1 << 16
_CERT_REQS = {"required": ssl.CERT_REQUIRED, "optional": ssl.CERT_OPTIONAL, "none": ssl.CERT_NONE}
_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_TLS_OPTIONS = frozenset(
    ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
)
_NOT_ENOUGH = object()
_IN_SCRIPT = re.compile(r"^ERR Error running script .*: -([A-Z]+) ")

_V = TypeVar("_V")

_pack: Callable[[tuple[Argument, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment]  # its stub takes one word


class ErrorReply(Exception):
    """What a server answers instead of a result."""

    @property
    def code(self) -> str:
        """Its first word, such as `OOM` or `NOSCRIPT`; Redis 6 has it inside a script's error."""
        in_script = _IN_SCRIPT.search(str(self))
        return in_script[1] if in_script else str(self).partition(" ")[0]


class BrokenReply(hiredis.HiredisError):
    """What a server sends is no reply, or too large for one."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens.

    Attributes:
        host: Name or number; empty for a unix socket.
        port: TCP port; 0 for a unix socket.
        path: Of the unix socket; empty for TCP.
    """

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Access:
    """What a connection starts with.

    Attributes:
        username: ACL user; None is the default user.
        password: Of that user; None greets without one.
        database: Number of the database.
        tls: How certificates are checked; None is plain.
    """

    username: str | None = None
    password: str | None = field(default=None, repr=False)
    database: int = 0
    tls: ssl.SSLContext | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What a URL says.

    Attributes:
        seeds: Servers to ask first; one unless it is a cluster.
        access: The same for each.
        is_cluster: The URL says so; else the server tells.
    """

    seeds: tuple[Address, ...]
    access: Access
    is_cluster: bool


@dataclass(frozen=True, slots=True)
class Target:
    """A resolved address: what a socket connects to."""

    family: socket.AddressFamily
    place: tuple[str, int] | tuple[str, int, int, int] | str
    host: str


def parse_url(url: str, password: str | None = None, ca_file: str | None = None) -> Endpoint:
    """What a URL says.

    Args:
        url: `redis://[[user]:password@]host[:port][/db]`, `rediss://` for TLS,
            `unix://[[user]:password@]/path[?db=n]`, `redis+cluster://` or `rediss+cluster://` with
            hosts separated by commas. `rediss` takes redis-py's options `ssl_ca_certs`,
            `ssl_certfile`, `ssl_keyfile`, `ssl_cert_reqs` and `ssl_check_hostname`.
        password: In place of the URL's.
        ca_file: In place of `ssl_ca_certs`.

    Raises:
        ConfigError: The URL is wrong, or a certificate cannot be read; secrets are not told.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        raise ConfigError(f"Redis URL: expected it to begin with {', '.join(_SCHEMES)} and ://")
    rest, _, query = rest.partition("?")
    credentials, at, place = ("", "", rest) if rest.startswith("/") else rest.rpartition("@")
    user, _, secret = credentials.partition(":") if at else ("", "", "")
    options = dict(parse_qsl(query, keep_blank_values=True))
    path = ""
    if scheme == "unix":
        path, place = unquote(place), ""
        database = options.pop("db", "0")
    else:
        place, _, database = place.partition("/")
        database = options.pop("db", database or "0")
    access = Access(
        username=unquote(user) or None,
        password=password if password is not None else unquote(secret) or None,
        database=_number("database", database, 0, 1 << 20),
        tls=_tls(options, ca_file) if scheme.startswith("rediss") else None,
    )
    if options:
        raise ConfigError(f"Redis URL: the option {min(options)!r} is not known")
    seeds = (Address(path=path),) if path else tuple(map(_address, place.split(",")))
    is_cluster = scheme.endswith("+cluster")
    if scheme == "unix" and not path.startswith("/"):
        raise ConfigError("Redis URL: got no socket, expected unix:///path/of/socket")
    if len(seeds) > 1 and not is_cluster:
        raise ConfigError("Redis URL: got several hosts, expected them for a cluster only")
    return Endpoint(seeds, access, is_cluster)


def resolve(address: Address) -> tuple[Target, ...]:
    """Where to connect to; may block for as long as the resolver does.

    Raises:
        OSError: The name is not known, or the resolver does not answer.
    """
    if address.path:
        return (Target(socket.AF_UNIX, address.path, ""),)
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    return tuple(Target(family, place, address.host) for family, _, _, _, place in found)  # type: ignore[arg-type]


def connect(targets: Sequence[Target], access: Access, deadline: float) -> Connection:
    """A greeted connection to the first target that takes it.

    Raises:
        OSError: No target could be connected to in time, or its certificate is not right.
        ErrorReply: The server refuses the user, the password or the database.
    """
    failure: OSError = ConnectionError("no address")
    for target in targets:
        try:
            connection = Connection(_open_socket(target, access.tls, deadline))
        except OSError as exc:
            failure = exc
            continue
        try:
            _greet(connection, access, deadline)
        except BaseException:
            connection.close()
            raise
        return connection
    raise failure


class Connection:
    """One open connection, used by one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = hiredis.Reader(replyError=ErrorReply, notEnoughData=_NOT_ENOUGH)
        self._buffer = bytearray(_READ_BYTES)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def send(self, packed: bytes, deadline: float) -> None:
        """Send packed commands.

        Raises:
            OSError: Not all was sent in time, or the connection is broken.
        """
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(left_s)
        self._sock.sendall(packed)

    def receive(self, num_replies: int, deadline: float) -> list[Reply]:
        """The next replies, error replies among them.

        What has arrived is read even after the deadline: another server may have used it up.

        Raises:
            OSError: They did not all come in time, or the connection is broken.
            BrokenReply: They are no replies of Redis, or too large.
        """
        replies: list[Reply] = []
        num_bytes = num_late_bytes = 0
        while True:
            self._take(replies, num_replies)
            if len(replies) == num_replies:
                return replies
            left_s = deadline - time.monotonic()
            if num_late_bytes > MAX_LATE_BYTES:
                raise TimeoutError("timed out")
            size = self._read(max(left_s, 0))
            num_bytes += size
            num_late_bytes += size if left_s <= 0 else 0
            if num_bytes > MAX_REPLY_BYTES:
                raise BrokenReply(f"more than {MAX_REPLY_BYTES} bytes of replies")

    def is_stale(self) -> bool:
        """Whether the server closed it, or sent what nobody asked for. Changes nothing.

        TLS has messages of its own between replies, so there it is not told.
        """
        return not isinstance(self._sock, ssl.SSLSocket) and bool(self._poll.poll(0))

    def interrupt(self) -> None:
        """End what another thread waits for on this connection."""
        with suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # TLS's own is for its own thread

    def close(self) -> None:
        """Close it; more than once is no error."""
        self._sock.close()

    def _take(self, replies: list[Reply], num_replies: int) -> None:
        """Move replies that have arrived to `replies`, until there are enough."""
        try:
            while len(replies) < num_replies:
                reply = self._reader.gets()
                if reply is _NOT_ENOUGH:
                    return
                replies.append(reply)
        except (hiredis.HiredisError, MemoryError) as exc:
            raise BrokenReply(str(exc)) from exc

    def _read(self, timeout_s: float) -> int:
        """Feed the reader with what comes next; returns how many bytes."""
        self._sock.settimeout(timeout_s)
        try:
            size = self._sock.recv_into(self._buffer)
        except (BlockingIOError, ssl.SSLWantReadError) as exc:  # nothing has arrived
            raise TimeoutError("timed out") from exc
        if size == 0:
            raise ConnectionResetError("closed by the server")
        self._reader.feed(self._buffer, 0, size)  # type: ignore[arg-type]
        return size


def pack(commands: Sequence[Sequence[Argument]]) -> bytes:
    """Commands as they are sent."""
    return b"".join([_pack(tuple(command)) for command in commands])


def _greet(connection: Connection, access: Access, deadline: float) -> None:
    greeting: list[tuple[Argument, ...]] = []
    if access.password is not None:
        user = () if access.username is None else (access.username,)
        greeting.append(("AUTH", *user, access.password))
    if access.database:
        greeting.append(("SELECT", access.database))
    if not greeting:
        return
    connection.send(pack(greeting), deadline)
    for reply in connection.receive(len(greeting), deadline):
        if isinstance(reply, ErrorReply):
            raise reply


def _open_socket(target: Target, tls: ssl.SSLContext | None, deadline: float) -> socket.socket:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    sock = socket.socket(target.family, socket.SOCK_STREAM)
    try:
        sock.settimeout(left_s)
        sock.connect(target.place)
        if target.family is not socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return sock if tls is None else tls.wrap_socket(sock, server_hostname=target.host)
    except BaseException:
        sock.close()
        raise


def _address(text: str) -> Address:
    """`host`, `host:port`, `[v6]`, `[v6]:port`, or nothing for this host."""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    else:
        host, _, port = text.partition(":")
    number = _number("port", port, 1, 65535) if port else DEFAULT_PORT
    return Address(host=unquote(host) or "localhost", port=number)


def _number(name: str, text: str, least: int, most: int) -> int:
    if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
        # What was got may be a password in the wrong place, so it is not told.
        raise ConfigError(f"Redis URL: expected the {name} to be a number, {least} to {most}")
    return int(text)


def _tls(options: dict[str, str], ca_file: str | None) -> ssl.SSLContext:
    """How the options say certificates are checked; takes those options out."""
    given = {name: options.pop(name) for name in _TLS_OPTIONS & options.keys()}
    verify = _one_of(given, "ssl_cert_reqs", "required", _CERT_REQS)
    checks_host = _one_of(given, "ssl_check_hostname", "true", _TRUTH)
    try:
        context = ssl.create_default_context(cafile=ca_file or given.get("ssl_ca_certs"))
        context.check_hostname = checks_host and verify is ssl.CERT_REQUIRED
        context.verify_mode = verify
        if "ssl_certfile" in given:
            context.load_cert_chain(given["ssl_certfile"], given.get("ssl_keyfile"))
    except OSError as exc:
        raise ConfigError(f"Redis TLS: a certificate or key cannot be read: {exc}") from exc
    return context


def _one_of(given: Mapping[str, str], name: str, default: str, known: Mapping[str, _V]) -> _V:
    text = given.get(name, default).lower()
    if text not in known:
        raise ConfigError(f"Redis URL: got {name}={text!r}, expected one of {', '.join(known)}")
    return known[text]
