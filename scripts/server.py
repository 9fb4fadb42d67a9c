"""Starts a real SGLang server as a subprocess and talks to it as a client does.

Knows SGLang's command line, its `/generate` route and `meta_info["pic"]`. Knows nothing of what is
asked or why. Times are what the HTTP client sees.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from sglang_ext.errors import ServerFailed

READY_TIMEOUT_S = 600.0
REQUEST_TIMEOUT_S = 600.0
CONNECTION_LIMITS = httpx.Limits(keepalive_expiry=2.0)
"""SGLang closes a connection after 5 s without a request: one as old must not be used again."""
STOP_TIMEOUT_S = 30.0
POLL_TIMEOUT_S = 5.0
PROGRESS_EVERY_S = 10.0
LOG_TAIL_LINES = 20
MAX_CPU_THREADS = 2

Params = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """What one request got.

    Attributes:
        ttft_ms: From sending the request to the first streamed piece of the answer.
        output_ids: Generated tokens.
        text: The same as text.
        meta_info: SGLang's account of the request.
    """

    ttft_ms: float
    output_ids: tuple[int, ...]
    text: str
    meta_info: Mapping[str, Any]

    def require_pic(self) -> Mapping[str, Any]:
        """PIC's report of this request.

        Raises:
            ServerFailed: The request was prefilled in full instead, or PIC is not there at all.
        """
        return _require_pic(self.meta_info)


class Client:
    """Greedy requests to one server, one at a time."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    def generate(
        self,
        prompt: str | Sequence[int],
        params: Params | None = None,
        *,
        extra_key: str | None = None,
        max_new_tokens: int = 1,
    ) -> Result:
        """Stream one answer.

        Args:
            prompt: Text or token ids.
            params: `custom_params`.
            extra_key: Keeps SGLang's prefix tree apart from requests with another key.
            max_new_tokens: Tokens to generate; generation never ends earlier.

        Raises:
            ServerFailed: The server refused the request or went away.
        """
        body = {**_body(prompt, params, extra_key, max_new_tokens), "stream": True}
        started = time.perf_counter()
        with _translated(), self.http.stream("POST", "/generate", json=body) as response:
            pieces = _pieces(response)
            first = next(pieces)
            ttft_ms = (time.perf_counter() - started) * 1e3
            last = [first, *pieces][-1]
        return Result(ttft_ms, tuple(last["output_ids"]), last["text"], last["meta_info"])

    def first_logprobs(
        self,
        prompt: str | Sequence[int],
        vocab_size: int,
        params: Params | None = None,
        *,
        extra_key: str | None = None,
    ) -> npt.NDArray[np.float64]:
        """Log-probabilities of the first token over the whole vocabulary, `[vocab_size]`.

        Only output logprobs are asked for, so PIC serves the request; arguments and errors are
        those of `generate`.
        """
        body = {
            **_body(prompt, params, extra_key, max_new_tokens=1),
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": vocab_size,
        }
        with _translated():
            response = self.http.post("/generate", json=body)
        meta_info = _checked(response.json())["meta_info"]
        if params and params.get("pic") is not False:
            _require_pic(meta_info)
        logprobs = np.full(vocab_size, -np.inf)
        for logprob, token_id, _ in meta_info["output_top_logprobs"][0]:
            logprobs[token_id] = logprob
        return logprobs

    def flush(self) -> None:
        """Make the server forget every prefix and every chunk.

        Raises:
            ServerFailed: It did not.
        """
        with _translated():
            self.http.post("/flush_cache", params={"timeout": 10}).raise_for_status()


