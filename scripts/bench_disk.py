"""How fast the disk tier reads, beside `dd` on the same files; both with a cold page cache.

Knows files, the page cache and what `dd` prints. Does not know indexes.

Before each read the file's pages are dropped (`posix_fadvise(DONTNEED)`; the files were synced when
they were written), and what the kernel then says it read from the device is compared with their
size. `dd` says itself how long it read, so the start of its process does not count against it.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from sglang_ext.chunk_index.file_store import FileStore
from sglang_ext.chunk_index.index import NodeRecord
from sglang_ext.chunk_index.payloads import payload_checksum
from sglang_ext.errors import PayloadLost, ServerFailed
from sglang_ext.scripts.bench_entries import SEGMENT_BYTES, Entries

NUM_THREADS = 4
"""Loads at once that a server makes."""

_DD_SECONDS = re.compile(r"copied, ([0-9.e+-]+) s")
_FORM = b"bench"
MIB = 1 << 20


@dataclass(slots=True)
class RawPayload:
    """Plain bytes."""

    data: bytearray

    @property
    def nbytes(self) -> int:
        """Its size."""
        return len(self.data)

    def buffer(self) -> memoryview:
        """Its bytes, in place."""
        return memoryview(self.data)


class RawCodec:
    """Makes `RawPayload`s."""

    def describe(self, payload: RawPayload) -> bytes:
        """The same for all."""
        return _FORM

    def allocate(self, form: bytes, num_tokens: int, num_bytes: int) -> RawPayload:
        """Bytes to be filled; `PayloadLost` of another form."""
        if form != _FORM:
            raise PayloadLost("foreign", "another form")
        return RawPayload(bytearray(num_bytes))


@dataclass(frozen=True, slots=True)
class DiskReport:
    """What was read from the disk, and how fast.

    Attributes:
        share: Median over the pairs of the store's rate by that of `dd`, one file at a time.
        threads_share: The same with `NUM_THREADS` loads at once, as a server loads.
        mib_per_s: The store's, median.
        dd_mib_per_s: Of `dd`, median.
        cold_share: Bytes that came from the device by bytes read.
        num_pairs: How many pairs.
        num_files: Files of each read.
    """

    share: float
    threads_share: float
    mib_per_s: float
    dd_mib_per_s: float
    cold_share: float
    num_pairs: int
    num_files: int


def measure_disk(folder: Path, num_files: int, num_pairs: int, created_ms: int) -> DiskReport:
    """Write payloads of one full segment each, and read them in turn by the store and by `dd`.

    Args:
        folder: An empty folder on the disk in question.
        num_files: How many.
        num_pairs: How often.
        created_ms: Of the records.

    Raises:
        ServerFailed: There is no `dd`, or it fails.
        TierUnavailable: The folder cannot be written.
    """
    store = FileStore(folder, RawCodec())
    records = _write(store, num_files, created_ms)
    paths = sorted(folder.rglob("*.kv"))
    num_bytes = sum(path.stat().st_size for path in paths)
    samples: list[tuple[float, float, float]] = []
    before = _device_bytes()
    for number in range(num_pairs):
        ways = [
            lambda: _read_by_dd(paths),
            lambda: _read_by_store(store, records, paths, 1),
            lambda: _read_by_store(store, records, paths, NUM_THREADS),
        ]
        order = sorted(range(3), key=lambda way: (way + number) % 3)
        seconds = {way: ways[way]() for way in order}
        samples.append((seconds[0], seconds[1], seconds[2]))
    cold_share = (_device_bytes() - before) / (3 * num_pairs * num_bytes)
    return DiskReport(
        share=statistics.median(dd_s / single_s for dd_s, single_s, _ in samples),
        threads_share=statistics.median(dd_s / parallel_s for dd_s, _, parallel_s in samples),
        mib_per_s=statistics.median(num_bytes / single_s / MIB for _, single_s, _ in samples),
        dd_mib_per_s=statistics.median(num_bytes / dd_s / MIB for dd_s, _, _ in samples),
        cold_share=cold_share,
        num_pairs=num_pairs,
        num_files=num_files,
    )


def parse_dd(text: str) -> float:
    """The seconds that `dd` says it took.

    Raises:
        ServerFailed: It says nothing of that.
    """
    found = _DD_SECONDS.search(text)
    if found is None:
        raise ServerFailed(f"dd: {text.strip()}")
    return float(found[1])


def _write(store: FileStore[RawPayload], num_files: int, created_ms: int) -> list[NodeRecord]:
    random = Random(0)
    entries = Entries(num_files, created_ms, name="disk")
    records: list[NodeRecord] = []
    for number in range(num_files):
        payload = RawPayload(bytearray(random.randbytes(SEGMENT_BYTES)))
        (record,) = entries.records(1, number)
        records.append(replace(record, checksum=payload_checksum(payload)))
        store.put(records[-1], payload)
    return records


def _read_by_store(
    store: FileStore[RawPayload],
    records: Sequence[NodeRecord],
    paths: Sequence[Path],
    num_threads: int,
) -> float:
    """Seconds to read all, some at a time."""
    _drop_pages(paths)
    with ThreadPoolExecutor(num_threads) as pool:
        started_s = time.perf_counter()
        for _ in pool.map(store.get, records):
            pass
        return time.perf_counter() - started_s


def _read_by_dd(paths: Sequence[Path]) -> float:
    """Seconds to read all, one after the other, as `dd` counts."""
    _drop_pages(paths)
    seconds = 0.0
    for path in paths:
        command = ["dd", f"if={path}", "of=/dev/null", "bs=4M"]
        environment = {**os.environ, "LC_ALL": "C"}
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
        except OSError as exc:
            raise ServerFailed(f"dd: {exc}") from exc
        seconds += parse_dd(done.stderr)
    return seconds


def _drop_pages(paths: Sequence[Path]) -> None:
    """Make the kernel forget what it has of files that are synced."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _device_bytes() -> int:
    """Bytes that this process has had the kernel read from devices."""
    for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
        if line.startswith("read_bytes:"):
            return int(line.partition(":")[2])
    return 0
