"""The pages say what the code does: flags, request keys, Redis keys, rights, numbers and links."""

from __future__ import annotations

import argparse
import inspect
import re
import shlex
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

import pytest

from sglang_ext import tiers
from sglang_ext.chunk_index import commands, keys
from sglang_ext.chunk_index.cache import TransferLimits
from sglang_ext.chunk_index.identity import KEY_BYTES, ChunkKey
from sglang_ext.chunk_index.near_index import NearIndex
from sglang_ext.chunk_index.redis_scripts import Scripts
from sglang_ext.chunk_index.redis_store import MAX_VALUE_BYTES
from sglang_ext.chunk_index.tier import REFUSALS
from sglang_ext.config import add_arguments
from sglang_ext.errors import PayloadLost, RequestError
from sglang_ext.report import Reason
from sglang_ext.request import RequestOptions, parse_options
from sglang_ext.scripts.picctl import build_parser
from sglang_ext.tier_config import IndexConfig, SharedConfig
from tests.redis_server import ACL_RULES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *sorted(DOCS.glob("*.md")),
    *(ROOT / name for name in ("README.md", "CHANGELOG.md")),
    *(path for path in ROOT.glob("*/README.md") if not path.parent.is_symlink()),
    ROOT / "chunk_index/lua/README.md",
]
NO_KEYS = {"pic_cpu", "pic_gen", "pic_report"}
"""Names in our pages that begin as request keys do."""

KEY = ChunkKey(bytes(KEY_BYTES))
REDIS_KEYS = {
    "node_key": keys.node_key(KEY),
    "value_key": keys.value_key(KEY, 1),
    "queue_key": keys.queue_key(0, "me"),
    "kept_key": keys.kept_key(0, "me"),
    "document_key": keys.document_key(0, "me", "handbook"),
    "expiry_key": keys.expiry_key(0),
    "owners_key": keys.owners_key(0),
    "models_key": keys.models_key(0),
    "totals_key": keys.totals_key(0),
    "account_key": keys.account_key("me"),
    "reservations_key": keys.reservations_key("me"),
}
"""An example of each kind, by the function that names it."""

OPTION_WORDS = {"COUNT", "MATCH", "MAXLEN", "SLOTS", "WITHSCORES"}
"""Words of commands that are no commands themselves."""


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def rows(text: str) -> list[list[str]]:
    """The cells of every table row."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def section(text: str, title: str) -> str:
    """What stands below a heading of the second level."""
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def flat(text: str) -> str:
    return " ".join(text.split())


def flag_helps() -> dict[str, str]:
    """Every flag of ours with its help."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    actions = [action for action in parser._actions if action.dest != "help"]
    return {action.option_strings[0]: action.help or "" for action in actions}


def request_keys() -> set[str]:
    """Every key a request may give, as the refusal of another one tells."""
    with pytest.raises(RequestError) as refusal:
        parse_options({"pic_nonsense": 1}, RequestOptions())
    return set(refusal.value.expected.removeprefix("one of ").split(", "))


def key_rows() -> dict[str, list[str]]:
    """The row of each request key in the table of keys."""
    text = read("requests.md").split("\n## ", 1)[0]
    return {
        name: row for row in rows(text) for name in re.findall(r"`(pic\w*)`", row[0] if row else "")
    }


def test_every_flag_stands_in_the_table_of_flags() -> None:
    told = set(re.findall(r"`(--[\w-]+)`", section(read("requests.md"), "Server flags")))
    assert told == flag_helps().keys()


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_no_page_names_a_flag_that_is_not_there(path: Path) -> None:
    named = re.findall(r"--pic(?:-[a-z]+)+", path.read_text(encoding="utf-8"))
    assert set(named) <= flag_helps().keys()


def flag_defaults() -> dict[str, str]:
    """Every flag whose help tells a default, with it."""
    found = {
        flag: re.search(r"\(default '?([\w.]+)'?\)", text) for flag, text in flag_helps().items()
    }
    return {flag: default[1] for flag, default in found.items() if default is not None}


