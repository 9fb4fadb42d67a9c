"""Start-up options of the extension: command line flags, and the values the processes share.

Built once in the process that reads the arguments, pickled to the scheduler with SGLang's own
server arguments, passed down by slices. Knows nothing of SGLang, and of tiers only the flags.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sglang_ext import tier_config
from sglang_ext.errors import ConfigError, RequestError
from sglang_ext.request import STRATEGIES, RequestOptions, parse_options
from sglang_ext.tier_config import MAX_MIB, MIB, IndexConfig, flag_of, with_tiers


@dataclass(frozen=True, slots=True)
class ExtConfig:
    """Everything `--pic-*` says.

    Attributes:
        defaults: What a request gets for the keys it does not give.
        index: The chunk index's slice.
        shadow_share: Share of the requests that are prefilled in full as well when idle, 0..1.
        shadow_limit: Mean first-token KL from which a strategy steps back, nats.
        is_strict: Abort start-up when the self-test fails, instead of serving without PIC.
        allows_untested_sglang: Do not refuse an SGLang version outside the tested range.
    """

    defaults: RequestOptions = field(default_factory=RequestOptions)
    index: IndexConfig = field(default_factory=IndexConfig)
    shadow_share: float = 0.0
    shadow_limit: float = 0.5
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
            tiers[name.removeprefix("pic_")] = option.check(flag_of(name), value)
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


def _name_of(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _set_segment_len(config: ExtConfig, value: Any) -> ExtConfig:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65536:
        raise ConfigError(f"--pic-segment-len: got {value!r}, expected an integer from 1 to 65536")
    return replace(config, index=replace(config.index, segment_len=value))


def _set_arena(config: ExtConfig, value: Any) -> ExtConfig:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= MAX_MIB:
        expected = f"a number of MiB above 0, at most {MAX_MIB}"
        raise ConfigError(f"--pic-arena-mib: got {value!r}, expected {expected}")
    return replace(config, index=replace(config.index, arena_bytes=int(value * MIB)))


def _set_shadow_share(config: ExtConfig, value: Any) -> ExtConfig:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= 1:
        raise ConfigError(f"--pic-shadow-share: got {value!r}, expected a number from 0 to 1")
    return replace(config, shadow_share=float(value))


def _set_shadow_limit(config: ExtConfig, value: Any) -> ExtConfig:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= 100:
        expected = "a number of nats above 0, at most 100"
        raise ConfigError(f"--pic-shadow-limit: got {value!r}, expected {expected}")
    return replace(config, shadow_limit=float(value))


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
        f"Default strategy: {', '.join(STRATEGIES)} (default daric).",
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
    "--pic-warmup": _Flag(
        "Layers of a layerwise strategy's warm-up (default: the strategy's).",
        int,
        request_key="pic_warmup",
    ),
    "--pic-probe": _Flag(
        "Layers of a layerwise strategy's probe (default: the strategy's).",
        int,
        request_key="pic_probe",
    ),
    "--pic-coverage": _Flag(
        "Share of the context that a layerwise strategy computes again, 0 to 1 (default: the "
        "strategy's).",
        float,
        request_key="pic_coverage",
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
    "--pic-shadow-share": _Flag(
        "Share of the requests that are prefilled in full as well when nobody waits, to see how "
        "far off their answers are, 0 to 1 (default 0).",
        float,
        apply=_set_shadow_share,
    ),
    "--pic-shadow-limit": _Flag(
        "Mean first-token KL to full prefill, in nats, from which a strategy steps back to twice "
        "its budget, then to full prefill (default 0.5).",
        float,
        apply=_set_shadow_limit,
    ),
    "--pic-ttl-s": _Flag(
        "Seconds that stored chunks live when a request does not say (default: until evicted).",
        float,
        request_key="pic_ttl_s",
    ),
    "--pic-secret-file": _Flag(
        "File whose content keys the namespaces and authenticates shared payloads; the same for "
        "all servers that share an index.",
        check=tier_config.check_secret_file,
    ),
    "--pic-quota": _Flag(
        "NAMESPACE=MIB,...: most memory of the arena, and of the disk tier, that a namespace may "
        "take; others cannot evict it below that.",
        check=tier_config.check_quotas,
    ),
    "--pic-shared-pool": _Flag(
        "Namespace whose chunks requests of all namespaces may reuse.", check=tier_config.check_text
    ),
    "--pic-disk-path": _Flag(
        "Folder of the local disk tier, reused after a restart (default: none).",
        check=tier_config.check_path,
    ),
    "--pic-disk-gib": _Flag(
        "Most payload GiB in the disk tier (default 16).", float, check=tier_config.check_gib
    ),
    "--pic-index": _Flag(
        "Redis that servers share the index in: redis://, rediss://, unix://, redis+cluster:// or "
        "rediss+cluster:// (default: each server by itself).",
        check=tier_config.check_url,
    ),
    "--pic-index-password-file": _Flag(
        "File with the password of --pic-index, which keeps it out of the command line.",
        check=tier_config.check_password_file,
    ),
    "--pic-index-deadline-ms": _Flag(
        "Longest a look-up in the shared index may take (default 5).",
        float,
        check=tier_config.check_ms,
    ),
    "--pic-near-entries": _Flag(
        "Most records of the shared index kept in this process (default 200000).",
        int,
        check=tier_config.check_entries,
    ),
    "--pic-shared-path": _Flag(
        "Folder that all servers of --pic-index see; holds shared payloads.",
        check=tier_config.check_path,
    ),
    "--pic-shared-values": _Flag(
        "Keep shared payloads as Redis values, for small deployments.",
        check=_switch,
        is_switch=True,
    ),
    "--pic-shared-gib": _Flag(
        "Most payload GiB of all servers together in the shared tier (default 64).",
        float,
        check=tier_config.check_gib,
    ),
    "--pic-load-stall-ms": _Flag(
        "Longest a request waits for a payload while no byte comes (default 50).",
        float,
        check=tier_config.check_ms,
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
