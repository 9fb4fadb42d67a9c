"""How a near index should learn what others change in Redis: three ways, measured side by side.

    publish    a script that changes a node publishes its key on one channel
    tracking   Redis tells of every write below a prefix (CLIENT TRACKING in broadcast mode)
    stream     the script appends the key to a capped stream, which listeners read on

Knows raw Redis commands and starts its own servers. Does not know the index: a change is a script
that writes a node, its queue entry and a total, as a publication does, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Condition, Thread
from typing import Any

from redis import Connection, Redis, RedisError
from redis.exceptions import MovedError
from rich.console import Console
from rich.table import Table

from sglang_ext.errors import ExtError, ServerFailed

NUM_LISTENERS = 4
NUM_ROUNDS = 30
BLOCK_LEN = 200
NUM_LATENCIES = 30  # in a round
NUM_TOUCHED = 1000
TOUCH_BATCH = 50
NUM_MISSED = 100
MANY_MISSED = 30_000
DEADLINE_S = 5.0
QUIET_S = 0.5  # how long a listener that hears nothing is given
SEED = 5
NUM_SHARDS = 64
KEY_BYTES = 17
RECORD_BYTES = 200
CHANNEL = b"bench:changes"
STREAM = b"bench:stream"
STREAM_LEN = 10_000
INVALIDATIONS = b"__redis__:invalidate"
NODE_PREFIXES = tuple(b"bench:{%02x}:n:" % shard for shard in range(NUM_SHARDS))

CHANGE = """
redis.call('SET', KEYS[1], ARGV[1])
redis.call('ZADD', KEYS[2], ARGV[2], KEYS[1])
redis.call('HINCRBY', KEYS[3], 'nodes', 1)
"""
PUBLISH = "redis.call('PUBLISH', 'bench:changes', ARGV[3])"
APPEND = f"redis.call('XADD', 'bench:stream', 'MAXLEN', '~', {STREAM_LEN}, '*', 'k', ARGV[3])"
TOUCH = "for _, key in ipairs(KEYS) do redis.call('SETRANGE', key, 0, ARGV[1]) end"


class Listener:
    """One server's ear: a connection, and a thread that notes when it hears of which key."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.arrivals_ns: dict[bytes, int] = {}
        self.num_messages = 0
        self.num_keys = 0
        self.is_broken = False
        self._heard = Condition()
        self._admin = _client(port)
        self.open()

    def open(self) -> None:
        """Listen from now on, or on after `is_broken`."""
        self.is_broken = False
        self._connection, self.client_id = self._connect()
        self._begin()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """End the connection from the server's side; returns when the thread has noticed."""
        self._admin.execute_command("CLIENT", "KILL", "ID", self.client_id)
        self._thread.join(DEADLINE_S)

    def close(self) -> None:
        """Listen no more."""
        self.kill()
        self._connection.disconnect()
        self._admin.close()

    def wait_for(self, key: bytes, timeout_s: float = DEADLINE_S) -> bool:
        """Whether it hears of the key in time."""
        with self._heard:
            return self._heard.wait_for(lambda: key in self.arrivals_ns, timeout_s)

    def _connect(self) -> tuple[Any, int]:
        connect: Any = Connection  # has no types
        connection = connect(port=self.port, protocol=2)
        connection.connect()
        return connection, int(_ask(connection, "CLIENT", "ID"))

    def _run(self) -> None:
        try:
            while True:
                keys = self._read()
                now_ns = time.perf_counter_ns()
                with self._heard:
                    self.num_messages += 1
                    self.num_keys += len(keys)
                    self.arrivals_ns.update((key[-KEY_BYTES:], now_ns) for key in keys)
                    self._heard.notify_all()
        except (RedisError, OSError):
            self.is_broken = True

    def _begin(self) -> None:
        """Say to the server what to tell."""
        raise NotImplementedError

    def _read(self) -> list[bytes]:
        """Keys of the next message."""
        raise NotImplementedError


