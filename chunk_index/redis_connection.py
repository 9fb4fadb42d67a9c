"""Connections to Redis servers: where, with what right, bytes out and replies in.

redis-py reads URLs, greets, writes and parses. Added to it: one deadline, a moment of
`time.monotonic`, for all that a call sends and reads; several hosts in a URL; a refusal of what it
passes over in one; its errors in Python's terms. Does not know commands, retries, or which server
has which key.

After an exception of a method the connection is of no use: what was half read is never looked at
again. One is harmless: `TimeoutError` of `receive` for one reply, which may still come.
"""

from __future__ import annotations

import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import parse_qs

import hiredis
import redis.connection as redis_py
from redis import exceptions
from redis.backoff import NoBackoff
from redis.crc import key_slot as key_slot  # for `redis_commands`
from redis.retry import Retry

from sglang_ext.errors import ConfigError

Reply: TypeAlias = "bytes | int | list[Reply] | ErrorReply | None"
Argument: TypeAlias = "bytes | memoryview | str | int | float"

MAX_REPLY_BYTES = 256 << 20
"""Most bytes read for one call; more is taken for a broken server."""

MAX_LATE_BYTES = 1 << 20
"""Most bytes read after the deadline, if they have arrived by then."""

_READ_BYTES = 1 << 16
_TLS_OPTIONS = frozenset(
    ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
)
_WHO = r"((?:[^/?#]*@)?)"
_HOST = r"(?:\[[^\]]+\]|[^\[\]@:/?#,]*)(?::0*[1-9][0-9]*)?"
_URL = re.compile(
    rf"(rediss?)(\+cluster)?://{_WHO}({_HOST}(?:,{_HOST})*)((?:/[0-9]*)?(?:\?[^#]*)?)"
    rf"|unix://{_WHO}/[^?#]+(?:\?[^#]*)?"
)
_IN_SCRIPT = re.compile(r"^ERR Error running script .*: -([A-Z]+) ")

