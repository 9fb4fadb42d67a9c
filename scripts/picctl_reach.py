"""Reaching a Redis for `picctl doctor`: a connection that answers, or why there is none.

Knows how sockets, TLS and Redis say what is wrong, and what an operator does about it. Does not
know what an index needs of Redis: see `picctl_redis_checks`.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from sglang_ext.chunk_index.redis_connection import (
    Access,
    Address,
    Argument,
    BrokenReply,
    Connection,
    Endpoint,
    ErrorReply,
    Reply,
    connect,
    pack,
)

BROKEN = (OSError, BrokenReply)
"""What a connection that is of no use any more raises."""


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    INFO = "info"
    WARN = "warn"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Attributes:
        level: How bad it is.
        check: Which check.
        message: What is so.
        hint: What to do about it; empty if nothing.
    """

    level: Level
    check: str
    message: str
    hint: str = ""


class Session:
    """One connection to one server, asked one command at a time."""

    def __init__(self, address: Address, connection: Connection, timeout_s: float) -> None:
        self.address = address
        self._connection = connection
        self._timeout_s = timeout_s

    def ask(self, *words: Argument) -> Reply:
        """The reply to a command.

        Raises:
            OSError: It did not come in time, or the connection broke.
            ErrorReply: It is an error.
        """
        deadline = time.monotonic() + self._timeout_s
        self._connection.send(pack([words]), deadline)
        (reply,) = self._connection.receive(1, deadline)
        if isinstance(reply, ErrorReply):
            raise reply
        return reply

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def open_session(
    address: Address, endpoint: Endpoint, timeout_s: float
) -> tuple[Session | None, Finding]:
    """A connection that answers, and what was found on the way; None if there is none."""
    what = "connection"
    try:
        targets = resolve(address)
    except OSError as exc:
        hint = "check the host name in --index"
        return None, Finding(Level.ERROR, what, f"{address}: the name is not known ({exc})", hint)
    deadline = time.monotonic() + timeout_s
    try:
        session = Session(address, connect(address, endpoint.access, deadline), timeout_s)
    except (*BROKEN, ErrorReply) as exc:
        return None, explain(address, endpoint.access, targets, exc, timeout_s)
    try:
        session.ask("PING")
    except (*BROKEN, ErrorReply) as exc:
        session.close()
        if isinstance(exc, ErrorReply) and exc.code == "NOPERM":
            return None, permission_finding("PING", exc)
        return None, explain(address, endpoint.access, targets, exc, timeout_s)
    return session, Finding(Level.OK, what, f"{address} answers")


def resolve(address: Address) -> list[Address]:
    """The numbers of a name; none of a unix socket.

    Raises:
        OSError: The name is not known, or the resolver does not answer.
    """
    if address.path:
        return []
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    return [Address(str(place[0]), int(place[1])) for *_, place in found]


def explain(
    address: Address,
    access: Access,
    targets: Sequence[Address],
    exc: BaseException,
    timeout_s: float,
) -> Finding:
    """Why a server cannot be used, and what to do."""
    if isinstance(exc, ErrorReply):
        return _explain_reply(address, exc)
    was_cut = isinstance(exc, (ssl.SSLEOFError, ConnectionResetError))
    if access.tls is not None and was_cut and speaks_tls(address.host, targets, timeout_s):
        return _client_finding(address, str(exc))
    if isinstance(exc, ssl.SSLError):
        return _explain_tls(address, exc)
    what, where = "connection", str(address)
    if isinstance(exc, ConnectionRefusedError):
        hint = "check host and port in --index, and that Redis runs and listens there"
        return Finding(Level.ERROR, what, f"{where} refuses connections", hint)
    if isinstance(exc, FileNotFoundError):
        hint = "check the path in --index, and that Redis has `unixsocket` set"
        return Finding(Level.ERROR, what, f"{where}: there is no such socket", hint)
    if isinstance(exc, PermissionError):
        hint = "give this user access to the socket (`unixsocketperm`)"
        return Finding(Level.ERROR, what, f"{where}: no permission", hint)
    if access.tls is None and not address.path and speaks_tls(address.host, targets, timeout_s):
        message = f"{where} takes only TLS, but --index is redis://"
        return Finding(Level.ERROR, "tls", message, "use rediss:// with ?ssl_ca_certs=FILE")
    if access.tls is not None and speaks_plain(targets, timeout_s):
        return _no_tls_finding(address, str(exc))
    if isinstance(exc, TimeoutError):
        hint = "check host and port in --index, firewalls, and whether Redis is stuck"
        return Finding(Level.ERROR, what, f"{where} does not answer in {timeout_s:g} s", hint)
    hint = "check host and port in --index; is that Redis?"
    return Finding(Level.ERROR, what, f"{where}: {exc}", hint)


