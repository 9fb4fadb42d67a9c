"""Redis that fails costs a bounded time, then none, and is used again once it works."""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

from sglang_ext.chunk_index.redis_commands import NUM_SLOTS, Command, Script, call_script, slot_of
from sglang_ext.chunk_index.redis_connection import Reply
from sglang_ext.chunk_index.redis_link import RedisConfig, RedisLink
from sglang_ext.chunk_index.redis_subscription import Subscription
from sglang_ext.errors import IndexUnavailable
from tests.redis_server import (
    PASSWORD,
    RedisServer,
    make_tls_files,
    open_link,
    redis_cluster,
    redis_server,
    shared_cluster,
    shared_server,
    wait_until,
)

pytestmark = pytest.mark.redis

RECOVERY_S = 10.0


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture
def _threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def get(link: RedisLink, key: bytes = b"k") -> Reply:
    """A call of the request path."""
    (reply,) = link.request_path().run([Command(key, ("GET", key))])
    return reply


def fails(call: Callable[[], object]) -> bool:
    try:
        call()
    except IndexUnavailable:
        return True
    return False


def works(call: Callable[[], object]) -> bool:
    return not fails(call)


def failures_until_open(link: RedisLink) -> int:
    """How many calls of the request path fail before one is refused."""
    refused = link.stats().num_refusals
    for num_failures in range(100):
        assert fails(lambda: get(link))
        if link.stats().num_refusals > refused:
            return num_failures
    raise AssertionError("the breaker never opened")


