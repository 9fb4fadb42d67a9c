"""What `picctl doctor` asks of Redis: can it be reached, is it set up for an index, may we use it.

Knows how Redis and TLS say what is wrong, and what an operator does about it. Each check is a
function of what was asked. Does not know entries or payloads.
"""

from __future__ import annotations

import re
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import hiredis

from sglang_ext.chunk_index import keys
from sglang_ext.chunk_index.redis_connection import (
    Access,
    Address,
    Argument,
    Connection,
    Endpoint,
    ErrorReply,
    Reply,
    Target,
    connect,
    pack,
    resolve,
)

OLDEST = (6, 2)
SKEW_WARN_MS = 1_000
SKEW_ERROR_MS = 60_000
NEARLY_FULL = 0.9
SCAN_KEYS = 20_000
SCAN_COUNT = 1_000

_BROKEN = (OSError, hiredis.HiredisError)
_VERSION = re.compile(rb"pic(\d+):")


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
        session = Session(address, connect(targets, endpoint.access, deadline), timeout_s)
    except (*_BROKEN, ErrorReply) as exc:
        return None, explain(address, endpoint.access, targets, exc, timeout_s)
    try:
        session.ask("PING")
    except (*_BROKEN, ErrorReply) as exc:
        session.close()
        if isinstance(exc, ErrorReply) and exc.code == "NOPERM":
            return None, _permission_finding("PING", exc)
        return None, explain(address, endpoint.access, targets, exc, timeout_s)
    return session, Finding(Level.OK, what, f"{address} answers")


def explain(
    address: Address,
    access: Access,
    targets: Sequence[Target],
    exc: BaseException,
    timeout_s: float,
) -> Finding:
    """Why a server cannot be used, and what to do."""
    if isinstance(exc, ErrorReply):
        return _explain_reply(address, exc)
    was_cut = isinstance(exc, (ssl.SSLEOFError, ConnectionResetError))
    if access.tls is not None and was_cut and speaks_tls(targets, timeout_s):
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
    if access.tls is None and not address.path and speaks_tls(targets, timeout_s):
        message = f"{where} takes only TLS, but --index is redis://"
        return Finding(Level.ERROR, "tls", message, "use rediss:// with ?ssl_ca_certs=FILE")
    if access.tls is not None and speaks_plain(targets, timeout_s):
        return _no_tls_finding(address, str(exc))
    if isinstance(exc, TimeoutError):
        hint = "check host and port in --index, firewalls, and whether Redis is stuck"
        return Finding(Level.ERROR, what, f"{where} does not answer in {timeout_s:g} s", hint)
    hint = "check host and port in --index; is that Redis?"
    return Finding(Level.ERROR, what, f"{where}: {exc}", hint)


