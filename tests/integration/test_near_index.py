"""Near indexes of two servers over one real Redis: what one changes, the other hears of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from random import Random
from threading import Thread

import pytest

from sglang_ext.chunk_index.identity import ChunkKey
from sglang_ext.chunk_index.index import NodeRecord, Publication
from sglang_ext.chunk_index.near_index import NearIndex, PathEnd, RemoteIndex
from sglang_ext.chunk_index.redis_index import RedisIndex
from sglang_ext.errors import IndexUnavailable
from tests.redis_server import RedisServer, open_link, redis_cluster, redis_server, wait_until
from tests.strategies import named_key, node_record

FAR_MS = 10_000_000  # so that nothing is asked for again because it is old
HEARD_S = 1.0
RECOVERED_S = 10.0


@dataclass(frozen=True)
class Host:
    """One server's view."""

    remote: RedisIndex
    near: NearIndex

    def known(self, *names: str) -> tuple[int, PathEnd]:
        """Hits of a path and why they end, without asking."""
        result = self.near.lookup([[named_key(name) for name in names]], 0)
        return len(result.hits[0]), result.ends[0]

    def match(self, *names: str) -> int:
        """Hits of a path, asking if need be."""
        return len(self.near.match([[named_key(name) for name in names]], 0)[0])

    def hears(self, change: Callable[[], object], *names: str) -> bool:
        """Whether a change makes a known path unknown in time; fails if not."""
        assert self.known(*names)[1] is not PathEnd.UNKNOWN
        change()
        wait_until(lambda: self.known(*names)[1] is PathEnd.UNKNOWN, HEARD_S)
        return True


@contextmanager
def open_host(url: str) -> Iterator[Host]:
    """A server's link and indexes, which hear of changes already."""
    with open_link(url) as link:
        remote = RedisIndex(link)
        near = NearIndex(remote, remote.changes, negative_ms=FAR_MS, positive_ms=FAR_MS)
        try:
            wait_until(lambda: near.near_stats().num_losses == 1, RECOVERED_S)
            yield Host(remote, near)
        finally:
            near.close()


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    shared_server.cli("FLUSHALL")
    return shared_server


@pytest.fixture
def hosts(server: RedisServer) -> Iterator[tuple[Host, Host]]:
    with open_host(server.url) as a, open_host(server.url) as b:
        yield a, b


def record(name: str, parent: str | None = None, **fields: object) -> NodeRecord:
    return node_record(name, parent, **fields)


def publish(host: Host, *records: NodeRecord) -> None:
    for each in records:
        assert host.near.publish(each, 0) is Publication.STORED


def hear_each_other(hosts: Sequence[Host], mark: str) -> None:
    """Return when each host has heard all that the others changed before: messages keep order."""
    for host in hosts:
        for other in hosts:
            if other is not host:
                name = f"{mark}{hosts.index(host)}{hosts.index(other)}"
                assert host.match(name) == 0
                assert host.hears(lambda o=other, n=name: publish(o, record(n)), name)


