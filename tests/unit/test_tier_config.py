"""Options of tiers, tenants and secrets: what belongs together, and what stays hidden."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.config import config_from_args
from sglang_ext.errors import ConfigError
from sglang_ext.tier_config import GIB, MIB, IndexConfig, SharedConfig

URL = "redis://:hunter2-in-url@127.0.0.1:6379/0"


@pytest.fixture
def secret_file(tmp_path: Path) -> str:
    path = tmp_path / "secret.txt"
    path.write_text("0123456789abcdef0123456789abcdef\n")
    return str(path)


def index_config(**options: Any) -> IndexConfig:
    config = config_from_args(
        {"enable_pic": True, **{f"pic_{name}": value for name, value in options.items()}}
    )
    assert config is not None
    return config.index


def shared_config(**options: Any) -> SharedConfig:
    shared = index_config(**options).shared
    assert shared is not None
    return shared


def refusal(**options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        index_config(**options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_options_there_is_only_the_arena() -> None:
    config = index_config()
    assert config.disk is None
    assert config.shared is None
    assert config.pool is None
    assert config.quotas == {}


def test_a_disk_tier_has_its_own_secret_which_a_restart_finds_again(tmp_path: Path) -> None:
    folder = tmp_path / "kv" / "deep"
    first = index_config(disk_path=str(folder), disk_gib=0.5)
    assert first.disk is not None
    assert (first.disk.path, first.disk.num_bytes) == (folder, GIB // 2)
    assert index_config(disk_path=str(folder)).secret == first.secret
    assert index_config(disk_path=str(tmp_path / "other")).secret != first.secret
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_secret_file_goes_before_the_disk_tiers_own(tmp_path: Path, secret_file: str) -> None:
    config = index_config(disk_path=str(tmp_path / "kv"), secret_file=secret_file)
    assert config.secret == b"0123456789abcdef0123456789abcdef"
    assert not (tmp_path / "kv" / "secret").exists()


def test_a_shared_tier_takes_its_options(tmp_path: Path, secret_file: str) -> None:
    password = tmp_path / "password"
    password.write_text("hunter2-in-file\n")
    shared = shared_config(
        index=URL,
        secret_file=secret_file,
        index_password_file=str(password),
        shared_path=str(tmp_path),
        shared_gib=2,
        index_deadline_ms=7.5,
        near_entries=10,
    )
    assert shared == SharedConfig(URL, "hunter2-in-file", tmp_path, 2 * GIB, 7.5, 10)


def test_payloads_as_redis_values_need_no_folder(secret_file: str) -> None:
    assert shared_config(index=URL, secret_file=secret_file, shared_values=True).path is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"disk_gib": 1.0}, "--pic-disk-gib: given without --pic-disk-path"),
        ({"shared_path": "kv"}, "--pic-shared-path: given without --pic-index"),
        ({"shared_values": True}, "--pic-shared-values: given without --pic-index"),
        ({"shared_gib": 1.0}, "--pic-shared-gib: given without --pic-index"),
        ({"near_entries": 5}, "--pic-near-entries: given without --pic-index"),
        ({"index": URL}, "--pic-index: expected with either --pic-shared-path"),
        (
            {"index": URL, "shared_path": "kv", "shared_values": True},
            "--pic-index: expected with either --pic-shared-path",
        ),
        ({"index": URL, "shared_values": True}, "--pic-index: expected with --pic-secret-file"),
        ({"index": "http://x"}, "--pic-index: got scheme 'http', expected one of redis://"),
        ({"index": "localhost:6379"}, "--pic-index: got scheme 'localhost:6379', expected one"),
        ({"quota": "a"}, "--pic-quota: got 'a', expected NAMESPACE=MIB"),
        ({"quota": "a=1,=2"}, "--pic-quota: got '=2', expected NAMESPACE=MIB"),
        ({"quota": "a=nan"}, "--pic-quota: got 'a=nan', expected NAMESPACE=MIB"),
        ({"near_entries": 0, "index": URL}, "--pic-near-entries: got 0, expected an integer"),
        ({"index_deadline_ms": 0, "index": URL}, "--pic-index-deadline-ms: got 0, expected a"),
        ({"secret_file": "/nowhere/secret"}, "--pic-secret-file: cannot read /nowhere/secret"),
    ],
    ids=str,
)
def test_what_lacks_its_other_half_is_refused(options: dict[str, Any], message: str) -> None:
    assert refusal(**options).startswith(message)


def test_a_short_secret_is_refused_and_not_told(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_text("tiny-secret")
    message = refusal(secret_file=str(path))
    assert "got 11 characters" in message
    assert "tiny-secret" not in message


def test_a_disk_path_that_cannot_be_used_does_not_end_the_start(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    config = index_config(disk_path=str(path))
    assert config.disk is not None
    assert len(config.secret) == 32


def test_no_secret_is_shown(tmp_path: Path, secret_file: str) -> None:
    password = tmp_path / "password"
    password.write_text("hunter2-in-file")
    config = index_config(
        index=URL,
        index_password_file=str(password),
        secret_file=secret_file,
        shared_values=True,
    )
    assert "hunter2" not in repr(config)
    assert "0123456789abcdef" not in repr(config)
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_quota_counts_in_mib() -> None:
    assert index_config(quota="a=1,b=c=0.5").quotas == {"a": MIB, "b=c": MIB // 2}
