"""Start-up options of the extension: command line flags, and the values the processes share.

Built once in the process that reads the arguments, pickled to the scheduler with SGLang's own
server arguments, passed down by slices. Knows nothing of SGLang. Secrets are read from files, so
that no list of processes shows them, and no `repr` does.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from sglang_ext.errors import ConfigError, RequestError
from sglang_ext.request import RequestOptions, parse_options

MIB = 1 << 20
GIB = 1 << 30
MAX_ARENA_MIB = 1 << 30
MIN_SECRET_LEN = 16
SECRET_NAME = "secret"
"""File in the disk tier's folder."""

INDEX_SCHEMES = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster")
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


@dataclass(frozen=True, slots=True)
class ExtConfig:
    """Everything `--pic-*` says.

    Attributes:
        defaults: What a request gets for the keys it does not give.
        index: The chunk index's slice.
        is_strict: Abort start-up when the self-test fails, instead of serving without PIC.
        allows_untested_sglang: Do not refuse an SGLang version outside the tested range.
    """

    defaults: RequestOptions = field(default_factory=RequestOptions)
    index: IndexConfig = field(default_factory=IndexConfig)
    is_strict: bool = False
    allows_untested_sglang: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--enable-pic` and the `--pic-*` flags to SGLang's parser."""
    group = parser.add_argument_group("position-independent KV caching (sglang-pic)")
    group.add_argument(
        "--enable-pic",
        action="store_true",
        help="Reuse the KV of recurring chunks at any position of a prompt.",
    )
    for flag, option in _FLAGS.items():
        if option.is_switch:
            group.add_argument(flag, action="store_true", help=option.help)
        else:
            group.add_argument(flag, type=option.type, default=None, help=option.help)


def config_from_args(args: argparse.Namespace | Mapping[str, Any]) -> ExtConfig | None:
    """The configuration that parsed arguments or keyword arguments ask for.

    Args:
        args: SGLang's parsed namespace, or a mapping of `enable_pic` and `pic_*` names.

    Returns:
        None when PIC is off.

    Raises:
        ConfigError: A value is wrong, a `pic_*` name is unknown, or PIC is off while a `pic_*`
            option is given.
    """
    values = dict(args) if isinstance(args, Mapping) else vars(args)
    known = {_name_of(flag): option for flag, option in _FLAGS.items()}
    switches = {name for name, option in known.items() if option.is_switch}
    given = {
        name: value
        for name, value in values.items()
        if name.startswith("pic_")
        and value is not None
        and not (name in switches and value is False)
    }
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigError(f"{unknown[0]}: unknown option, expected one of {', '.join(known)}")
    if not values.get("enable_pic"):
        if given:
            flag = "--" + sorted(given)[0].replace("_", "-")
            raise ConfigError(f"{flag}: given without --enable-pic, which turns it on")
        return None
    config = ExtConfig()
    requested: dict[str, Any] = {}
    tiers: dict[str, Any] = {}
    for name, value in given.items():
        option = known[name]
        if option.request_key is not None:
            requested[option.request_key] = value
        elif option.check is not None:
            tiers[name.removeprefix("pic_")] = option.check(_flag_of(name), value)
        else:
            config = option.apply(config, value)
    config = replace(config, index=with_tiers(config.index, tiers))
    try:
        defaults = parse_options(requested, config.defaults)
    except RequestError as exc:
        flag = "--" + exc.key.replace("_", "-")
        raise ConfigError(f"{flag}: got {exc.got!r}, expected {exc.expected}") from exc
    return replace(config, defaults=defaults)


@dataclass(frozen=True, slots=True)
class _Flag:
    help: str
    type: Any = str
    request_key: str | None = None
    apply: Any = None
    check: Any = None
    is_switch: bool = False


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
        for name in ("shared_path", "shared_values", "shared_gib", "index_password_file"):
            if given.get(name):
                raise ConfigError(f"{_flag_of('pic_' + name)}: given without --pic-index")
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


def _own_secret(folder: Path) -> bytes:
    """The secret kept beside a disk tier's payloads; made there the first time."""
    path = folder / SECRET_NAME
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_hex(32) + "\n")
    except OSError as exc:
        raise ConfigError(f"--pic-disk-path: cannot use {folder}: {exc.strerror}") from exc
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


def _check_secret_file(flag: str, value: Any) -> bytes:
    return read_secret(flag, _check_text(flag, value)).encode()


def _check_password_file(flag: str, value: Any) -> str:
    path = _check_text(flag, value)
    try:
        return Path(path).read_text(encoding="utf-8").rstrip("\n")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{flag}: cannot read {path}: {exc}") from exc


def _check_text(flag: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{flag}: got {value!r}, expected a text that is not empty")
    return value


def _check_path(flag: str, value: Any) -> Path:
    return Path(_check_text(flag, value)).absolute()


def _check_url(flag: str, value: Any) -> str:
    url = _check_text(flag, value)
    scheme = url.partition("://")[0]
    if "://" not in url or scheme not in INDEX_SCHEMES:
        expected = ", ".join(f"{name}://" for name in INDEX_SCHEMES)
        raise ConfigError(f"{flag}: got scheme {scheme[:16]!r}, expected one of {expected}")
    return url


def _check_gib(flag: str, value: Any) -> int:
    return int(_check_number(flag, value, MAX_ARENA_MIB / 1024) * GIB)


def _check_ms(flag: str, value: Any) -> float:
    return _check_number(flag, value, 60_000)


def _check_number(flag: str, value: Any, largest: float) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= largest:
        raise ConfigError(f"{flag}: got {value!r}, expected a number above 0, at most {largest:g}")
    return float(value)


def _check_entries(flag: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**8:
        raise ConfigError(f"{flag}: got {value!r}, expected an integer from 1 to 100000000")
    return value


def _check_quotas(flag: str, value: Any) -> dict[str, int]:
    """`NAME=MIB,NAME=MIB` to bytes by namespace."""
    quotas: dict[str, int] = {}
    for part in _check_text(flag, value).split(","):
        name, equals, mib = part.rpartition("=")
        try:
            size = float(mib)
        except ValueError:
            size = 0.0
        if not equals or not name or not 0 < size <= MAX_ARENA_MIB:
            raise ConfigError(f"{flag}: got {part!r}, expected NAMESPACE=MIB, separated by commas")
        quotas[name] = int(size * MIB)
    return quotas


def _flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _name_of(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _set_segment_len(config: ExtConfig, value: Any) -> ExtConfig:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65536:
        raise ConfigError(f"--pic-segment-len: got {value!r}, expected an integer from 1 to 65536")
    return replace(config, index=replace(config.index, segment_len=value))


def _set_arena(config: ExtConfig, value: Any) -> ExtConfig:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= MAX_ARENA_MIB:
        expected = f"a number of MiB above 0, at most {MAX_ARENA_MIB}"
        raise ConfigError(f"--pic-arena-mib: got {value!r}, expected {expected}")
    return replace(config, index=replace(config.index, arena_bytes=int(value * MIB)))


def _set_verify(config: ExtConfig, value: Any) -> ExtConfig:
    if value not in ("always", "first", "never"):
        raise ConfigError(f"--pic-verify: got {value!r}, expected always, first or never")
    return replace(config, index=replace(config.index, verify=value))


def _set_strict(config: ExtConfig, value: Any) -> ExtConfig:
    return replace(config, is_strict=_switch("--pic-strict", value))


def _set_untested(config: ExtConfig, value: Any) -> ExtConfig:
    allows = _switch("--pic-allow-untested-sglang", value)
    return replace(config, allows_untested_sglang=allows)


def _switch(flag: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{flag}: got {value!r}, expected true or false")
    return value


_FLAGS: Mapping[str, _Flag] = {
    "--pic-delimiter": _Flag(
        "Text that separates chunks in text prompts; removed before the model sees anything.",
        request_key="pic_delimiter",
    ),
    "--pic-strategy": _Flag(
        "Default strategy: daric, epic, reuse or full (default daric).",
        request_key="pic_strategy",
    ),
    "--pic-n-avg": _Flag(
        "Average recomputed tokens a chunk (default 32).", int, request_key="pic_n_avg"
    ),
    "--pic-alloc": _Flag(
        "How DARIC's budget grows over chunks: linear, log or exp (default linear).",
        request_key="pic_alloc",
    ),
    "--pic-alloc-ratio": _Flag(
        "DARIC's ratio of the second chunk's share to the average, in (0, 1) (default 0.1).",
        float,
        request_key="pic_alloc_ratio",
    ),
    "--pic-max-share": _Flag(
        "Cap of the recomputed tokens as a share of the prompt, in (0, 1] (default 0.25).",
        float,
        request_key="pic_max_share",
    ),
    "--pic-namespace": _Flag(
        "Namespace of requests that name none (default 'default').", request_key="pic_namespace"
    ),
    "--pic-segment-len": _Flag(
        "Most tokens of an index node (default 256).", int, apply=_set_segment_len
    ),
    "--pic-arena-mib": _Flag(
        "Host memory for chunk KV, MiB (default 2048).", float, apply=_set_arena
    ),
    "--pic-verify": _Flag(
        "Compare checksums of chunk KV on every load, on the first (default) or never.",
        apply=_set_verify,
    ),
    "--pic-ttl-s": _Flag(
        "Seconds that stored chunks live when a request does not say (default: until evicted).",
        float,
        request_key="pic_ttl_s",
    ),
    "--pic-secret-file": _Flag(
        "File whose content keys the namespaces and authenticates shared payloads; the same for "
        "all servers that share an index.",
        check=_check_secret_file,
    ),
    "--pic-quota": _Flag(
        "NAMESPACE=MIB,...: most memory of the arena, and of the disk tier, that a namespace may "
        "take; others cannot evict it below that.",
        check=_check_quotas,
    ),
    "--pic-shared-pool": _Flag(
        "Namespace whose chunks requests of all namespaces may reuse.", check=_check_text
    ),
    "--pic-disk-path": _Flag(
        "Folder of the local disk tier, reused after a restart (default: none).",
        check=_check_path,
    ),
    "--pic-disk-gib": _Flag(
        "Most payload GiB in the disk tier (default 16).", float, check=_check_gib
    ),
    "--pic-index": _Flag(
        "Redis that servers share the index in: redis://, rediss://, unix://, redis+cluster:// or "
        "rediss+cluster:// (default: each server by itself).",
        check=_check_url,
    ),
    "--pic-index-password-file": _Flag(
        "File with the password of --pic-index, which keeps it out of the command line.",
        check=_check_password_file,
    ),
    "--pic-index-deadline-ms": _Flag(
        "Longest a look-up in the shared index may take (default 5).", float, check=_check_ms
    ),
    "--pic-near-entries": _Flag(
        "Most records of the shared index kept in this process (default 200000).",
        int,
        check=_check_entries,
    ),
    "--pic-shared-path": _Flag(
        "Folder that all servers of --pic-index see; holds shared payloads.", check=_check_path
    ),
    "--pic-shared-values": _Flag(
        "Keep shared payloads as Redis values, for small deployments.",
        check=_switch,
        is_switch=True,
    ),
    "--pic-shared-gib": _Flag(
        "Most payload GiB of all servers together in the shared tier (default 64).",
        float,
        check=_check_gib,
    ),
    "--pic-load-stall-ms": _Flag(
        "Longest a request waits for a payload while no byte comes (default 50).",
        float,
        check=_check_ms,
    ),
    "--pic-strict": _Flag(
        "Abort start-up when the self-test fails instead of serving without PIC.",
        apply=_set_strict,
        is_switch=True,
    ),
    "--pic-allow-untested-sglang": _Flag(
        "Do not refuse an SGLang version outside the tested range.",
        apply=_set_untested,
        is_switch=True,
    ),
}