def test_a_publication_lifts_an_absence_elsewhere(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    assert b.match("a") == 0
    assert b.hears(lambda: publish(a, record("a")), "a")
    assert b.match("a") == 1


def test_a_removal_is_heard_of_elsewhere_with_all_below(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    publish(a, record("a"), record("a1", "a"), record("b"))
    hear_each_other(hosts, "x")
    assert (b.match("a", "a1"), b.match("b")) == (2, 1)
    assert b.hears(lambda: a.near.remove(named_key("a")), "a", "a1")
    assert b.match("a", "a1") == 0
    assert b.known("b") == (1, PathEnd.ALL)


def test_an_annotation_is_heard_of_elsewhere(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    publish(a, record("a"))
    hear_each_other(hosts, "x")
    assert b.match("a") == 1
    assert b.hears(lambda: a.near.annotate(named_key("a"), ["d"]), "a")
    ((found,),) = b.near.match([[named_key("a")]], 0)
    assert found.doc_ids == ("d",)


def test_own_changes_stay_known(hosts: tuple[Host, Host]) -> None:
    """They come back from Redis as well, and are left out."""
    a, _ = hosts
    publish(a, record("a"), record("b"))
    a.near.remove(named_key("b"))
    hear_each_other(hosts, "x")
    assert a.known("a") == (1, PathEnd.ALL)
    assert a.known("b") == (0, PathEnd.ABSENT)


def test_hits_served_here_are_counted_there(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    publish(a, record("a"))
    hear_each_other(hosts, "x")
    assert isinstance(b.remote, RemoteIndex)
    before = b.near.near_stats().num_remote_lookups
    for _ in range(3):
        assert b.match("a") == 1
    b.near.flush()
    view = a.near.show(named_key("a"))
    assert view is not None
    assert view.num_hits == 3
    assert b.near.near_stats().num_remote_lookups == before + 1


def test_hit_statistics_disturb_nobody(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    publish(a, record("a"))
    hear_each_other(hosts, "x")
    assert (a.match("a"), b.match("a")) == (1, 1)
    a.near.flush()
    hear_each_other(hosts, "y")
    assert b.known("a") == (1, PathEnd.ALL)


def test_what_changed_during_a_broken_subscription_is_not_believed(
    server: RedisServer, hosts: tuple[Host, Host]
) -> None:
    a, b = hosts
    publish(a, record("a"), record("b"))
    assert (b.match("a"), b.match("b"), b.match("c")) == (1, 1, 0)
    server.cli("CLIENT", "KILL", "TYPE", "pubsub")
    a.near.remove(named_key("a"))
    publish(a, record("c"))
    wait_until(lambda: b.near.near_stats().num_losses == 2, RECOVERED_S)
    assert b.near.near_stats().num_entries == 0
    assert (b.match("a"), b.match("b"), b.match("c")) == (0, 1, 1)
    assert b.hears(lambda: a.near.remove(named_key("b")), "b")


def test_a_restarted_server_empties_the_memory_and_is_used_again() -> None:
    with redis_server() as server, open_host(server.url) as a:
        publish(a, record("a"))
        server.kill()
        assert a.match("a") == 1
        with pytest.raises(IndexUnavailable):
            a.match("b")
        server.start()
        wait_until(lambda: a.near.near_stats().num_losses == 2, RECOVERED_S)
        wait_until(lambda: _answers(a), RECOVERED_S)
        assert a.match("a") == 0
        publish(a, record("a"))
        assert a.match("a") == 1


def test_a_lost_payload_is_a_miss_everywhere(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    publish(a, record("a"), record("a1", "a"))
    assert b.match("a", "a1") == 2
    assert a.hears(lambda: b.near.remove(named_key("a")), "a", "a1")
    assert a.match("a") == b.match("a") == 0


def test_hosts_that_change_and_match_at_once_end_in_agreement(hosts: tuple[Host, Host]) -> None:
    parents = {"a": None, "a1": "a", "a2": "a1", "b": None, "b1": "b"}
    paths: list[list[ChunkKey]] = []
    for name, parent in parents.items():
        above = next((path for path in paths if parent and path[-1] == named_key(parent)), [])
        paths.append([*above, named_key(name)])

    def act(host: Host, seed: int) -> None:
        rng = Random(seed)
        for _ in range(150):
            name = rng.choice(list(parents))
            host.near.match(rng.sample(paths, 2), 0)
            if rng.random() < 0.7:
                host.near.publish(record(name, parents[name], checksum=rng.randrange(9)), 0)
            else:
                host.near.remove(named_key(name))

    threads = [Thread(target=act, args=(host, seed)) for seed, host in enumerate(hosts * 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hear_each_other(hosts, "x")
    for host in hosts:
        assert host.near.match(paths, 0) == host.remote.match(paths, 0)


def test_changes_on_every_master_of_a_cluster_are_heard() -> None:
    with redis_cluster() as cluster, ExitStack() as stack:
        a, b = (stack.enter_context(open_host(cluster.url)) for _ in range(2))
        names = [chr(letter) for letter in range(ord("a"), ord("z") + 1)]
        for name in names:
            assert b.match(name) == 0
            assert b.hears(lambda n=name: publish(a, record(n)), name)
            assert b.match(name) == 1
        sizes = [int(server.cli("DBSIZE")) for server in cluster.masters]
        assert len(sizes) == 3
        assert all(sizes)  # the names were on all of them


def _answers(host: Host) -> bool:
    with suppress(IndexUnavailable):
        host.remote.match([[named_key("probe")]], 0)
        return True
    return False