class PublishListener(Listener):
    """Subscribes to the channel."""

    def _begin(self) -> None:
        _ask(self._connection, "SUBSCRIBE", CHANNEL)

    def _read(self) -> list[bytes]:
        return [self._connection.read_response()[2]]


class TrackingListener(Listener):
    """Has a second connection whose invalidations are redirected to the first."""

    prefixes: Sequence[bytes] = NODE_PREFIXES

    def _begin(self) -> None:
        _ask(self._connection, "SUBSCRIBE", INVALIDATIONS)
        self._tracker, self.tracker_id = self._connect()
        prefixes = [part for prefix in self.prefixes for part in (b"PREFIX", prefix)]
        track = ("CLIENT", "TRACKING", "ON", "REDIRECT", self.client_id, "BCAST", *prefixes)
        _ask(self._tracker, *track)

    def close(self) -> None:
        """Listen no more."""
        self._tracker.disconnect()
        super().close()

    def _read(self) -> list[bytes]:
        return list(self._connection.read_response()[2] or ())


class AllTrackingListener(TrackingListener):
    """Tracks one short prefix, below which bookkeeping lies too."""

    prefixes = (b"bench:{",)


class StreamListener(Listener):
    """Reads on in the stream, from where it was."""

    _last_id = b""

    def _begin(self) -> None:
        if not self._last_id:
            newest = self._admin.execute_command("XREVRANGE", STREAM, "+", "-", "COUNT", 1)
            self._last_id = newest[0][0] if newest else b"0-0"

    def _read(self) -> list[bytes]:
        read = ("XREAD", "COUNT", 1000, "BLOCK", 0, "STREAMS", STREAM, self._last_id)
        ((_, entries),) = _ask(self._connection, *read)
        self._last_id = entries[-1][0]
        return [fields[1] for _, fields in entries]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to learn of changes.

    Attributes:
        name: As shown.
        lua: What a changing script does beside the change.
        listen: Opens a listener at a port; None if nobody listens.
    """

    name: str
    lua: str
    listen: Callable[[int], Listener] | None


SILENCE = Way("none", "", None)
TRACKING = Way("tracking", "", TrackingListener)
STREAMED = Way("stream", APPEND, StreamListener)
WAYS = (
    Way("publish", PUBLISH, PublishListener),
    TRACKING,
    Way("tracking, 1 prefix", "", AllTrackingListener),
    STREAMED,
)


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured of one way.

    Attributes:
        way: Its name.
        server_us: Server CPU added to a change, with `NUM_LISTENERS` listeners.
        client_us: Median round trip added to a change, likewise.
        latency_p50_us: From before a change is sent to when one listener knows, median.
        latency_p99_us: The same, 99th percentile.
        touch_messages: Messages caused by hit statistics of `NUM_TOUCHED` nodes.
        touch_keys: Keys named in them.
        heard_after_break: Of `NUM_MISSED` changes made while the connection was broken.
        is_break_noticed: Whether the listener knows that it missed something.
        cluster_nodes: Masters, of three, whose changes reach one connection to one of them.
    """

    way: str
    server_us: float
    client_us: float
    latency_p50_us: float
    latency_p99_us: float
    touch_messages: int
    touch_keys: int
    heard_after_break: int
    is_break_noticed: bool
    cluster_nodes: int


