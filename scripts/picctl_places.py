"""What `picctl` works on: the index and payloads that servers share, or one server's disk tier.

Knows how both are opened without a model: a payload is bytes and nothing else here. Does not know
what is done with them. A disk tier has no index of its own outside its server, so one is made of
what lies in its folder, which is not changed by that.

A server that runs on the same disk folder does not see that files went; it finds out when it reads
them, and counts a miss.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from sglang_ext.chunk_index.commands import Command, CommandLog
from sglang_ext.chunk_index.file_store import FileStore
from sglang_ext.chunk_index.identity import ChunkKey, mac_key
from sglang_ext.chunk_index.index import ChunkIndex, NodeRecord, NodeView, Publication
from sglang_ext.chunk_index.memory_index import MemoryIndex
from sglang_ext.chunk_index.payloads import PayloadStore
from sglang_ext.chunk_index.redis_index import RedisIndex
from sglang_ext.chunk_index.redis_link import RedisConfig, RedisLink
from sglang_ext.errors import ConfigError, IndexUnavailable
from sglang_ext.scripts.picctl_options import Options

CONNECT_S = 5.0
POLL_S = 0.02
DEADLINE_MS = 5000.0
BATCH = 256

_FILE = re.compile(r"([0-9a-f]{34})-([0-9a-f]{16})\.kv")


@dataclass(slots=True)
class RawPayload:
    """A payload nobody looks into."""

    data: bytearray

    @property
    def nbytes(self) -> int:
        """Its size."""
        return len(self.data)

    def buffer(self) -> memoryview:
        """Its bytes."""
        return memoryview(self.data)


class RawCodec:
    """Takes payloads of every form, since it knows none; see `PayloadCodec`."""

    def describe(self, payload: RawPayload) -> bytes:
        """Nothing is said of bytes."""
        return b""

    def allocate(self, form: bytes, num_tokens: int, num_bytes: int) -> RawPayload:
        """Room for that many bytes."""
        return RawPayload(bytearray(num_bytes))


Files: TypeAlias = FileStore[RawPayload]


@dataclass(frozen=True, slots=True)
class Shared:
    """What only the shared index has.

    Attributes:
        link: The way to Redis.
        index: The index itself.
        log: By which changes reach the servers.
    """

    link: RedisLink
    index: RedisIndex
    log: CommandLog


@dataclass(frozen=True, slots=True)
class Place:
    """An index and its payloads.

    Attributes:
        name: `shared` or `disk`.
        index: Which segments are there.
        store: Their payloads; None if it was not said where they lie.
        files: The store, if it is a folder.
        folder: That folder.
        shared: What only the shared index has.
        strays: Payloads of a disk tier that its server would not take up: without the entry above,
            or second ones of a key.
    """

    name: Literal["shared", "disk"]
    index: ChunkIndex
    store: PayloadStore[RawPayload] | None
    files: Files | None = None
    folder: Path | None = None
    shared: Shared | None = None
    strays: tuple[NodeRecord, ...] = ()

    def require_shared(self, what: str) -> Shared:
        """The shared index.

        Raises:
            ConfigError: It is a disk tier.
        """
        if self.shared is None:
            raise ConfigError(f"--disk-path: got it for {what}, expected --index")
        return self.shared

    def require_store(self) -> PayloadStore[RawPayload]:
        """The payloads.

        Raises:
            ConfigError: It was not said where they lie.
        """
        if self.store is None:
            raise ConfigError(
                "--index: got it alone, expected with --shared-path or --shared-values, "
                "which say where the payloads lie"
            )
        return self.store

    def drain(self, step: Callable[[], Sequence[NodeRecord]]) -> tuple[int, int]:
        """Repeat a bounded removal and drop the payloads; returns entries and bytes that left.

        Raises:
            IndexUnavailable: Redis did not answer; what left before is gone.
        """
        store = self.require_store()
        num_entries = num_bytes = 0
        while records := step():
            keys = {record.key for record in records}
            for record in (*records, *(stray for stray in self.strays if stray.key in keys)):
                store.drop(record)
            num_entries += len(records)
            num_bytes += sum(record.payload_bytes for record in records)
        return num_entries, num_bytes

    def post(self, command: Command) -> None:
        """Tell all servers of a change of the shared index; nothing to do for a disk tier."""
        if self.shared is not None:
            self.shared.log.post(command)


@contextmanager
def open_place(options: Options) -> Iterator[Place]:
    """The place that the options name.

    Raises:
        ConfigError: None is named, or its options do not fit.
        IndexUnavailable: Redis cannot be reached.
    """
    if options.index is not None:
        with open_shared(options) as place:
            yield place
    elif options.disk_path is not None:
        yield open_disk(options.disk_path)
    else:
        raise ConfigError("--index: got nothing, expected the URL of Redis, or --disk-path")


@contextmanager
def open_shared(options: Options) -> Iterator[Place]:
    """The shared index, its connections closed at the end; raises as `open_place`."""
    if options.index is None:
        raise ConfigError("--index: got nothing, expected the URL of Redis")
    link = RedisLink(
        RedisConfig(
            url=options.index,
            password=options.index_password,
            deadline_ms=DEADLINE_MS,
            background_deadline_ms=DEADLINE_MS,
        )
    )
    try:
        _wait_available(link)
        index = RedisIndex(link)
        shared = Shared(link, index, CommandLog(link))
        yield _with_payloads(shared, options)
    finally:
        link.close()


def open_disk(folder: Path) -> Place:
    """A disk tier's folder, with an index made of what lies there. Changes nothing.

    Raises:
        ConfigError: There is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"--disk-path: got {folder}, expected a folder")
    files: Files = FileStore(folder, RawCodec())
    index = MemoryIndex()
    strays = tuple(_adopt(index, files))
    return Place("disk", index, files, files, folder, strays=strays)


