"""`picctl` on real Redis servers and real folders: what it finds, changes, repairs and refuses."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.chunk_index.commands import Clear, Command, CommandLog, Invalidate, Pin, Unpin
from sglang_ext.chunk_index.file_store import FileStore
from sglang_ext.chunk_index.identity import mac_key
from sglang_ext.chunk_index.index import NodeRecord
from sglang_ext.chunk_index.keys import value_key
from sglang_ext.chunk_index.redis_index import RedisIndex
from sglang_ext.chunk_index.redis_link import RedisLink
from sglang_ext.chunk_index.redis_store import RedisStore
from sglang_ext.scripts import picctl
from tests.blobs import BytesCodec
from tests.picctl_data import (
    ACME,
    DEFAULT,
    MODEL,
    NUM_RECORDS,
    NUM_SEGMENTS,
    OLD,
    OLD_MODEL,
    OTHER_SECRET,
    PAYLOAD_BYTES,
    SECRET,
    all_records,
    make_store,
    now_ms,
    payload_of,
    publish_all,
    put_all,
    records_of,
)
from tests.redis_server import (
    ACL_RULES,
    ACL_USER,
    PASSWORD,
    QUOTED_PASSWORD,
    RedisServer,
    free_port,
    make_tls_files,
    open_link,
    redis_cluster,
    redis_server,
)

pytestmark = pytest.mark.redis


@dataclass(frozen=True)
class Done:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one document."""
        return json.loads(self.out)


Run = Callable[..., Done]


@dataclass(frozen=True)
class World:
    """A populated shared index with its payloads."""

    server: RedisServer
    link: RedisLink
    index: RedisIndex
    log: CommandLog
    folder: Path
    store: FileStore[Any]
    records: Sequence[NodeRecord]
    environment: dict[str, str]

    def read_log(self, after: str) -> tuple[Command, ...]:
        """What was posted since."""
        return self.log.read(after, limit=100).commands

    def present(self) -> set[bytes]:
        """The keys in the index."""
        return {view.record.key for view in self.index.scan()}

    def kept(self) -> set[bytes]:
        """The keys of all readable payloads."""
        return {record.key for record in self.store.records()}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `picctl` in this process; `env` is the whole environment it sees."""

    def run(*words: object, env: dict[str, str] | None = None) -> Done:
        capsys.readouterr()
        code = picctl.main([str(word) for word in words], env or {})
        out, err = capsys.readouterr()
        return Done(code, out, err)

    return run


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[NodeRecord]]:
    """A folder with all payloads, to be copied, and their records."""
    folder, records = tmp_path_factory.mktemp("written"), all_records(now_ms())
    put_all(make_store(folder), records)
    return folder, records


@pytest.fixture
def world(
    server: RedisServer, tmp_path: Path, written: tuple[Path, list[NodeRecord]]
) -> Iterator[World]:
    server.cli("FLUSHALL")
    (secret := tmp_path / "secret").write_text(SECRET + "\n")
    secret.chmod(0o600)
    source, records = written
    shutil.copytree(source, tmp_path / "payloads")
    store = make_store(tmp_path / "payloads")
    with open_link(server.url) as link:
        index = RedisIndex(link)
        publish_all(index, records)
        environment = {
            "PICCTL_INDEX": server.url,
            "PICCTL_SECRET_FILE": str(secret),
            "PICCTL_SHARED_PATH": str(tmp_path / "payloads"),
        }
        log = CommandLog(link)
        yield World(server, link, index, log, tmp_path / "payloads", store, records, environment)


@pytest.fixture
def disk(tmp_path: Path) -> tuple[Path, list[NodeRecord]]:
    """A disk tier's folder with the secret its server made."""
    folder = tmp_path / "disk"
    records = [*records_of(DEFAULT, now_ms()), *records_of(OLD, now_ms())]
    put_all(make_store(folder, None), records)
    (folder / "secret").write_text(SECRET)
    (folder / "secret").chmod(0o600)
    return folder, records


# Looking


def test_ls_lists_every_entry_with_every_field(world: World, run: Run) -> None:
    done = run("ls", "--json", "--limit", 1000, env=world.environment)
    assert (done.code, done.err) == (0, "")
    assert done.json["num_nodes"] == NUM_RECORDS
    nodes = {node["key"]: node for node in done.json["nodes"]}
    assert len(nodes) == NUM_RECORDS
    for record in world.records:
        assert nodes[record.key.hex()] == {
            "key": record.key.hex(),
            "parent": record.parent.hex() if record.parent else None,
            "tokens": record.num_tokens,
            "bytes": record.payload_bytes,
            "checksum": f"{record.checksum:016x}",
            "created_ms": record.created_ms,
            "expires_ms": None,
            "pinned": False,
            "doc_ids": list(record.doc_ids),
            "owner": record.owner,
            "namespace": "default" if record.owner == DEFAULT.owner else None,
            "model": record.model,
            "compute_us": record.compute_us,
            "hits": 0,
            "last_hit_ms": None,
        }


def test_ls_shows_one_namespace_and_the_largest_first(world: World, run: Run) -> None:
    hot = [record.key for record in records_of(ACME, now_ms())][:2]
    world.index.match([hot], now_ms())
    world.index.match([hot[:1]], now_ms())
    world.index.flush()
    done = run("ls", "--json", "--namespace", "acme", "--sort", "hits", env=world.environment)
    assert done.json["num_nodes"] == NUM_SEGMENTS * ACME.num_chunks
    assert {node["namespace"] for node in done.json["nodes"]} == {"acme"}
    assert [node["hits"] for node in done.json["nodes"]][:3] == [2, 1, 0]
    text = run("ls", "--limit", 1, "--sort", "hits", env=world.environment).out
    assert hot[0].hex()[:12] in text
    assert f"1 of {NUM_RECORDS} entries, by hits" in text


def test_what_would_steer_a_terminal_is_written_as_an_escape(world: World, run: Run) -> None:
    record = world.records[0]
    assert world.index.annotate(record.key, ["[red]evil\x1b[2J\ndoc"]) is not None
    shown = run("show", record.key.hex(), env=world.environment).out
    listed = run("ls", "--limit", NUM_RECORDS, env=world.environment).out
    for text in (shown, listed):
        assert "[red]evil\\x1b[2J\\ndoc" in text
        assert "\x1b" not in text