class TestOneServer:
    def test_replies_come_in_the_order_of_the_commands(self, server: RedisServer) -> None:
        with open_link(server.url) as link:
            commands = [Command(b"k", ("ECHO", str(i))) for i in range(100)]
            assert link.background().run(commands) == [str(i).encode() for i in range(100)]

    def test_a_refused_command_fails_alone(self, server: RedisServer) -> None:
        with open_link(server.url) as link:
            words = [("SET", "k", "v"), ("LPUSH", "k", "x"), ("GET", "k")]
            stored, refused, read = link.background().attempt([Command(b"k", w) for w in words])
            assert (stored, read) == (b"OK", b"v")
            assert isinstance(refused, IndexUnavailable)
            assert "WRONGTYPE" in str(refused)
            assert link.is_available
            assert link.stats().num_failures == {"misuse": 1}

    def test_a_script_that_the_server_forgot_is_sent_again(self, server: RedisServer) -> None:
        script = Script.of("answer", "return ARGV[1] + 1")
        with open_link(server.url) as link:
            for number in (1, 2):
                server.cli("SCRIPT", "FLUSH")
                commands = [call_script(script, [b"k"], [number])] * 3
                assert link.background().run(commands) == [number + 1] * 3
            assert link.stats().num_failures == {}

    def test_many_threads_share_few_connections(self, server: RedisServer) -> None:
        with open_link(server.url, max_connections=4) as link:
            errors: list[BaseException] = []

            def work(name: int) -> None:
                try:
                    for i in range(50):
                        word = f"{name}-{i}"
                        calls = link.background() if i % 2 else link.request_path()
                        assert calls.run([Command(b"k", ("ECHO", word))]) == [word.encode()]
                except BaseException as exc:
                    errors.append(exc)

            threads = [threading.Thread(target=work, args=(name,)) for name in range(12)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert errors == []
            clients = server.cli("CLIENT", "LIST").splitlines()
            assert len(clients) <= 4 + 1  # redis-cli itself

    def test_a_closed_link_refuses_calls(self, server: RedisServer) -> None:
        with open_link(server.url) as link:
            get(link)
        assert fails(lambda: get(link))
        assert not link.is_available
        assert server.cli("CLIENT", "LIST").count("\n") == 0  # redis-cli alone


class TestPause:
    def test_calls_fail_by_their_deadline_then_no_socket_is_touched(
        self, server: RedisServer
    ) -> None:
        with open_link(server.url, deadline_ms=200) as link:
            get(link)
            server.pause()
            started = time.monotonic()
            assert failures_until_open(link) == 3
            assert time.monotonic() - started < 3  # three deadlines, and a slow machine
            assert link.stats().num_openings == 1
            assert link.stats().num_failures["timeout"] >= 3
            for _ in range(500):
                assert fails(lambda: get(link))
            server.resume()
            assert link.wait_available(RECOVERY_S)
            assert get(link) is None
            gets = server.cli("INFO", "commandstats").partition("cmdstat_get:calls=")[2]
            assert int(gets.partition(",")[0]) <= 1 + 3 + 1  # before, what was sent, after

    def test_a_resumed_server_is_noticed_soon(self, server: RedisServer) -> None:
        with open_link(server.url, deadline_ms=20, background_deadline_ms=500) as link:
            server.pause()
            failures_until_open(link)
            server.resume()
            started = time.monotonic()
            assert link.wait_available(RECOVERY_S)
            assert time.monotonic() - started < 4  # two seconds, and a slow machine
            wait_until(lambda: works(lambda: get(link)), RECOVERY_S)

    def test_late_replies_are_never_taken_for_others(self, server: RedisServer) -> None:
        with open_link(server.url, deadline_ms=200, max_failures=100) as link:
            server.pause()
            for i in range(5):
                word = f"late-{i}"
                assert fails(lambda w=word: link.request_path().run([Command(b"k", ("ECHO", w))]))
            server.resume()
            wait_until(lambda: works(lambda: get(link)), RECOVERY_S)
            for i in range(20):
                (echoed,) = link.request_path().run([Command(b"k", ("ECHO", str(i)))])
                assert echoed == str(i).encode()

    def test_background_calls_have_a_breaker_of_their_own(self, server: RedisServer) -> None:
        with open_link(server.url, deadline_ms=20, background_deadline_ms=3000) as link:
            server.pause()
            failures_until_open(link)
            answers: list[Reply] = []
            thread = threading.Thread(target=lambda: answers.append(link.call("ECHO", "slow")))
            thread.start()
            server.resume()
            thread.join()
            assert answers == [b"slow"]


class TestRestart:
    def test_connections_that_the_server_closed_cost_no_failure(self, server: RedisServer) -> None:
        with open_link(server.url) as link:
            for _ in range(3):
                get(link)
                link.call("GET", "k")
                server.cli("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                assert get(link) is None
                assert link.call("GET", "k") is None
            assert link.stats().num_failures == {}

    def test_a_restarted_server_is_used_again(self, server: RedisServer) -> None:
        with open_link(server.url, deadline_ms=100) as link:
            link.call("SET", "k", "v")
            server.kill()
            failures_until_open(link)
            server.start()
            assert link.wait_available(RECOVERY_S)
            assert get(link) is None
            assert link.call("SET", "k", "w") == b"OK"

    def test_a_server_restarted_in_mid_load_serves_again(self, server: RedisServer) -> None:
        with open_link(server.url, deadline_ms=200) as link:
            is_over = threading.Event()
            wrong: list[object] = []

            def load(name: str) -> None:
                while not is_over.is_set():
                    try:
                        (reply,) = link.request_path().run([Command(b"k", ("ECHO", name))])
                    except IndexUnavailable:
                        continue
                    if reply != name.encode():
                        wrong.append(reply)

            threads = [threading.Thread(target=load, args=(f"load-{i}",)) for i in range(4)]
            for thread in threads:
                thread.start()
            try:
                for _ in range(3):
                    before = link.stats().num_round_trips
                    server.restart()
                    wait_until(
                        lambda before=before: link.stats().num_round_trips > before + 20, RECOVERY_S
                    )
            finally:
                is_over.set()
                for thread in threads:
                    thread.join()
            assert wrong == []


class TestUnreachable:
    def test_a_silent_address_costs_nothing_at_start(self) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
            port = listener.getsockname()[1]
            started = time.monotonic()
            link = RedisLink(RedisConfig(url=f"redis://127.0.0.1:{port}"))
            try:
                for _ in range(1000):
                    assert fails(lambda: get(link))
                    assert fails(lambda: link.call("GET", "k"))
                assert time.monotonic() - started < 1
                assert link.stats().num_round_trips == 0
            finally:
                link.close()

    def test_a_server_that_comes_later_is_used(self) -> None:
        with redis_server() as server:
            server.kill()
            link = RedisLink(RedisConfig(url=server.url, deadline_ms=2000, probe_s=0.2))
            try:
                wait_until(lambda: link.stats().num_failures.get("refused", 0) >= 2, RECOVERY_S)
                assert not link.is_available
                server.start()
                assert link.wait_available(RECOVERY_S)
                assert works(lambda: get(link))
            finally:
                link.close()

    def test_an_unknown_host_is_told(self) -> None:
        link = RedisLink(RedisConfig(url="redis://no-such-host.invalid"))
        try:
            wait_until(lambda: link.stats().num_failures.get("unreachable"), RECOVERY_S)
            with pytest.raises(IndexUnavailable, match="unreachable"):
                get(link)
        finally:
            link.close()


class ScriptedServer:
    """Speaks just enough of the protocol to be taken for Redis, then does what a test says."""

    def __init__(self, answer: Callable[[socket.socket, int], None]) -> None:
        """`answer` gets the socket and how many GETs came before."""
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._num_gets = 0
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            while request := connection.recv(4096):
                if b"INFO" in request:
                    connection.sendall(b"$0\r\n\r\n")
                elif b"PING" in request:
                    connection.sendall(b"+PONG\r\n")
                else:
                    self._num_gets += 1
                    self._answer(connection, self._num_gets - 1)


@contextmanager
def scripted(answer: Callable[[socket.socket, int], None]) -> Iterator[RedisLink]:
    server = ScriptedServer(answer)
    try:
        with open_link(server.url, deadline_ms=100, max_failures=100) as link:
            yield link
    finally:
        server.close()


class TestBrokenReplies:
    def test_a_reply_that_stops_halfway_is_never_continued(self) -> None:
        go_on = threading.Event()

        def answer(connection: socket.socket, num_before: int) -> None:
            if num_before == 0:
                connection.sendall(b"$10\r\nhalf")
                go_on.wait(10)
                connection.sendall(b"-WRONG\r\n\r\n")
            else:
                connection.sendall(b"$5\r\nright\r\n")

        with scripted(answer) as link:
            assert fails(lambda: get(link))
            go_on.set()
            wait_until(lambda: works(lambda: get(link)), RECOVERY_S)
            assert [get(link) for _ in range(5)] == [b"right"] * 5

    def test_a_reply_that_trickles_does_not_stretch_the_deadline(self) -> None:
        is_over = threading.Event()

        def answer(connection: socket.socket, num_before: int) -> None:
            connection.sendall(b"$1000000\r\n")
            while not is_over.wait(0.02):
                connection.sendall(b"x")

        with scripted(answer) as link:
            started = time.monotonic()
            assert fails(lambda: get(link))
            assert time.monotonic() - started < 1
            is_over.set()

    @pytest.mark.parametrize(
        "reply",
        [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$-7\r\n", b"$x\r\n", b"*-7\r\n", b"\0\0\0\0\r\n"],
    )
    def test_what_is_no_reply_is_a_failure_and_the_next_call_has_a_new_connection(
        self, reply: bytes
    ) -> None:
        def answer(connection: socket.socket, num_before: int) -> None:
            connection.sendall(reply if num_before == 0 else b"$5\r\nright\r\n")

        with scripted(answer) as link:
            assert fails(lambda: get(link))
            assert link.stats().num_failures.get("protocol") == 1
            assert get(link) == b"right"

    def test_a_server_that_hangs_up_is_a_failure(self) -> None:
        def answer(connection: socket.socket, num_before: int) -> None:
            if num_before == 0:
                connection.shutdown(socket.SHUT_RDWR)
            else:
                connection.sendall(b"$5\r\nright\r\n")

        with scripted(answer) as link:
            assert fails(lambda: get(link))
            assert link.stats().num_failures.get("lost") == 1
            assert get(link) == b"right"


class TestRights:
    def test_a_wrong_password_is_told_without_it(self, caplog: pytest.LogCaptureFixture) -> None:
        with redis_server(password="right") as server, caplog.at_level(logging.DEBUG):
            wrong = server.url.replace(":right@", ":hunter2@")
            link = RedisLink(RedisConfig(url=wrong, probe_s=0.1))
            try:
                wait_until(lambda: link.stats().num_failures.get("auth", 0) >= 3, RECOVERY_S)
                with pytest.raises(IndexUnavailable, match="auth: WRONGPASS") as caught:
                    get(link)
            finally:
                link.close()
        shown = caplog.text + str(caught.value) + repr(link) + str(link.stats())
        assert "hunter2" not in shown
        assert caplog.text.count("WRONGPASS") == 1  # not once for every attempt

    def test_a_missing_password_is_told(self) -> None:
        with redis_server(password=PASSWORD) as server:
            link = RedisLink(RedisConfig(url="redis://" + server.url.rpartition("@")[2]))
            try:
                wait_until(lambda: link.stats().num_failures.get("auth"), RECOVERY_S)
                assert "NOAUTH" in link.stats().last_error
            finally:
                link.close()

    def test_a_password_of_any_characters_lets_in(self) -> None:
        with redis_server(password=PASSWORD) as server, open_link(server.url) as link:
            assert get(link) is None

    def test_a_command_that_the_user_may_not_use_fails_alone(self) -> None:
        with redis_server(has_acl_user=True) as server, open_link(server.url) as link:
            with pytest.raises(IndexUnavailable, match="permission: NOPERM"):
                link.call("GET", "elsewhere")
            with pytest.raises(IndexUnavailable, match="permission: NOPERM"):
                link.call("FLUSHALL")
            assert link.call("GET", "pic1:k") is None
            assert link.is_available

    def test_a_certificate_of_another_authority_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "ours").mkdir()
        (tmp_path / "other").mkdir()
        files, other = make_tls_files(tmp_path / "ours"), make_tls_files(tmp_path / "other")
        with redis_server(tls=files) as server:
            with open_link(server.url) as link:
                assert get(link) is None
            plain = server.url.partition("?")[0]
            link = RedisLink(RedisConfig(url=plain, ca_file=str(other.ca)))
            try:
                wait_until(lambda: link.stats().num_failures.get("tls"), RECOVERY_S)
                assert not link.is_available
            finally:
                link.close()


class TestReplica:
    def test_a_read_only_replica_is_read_and_not_written(self, server: RedisServer) -> None:
        server.cli("SET", "k", "v")
        port = server.url.rpartition(":")[2]
        with redis_server("--replicaof", "127.0.0.1", port) as replica:
            wait_until(lambda: "master_link_status:up" in replica.cli("INFO"), RECOVERY_S)
            with open_link(replica.url) as link:
                for _ in range(5):
                    with pytest.raises(IndexUnavailable, match="read_only"):
                        link.call("SET", "k", "w")
                    assert get(link) == b"v"
                assert link.is_available
                replica.cli("REPLICAOF", "NO", "ONE")
                assert link.call("SET", "k", "w") == b"OK"


class TestSubscription:
    @pytest.mark.parametrize("kind", ["tcp", "unix", "tls"])
    def test_every_message_is_heard_and_an_interruption_is_told(
        self, kind: Literal["tcp", "unix", "tls"]
    ) -> None:
        server = shared_server(kind)
        heard: list[bytes] = []
        beginnings: list[int] = []
        with open_link(server.url) as link:
            subscription = Subscription(
                link, b"pic1:changes", heard.append, lambda: beginnings.append(len(heard))
            )
            try:
                wait_until(lambda: beginnings, RECOVERY_S)
                for i in range(50):
                    link.call("PUBLISH", "pic1:changes", str(i))
                wait_until(lambda: len(heard) == 50, RECOVERY_S)
                assert heard == [str(i).encode() for i in range(50)]
                server.cli("CLIENT", "KILL", "TYPE", "pubsub")
                wait_until(lambda: beginnings == [0, 50], RECOVERY_S)
                link.call("PUBLISH", "pic1:changes", "after")
                wait_until(lambda: heard[-1] == b"after", RECOVERY_S)
            finally:
                subscription.close()
            wait_until(lambda: "channels:0" in server.cli("INFO", "stats"), RECOVERY_S)
            link.call("PUBLISH", "pic1:changes", "unheard")
            assert heard[-1] == b"after"

    def test_a_channel_that_falls_silent_is_heard_again(self, server: RedisServer) -> None:
        beginnings: list[int] = []
        with open_link(server.url, probe_s=0.1) as link:
            subscription = Subscription(link, b"c", lambda _: None, lambda: beginnings.append(1))
            try:
                wait_until(lambda: beginnings, RECOVERY_S)
                server.pause()
                wait_until(lambda: link.stats().num_failures.get("timeout"), RECOVERY_S)
                server.resume()
                wait_until(lambda: len(beginnings) == 2, RECOVERY_S)
            finally:
                server.resume()
                subscription.close()


class TestCluster:
    def test_commands_go_to_who_has_their_slots(self) -> None:
        with redis_cluster() as cluster, open_link(cluster.url) as link:
            assert (link.is_cluster, link.stats().num_servers) == (True, 3)
            names = [f"key-{i}" for i in range(100)]
            sets = [Command(name.encode(), ("SET", name, name)) for name in names]
            assert link.background().run(sets) == [b"OK"] * 100
            gets = [Command(name.encode(), ("GET", name)) for name in names]
            assert link.request_path().run(gets) == [name.encode() for name in names]
            assert sorted(link.background().scan_keys(b"key-*")) == sorted(
                n.encode() for n in names
            )
            alone = f"redis://{cluster.url.rpartition(',')[2]}"
            with open_link(alone) as told:
                assert told.is_cluster  # the server says so
                assert told.request_path().run(gets) == [name.encode() for name in names]

    @pytest.mark.usefixtures("_threads_take_turns_often")
    def test_calls_over_several_servers_never_wait_for_each_other(self) -> None:
        cluster = shared_cluster()
        with open_link(cluster.url, max_connections=2) as link:  # one for background calls
            names = {slot_of(b"%d" % i) * 3 // NUM_SLOTS: b"%d" % i for i in range(100)}
            there = [Command(names[third], ("GET", names[third])) for third in range(3)]
            orders = [there, there[1:] + there[:1], there[2:] + there[:2]]
            with ThreadPoolExecutor(3) as pool:
                work = [
                    pool.submit(lambda c=commands: [link.background().run(c) for _ in range(200)])
                    for commands in orders
                ]
                assert [len(each.result()) for each in work] == [200] * 3

    def test_a_paused_master_fails_lookups_which_work_once_it_goes_on(self) -> None:
        with (
            redis_cluster(timeout_ms=60_000) as cluster,
            open_link(cluster.url, deadline_ms=100) as link,
        ):
            names = [f"key-{i}" for i in range(100)]
            gets = [Command(name.encode(), ("GET", name)) for name in names]
            link.background().run([Command(c.key, ("SET", c.key, c.key)) for c in gets])
            for master in cluster.masters:
                master.pause()
                for _ in range(5):
                    assert fails(lambda: link.request_path().run(gets))
                assert not link.is_available
                master.resume()
                assert link.wait_available(RECOVERY_S)
                assert link.request_path().run(gets) == [name.encode() for name in names]

    def test_a_replica_that_becomes_master_is_used(self) -> None:
        with redis_cluster(num_replicas=1) as cluster, open_link(cluster.url, probe_s=0.2) as link:
            names = [f"key-{i}" for i in range(50)]
            sets = [Command(name.encode(), ("SET", name, name)) for name in names]
            link.background().run(sets)
            master = cluster.masters[0]
            replica = cluster.replica_of(master)
            wait_until(lambda: "master_link_status:up" in replica.cli("INFO"), RECOVERY_S)
            replica.cli("CLUSTER", "FAILOVER", "TAKEOVER")  # the old master lives on as replica
            wait_until(lambda: replica.cli("ROLE").startswith("master"), RECOVERY_S)
            wait_until(lambda: works(lambda: link.background().run(sets)), RECOVERY_S)
            wait_until(lambda: "master_link_status:up" in master.cli("INFO"), RECOVERY_S)
            replica.kill()  # without notice
            wait_until(lambda: works(lambda: link.background().run(sets)), 3 * RECOVERY_S)
            assert link.stats().num_servers == 3