class Writer:
    """Makes changes, each of a new key."""

    def __init__(self, port: int, seed: int) -> None:
        self.client = _client(port)
        self._rng = random.Random(seed)
        self._record = self._rng.randbytes(RECORD_BYTES)
        ways = (SILENCE, *WAYS)
        self._shas = {way: self.client.script_load(CHANGE + way.lua) for way in ways}

    def change(self, way: Way) -> bytes:
        """Write one node; returns its key."""
        command, key = self._command(way)
        self.client.execute_command(*command)
        return key

    def change_many(self, way: Way, count: int) -> None:
        """Write nodes in pipelines."""
        for _ in range(0, count, 1000):
            with self.client.pipeline(transaction=False) as pipeline:
                for _ in range(1000):
                    pipeline.execute_command(*self._command(way)[0])
                pipeline.execute()

    def touch(self, keys: Sequence[bytes]) -> None:
        """Write hit statistics of nodes."""
        sha = self.client.script_load(TOUCH)
        for start in range(0, len(keys), TOUCH_BATCH):
            batch = [_node(key) for key in keys[start : start + TOUCH_BATCH]]
            self.client.execute_command("EVALSHA", sha, len(batch), *batch, b"12345678")

    def cpu_us(self) -> float:
        """CPU the server has used."""
        info: Mapping[str, float] = self.client.execute_command("INFO", "cpu")
        return (info["used_cpu_user"] + info["used_cpu_sys"]) * 1e6

    def _command(self, way: Way) -> tuple[tuple[Any, ...], bytes]:
        key = self._rng.randbytes(KEY_BYTES)
        shard = key[0] % NUM_SHARDS
        keys = (_node(key), b"bench:{%02x}:q" % shard, b"bench:{%02x}:t" % shard)
        message = b"sender__n" + key
        args = (self._record, time.time_ns() // 1000, message)
        return ("EVALSHA", self._shas[way], len(keys), *keys, *args), key


def measure_costs(port: int) -> dict[Way, tuple[float, float]]:
    """Server CPU and median round trip of a change, microseconds; blocks of all ways in turn."""
    writer = Writer(port, SEED)
    order = [SILENCE, *WAYS]
    cpu: dict[Way, list[float]] = {way: [] for way in order}
    trips: dict[Way, list[float]] = {way: [] for way in order}
    for _ in range(NUM_ROUNDS):
        random.Random(len(cpu[SILENCE])).shuffle(order)
        for way in order:
            with listeners(way, port, NUM_LISTENERS):
                before = writer.cpu_us()
                trips[way] += [_timed_change_us(writer, way) for _ in range(BLOCK_LEN)]
                cpu[way].append((writer.cpu_us() - before) / BLOCK_LEN)
        writer.client.flushdb()
    return {way: (statistics.median(cpu[way]), statistics.median(trips[way])) for way in order}


def measure_latencies(port: int) -> dict[Way, list[float]]:
    """Microseconds until the only listener knows of a change, sorted; ways in turn."""
    writer = Writer(port, SEED)
    latencies: dict[Way, list[float]] = {way: [] for way in WAYS}
    for _ in range(NUM_ROUNDS):
        for way in WAYS:
            with listeners(way, port, 1) as (ear,):
                latencies[way] += [_latency_us(writer, way, ear) for _ in range(NUM_LATENCIES)]
    return {way: sorted(values) for way, values in latencies.items()}


def measure_touches(way: Way, port: int) -> tuple[int, int]:
    """Messages, and keys in them, that a listener gets when hit statistics are written."""
    writer = Writer(port, SEED)
    keys = [writer.change(SILENCE) for _ in range(NUM_TOUCHED)]
    with listeners(way, port, 1) as (ear,):
        _expect(ear.wait_for(writer.change(way)), f"{way.name}: a change was not heard")
        before = ear.num_messages, ear.num_keys
        writer.touch(keys)
        _expect(ear.wait_for(writer.change(way)), f"{way.name}: a change was not heard")
        extra = 1 if way.listen is not AllTrackingListener else 3  # of the change itself
        return ear.num_messages - before[0] - 1, ear.num_keys - before[1] - extra


def measure_break(way: Way, port: int) -> tuple[int, bool]:
    """Changes made during a break that are heard of afterwards, and whether it is noticed."""
    writer = Writer(port, SEED)
    with listeners(way, port, 1) as (ear,):
        ear.kill()
        is_noticed = ear.is_broken
        missed = [writer.change(way) for _ in range(NUM_MISSED)]
        ear.open()
        _expect(ear.wait_for(writer.change(way)), f"{way.name}: not heard after a break")
        return len(ear.arrivals_ns.keys() & set(missed)), is_noticed


def measure_lost_tracker(port: int) -> bool:
    """Whether a listener notices that the connection which tracks for it is gone."""
    writer = Writer(port, SEED)
    with listeners(TRACKING, port, 1) as (ear,):
        assert isinstance(ear, TrackingListener)
        writer.client.execute_command("CLIENT", "KILL", "ID", ear.tracker_id)
        num_messages = ear.num_messages
        ear.wait_for(writer.change(TRACKING), QUIET_S)
        return ear.is_broken or ear.num_messages > num_messages


def measure_long_break(port: int) -> tuple[int, bool]:
    """Of more changes than a stream keeps, those heard of after a break, and if it says so."""
    writer = Writer(port, SEED)
    with listeners(STREAMED, port, 1) as (ear,):
        writer.change(STREAMED)
        ear.kill()
        before = ear.num_keys
        writer.change_many(STREAMED, MANY_MISSED)
        ear.open()
        _expect(ear.wait_for(writer.change(STREAMED)), "stream: not heard after a break")
        return ear.num_keys - before - 1, ear.is_broken


def count_cluster_nodes(way: Way, ports: Sequence[int]) -> int:
    """Masters on which a script can announce a change so that a listener at the first hears it."""
    num_heard = 0
    with listeners(way, ports[0], 1) as (ear,):
        for port in ports:
            writer = Writer(port, SEED + port)
            try:
                key = _change_local(writer, way)
            except RedisError:
                continue  # the stream is another master's
            num_heard += ear.wait_for(key, QUIET_S)
    return num_heard


@contextmanager
def listeners(way: Way, port: int, count: int) -> Iterator[list[Listener]]:
    """Listeners of one way, closed at the end; none if nobody listens."""
    ears: list[Listener] = []
    try:
        for _ in range(count):
            if way.listen is not None:
                ears.append(way.listen(port))
        yield ears
    finally:
        for ear in ears:
            ear.close()


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[int]:
    """A Redis server of our own on a free port, without persistence.

    Raises:
        ServerFailed: It did not start.
    """
    port = _free_port()
    settings = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder))
    log = folder / f"{port}.log"
    try:
        process = subprocess.Popen(["redis-server", *settings, "--logfile", str(log), *options])
    except FileNotFoundError as exc:
        raise ServerFailed("redis-server is not installed") from exc
    try:
        try:
            _poll(lambda: bool(_client(port).ping()), "no answer")
        except ServerFailed as exc:
            raise ServerFailed(f"redis-server did not start: {_last_line(log)}") from exc
        yield port
    finally:
        process.terminate()
        process.wait()


