"""A drill on a Redis cluster: a master dies, and its replica takes its place."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drills.drill import STORES, UNAVAILABLE, Case, Run, Served, StartRun, open_server
from tests.redis_server import RedisCluster, redis_cluster

pytestmark = [pytest.mark.server, pytest.mark.redis]

RECOVERY_S = 20.0
NUM_QUIET = 12
"""Requests in a row that must find every master, so that they touch all slots."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with redis_cluster(num_replicas=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def served(
    model_path: str,
    cluster: RedisCluster,
    cases: list[Case],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("cluster")
    (folder / "secret").write_text("a secret of all servers")
    options = {
        "--pic-index": cluster.url,
        "--pic-index-deadline-ms": "100",  # this machine may be busy
        "--pic-secret-file": str(folder / "secret"),
        "--pic-shared-path": str(folder / "kv"),
        "--pic-arena-mib": "24",
    }
    words = itertools.chain.from_iterable(options.items())
    with open_server(model_path, folder / "log", *words) as served:
        yield served


def test_a_killed_master_costs_hits_until_its_replica_takes_over(
    start_run: StartRun, served: Served, cluster: RedisCluster
) -> None:
    victim = cluster.masters[0]
    heir = cluster.replica_of(victim)
    with start_run("cluster master killed", served) as run:
        run.warm()
        with run.fault():
            victim.kill()
        run.until(lambda: run.rise(UNAVAILABLE, tier="shared") > 0, "nobody missed the master")
        run.until(lambda: heir.cli("ROLE").startswith("master"), "the replica did not take over")
        cluster.wait_whole([server for server in cluster.servers if server is not victim])
        quiet = _Quiet(run)
        run.until(quiet.is_long_enough, "some slots still fail")
        assert run.rise(STORES, tier="shared", result="stored") > quiet.num_stored
    assert run.has_recovered_within(RECOVERY_S)


class _Quiet:
    """Requests in a row that reached every master; notes as recovery when they began.

    Attributes:
        num_stored: What was stored before.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._num_failed = -1.0

    def is_long_enough(self) -> bool:
        """Whether there were enough by now."""
        num_failed = self._run.rise(UNAVAILABLE, tier="shared")
        if num_failed != self._num_failed:
            self._num_failed = num_failed
            self._num_before = len(self._run.outcomes)
            self.num_stored = self._run.rise(STORES, tier="shared", result="stored")
            self._run.note_recovery()
        return len(self._run.outcomes) >= self._num_before + NUM_QUIET