@contextmanager
def serve(
    model: str,
    *options: str,
    threads: int,
    log_path: Path,
    say: Callable[[str], None],
    env: Mapping[str, str] | None = None,
    entry: Sequence[str] = ("-m", "sglang.launch_server"),
    api_key: str | None = None,
) -> Iterator[Client]:
    """Run a server on the CPU for as long as the context lasts.

    Args:
        model: Model folder.
        options: Further command line options.
        threads: `OMP_NUM_THREADS`; more than there are free cores makes it many times slower.
        log_path: Where the server's output goes; its folder is made.
        say: Takes lines of progress, one every few seconds until the server is ready.
        env: Further environment variables.
        entry: What Python runs to start a server, and its first arguments.
        api_key: Sent with every request, for a server that asks for one.

    Yields:
        A client of the server, which answers by then.

    Raises:
        ServerFailed: It ended or was not ready in time; the message holds the end of its log.
    """
    port = _free_port()
    command = [sys.executable, *entry, "--model-path", model]
    command += ["--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--sleep-on-idle", "--max-total-tokens", "16384", "--max-running-requests", "8"]
    command += ["--log-level", "warning", *options]
    ours = {"HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": str(threads)}
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **ours, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    base_url = f"http://127.0.0.1:{port}"
    try:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        with httpx.Client(
            base_url=base_url,
            timeout=REQUEST_TIMEOUT_S,
            limits=CONNECTION_LIMITS,
            trust_env=False,
            headers=headers,
        ) as http:
            _wait_until_ready(process, http, log_path, say)
            yield Client(http)
    finally:
        _stop(process)


def load_encoder(model: str) -> Callable[[str], list[int]]:
    """The model's tokenizer as the server uses it for a chunk: text to ids, nothing added.

    Raises:
        ServerFailed: There is no model folder with a tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    except OSError as exc:
        raise ServerFailed(f"no tokenizer in {model}: {exc}") from exc

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    return encode


def default_threads() -> int:
    """Threads for a server: the usable cores, at most two."""
    return min(MAX_CPU_THREADS, len(os.sched_getaffinity(0)))


def _body(
    prompt: str | Sequence[int],
    params: Params | None,
    extra_key: str | None,
    max_new_tokens: int,
) -> dict[str, Any]:
    sampling: dict[str, Any] = {
        "temperature": 0,
        "max_new_tokens": max_new_tokens,
        "ignore_eos": True,
    }
    if params:
        sampling["custom_params"] = dict(params)
    field = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    key = {} if extra_key is None else {"extra_key": extra_key}
    return {**field, **key, "sampling_params": sampling}


def _pieces(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Pieces of a streamed answer; each holds all that was generated so far."""
    if response.status_code != httpx.codes.OK:
        raise ServerFailed(f"HTTP {response.status_code}: {response.read().decode()}")
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield _checked(json.loads(line.removeprefix("data: ")))


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        raise ServerFailed(f"the server refused a request: {answer['error']}")
    return answer


def _require_pic(meta_info: Mapping[str, Any]) -> Mapping[str, Any]:
    report: Mapping[str, Any] | None = meta_info.get("pic")
    if report is None:
        raise ServerFailed("the server says nothing about PIC: is the plugin installed?")
    if report["fallback"] is not None:
        why = ": ".join(filter(None, (report["fallback"], report["detail"])))
        raise ServerFailed(f"PIC did not serve a request, it was prefilled in full ({why})")
    return report


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as exc:
        raise ServerFailed(f"{type(exc).__name__}: {exc}") from exc


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(
    process: subprocess.Popen[bytes],
    http: httpx.Client,
    log_path: Path,
    say: Callable[[str], None],
) -> None:
    started = time.monotonic()
    next_report_s = 0.0
    while (waited_s := time.monotonic() - started) < READY_TIMEOUT_S:
        if process.poll() is not None:
            raise ServerFailed(f"the server ended with {process.returncode}:\n{_tail(log_path)}")
        if waited_s >= next_report_s:
            say(f"  waiting for the server, {waited_s:.0f} s (it takes about 30 s)")
            next_report_s += PROGRESS_EVERY_S
        with suppress(httpx.TransportError):
            if http.get("/health_generate", timeout=POLL_TIMEOUT_S).is_success:
                return
        time.sleep(0.5)
    raise ServerFailed(f"the server is not ready after {READY_TIMEOUT_S:.0f} s:\n{_tail(log_path)}")


def _tail(log_path: Path) -> str:
    lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-LOG_TAIL_LINES:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a server: ask the launcher, and kill it with its children only if it does not."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        for pid in (*_descendants(process.pid), process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _descendants(pid: int) -> list[int]:
    """Living processes below `pid`, deepest first."""
    below: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, listing.read_text().split()):
                below += [*_descendants(child), child]
    return below
