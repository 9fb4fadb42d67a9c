"""What `picctl doctor` asks of a Redis that answers: is it set up for an index, may we use it.

Each check is a function of what was asked. Does not know how a server is reached (`picctl_reach`),
or entries and payloads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from sglang_ext.chunk_index import keys
from sglang_ext.chunk_index.redis_connection import Address, Argument, ErrorReply, Reply
from sglang_ext.scripts.picctl_reach import Finding, Level, Session, permission_finding

OLDEST = (6, 2)
SKEW_WARN_MS = 1_000
SKEW_ERROR_MS = 60_000
NEARLY_FULL = 0.9
SCAN_KEYS = 20_000
SCAN_COUNT = 1_000

_VERSION = re.compile(rb"pic(\d+):")


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
                refused.setdefault(str(words[0]), permission_finding(str(words[0]), exc))
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
    yield "XLEN", stream
    yield "UNLINK", text, ordered, many, table, stream
    yield "PUBLISH", keys.CHANGES, b"doctor--g"  # names no key, so that nobody listens
    yield "SUBSCRIBE", keys.CHANGES


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
