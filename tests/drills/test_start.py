"""Drills on a server whose Redis cannot be reached when it starts, and whose disk fills up."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_ext.config import config_from_args
from sglang_ext.kv_pool import KvPool, LayerRope
from sglang_ext.tiers import start_tiers
from tests.drills.conftest import Reference
from tests.drills.disk import SmallDisk, full, small_disk
from tests.drills.drill import STORES, UNAVAILABLE, Served, StartRun, open_server
from tests.drills.holes import dropping_port, silent_port
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.server, pytest.mark.redis]

MAX_START_S = 2.0
NUM_STARTS = 20
DISK_BYTES = 400 << 20
LOG_RESOLUTION_S = 1.0
SAME_WORK = 1.5
"""How much longer the same start may take on a machine with other work; the test before has the
bound itself, without a model in the way."""
BEFORE_PIC, PIC_IS_UP = "Tree cache initialized", "PIC is active"
"""What a scheduler logs just before it builds the cache, and when that serves."""


class Hole(ExitStack):
    """A port that drops connections, until it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.port = self.enter_context(dropping_port())


@pytest.fixture(scope="module")
def hole() -> Iterator[Hole]:
    with Hole() as hole:
        yield hole


@pytest.fixture(scope="module")
def disk() -> Iterator[SmallDisk]:
    with small_disk(DISK_BYTES) as disk:
        yield disk


@pytest.fixture(scope="module")
def served(
    model_path: str,
    hole: Hole,
    disk: SmallDisk,
    reference: Reference,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("lonely")
    (folder / "secret").write_text("a secret of all servers")
    options = {
        "--pic-index": f"redis://127.0.0.1:{hole.port}",
        "--pic-index-deadline-ms": "100",  # this machine may be busy
        "--pic-secret-file": str(folder / "secret"),
        "--pic-shared-path": str(folder / "kv"),
        "--pic-disk-path": str(disk.path / "kv"),
        "--pic-disk-gib": "1",
        "--pic-arena-mib": "24",
    }
    words = itertools.chain.from_iterable(options.items())
    with open_server(model_path, folder / "log", *words) as served:
        yield served


def test_a_cache_whose_redis_cannot_be_reached_is_built_as_fast_as_one_without(
    tmp_path: Path,
) -> None:
    (tmp_path / "secret").write_text("a secret of all servers")
    alone = _starts_s({})
    with silent_port() as silent, dropping_port() as dropping:
        for port in (silent, dropping):
            shared = {
                "pic_index": f"redis://127.0.0.1:{port}",
                "pic_secret_file": str(tmp_path / "secret"),
                "pic_shared_path": str(tmp_path / "kv"),
            }
            assert max(_starts_s(shared)) - min(alone) <= MAX_START_S


def _starts_s(options: dict[str, str]) -> list[float]:
    """How long it takes to build a cache, many times."""
    config = config_from_args({"enable_pic": True, **options})
    assert config is not None
    buffers = [torch.zeros(config.index.segment_len, 1, 8)]
    pool = KvPool(
        SimpleNamespace(k_buffer=buffers, v_buffer=buffers, dtype=torch.float32),
        LayerRope((), (None,)),
    )
    others = _asking()
    took_s, started = [], []
    for _ in range(NUM_STARTS):
        began_s = time.perf_counter()
        started.append(start_tiers(config.index, pool, lambda: "model"))
        took_s.append(time.perf_counter() - began_s)
    with ThreadPoolExecutor(NUM_STARTS) as threads:
        list(threads.map(lambda tiers: tiers.close(), started))
    assert _asking() <= others, "a closed cache asks nobody"
    return took_s


def _asking() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("pic-redis")}


def test_a_server_whose_redis_cannot_be_reached_starts_as_fast_and_serves(
    start_run: StartRun, served: Served, reference: Reference, hole: Hole, tmp_path: Path
) -> None:
    took_s = _pic_start_s(served.log_path.read_text(errors="replace"))
    alone_s = _pic_start_s(reference.log) * SAME_WORK
    assert took_s <= alone_s + MAX_START_S + LOG_RESOLUTION_S
    with ExitStack() as stack, start_run("Redis black-holed at start", served) as run:
        with run.fault():
            run.more(22)
            assert run.rise(STORES, tier="shared", result="stored") == 0
            assert run.rise(STORES, tier="disk", result="stored") > 0
            hole.close()
            stack.callback(_redis_at(hole.port, tmp_path).kill)
        run.recover()
    assert run.rise(UNAVAILABLE, tier="shared") > 0


def _pic_start_s(log: str) -> float:
    """Seconds that a scheduler took for our part of its start, to a second."""
    times = []
    for message in (BEFORE_PIC, PIC_IS_UP):
        found = re.search(rf"^\[(.+?)\] {message}", log, re.MULTILINE)
        assert found is not None, message
        times.append(datetime.fromisoformat(found[1]))
    return (times[1] - times[0]).total_seconds()


def _redis_at(port: int, folder: Path) -> RedisServer:
    """A server where nobody answered so far."""
    words = ["--bind", "127.0.0.1", "--port", str(port)]
    ping = ["-h", "127.0.0.1", "-p", str(port)]
    return RedisServer(folder, words, f"redis://127.0.0.1:{port}", ping)


def test_a_full_local_disk_refuses_writes_only(
    start_run: StartRun, served: Served, disk: SmallDisk
) -> None:
    assert disk.problem is None, disk.problem
    with start_run("local disk full", served, tier="disk") as run:
        run.warm()
        with run.fault(), full(disk.path):
            run.more(12)
        run.recover()
    assert run.rise(STORES, tier="disk", result="unavailable") > 0
