"""The chunk index's slice of the configuration: arena, tiers, tenants and secrets.

Knows which options belong together and which files hold secrets. A secret stands in no list of
processes, since it is read from a file, and in no `repr`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from sglang_ext.errors import ConfigError

MIB = 1 << 20
GIB = 1 << 30
MAX_MIB = 1 << 30
MIN_SECRET_LEN = 16
SECRET_NAME = "secret"
"""File in the disk tier's folder."""

INDEX_SCHEMES = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster")
NEED_INDEX = (
    "shared_path",
    "shared_values",
    "shared_gib",
    "index_password_file",
    "index_deadline_ms",
    "near_entries",
)
VerifyPolicy = Literal["always", "first", "never"]


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """The local disk tier.

    Attributes:
        path: Folder for payloads; made if it is absent.
        num_bytes: Most payload bytes.
    """

    path: Path
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SharedConfig:
    """The index and payloads that servers share.

    Attributes:
        url: Of Redis; may hold a password, so it is not shown.
        password: Of Redis, in place of one in the URL.
        path: Folder for payloads that all servers see; None keeps payloads as Redis values.
        num_bytes: Most payload bytes of all servers together; servers should agree.
        deadline_ms: Longest one call of the request path may take.
        near_entries: Most records kept in this process.
    """

    url: str = field(repr=False)
    password: str | None = field(default=None, repr=False)
    path: Path | None = None
    num_bytes: int = 64 * GIB
    deadline_ms: float = 5.0
    near_entries: int = 200_000


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """The chunk index and its tiers.

    Attributes:
        segment_len: Most tokens of an index node.
        arena_bytes: Host memory that payloads may take.
        verify: When a payload's checksum is compared before use.
        secret: Keys the namespaces and authenticates shared payloads; without it node ids cannot be
            computed from outside.
        quotas: Most bytes of a namespace in the arena, and as many in the local disk tier.
        pool: Namespace whose chunks all others may reuse; None shares nothing.
        disk: The local disk tier, if any.
        shared: The shared tier, if any.
        stall_ms: Longest a request waits for a payload while no byte comes.
    """

    segment_len: int = 256
    arena_bytes: int = 2048 * MIB
    verify: VerifyPolicy = "first"
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    quotas: Mapping[str, int] = field(default_factory=dict)
    pool: str | None = None
    disk: DiskConfig | None = None
    shared: SharedConfig | None = None
    stall_ms: float = 50.0


def with_tiers(config: IndexConfig, given: Mapping[str, Any]) -> IndexConfig:
    """The index's slice with what flags say of tiers, tenants and secrets.

    Args:
        config: What it is without them.
        given: Checked values by flag name without `--pic-`.

    Raises:
        ConfigError: A flag contradicts or lacks another, or a file cannot be used.
    """
    disk = None
    if "disk_path" in given:
        disk = DiskConfig(given["disk_path"], given.get("disk_gib", 16 * GIB))
    elif "disk_gib" in given:
        raise ConfigError("--pic-disk-gib: given without --pic-disk-path")
    config = replace(
        config,
        disk=disk,
        shared=_shared_config(given),
        quotas=given.get("quota", {}),
        pool=given.get("shared_pool"),
        stall_ms=given.get("load_stall_ms", config.stall_ms),
    )
    secret = _secret(given, config)
    return config if secret is None else replace(config, secret=secret)


def _shared_config(given: Mapping[str, Any]) -> SharedConfig | None:
    if "index" not in given:
        for name in NEED_INDEX:
            if given.get(name):
                raise ConfigError(f"{flag_of('pic_' + name)}: given without --pic-index")
        return None
    if ("shared_path" in given) == bool(given.get("shared_values")):
        raise ConfigError(
            "--pic-index: expected with either --pic-shared-path, a folder all servers see, "
            "or --pic-shared-values, payloads in Redis itself"
        )
    defaults = SharedConfig(given["index"])
    return replace(
        defaults,
        password=given.get("index_password_file"),
        path=given.get("shared_path"),
        num_bytes=given.get("shared_gib", defaults.num_bytes),
        deadline_ms=given.get("index_deadline_ms", defaults.deadline_ms),
        near_entries=given.get("near_entries", defaults.near_entries),
    )


