"""Other writers of a shared folder, as processes that can be killed or race each other."""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any

from sglang_ext.chunk_index.index import NodeRecord
from sglang_ext.chunk_index.tier import RemoteTier
from tests.drills.shelf import RawPayload, now_ms, open_shelf

TIMEOUT_S = 60.0
_ROOT = str(Path(__file__).parents[2])

Stock = Sequence[tuple[NodeRecord, RawPayload]]


@dataclass(frozen=True)
class Place:
    """Where writers write.

    Attributes:
        url: Of Redis.
        folder: Of payloads.
        secret: Of all servers.
    """

    url: str
    folder: Path
    secret: str


def begin_and_hang(place: Place, stock: Stock, age_ms: int, has_begun: Event) -> None:
    """Reserve and put payloads as if that was `age_ms` ago, then never publish them."""
    with open_shelf(place.url, place.folder, place.secret) as shelf:
        for record, payload in stock:
            shelf.begin(record, payload, now_ms() - age_ms)
        has_begun.set()
        get_context("spawn").Event().wait()


def die_writing(place: Place, record: NodeRecord, payload: RawPayload, age_ms: int) -> None:
    """Be killed by the system in the middle of a payload, which is larger than it allows.

    Reserves as `begin_and_hang`.
    """
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (payload.nbytes // 2, payload.nbytes // 2))
    with open_shelf(place.url, place.folder, place.secret) as shelf:
        shelf.begin(record, payload, now_ms() - age_ms)


def publish_all(place: Place, stock: Stock, barrier: Barrier) -> None:
    """Store each payload as a server does, at the same moment as the others of the barrier."""
    with open_shelf(place.url, place.folder, place.secret) as shelf:
        tier: RemoteTier[RawPayload] = RemoteTier("shared", shelf.index, shelf.store)
        for record, payload in stock:
            barrier.wait(TIMEOUT_S)
            assert tier.keep(record, payload, now_ms()) is None


@contextmanager
def process(target: Callable[..., None], *arguments: Any) -> Iterator[BaseProcess]:
    """A process for a while; killed at the end, if it still lives."""
    child = get_context("spawn").Process(target=target, args=arguments, daemon=True)
    sys.path.append(_ROOT)  # which the child takes over; behind all else, so it hides nothing
    try:
        child.start()
    finally:
        sys.path.remove(_ROOT)
    try:
        yield child
    finally:
        child.kill()
        child.join(TIMEOUT_S)
