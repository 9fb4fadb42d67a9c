"""What the installed package does to SGLang: nothing without the flag, one clear line when refused.

SGLang takes seconds to import, so that a subprocess imports it once and does several checks: one
for the process that is never asked for PIC, and one that forks itself for every command line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.server

TIMEOUT_S = 300


def run_python(script: str, *arguments: str) -> Any:
    """What a script prints as JSON in its last line, run in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if "SGLANG" not in name}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**environment, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


# Without the flag

OBSERVE = r"""
import importlib, json, os, sys
import sglang.launch_server, sglang.srt.entrypoints.engine, sglang.srt.managers.scheduler
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang_ext import compat

for target in (*compat.FRONTEND_TARGETS, *compat.SCHEDULER_TARGETS):
    module = target.path.rsplit(".", 2)[0]
    importlib.import_module(module)


def attributes():
    # Every attribute of every module of SGLang and of every class these define.
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "sglang" or module is None:
            continue
        for key, value in list(vars(module).items()):
            found[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__ == name:
                found.update({f"{name}.{key}.{k}": v for k, v in vars(value).items()})
    return found


before, environment = attributes(), dict(os.environ)
load_plugins()
after = attributes()
changed = sorted(key for key in before if after.get(key) is not before[key])
plain = Engine.server_args_class(model_path="m", device="cpu")
args = prepare_server_args(["--model-path", sys.argv[1], "--device", "cpu"])
print(json.dumps({
    "changed": changed,
    "patched": sorted(HookRegistry._patched),
    "engine_args_type": type(plain).__name__,
    "engine_args_equal": plain == ServerArgs(model_path="m", device="cpu"),
    "carries_options": hasattr(plain, "_pic_options") or hasattr(args, "_pic_options"),
    "changed_on_parsing": sorted(
        key for key, value in attributes().items() if key in after and value is not after[key]
    ),
    "environment": sorted(
        key for key in {*os.environ, *environment} if os.environ.get(key) != environment.get(key)
    ),
    "hook_targets": [t.path for t in (compat.ADD_CLI_ARGS, compat.FROM_CLI_ARGS)],
    "targets": [t.path for t in (*compat.FRONTEND_TARGETS, *compat.SCHEDULER_TARGETS)],
    "seen": sorted(before),
}))
"""


@pytest.fixture(scope="module")
def observed(model_path: str) -> dict[str, Any]:
    result: dict[str, Any] = run_python(OBSERVE, model_path)
    return result


def test_without_the_flag_only_the_functions_that_read_arguments_are_wrapped(
    observed: dict[str, Any],
) -> None:
    assert observed["patched"] == sorted(observed["hook_targets"])
    changed = [name for name in observed["changed"] if not name.startswith("sglang.srt.plugins.")]
    # Engine takes keyword arguments through the class it makes its arguments with.
    assert set(changed) - set(observed["hook_targets"]) == {
        "sglang.srt.entrypoints.engine.Engine.server_args_class"
    }


def test_the_comparison_sees_every_function_that_pic_would_wrap(observed: dict[str, Any]) -> None:
    assert set(observed["targets"]) <= set(observed["seen"])
    assert not set(observed["targets"]) & set(observed["changed"])


def test_without_the_flag_arguments_are_sglangs_own(observed: dict[str, Any]) -> None:
    assert observed["engine_args_type"] == "ServerArgs"
    assert observed["engine_args_equal"]
    assert not observed["carries_options"]
    assert not [name for name in observed["targets"] if name in observed["changed_on_parsing"]]
    assert not [name for name in observed["environment"] if "PIC" in name or "EAGER" in name]


# With it

