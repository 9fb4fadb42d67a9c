"""`FileStore`: payloads as files in a folder, on a local disk or shared by several hosts.

    <root>/v1/<2 hex digits of the key>/<key>-<checksum>.kv
    <root>/v1/<2 hex digits of the key>/.tmp-<host>-<process>-<random>

Knows files and what their errors mean. Does not know which records are indexed. Never assumes to be
alone: a file appears whole, by a rename, and may be gone at any moment. Files of other names, and
what other versions of this format wrote, are left alone.

A file's bytes are on the disk before it appears. Its folder is not synced: after a power failure a
file may be missing, and that is a miss like any other.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import socket
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Generic

from sglang_ext.chunk_index.blob import ALIGNMENT, BlobFormat, Head
from sglang_ext.chunk_index.index import NodeRecord
from sglang_ext.chunk_index.payloads import OnBytes, PayloadCodec, PayloadT
from sglang_ext.errors import PayloadLost, TierUnavailable

logger = logging.getLogger(__name__)

READ_BYTES = 4 << 20

_LAYOUT = "v1"
_FOLDER = re.compile(r"[0-9a-f]{2}")
_PAYLOAD = re.compile(r"[0-9a-f]{34}-[0-9a-f]{16}\.kv")
_TEMPORARY = re.compile(r"\.tmp-.+-[0-9]+-[0-9a-f]{16}")
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe must not block
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class _FileSource:
    """An open file as a blob."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise PayloadLost("foreign", "it is not a file")
        self.num_bytes = status.st_size

    def read(self, start: int, into: memoryview) -> None:
        """Fill `into` from an offset on."""
        while into:
            num_bytes = os.preadv(self._fd, [into], start)
            if num_bytes == 0:
                raise PayloadLost("truncated", f"it ends at {start} bytes")
            into, start = into[num_bytes:], start + num_bytes


