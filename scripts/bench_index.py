"""The index benchmark: what look-ups and changes cost with many entries, and without Redis.

Knows what is measured and what the project aims for. Does not know how an index is timed
(`bench_operations`), what is in it (`bench_entries`), how a server waits (`bench_outage`) or how
disks are read (`bench_disk`).

    one redis-server, filled     match by unix socket and by TCP, at a steady pace, while a thread
                                 publishes, touches and flushes; a bare round trip after each
                                 publish, reserve, invalidate; a tenth evicted while match goes on
    the same, killed             what a request waits beyond one that never had a shared tier
    nobody behind an address     what a start takes beyond one without
    memory, as many entries      the same operations
    a folder                     payloads read by the disk tier, beside dd

A look-up is of 64 segments, as 64 chunks of one or as 16 chunks of four, drawn at random from all.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang_ext.chunk_index.memory_index import MemoryIndex
from sglang_ext.chunk_index.near_index import NearIndex
from sglang_ext.chunk_index.redis_index import RedisIndex
from sglang_ext.chunk_index.redis_link import RedisConfig, RedisLink
from sglang_ext.errors import ExtError, ServerFailed
from sglang_ext.scripts.bench import describe_commit
from sglang_ext.scripts.bench_disk import DiskReport, measure_disk
from sglang_ext.scripts.bench_entries import LONG_CHUNK, Entries, Filler, now_ms
from sglang_ext.scripts.bench_operations import (
    EVICTED_SHARE,
    SHAPES,
    Operations,
    Row,
    Subject,
)
from sglang_ext.scripts.bench_outage import (
    READY_S,
    Outage,
    black_hole,
    measure_outage,
    site,
    time_start,
)
from sglang_ext.scripts.bench_timing import Background, Stopwatch
from sglang_ext.scripts.redis_process import RedisProcess, redis_cluster, redis_process

PROGRESS_S = 5.0
PATIENT_MS = 5_000.0
"""Deadline of a look-up, where a server has 5 ms: a late one is to be seen, not refused."""

BULK_MS = 30_000.0
CLUSTER_SHARE = 0.1
NUM_KNOWN = 20
"""Prompts that the near index knows."""

SEED = 17


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured.

    Attributes:
        num_entries: In the index.
        seconds: Of each paced measurement.
        num_calls: Of each operation that is not paced.
        num_files: Payloads on the disk.
        num_pairs: How often all of them are read.
        num_starts: Starts with an address that swallows everything.
        has_cluster: Measure a cluster of three too, with a tenth of the entries.
    """

    num_entries: int
    seconds: float
    num_calls: int = 2_000
    num_files: int = 64
    num_pairs: int = 7
    num_starts: int = 3
    has_cluster: bool = False


FULL = Scale(1_000_000, seconds=6.0)
QUICK = Scale(50_000, seconds=1.0, num_calls=200, num_files=4, num_pairs=5, num_starts=1)


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was measured.

    Attributes:
        rows: Operations.
        fill_rate_per_s: Entries per second of the bulk fill.
        bytes_per_entry: Of Redis's memory.
        near_cache_p50_us: Median look-up in the near index, of the slower kind of prompt.
        redis_down_added_ms: Median wait for a shared tier whose Redis is gone, breaker open,
            beyond that of a server without one.
        redis_down_p99_ms: What 99 % of those waits do not exceed.
        redis_down_first_ms: The slowest wait until the breaker opened.
        start_black_hole_added_ms: Median start with an address that swallows everything, beyond
            one without a shared tier.
        disk: The disk tier.
        redis_version: Of the server.
    """

    rows: tuple[Row, ...]
    fill_rate_per_s: float
    bytes_per_entry: float
    near_cache_p50_us: float
    redis_down_added_ms: float
    redis_down_p99_ms: float
    redis_down_first_ms: float
    start_black_hole_added_ms: float
    disk: DiskReport
    redis_version: str

    @property
    def evict_added_ms(self) -> float:
        """The slowest look-up while Redis's entries are evicted, beyond the slowest at rest."""
        rows = {row.op: row for row in self.rows if row.backend.startswith("redis")}
        return rows["match evicting"].slowest_ms - rows["match at rest"].slowest_ms


