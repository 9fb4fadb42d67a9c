"""Start-up options of the extension: command line flags, and the values the processes share.

Built once in the process that reads the arguments, pickled to the scheduler with SGLang's own
server arguments, passed down by slices. Knows nothing of SGLang.
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sglang_ext.errors import ConfigError, RequestError
from sglang_ext.request import RequestOptions, parse_options

MIB = 1 << 20
MAX_ARENA_MIB = 1 << 30
VerifyPolicy = Literal["always", "first", "never"]


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """The chunk index and the host arena.

    Attributes:
        segment_len: Most tokens of an index node.
        arena_bytes: Host memory that payloads may take.
        verify: When a payload's checksum is compared before use.
        secret: Keys the namespaces; without it node ids cannot be computed from outside.
    """

    segment_len: int = 256
    arena_bytes: int = 2048 * MIB
    verify: VerifyPolicy = "first"
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)


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
    for name, value in given.items():
        option = known[name]
        if option.request_key is not None:
            requested[option.request_key] = value
        else:
            config = option.apply(config, value)
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
    is_switch: bool = False


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
