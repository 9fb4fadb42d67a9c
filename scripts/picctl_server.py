"""`picctl` as a client of a running SGLang server: requests that store chunks, and what it tells.

Knows routes, the form of requests and of PIC's report. Does not know documents or indexes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from sglang_ext.errors import ServerFailed
from sglang_ext.scripts.picctl_options import Options
from sglang_ext.scripts.server import CONNECTION_LIMITS

REQUEST_TIMEOUT_S = 600.0
QUICK_TIMEOUT_S = 10.0
PREFIX = "sglang_pic_"
SHOWN_CHARS = 300


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said to one request.

    Attributes:
        report: `meta_info["pic"]`; None if the request was refused, or the server has no PIC.
        refusal: Why it was refused; None if it was served.
    """

    report: Mapping[str, Any] | None
    refusal: str | None = None

    @property
    def failure(self) -> str | None:
        """Why nothing was cached, in words; None if PIC served it."""
        if self.refusal is not None:
            return self.refusal
        if self.report is None:
            return "the server says nothing about PIC: was it started with --enable-pic?"
        if self.report.get("fallback") is None:
            return None
        detail = self.report.get("detail")
        reason = f"prefilled in full, {self.report['fallback']}"
        return f"{reason}: {detail}" if detail else reason


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric, with its labels."""

    name: str
    labels: Mapping[str, str]
    value: float


class PicServer:
    """Requests to one server; thread-safe, closed at the end of `with`."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._url = url
        self._http = httpx.Client(
            base_url=url,
            headers=headers,
            timeout=REQUEST_TIMEOUT_S,
            limits=CONNECTION_LIMITS,
            trust_env=False,
        )

    def __enter__(self) -> PicServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._http.close()

    def generate(self, text: str, params: Mapping[str, Any]) -> Answer:
        """Compute a prompt and one token.

        Args:
            text: The prompt.
            params: `custom_params`.

        Raises:
            ServerFailed: The server did not answer, or with nonsense.
        """
        sampling = {"temperature": 0, "max_new_tokens": 1, "custom_params": dict(params)}
        response = self._send("POST", "/generate", json={"text": text, "sampling_params": sampling})
        if not response.is_success:
            return Answer(None, _refusal(response))
        answer = self._decode(response)
        if "error" in answer:
            return Answer(None, _shorten(answer["error"]))
        meta_info = answer.get("meta_info")
        report = meta_info.get("pic") if isinstance(meta_info, dict) else None
        return Answer(report if isinstance(report, dict) else None)

    def manage(self, params: Mapping[str, Any]) -> None:
        """Have the server change its cache by a request that computes one token.

        Raises:
            ServerFailed: It did not answer, refused, or has no PIC.
        """
        answer = self.generate(".", {"pic": False, **params})
        if answer.refusal is not None:
            raise ServerFailed(f"{self._url} refused: {answer.refusal}")
        if answer.report is None or answer.report.get("fallback") == "pic_off":
            raise ServerFailed(f"{self._url}: {answer.failure}")

    def forget(self) -> None:
        """Have an idle server forget every prefix and every chunk that is its own.

        Raises:
            ServerFailed: It did not answer, or refused.
        """
        response = self._send("POST", "/flush_cache")
        if not response.is_success:
            raise ServerFailed(f"{self._url} refused: {_refusal(response)}")

    def info(self) -> Mapping[str, Any]:
        """What the server says of itself: SGLang's version and its options.

        Raises:
            ServerFailed: It did not answer, or refused.
        """
        response = self._send("GET", "/server_info", timeout=QUICK_TIMEOUT_S)
        if not response.is_success:
            raise ServerFailed(f"{self._url} refused: {_refusal(response)}")
        return self._decode(response)

    def metrics(self) -> tuple[Sample, ...]:
        """PIC's metrics, histograms by their sum and count; empty without `--enable-metrics`.

        Raises:
            ServerFailed: It did not answer.
        """
        response = self._send("GET", "/metrics", timeout=QUICK_TIMEOUT_S)
        return tuple(_parse_metrics(response.text)) if response.is_success else ()

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        with _translated(self._url):
            return self._http.request(method, path, **options)

    def _decode(self, response: httpx.Response) -> Mapping[str, Any]:
        try:
            answer = response.json()
        except ValueError as exc:
            raise ServerFailed(f"{self._url}: answers with no JSON") from exc
        if not isinstance(answer, dict):
            raise ServerFailed(f"{self._url}: answers with {type(answer).__name__}, not an object")
        return answer


def server_samples(options: Options) -> tuple[Sample, ...] | None:
    """A server's metrics; None if no server was named."""
    if options.server is None:
        return None
    with PicServer(options.server, options.api_key) as server:
        return server.metrics()


def total_of(samples: Sequence[Sample], name: str, **labels: str) -> float:
    """The sum of a metric's values that have these labels."""
    return sum(
        sample.value
        for sample in samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def budget_of(samples: Sequence[Sample], tier: str) -> int | None:
    """A tier's budget as a server's metrics tell it; None if they do not."""
    budget = total_of(samples, "sglang_pic_index_budget_bytes", tier=tier)
    return int(budget) or None


def _parse_metrics(text: str) -> Iterator[Sample]:
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families(text):
        for sample in family.samples if family.name.startswith(PREFIX) else ():
            is_part = sample.name.endswith(("_bucket", "_created"))
            if not is_part and math.isfinite(sample.value):
                yield Sample(sample.name, dict(sample.labels), float(sample.value))


def _refusal(response: httpx.Response) -> str:
    """Why a request was refused, in one line."""
    try:
        body = response.json()
    except ValueError:
        body = response.text
    while isinstance(body, dict):
        body = body.get("error") or body.get("message") or json.dumps(body)
    return f"HTTP {response.status_code}: {_shorten(body)}"


def _shorten(message: object) -> str:
    if isinstance(message, dict):
        message = message.get("message") or json.dumps(message)
    line = " ".join(str(message).split())
    return line if len(line) <= SHOWN_CHARS else line[:SHOWN_CHARS] + "..."


@contextmanager
def _translated(url: str) -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        what = str(exc) or type(exc).__name__
        raise ServerFailed(f"--server: {url} does not answer: {what}") from exc