@contextmanager
def redis_cluster(folder: Path, num_masters: int = 3) -> Iterator[list[int]]:
    """Masters that share all slots.

    Raises:
        ServerFailed: They did not find together.
    """
    with ExitStack() as stack:
        ports = []
        for i in range(num_masters):
            options = ("--cluster-enabled", "yes", "--cluster-config-file", f"nodes-{i}.conf")
            ports.append(stack.enter_context(redis_server(folder, *options)))
        addresses = [f"127.0.0.1:{port}" for port in ports]
        create = ["redis-cli", "--cluster", "create", *addresses, "--cluster-yes"]
        done = subprocess.run(create, capture_output=True, text=True, timeout=30)
        _expect(done.returncode == 0, f"redis-cli --cluster create: {done.stdout}{done.stderr}")
        _poll(lambda: all(map(_is_joined, ports)), "the cluster did not find together")
        yield ports


def measure(folder: Path) -> tuple[list[Row], dict[str, Any]]:
    """Everything, on servers of our own; returns a row for each way, and what concerns one only.

    Raises:
        ServerFailed: A server did not start, or a listener did not hear what it must.
    """
    with redis_server(folder) as port:
        costs = measure_costs(port)
        latencies = measure_latencies(port)
        touches = {way: measure_touches(way, port) for way in WAYS}
        breaks = {way: measure_break(way, port) for way in WAYS}
        is_tracker_missed = measure_lost_tracker(port)
        heard, is_gap_noticed = measure_long_break(port)
        version = _client(port).execute_command("INFO", "server")["redis_version"]
    with redis_cluster(folder) as ports:
        nodes = {way: count_cluster_nodes(way, ports) for way in WAYS}
    rows = []
    for way in WAYS:
        server_us, client_us = (
            round(with_ears - without, 1)
            for with_ears, without in zip(costs[way], costs[SILENCE], strict=True)
        )
        p50, p99 = (_quantile(latencies[way], share) for share in (0.5, 0.99))
        rows.append(
            Row(way.name, server_us, client_us, p50, p99, *touches[way], *breaks[way], nodes[way])
        )
    notes = {
        "redis_version": version,
        "silent_server_us": round(costs[SILENCE][0], 1),
        "silent_client_us": round(costs[SILENCE][1], 1),
        "lost_tracker_noticed": is_tracker_missed,
        "long_break_changes": MANY_MISSED,
        "long_break_heard": heard,
        "long_break_noticed": is_gap_noticed,
    }
    return rows, notes