def speaks_tls(name: str, targets: Sequence[Address], timeout_s: float) -> bool:
    """Whether a server of that name answers a TLS greeting; its certificate does not matter."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    for target in targets:
        try:
            with (
                socket.create_connection((target.host, target.port), timeout_s) as sock,
                context.wrap_socket(sock, server_hostname=name),
            ):
                return True
        except OSError:
            continue
    return False


def speaks_plain(targets: Sequence[Address], timeout_s: float) -> bool:
    """Whether a server answers without TLS, be it with a refusal."""
    deadline = time.monotonic() + timeout_s
    for target in targets:
        try:
            connection = connect(target, Access(), deadline)
        except BROKEN:
            continue
        try:
            connection.send(pack([("PING",)]), deadline)
            connection.receive(1, deadline)
            return True
        except BROKEN:
            return False
        finally:
            connection.close()
    return False


def permission_finding(command: str, exc: ErrorReply) -> Finding:
    """Which command or key pattern a user lacks."""
    hint = f"ACL SETUSER NAME +{command.lower()}"
    if "keys" in str(exc) or "channels" in str(exc):
        hint = "ACL SETUSER NAME ~pic1:* &pic1:changes"
    return Finding(Level.ERROR, "permissions", f"{command}: {exc}", hint)


def _explain_reply(address: Address, exc: ErrorReply) -> Finding:
    """Why a server refuses to talk."""
    text = str(exc)
    if exc.code == "NOAUTH":
        hint = "give --index-password-file, or user and password in --index"
        return Finding(Level.ERROR, "auth", f"{address} wants a password: {text}", hint)
    if exc.code == "WRONGPASS" or "invalid password" in text:
        hint = "check --index-password-file, and the user in --index (ACL LIST)"
        return Finding(Level.ERROR, "auth", f"{address} refuses user or password: {text}", hint)
    if "AUTH" in text:
        hint = "leave the password out, or set `requirepass` in Redis"
        return Finding(Level.ERROR, "auth", f"{address} has no password: {text}", hint)
    if exc.code == "NOPERM":
        return permission_finding("AUTH or SELECT", exc)
    if "DB index" in text or "SELECT is not allowed" in text:
        hint = "check the number behind the slash in --index; a cluster has only 0"
        return Finding(Level.ERROR, "connection", f"{address}: {text}", hint)
    return Finding(Level.ERROR, "connection", f"{address} answers: {text}", "see Redis' own log")


def _explain_tls(address: Address, exc: ssl.SSLError) -> Finding:
    """Why a TLS connection was not made."""
    what = "tls"
    if isinstance(exc, ssl.SSLCertVerificationError):
        reason = exc.verify_message
        if "ostname" in reason or "IP address" in reason:
            hint = "use a name of the certificate in --index, or ?ssl_check_hostname=false"
            return Finding(Level.ERROR, what, f"{address}: {reason}", hint)
        hint = "name the CA's certificate: ?ssl_ca_certs=FILE in --index"
        return Finding(Level.ERROR, what, f"{address}: its certificate fails: {reason}", hint)
    text = str(exc)
    if "WRONG_VERSION" in text or "RECORD_LAYER" in text or isinstance(exc, ssl.SSLEOFError):
        return _no_tls_finding(address, text)
    if "CERTIFICATE" in text or "HANDSHAKE" in text:
        return _client_finding(address, text)
    return Finding(Level.ERROR, what, f"{address}: {text}", "see Redis' own log")


def _client_finding(address: Address, text: str) -> Finding:
    hint = "give ssl_certfile and ssl_keyfile in --index (Redis has `tls-auth-clients`)"
    return Finding(Level.ERROR, "tls", f"{address} wants our certificate: {text}", hint)


def _no_tls_finding(address: Address, text: str) -> Finding:
    hint = "use redis://, or the port where Redis has `tls-port`"
    return Finding(Level.ERROR, "tls", f"{address} does not speak TLS: {text}", hint)
