"""`picctl` without any service: options, formats, documents and prompts, and what a check says."""

from __future__ import annotations

import argparse
import io
import json
import ssl
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.chunk_index.index import NodeView
from sglang_ext.chunk_index.redis_connection import Access, Address, ErrorReply
from sglang_ext.errors import ConfigError
from sglang_ext.scripts import (
    picctl,
    picctl_doctor,
    picctl_reach,
    picctl_redis_checks,
    picctl_top,
    picctl_warm,
)
from sglang_ext.scripts.picctl_options import (
    VARIABLES,
    Options,
    Parser,
    common_parser,
    read_options,
)
from sglang_ext.scripts.picctl_output import (
    Output,
    clean,
    count_of,
    format_bytes,
    format_seconds,
)
from sglang_ext.scripts.picctl_reach import Finding, Level
from sglang_ext.scripts.picctl_server import Sample
from sglang_ext.scripts.picctl_top import Snapshot
from sglang_ext.scripts.picctl_warm import Document, Failed, Life, pack, read_documents
from tests.strategies import node_record

SECRET = "a secret of enough length"


def read(*words: str, env: Mapping[str, str] | None = None) -> Options:
    """The common options of a command line."""
    parser = Parser(prog="picctl", parents=[common_parser()])
    return read_options(parser.parse_args(words), env or {})


def file_with(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


# Options


def test_every_option_may_come_from_its_variable(tmp_path: Path) -> None:
    env = {
        "PICCTL_INDEX": "redis://a",
        "PICCTL_INDEX_PASSWORD_FILE": file_with(tmp_path, "password", "pass word\n"),
        "PICCTL_SECRET_FILE": file_with(tmp_path, "secret", SECRET + "\n"),
        "PICCTL_SHARED_PATH": str(tmp_path),
        "PICCTL_SERVER": "http://host:1/",
        "PICCTL_API_KEY_FILE": file_with(tmp_path, "key", "the key\n"),
    }
    options = read(env=env)
    assert options.index == "redis://a"
    assert options.index_password == "pass word"
    assert options.secret == SECRET.encode()
    assert options.shared_path == tmp_path
    assert options.server == "http://host:1"
    assert options.api_key == "the key"
    assert {path.name for path in options.secret_files} == {"password", "secret", "key"}


def test_help_of_every_command_names_every_variable(capsys: pytest.CaptureFixture[str]) -> None:
    parser = picctl.build_parser()
    actions = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    assert len(actions[0].choices) == 12
    for command in actions[0].choices.values():
        text = " ".join(command.format_help().split())
        for variable in VARIABLES.values():
            assert f"${variable}" in text


def test_the_command_line_comes_before_the_environment(tmp_path: Path) -> None:
    env = {"PICCTL_INDEX": "redis://a", "PICCTL_SHARED_PATH": "/a", "PICCTL_SERVER": "http://a"}
    options = read("--index", "redis://b", "--shared-path", str(tmp_path), env=env)
    assert (options.index, options.shared_path) == ("redis://b", tmp_path)
    assert options.server == "http://a"


def test_a_typed_option_silences_the_variable_of_its_rival() -> None:
    env = {"PICCTL_INDEX": "redis://a", "PICCTL_SHARED_PATH": "/a"}
    options = read("--disk-path", "/b", "--shared-values", env=env)
    assert options.index is None
    assert options.shared_path is None
    assert options.disk_path == Path("/b")
    with pytest.raises(ConfigError, match="PICCTL_DISK_PATH: got it together with PICCTL_INDEX"):
        read(env={**env, "PICCTL_DISK_PATH": "/b"})


def test_a_disk_tier_brings_its_own_secret_unless_another_is_typed(tmp_path: Path) -> None:
    file_with(tmp_path, "secret", "the tier's own secret")
    other = file_with(tmp_path, "other", SECRET)
    env = {"PICCTL_SECRET_FILE": other}
    assert read("--disk-path", str(tmp_path), env=env).secret == b"the tier's own secret"
    words = ("--disk-path", str(tmp_path), "--secret-file", other)
    assert read(*words, env=env).secret == SECRET.encode()
    assert read(env=env).secret == SECRET.encode()


def test_an_empty_variable_is_none_and_an_empty_option_is_refused() -> None:
    assert read(env={"PICCTL_INDEX": ""}).index is None
    with pytest.raises(ConfigError, match="--namespace: got ''"):
        read("--namespace", "")


def test_options_do_not_show_secrets(tmp_path: Path) -> None:
    words = ("--index", "redis://:hush@a", "--secret-file", file_with(tmp_path, "s", SECRET))
    words += ("--api-key-file", file_with(tmp_path, "k", "hush-hush"))
    shown = repr(read(*words))
    assert "hush" not in shown
    assert SECRET not in shown


def test_a_namespace_is_named_by_the_secret_alone(tmp_path: Path) -> None:
    options = read("--secret-file", file_with(tmp_path, "s", SECRET))
    assert options.owner() == options.owner("default") != options.owner("acme")
    with pytest.raises(ConfigError, match="--secret-file: got nothing"):
        read().owner()


# Output


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(None, "-"), (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 29, "2.5 GiB")],
)
def test_sizes_have_the_unit_that_fits(num_bytes: int | None, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.4, "0 s"), (59, "59 s"), (90, "1.5 min"), (7200, "2.0 h"), (172800, "2.0 d")],
)
def test_times_have_the_unit_that_fits(seconds: float | None, text: str) -> None:
    assert format_seconds(seconds) == text


