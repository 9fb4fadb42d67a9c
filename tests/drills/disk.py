"""A small file system that a drill can fill."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

FILLER = "filler"


@dataclass(frozen=True)
class SmallDisk:
    """A folder, on a file system of its own if that could be mounted.

    Attributes:
        path: The folder.
        problem: Why it is part of a larger file system; None if it is not.
    """

    path: Path
    problem: str | None


@contextmanager
def small_disk(num_bytes: int) -> Iterator[SmallDisk]:
    """A file system in memory for a while, if this user may mount one; else an ordinary folder."""
    with tempfile.TemporaryDirectory(prefix="pic-disk-") as path:
        words = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", path]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode != 0:
            yield SmallDisk(Path(path), f"mounting is not permitted here: {done.stderr.strip()}")
            return
        try:
            yield SmallDisk(Path(path), None)
        finally:
            subprocess.run(["umount", "--lazy", path], check=True)


@contextmanager
def full(path: Path) -> Iterator[None]:
    """Leave a file system no room for a while."""
    filler = path / FILLER
    status = os.statvfs(path)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize)
    try:
        yield
    finally:
        filler.unlink()
