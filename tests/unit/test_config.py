"""Start-up options: flags and keyword arguments into one ExtConfig."""

from __future__ import annotations

import argparse
import pickle
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.config import ExtConfig, add_arguments, config_from_args
from sglang_ext.errors import ConfigError
from sglang_ext.recompute.selection import Allocation, SelectionParams
from sglang_ext.request import RequestOptions
from sglang_ext.tier_config import MIB, IndexConfig

SECRET = b"s" * 32

# flag, text on the command line, value as a keyword argument, where it lands, as what
FLAGS: list[tuple[str, str, Any, str, Any]] = [
    ("--pic-delimiter", "<|chunk|>", "<|chunk|>", "defaults.delimiter", "<|chunk|>"),
    ("--pic-strategy", "epic", "epic", "defaults.strategy", "epic"),
    ("--pic-n-avg", "8", 8, "defaults.selection.n_avg", 8),
    ("--pic-n-avg", "0", 0, "defaults.selection.n_avg", 0),
    ("--pic-alloc", "exp", "exp", "defaults.selection.alloc", Allocation.EXP),
    ("--pic-alloc-ratio", "0.25", 0.25, "defaults.selection.alloc_ratio", 0.25),
    ("--pic-max-share", "1", 1.0, "defaults.selection.max_share", 1.0),
    ("--pic-warmup", "4", 4, "defaults.layerwise.warmup", 4),
    ("--pic-probe", "2", 2, "defaults.layerwise.probe", 2),
    ("--pic-coverage", "0.05", 0.05, "defaults.layerwise.coverage", 0.05),
    ("--pic-shadow-share", "0.02", 0.02, "shadow_share", 0.02),
    ("--pic-shadow-limit", "1", 1, "shadow_limit", 1.0),
    ("--pic-namespace", "team a", "team a", "defaults.namespace", "team a"),
    ("--pic-segment-len", "64", 64, "index.segment_len", 64),
    ("--pic-arena-mib", "0.5", 0.5, "index.arena_bytes", MIB // 2),
    ("--pic-verify", "always", "always", "index.verify", "always"),
    ("--pic-ttl-s", "90", 90.0, "defaults.ttl_s", 90.0),
    ("--pic-shared-pool", "common", "common", "index.pool", "common"),
    ("--pic-load-stall-ms", "80", 80.0, "index.stall_ms", 80.0),
    ("--pic-quota", "a=1,b=0.5", "a=1,b=0.5", "index.quotas", {"a": MIB, "b": MIB // 2}),
    ("--pic-strict", "", True, "is_strict", True),
    ("--pic-allow-untested-sglang", "", True, "allows_untested_sglang", True),
]
TIER_FLAGS = {
    "--pic-disk-path",
    "--pic-disk-gib",
    "--pic-index",
    "--pic-index-password-file",
    "--pic-index-deadline-ms",
    "--pic-near-entries",
    "--pic-secret-file",
    "--pic-shared-path",
    "--pic-shared-values",
    "--pic-shared-gib",
}
"""Those that need one another or a file; see `test_tier_config`."""

FLAG_IDS = [f"{flag}={text}" if text else flag for flag, text, *_ in FLAGS]

WRONG: list[tuple[str, Any]] = [
    ("pic_delimiter", ""),
    ("pic_delimiter", 3),
    ("pic_strategy", "best"),
    ("pic_n_avg", -1),
    ("pic_n_avg", 8.0),
    ("pic_n_avg", True),
    ("pic_n_avg", False),
    ("pic_alloc", "cubic"),
    ("pic_alloc_ratio", 1.0),
    ("pic_max_share", 0.0),
    ("pic_warmup", -1),
    ("pic_probe", 1025),
    ("pic_coverage", 1.1),
    ("pic_shadow_share", 1.5),
    ("pic_shadow_share", True),
    ("pic_shadow_limit", 0),
    ("pic_max_share", float("nan")),
    ("pic_namespace", ""),
    ("pic_segment_len", 0),
    ("pic_segment_len", 65537),
    ("pic_segment_len", 64.0),
    ("pic_segment_len", True),
    ("pic_arena_mib", 0),
    ("pic_arena_mib", -1.0),
    ("pic_arena_mib", float("nan")),
    ("pic_arena_mib", float("inf")),
    ("pic_arena_mib", "2048"),
    ("pic_verify", "sometimes"),
    ("pic_ttl_s", 0),
    ("pic_shared_pool", ""),
    ("pic_load_stall_ms", 0),
    ("pic_load_stall_ms", 60_001.0),
    ("pic_strict", "no"),
    ("pic_allow_untested_sglang", "no"),
]


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--model-path")
    add_arguments(parser)
    return parser.parse_args(arguments)


def read(config: ExtConfig, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def without_secret(config: ExtConfig | None) -> ExtConfig:
    """The same configuration with a fixed secret, so that two of them can be equal."""
    assert config is not None
    return replace(config, index=replace(config.index, secret=SECRET))


def test_without_the_flag_there_is_no_configuration() -> None:
    assert config_from_args(parse()) is None
    assert config_from_args({}) is None
    assert config_from_args({"enable_pic": False}) is None


def test_the_flag_alone_gives_the_documented_defaults() -> None:
    config = without_secret(config_from_args(parse("--enable-pic")))
    assert config == ExtConfig(
        defaults=RequestOptions(
            is_enabled=True,
            delimiter=None,
            strategy="daric",
            selection=SelectionParams(32, Allocation.LINEAR, 0.1, 0.25),
            namespace="default",
        ),
        index=IndexConfig(256, 2048 * MIB, "first", SECRET),
        is_strict=False,
        allows_untested_sglang=False,
    )


@pytest.mark.parametrize(("flag", "text", "value", "path", "expected"), FLAGS, ids=FLAG_IDS)
def test_a_flag_sets_its_field_and_no_other(
    flag: str, text: str, value: Any, path: str, expected: Any
) -> None:
    config = without_secret(config_from_args(parse("--enable-pic", flag, *filter(None, [text]))))
    got = read(config, path)
    assert got == expected
    assert type(got) is type(expected)
    plain = without_secret(config_from_args({"enable_pic": True}))
    differing = {
        name
        for name in all_paths(plain)
        if read(config, name) != read(plain, name) and name != path
    }
    assert not differing


def all_paths(config: Any, prefix: str = "") -> list[str]:
    """Dotted names of all plain values in a configuration."""
    paths: list[str] = []
    for entry in fields(config):
        value, name = getattr(config, entry.name), prefix + entry.name
        nested = hasattr(value, "__dataclass_fields__")
        paths += all_paths(value, name + ".") if nested else [name]
    return paths


@pytest.mark.parametrize(("flag", "text", "value", "path", "expected"), FLAGS, ids=FLAG_IDS)
def test_a_keyword_argument_means_what_its_flag_means(
    flag: str, text: str, value: Any, path: str, expected: Any
) -> None:
    name = flag.removeprefix("--").replace("-", "_")
    by_flag = config_from_args(parse("--enable-pic", flag, *filter(None, [text])))
    by_keyword = config_from_args({"enable_pic": True, name: value})
    assert without_secret(by_flag) == without_secret(by_keyword)


def test_every_flag_is_in_the_table_above() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    ours = {action.option_strings[0]: action for action in parser._actions}
    assert set(ours) - {"-h", "--enable-pic"} == TIER_FLAGS | {flag for flag, *_ in FLAGS}
    assert all(action.help for action in ours.values())


def test_arguments_of_sglang_are_not_ours_to_judge() -> None:
    config = config_from_args(parse("--enable-pic", "--model-path", "x"))
    assert config is not None


@pytest.mark.parametrize(("flag", "text"), [(flag, text) for flag, text, *_ in FLAGS], ids=FLAG_IDS)
def test_an_option_without_enable_pic_is_refused_by_its_flag(flag: str, text: str) -> None:
    message = f"{flag}: given without --enable-pic, which turns it on"
    with pytest.raises(ConfigError, match=f"^{message}$"):
        config_from_args(parse(flag, *filter(None, [text])))


@pytest.mark.parametrize("is_on", [True, False])
def test_an_unknown_pic_option_is_refused_by_name(is_on: bool) -> None:
    with pytest.raises(
        ConfigError, match=r"^pic_navg: unknown option, expected one of .*pic_n_avg"
    ):
        config_from_args({"enable_pic": is_on, "pic_navg": 3})


@pytest.mark.parametrize(("name", "value"), WRONG, ids=[f"{name}={v!r}" for name, v in WRONG])
def test_a_wrong_value_is_refused_by_flag_value_and_expectation(name: str, value: Any) -> None:
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ConfigError) as caught:
        config_from_args({"enable_pic": True, name: value})
    message = str(caught.value)
    assert message.startswith(f"{flag}: got {value!r}, expected ")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "value"), [("pic_strategy", "my_own_strategy"), ("pic_namespace", "_" * 300)]
)
def test_a_refused_value_is_shown_as_it_was_given(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_args({"enable_pic": True, name: value})
    assert f"got {value!r}" in str(caught.value)


@pytest.mark.parametrize("flag", ["--pic-n-avg", "--pic-arena-mib", "--pic-segment-len"])
def test_text_where_a_number_belongs_is_refused_by_the_parser(flag: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=r"invalid (int|float) value"):
        parse("--enable-pic", flag, "many")


def test_the_secret_differs_per_server_and_is_never_shown() -> None:
    first, second = (config_from_args({"enable_pic": True}) for _ in range(2))
    assert first is not None
    assert second is not None
    assert len(first.index.secret) == 32
    assert first.index.secret != second.index.secret
    assert "secret" not in repr(first)
    assert repr(first.index.secret) not in repr(first)
    assert repr(first) == repr(second)


def test_a_configuration_survives_the_way_to_the_scheduler() -> None:
    config = config_from_args({"enable_pic": True, "pic_n_avg": 5, "pic_verify": "never"})
    assert config is not None
    assert pickle.loads(pickle.dumps(config)) == config


@given(st.sets(st.sampled_from(range(len(FLAGS)))), st.randoms(use_true_random=False))
def test_flags_work_together_in_any_order(chosen: set[int], random: Any) -> None:
    rows = [FLAGS[index] for index in chosen]
    random.shuffle(rows)
    latest = {flag: (text, value, path, expected) for flag, text, value, path, expected in rows}
    arguments = [part for flag, (text, *_) in latest.items() for part in (flag, text) if part != ""]
    keywords = {
        flag.removeprefix("--").replace("-", "_"): value for flag, (_, value, *_) in latest.items()
    }
    config = without_secret(config_from_args(parse("--enable-pic", *arguments)))
    assert config == without_secret(config_from_args({"enable_pic": True, **keywords}))
    for _, _, path, expected in latest.values():
        assert read(config, path) == expected