def test_counts_have_a_plural() -> None:
    assert [count_of(1, "entry", "entries"), count_of(2, "file")] == ["1 entry", "2 files"]


@given(st.text(st.characters(exclude_categories=())))
def test_cleaned_text_can_be_printed_and_encoded(text: str) -> None:
    cleaned = clean(text)
    assert cleaned.isprintable()
    cleaned.encode()
    assert not text.isprintable() or cleaned == text


def test_with_json_there_is_the_document_and_nothing_else() -> None:
    out, err = io.StringIO(), io.StringIO()
    output = Output(out, err, is_json=True)
    output.note("a note")
    with output.progress("work", 3) as advance:
        advance()
    output.result({"doc": "ü\ud800"}, lambda console: console.print("text"))
    assert json.loads(out.getvalue()) == {"doc": "ü\ud800"}
    assert err.getvalue() == ""


def test_for_people_there_is_text_and_notes_go_elsewhere() -> None:
    out, err = io.StringIO(), io.StringIO()
    output = Output(out, err, is_json=False)
    output.note("a [bold]note[/bold]")
    output.result({}, lambda console: console.print("text"))
    output.failure("why\nit failed")
    assert out.getvalue() == "text\n"
    assert err.getvalue() == "a [bold]note[/bold]\npicctl: why it failed\n"


# Rates


def test_rates_are_of_what_is_new_since_the_look_before() -> None:
    def snapshot(taken_s: float, found: int, **num_hits: int) -> Snapshot:
        views = [NodeView(node_record(name), None, hits) for name, hits in num_hits.items()]
        labels = {"tier": "host", "result": "hit"}
        samples = (
            Sample("sglang_pic_segments_total", labels, found),
            Sample("sglang_pic_segments_total", {**labels, "result": "miss"}, 10),
        )
        hits_of = {view.record.key: view.num_hits for view in views}
        return Snapshot(taken_s, hits_of, tuple(views), {}, samples)

    before, now = snapshot(10.0, 90, a=4, b=7), snapshot(12.0, 95, a=9, b=1, c=50)
    document = picctl_top._snapshot_document(now, before, {})
    assert document["hits_per_s"] == 2.5  # `b` was replaced, `c` is new: neither is known to be hit
    assert [node["new_hits"] for node in document["hottest"]] == [5, 0, 0]
    assert document["hit_rates"] == {"host": 1.0}
    first = picctl_top._snapshot_document(before, None, {})
    assert (first["hits_per_s"], first["hit_rates"]) == (None, {"host": 0.9})


# Documents and prompts

LIVES = (Life(), Life(doc_ids=("a",)), Life(ttl_s=5.0))


@given(
    st.lists(st.tuples(st.text("ab ", min_size=1, max_size=30), st.sampled_from(LIVES))),
    st.integers(1, 60),
)
def test_packing_keeps_order_and_lives_apart_and_bounds_prompts(
    documents: list[tuple[str, Life]], max_chars: int
) -> None:
    given_ = [Document(str(i), text, life) for i, (text, life) in enumerate(documents)]
    batches = list(pack(given_, max_chars))
    assert [document for batch in batches for document in batch] == given_
    for batch in batches:
        assert len({document.life for document in batch}) == 1
        assert len(batch) == 1 or sum(len(each.text) for each in batch) <= max_chars
    for batch, after in pairwise(batches):
        if batch[0].life == after[0].life:
            assert sum(len(each.text) for each in batch) + len(after[0].text) > max_chars


def test_a_prompt_has_a_bounded_number_of_documents() -> None:
    documents = [Document(str(number), "a") for number in range(130)]
    assert [len(batch) for batch in pack(documents, 1000)] == [64, 64, 2]


