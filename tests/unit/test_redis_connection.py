"""URLs of Redis mean what they mean to others, and wrong ones are told without their secrets."""

from __future__ import annotations

import ssl

import pytest

from sglang_ext.chunk_index.redis_commands import slot_of
from sglang_ext.chunk_index.redis_connection import Address, ErrorReply, parse_url
from sglang_ext.chunk_index.redis_link import RedisConfig
from sglang_ext.errors import ConfigError


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


@pytest.mark.parametrize(
    "url",
    [
        "hunter2@host",
        "http://me:hunter2@host",
        "redis://me:hunter2",  # no host: the password is where the port should be
        "redis://:hunter2@host/x",
        "redis://:hunter2@host:0",
        "redis://:hunter2@host:99999",
        "redis://:hunter2@a,b",
        "redis://:hunter2@host?ssl_ca_certs=ca.crt",
        "redis://:hunter2@host?timeout=1",
        "rediss://:hunter2@host?ssl_cert_reqs=maybe",
        "rediss://:hunter2@host?ssl_ca_certs=/nowhere/ca.crt",
        "unix://:hunter2@run/redis.sock",
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