def _secret(given: Mapping[str, Any], config: IndexConfig) -> bytes | None:
    """The secret that a restarted server, or another one, has as well; None if none is needed."""
    if "secret_file" in given:
        return given["secret_file"]  # type: ignore[no-any-return]
    if config.shared is not None:
        raise ConfigError(
            "--pic-index: expected with --pic-secret-file, the same secret for every server; "
            "to make one: openssl rand -hex 32"
        )
    return None if config.disk is None else _own_secret(config.disk.path)


def _own_secret(folder: Path) -> bytes | None:
    """The secret kept beside a disk tier's payloads; made there the first time.

    None if the folder cannot be used: then there is nothing to find again, and the tier says so.
    """
    path = folder / SECRET_NAME
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_hex(32) + "\n")
    except OSError:
        return None
    return read_secret("--pic-disk-path", str(path)).encode()


def read_secret(flag: str, path: str) -> str:
    """The first line of a file.

    Raises:
        ConfigError: It cannot be read, or holds less than 16 characters.
    """
    try:
        secret = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{flag}: cannot read {path}: {exc}") from exc
    if len(secret) < MIN_SECRET_LEN:
        expected = f"at least {MIN_SECRET_LEN} characters"
        raise ConfigError(f"{flag}: got {len(secret)} characters in {path}, expected {expected}")
    return secret


def check_secret_file(flag: str, value: Any) -> bytes:
    """The secret in a file; raises `ConfigError` like all checks."""
    return read_secret(flag, check_text(flag, value)).encode()


def check_password_file(flag: str, value: Any) -> str:
    """The password in a file, as it is but for line ends."""
    path = check_text(flag, value)
    try:
        return Path(path).read_text(encoding="utf-8").rstrip("\n")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{flag}: cannot read {path}: {exc}") from exc


def check_text(flag: str, value: Any) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{flag}: got {value!r}, expected a text that is not empty")
    return value


def check_path(flag: str, value: Any) -> Path:
    """An absolute path."""
    return Path(check_text(flag, value)).absolute()


def check_url(flag: str, value: Any) -> str:
    """A URL of a Redis, which no message repeats."""
    url = check_text(flag, value)
    scheme = url.partition("://")[0]
    if "://" not in url or scheme not in INDEX_SCHEMES:
        expected = ", ".join(f"{name}://" for name in INDEX_SCHEMES)
        raise ConfigError(f"{flag}: got scheme {scheme[:16]!r}, expected one of {expected}")
    return url


def check_gib(flag: str, value: Any) -> int:
    """GiB as bytes."""
    return int(check_number(flag, value, MAX_MIB / 1024) * GIB)


def check_ms(flag: str, value: Any) -> float:
    """Milliseconds, at most a minute."""
    return check_number(flag, value, 60_000)


def check_number(flag: str, value: Any, largest: float) -> float:
    """A number above 0, at most `largest`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= largest:
        raise ConfigError(f"{flag}: got {value!r}, expected a number above 0, at most {largest:g}")
    return float(value)


def check_entries(flag: str, value: Any) -> int:
    """A number of entries."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**8:
        raise ConfigError(f"{flag}: got {value!r}, expected an integer from 1 to 100000000")
    return value


def check_quotas(flag: str, value: Any) -> dict[str, int]:
    """`NAME=MIB,NAME=MIB` to bytes by namespace."""
    quotas: dict[str, int] = {}
    for part in check_text(flag, value).split(","):
        name, equals, mib = part.rpartition("=")
        try:
            size = float(mib)
        except ValueError:
            size = 0.0
        if not equals or not name or not 0 < size <= MAX_MIB:
            raise ConfigError(f"{flag}: got {part!r}, expected NAMESPACE=MIB, separated by commas")
        quotas[name] = int(size * MIB)
    return quotas


def flag_of(name: str) -> str:
    """`pic_index` to `--pic-index`."""
    return "--" + name.replace("_", "-")