def test_show_takes_a_unique_beginning_and_tells_of_the_whole_chunk(world: World, run: Run) -> None:
    first, second, third = world.records[:3]
    done = run("show", second.key.hex()[:8], "--children", "--json", env=world.environment)
    assert done.json["key"] == second.key.hex()
    assert done.json["parents"] == [first.key.hex()]
    assert done.json["children"] == [third.key.hex()]
    whole = run("show", third.key.hex().upper(), "--json", env=world.environment).json
    assert whole["parents"] == [second.key.hex(), first.key.hex()]
    assert whole["children"] is None


def test_show_names_what_is_not_exactly_one_entry(world: World, run: Run) -> None:
    short = world.records[0].key.hex()[:2]
    several = run("show", short, env=world.environment)
    assert (several.code, several.out) == (2, "")
    assert f"KEY: got '{short}', which names" in several.err
    nothing = run("show", "0" * 34, env=world.environment)
    assert nothing.code == 2
    assert "names no entry" in nothing.err


def test_stats_tell_totals_owners_servers_and_folder(world: World, run: Run) -> None:
    world.index.set_quota(ACME.owner, 1 << 20)
    world.index.heartbeat("host:1", MODEL, now_ms())
    env = world.environment
    done = run("stats", "--json", "--namespace", "acme", env=env).json
    assert done["num_nodes"] == NUM_RECORDS
    assert done["num_bytes"] == NUM_RECORDS * PAYLOAD_BYTES
    assert done["folder_bytes"] == NUM_RECORDS * (4096 + PAYLOAD_BYTES)
    assert done["servers"] == [{"server": "host:1", "model": MODEL}]
    owners = {owner["namespace"]: owner for owner in done["owners"]}
    assert owners["acme"]["num_nodes"] == NUM_SEGMENTS * ACME.num_chunks
    assert owners["acme"]["quota_bytes"] == 1 << 20
    assert owners["default"]["quota_bytes"] is None
    assert f"host:1 (model {MODEL})" in run("stats", env=env).out


def test_top_shows_the_hottest_first(world: World, run: Run) -> None:
    hot = world.records[5 * NUM_SEGMENTS].key
    for _ in range(4):
        world.index.match([[hot]], now_ms())
    world.index.flush()
    done = run("top", "--json", "--limit", 3, env=world.environment).json
    assert [node["hits"] for node in done["hottest"]] == [4, 0, 0]
    assert done["hottest"][0]["key"] == hot.hex()
    assert done["hits_per_s"] is None
    assert hot.hex()[:12] in run("top", "--once", env=world.environment).out