@pytest.mark.parametrize(("flag", "default"), flag_defaults().items())
def test_a_default_is_told_as_the_flag_itself_tells_it(flag: str, default: str) -> None:
    key = flag.removeprefix("--").replace("-", "_")
    table = rows(section(read("requests.md"), "Server flags"))
    row = key_rows().get(key) or next(row for row in table if f"`{flag}`" in row[0])
    assert re.search(rf"(?<![\w.]){re.escape(default)}(?![\w.])", row[2])


def test_every_request_key_stands_in_the_table_of_keys() -> None:
    assert key_rows().keys() == request_keys()


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_no_page_names_a_key_that_is_not_there(path: Path) -> None:
    options = {flag.removeprefix("--").replace("-", "_") for flag in flag_helps()}
    named = set(re.findall(r"(?<![\w/])pic_[a-z_]*[a-z]", path.read_text(encoding="utf-8")))
    assert named <= request_keys() | options | NO_KEYS | {reason.value for reason in Reason}


def test_every_reason_why_a_segment_is_not_kept_is_told() -> None:
    table = rows(section(read("reasons.md"), "Segments that are not kept"))
    assert {row[0] for row in table[2:]} == {f"`{refusal}`" for refusal in REFUSALS}


def test_every_reason_why_a_payload_is_lost_is_told() -> None:
    words = set(re.findall(r"`(\w+)`", PayloadLost.__doc__ or "")) - {"reason"}
    table = rows(section(read("reasons.md"), "Payloads that are lost"))
    told = {word for row in table[2:] for word in re.findall(r"`(\w+)`", row[0])}
    assert told == words


def test_the_redis_page_is_the_docstring_of_the_keys() -> None:
    assert (keys.__doc__ or "").strip() in read("redis.md"), (
        "copy the docstring of chunk_index/keys.py into docs/redis.md as it is"
    )


def test_the_redis_page_names_every_key() -> None:
    named = {name for name, made in vars(keys).items() if name.endswith("_key") and callable(made)}
    assert REDIS_KEYS.keys() == named
    constants = {
        made
        for made in vars(keys).values()
        if isinstance(made, bytes) and made.startswith(keys.PREFIX) and made != keys.PREFIX
    }
    text = read("redis.md")
    told = {_form(word) for word in re.findall(r"^ *(pic1:\S+)", text, re.MULTILINE)}
    for key in {*REDIS_KEYS.values(), *constants, commands.LOG}:
        assert _form(key.decode("latin-1")) in told


def _form(name: str) -> str:
    """What a key looks like: its braces without a shard or an owner, and the letter behind."""
    name = re.sub(r"\{(T|[0-9a-f]{2})\}", "{}", name)
    name = re.sub(r"\{a:[^}]*\}", "{a:}", name)
    return re.sub(r"(\{\}:[nvqkd]):.*", r"\1", name, flags=re.DOTALL)


def test_the_redis_page_tells_every_lifetime() -> None:
    told = {row[0].strip("`"): row[1] for row in rows(section(read("redis.md"), "Lifetimes"))[2:]}
    lifetimes = {name: made for name, made in vars(keys).items() if name.endswith("_S")}
    assert told == {name: str(seconds) for name, seconds in lifetimes.items()}