def unreadable_files(place: Place) -> list[NodeRecord]:
    """What stands for files of a folder whose own record cannot be read. Changes nothing."""
    if place.files is None or place.folder is None:
        return []
    named = {_name_of(record) for record in place.files.records()}
    found = (_FILE.fullmatch(path.name) for path in place.folder.rglob("*.kv"))
    names = {(match[1], match[2]) for match in found if match is not None}
    return [_stand_in(*name) for name in sorted(names - named)]


def resolve_keys(place: Place, names: Sequence[str]) -> list[NodeView]:
    """The nodes that keys, or unique beginnings of keys, name; hexadecimal digits.

    Raises:
        ConfigError: One is no key, or names no entry, or several.
    """
    for name in names:
        if not re.fullmatch(r"[0-9a-f]{1,34}", name):
            raise ConfigError(f"KEY: got {name!r}, expected up to 34 hexadecimal digits")
    full = {
        name: place.index.show(ChunkKey(bytes.fromhex(name))) for name in names if len(name) == 34
    }
    found: dict[str, dict[ChunkKey, NodeView]] = {name: {} for name in names}
    for name, view in full.items():
        if view is not None:
            found[name][view.record.key] = view
    prefixes = tuple(name for name in names if len(name) < 34)
    for view in place.index.scan() if prefixes else ():
        text = view.record.key.hex()
        for name in prefixes:
            if text.startswith(name):
                found[name][view.record.key] = view
    return [_only(name, views) for name, views in found.items()]


def namespaces_of(options: Options) -> Mapping[str, str]:
    """Names of the owners that can be told: the default namespace, and the one that was named."""
    if options.secret is None:
        return {}
    names = dict.fromkeys(("default", options.named_namespace))
    return {options.owner(name): name for name in names}


def _wait_available(link: RedisLink) -> None:
    """Wait until Redis answers, or the first attempt to reach it failed."""
    deadline_s = time.monotonic() + CONNECT_S
    while not link.wait_available(POLL_S):
        reason = link.stats().last_error
        if reason or time.monotonic() > deadline_s:
            late = f"no answer within {CONNECT_S:.0f} s"
            raise IndexUnavailable(f"--index: {link!r}: {reason or late}")


def _with_payloads(shared: Shared, options: Options) -> Place:
    """The shared place with the store that the options name."""
    key = None if options.secret is None else mac_key(options.secret)
    if options.shared_values:
        from sglang_ext.chunk_index.redis_store import RedisStore

        store = RedisStore(shared.link, RawCodec(), key)
        return Place("shared", shared.index, store, shared=shared)
    if options.shared_path is None:
        return Place("shared", shared.index, None, shared=shared)
    folder = options.shared_path
    if not folder.is_dir():
        raise ConfigError(f"--shared-path: got {folder}, expected a folder")
    files: Files = FileStore(folder, RawCodec(), key)
    return Place("shared", shared.index, files, files, folder, shared)


def _adopt(index: MemoryIndex, files: Files) -> Iterator[NodeRecord]:
    """Publish what lies in a folder, parents first; yields what cannot be."""
    children: dict[ChunkKey | None, list[NodeRecord]] = {}
    for record in files.records():
        children.setdefault(record.parent, []).append(record)
    ready = children.pop(None, [])
    while ready:
        record = ready.pop()
        if index.publish(record, record.created_ms) is Publication.STORED:
            ready += children.pop(record.key, [])
        else:
            yield record
    for orphans in children.values():
        yield from orphans


def _name_of(record: NodeRecord) -> tuple[str, str]:
    return record.key.hex(), f"{record.checksum:016x}"


def _stand_in(key: str, checksum: str) -> NodeRecord:
    """A record with the name of a file, and nothing else that is true."""
    return NodeRecord(
        key=ChunkKey(bytes.fromhex(key)),
        parent=None,
        num_tokens=0,
        payload_bytes=0,
        checksum=int(checksum, 16),
        created_ms=0,
    )


def _only(name: str, views: Mapping[ChunkKey, NodeView]) -> NodeView:
    if len(views) != 1:
        what = "no entry" if not views else f"{len(views)} entries"
        raise ConfigError(f"KEY: got {name!r}, which names {what}, expected exactly one")
    (view,) = views.values()
    return view
