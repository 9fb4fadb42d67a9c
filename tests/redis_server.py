"""Real Redis servers for tests: alone, by unix socket, with TLS and users, replicas, clusters.

    with redis_server() as server:
        link = RedisLink(RedisConfig(url=server.url))

A server listens on a free port, keeps nothing on disk but its own log, and is ended with its block.
`kill`, `restart`, `pause` and `resume` make it fail as servers do. All waits are polls with a
deadline; a missing `redis-server` fails the test.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Literal

import pytest

from sglang_ext.chunk_index.redis_link import RedisConfig, RedisLink

PORTS = range(10_000, 20_000)
START_S = 20.0
"""Most seconds that a server or a cluster may take to be ready."""

PASSWORD = "correct horse+battery%staple"
"""Of every server that has one; its characters must be quoted in a URL."""

QUOTED_PASSWORD = "correct%20horse%2Bbattery%25staple"

ACL_USER = "pic"

ACL_RULES = (
    "on", "resetkeys", "~pic1:*", "resetchannels", "&pic1:changes", "-@all",
    "+auth", "+ping", "+info|cluster", "+cluster|slots", "+select", "+time", "+type",
    "+eval", "+evalsha", "+publish", "+subscribe", "+scan",
    "+get", "+mget", "+set", "+setrange", "+getrange", "+strlen", "+exists", "+unlink", "+persist",
    "+hget", "+hmget", "+hset", "+hdel", "+hincrby", "+hscan",
    "+sadd", "+srem", "+sscan", "+srandmember",
    "+xadd", "+xlen", "+xrange", "+xrevrange",
    "+zadd", "+zrem", "+zcard", "+zcount", "+zrange", "+zrangebyscore", "+zscan",
)  # fmt: skip
"""What a user of the shared index must be allowed, and nothing more."""


@dataclass(frozen=True)
class TlsFiles:
    """Certificates made for one server.

    Attributes:
        ca: The authority's certificate, which clients trust.
        cert: The server's certificate, for `localhost` and 127.0.0.1.
        key: Its key.
    """

    ca: Path
    cert: Path
    key: Path


class RedisServer:
    """One `redis-server` process; see `redis_server`."""

    def __init__(self, folder: Path, arguments: Sequence[str], url: str, ping: Sequence[str]):
        """Start it and wait until it answers.

        Args:
            folder: Its working folder, with its log.
            arguments: Of `redis-server`, beside those of every server.
            url: For `RedisConfig`.
            ping: Arguments by which `redis-cli` reaches it.
        """
        self.url = url
        self.folder = folder
        self._arguments = [
            _binary("redis-server"),
            *("--save", "", "--appendonly", "no", "--daemonize", "no", "--dir", str(folder)),
            *("--logfile", str(folder / "redis.log"), "--repl-diskless-sync-delay", "0"),
            *arguments,
        ]
        self._ping = ping
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self._process is not None, "the server runs"
        return self._process.pid

    def start(self) -> None:
        """Start the process, on the same port as before, and wait until it answers."""
        self._process = subprocess.Popen(
            self._arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until(lambda: self.cli("PING", check=False) == "PONG", START_S, self.log)

    def stop(self) -> None:
        """End it in an orderly way."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Kill it and start it again, empty."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """Let it stand still: it keeps connections, takes bytes and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def cli(self, *words: str, check: bool = True) -> str:
        """What `redis-cli` prints for a command."""
        done = subprocess.run(
            [_binary("redis-cli"), "--no-auth-warning", *self._ping, *words],
            capture_output=True,
            text=True,
            timeout=START_S,
            env={k: v for k, v in os.environ.items() if k != "REDISCLI_AUTH"},
        )
        if check and done.returncode != 0:
            pytest.fail(f"redis-cli {words[0]}: {done.stdout}{done.stderr}", pytrace=False)
        return done.stdout.strip()

    def log(self) -> str:
        """The end of its log."""
        path = self.folder / "redis.log"
        return path.read_text()[-2000:] if path.exists() else "no log"

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGCONT)
            os.kill(self._process.pid, number)
        self._process.wait(START_S)
        self._process = None


class RedisCluster:
    """Masters, and replicas of them; see `redis_cluster`."""

    def __init__(self, servers: Sequence[RedisServer], url: str, num_masters: int):
        self.servers = list(servers)
        self.url = url
        self.num_masters = num_masters

    @property
    def masters(self) -> list[RedisServer]:
        """Those that are masters now, as the first server that answers sees it."""
        roles = [(server, server.cli("ROLE", check=False)) for server in self.servers]
        return [server for server, role in roles if role.startswith("master")]

    def replica_of(self, master: RedisServer) -> RedisServer:
        """A replica that follows a master."""
        port = master.cli("CONFIG", "GET", "port").splitlines()[1]
        for server in self.servers:
            role = server.cli("ROLE", check=False).splitlines()
            if role and role[0] == "slave" and role[2] == port:
                return server
        raise AssertionError("the master has a replica")

    def wait_whole(self, servers: Sequence[RedisServer]) -> None:
        """Wait until these servers all see a whole cluster."""
        for server in servers:
            wait_until(
                lambda server=server: "cluster_state:ok" in server.cli("CLUSTER", "INFO"),
                START_S,
                server.log,
            )


@contextmanager
def redis_server(
    *arguments: str,
    has_acl_user: bool = False,
    password: str | None = None,
    tls: TlsFiles | None = None,
    is_unix: bool = False,
) -> Iterator[RedisServer]:
    """A server of its own, gone at the end.

    Args:
        arguments: Further ones of `redis-server`, such as `"--maxmemory", "4mb"`.
        has_acl_user: Clients are the user `ACL_USER` with `ACL_RULES`, and its password.
        password: Of the default user.
        tls: Listen by TLS alone; see `make_tls_files`.
        is_unix: Listen on a unix socket alone.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pic-redis-")))
        words = list(arguments)
        secret = f"{ACL_USER}:{QUOTED_PASSWORD}@" if has_acl_user else ""
        if has_acl_user:
            rules = folder / "users.acl"
            rules.write_text(
                f"user default on nopass ~* &* +@all\n"
                f"user {ACL_USER} #{_sha256(PASSWORD)} {' '.join(ACL_RULES)}\n"
            )
            words += ["--aclfile", str(rules)]
        ping: list[str] = []
        if password is not None:
            words += ["--requirepass", password]
            ping += ["-a", password]
            secret = f":{QUOTED_PASSWORD}@" if password == PASSWORD else f":{password}@"
        if is_unix:
            path = folder / "redis.sock"
            words += ["--port", "0", "--unixsocket", str(path)]
            url = f"unix://{secret}{path}"
            ping += ["-s", str(path)]
        else:
            port = free_port()
            ping += ["-h", "127.0.0.1", "-p", str(port)]
            url = f"redis://{secret}127.0.0.1:{port}"
            words += ["--bind", "127.0.0.1", "--port", str(port)]
        if tls is not None:
            words[-2:] = ["--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no"]
            words += ["--tls-cert-file", str(tls.cert), "--tls-key-file", str(tls.key)]
            words += ["--tls-ca-cert-file", str(tls.ca)]
            ping += ["--tls", "--cacert", str(tls.ca)]
            url = f"rediss://{secret}127.0.0.1:{port}?ssl_ca_certs={tls.ca}"
        server = RedisServer(folder, words, url, ping)
        stack.callback(server.kill)
        yield server