_pack: Callable[[tuple[Argument, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment]  # its stub takes one word


class ErrorReply(exceptions.ResponseError):
    """What a server answers instead of a result."""

    @property
    def code(self) -> str:
        """Its first word, such as `OOM` or `NOSCRIPT`; Redis 6 has it inside a script's error."""
        in_script = _IN_SCRIPT.search(str(self))
        return in_script[1] if in_script else str(self).partition(" ")[0]


class BrokenReply(Exception):
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
    parts = _URL.fullmatch(url)
    if parts is None:  # what was got may hold a password, so it is not told
        raise ConfigError("Redis URL: expected redis://[[user]:password@]host[:port][/database]")
    kind, cluster, who, hosts, tail, _ = parts.groups("")
    if "," in hosts and not cluster:
        raise ConfigError("Redis URL: got several hosts, expected them for a cluster only")
    urls = [f"{kind}://{who}{host}{tail}" for host in hosts.split(",")] if kind else [url]
    servers = [_read(one, _TLS_OPTIONS if kind == "rediss" else frozenset()) for one in urls]
    access = Access(
        username=servers[0].get("username"),
        password=servers[0].get("password") if password is None else password,
        database=servers[0].get("db", 0),
        tls=_tls(servers[0], ca_file) if kind == "rediss" else None,
    )
    return Endpoint(tuple(map(_address, servers)), access, is_cluster=bool(cluster))


def connect(address: Address, access: Access, deadline: float) -> Connection:
    """A greeted connection; a name may take as long as the system's resolver does.

    Raises:
        OSError: It could not be made in time, the name is not known, or the certificate is wrong.
        ErrorReply: The server refuses the user, the password or the database.
    """
    parser, left_s = _Parser(deadline), _left_s(deadline)
    options: dict[str, Any] = {
        "username": None if access.password is None else access.username,
        "password": access.password,
        "db": access.database,
        "socket_connect_timeout": left_s,
        "socket_timeout": left_s,
        "retry": Retry(NoBackoff(), 0),
        "parser_class": lambda **_: parser,
        "protocol": 2,
        "driver_info": None,  # spares two round trips, and rights to make them
    }
    wire: Any  # typed in parts
    if address.path:
        wire = redis_py.UnixDomainSocketConnection(address.path, **options)  # type: ignore[abstract]  # it has no host
    elif access.tls is None:
        wire = redis_py.Connection(address.host, address.port, **options)
    else:
        wire = _TlsConnection(access.tls, host=address.host, port=address.port, **options)
    with _translated():
        wire.connect()
    return Connection(wire, parser, parser.sock)


class Connection:
    """One open connection, used by one thread at a time."""

    def __init__(
        self, wire: redis_py.AbstractConnection, parser: _Parser, sock: socket.socket
    ) -> None:
        self._wire = wire
        self._parser = parser
        self._sock = sock

    def send(self, packed: bytes, deadline: float) -> None:
        """Send packed commands.

        Raises:
            OSError: Not all was sent in time, or the connection is broken.
        """
        self._sock.settimeout(_left_s(deadline))  # fails once closed; redis-py would reopen
        with _translated():
            self._wire.send_packed_command([packed], check_health=False)

    def receive(self, num_replies: int, deadline: float) -> list[Reply]:
        """The next replies, error replies among them.

        What has arrived is read even after the deadline: another server may have used it up.

        Raises:
            OSError: They did not all come in time, or the connection is broken.
            BrokenReply: They are no replies of Redis, or too large.
        """
        self._parser.limit(deadline)
        with _translated():
            return [self._next() for _ in range(num_replies)]

    def is_stale(self) -> bool:
        """Whether the server closed it, or sent what nobody asked for. Changes nothing.

        TLS has messages of its own between replies, so there it is not told.
        """
        if isinstance(self._wire, redis_py.SSLConnection):
            return False
        try:
            return self._wire.can_read()
        except exceptions.ConnectionError:
            return True

    def interrupt(self) -> None:
        """End what another thread waits for on this connection."""
        with suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # TLS's own is for its own thread

    def close(self) -> None:
        """Close it; more than once is no error."""
        self._wire.disconnect()

    def _next(self) -> Reply:
        try:
            return self._wire.read_response(disable_decoding=True, disconnect_on_error=False)  # type: ignore[no-any-return]
        except ErrorReply as exc:
            return exc.with_traceback(None)


def pack(commands: Sequence[Sequence[Argument]]) -> bytes:
    """Commands as they are sent."""
    return b"".join([_pack(tuple(command)) for command in commands])


class _Parser(redis_py.DefaultParser):  # type: ignore[misc, valid-type]  # hiredis' or Python's
    """redis-py's parser, which waits no longer than a call may, however slowly bytes arrive.

    redis-py's own timeout is for each read. Error replies keep their code.
    """

    def __init__(self, deadline: float) -> None:
        super().__init__(_READ_BYTES)
        self.limit(deadline)

    @property
    def sock(self) -> socket.socket:
        """Of the open connection."""
        assert isinstance(self._sock, socket.socket), "it is connected"
        return self._sock

    def limit(self, deadline: float) -> None:
        """End what is read from now on by a deadline."""
        self._deadline = deadline
        self._num_bytes = self._num_late_bytes = 0

    def read_from_socket(self, *_: object, **__: object) -> bool:
        """Read once, by the deadline; after it only what has arrived, and not for ever."""
        left_s = self._deadline - time.monotonic()
        if self._num_late_bytes > MAX_LATE_BYTES:
            raise exceptions.TimeoutError("timed out")
        if self._num_bytes > MAX_REPLY_BYTES:
            raise exceptions.InvalidResponse(f"more than {MAX_REPLY_BYTES} bytes of replies")
        num_before = self._reader.len() if self._reader else 0
        super().read_from_socket(timeout=max(left_s, 0))
        size = self._reader.len() - num_before
        self._num_bytes += size
        self._num_late_bytes += size if left_s <= 0 else 0
        return True

    @classmethod
    def parse_error(cls, response: str) -> ErrorReply:
        """An error reply as it came."""
        return ErrorReply(response)


class _TlsConnection(redis_py.SSLConnection):
    """Checks certificates by one context, which trusts what it was given and nothing else."""

    def __init__(self, context: ssl.SSLContext, **options: Any) -> None:
        super().__init__(**options)
        self._context = context

    def _wrap_socket_with_ssl(self, sock: socket.socket) -> ssl.SSLSocket:
        return self._context.wrap_socket(sock, server_hostname=self.host)


def _left_s(deadline: float) -> float:
    """Seconds until a deadline; raises `TimeoutError` if it has passed."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s


@contextmanager
def _translated() -> Iterator[None]:
    """Turn redis-py's errors into Python's: the one it hides, if there is one."""
    try:
        yield
    except exceptions.TimeoutError as exc:
        raise TimeoutError("timed out") from exc
    except exceptions.ConnectionError as exc:
        hidden = exc.__context__
        raise hidden if isinstance(hidden, OSError) else ConnectionResetError(str(exc)) from exc
    except (exceptions.InvalidResponse, MemoryError) as exc:
        raise BrokenReply(str(exc)) from exc


def _read(url: str, known: frozenset[str]) -> dict[str, Any]:
    """What redis-py reads in the URL of one server; of the options it takes only those we know."""
    unknown = parse_qs(url.partition("?")[2], keep_blank_values=True).keys() - known - {"db"}
    if unknown:
        raise ConfigError(f"Redis URL: the option {min(unknown)!r} is not known")
    with suppress(ValueError):  # whose words tell what was got
        options: dict[str, Any] = redis_py.parse_url(url)
        if options.get("db", 0) >= 0:
            return options
    raise ConfigError("Redis URL: expected port and database to be numbers, password quoted")


def _address(options: Mapping[str, Any]) -> Address:
    if "path" in options:
        return Address(path=options["path"])
    return Address(options.get("host", "localhost"), options.get("port", 6379))


def _tls(options: Mapping[str, Any], ca_file: str | None) -> ssl.SSLContext:
    """How the options say certificates are checked."""
    try:
        given = {name: options[name] for name in _TLS_OPTIONS & options.keys()}
        said = redis_py.SSLConnection(**given)
        context = ssl.create_default_context(cafile=ca_file or said.ca_certs)
        context.check_hostname = bool(said.check_hostname)
        context.verify_mode = said.cert_reqs
        if said.certfile:
            context.load_cert_chain(said.certfile, said.keyfile)
    except exceptions.RedisError as exc:
        raise ConfigError(f"Redis URL: {exc}") from exc
    except OSError as exc:
        raise ConfigError(f"Redis TLS: a certificate or key cannot be read: {exc}") from exc
    return context