@dataclass(frozen=True, slots=True)
class Target:
    """A number that has an aim.

    Attributes:
        name: What it is.
        got: As measured, with its unit.
        aim: As wanted.
        is_met: Whether it is so.
    """

    name: str
    got: str
    aim: str
    is_met: bool


class IndexBench:
    """Runs the measurements, printing what it does."""

    def __init__(self, scale: Scale, folder: Path, out: Console) -> None:
        """Measure nothing yet.

        Args:
            scale: How much.
            folder: An empty folder on the disk to be measured.
            out: Takes lines of progress.
        """
        self._scale = scale
        self._folder = folder
        self._out = out
        self._entries = Entries(scale.num_entries, now_ms())
        self._rows: list[Row] = []

    def run(self) -> Report:
        """All of it.

        Raises:
            ExtError: A Redis does not start, or an index does not do what it is asked.
        """
        with redis_process() as redis:
            version = redis.info("redis_version")
            fill_rate, bytes_per_entry = self._fill(redis)
            near_us = self._measure_near(redis.unix_url)
            self._measure_redis(redis)
            outage = self._measure_down(redis)
        start_ms = self._measure_start()
        if self._scale.has_cluster:
            self._measure_cluster()
        self._measure_memory()
        return Report(
            rows=tuple(self._rows),
            fill_rate_per_s=fill_rate,
            bytes_per_entry=bytes_per_entry,
            near_cache_p50_us=near_us,
            redis_down_added_ms=outage.added_ms,
            redis_down_p99_ms=outage.added_p99_ms,
            redis_down_first_ms=outage.added_first_ms,
            start_black_hole_added_ms=start_ms,
            disk=self._read_disk(),
            redis_version=version,
        )

    def _fill(self, redis: RedisProcess) -> tuple[float, float]:
        """Entries per second, and bytes of each."""
        num_entries = self._entries.num_entries
        used = int(redis.info("used_memory"))
        with linked(redis.unix_url) as link:
            rate = self._fill_by(link, self._entries)
            num_bytes = int(redis.info("used_memory")) - used
        self._say(f"{rate:.0f} entries per second, {num_bytes / num_entries:.0f} bytes each")
        return rate, num_bytes / num_entries

    def _fill_by(self, link: RedisLink, entries: Entries) -> float:
        """Entries per second of a bulk fill."""
        filler = Filler(link, entries)
        started_s = time.perf_counter()
        with Background(filler.run) as background:
            while not background.wait(PROGRESS_S):
                self._say(f"filling Redis: {filler.num_done} of {entries.num_entries} entries")
        elapsed_s = time.perf_counter() - started_s
        index = RedisIndex(link)
        index.reconcile()
        if index.stats().num_nodes != entries.num_entries:
            raise ServerFailed(f"{index.stats().num_nodes} entries, not {entries.num_entries}")
        return entries.num_entries / elapsed_s

    def _measure_near(self, url: str) -> float:
        """Median microseconds of a look-up that asks nobody, of the slower kind of prompt."""
        self._say("near index")
        with linked(url) as link:
            remote = RedisIndex(link)
            with closing(NearIndex(remote, remote.changes)) as near:
                _poll(lambda: near.near_stats().num_losses > 0, "changes are not heard")
                return max(self._time_near(near, shape) for shape in SHAPES)

    def _time_near(self, near: NearIndex, shape: int) -> float:
        prompts = list(islice(self._entries.prompts(shape, SEED), NUM_KNOWN))
        for prompt in prompts:
            near.match(prompt, now_ms())
        num_asked = near.near_stats().num_remote_lookups
        watch = Stopwatch()
        for prompt in islice(cycle(prompts), self._scale.num_calls):
            watch.time(near.match, prompt, now_ms())
        if near.near_stats().num_remote_lookups != num_asked:
            raise ServerFailed("the near index asked for what it knew")
        return watch.timings().p50_ms * 1e3

    def _measure_redis(self, redis: RedisProcess) -> None:
        """Rows of the filled server."""
        with linked(redis.tcp_url) as link:
            place = ("127.0.0.1", redis.port)
            tcp = Subject("redis-tcp", RedisIndex(link), self._entries, place)
            self._add(*self._operations(tcp).match(self._scale.seconds))
        with linked(redis.unix_url) as link:
            unix = Subject("redis-unix", RedisIndex(link), self._entries, str(redis.socket_path))
            self._measure_all(unix)

    def _measure_all(self, subject: Subject) -> None:
        """Rows of every operation; the last one shrinks the index."""
        operations = self._operations(subject)
        self._add(*operations.match(self._scale.seconds))
        self._add(operations.publish(self._scale.num_calls))
        self._add(operations.reserve(self._scale.num_calls))
        self._add(operations.invalidate(max(self._scale.num_calls // 20, 1)))
        self._say(f"  evicting {EVICTED_SHARE:.0%} of the entries")
        self._add(*operations.evict())

    def _measure_cluster(self) -> None:
        """Rows of three masters."""
        entries = Entries(int(CLUSTER_SHARE * self._entries.num_entries), now_ms())
        with redis_cluster() as url, linked(url) as link:
            self._fill_by(link, entries)
            subject = Subject("redis-cluster", RedisIndex(link), entries)
            self._add(*self._operations(subject).match(self._scale.seconds))

    def _measure_memory(self) -> None:
        """Rows of the index in this process."""
        index = MemoryIndex()
        num_entries, told_s = self._entries.num_entries, time.monotonic()
        for number, record in enumerate(chain.from_iterable(self._entries.chunks())):
            index.publish(record, now_ms())
            if time.monotonic() - told_s >= PROGRESS_S:
                self._say(f"filling memory: {number} of {num_entries} entries")
                told_s = time.monotonic()
        self._measure_all(Subject("memory", index, self._entries))

    def _measure_down(self, redis: RedisProcess) -> Outage:
        """What a killed Redis adds to a look-up."""
        self._say("killing Redis")
        prompts = self._entries.prompts(LONG_CHUNK, SEED)
        with (
            site(self._folder / "down", redis.unix_url) as with_tier,
            site(self._folder / "none") as without,
        ):
            with_tier.wait_ready()
            redis.kill()
            return measure_outage(with_tier, without, prompts, self._scale.num_calls)

    def _measure_start(self) -> float:
        """What an address that swallows everything adds to a start, median milliseconds."""
        self._say("starting with an address that swallows everything")
        prompt = next(self._entries.prompts(LONG_CHUNK, SEED))
        added_ms: list[float] = []
        with black_hole() as url:
            for _ in range(self._scale.num_starts):
                without_ms = time_start(self._folder / "none", prompt)
                added_ms.append(time_start(self._folder / "hole", prompt, url) - without_ms)
        return statistics.median(added_ms)

    def _read_disk(self) -> DiskReport:
        self._say("reading the disk")
        num_files, num_pairs = self._scale.num_files, self._scale.num_pairs
        return measure_disk(self._folder / "disk", num_files, num_pairs, now_ms())

    def _operations(self, subject: Subject) -> Operations:
        self._say(f"{subject.backend}: {subject.entries.num_entries} entries")
        return Operations(subject)

    def _add(self, *rows: Row) -> None:
        self._rows += rows
        for row in rows:
            self._say(f"  {describe_row(row)}")

    def _say(self, line: str) -> None:
        self._out.print(line, markup=False, soft_wrap=True)


@contextmanager
def linked(url: str) -> Iterator[RedisLink]:
    """A link that is available, and patient.

    Raises:
        ServerFailed: It cannot be reached.
    """
    config = RedisConfig(url=url, deadline_ms=PATIENT_MS, background_deadline_ms=BULK_MS)
    with closing(RedisLink(config)) as link:
        if not link.wait_available(READY_S):
            raise ServerFailed(f"Redis is not available: {link.stats().last_error}")
        yield link


@contextmanager
def quiet() -> Iterator[None]:
    """Let the library log errors only, for what fails here fails on purpose."""
    library = logging.getLogger("sglang_ext")
    level = library.level
    library.setLevel(logging.ERROR)
    try:
        yield
    finally:
        library.setLevel(level)


def make_targets(report: Report) -> list[Target]:
    """Every number that has an aim."""
    targets: list[Target] = []
    for row in report.rows:
        if row.op == "match" and row.bare_rtt_ms is not None:
            targets += _match_targets(row, row.bare_rtt_ms)
    disk = report.disk
    return [
        *targets,
        _at_most("look-up in the near index, p50", report.near_cache_p50_us, 200, "us"),
        _at_most("Redis memory of an entry", report.bytes_per_entry, 400, "bytes"),
        _at_most("slowest match while evicting, beyond at rest", report.evict_added_ms, 5, "ms"),
        _at_most("Redis down, added to a request, p50", report.redis_down_added_ms, 1, "ms"),
        _at_most("address that swallows all, start", report.start_black_hole_added_ms, 2000, "ms"),
        Target("disk by dd, one file at a time", f"{disk.share:.2f}", ">= 0.8", disk.share >= 0.8),
    ]


def _match_targets(row: Row, bare_ms: float) -> list[Target]:
    name = f"match {row.prompt}, {row.backend}"
    most_ms = max(1.0, 3 * bare_ms)
    return [
        _at_most(f"{name}, p50", row.p50_ms, most_ms, "ms"),
        _at_most(f"{name}, p99", row.p99_ms, 3, "ms"),
    ]


def _at_most(name: str, got: float, most: float, unit: str) -> Target:
    return Target(name, f"{got:.3g} {unit}", f"<= {most:.4g} {unit}", got <= most)


def describe_row(row: Row) -> str:
    """A row as a line."""
    what = f"{row.op} {row.prompt}".strip()
    bare = "" if row.bare_rtt_ms is None else f", bare round trip {row.bare_rtt_ms:.3f} ms"
    return (
        f"{what}: p50 {row.p50_ms:.3f} ms, p99 {row.p99_ms:.2f} ms, "
        f"slowest {row.slowest_ms:.1f} ms, {row.rate_per_s:.0f}/s{bare}"
    )


def make_content(report: Report) -> dict[str, Any]:
    """What is written to the file, without where and when it was measured."""
    content = asdict(report)
    return {
        **content,
        "evict_added_ms": report.evict_added_ms,
        "disk_load_share": report.disk.share,
        "targets": [asdict(target) for target in make_targets(report)],
    }


def make_table(targets: Sequence[Target]) -> Table:
    """Aims and what was got."""
    table = Table(title="against the aims")
    table.add_column("number")
    table.add_column("measured", justify="right")
    table.add_column("aim", justify="right")
    table.add_column("met")
    for target in targets:
        table.add_row(target.name, target.got, target.aim, "yes" if target.is_met else "NO")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measure index, tiers and outages on this machine, in a few minutes; needs redis-server."""
    args = _parse(argv)
    path: Path = args.out
    out = Console(highlight=False)
    load_before = os.getloadavg()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with quiet(), tempfile.TemporaryDirectory(dir=path.parent, prefix="bench-index-") as folder:
            report = IndexBench(args.scale, Path(folder), out).run()
    except ExtError as exc:
        out.print(f"bench_index failed: {exc}", markup=False)
        return 1
    content = {
        "machine": describe_machine(),
        "commit": describe_commit(),
        "python": platform.python_version(),
        "loadavg": {"before": load_before, "after": os.getloadavg()},
        **make_content(report),
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    targets = make_targets(report)
    out.print(make_table(targets), f"written: {path}")
    is_met = all(target.is_met for target in targets)
    return 0 if is_met or args.no_check else 1


def describe_machine() -> str:
    """CPU model, cores and memory."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    return f"{names[0] if names else 'unknown CPU'}, {cores} cores, {num_bytes / 2**30:.0f} GiB"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_index", description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/bench-index.json"))
    parser.add_argument("--entries", type=int, help="in the index; a million, or 50,000")
    parser.add_argument("--seconds", type=float, help="of each paced measurement; 6, or 1")
    parser.add_argument("--cluster", action="store_true", help="a cluster of three as well")
    parser.add_argument("--no-check", action="store_true", help="0 even if an aim is missed")
    parser.add_argument("--quick", action="store_true", help="few entries: does everything work?")
    args = parser.parse_args(argv)
    scale = QUICK if args.quick else FULL
    args.scale = replace(
        scale,
        num_entries=args.entries or scale.num_entries,
        seconds=args.seconds or scale.seconds,
        has_cluster=args.cluster,
    )
    return args


def _poll(is_done: Callable[[], bool], complaint: str) -> None:
    deadline = time.monotonic() + READY_S
    while not is_done():
        if time.monotonic() > deadline:
            raise ServerFailed(complaint)
        time.sleep(0.005)


if __name__ == "__main__":
    sys.exit(main())