@contextmanager
def redis_cluster(
    *arguments: str, num_masters: int = 3, num_replicas: int = 0, timeout_ms: int = 2000
) -> Iterator[RedisCluster]:
    """A cluster of its own, gone at the end.

    Args:
        arguments: Further ones of every `redis-server`.
        num_masters: At least 3.
        num_replicas: Of each master.
        timeout_ms: After this a silent server is taken for dead, and its replica follows it.
    """
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                redis_server(
                    *("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"),
                    *("--cluster-node-timeout", str(timeout_ms)),
                    *("--cluster-replica-validity-factor", "0"),
                    *arguments,
                )
            )
            for _ in range(num_masters * (1 + num_replicas))
        ]
        addresses = [server.url.removeprefix("redis://") for server in servers]
        servers[0].cli(
            *("--cluster", "create", *addresses, "--cluster-yes"),
            *("--cluster-replicas", str(num_replicas)),
        )
        cluster = RedisCluster(servers, f"redis+cluster://{','.join(addresses)}", num_masters)
        cluster.wait_whole(servers)
        yield cluster


@contextmanager
def open_link(url: str, **options: object) -> Iterator[RedisLink]:
    """A link that is available, closed at the end; `options` are those of `RedisConfig`.

    Its deadline on the request path is long, for this machine may be slow.
    """
    link = RedisLink(RedisConfig(url=url, **{"deadline_ms": 2000, **options}))  # type: ignore[arg-type]
    try:
        assert link.wait_available(START_S), link.stats().last_error
        yield link
    finally:
        link.close()


