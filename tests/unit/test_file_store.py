"""A file in the folder is a whole payload or none, whatever happens to it, its writer or the disk.

Real files throughout; full and read-only disks are small file systems that the tests mount, which
takes root. Where root would be allowed everything, one thread acts as a user who is not.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_ext.chunk_index.file_store import FileStore
from sglang_ext.chunk_index.index import NodeRecord
from sglang_ext.errors import PayloadLost, TierUnavailable
from tests.blobs import MAC_KEY, BytesCodec, random_payload, record_of
from tests.strategies import BytesPayload

PAYLOAD = random_payload(9000)
RECORD = record_of(PAYLOAD)
NOBODY = 65534


class Rig:
    """A store in a folder, with its codec in reach."""

    def __init__(self, root: Path, mac_key: bytes | None = None) -> None:
        self.root = root
        self.codec = BytesCodec()
        self.store: FileStore[BytesPayload] = FileStore(root, self.codec, mac_key)
        self.store.probe()

    def put(self, name: str = "a", payload: BytesPayload = PAYLOAD) -> NodeRecord:
        record = record_of(payload, name)
        self.store.put(record, payload)
        return record

    def path(self, record: NodeRecord = RECORD) -> Path:
        name = f"{record.key.hex()}-{record.checksum:016x}.kv"
        return self.root / "v1" / record.key[1:2].hex() / name

    def files(self) -> list[str]:
        return sorted(path.name for path in self.root.rglob("*") if not path.is_dir())

    def why_lost(self, record: NodeRecord = RECORD) -> str:
        with pytest.raises(PayloadLost) as caught:
            self.store.get(record)
        return caught.value.reason


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "root")


@pytest.fixture(params=[None, MAC_KEY], ids=["plain", "mac"])
def either_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    return Rig(tmp_path / "root", request.param)


@contextmanager
def mounted(*words: str | Path) -> Iterator[None]:
    """What `mount` does with these words, undone at the end; the last is the folder."""
    mounting = subprocess.run(["mount", *words], capture_output=True, text=True)
    if mounting.returncode:
        pytest.fail(f"cannot mount, run the tests as root: {mounting.stderr}", pytrace=False)
    try:
        yield
    finally:
        subprocess.run(["umount", words[-1]], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    with mounted("-t", "tmpfs", "-o", "size=4m", "tmpfs", folder):
        yield folder


@contextmanager
def as_nobody() -> Iterator[None]:
    """Let this thread use files as a user without rights; not needed by who is not root."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None)
    libc.setfsuid(NOBODY)
    try:
        yield
    finally:
        libc.setfsuid(0)


def test_a_new_store_on_the_same_folder_finds_what_was_put(rig: Rig) -> None:
    record = rig.put()
    again = Rig(rig.root)
    assert list(again.store.records()) == [record]
    assert again.store.get(record) == PAYLOAD


def test_the_layout_is_pinned_so_that_stored_files_stay_valid(rig: Rig) -> None:
    rig.put()
    name = "615f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f-e460e90d600b7444.kv"
    path = rig.root / "v1" / "5f" / name
    assert path.read_bytes()[4096:] == PAYLOAD.data


@pytest.mark.parametrize("num_bytes", [0, 1, 12, 500, 4095, 4096, 4097, 13095])
def test_a_cut_file_is_truncated_and_allocates_nothing(either_rig: Rig, num_bytes: int) -> None:
    either_rig.put()
    os.truncate(either_rig.path(), num_bytes)
    assert either_rig.why_lost() == "truncated"
    assert either_rig.codec.num_allocated == 0


def test_a_file_cut_while_it_is_read_is_truncated(rig: Rig) -> None:
    payload = random_payload(9 << 20)
    record = rig.put(payload=payload)

    def cut(num_bytes: int) -> None:
        os.truncate(rig.path(record), 5 << 20)

    with pytest.raises(PayloadLost, match="truncated"):
        rig.store.get(record, cut)


REGIONS = {"magic": 1, "version": 5, "length": 9, "header": 60, "tag": 350, "padding": 4000}


@pytest.mark.parametrize("byte", [*REGIONS.values(), 4096, 9000, 13095], ids=str)
def test_one_flipped_bit_anywhere_is_found(either_rig: Rig, byte: int) -> None:
    either_rig.put()
    data = bytearray(either_rig.path().read_bytes())
    data[byte] ^= 0x10
    either_rig.path().write_bytes(data)
    assert either_rig.why_lost() in {"damaged", "forged", "foreign"}