class FileStore(Generic[PayloadT]):
    """A `PayloadStore` in a folder; see there for what each method does.

    `probe`, which should come first, or the first `put` makes the folder. One that was removed
    later is made again; one whose file system is no longer mounted is unavailable, not empty, and
    nothing is written in its place.
    """

    def __init__(
        self,
        root: Path,
        codec: PayloadCodec[PayloadT],
        mac_key: bytes | None = None,
        *,
        mode: int = 0o600,
    ) -> None:
        """Touches no file.

        Args:
            root: The folder; other files in it are left alone.
            codec: How payloads are described and made.
            mac_key: From `identity.mac_key`; servers with the same one trust each other's files.
            mode: Permissions of files; those who may read them may search the folders as well.
        """
        self._root = root
        self._folder = root / _LAYOUT
        self._codec = codec
        self._format = BlobFormat(mac_key)
        self._mode = mode
        self._device: int | None = None  # of the file system the folder was made on
        host = re.sub(r"[^\w.-]", "_", socket.gethostname())
        self._temporary = f".tmp-{host}-{os.getpid()}-"

    def put(self, record: NodeRecord, payload: PayloadT) -> None:
        """Keep a payload; one of the same name is replaced, so damage heals."""
        body = payload.buffer()
        head = self._format.write_head(record, self._codec.describe(payload), body)
        with self._translated():
            self._write(self._path(record), (head, body))

    def get(self, record: NodeRecord, on_bytes: OnBytes | None = None) -> PayloadT:
        """The payload of a record, every byte checked."""
        with self._translated(), self._opened(self._path(record)) as source:
            return self._format.load(source, record, self._codec, READ_BYTES, on_bytes)

    def drop(self, record: NodeRecord) -> None:
        """Forget a payload, if it is there."""
        with suppress(OSError):
            self._path(record).unlink()

    def records(self) -> Iterator[NodeRecord]:
        """What is kept; reads every file's head. Ends early if the folder cannot be read."""
        for entry in self._entries():
            head = self._head_of(entry)
            if head is not None:
                yield head.record

    def used_bytes(self) -> int:
        """Bytes of all files of ours, heads and unfinished ones included; looks at each."""
        return sum(status.st_size for entry in self._entries() if (status := _status(entry)))

    def probe(self) -> None:
        """Make the folder, then write, read back and remove a small file in it.

        Raises:
            TierUnavailable: It cannot be used; the message says why, in one line.
        """
        with self._translated():
            self._make_root()
            path = self._folder / self._temporary_name()
            data = secrets.token_bytes(ALIGNMENT)
            try:
                self._write_file(path, [data])
                if path.read_bytes() != data:
                    raise TierUnavailable(f"{self._root}: reads back other bytes than were written")
            finally:
                with suppress(OSError):
                    path.unlink()

    def sweep(
        self, is_known: Callable[[NodeRecord], bool], older_than_s: float, now_s: float
    ) -> int:
        """Remove what writers that died left behind, and payloads that nobody knows.

        Modifies the folder. Payloads whose head cannot be read stay: they may be of servers with
        another secret. Whatever `is_known` raises ends the sweep.

        Args:
            is_known: Whether any server that uses the folder still knows a record.
            older_than_s: Younger files stay; more than the time from `put` to `publish`.
            now_s: Seconds since the epoch, on the clock of the folder's host.

        Returns:
            How many files were removed.
        """
        num_removed = 0
        for entry in self._entries():
            status = _status(entry)
            is_old = status is not None and status.st_mtime <= now_s - older_than_s
            if is_old and self._is_garbage(entry, is_known):
                with suppress(OSError):
                    os.unlink(entry.path)
                    num_removed += 1
        return num_removed

    def empty(self) -> int:
        """Remove every file of ours, whoever wrote it; returns how many.

        Raises:
            TierUnavailable: One cannot be removed.
        """
        num_removed = 0
        for entry in self._entries():
            with self._translated(), suppress(FileNotFoundError):
                os.unlink(entry.path)
                num_removed += 1
        return num_removed

    def _path(self, record: NodeRecord) -> Path:
        return self._folder / record.key[1:2].hex() / _name(record)

    def _temporary_name(self) -> str:
        return self._temporary + secrets.token_hex(8)

    def _write(self, path: Path, parts: Sequence[bytes | memoryview]) -> None:
        """Let a file appear whole, or not at all."""
        temporary = path.with_name(self._temporary_name())
        try:
            try:
                self._write_file(temporary, parts)
            except FileNotFoundError:
                self._make_root()
                self._make_folder(path.parent)
                self._write_file(temporary, parts)
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise

    def _write_file(self, path: Path, parts: Sequence[bytes | memoryview]) -> None:
        """Write a new file and wait until its bytes are on the disk."""
        fd = os.open(path, _CREATE, self._mode)
        with open(fd, "wb", buffering=0) as file:
            _permit(fd, self._mode)
            for part in parts:
                rest = memoryview(part)
                while rest:
                    rest = rest[file.write(rest) :]
            os.fdatasync(fd)

    def _make_root(self) -> None:
        """Make the folder where it was, or for the first time."""
        if self._device not in (None, _device_of(self._root)):
            raise OSError(errno.ENODEV, "its file system is not mounted")
        with suppress(FileExistsError):
            self._root.parent.mkdir(parents=True)
        self._make_folder(self._root)
        self._make_folder(self._folder)
        self._device = _device_of(self._folder)

    def _make_folder(self, path: Path) -> None:
        """Make a folder that those may search who may read the files; its parent must be there."""
        mode = self._mode | (self._mode & 0o444) >> 2
        with suppress(FileExistsError):
            path.mkdir(mode)
            _permit(path, mode | path.stat().st_mode & stat.S_ISGID)

    @contextmanager
    def _opened(self, path: Path) -> Iterator[_FileSource]:
        """A payload file, to be read from front to end."""
        try:
            fd = os.open(path, _READ)
        except OSError as exc:
            reason = self._why_lost(path, exc)
            if reason is None:
                raise
            raise PayloadLost(reason, path.name) from exc
        try:
            source = _FileSource(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            yield source
        finally:
            os.close(fd)

    def _why_lost(self, path: Path, exc: OSError) -> str | None:
        """Why a file that cannot be opened is lost; None if the folder is what fails."""
        if exc.errno == errno.ENOENT:
            is_there = self._folder.is_dir() or _device_of(self._root) == self._device
            return "absent" if is_there else None
        if exc.errno in (errno.EACCES, errno.EPERM):
            return "foreign" if os.path.exists(path) else None
        return "foreign" if exc.errno in (errno.ELOOP, errno.ENXIO) else None

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        """Every file with a name of ours, payloads and unfinished ones."""
        for entry in _scan(self._folder):
            if _FOLDER.fullmatch(entry.name):
                yield from filter(_is_ours, _scan(entry.path))
            elif _is_ours(entry):
                yield entry

    def _is_garbage(self, entry: os.DirEntry[str], is_known: Callable[[NodeRecord], bool]) -> bool:
        """Whether a file is unfinished, or the readable payload of an unknown record."""
        if _TEMPORARY.fullmatch(entry.name):
            return True
        head = self._head_of(entry)
        return head is not None and not is_known(head.record)

    def _head_of(self, entry: os.DirEntry[str]) -> Head | None:
        """The head of a whole payload that has its record's name; None of anything else."""
        with suppress(PayloadLost, OSError), self._opened(Path(entry.path)) as source:
            head = self._format.load_head(source)
            return head if _name(head.record) == entry.name else None
        return None

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn what the operating system says into `TierUnavailable`."""
        try:
            yield
        except OSError as exc:
            name = errno.errorcode.get(exc.errno or 0, type(exc).__name__)
            raise TierUnavailable(f"{self._root}: {name}, {exc.strerror}") from exc


def _name(record: NodeRecord) -> str:
    return f"{record.key.hex()}-{record.checksum:016x}.kv"


def _is_ours(entry: os.DirEntry[str]) -> bool:
    """Whether it is a file with a name of ours."""
    has_name = _PAYLOAD.fullmatch(entry.name) or _TEMPORARY.fullmatch(entry.name)
    return bool(has_name) and _status(entry) is not None


def _scan(path: Path | str) -> Iterator[os.DirEntry[str]]:
    """A folder's entries; nothing of one that cannot be read."""
    try:
        with os.scandir(path) as entries:
            yield from entries
    except OSError as exc:
        logger.warning("pic store: cannot list a folder: %s", exc)


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    """Of the entry itself; None if it is gone or no file."""
    with suppress(OSError):
        status = entry.stat(follow_symlinks=False)
        return status if stat.S_ISREG(status.st_mode) else None
    return None


def _permit(path: Path | int, mode: int) -> None:
    """Set permissions whatever the process's mask, where the file system knows permissions."""
    with suppress(PermissionError):
        os.chmod(path, mode)


def _device_of(path: Path) -> int:
    """The file system that a folder lies on, or would lie on if it were made."""
    while not os.path.exists(path):
        path = path.parent
    return path.stat().st_dev
