"""What a user installs: both wheels as built from this tree, and the tree's own promises."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("chunk_index", "recompute", "sched", "profiles", "scripts")
STDLIB_NAMES = ("profile", "inspect", "select", "queue")
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:home|root|Users|work)/\w+")


class Wheel:
    """The names in a wheel, split into its own metadata and all else, and its entry points."""

    def __init__(self, path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            (entry_points,) = (name for name in names if name.endswith("/entry_points.txt"))
            self.entry_points = configparser.ConfigParser()
            self.entry_points.read_string(archive.read(entry_points).decode())
        self.files = [name for name in names if ".dist-info/" not in name]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Wheel]:
    out = tmp_path_factory.mktemp("wheels")
    subprocess.run([ROOT / "scripts/wheels.sh", "build", sys.executable, out], check=True)
    return {path.name.split("-")[0]: Wheel(path) for path in out.iterdir()}


def _repository_files() -> list[Path]:
    git = ["git", "-c", "safe.directory=*", "-C", str(ROOT)]
    command = [*git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    paths = (ROOT / name for name in names.split("\0") if name)
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def test_building_makes_exactly_our_two_wheels(wheels: dict[str, Wheel]) -> None:
    assert wheels.keys() == {"sglang_pic", "sglang_pic_cpu"}


def test_wheel_adds_one_name_to_site_packages(wheels: dict[str, Wheel]) -> None:
    assert {name.split("/")[0] for name in wheels["sglang_pic"].files} == {"sglang_ext"}


def test_wheel_holds_every_module_exactly_once(wheels: dict[str, Wheel]) -> None:
    own = (path.relative_to(ROOT) for path in (ROOT / "sglang_ext").rglob("*.py"))
    linked = (
        "sglang_ext" / path.relative_to(ROOT)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
    )
    expected = {path.as_posix() for path in own} | {path.as_posix() for path in linked}
    modules = [name for name in wheels["sglang_pic"].files if name.endswith(".py")]
    assert sorted(modules) == sorted(expected)


def test_wheel_registers_the_plugin(wheels: dict[str, Wheel]) -> None:
    plugins = dict(wheels["sglang_pic"].entry_points["sglang.srt.plugins"])
    assert plugins == {"sglang_ext": "sglang_ext.plugin:register"}


def test_platform_wheel_is_an_entry_point_and_no_code(wheels: dict[str, Wheel]) -> None:
    platform = wheels["sglang_pic_cpu"]
    assert platform.files == []
    assert platform.entry_points.sections() == ["sglang.srt.platforms"]
    target = platform.entry_points["sglang.srt.platforms"]["pic_cpu"]
    module = target.partition(":")[0].replace(".", "/")
    assert f"{module}.py" in wheels["sglang_pic"].files


def test_platform_is_not_in_the_main_wheel(wheels: dict[str, Wheel]) -> None:
    # SGLang drops every plugin of a distribution that ships a platform it did not select.
    assert "sglang.srt.platforms" not in wheels["sglang_pic"].entry_points


def test_folders_are_relative_links_to_the_real_ones() -> None:
    links = {folder: str((ROOT / "sglang_ext" / folder).readlink()) for folder in FOLDERS}
    assert links == {folder: f"../{folder}" for folder in FOLDERS}


def test_git_ignores_nothing_that_the_wheels_are_built_from() -> None:
    known = {path.relative_to(ROOT).as_posix() for path in _repository_files()}
    folders = ("sglang_ext", *FOLDERS)
    sources = (
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".toml", ".sh"} and path.resolve() == path
    )
    assert [source for source in sources if source not in known] == []


def test_no_script_hides_a_standard_module() -> None:
    names = {path.stem for path in (ROOT / "scripts").iterdir()}
    assert names.isdisjoint(STDLIB_NAMES)


def test_lock_pins_names_and_versions_and_nothing_else() -> None:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert len(pins) > 100
    assert [line for line in pins if not re.fullmatch(r"[\w.-]+==[\w.+!]+", line)] == []


def test_no_file_names_a_folder_of_somebodys_machine() -> None:
    found = []
    for path in _repository_files():
        content = path.read_bytes()
        if b"\0" not in content:
            found += [(path.name, match) for match in MACHINE_PATH.findall(content.decode())]
    assert found == []


@pytest.mark.parametrize("path", ["/{}/me/x", "in /{}/x", '"/{}/me"'])
@pytest.mark.parametrize("top", ["home", "root", "Users", "work"])
def test_machine_paths_are_recognised(path: str, top: str) -> None:
    assert MACHINE_PATH.search(path.format(top))
