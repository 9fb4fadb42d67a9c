"""Starts a real Redis as a subprocess, alone or as a small cluster, for as long as a block lasts.

Knows the command lines of `redis-server` and `redis-cli`. Does not know what is kept in it. A
server listens on a unix socket and on a loopback port, and keeps nothing on disk.
"""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sglang_ext.errors import ServerFailed

START_TIMEOUT_S = 20.0
CLI_TIMEOUT_S = 60.0
PORTS = range(20_000, 22_500)
"""Ports to choose from: below those of outgoing connections, as is the cluster bus 10,000 above."""

_BUS_OFFSET = 10_000
_POLL_S = 0.02


class RedisProcess:
    """One `redis-server`; see `redis_process`."""

    def __init__(self, folder: Path, arguments: Sequence[str] = ()) -> None:
        """Start it and wait until it answers.

        Args:
            folder: Of its socket and its log; there must be room for a short path.
            arguments: Of `redis-server`, beside those of every server.

        Raises:
            ServerFailed: It is not installed, or does not answer in time.
        """
        self.port = _free_port()
        self.socket_path = folder / "redis.sock"
        self._log_path = folder / "redis.log"
        command = [_program("redis-server"), "--bind", "127.0.0.1", "--port", str(self.port)]
        command += ["--unixsocket", str(self.socket_path), "--dir", str(folder)]
        command += ["--logfile", str(self._log_path), "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            self._wait_until_answers()
        except BaseException:
            self.kill()
            raise

    @property
    def unix_url(self) -> str:
        """Its URL by the unix socket."""
        return f"unix://{self.socket_path}"

    @property
    def tcp_url(self) -> str:
        """Its URL by the loopback port."""
        return f"redis://127.0.0.1:{self.port}"

    def ask(self, *words: str) -> str:
        """What `redis-cli` prints for a command.

        Raises:
            ServerFailed: It could not be asked.
        """
        command = [_program("redis-cli"), "-s", str(self.socket_path), *words]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=CLI_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as exc:
            raise ServerFailed(f"redis-cli {words[0]}: no answer") from exc
        if done.returncode != 0:
            raise ServerFailed(f"redis-cli {words[0]}: {done.stdout}{done.stderr}".strip())
        return done.stdout.strip()

    def info(self, name: str) -> str:
        """One line of `INFO`.

        Raises:
            ServerFailed: It could not be asked, or does not say that.
        """
        for line in self.ask("INFO").splitlines():
            key, _, value = line.partition(":")
            if key == name:
                return value.strip()
        raise ServerFailed(f"redis-server says nothing of {name}")

    def kill(self) -> None:
        """End it at once; more than once is no error."""
        self._process.kill()
        self._process.wait()

    def _wait_until_answers(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerFailed(f"redis-server ended: {_last_line(self._log_path)}")
            if self.socket_path.exists():
                try:
                    if self.ask("PING") == "PONG":
                        return
                except ServerFailed:
                    pass
            time.sleep(_POLL_S)
        raise ServerFailed(f"redis-server is not ready: {_last_line(self._log_path)}")


@contextmanager
def redis_process(*arguments: str) -> Iterator[RedisProcess]:
    """A server of its own, empty at first, killed at the end.

    Raises:
        ServerFailed: It is not installed, or does not answer in time.
    """
    with tempfile.TemporaryDirectory(prefix="pic-redis-") as folder:
        process = RedisProcess(Path(folder), arguments)
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def redis_cluster(num_masters: int = 3) -> Iterator[str]:
    """A cluster of its own; yields its URL.

    Raises:
        ServerFailed: One of its servers does not start, or they do not find each other in time.
    """
    arguments = ("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf")
    with ExitStack() as stack:
        masters = [stack.enter_context(redis_process(*arguments)) for _ in range(num_masters)]
        places = [f"127.0.0.1:{master.port}" for master in masters]
        masters[0].ask("--cluster", "create", *places, "--cluster-yes")
        deadline = time.monotonic() + START_TIMEOUT_S
        while not all("cluster_state:ok" in master.ask("CLUSTER", "INFO") for master in masters):
            if time.monotonic() > deadline:
                raise ServerFailed("the servers of the cluster do not find each other")
            time.sleep(_POLL_S)
        yield f"redis+cluster://{','.join(places)}"


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise ServerFailed(f"{name} is not installed; Redis 6.2 or newer is needed")
    return found


def _free_port() -> int:
    """A port that is free, as is its cluster bus."""
    for port in random.Random().sample(PORTS, 100):
        if not any(map(_is_taken, (port, port + _BUS_OFFSET))):
            return port
    raise ServerFailed("no free port")


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return lines[-1] if lines else "it wrote no log"