LAUNCH = r"""
import gc, json, os, runpy, signal, sys, tempfile, time
import sglang.cli.main, sglang.launch_server, sglang.srt.entrypoints.http_server
import sglang.srt.managers.scheduler, transformers.models.llama.configuration_llama

gc.freeze()  # or the collector makes every child copy the parent's memory, for seconds
cases, answers = json.loads(sys.argv[1]), []
for argv, prepare in cases:
    out = tempfile.TemporaryFile()
    pid = os.fork()
    if pid == 0:
        break
    deadline = time.monotonic() + 60
    while (done := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    if done[0] == 0:  # it was not refused and serves
        os.killpg(pid, signal.SIGKILL)
        done = os.waitpid(pid, 0)
    out.seek(0)
    answers.append([os.waitstatus_to_exitcode(done[1]), out.read().decode()])
else:
    print(json.dumps(answers))
    sys.exit()

os.setsid()
os.dup2(out.fileno(), 1)
os.dup2(out.fileno(), 2)
exec(prepare)
sys.argv = ["sglang", *argv]
if argv[0] == "serve":
    sys.exit(sglang.cli.main.main())
runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class Case:
    """A command line that must be refused.

    Attributes:
        options: Behind `--model-path M --device cpu`.
        says: What the one line must contain.
        prepare: Python that the process runs first.
    """

    options: tuple[str, ...]
    says: tuple[str, ...]
    prepare: str = ""


ON = "--enable-pic"
OTHER_VERSION = "from sglang_ext import compat; compat.TESTED_VERSIONS = ('0.0.1', '0.0.2')"
OTHER_SIGNATURE = """
from sglang.srt.managers.tokenizer_manager import TokenizerManager
async def _tokenize_one_request(self, obj, more): ...
TokenizerManager._tokenize_one_request = _tokenize_one_request
"""
CASES = {
    "mixed_chunk": Case((ON, "--enable-mixed-chunk"), ("--enable-mixed-chunk",)),
    "flashinfer": Case(
        (ON, "--attention-backend", "flashinfer"),
        ("--attention-backend flashinfer", "SGLANG_FLASHINFER_USE_PAGED=1"),
    ),
    "two_backends": Case(
        (ON, "--prefill-attention-backend", "torch_native", "--attention-backend", "pic_cpu"),
        ("one attention backend",),
    ),
    "page_size": Case((ON, "--page-size", "16"), ("--page-size 16", "chunks start at any token")),
    "tp_size": Case((ON, "--tp-size", "2"), ("--tp-size 2",)),
    "kv_dtype": Case((ON, "--kv-cache-dtype", "fp8_e4m3"), ("--kv-cache-dtype fp8_e4m3",)),
    "embedding": Case((ON, "--is-embedding"), ("--is-embedding",)),
    "deterministic": Case(
        (ON, "--enable-deterministic-inference", "--attention-backend", "triton"),
        ("--enable-deterministic-inference",),
    ),
    "off_but_configured": Case(("--pic-n-avg", "8"), ("--pic-n-avg", "without --enable-pic")),
    "negative": Case((ON, "--pic-n-avg", "-1"), ("--pic-n-avg: got -1, expected",)),
    "strategy": Case((ON, "--pic-strategy", "best"), ("--pic-strategy: got 'best', expected",)),
    "version": Case((ON,), ("is not supported, expected 0.0.1, 0.0.2",), OTHER_VERSION),
    "signature": Case((ON,), ("_tokenize_one_request", "(self, obj, more)"), OTHER_SIGNATURE),
    "sglang_serve": Case((ON, "--page-size", "16"), ("--page-size 16",)),
}


@pytest.fixture(scope="module")
def refused(model_path: str) -> dict[str, tuple[int, str]]:
    """Exit code and output of every case."""
    base = ["--model-path", model_path, "--device", "cpu", "--port", "0"]
    asked = [
        (["serve"] if name == "sglang_serve" else []) + [*base, *case.options]
        for name, case in CASES.items()
    ]
    prepared = [case.prepare for case in CASES.values()]
    answers = run_python(LAUNCH, json.dumps(list(zip(asked, prepared, strict=True))))
    return {name: (code, output) for name, (code, output) in zip(CASES, answers, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_what_pic_cannot_serve_ends_start_up_with_one_clear_line(
    refused: dict[str, tuple[int, str]], name: str
) -> None:
    code, output = refused[name]
    ours = [line for line in output.splitlines() if line.startswith("sglang-pic: ")]
    assert code == 1, output[-2000:]
    assert len(ours) == 1, output[-2000:]
    assert output.splitlines()[-1] == ours[0]
    assert "Traceback" not in output
    for words in CASES[name].says:
        assert words in ours[0]


def test_help_lists_the_flags(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sglang.launch_server", "--help"],
        env={**os.environ, "PYTHONSAFEPATH": "1", "COLUMNS": "200"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for flag in ("--enable-pic", "--pic-delimiter", "--pic-n-avg", "--pic-strategy"):
        assert flag in done.stdout