def test_two_files_with_their_names_swapped_are_foreign(either_rig: Rig) -> None:
    one, two = either_rig.put("a"), either_rig.put("b", random_payload(9000, seed=1))
    aside = either_rig.root / "aside"
    either_rig.path(one).rename(aside)
    either_rig.path(two).rename(either_rig.path(one))
    aside.rename(either_rig.path(two))
    assert either_rig.why_lost(one) == either_rig.why_lost(two) == "foreign"
    assert list(either_rig.store.records()) == []


def test_a_payload_of_another_form_is_foreign(rig: Rig) -> None:
    record = rig.put()
    other: FileStore[BytesPayload] = FileStore(rig.root, BytesCodec(b"other"))
    with pytest.raises(PayloadLost, match="foreign"):
        other.get(record)


def test_a_file_of_a_writer_without_the_key_is_forged_and_not_listed(rig: Rig) -> None:
    rig.put()
    other = Rig(rig.root, MAC_KEY)
    assert other.why_lost() == "forged"
    assert list(other.store.records()) == []


def test_a_deleted_file_is_absent(rig: Rig) -> None:
    rig.put()
    rig.path().unlink()
    assert rig.why_lost() == "absent"


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_file_is_foreign_and_does_not_block(
    rig: Rig, make: Callable[[Path], None]
) -> None:
    rig.put()
    rig.path().unlink()
    make(rig.path())
    assert rig.why_lost() == "foreign"
    assert list(rig.store.records()) == []
    rig.store.drop(RECORD)
    assert rig.store.empty() == 0


def test_a_link_to_a_good_file_is_foreign(rig: Rig) -> None:
    rig.put()
    elsewhere = rig.path().rename(rig.root / "elsewhere")
    rig.path().symlink_to(elsewhere)
    assert rig.why_lost() == "foreign"


@pytest.fixture
def open_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that every user may reach and write; those of pytest are private."""
    folder = Path(subprocess.check_output(["mktemp", "-d"], text=True).strip())
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def test_one_file_without_permission_is_lost_and_a_folder_is_unavailable(open_folder: Path) -> None:
    with as_nobody():
        rig = Rig(open_folder)
        rig.put()
        rig.path().chmod(0)
        assert rig.why_lost() == "foreign"
        assert list(rig.store.records()) == []
        rig.path().chmod(0o600)
        rig.path().parent.chmod(0)
        with pytest.raises(TierUnavailable, match="EACCES"):
            rig.store.get(RECORD)
        with pytest.raises(TierUnavailable, match="EACCES"):
            rig.put()
        rig.store.drop(RECORD)
        rig.path().parent.chmod(0o700)
        assert rig.store.get(RECORD) == PAYLOAD


def test_a_share_that_is_not_mounted_is_unavailable_and_nothing_is_written_there(
    small_disk: Path, tmp_path: Path
) -> None:
    share = tmp_path / "share"
    share.mkdir()
    with mounted("--bind", small_disk, share):
        rig = Rig(share / "root")
        rig.put()
    for use in (rig.put, rig.store.probe, lambda: rig.store.get(RECORD)):
        with pytest.raises(TierUnavailable, match=r"ENODEV|ENOENT"):
            use()
    assert (list(rig.store.records()), rig.store.used_bytes()) == ([], 0)
    assert list(share.iterdir()) == []
    with mounted("--bind", small_disk, share):
        assert rig.store.get(RECORD) == PAYLOAD


def test_a_removed_folder_is_empty_and_is_made_again(rig: Rig) -> None:
    rig.put()
    shutil.rmtree(rig.root)
    assert rig.why_lost() == "absent"
    rig.put()
    assert rig.store.get(RECORD) == PAYLOAD


def test_a_store_that_was_not_probed_is_unavailable_until_its_first_payload(tmp_path: Path) -> None:
    store: FileStore[BytesPayload] = FileStore(tmp_path / "not" / "there", BytesCodec())
    with pytest.raises(TierUnavailable, match="ENOENT"):
        store.get(RECORD)
    assert list(store.records()) == []
    store.put(RECORD, PAYLOAD)
    assert store.get(RECORD) == PAYLOAD


def test_an_error_of_the_callers_own_ends_the_read_and_leaves_no_file_open(rig: Rig) -> None:
    rig.put()
    before = os.listdir("/proc/self/fd")

    def stop(num_bytes: int) -> None:
        raise KeyError("cancelled")

    with pytest.raises(KeyError, match="cancelled"):
        rig.store.get(RECORD, stop)
    assert os.listdir("/proc/self/fd") == before


DYING_WRITER = """
import resource, signal, sys
from pathlib import Path