@cache
def shared_server(kind: Literal["tcp", "unix", "tls"]) -> RedisServer:
    """One server for all tests of a run; whoever uses it empties it first.

    `tls` has a user that may do what a shared index needs, and nothing else.
    """
    stack = ExitStack()
    atexit.register(stack.close)
    if kind == "tls":
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pic-tls-")))
        files = make_tls_files(folder)
        return stack.enter_context(redis_server(tls=files, has_acl_user=True))
    return stack.enter_context(redis_server(is_unix=kind == "unix"))


@cache
def shared_cluster() -> RedisCluster:
    """One cluster of three masters for all tests of a run; whoever uses it empties it first."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(redis_cluster())


@cache
def shared_link(url: str) -> RedisLink:
    """One link to a shared server for all tests of a run."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(open_link(url))


def make_tls_files(folder: Path) -> TlsFiles:
    """An authority, and a certificate by it for a server on this host."""
    files = TlsFiles(folder / "ca.crt", folder / "redis.crt", folder / "redis.key")
    extensions = folder / "extensions"
    extensions.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    _openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test-ca",
             "-keyout", folder / "ca.key", "-out", files.ca)  # fmt: skip
    _openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost",
             "-keyout", files.key, "-out", folder / "redis.csr")  # fmt: skip
    _openssl("x509", "-req", "-days", "2", "-in", folder / "redis.csr", "-CA", files.ca,
             "-CAkey", folder / "ca.key", "-CAcreateserial", "-extfile", extensions,
             "-out", files.cert)  # fmt: skip
    return files


def free_port() -> int:
    """A port that nobody listens on, nor on the port of a cluster's bus, 10,000 above it.

    Both are below those that outgoing connections get, so that a server can be started there again.
    """
    for port in Random().sample(PORTS, 100):
        with ExitStack() as stack:
            for number in (port, port + 10_000):
                sock = stack.enter_context(socket.socket())
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    sock.bind(("127.0.0.1", number))
                except OSError:
                    break
            else:
                return port
    raise AssertionError("some port is free")


def wait_until(
    is_done: Callable[[], object], timeout_s: float, describe: Callable[[], str] = str
) -> None:
    """Poll until something holds; fails with what `describe` says if it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() > deadline:
            pytest.fail(f"not so within {timeout_s} s: {describe()}")
        time.sleep(0.02)


def _binary(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.fail(f"{name} is not installed; these tests need Redis 6.2 or later", pytrace=False)
    return found


def _openssl(*words: object) -> None:
    done = subprocess.run(
        [_binary("openssl"), *map(str, words)], capture_output=True, text=True, timeout=START_S
    )
    assert done.returncode == 0, done.stderr


def _sha256(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()