def test_the_redis_page_names_every_script() -> None:
    table = rows(section(read("redis.md"), "Scripts"))[2:]
    told = [name for row in table for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(told) == sorted(field.name for field in fields(Scripts))


def documented_rights() -> list[str]:
    rule = re.search(r"```\nuser (.*?)```", read("sharing.md"), re.DOTALL)
    assert rule is not None, "sharing.md shows a user of Redis"
    return rule[1].split()


def test_a_user_with_the_documented_rights_may_do_what_servers_do_and_no_more() -> None:
    rights = documented_rights()
    assert {right for right in rights if right[0] in "~&-"} == {"~pic1:*", "&pic1:changes", "-@all"}
    allowed = {right[1:].partition("|")[0].upper() for right in rights if right[0] == "+"}
    assert allowed == {"AUTH", "SELECT", *sent_commands()}  # redis-py's greeting, and ours


def sent_commands() -> Iterable[str]:
    """Every command that modules send or scripts call."""
    folder = ROOT / "chunk_index"
    for path in (folder / "commands.py", folder / "refill.py", *folder.glob("redis_*.py")):
        words = re.findall(r"\"([A-Z]{3,})\"(?=[,)])", path.read_text(encoding="utf-8"))
        yield from set(words) - OPTION_WORDS
    for path in (folder / "lua").glob("*.lua"):
        yield from re.findall(r"call\('([A-Z]+)'", path.read_text(encoding="utf-8"))


def test_the_rights_that_tests_run_with_are_documented() -> None:
    assert set(ACL_RULES) - {"on"} <= set(documented_rights())


def test_the_numbers_on_the_page_of_sharing_are_those_of_the_code() -> None:
    text = flat(read("sharing.md"))
    limits, index, shared = TransferLimits(), IndexConfig(), SharedConfig("redis://")
    near = inspect.signature(NearIndex.__init__).parameters
    assert (near["positive_ms"].default, near["negative_ms"].default) == (60_000, 2_000)
    assert (tiers.MEASURE_S, tiers.FOLLOW_S, tiers.ORPHAN_S) == (60, 1, 3600)
    for said in (
        f"`--pic-index-deadline-ms` ({shared.deadline_ms:g})",
        "Records are trusted for a minute, absences for two seconds",
        "are measured on the tier, at start, every minute",
        f"after {limits.lookup_ms:g} ms, if the shared index has not answered",
        f"({limits.unknown_ms:g} ms before that is known)",
        f"`--pic-load-stall-ms` ({index.stall_ms:g})",
        f"writes wait up to {limits.write_bytes >> 20} MiB a tier",
        f"at most {MAX_VALUE_BYTES >> 20} MiB each",
        "removed an hour after they were written",
        "other servers follow within about a second",
        f"about {commands.MAX_ENTRIES:,} commands",
    ):
        assert said in text


def test_commands_of_picctl_in_our_pages_are_understood() -> None:
    parser = build_parser()
    lines = re.findall(r"^picctl .*", read("sharing.md"), re.MULTILINE)
    assert lines
    for line in lines:
        parser.parse_args(shlex.split(line)[1:])
    (actions,) = [each for each in parser._actions if each.dest == "command"]
    named = {
        word
        for path in PAGES
        for word in re.findall(r"`picctl ([a-z]+)", path.read_text(encoding="utf-8"))
    }
    assert named <= set(actions.choices or ())


def test_every_target_of_make_in_our_pages_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = {
        word
        for path in PAGES
        for word in re.findall(r"(?:^|`)make ([a-z-]+)", path.read_text(encoding="utf-8"), re.M)
    }
    assert named <= targets


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)]+)\)", text):
        name, _, anchor = link.partition("#")
        if "://" in name:
            continue
        target = path.parent / name if name else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def anchors(path: Path) -> set[str]:
    """The anchors GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.*)", path.read_text(encoding="utf-8"), re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {word.replace(" ", "-") for word in words}


def test_the_index_names_every_page() -> None:
    named = set(re.findall(r"\]\(([\w-]+\.md)\)", read("index.md")))
    assert {path.name for path in DOCS.glob("*.md")} - {"index.md"} <= named


def test_the_map_of_the_chunk_index_names_every_module() -> None:
    folder = ROOT / "chunk_index"
    table = rows((folder / "README.md").read_text(encoding="utf-8"))
    named = [name for row in table for name in re.findall(r"`(\w+\.py)`", row[0])]
    modules = sorted(path.name for path in folder.glob("*.py") if path.name != "__init__.py")
    assert sorted(named) == modules
