"""URLs of Redis mean what they mean to others, and wrong ones are told without their secrets.

A connection ends what it does by its deadline, and never takes half a reply for one.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from sglang_ext.chunk_index import redis_connection
from sglang_ext.chunk_index.redis_commands import slot_of
from sglang_ext.chunk_index.redis_connection import (
    Access,
    Address,
    BrokenReply,
    Connection,
    ErrorReply,
    connect,
    pack,
    parse_url,
)
from sglang_ext.chunk_index.redis_link import RedisConfig
from sglang_ext.errors import ConfigError
from tests.redis_server import make_tls_files, wait_until

WAIT_S = 10.0
PING = pack([("PING",)])


@contextmanager
def peer(act: Callable[[socket.socket], None]) -> Iterator[Address]:
    """Where a listener is that does something with the first connection."""

    def serve() -> None:
        with suppress(OSError), listener.accept()[0] as sock:
            act(sock)
            is_over.wait(WAIT_S)

    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Address(*listener.getsockname())
        finally:
            is_over.set()
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@contextmanager
def connected(act: Callable[[socket.socket], None]) -> Iterator[Connection]:
    with peer(act) as address, closing(connect(address, Access(), soon())) as connection:
        yield connection


def soon(seconds: float = WAIT_S) -> float:
    return time.monotonic() + seconds


def trickle(sock: socket.socket) -> None:
    """Send a byte now and then, until the other side is gone."""
    never = threading.Event()
    while not never.wait(0.02):
        sock.sendall(b"+")


@pytest.mark.parametrize(
    ("url", "seeds"),
    [
        ("redis://", [Address("localhost", 6379)]),
        ("redis://host", [Address("host", 6379)]),
        ("redis://host:7000/", [Address("host", 7000)]),
        ("redis://[::1]:7000", [Address("::1", 7000)]),
        ("redis://[fe80::1%25eth0]", [Address("fe80::1%eth0", 6379)]),
        ("unix:///run/redis.sock", [Address(path="/run/redis.sock")]),
        ("unix:///run/a%20b@c.sock", [Address(path="/run/a b@c.sock")]),
        ("redis+cluster://a:1,b:2", [Address("a", 1), Address("b", 2)]),
    ],
)
def test_a_url_says_where_the_servers_are(url: str, seeds: list[Address]) -> None:
    endpoint = parse_url(url)
    assert list(endpoint.seeds) == seeds
    assert endpoint.is_cluster == url.startswith("redis+cluster")
    assert endpoint.access.tls is None


@pytest.mark.parametrize(
    ("url", "username", "password", "database"),
    [
        ("redis://host", None, None, 0),
        ("redis://:p%40ss@host/3", None, "p@ss", 3),
        ("redis://me:pass@host?db=4", "me", "pass", 4),
        ("redis://me@host", "me", None, 0),
        ("unix://me:pass@/run/redis.sock?db=2", "me", "pass", 2),
    ],
)
def test_a_url_says_who_comes(
    url: str, username: str | None, password: str | None, database: int
) -> None:
    access = parse_url(url).access
    assert (access.username, access.password, access.database) == (username, password, database)


def test_a_password_of_its_own_replaces_the_urls() -> None:
    assert parse_url("redis://me:old@host", password="new").access.password == "new"


def test_tls_checks_certificates_unless_it_is_told_not_to() -> None:
    strict = parse_url("rediss://host").access.tls
    loose = parse_url("rediss://host?ssl_cert_reqs=none").access.tls
    unnamed = parse_url("rediss+cluster://host?ssl_check_hostname=false").access.tls
    assert strict is not None
    assert loose is not None
    assert unnamed is not None
    assert (strict.verify_mode, strict.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert (loose.verify_mode, loose.check_hostname) == (ssl.CERT_NONE, False)
    assert (unnamed.verify_mode, unnamed.check_hostname) == (ssl.CERT_REQUIRED, False)


def test_an_authority_that_is_named_is_the_only_one_that_is_trusted(tmp_path: Path) -> None:
    ca = make_tls_files(tmp_path).ca
    for endpoint in (
        parse_url(f"rediss://host?ssl_ca_certs={ca}"),
        parse_url("rediss://host", ca_file=str(ca)),
    ):
        assert endpoint.access.tls is not None
        assert len(endpoint.access.tls.get_ca_certs()) == 1


@pytest.mark.parametrize(
    "url",
    [
        "hunter2@host",
        "http://me:hunter2@host",
        "redis://me:hunter2",  # no host: the password is where the port should be
        "redis://:hunter2@host/x",
        "redis://:hunter2@host/1/2",
        "redis://:hunter2@host?db=x",
        "redis://:hunter2@host?db=-1",
        "redis://:hunter2@host/0#1",
        "redis://me:12/hunter2@host",  # unquoted
        "redis://me:[hunter2@host",
        "redis://:hunter2@host?host=other",
        "redis://:hunter2@host:0",
        "redis://:hunter2@host:99999",
        "redis://:hunter2@a,b",
        "redis://:hunter2@host?ssl_ca_certs=ca.crt",
        "redis://:hunter2@host?timeout=1",
        "rediss://:hunter2@host?ssl_cert_reqs=maybe",
        "rediss://:hunter2@host?ssl_ca_certs=/nowhere/ca.crt",
        "unix://:hunter2@run/redis.sock",
        "unix://:hunter2@",
        "unix+cluster://:hunter2@/run/redis.sock",
    ],
)
def test_a_wrong_url_is_a_config_error_that_tells_no_secret(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url(url)
    assert "hunter2" not in str(caught.value)


def test_secrets_are_not_shown() -> None:
    config = RedisConfig(url="redis://me:hunter2@host", password="hunter3")
    shown = repr(config) + repr(parse_url(config.url, config.password))
    assert "hunter" not in shown


@pytest.mark.parametrize(
    ("key", "slot"),
    [  # from the cluster specification, and `CLUSTER KEYSLOT`
        (b"123456789", 12739),
        (b"{user1000}.following", 3443),
        (b"foo{}{bar}", 8363),
        (b"foo{{bar}}zap", 4015),
        (b"foo{bar}{zap}", 5061),
    ],
)
def test_slots_are_those_of_redis(key: bytes, slot: int) -> None:
    assert slot_of(key) == slot


def test_the_code_of_an_error_is_found_inside_a_scripts_error_of_redis_6() -> None:
    text = "ERR Error running script (call to f_1): @user_script:3: @user_script: 3: -OOM no room"
    assert ErrorReply(text).code == "OOM"
    assert ErrorReply("MOVED 1 host:1").code == "MOVED"
    assert ErrorReply("ERR -OOM is no code here").code == "ERR"


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        (Address("127.0.0.1", 1), ConnectionRefusedError),
        (Address(path="/nowhere/redis.sock"), FileNotFoundError),
        (Address("no-such-host.invalid", 1), socket.gaierror),
    ],
)
def test_why_a_server_cannot_be_reached_is_told_as_the_system_tells_it(
    address: Address, kind: type[OSError]
) -> None:
    with pytest.raises(kind):
        connect(address, Access(), soon())


@pytest.mark.parametrize(
    "text",
    ["MOVED", "ASK 1", "LOADING wait", "ERR max number of clients reached", "WRONGPASS", "X y  z"],
)
def test_an_error_reply_is_a_reply_and_keeps_its_words(text: str) -> None:
    sent = f"*2\r\n-{text}\r\n:1\r\n-{text}\r\n$1\r\na\r\n".encode()
    with connected(lambda sock: sock.sendall(sent)) as connection:
        (nested, one), error, data = connection.receive(3, soon())  # type: ignore[misc]
    assert (one, data) == (1, b"a")
    assert (str(nested), str(error)) == (text, text)
    assert error.code == text.partition(" ")[0]  # type: ignore[union-attr]


def test_a_greeting_that_trickles_ends_by_the_deadline() -> None:
    with peer(trickle) as address:
        started_s = time.monotonic()
        with pytest.raises(TimeoutError):
            connect(address, Access(password="secret"), soon(0.1))
        assert time.monotonic() - started_s < 2


def test_a_refused_greeting_is_an_error_reply() -> None:
    with (
        peer(lambda sock: sock.sendall(b"-WRONGPASS no\r\n")) as address,
        pytest.raises(ErrorReply, match="WRONGPASS no"),
    ):
        connect(address, Access(password="secret"), soon())


def test_sending_to_a_server_that_does_not_read_ends_by_the_deadline() -> None:
    with connected(lambda sock: None) as connection:
        started_s = time.monotonic()
        with pytest.raises(TimeoutError):
            connection.send(b"x" * (64 << 20), soon(0.1))
        assert time.monotonic() - started_s < 2


def test_nothing_is_sent_after_the_deadline() -> None:
    heard: list[bytes] = []
    with connected(lambda sock: heard.append(sock.recv(99))) as connection:
        with pytest.raises(TimeoutError):
            connection.send(PING, soon(-1))
        connection.send(PING, soon())
        wait_until(lambda: heard, WAIT_S)
    assert heard == [PING]


def test_a_reply_that_stopped_halfway_goes_on_after_a_timeout() -> None:
    is_late = threading.Event()

    def act(sock: socket.socket) -> None:
        sock.sendall(b"$4\r\nla")
        is_late.wait(WAIT_S)
        sock.sendall(b"te\r\n")

    with connected(act) as connection:
        started_s = time.monotonic()
        with pytest.raises(TimeoutError):
            connection.receive(1, soon(0.05))
        assert time.monotonic() - started_s < 2
        is_late.set()
        assert connection.receive(1, soon()) == [b"late"]


def test_what_has_arrived_is_received_even_after_the_deadline() -> None:
    with connected(lambda sock: sock.sendall(b"+PONG\r\n")) as connection:
        wait_until(connection.is_stale, WAIT_S)
        assert connection.receive(1, soon(-1)) == [b"PONG"]
        with pytest.raises(TimeoutError):
            connection.receive(1, soon(-1))


def test_only_so_much_is_read_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_connection, "MAX_LATE_BYTES", 1)
    is_sent = threading.Event()

    def act(sock: socket.socket) -> None:
        sock.sendall(b"$250000\r\n%b\r\n" % bytes(250_000))
        is_sent.set()

    with connected(act) as connection:
        assert is_sent.wait(WAIT_S)
        with pytest.raises(TimeoutError):
            connection.receive(1, soon(-1))
        assert connection.receive(1, soon()) == [bytes(250_000)]


def test_a_reply_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_connection, "MAX_REPLY_BYTES", 200_000)
    half = b"*1\r\n$100000\r\n%b\r\n" % bytes(100_000)

    def act(sock: socket.socket) -> None:
        sock.sendall(8 * half)

    with connected(act) as connection:
        assert connection.receive(1, soon()) == [[bytes(100_000)]]  # counted for each call
        with pytest.raises(BrokenReply, match="200000"):
            connection.receive(7, soon())


def test_a_reply_that_trickles_ends_by_the_deadline() -> None:
    def act(sock: socket.socket) -> None:
        sock.sendall(b"$1000000\r\n")
        trickle(sock)

    with connected(act) as connection:
        started_s = time.monotonic()
        with pytest.raises(TimeoutError):
            connection.receive(1, soon(0.1))
        assert time.monotonic() - started_s < 2


def test_a_connection_is_stale_once_the_server_closed_it() -> None:
    def act(sock: socket.socket) -> None:
        sock.recv(99)
        sock.shutdown(socket.SHUT_WR)

    with connected(act) as connection:
        assert not connection.is_stale()
        connection.send(PING, soon())
        wait_until(connection.is_stale, WAIT_S)
        with pytest.raises(ConnectionError):
            connection.receive(1, soon())


def test_a_closed_connection_is_not_opened_again() -> None:
    with connected(lambda sock: None) as connection:
        connection.close()
        connection.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            connection.send(PING, soon())
        with pytest.raises(ConnectionError):
            connection.receive(1, soon())


def test_another_thread_ends_a_wait() -> None:
    with connected(lambda sock: None) as connection:
        timer = threading.Timer(0.05, connection.interrupt)
        timer.start()
        started_s = time.monotonic()
        with pytest.raises(OSError, match="closed"):
            connection.receive(1, soon())
        assert time.monotonic() - started_s < WAIT_S / 2
        timer.join()