def show(rows: Sequence[Row], notes: Mapping[str, Any]) -> None:
    """Print one table, and the notes below it."""
    table = Table(title=f"Learning of changes, {NUM_LISTENERS} listeners")
    for column in asdict(rows[0]):
        table.add_column(column.replace("_", " "))
    for row in rows:
        table.add_row(*map(str, asdict(row).values()))
    console = Console(width=160)
    console.print(table)
    console.print(" ".join(f"{name}={value}" for name, value in notes.items()), soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare the ways to learn of changes; one table, and a JSON file."""
    parser = argparse.ArgumentParser(prog="bench_changes", description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/bench-changes.json"))
    args = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as folder:
            rows, notes = measure(Path(folder))
    except ExtError as exc:
        print(f"bench_changes failed: {exc}")
        return 1
    args.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"rows": [asdict(row) for row in rows], **notes}
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show(rows, notes)
    return 0


def _ask(connection: Any, *command: Any) -> Any:
    connection.send_command(*command)
    return connection.read_response()


def _client(port: int) -> Any:
    """A client whose methods have no types."""
    return Redis(port=port, protocol=2)


def _node(key: bytes) -> bytes:
    return NODE_PREFIXES[key[0] % NUM_SHARDS] + key


def _change_local(writer: Writer, way: Way) -> bytes:
    """Make a change of a key that the writer's own master serves."""
    for _ in range(1000):
        try:
            return writer.change(way)
        except MovedError:
            continue
    raise ServerFailed("a master serves no key")


def _timed_change_us(writer: Writer, way: Way) -> float:
    started_ns = time.perf_counter_ns()
    writer.change(way)
    return (time.perf_counter_ns() - started_ns) / 1e3


def _latency_us(writer: Writer, way: Way, ear: Listener) -> float:
    started_ns = time.perf_counter_ns()
    key = writer.change(way)
    _expect(ear.wait_for(key), f"{way.name}: a change was not heard")
    return (ear.arrivals_ns[key] - started_ns) / 1e3


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    """A port that is free, as is the one 10,000 above, which a cluster's bus takes.

    Both are below those that systems give to outgoing connections.
    """
    for port in random.Random().sample(range(20_000, 22_500), 100):
        if not any(map(_is_taken, (port, port + 10_000))):
            return port
    raise ServerFailed("no free port")


def _quantile(values: Sequence[float], share: float) -> float:
    return round(values[min(int(share * len(values)), len(values) - 1)])


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return lines[-1] if lines else "it wrote no log"


def _is_joined(port: int) -> bool:
    return "cluster_state:ok" in str(_client(port).execute_command("CLUSTER", "INFO"))


def _poll(is_done: Callable[[], bool], complaint: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        try:
            if is_done():
                return
        except RedisError:
            pass
        time.sleep(0.02)
    raise ServerFailed(complaint)


def _expect(is_true: bool, complaint: str) -> None:
    if not is_true:
        raise ServerFailed(complaint)


if __name__ == "__main__":
    sys.exit(main())