def test_top_goes_on_until_interrupted_and_counts_new_hits(
    world: World, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    hot = world.records[0].key
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt
        for _ in range(2):
            world.index.match([[hot]], now_ms())
        world.index.flush()

    monkeypatch.setattr("sglang_ext.scripts.picctl_top.time.sleep", nap)
    done = run("top", "--interval", 0.5, "--limit", 1, env=world.environment)
    assert (done.code, naps) == (130, [0.5] * 3)
    (row,) = (line for line in done.out.splitlines() if line.startswith(hot.hex()[:12]))
    assert row.split()[:4] == [hot.hex()[:12], "default", "4", "2"]
    assert "interrupted" in done.err


# Changing


def test_invalidate_removes_entries_and_payloads_and_tells_the_servers(
    world: World, run: Run
) -> None:
    start = world.log.read(None, limit=1).last_id
    words = ("invalidate", "--doc-id", "default-doc3", "--doc-id", "default-doc4@v2", "--json")
    done = run(*words, env=world.environment)
    gone = {r.key for r in world.records if r.doc_ids == ("default-doc3@v1",)}
    assert done.json["documents"] == [
        {"doc_id": "default-doc3", "entries": len(gone), "bytes": len(gone) * PAYLOAD_BYTES},
        {"doc_id": "default-doc4@v2", "entries": 0, "bytes": 0},
    ]
    assert world.present() == world.kept() == {r.key for r in world.records} - gone
    assert world.read_log(start) == (
        Invalidate(DEFAULT.owner, "default-doc3"),
        Invalidate(DEFAULT.owner, "default-doc4@v2"),
    )


def test_invalidate_leaves_other_namespaces_alone(world: World, run: Run) -> None:
    words = ("invalidate", "--namespace", "acme", "--doc-id", "default-doc3")
    assert "removed 0 entries" in run(*words, env=world.environment).out
    assert len(world.present()) == NUM_RECORDS


def test_pins_of_keys_and_documents_reach_index_and_servers_and_go_again(
    world: World, run: Run
) -> None:
    start = world.log.read(None, limit=1).last_id
    single = world.records[7].key
    of_document = {r.key for r in records_of(ACME, 0) if r.doc_ids == ("acme-doc2@v1",)}
    words = (single.hex()[:12], "--namespace", "acme", "--doc-id", "acme-doc2", "--json")
    pinned = run("pin", *words, env=world.environment).json["pinned"]
    assert set(map(bytes.fromhex, pinned)) == of_document | {single}
    assert {v.record.key for v in world.index.scan() if v.record.pinned} == of_document | {single}
    run("unpin", *words, env=world.environment)
    assert not [view for view in world.index.scan() if view.record.pinned]
    first, second = world.read_log(start)
    assert isinstance(first, Pin)
    assert set(first.keys) == of_document | {single}
    assert isinstance(second, Unpin)
    assert set(second.keys) == set(first.keys)


def test_a_quota_is_set_shown_and_taken_away(world: World, run: Run) -> None:
    env = world.environment
    done = run("quota", "acme", "1.5", "--json", "--total", env=env).json
    num_entries = NUM_SEGMENTS * ACME.num_chunks
    assert done["owners"] == [
        {
            "owner": ACME.owner,
            "namespace": "acme",
            "entries": num_entries,
            "bytes": num_entries * PAYLOAD_BYTES,
            "quota_bytes": 3 << 19,
        }
    ]
    assert done["total"]["bytes"] == NUM_RECORDS * PAYLOAD_BYTES
    assert world.index.usage()[ACME.owner].quota_bytes == 3 << 19
    assert "1.5 MiB" in run("quota", env=env).out
    run("quota", "acme", "none", env=env)
    assert world.index.usage()[ACME.owner].quota_bytes is None


@pytest.mark.parametrize(
    ("words", "is_gone", "posted"),
    [
        (["--namespace", "acme"], lambda r: r.owner == ACME.owner, Clear(owner=ACME.owner)),
        (["--model", OLD_MODEL], lambda r: r.model == OLD_MODEL, Clear(model=OLD_MODEL)),
        (["--stale-models"], lambda r: r.model == OLD_MODEL, Clear(model=OLD_MODEL)),
        (["--all"], lambda r: True, Clear()),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_purge_leaves_neither_entries_nor_bytes_nor_files(
    world: World,
    run: Run,
    words: list[str],
    is_gone: Callable[[NodeRecord], bool],
    posted: Command,
) -> None:
    start = world.log.read(None, limit=1).last_id
    world.index.heartbeat("host:1", MODEL, now_ms())
    done = run("purge", *words, "--yes", "--json", env=world.environment)
    left = [record for record in world.records if not is_gone(record)]
    num_gone = NUM_RECORDS - len(left)
    assert done.json == {"entries": num_gone, "bytes": num_gone * PAYLOAD_BYTES, "files": 0}
    assert world.present() == world.kept() == {record.key for record in left}
    assert world.index.stats().num_bytes == len(left) * PAYLOAD_BYTES
    assert len(list(world.folder.rglob("*.kv"))) == len(left)
    assert world.read_log(start) == (posted,)
    world.index.check_integrity()


def test_purge_all_takes_files_that_no_entry_names_too(world: World, run: Run) -> None:
    stray = replace(world.records[0], checksum=1)
    world.store.put(stray, payload_of(stray.key))
    done = run("purge", "--all", "--yes", env=world.environment)
    assert "and 1 file that no entry named" in done.out
    assert not list(world.folder.rglob("*.kv"))


@pytest.mark.parametrize(("answer", "num_left"), [("y\n", 210), ("n\n", 300), ("", 300)])
def test_purge_asks_first(
    world: World, run: Run, monkeypatch: pytest.MonkeyPatch, answer: str, num_left: int
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    done = run("purge", "--namespace", "acme", env=world.environment)
    assert "remove 90 entries, 45.0 KiB? [y/N]" in done.err
    assert done.code == (0 if num_left < NUM_RECORDS else 1)
    assert len(world.present()) == len(world.kept()) == num_left


def test_purge_of_stale_models_needs_a_live_server(world: World, run: Run) -> None:
    done = run("purge", "--stale-models", "--yes", env=world.environment)
    assert done.code == 2
    assert "got no live server" in done.err
    assert len(world.present()) == NUM_RECORDS


# A disk tier


def test_looking_at_a_disk_tier_changes_nothing_there(
    disk: tuple[Path, list[NodeRecord]], run: Run
) -> None:
    folder, records = disk
    orphan = replace(
        records[2], key=records[0].key[:1] + bytes(16), parent=records[0].key[:1] + b"x" * 16
    )
    store = make_store(folder, None)
    store.put(replace(orphan, checksum=7), payload_of(orphan.key))
    before = sorted(path.name for path in folder.rglob("*.kv"))
    listed = run("ls", "--disk-path", folder, "--json", "--limit", 1000).json
    assert {node["key"] for node in listed["nodes"]} == {record.key.hex() for record in records}
    stats = run("stats", "--disk-path", folder, "--json").json
    assert stats["num_nodes"] == len(records)
    assert sorted(path.name for path in folder.rglob("*.kv")) == before


def test_a_disk_tier_is_invalidated_and_purged_with_its_own_secret(
    disk: tuple[Path, list[NodeRecord]], run: Run
) -> None:
    folder, records = disk
    env = {"PICCTL_INDEX": "redis://127.0.0.1:1"}  # not asked for, since --disk-path is given
    words = ("--disk-path", folder, "--json")
    done = run("invalidate", *words, "--doc-id", "default-doc0", env=env).json
    assert done["documents"][0]["entries"] == 2 * NUM_SEGMENTS
    done = run("purge", *words, "--model", OLD_MODEL, "--yes", env=env).json
    assert done["entries"] == NUM_SEGMENTS * (OLD.num_chunks - 1)
    kept = {record.key for record in make_store(folder, None).records()}
    assert kept == {r.key for r in records if r.model == MODEL and "doc0@" not in r.doc_ids[0]}
    done = run("purge", *words, "--all", "--yes", env=env)
    assert not list(folder.rglob("*.kv"))
    assert (folder / "secret").exists()


def test_verify_of_a_disk_tier_finds_files_its_server_cannot_use(
    disk: tuple[Path, list[NodeRecord]], run: Run
) -> None:
    folder, records = disk
    _path_of(folder, records[0]).write_bytes(b"no payload at all")
    done = run("verify", "--disk-path", folder, "--json")
    assert done.code == 1
    assert done.json["lost"] == {"truncated": 1, "stray": NUM_SEGMENTS - 1}
    done = run("verify", "--disk-path", folder, "--repair", "--json")
    assert done.code == 0
    assert done.json["repairs"]["files_dropped"] == NUM_SEGMENTS
    done = run("verify", "--disk-path", folder, "--json")
    assert (done.code, done.json["lost"]) == (0, {})
    assert done.json["intact"] == len(records) - NUM_SEGMENTS


# Payloads in Redis


def test_payloads_in_redis_are_verified_and_go_with_their_entries(world: World, run: Run) -> None:
    env = {k: v for k, v in world.environment.items() if k != "PICCTL_SHARED_PATH"}
    world.server.cli("FLUSHALL")
    store: RedisStore[Any] = RedisStore(world.link, BytesCodec(), mac_key(SECRET.encode()))
    put_all(store, world.records)
    publish_all(world.index, world.records)
    done = run("verify", "--shared-values", "--json", env=env)
    assert (done.code, done.json["intact"]) == (0, NUM_RECORDS)
    damaged, lost = world.records[2], world.records[5]
    name = value_key(damaged.key, damaged.checksum)
    world.link.call("SETRANGE", name, 4096, b"\x00" * 8)
    world.link.call("UNLINK", value_key(lost.key, lost.checksum))
    done = run("verify", "--shared-values", "--repair", "--json", env=env)
    assert done.json["lost"] == {"damaged": 1, "absent": 1}
    assert done.json["repairs"]["entries_removed"] == 2
    run("invalidate", "--doc-id", "default-doc9", "--shared-values", env=env)
    assert {record.key for record in store.records()} == world.present()
    assert run("purge", "--all", "--yes", "--shared-values", env=env).code == 0
    assert not [name for name in world.server.cli("KEYS", "*").split() if ":n:" in name]
    assert not list(store.records())


# Checking


def test_verify_of_a_sound_tier_finds_all_intact(world: World, run: Run) -> None:
    done = run("verify", "--json", env=world.environment)
    assert done.code == 0
    assert done.json == {
        "intact": NUM_RECORDS,
        "intact_bytes": NUM_RECORDS * PAYLOAD_BYTES,
        "lost": {},
        "losses": [],
        "repairs": None,
    }


def test_verify_tells_each_kind_of_loss_and_repair_leaves_only_what_is_intact(
    world: World, run: Run
) -> None:
    leaf, inner, cut, forged = (world.records[NUM_SEGMENTS * i + i % 3] for i in (2, 4, 6, 8))
    _path_of(world.folder, leaf).unlink()
    _flip_last_byte(_path_of(world.folder, inner))
    with _path_of(world.folder, cut).open("r+b") as file:
        file.truncate(5000 - PAYLOAD_BYTES)
    make_store(world.folder, OTHER_SECRET).put(forged, payload_of(forged.key))
    done = run("verify", "--json", env=world.environment)
    assert done.code == 1
    assert done.json["lost"] == {"absent": 1, "damaged": 1, "truncated": 1, "forged": 1}
    assert done.json["intact"] == NUM_RECORDS - 4
    reasons = {loss["key"]: loss["reason"] for loss in done.json["losses"]}
    assert reasons[leaf.key.hex()] == "absent"
    assert reasons[forged.key.hex()] == "forged"
    assert (
        "lost: 1 absent, 1 damaged, 1 forged, 1 truncated"
        in run("verify", env=world.environment).out
    )
    done = run("verify", "--repair", "--json", env=world.environment)
    assert done.code == 0
    assert done.json["repairs"]["entries_removed"] > 4
    done = run("verify", "--json", env=world.environment)
    assert (done.code, done.json["lost"]) == (0, {})
    assert world.present() == world.kept()
    world.index.check_integrity()


def test_repair_counts_accounts_again_and_sweeps_old_files(world: World, run: Run) -> None:
    stray = replace(world.records[0], checksum=1)
    world.store.put(stray, payload_of(stray.key))
    os.utime(_path_of(world.folder, stray), (1, 1))
    key = f"pic1:{{a:{ACME.owner}}}"
    world.server.cli("HINCRBY", key, "used", "12345")
    done = run("verify", "--repair", "--json", env=world.environment)
    assert done.json["repairs"] == {
        "entries_removed": 0,
        "files_dropped": 1,
        "reconciled": True,
    }
    used = world.server.cli("HGET", key, "used")
    assert int(used) == NUM_SEGMENTS * ACME.num_chunks * PAYLOAD_BYTES


def test_repair_with_a_wrong_secret_removes_nothing(world: World, run: Run, tmp_path: Path) -> None:
    (wrong := tmp_path / "wrong").write_text(OTHER_SECRET)
    words = ("verify", "--repair", "--secret-file", wrong)
    done = run(*words, env=world.environment)
    assert done.code == 1
    assert "--repair: got not one intact payload" in done.err
    assert len(world.present()) == len(world.kept()) == NUM_RECORDS


# Doctor


def test_a_sound_set_up_has_no_error_and_every_check(world: World, run: Run) -> None:
    world.index.heartbeat("host:1", MODEL, now_ms())
    done = run("doctor", "--json", env=world.environment)
    assert done.code == 0, done.out
    levels = {finding["check"]: finding["level"] for finding in done.json["findings"]}
    assert levels == {
        "secret file": "ok",
        "connection": "ok",
        "version": "ok",
        "maxmemory-policy": "ok",
        "maxmemory": "warn",
        "role": "ok",
        "evictions": "ok",
        "persistence": "info",
        "clock": "ok",
        "format": "ok",
        "permissions": "ok",
        "servers": "ok",
        "namespace": "ok",
        "payloads": "ok",
        "shared folder": "ok",
    }
    assert done.json["counts"] == {"ok": 13, "warn": 1, "info": 1}
    assert "doctor" not in world.server.cli("KEYS", "*doctor*")


def test_doctor_names_what_the_settings_of_redis_do(run: Run) -> None:
    with redis_server("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru") as server:
        found = _doctor(run, server.url, code=1)
        assert found["maxmemory-policy"]["level"] == "error"
        assert "noeviction" in found["maxmemory-policy"]["hint"]
        assert found["maxmemory"]["level"] == "ok"
        server.cli("CONFIG", "SET", "maxmemory-policy", "volatile-ttl")
        assert _doctor(run, server.url)["maxmemory-policy"]["level"] == "warn"
        server.cli("CONFIG", "SET", "maxmemory-policy", "noeviction")
        server.cli("CONFIG", "SET", "appendonly", "yes")
        found = _doctor(run, server.url)
        assert found["maxmemory-policy"]["level"] == "ok"
        assert found["persistence"]["level"] == "ok"
        server.cli("CONFIG", "SET", "maxmemory", "1mb")
        assert "refused soon" in _doctor(run, server.url)["maxmemory"]["message"]
        server.cli("REPLICAOF", "127.0.0.1", "1")
        assert "replica" in _doctor(run, server.url, code=1)["role"]["message"]


def test_doctor_tells_a_missing_password_from_a_wrong_one(run: Run, tmp_path: Path) -> None:
    (right := tmp_path / "right").write_text(PASSWORD + "\n")
    (wrong := tmp_path / "wrong").write_text("a wrong password")
    with redis_server(password=PASSWORD) as server:
        url = f"redis://127.0.0.1:{server.url.rpartition(':')[2]}"
        found = _doctor(run, url, code=1)
        assert "wants a password: NOAUTH" in found["auth"]["message"]
        assert "--index-password-file" in found["auth"]["hint"]
        found = _doctor(run, url, "--index-password-file", wrong, code=1)
        assert "WRONGPASS" in found["auth"]["message"]
        found = _doctor(run, url, "--index-password-file", right)
        assert found["connection"]["level"] == "ok"
        found = _doctor(run, f"redis://nobody:{QUOTED_PASSWORD}@{url[8:]}", code=1)
        assert "WRONGPASS" in found["auth"]["message"]
    with redis_server() as server:
        found = _doctor(run, server.url, "--index-password-file", right, code=1)
        assert "has no password" in found["auth"]["message"]


def test_doctor_names_each_command_and_key_a_user_lacks(run: Run) -> None:
    log_rules = ("+xadd", "+xrange", "+xrevrange", "+xlen")
    with redis_server(has_acl_user=True) as server:
        server.cli("ACL", "SETUSER", ACL_USER, *log_rules)
        found = _doctor_all(run, server.url)
        assert ("ok", "every command and key that is needed") in [
            (each["level"], each["message"]) for each in found if each["check"] == "permissions"
        ]
        for rule in dict.fromkeys((*ACL_RULES[ACL_RULES.index("+time") :], *log_rules)):
            server.cli("ACL", "SETUSER", ACL_USER, rule.replace("+", "-"))
            found = _doctor_all(run, server.url, code=1)
            errors = [each for each in found if each["level"] == "error"]
            assert rule[1:].upper() in {each["message"].partition(":")[0] for each in errors}
            assert f"ACL SETUSER NAME {rule}" in {each["hint"] for each in errors}
            server.cli("ACL", "SETUSER", ACL_USER, rule)
        server.cli("ACL", "SETUSER", ACL_USER, "resetkeys", "~other:*")
        found = _doctor_all(run, server.url, code=1)
        assert "ACL SETUSER NAME ~pic1:* &pic1:changes" in {each["hint"] for each in found}
        server.cli("ACL", "SETUSER", ACL_USER, "~pic1:*", "resetchannels")
        found = _doctor_all(run, server.url, code=1)
        assert "ACL SETUSER NAME ~pic1:* &pic1:changes" in {each["hint"] for each in found}


def test_doctor_tells_plain_from_tls_and_whom_to_trust(run: Run, tmp_path: Path) -> None:
    tls = make_tls_files(tmp_path)
    with redis_server(tls=tls) as server, redis_server() as plain:
        address = server.url.removeprefix("rediss://").partition("?")[0]
        found = _doctor(run, f"redis://{address}", code=1)
        assert "takes only TLS" in found["tls"]["message"]
        found = _doctor(run, f"rediss://{plain.url[8:]}?ssl_ca_certs={tls.ca}", code=1)
        assert "does not speak TLS" in found["tls"]["message"]
        found = _doctor(run, f"rediss://{address}", code=1)
        assert "certificate fails" in found["tls"]["message"]
        assert "ssl_ca_certs" in found["tls"]["hint"]
        other_name = f"rediss://127.0.0.2:{address.rpartition(':')[2]}?ssl_ca_certs={tls.ca}"
        server.cli("CONFIG", "SET", "bind", "127.0.0.1 127.0.0.2")
        found = _doctor(run, other_name, code=1)
        assert "name of the certificate" in found["tls"]["hint"]
        assert _doctor(run, server.url)["connection"]["level"] == "ok"
        server.cli("CONFIG", "SET", "tls-auth-clients", "yes")
        found = _doctor(run, server.url, code=1)
        assert "ssl_certfile" in found["tls"]["hint"]


def test_doctor_names_who_cannot_be_reached(run: Run, server: RedisServer, tmp_path: Path) -> None:
    port = free_port()
    found = _doctor(run, f"redis://127.0.0.1:{port}", code=1)
    assert found["connection"]["message"] == f"127.0.0.1:{port} refuses connections"
    found = _doctor(run, "redis://no-such-host.invalid:6379", code=1)
    assert "the name is not known" in found["connection"]["message"]
    found = _doctor(run, f"unix://{tmp_path}/redis.sock", code=1)
    assert "there is no such socket" in found["connection"]["message"]
    server.pause()
    try:
        found = _doctor(run, server.url, "--timeout", 0.2, code=1)
    finally:
        server.resume()
    assert "does not answer in 0.2 s" in found["connection"]["message"]
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        url = f"redis://127.0.0.1:{deaf.getsockname()[1]}"
        found = _doctor(run, url, "--timeout", 0.2, code=1)
    assert "does not answer in 0.2 s" in found["connection"]["message"]


def test_doctor_finds_entries_of_other_formats(world: World, run: Run) -> None:
    world.server.cli("SET", "pic2:{00}:n:whatever", "x")
    world.server.cli("SET", "picture", "x")
    found = _doctor(run, world.server.url)
    assert found["format"]["level"] == "warn"
    assert "entries of format 2 beside 1" in found["format"]["message"]


def test_doctor_finds_a_wrong_secret(world: World, run: Run, tmp_path: Path) -> None:
    (wrong := tmp_path / "wrong").write_text(OTHER_SECRET)
    wrong.chmod(0o644)
    done = run("doctor", "--secret-file", wrong, "--json", env=world.environment)
    found = {finding["check"]: finding for finding in done.json["findings"]}
    assert done.code == 1
    assert "another secret's tag" in found["secret"]["message"]
    assert "default has no entries under this secret" in found["namespace"]["message"]
    assert found["secret file"]["level"] == "warn"
    assert "644" in found["secret file"]["message"]
    assert OTHER_SECRET not in done.out


def test_doctor_finds_another_folder_than_the_servers(
    world: World, run: Run, tmp_path: Path
) -> None:
    (other := tmp_path / "other").mkdir()
    for reason in ("unreadable", "absent"):  # the first look makes it a payload folder
        done = run("doctor", "--shared-path", other, "--json", env=world.environment)
        found = {finding["check"]: finding for finding in done.json["findings"]}
        assert done.code == 1
        assert f"8 of 8 in a sample are {reason}" in found["payloads"]["message"]
        assert "the folder all servers see" in found["payloads"]["hint"]


def test_doctor_finds_a_folder_that_is_missing_or_cannot_be_written(
    world: World, run: Run, tmp_path: Path
) -> None:
    env = {**world.environment, "PICCTL_SHARED_PATH": str(tmp_path / "nowhere")}
    done = run("doctor", "--json", env=env)
    found = {finding["check"]: finding for finding in done.json["findings"]}
    assert done.code == 1
    assert "is no folder" in found["shared folder"]["message"]
    assert found["namespace"]["level"] == "ok"
    with _read_only(tmp_path / "mount") as folder:
        done = run("doctor", "--shared-path", folder, "--json", env=world.environment)
    found = {finding["check"]: finding for finding in done.json["findings"]}
    assert done.code == 1
    assert "cannot be written" in found["shared folder"]["message"]


def test_doctor_tells_of_servers_with_different_models(world: World, run: Run) -> None:
    for name, model in (("a", MODEL), ("b", MODEL), ("c", OLD_MODEL)):
        world.index.heartbeat(name, model, now_ms())
    found = _doctor(run, world.server.url)
    assert found["servers"]["level"] == "info"
    assert f"{MODEL} on 2, {OLD_MODEL} on 1" in found["servers"]["message"]


def test_doctor_checks_every_master_of_a_cluster(run: Run) -> None:
    with redis_cluster() as cluster:
        found = _doctor_all(run, cluster.url)
        by_check: dict[str, list[Any]] = {}
        for each in found:
            by_check.setdefault(each["check"], []).append(each)
        assert by_check["cluster"][0]["message"] == "state ok, 16384 of 16384 slots served"
        assert "3 masters, 0 replicas" in by_check["replicas"][0]["message"]
        assert len(by_check["maxmemory-policy"]) == 3
        cluster.servers[2].kill()
        found = _doctor_all(run, cluster.url, code=1)
        errors = {each["check"] for each in found if each["level"] == "error"}
        assert "connection" in errors


# Errors and secrets


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ls"], "--index: got nothing, expected the URL of Redis, or --disk-path"),
        (["ls", "--index", "http://x"], "--index: got scheme 'http', expected one of redis://"),
        (["ls", "--index", "redis://a", "--disk-path", "b"], "--disk-path: got it together with"),
        (["stats", "--shared-path", "a", "--shared-values"], "--shared-values: got it together"),
        (["ls", "--disk-path", "nowhere"], "expected a folder"),
        (["ls", "--limit", "0", "--disk-path", "."], "--limit: got 0, expected at least 1"),
        (["ls", "--limit", "x"], "argument --limit: invalid int value: 'x'"),
        (["ls", "--sort", "x"], "argument --sort: invalid choice: 'x'"),
        (["top", "--interval", "0", "--disk-path", "."], "--interval: got 0.0, expected seconds"),
        (["show"], "the following arguments are required: KEY"),
        (["explode"], "argument COMMAND: invalid choice: 'explode'"),
        ([], "the following arguments are required: COMMAND"),
        (["pin", "--index", "redis://127.0.0.1:1"], "--index: RedisLink"),
        (["warm", "x", "--delimiter", "|"], "--server: got nothing"),
        (["warm", "x", "--delimiter", "|", "--server", "host"], "--server: got 'host', expected"),
        (["ls", "--secret-file", "nowhere"], "--secret-file: cannot read nowhere"),
        (["purge", "--all", "--namespace", "a"], "purge: got 2 choices, expected one of"),
        (["doctor"], "--index: got nothing, expected it, --disk-path or --server"),
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_one_line_that_names_the_option(
    run: Run, words: list[str], expected: str
) -> None:
    done = run(*words)
    assert expected in done.err
    assert (done.out, done.err.count("\n")) == ("", 1)
    assert done.code == (1 if "RedisLink" in expected else 2)
    as_json = run(*words, "--json")
    assert as_json.err == ""
    assert expected in as_json.json["error"]
    assert as_json.code == done.code


def test_an_unreachable_redis_is_told_at_once_and_in_one_line(run: Run) -> None:
    done = run("ls", "--index", f"redis://:geheim@127.0.0.1:{free_port()}")
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert "refused" in done.err
    assert "geheim" not in done.err


def test_secrets_and_passwords_are_never_printed(run: Run, world: World, tmp_path: Path) -> None:
    (password := tmp_path / "password").write_text("the-right-password")
    url = world.server.url.replace("redis://", "redis://user:in-the-url@")
    options = ("--index", url, "--index-password-file", password)
    for words in (("ls",), ("stats",), ("doctor",), ("purge", "--all", "--yes"), ("ls", "--json")):
        done = run(*words, *options, env=world.environment)
        assert done.code == 1
        for secret in ("in-the-url", "the-right-password", SECRET):
            assert secret not in done.out + done.err


def test_what_needs_the_payloads_wants_to_know_where_they_lie(world: World, run: Run) -> None:
    env = {k: v for k, v in world.environment.items() if k != "PICCTL_SHARED_PATH"}
    for words in (("verify",), ("purge", "--all", "--yes"), ("invalidate", "--doc-id", "d")):
        done = run(*words, env=env)
        assert done.code == 2
        assert "expected with --shared-path or --shared-values" in done.err
    assert len(world.present()) == NUM_RECORDS


def test_a_namespace_needs_the_secret(world: World, run: Run) -> None:
    env = {k: v for k, v in world.environment.items() if k != "PICCTL_SECRET_FILE"}
    done = run("purge", "--namespace", "acme", "--yes", env=env)
    assert done.code == 2
    assert "--secret-file: got nothing, expected the servers' secret" in done.err
    assert run("ls", env=env).code == 0


def test_the_console_script_runs_as_its_own_process(world: World) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sglang_ext.scripts.picctl", "stats", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **world.environment},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_nodes"] == NUM_RECORDS
    assert done.stderr == ""


# A running server


class FakeServer:
    """As much of a SGLang server as `picctl` sees: it remembers chunks and counts words."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.refused_word = "refuse-me"
        self.metrics: str | None = None
        self.fallback: str | None = None
        self.has_pic = True
        self.api_key: str | None = None
        self.num_flushes = 0
        self._known: set[str] = set()
        self._lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.answer(self, b"")

            def do_POST(self) -> None:
                owner.answer(self, self.rfile.read(int(self.headers.get("Content-Length", 0))))

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        """Answer one request."""
        code, content = self._answer(request, body)
        sent = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        request.send_response(code)
        request.send_header("Content-Length", str(len(sent)))
        request.end_headers()
        request.wfile.write(sent)

    def _answer(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, Any]:
        key = request.headers.get("Authorization")
        if self.api_key is not None and key != f"Bearer {self.api_key}":
            return 401, {"error": "Unauthorized"}
        match request.path:
            case "/server_info":
                return 200, {"version": "0.5.23", "launch_command": "--pic-index secret-url"}
            case "/metrics":
                return (404, "no metrics") if self.metrics is None else (200, self.metrics)
            case "/flush_cache":
                self.num_flushes += 1
                return 200, "Cache flushed."
            case "/generate":
                return self._generate(json.loads(body))
        return 404, "unknown"

    def _generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        params = body["sampling_params"]["custom_params"]
        chunks = [chunk for chunk in body["text"].split(params.get("pic_delimiter", "\0")) if chunk]
        with self._lock:
            self.requests.append({"chunks": chunks, **params})
            if self.refused_word in body["text"]:
                return 400, {"error": {"message": "too long for this model"}}
            known = [chunk for chunk in chunks[:-1] if chunk in self._known]
            self._known |= set(chunks[:-1])
        cached = sum(len(chunk.split()) for chunk in known)
        report = {
            "fallback": self.fallback
            or (None if params.get("pic", True) else "disabled_by_request"),
            "detail": None,
            "exact_tokens": 0,
            "reused_tokens": cached,
            "recomputed_tokens": 0,
            "computed_tokens": sum(len(chunk.split()) for chunk in chunks) - cached,
        }
        return 200, {"text": "x", "meta_info": {"pic": report} if self.has_pic else {}}


@pytest.fixture
def sglang() -> Iterator[FakeServer]:
    server = FakeServer()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder of four texts, two of which are found in sub-folders."""
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("one two three")
    (folder / "deep" / "b.md").write_text("four five")
    (folder / "deep" / "c.md").write_text("six")
    (folder / "z.txt").write_text("seven")
    (folder / "ignored.bin").write_bytes(b"\xff\xfe")
    return folder


def test_warm_packs_documents_and_tells_what_was_computed_and_what_was_there(
    sglang: FakeServer, corpus: Path, run: Run
) -> None:
    words = ("warm", corpus, "--delimiter", "<D>", "--server", sglang.url, "--json")
    cold = run(*words).json
    assert (cold["documents"], cold["requests"], cold["failures"]) == (4, 1, [])
    assert (cold["computed_tokens"], cold["cached_tokens"]) == (9, 0)
    (request,) = sglang.requests
    assert request["chunks"] == ["#", "one two three", "four five", "six", "seven", "."]
    assert request["pic_strategy"] == "reuse"
    assert request["pic_namespace"] == "default"
    warm = run(*words, "--namespace", "acme", "--max-chars", 13, "--concurrency", 3).json
    assert warm["requests"] == 3
    assert (warm["computed_tokens"], warm["cached_tokens"]) == (3, 7 + 3)
    assert {request["pic_namespace"] for request in sglang.requests[1:]} == {"acme"}
    assert "4 documents in 1 prompt: 1 tokens computed, 8 cached already" in run(*words[:-1]).out


def test_the_system_text_is_warmed_alone_and_gets_no_documents_name(
    sglang: FakeServer, corpus: Path, run: Run, tmp_path: Path
) -> None:
    (system := tmp_path / "system").write_text("be brief")
    words = ("warm", corpus, "--system", system, "--delimiter", "<D>", "--name-files")
    assert run(*words, "--server", sglang.url).code == 0
    first, *others = sglang.requests
    assert first["chunks"] == ["be brief", "."]
    assert "pic_doc_ids" not in first
    names = {tuple(request["pic_doc_ids"]): request["chunks"][1] for request in others}
    assert names == {
        ("a.txt",): "one two three",
        ("deep/b.md",): "four five",
        ("deep/c.md",): "six",
        ("z.txt",): "seven",
    }


def test_lines_of_json_say_how_documents_live_and_neighbours_alike_share_a_prompt(
    sglang: FakeServer, run: Run, tmp_path: Path
) -> None:
    lines = [
        {"text": "a", "doc_id": "d@1", "ttl_s": 60, "pin": True},
        {"text": "b", "doc_id": "d@1", "ttl_s": 60, "pin": True},
        {"text": "c"},
        {"text": "d", "doc_id": ["x", "y"]},
    ]
    (source := tmp_path / "docs.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    done = run("warm", source, "--delimiter", "<D>", "--server", sglang.url, "--concurrency", 1)
    assert done.code == 0
    lives = [
        (r["chunks"], r.get("pic_doc_ids"), r.get("pic_ttl_s"), r.get("pic_pin"))
        for r in sglang.requests
    ]
    assert lives == [
        (["#", "a", "b", "."], ["d@1"], 60, True),
        (["#", "c", "."], None, None, None),
        (["#", "d", "."], ["x", "y"], None, None),
    ]


def test_what_fails_is_named_and_the_others_go_on(
    sglang: FakeServer, run: Run, tmp_path: Path
) -> None:
    lines = ['{"text": "good"}', '{"text": "refuse-me please"}', '{"text": "fine"}', "no json"]
    lines += ['{"text": ""}', '{"text": "a", "ttl_s": -1}', '{"txt": "a"}', "[1]"]
    (source := tmp_path / "docs.jsonl").write_text("\n".join(lines))
    done = run("warm", source, "--delimiter", "<D>", "--server", sglang.url, "--json")
    assert done.code == 1
    assert done.json["documents"] == 2
    reasons = {
        each["document"].rpartition(":")[2]: each["reason"] for each in done.json["failures"]
    }
    assert reasons == {
        "2": "HTTP 400: too long for this model",
        "4": "no JSON",
        "5": "text: expected a string that is not empty",
        "6": "ttl_s: expected seconds above 0",
        "7": "got 'txt', expected text, doc_id, ttl_s, pin",
        "8": "got list, expected an object",
    }


def test_warm_fails_where_pic_does_not_serve_or_nobody_answers(
    sglang: FakeServer, corpus: Path, run: Run
) -> None:
    words = ("warm", corpus, "--delimiter", "<D>", "--json", "--server")
    sglang.fallback = "pic_off"
    done = run(*words, sglang.url)
    assert (done.code, done.json["documents"]) == (1, 0)
    assert {each["reason"] for each in done.json["failures"]} == {"prefilled in full, pic_off"}
    sglang.fallback, sglang.has_pic = None, False
    done = run(*words, sglang.url)
    assert "started with --enable-pic?" in done.json["failures"][0]["reason"]
    done = run(*words, f"http://127.0.0.1:{free_port()}")
    assert done.code == 1
    assert "does not answer" in done.json["failures"][0]["reason"]


def test_an_api_key_is_sent_and_its_lack_is_told(
    sglang: FakeServer, corpus: Path, run: Run, tmp_path: Path
) -> None:
    sglang.api_key = "the-key"
    (key := tmp_path / "key").write_text("the-key\n")
    words = ("warm", corpus, "--delimiter", "<D>", "--server", sglang.url)
    done = run(*words)
    assert done.code == 1
    assert "HTTP 401: Unauthorized" in done.out
    assert run(*words, "--api-key-file", key).code == 0


def test_a_single_server_is_managed_by_requests(sglang: FakeServer, run: Run) -> None:
    options = ("--server", sglang.url, "--namespace", "acme", "--json")
    done = run("invalidate", *options, "--doc-id", "a", "--doc-id", "b@2")
    assert done.json == {"server": sglang.url, "asked": True, "doc_ids": ["a", "b@2"]}
    assert run("purge", *options, "--yes").code == 0
    first, second = sglang.requests
    assert (first["pic"], first["pic_namespace"]) == (False, "acme")
    assert first["pic_invalidate"] == ["a", "b@2"]
    assert (second["pic_purge"], second["pic_namespace"]) == (True, "acme")
    assert run("purge", "--all", "--yes", "--server", sglang.url).code == 0
    assert sglang.num_flushes == 1


def test_a_server_without_pic_is_not_taken_for_a_managed_one(sglang: FakeServer, run: Run) -> None:
    words = ("invalidate", "--server", sglang.url, "--doc-id", "a")
    sglang.has_pic = False
    done = run(*words)
    assert done.code == 1
    assert "says nothing about PIC" in done.err
    sglang.has_pic, sglang.fallback = True, "pic_off"
    done = run(*words)
    assert done.code == 1
    assert "pic_off" in done.err


METRICS = """\
# TYPE sglang_pic_active gauge
sglang_pic_active{model_name="m",reason="REASON"} ACTIVE
# TYPE sglang_pic_segments_total counter
sglang_pic_segments_total{model_name="m",tier="host",result="hit"} 30.0
sglang_pic_segments_total{model_name="m",tier="host",result="miss"} 10.0
# TYPE sglang_pic_tier_ready gauge
sglang_pic_tier_ready{model_name="m",tier="shared"} READY
# TYPE sglang_pic_index_budget_bytes gauge
sglang_pic_index_budget_bytes{model_name="m",tier="shared"} 1048576.0
# TYPE sglang_pic_phase_seconds histogram
sglang_pic_phase_seconds_bucket{phase="own",le="+Inf"} 2.0
sglang_pic_phase_seconds_sum{phase="own"} 0.5
sglang_pic_phase_seconds_count{phase="own"} 2.0
# TYPE sglang_other gauge
sglang_other 1.0
"""


def _metrics(active: int = 1, ready: int = 1, reason: str = "") -> str:
    text = METRICS.replace("REASON", reason)
    return text.replace("ACTIVE", str(active)).replace("READY", str(ready))


def test_stats_and_top_show_a_servers_metrics(world: World, sglang: FakeServer, run: Run) -> None:
    sglang.metrics = _metrics()
    options = ("--json", "--server", sglang.url)
    stats = run("stats", *options, env=world.environment).json
    assert {sample["name"] for sample in stats["metrics"]} == {
        "sglang_pic_active",
        "sglang_pic_segments_total",
        "sglang_pic_tier_ready",
        "sglang_pic_index_budget_bytes",
        "sglang_pic_phase_seconds_sum",
        "sglang_pic_phase_seconds_count",
    }
    assert stats["budget_bytes"] == 1 << 20
    assert "sglang_pic_segments_total" in run("stats", "--server", sglang.url).out
    assert run("top", *options, env=world.environment).json["hit_rates"] == {"host": 0.75}
    total = run("quota", "--total", *options, env=world.environment).json["total"]
    assert total["budget_bytes"] == 1 << 20


def test_doctor_tells_whether_a_server_uses_pic_and_its_tiers(sglang: FakeServer, run: Run) -> None:
    def found(code: int) -> dict[str, Any]:
        done = run("doctor", "--server", sglang.url, "--json")
        assert done.code == code, done.out
        assert "secret-url" not in done.out
        return {finding["check"]: finding for finding in done.json["findings"]}

    sglang.metrics = _metrics()
    assert {check: each["level"] for check, each in found(0).items()} == {
        "server": "ok",
        "pic": "ok",
        "shared tier": "ok",
    }
    sglang.metrics = _metrics(ready=0)
    assert found(1)["shared tier"]["level"] == "error"
    sglang.metrics = _metrics(active=0, reason="self-test failed")
    assert found(1)["pic"]["message"] == "off: self-test failed"
    sglang.metrics = None
    assert found(0)["pic"]["level"] == "ok"
    sglang.fallback = "pic_off"
    assert "pic_off" in found(1)["pic"]["message"]
    sglang.api_key = "a key"
    assert "HTTP 401" in found(1)["server"]["message"]


def _doctor_all(run: Run, url: str, *words: object, code: int = 0) -> list[Any]:
    """The findings about one Redis."""
    done = run("doctor", "--index", url, "--json", *words)
    assert done.code == code, done.out
    findings: list[Any] = done.json["findings"]
    return findings


def _doctor(run: Run, url: str, *words: object, code: int = 0) -> dict[str, Any]:
    return {finding["check"]: finding for finding in _doctor_all(run, url, *words, code=code)}


@contextmanager
def _read_only(folder: Path) -> Iterator[Path]:
    """A file system that nobody can write, gone at the end."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(folder)]
    mounting = subprocess.run(mount, capture_output=True, text=True)
    if mounting.returncode:
        pytest.fail(f"cannot mount, run the tests as root: {mounting.stderr}", pytrace=False)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def _path_of(folder: Path, record: NodeRecord) -> Path:
    (path,) = folder.rglob(f"{record.key.hex()}-{record.checksum:016x}.kv")
    return path


def _flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