sys.path.insert(0, sys.argv[2])
from sglang_ext.chunk_index.file_store import FileStore
from tests.blobs import BytesCodec, random_payload, record_of

store = FileStore(Path(sys.argv[1]), BytesCodec())
store.probe()
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the kernel kills the process in its write
payload = random_payload(2 << 20)
store.put(record_of(payload), payload)
"""


def test_a_writer_killed_in_mid_write_leaves_nothing_visible_and_a_sweep_cleans_up(
    rig: Rig,
) -> None:
    program = [sys.executable, "-c", DYING_WRITER, rig.root, Path(__file__).parents[2]]
    process = subprocess.run(program, timeout=60)
    assert process.returncode == -signal.SIGXFSZ
    (name,) = rig.files()
    (leftover,) = rig.root.rglob(name)
    assert leftover.stat().st_size == rig.store.used_bytes() == 1 << 20
    assert list(rig.store.records()) == []
    assert rig.why_lost(record_of(random_payload(2 << 20))) == "absent"
    written_s = leftover.stat().st_mtime
    assert rig.store.sweep(lambda record: True, older_than_s=60, now_s=written_s + 59) == 0
    assert rig.store.sweep(lambda record: True, older_than_s=60, now_s=written_s + 60) == 1
    assert rig.files() == []


def test_a_full_disk_is_unavailable_leaves_nothing_and_works_again_later(small_disk: Path) -> None:
    rig = Rig(small_disk)
    first = rig.put(payload=random_payload(2 << 20))
    before = rig.files()
    with pytest.raises(TierUnavailable, match="ENOSPC"):
        rig.put("b", random_payload(3 << 20))
    assert rig.files() == before
    assert rig.store.get(first) == random_payload(2 << 20)
    rig.store.drop(first)
    second = rig.put("b", random_payload(3 << 20))
    assert rig.store.get(second) == random_payload(3 << 20)


def test_a_disk_that_became_read_only_is_unavailable_for_writing_alone(small_disk: Path) -> None:
    rig = Rig(small_disk)
    record = rig.put()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(TierUnavailable, match="EROFS"):
        rig.put("b")
    with pytest.raises(TierUnavailable, match="EROFS"):
        rig.store.empty()
    rig.store.drop(record)
    assert rig.store.get(record) == PAYLOAD


def test_a_probe_leaves_nothing_behind(rig: Rig) -> None:
    rig.store.probe()
    assert rig.files() == []


def test_a_probe_says_why_a_folder_cannot_be_used(small_disk: Path, tmp_path: Path) -> None:
    def complaint(root: Path) -> str:
        with pytest.raises(TierUnavailable) as caught:
            FileStore(root, BytesCodec()).probe()
        return str(caught.value)

    (tmp_path / "file").touch()
    assert complaint(tmp_path / "file").endswith("file: ENOTDIR, Not a directory")
    assert "ENOTDIR" in complaint(tmp_path / "file" / "below")
    assert "ENOENT" in complaint(Path("/proc/none"))
    (small_disk / "filler").write_bytes(bytes((4 << 20) - 8192))
    with pytest.raises(OSError, match="No space"), open(small_disk / "filler", "ab") as filler:
        filler.write(bytes(1 << 20))
    assert "ENOSPC" in complaint(small_disk)
    (small_disk / "filler").unlink()
    FileStore(small_disk, BytesCodec()).probe()


def test_files_and_folders_are_private_whatever_the_mask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        rig = Rig(tmp_path / "root")
        rig.put()
    finally:
        os.umask(old)
    folders = [rig.root, rig.root / "v1", rig.path().parent]
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [0o700] * 3
    assert stat.S_IMODE(rig.path().stat().st_mode) == 0o600


def test_a_group_that_shares_files_may_use_their_folders_whatever_the_mask(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        store: FileStore[BytesPayload] = FileStore(tmp_path / "root", BytesCodec(), mode=0o660)
        store.probe()
        store.put(RECORD, PAYLOAD)
    finally:
        os.umask(old)
    (path,) = (tmp_path / "root").rglob("*.kv")
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o770


def test_putting_again_heals_a_damaged_file(rig: Rig) -> None:
    rig.put()
    os.truncate(rig.path(), 5000)
    rig.put()
    assert rig.store.get(RECORD) == PAYLOAD
    assert len(rig.files()) == 1


def test_used_bytes_are_those_of_the_files(rig: Rig) -> None:
    assert rig.store.used_bytes() == 0
    rig.put("a")
    rig.put("b")
    assert rig.store.used_bytes() == 2 * (4096 + 9000)


FOREIGN_NAMES = ["v1/5f/notes.kv", "v1/5f/.tmp-x", "v1/zz/a.kv", "v2/5f/a.kv", "readme", "v1/5f/x"]


def test_files_of_other_names_are_never_touched(rig: Rig) -> None:
    record = rig.put()
    later = rig.path().with_name(rig.path().name + "2")
    for path in [*(rig.root / name for name in FOREIGN_NAMES), later]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rig.path().read_bytes())
    before = rig.files()
    assert list(rig.store.records()) == [record]
    assert rig.store.used_bytes() == 4096 + 9000
    assert rig.store.sweep(lambda record: False, older_than_s=0, now_s=2**33) == 1
    assert rig.store.empty() == 0
    assert len(rig.files()) == len(before) - 1


def test_a_sweep_removes_old_payloads_that_nobody_knows_and_no_others(rig: Rig) -> None:
    records = {name: rig.put(name) for name in ("known", "unknown", "young")}
    for name, time_s in (("known", 100), ("unknown", 100), ("young", 200)):
        os.utime(rig.path(records[name]), (time_s, time_s))

    def is_known(record: NodeRecord) -> bool:
        return record == records["known"]

    assert rig.store.sweep(is_known, older_than_s=50, now_s=200) == 1
    left = sorted(rig.store.records(), key=lambda record: record.key)
    assert left == [records["known"], records["young"]]


def test_a_sweep_leaves_what_another_version_or_secret_wrote(rig: Rig) -> None:
    kept = Rig(rig.root, MAC_KEY).put("a")
    other = rig.put("b")
    data = bytearray(rig.path(other).read_bytes())
    data[5] = 2
    rig.path(other).write_bytes(data)
    assert rig.store.sweep(lambda record: False, older_than_s=0, now_s=2**33) == 0
    assert Rig(rig.root, MAC_KEY).store.get(kept) == PAYLOAD
    assert rig.path(other).exists()


def test_a_sweep_ends_when_nobody_can_say_what_is_known(rig: Rig) -> None:
    rig.put()

    def is_known(record: NodeRecord) -> bool:
        raise TierUnavailable("the index is away")

    with pytest.raises(TierUnavailable):
        rig.store.sweep(is_known, older_than_s=0, now_s=2**33)
    assert rig.store.get(RECORD) == PAYLOAD


def test_emptying_leaves_no_byte_and_the_store_works_on(rig: Rig) -> None:
    rig.put("a")
    rig.put("b")
    (rig.root / "v1" / "5f" / f".tmp-host-1-{'0' * 16}").write_bytes(b"x")
    assert rig.store.empty() == 3
    assert (rig.store.used_bytes(), rig.files()) == (0, [])
    assert rig.why_lost() == "absent"
    rig.put()
    assert rig.store.get(RECORD) == PAYLOAD


def test_a_reader_finishes_though_the_file_is_dropped_or_replaced(rig: Rig) -> None:
    payload = random_payload(9 << 20)
    record = rig.put(payload=payload)
    for change in (lambda: rig.put(payload=payload), lambda: rig.store.drop(record)):
        assert rig.store.get(record, lambda _, change=change: change()) == payload


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=300), is_padded=st.booleans())
def test_a_file_of_random_bytes_is_lost_and_nothing_else(
    rig: Rig, data: bytes, is_padded: bool
) -> None:
    rig.path().parent.mkdir(exist_ok=True)
    rig.path().write_bytes(data.ljust(4096 + 9000, b"\0") if is_padded else data)
    assert rig.why_lost() in {"truncated", "damaged", "foreign"}


def test_a_record_of_other_sizes_is_foreign_and_allocates_nothing(rig: Rig) -> None:
    rig.put()
    assert rig.why_lost(replace(RECORD, payload_bytes=2**62)) == "foreign"
    assert rig.why_lost(replace(RECORD, num_tokens=2**62)) == "foreign"
    assert rig.codec.num_allocated == 0