def test_texts_are_taken_to_the_letter_and_in_order(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("with its end\n")
    (tmp_path / "sub" / "a.md").write_text(" ü ")
    (tmp_path / "c.rst").write_text("another kind")
    (tmp_path / "e.txt").write_text("")
    (tmp_path / "f.txt").write_bytes(b"\xff")
    found = list(read_documents([tmp_path], name_files=True))
    assert found[0] == Document(str(tmp_path / "b.txt"), "with its end\n", Life(doc_ids=("b.txt",)))
    empty, binary = found[1:3]
    assert isinstance(empty, Failed)
    assert empty.reason == "it is empty"
    assert isinstance(binary, Failed)
    assert found[3] == Document(str(tmp_path / "sub" / "a.md"), " ü ", Life(doc_ids=("sub/a.md",)))
    assert len(found) == 4
    single = list(read_documents([tmp_path / "c.rst"], name_files=False))
    assert single == [Document(str(tmp_path / "c.rst"), "another kind")]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": 1}', "text: expected a string that is not empty"),
        (b'{"text": "a", "doc_id": ""}', "doc_id: expected a string that is not empty, or a list"),
        (b'{"text": "a", "doc_id": [1]}', "doc_id: expected a string that is not empty, or a list"),
        (b'{"text": "a", "ttl_s": true}', "ttl_s: expected seconds above 0"),
        (b'{"text": "a", "pin": 1}', "pin: expected true or false"),
        (b"\xff", "no JSON"),
    ],
)
def test_a_wrong_line_says_what_is_expected(line: bytes, reason: str) -> None:
    failed = picctl_warm._read_line(line, "docs.jsonl:1")
    assert isinstance(failed, Failed)
    assert failed.reason.startswith(reason)


# Checks


def found(finding: Finding) -> tuple[str, str]:
    return finding.level.value, finding.message