def speaks_tls(targets: Sequence[Target], timeout_s: float) -> bool:
    """Whether a server answers a TLS greeting; its certificate does not matter."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    for target in targets:
        with socket.socket(target.family, socket.SOCK_STREAM) as sock:
            try:
                sock.settimeout(timeout_s)
                sock.connect(target.place)
                with context.wrap_socket(sock, server_hostname=target.host):
                    return True
            except OSError:
                continue
    return False


def speaks_plain(targets: Sequence[Target], timeout_s: float) -> bool:
    """Whether a server answers without TLS, be it with a refusal."""
    deadline = time.monotonic() + timeout_s
    try:
        connection = connect(targets, Access(), deadline)
    except (*_BROKEN, ErrorReply):
        return False
    try:
        connection.send(pack([("PING",)]), deadline)
        connection.receive(1, deadline)
        return True
    except _BROKEN:
        return False
    finally:
        connection.close()


def check_server(session: Session, now_ms: Callable[[], int]) -> list[Finding]:
    """Every check of one server's settings and state."""
    findings: list[Finding] = []
    with _noted(findings, "INFO"):
        info = parse_info(session.ask("INFO"))
        checks = (check_version, check_policy, check_memory, check_role, check_evictions)
        findings += [check(info) for check in checks]
        findings.append(check_persistence(info, _saves(session)))
    with _noted(findings, "TIME"):
        seconds, micros = _pair(session.ask("TIME"))
        findings.append(check_clock(seconds * 1000 + micros // 1000, now_ms()))
    with _noted(findings, "SCAN"):
        findings.append(check_versions(session))
    findings += check_permissions(session)
    return findings


def check_version(info: Mapping[str, str]) -> Finding:
    """Whether the server is new enough; Valkey counts as Redis 7.2."""
    what = "version"
    if info.get("server_name") == "valkey" or "valkey_version" in info:
        return Finding(Level.OK, what, f"Valkey {info.get('valkey_version', '')}".strip())
    version = info.get("redis_version", "")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST:
        hint = "upgrade to Redis 6.2 or newer, or Valkey"
        return Finding(Level.ERROR, what, f"Redis {version or 'of unknown version'}", hint)
    return Finding(Level.OK, what, f"Redis {version}")


def check_policy(info: Mapping[str, str]) -> Finding:
    """Whether Redis evicts keys of the index, which it does not understand."""
    what, policy = "maxmemory-policy", info.get("maxmemory_policy", "unknown")
    hint = "CONFIG SET maxmemory-policy noeviction; servers evict by --pic-shared-gib themselves"
    if policy == "noeviction":
        return Finding(Level.OK, what, policy)
    if policy.startswith("volatile"):
        message = f"{policy}: Redis removes reservations and heartbeats when it is full"
        return Finding(Level.WARN, what, message, hint)
    message = f"{policy}: Redis removes parts of the index when it is full"
    return Finding(Level.ERROR, what, message, hint)


def check_memory(info: Mapping[str, str]) -> Finding:
    """Whether Redis has a limit, and room below it."""
    what = "maxmemory"
    limit, used = _number(info, "maxmemory"), _number(info, "used_memory")
    if limit == 0:
        hint = "CONFIG SET maxmemory to what the host can spare, with noeviction"
        return Finding(Level.WARN, what, "not set: Redis may take all memory of its host", hint)
    share = used / limit
    message = f"{used >> 20} of {limit >> 20} MiB used"
    if share > NEARLY_FULL:
        hint = "raise maxmemory, or lower --pic-shared-gib if payloads lie in Redis"
        return Finding(Level.WARN, what, f"{message}: writes will be refused soon", hint)
    return Finding(Level.OK, what, message)


def check_role(info: Mapping[str, str]) -> Finding:
    """Whether the server takes writes."""
    if info.get("loading") == "1":
        return Finding(Level.WARN, "role", "it is loading its data set", "wait")
    if info.get("role") == "slave" and info.get("cluster_enabled") != "1":
        hint = f"use its master, {info.get('master_host')}:{info.get('master_port')}"
        return Finding(Level.ERROR, "role", "a replica, which takes no writes", hint)
    is_failing = info.get("rdb_last_bgsave_status", "ok") != "ok"
    if is_failing:
        hint = "free its disk, or CONFIG SET stop-writes-on-bgsave-error no"
        message = "its last snapshot failed, so it may refuse writes"
        return Finding(Level.WARN, "role", message, hint)
    return Finding(Level.OK, "role", info.get("role", "unknown"))


def check_evictions(info: Mapping[str, str]) -> Finding:
    """Whether Redis has removed keys by itself."""
    number = _number(info, "evicted_keys")
    if number:
        hint = "set noeviction, then picctl verify --repair"
        message = f"Redis removed {number} keys since it started, perhaps of the index"
        return Finding(Level.WARN, "evictions", message, hint)
    return Finding(Level.OK, "evictions", "none by Redis")


def check_persistence(info: Mapping[str, str], saves: str | None) -> Finding:
    """Whether the index survives a restart of Redis; it need not."""
    what = "persistence"
    if info.get("aof_enabled") == "1" or saves:
        return Finding(Level.OK, what, "on")
    if saves is None:
        return Finding(Level.INFO, what, "AOF is off; snapshots are not known here")
    message = "off: after a restart of Redis the shared tier fills anew"
    return Finding(Level.INFO, what, message)


def check_clock(redis_ms: int, now_ms: int) -> Finding:
    """Whether this host and Redis agree on the time, by which entries expire."""
    what, skew_ms = "clock", redis_ms - now_ms
    message = f"Redis is {abs(skew_ms) / 1e3:.1f} s {'ahead' if skew_ms > 0 else 'behind'}"
    hint = "synchronise the clocks of both hosts (NTP)"
    if abs(skew_ms) > SKEW_ERROR_MS:
        return Finding(Level.ERROR, what, message, hint)
    if abs(skew_ms) > SKEW_WARN_MS:
        return Finding(Level.WARN, what, message, hint)
    return Finding(Level.OK, what, f"within {SKEW_WARN_MS / 1e3:g} s of this host's")


def check_permissions(session: Session) -> list[Finding]:
    """Whether the user may do what servers do; tries each command on keys nobody uses.

    The last check of a session: it listens to announcements afterwards.
    """
    refused: dict[str, Finding] = {}
    for words in _probes(keys.PREFIX + b"{00}:"):
        try:
            session.ask(*words)
        except ErrorReply as exc:  # for another reason, such as a cluster's: it does not matter
            if exc.code == "NOPERM":
                refused.setdefault(str(words[0]), _permission_finding(str(words[0]), exc))
    allowed = Finding(Level.OK, "permissions", "every command and key that is needed")
    return list(refused.values()) or [allowed]


def check_versions(session: Session) -> Finding:
    """Whether there are keys of servers with another format, in a sample."""
    what = "format"
    others: set[str] = set()
    num_seen = 0
    cursor: Argument = 0
    while True:
        cursor, names = _scan_page(
            session.ask("SCAN", cursor, "MATCH", "pic*", "COUNT", SCAN_COUNT)
        )
        num_seen += SCAN_COUNT
        for name in names:
            match = _VERSION.match(name)
            if match is not None and not name.startswith(keys.PREFIX):
                others.add(match[1].decode())
        if cursor == b"0" or num_seen >= SCAN_KEYS:
            break
    ours = keys.PREFIX.decode().removeprefix("pic").rstrip(":")
    if not others:
        return Finding(Level.OK, what, f"version {ours}, and no other in a sample")
    listed = ", ".join(sorted(others))
    hint = "give each version a Redis of its own, or delete the old one's keys"
    message = (
        f"entries of format {listed} beside {ours}: servers of other versions share this Redis"
    )
    return Finding(Level.WARN, what, message, hint)


def check_cluster(session: Session) -> tuple[list[Finding], list[Address]]:
    """Whether a cluster covers all slots and could lose a master, and its masters; else nothing."""
    findings: list[Finding] = []
    with _noted(findings, "INFO"):
        info = parse_info(session.ask("INFO", "cluster"))
        if info.get("cluster_enabled") != "1":
            return [], []
    with _noted(findings, "CLUSTER"):
        findings.append(check_slots(parse_info(session.ask("CLUSTER", "INFO"))))
    with _noted(findings, "CLUSTER"):
        ranges = list(_unique_ranges(session.ask("CLUSTER", "SLOTS")))
        num_replicas = sum(max(0, len(each) - 3) for each in ranges)
        findings.append(check_replicas(len(ranges), num_replicas))
        return findings, list(_masters(ranges, session.address))
    return findings, []


def check_slots(state: Mapping[str, str]) -> Finding:
    """Whether every slot of a cluster has a master that answers."""
    what, number = "cluster", _number(state, "cluster_slots_ok")
    message = f"state {state.get('cluster_state')}, {number} of 16384 slots served"
    if state.get("cluster_state") == "ok" and number == 16384:
        return Finding(Level.OK, what, message)
    hint = "redis-cli --cluster fix HOST:PORT, or bring the missing masters back"
    return Finding(Level.ERROR, what, message, hint)


def check_replicas(num_masters: int, num_replicas: int) -> Finding:
    """Whether a cluster could lose a master without losing slots."""
    message = f"{num_masters} masters, {num_replicas} replicas"
    if num_replicas < num_masters:
        message += ": a master that fails takes its share of the index with it"
        return Finding(Level.INFO, "replicas", message)
    return Finding(Level.OK, "replicas", message)


def at_server(finding: Finding, address: Address) -> Finding:
    """The same finding with the server it is about, where there are several."""
    return replace(finding, message=f"{address}: {finding.message}")


def parse_info(reply: Reply) -> dict[str, str]:
    """What `INFO` says, by name."""
    text = reply.decode("utf-8", "replace") if isinstance(reply, bytes) else ""
    pairs = (line.partition(":") for line in text.splitlines() if not line.startswith("#"))
    return {name: value.strip() for name, colon, value in pairs if colon}


def _probes(shard: bytes) -> Iterable[tuple[Argument, ...]]:
    """Every command that servers send or that scripts call, on keys of its own.

    What fails for another reason than permission does not matter.
    """
    names = (shard + b"doctor:" + kind for kind in (b"text", b"zset", b"set", b"hash", b"stream"))
    text, ordered, many, table, stream = names
    yield "SET", text, "1", "EX", 60
    yield "GET", text
    yield "MGET", text
    yield "EXISTS", text
    yield "TYPE", text
    yield "GETRANGE", text, 0, 0
    yield "SETRANGE", text, 0, "1"
    yield "STRLEN", text
    yield "PERSIST", text
    yield "ZADD", ordered, 1, "m"
    yield "ZCARD", ordered
    yield "ZRANGE", ordered, 0, 0
    yield "ZRANGEBYSCORE", ordered, 0, 1
    yield "ZCOUNT", ordered, 0, 1
    yield "ZSCAN", ordered, 0
    yield "ZREM", ordered, "m"
    yield "SADD", many, "m"
    yield "SRANDMEMBER", many
    yield "SSCAN", many, 0
    yield "SREM", many, "m"
    yield "HSET", table, "f", 1
    yield "HINCRBY", table, "f", 1
    yield "HGET", table, "f"
    yield "HMGET", table, "f"
    yield "HSCAN", table, 0
    yield "HDEL", table, "f"
    yield "EVAL", "return redis.call('TIME')", 1, text
    yield "EVALSHA", "0" * 40, 1, text
    yield ("TIME",)
    yield "SCAN", 0, "COUNT", 1
    yield "XADD", stream, "MAXLEN", "~", 1, "*", "f", ""
    yield "XRANGE", stream, "-", "+", "COUNT", 1
    yield "XREVRANGE", stream, "+", "-", "COUNT", 1
    yield "UNLINK", text, ordered, many, table, stream
    yield "PUBLISH", keys.CHANGES, b"doctor--g"  # names no key, so that nobody listens
    yield "SUBSCRIBE", keys.CHANGES


def _permission_finding(command: str, exc: ErrorReply) -> Finding:
    """Which command or key pattern a user lacks."""
    hint = f"ACL SETUSER NAME +{command.lower()}"
    if "keys" in str(exc) or "channels" in str(exc):
        hint = "ACL SETUSER NAME ~pic1:* &pic1:changes"
    return Finding(Level.ERROR, "permissions", f"{command}: {exc}", hint)


def _client_finding(address: Address, text: str) -> Finding:
    hint = "give ssl_certfile and ssl_keyfile in --index (Redis has `tls-auth-clients`)"
    return Finding(Level.ERROR, "tls", f"{address} wants our certificate: {text}", hint)


def _no_tls_finding(address: Address, text: str) -> Finding:
    hint = "use redis://, or the port where Redis has `tls-port`"
    return Finding(Level.ERROR, "tls", f"{address} does not speak TLS: {text}", hint)


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
        return _permission_finding("AUTH or SELECT", exc)
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
    text = f"{exc.reason or exc}"
    if "WRONG_VERSION" in text or "RECORD_LAYER" in text or isinstance(exc, ssl.SSLEOFError):
        return _no_tls_finding(address, text)
    if "CERTIFICATE" in text or "HANDSHAKE" in text:
        return _client_finding(address, text)
    return Finding(Level.ERROR, what, f"{address}: {text}", "see Redis' own log")


@contextmanager
def _noted(findings: list[Finding], command: str) -> Iterator[None]:
    """Note what a command is refused with, and go on: servers do not need it."""
    try:
        yield
    except ErrorReply as exc:
        hint = f"ACL SETUSER NAME +{command.lower()}, or ask as another user"
        message = f"{command} is refused, so not all can be checked: {exc}"
        findings.append(Finding(Level.WARN, "permissions", message, hint))


def _saves(session: Session) -> str | None:
    """The snapshots that Redis makes; None if it does not tell."""
    try:
        reply = session.ask("CONFIG", "GET", "save")
    except ErrorReply:
        return None
    if isinstance(reply, list) and len(reply) == 2 and isinstance(reply[1], bytes):
        return reply[1].decode()
    return None


def _number(info: Mapping[str, str], name: str) -> int:
    text = info.get(name, "0")
    return int(text) if text.isdigit() else 0


def _pair(reply: Reply) -> tuple[int, int]:
    match reply:
        case [bytes() as first, bytes() as second]:
            return int(first), int(second)
    raise ErrorReply("ERR TIME is not what it should be")


def _scan_page(reply: Reply) -> tuple[Argument, list[bytes]]:
    match reply:
        case [bytes() as cursor, [*names]]:
            return cursor, [name for name in names if isinstance(name, bytes)]
    raise ErrorReply("ERR SCAN is not what it should be")


def _unique_ranges(reply: Any) -> list[list[Any]]:
    """One of each master's slot ranges: first, last, master, replicas."""
    ranges = reply if isinstance(reply, list) else []
    return list({str(each[2][:2]): each for each in ranges if len(each) > 2}.values())


def _masters(ranges: Sequence[Sequence[Any]], asked: Address) -> Iterator[Address]:
    for each in ranges:
        host, port = each[2][:2]
        yield Address((host or b"").decode() or asked.host, port)
