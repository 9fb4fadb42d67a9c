"""The options that all commands of `picctl` share, and the environment variables behind them.

Knows names, where a value may come from, and which values exclude each other. The words are those
of the server's `--pic-*` flags. Secrets are read from files and shown by nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from sglang_ext.chunk_index.identity import owner_id
from sglang_ext.errors import ConfigError
from sglang_ext.scripts.picctl_output import Output
from sglang_ext.tier_config import (
    SECRET_NAME,
    check_password_file,
    check_path,
    check_secret_file,
    check_text,
    check_url,
)

DEFAULT_NAMESPACE = "default"
VARIABLES: Mapping[str, str] = {
    "index": "PICCTL_INDEX",
    "index_password_file": "PICCTL_INDEX_PASSWORD_FILE",
    "secret_file": "PICCTL_SECRET_FILE",
    "shared_path": "PICCTL_SHARED_PATH",
    "disk_path": "PICCTL_DISK_PATH",
    "server": "PICCTL_SERVER",
    "api_key_file": "PICCTL_API_KEY_FILE",
}

_RIVALS = (("index", "disk_path"), ("shared_path", "shared_values"))
_HELP = {
    "index": "Redis of the shared index, as --pic-index of the servers",
    "index_password_file": "file with the password of Redis",
    "secret_file": "file with the servers' secret, as --pic-secret-file",
    "shared_path": "folder of the shared payloads, as --pic-shared-path",
    "disk_path": "folder of one server's disk tier, as --pic-disk-path, instead of --index",
    "server": "HTTP address of a running server, such as http://127.0.0.1:30000",
    "api_key_file": "file with the server's API key",
}
_METAVARS = {"index": "URL", "server": "URL", "shared_path": "P", "disk_path": "P"}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and leaves it to the caller how the program ends."""

    def error(self, message: str) -> NoReturn:
        """Report a wrong command line.

        Raises:
            ConfigError: Always; the message names the option.
        """
        raise ConfigError(f"{message} (see {self.prog} --help)")


@dataclass(frozen=True, slots=True)
class Options:
    """What all commands may need; None is not given.

    Attributes:
        index: URL of Redis; may hold a password.
        index_password: Of Redis, in place of the URL's.
        secret: The servers' secret.
        shared_path: Folder of the shared payloads.
        shared_values: Payloads lie in Redis itself.
        disk_path: Folder of a server's disk tier.
        server: HTTP address of a running server.
        api_key: Of that server.
        namespace: Tenant that was named.
        secret_files: Files that hold secrets, as far as they were named.
    """

    index: str | None = field(default=None, repr=False)
    index_password: str | None = field(default=None, repr=False)
    secret: bytes | None = field(default=None, repr=False)
    shared_path: Path | None = None
    shared_values: bool = False
    disk_path: Path | None = None
    server: str | None = None
    api_key: str | None = field(default=None, repr=False)
    namespace: str | None = None
    secret_files: tuple[Path, ...] = ()

    @property
    def named_namespace(self) -> str:
        """The tenant that was named, else the one that requests belong to by default."""
        return self.namespace or DEFAULT_NAMESPACE

    def owner(self, namespace: str | None = None) -> str:
        """How records name a namespace; without one, the one that was named or the default.

        Raises:
            ConfigError: There is no secret to compute it with.
        """
        if self.secret is None:
            raise ConfigError(
                "--secret-file: got nothing, expected the servers' secret, "
                "without which nobody can tell which entries are a namespace's"
            )
        return owner_id(namespace or self.named_namespace, self.secret)


@dataclass(frozen=True, slots=True)
class Context:
    """What every command runs with.

    Attributes:
        options: The common ones.
        out: Where results go.
        now_ms: Milliseconds since the epoch, when the command began.
    """

    options: Options
    out: Output
    now_ms: int


def common_parser() -> argparse.ArgumentParser:
    """The parent of every command's parser."""
    parser = Parser(add_help=False)
    group = parser.add_argument_group("common options")
    for name, variable in VARIABLES.items():
        text = f"{_HELP[name]} (or ${variable})"
        group.add_argument(_flag(name), metavar=_METAVARS.get(name, "F"), help=text)
    group.add_argument(
        "--shared-values", action="store_true", help="payloads lie in Redis, --pic-shared-values"
    )
    group.add_argument("--namespace", metavar="NAME", help="tenant; 'default' where one is needed")
    group.add_argument("--json", action="store_true", help="print one JSON document, nothing else")
    return parser


def read_options(args: argparse.Namespace, environment: Mapping[str, str]) -> Options:
    """The common options of a command line.

    What the command line says comes before the environment, which is not even looked at for an
    option that excludes a given one.

    Raises:
        ConfigError: A value is wrong, or two exclude each other; the message names the option.
    """
    given = _gather(args, environment)
    values: dict[str, Any] = {
        name: check(_flag(name), given[name]) for name, check in _CHECKS.items() if name in given
    }
    secret_file = _secret_file(args.secret_file, given.get("secret_file"), values.get("disk_path"))
    files = [given[name] for name in ("index_password_file", "api_key_file") if name in given]
    if secret_file is not None:
        files.append(secret_file)
        values["secret"] = check_secret_file("--secret-file", secret_file)
    return Options(
        index=values.get("index"),
        index_password=values.get("index_password_file"),
        secret=values.get("secret"),
        shared_path=values.get("shared_path"),
        shared_values=args.shared_values,
        disk_path=values.get("disk_path"),
        server=values.get("server"),
        api_key=values.get("api_key_file"),
        namespace=(None if args.namespace is None else check_text("--namespace", args.namespace)),
        secret_files=tuple(map(Path, files)),
    )


def _gather(args: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, str]:
    """The values by option name, from the command line or else from the environment."""
    typed = {name: value for name in VARIABLES if (value := getattr(args, name)) is not None}
    excluded: set[str] = set()
    for pair in _RIVALS:
        explicit = [name for name in pair if name in typed or getattr(args, name) is True]
        if len(explicit) == 2:
            first, second = map(_flag, pair)
            raise ConfigError(f"{second}: got it together with {first}, expected one of them")
        excluded |= {name for name in pair if explicit and name not in explicit}
    found = {
        name: environment[variable]
        for name, variable in VARIABLES.items()
        if environment.get(variable) and name not in excluded
    }
    if "disk_path" in found and "index" in found:
        raise ConfigError(
            "PICCTL_DISK_PATH: got it together with PICCTL_INDEX, expected one of them"
        )
    return {**found, **typed}


def _secret_file(typed: str | None, given: str | None, disk_path: Path | None) -> str | None:
    """Where the secret is; a disk tier's own comes before the environment's."""
    own = None if disk_path is None else disk_path / SECRET_NAME
    return str(own) if typed is None and own is not None and own.is_file() else given


def _check_server(flag: str, value: Any) -> str:
    url = check_text(flag, value).rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{flag}: got {value!r}, expected http://HOST:PORT or https://HOST")
    return url


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "index": check_url,
    "index_password_file": check_password_file,
    "shared_path": check_path,
    "disk_path": check_path,
    "server": _check_server,
    "api_key_file": check_password_file,
}