@pytest.mark.parametrize(
    ("info", "level"),
    [
        ({"redis_version": "7.0.15"}, Level.OK),
        ({"redis_version": "6.2.0"}, Level.OK),
        ({"redis_version": "6.0.16"}, Level.ERROR),
        ({"redis_version": "255.255.255"}, Level.OK),
        ({"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "8.1.0"}, Level.OK),
        ({}, Level.ERROR),
    ],
)
def test_old_versions_are_refused_and_valkey_is_known(info: dict[str, str], level: Level) -> None:
    finding = picctl_redis_checks.check_version(info)
    assert finding.level is level
    assert ("Valkey 8.1.0" in finding.message) is ("valkey_version" in info)


@pytest.mark.parametrize(
    ("skew_ms", "level", "message"),
    [
        (0, "ok", "within 1 s"),
        (1_000, "ok", "within 1 s"),
        (-1_001, "warn", "Redis is 1.0 s behind"),
        (60_000, "warn", "Redis is 60.0 s ahead"),
        (60_001, "error", "Redis is 60.0 s ahead"),
        (-3_600_000, "error", "Redis is 3600.0 s behind"),
    ],
)
def test_clocks_may_differ_by_a_second(skew_ms: int, level: str, message: str) -> None:
    now_ms = 1_800_000_000_000
    got_level, got_message = found(picctl_redis_checks.check_clock(now_ms + skew_ms, now_ms))
    assert got_level == level
    assert message in got_message


@pytest.mark.parametrize(
    ("info", "level"),
    [
        ({"maxmemory": "0", "used_memory": "5"}, "warn"),
        ({"maxmemory": "1000", "used_memory": "900"}, "ok"),
        ({"maxmemory": "1000", "used_memory": "901"}, "warn"),
    ],
)
def test_memory_has_a_limit_and_room(info: dict[str, str], level: str) -> None:
    assert found(picctl_redis_checks.check_memory(info))[0] == level


@pytest.mark.parametrize(
    ("info", "level"),
    [
        ({"role": "master"}, "ok"),
        ({"role": "slave"}, "error"),
        ({"role": "slave", "cluster_enabled": "1"}, "ok"),
        ({"role": "master", "loading": "1"}, "warn"),
        ({"role": "master", "rdb_last_bgsave_status": "err"}, "warn"),
    ],
)
def test_a_server_must_take_writes(info: dict[str, str], level: str) -> None:
    assert found(picctl_redis_checks.check_role(info))[0] == level


@pytest.mark.parametrize(
    ("state", "level"),
    [
        ({"cluster_state": "ok", "cluster_slots_ok": "16384"}, "ok"),
        ({"cluster_state": "ok", "cluster_slots_ok": "16000"}, "error"),
        ({"cluster_state": "fail", "cluster_slots_ok": "16384"}, "error"),
    ],
)
def test_a_cluster_must_serve_every_slot(state: dict[str, str], level: str) -> None:
    assert found(picctl_redis_checks.check_slots(state))[0] == level


def test_redis_evicting_by_itself_is_noticed() -> None:
    assert found(picctl_redis_checks.check_evictions({"evicted_keys": "0"}))[0] == "ok"
    assert found(picctl_redis_checks.check_evictions({"evicted_keys": "7"}))[0] == "warn"


@pytest.mark.parametrize(
    ("exc", "check", "message", "hint"),
    [
        (ErrorReply("NOAUTH Authentication required."), "auth", "wants a password", "--index-pass"),
        (ErrorReply("WRONGPASS invalid pair"), "auth", "refuses user", "--index-password-file"),
        (ErrorReply("ERR AUTH <password> called without any"), "auth", "has no password", "leave"),
        (ErrorReply("ERR DB index is out of range"), "connection", "DB index", "slash"),
        (ErrorReply("NOPERM no permissions to run 'select'"), "permissions", "select", "ACL"),
        (ErrorReply("LOADING is loading"), "connection", "LOADING", "log"),
        (ConnectionRefusedError(), "connection", "refuses connections", "host and port"),
        (PermissionError(), "connection", "no permission", "unixsocketperm"),
        (TimeoutError(), "connection", "does not answer in 3 s", "firewalls"),
        (ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER]"), "tls", "does not speak TLS", "redis://"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_each_refusal_has_a_name_and_a_hint(
    exc: Exception, check: str, message: str, hint: str
) -> None:
    finding = picctl_reach.explain(Address("host", 1), Access(), (), exc, 3.0)
    assert (finding.level, finding.check) == (Level.ERROR, check)
    assert message in finding.message
    assert hint in finding.hint


@pytest.mark.parametrize(
    ("reasons", "has_secret", "levels"),
    [
        ([], True, ["info"]),
        ([None, None], True, ["ok"]),
        (["forged", "forged"], True, ["error"]),
        (["forged", None], True, ["warn"]),
        (["absent", "absent"], True, ["error"]),
        (["absent", "damaged", None], True, ["warn", "warn"]),
        (["damaged", "damaged"], False, ["info"]),
    ],
)
def test_a_sample_of_payloads_tells_how_bad_it_is(
    reasons: list[str | None], has_secret: bool, levels: list[str]
) -> None:
    findings = picctl_doctor.check_payloads(reasons, has_secret)
    assert [finding.level.value for finding in findings] == levels


@pytest.mark.parametrize(
    ("is_known", "has_entries", "level"),
    [(True, True, "ok"), (False, True, "warn"), (False, False, "info")],
)
def test_a_namespace_without_entries_is_only_strange_in_a_full_index(
    is_known: bool, has_entries: bool, level: str
) -> None:
    assert found(picctl_doctor.check_owner("default", is_known, has_entries))[0] == level


def test_a_folder_without_room_for_its_budget_is_noticed(tmp_path: Path) -> None:
    assert found(picctl_doctor.check_folder("shared", tmp_path, None)[0])[0] == "ok"
    level, message = found(picctl_doctor.check_folder("shared", tmp_path, 1 << 60)[0])
    assert level == "warn"
    assert "less than the budget of 1048576.0 TiB" in message
    level, message = found(picctl_doctor.check_folder("disk", tmp_path / "none", None)[0])
    assert (level, "is no folder" in message) == ("error", True)


@pytest.mark.parametrize(("mode", "level"), [(0o600, "ok"), (0o400, "ok"), (0o640, "warn")])
def test_secret_files_must_be_closed_to_others(tmp_path: Path, mode: int, level: str) -> None:
    path = Path(file_with(tmp_path, "secret", SECRET))
    path.chmod(mode)
    (finding,) = picctl_doctor.check_secret_files([path])
    assert finding.level.value == level


def test_lost_payloads_in_a_servers_metrics_are_noticed() -> None:
    def sample(name: str, value: float, **labels: str) -> Sample:
        return Sample(f"sglang_pic_{name}", labels, value)

    samples = [sample("active", 1), sample("load_failures_total", 2, reason="absent")]
    findings = {each.check: each.level for each in picctl_doctor.check_metrics(samples)}
    assert findings == {"pic": Level.OK, "load failures": Level.WARN}


def test_what_info_says_is_read_by_name() -> None:
    reply: Any = b"# Server\r\nredis_version:7.0.15\r\nexecutable:/a:b\r\n\r\n# Memory\r\nx:1\r\n"
    assert picctl_redis_checks.parse_info(reply) == {
        "redis_version": "7.0.15",
        "executable": "/a:b",
        "x": "1",
    }
