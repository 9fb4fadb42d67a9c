"""What clients of one real server see: HTTP, streaming, typed IPC and the overlap loop included.

What needs a look inside the scheduler is tested in `test_execution.py`.
"""

from __future__ import annotations

import itertools
import json
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from sglang_ext.scripts.server import serve
from tests.corpus import Corpus, Ids, join

pytestmark = pytest.mark.server

DELIMITER = "<|chunk|>"
API_KEY = "secret"
CHUNKED_PREFILL = 512
CONTEXT_LEN = 8192
REUSE = {"pic_strategy": "reuse"}
KINDS = ("exact_tokens", "reused_tokens", "recomputed_tokens", "computed_tokens")
ABORTED = "sglang:num_aborted_requests_total"
COMPLAINTS = re.compile(
    r"leak|traceback|hit an exception|assertion|internal_error|pic error", re.IGNORECASE
)


class Server:
    """A client of the server under test."""

    def __init__(self, http: httpx.Client, log_path: Path) -> None:
        self.http = http
        self.log_path = log_path

    @property
    def address(self) -> tuple[str, int]:
        url = self.http.base_url
        assert url.port is not None
        return url.host, url.port

    def post(
        self,
        prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        params: Mapping[str, Any] | None = None,
        max_new_tokens: int = 1,
        **fields: Any,
    ) -> httpx.Response:
        """`/generate` with `params` as `custom_params`."""
        return self.http.post("/generate", json=body(prompt, params, max_new_tokens, **fields))

    def generate(self, *args: Any, **fields: Any) -> Any:
        """The answer of a request that must succeed."""
        response = self.post(*args, **fields)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, *args: Any, **fields: Any) -> list[dict[str, Any]]:
        """Every event of a streamed answer."""
        request = body(*args, **fields, stream=True)
        with self.http.stream("POST", "/generate", json=request) as response:
            assert response.status_code == 200, response.read()
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def flush(self) -> None:
        """Forget every prefix and chunk; SGLang refuses while requests run."""
        self.http.post("/flush_cache", params={"timeout": 10}).raise_for_status()

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that have these labels."""
        total = 0.0
        for line in self.http.get("/metrics").text.splitlines():
            key, _, value = line.rpartition(" ")
            has_labels = all(f'{label}="{text}"' in key for label, text in labels.items())
            if key.partition("{")[0] == name and has_labels:
                total += float(value)
        return total

    def wait_until_idle(self) -> None:
        """Until no request runs or waits."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            loads = self.http.get("/v1/loads").json()["loads"]
            if not any(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads):
                return
            time.sleep(0.1)
        raise AssertionError("the server is not idle after 60 s")

    def log_from(self, offset: int) -> str:
        """What was logged behind a byte offset."""
        return self.log_path.read_bytes()[offset:].decode(errors="replace")


def body(
    prompt: Any, params: Mapping[str, Any] | None = None, max_new_tokens: int = 1, **fields: Any
) -> dict[str, Any]:
    """A `/generate` request."""
    first = prompt[0] if not isinstance(prompt, str) and prompt else prompt
    field = "text" if isinstance(first, str) else "input_ids"
    sampling: dict[str, Any] = {
        "temperature": 0,
        "max_new_tokens": max_new_tokens,
        "ignore_eos": True,
    }
    if params is not None:
        sampling["custom_params"] = params
    return {field: prompt, "sampling_params": sampling, **fields}


@pytest.fixture(scope="module")
def served(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log_path = tmp_path_factory.mktemp("server") / "log"
    options = {
        "--pic-delimiter": DELIMITER,
        "--pic-n-avg": "8",
        "--chunked-prefill-size": str(CHUNKED_PREFILL),
        "--max-running-requests": "4",
        "--log-level": "info",
        "--api-key": API_KEY,
    }
    with serve(
        model_path,
        "--enable-pic",
        "--enable-metrics",
        *itertools.chain.from_iterable(options.items()),
        threads=1,  # two fight for the cores with this process and the server's own
        log_path=log_path,
        say=print,
        api_key=API_KEY,
        env={
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
            "SGLANG_ENABLE_ASYNC_ASSERT": "1",
            "SGLANG_USE_PICKLE_IPC": "0",
        },
    ) as client:
        yield Server(client.http, log_path)


@pytest.fixture
def server(served: Server) -> Iterator[Server]:
    """The server; afterwards it must be healthy and have logged no complaint."""
    offset = served.log_path.stat().st_size
    yield served
    served.wait_until_idle()
    assert served.generate("Hello", max_new_tokens=2)["meta_info"]["completion_tokens"] == 2
    complaints = [line for line in served.log_from(offset).splitlines() if COMPLAINTS.search(line)]
    assert not complaints


@pytest.fixture(scope="module")
def tokenizer(model_path: str) -> Any:
    return AutoTokenizer.from_pretrained(model_path)


@pytest.fixture(scope="module")
def corpus(tokenizer: Any) -> Corpus:
    return Corpus(tokenizer)


def report_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """A request's report, whose four counts must sum to the prompt."""
    report = answer["meta_info"]["pic"]
    assert isinstance(report, dict)
    assert sum(report[kind] for kind in KINDS) == answer["meta_info"]["prompt_tokens"]
    assert report["prompt_tokens"] == answer["meta_info"]["prompt_tokens"]
    return report


def counts(answer: Mapping[str, Any]) -> tuple[int, ...]:
    report = report_of(answer)
    return tuple(report[kind] for kind in KINDS)


def texts_of(tokenizer: Any, chunks: Sequence[Ids]) -> list[str]:
    """Texts that are tokenized to these very chunks."""
    texts: list[str] = [tokenizer.decode(chunk) for chunk in chunks]
    for text, chunk in zip(texts, chunks, strict=True):
        assert tuple(tokenizer.encode(text, add_special_tokens=False)) == chunk
    return texts


# Is it on?


def test_the_log_and_the_metric_say_that_pic_is_active(server: Server, model_path: str) -> None:
    (line,) = [line for line in server.log_from(0).splitlines() if "PIC is active" in line]
    assert "strategy=daric n_avg=8" in line
    assert "backend=pic_cpu" in line
    assert "self_test=passed" in line
    assert server.metric("sglang_pic_active") == 1
    assert server.metric("sglang_pic_active", reason="", model_name=model_path) == 1


def test_the_overlap_loop_runs(server: Server) -> None:
    assert re.search(r"disable_overlap_schedule['\"]?[=:] ?False", server.log_from(0))


# Reuse


def test_reordered_chunks_are_all_reused(server: Server, corpus: Corpus) -> None:
    a, b, c, x, q = corpus.chunks(60, 70, 80, 50, 10)
    ids, params = join(a, b, c, q)
    cold = report_of(server.generate(ids, {**REUSE, **params}))
    assert (cold["outcome"], cold["chunks"], cold["fallback"]) == ("cold", 4, None)
    ids, params = join(b, x, c, a, q)
    warm = server.generate(ids, {**REUSE, **params})
    assert counts(warm) == (len(b), len(c) + len(a), 0, len(x) + len(q))
    assert report_of(warm)["outcome"] == "reused"
    assert report_of(warm)["recomputed_share"] == 0
    assert report_of(warm)["bytes_loaded"]["host"] > 0


def test_the_servers_strategy_recomputes_a_few_tokens(server: Server, corpus: Corpus) -> None:
    chunks = corpus.chunks(60, 70, 80, 90, 10)
    ids, params = join(*chunks)
    server.generate(ids, params)
    # Again, behind another chunk: SGLang's exact prefix ends before them.
    ids, params = join(corpus.chunk(5), *chunks)
    report = report_of(server.generate(ids, params))
    assert (report["strategy"], report["selected_tokens"]) == ("daric", 6 * 8)
    assert 0 < report["recomputed_tokens"] <= 6 * 8
    assert report["reused_tokens"] + report["recomputed_tokens"] == 300
    hit = report["reused_tokens"] + report["recomputed_tokens"]
    assert report["recomputed_share"] == pytest.approx(report["recomputed_tokens"] / hit, abs=1e-6)


@pytest.mark.parametrize("text_first", [True, False], ids=["text_then_ids", "ids_then_text"])
def test_text_and_token_ids_name_the_same_chunks(
    server: Server, corpus: Corpus, tokenizer: Any, text_first: bool
) -> None:
    texts = ["The cat sat.", "Dogs ran\n", "été 12", "Why?"]
    salt = f"text-{text_first}"
    chunks = [corpus.text(text) for text in texts]
    by_text = {"prompt": DELIMITER.join(texts), "params": {**REUSE}}
    ids, bounds = join(*chunks)
    by_ids = {"prompt": ids, "params": {**REUSE, **bounds}}
    first, second = (by_text, by_ids) if text_first else (by_ids, by_text)
    reports = []
    for request in (first, second):
        answer = server.generate(**request, extra_key=salt)
        reports.append(report_of(answer))
        assert answer["meta_info"]["prompt_tokens"] == len(ids)
    assert [report["chunks"] for report in reports] == [4, 4]
    assert (reports[0]["outcome"], reports[1]["outcome"]) == ("cold", "reused")
    reused = sum(map(len, chunks[1:3]))
    assert [reports[1][kind] for kind in KINDS[:2]] == [len(chunks[0]), reused]


def test_a_requests_own_delimiter_cuts_its_text(server: Server) -> None:
    answer = server.generate("one # # two # # three", {"pic_delimiter": " # # "})
    assert report_of(answer)["chunks"] == 3


@pytest.mark.parametrize("generated", [1, 6])
def test_a_delimiter_does_not_reach_the_model(
    server: Server, tokenizer: Any, generated: int
) -> None:
    text = f"A dog{DELIMITER} barks at{DELIMITER} the"
    ids = [token for part in text.split(DELIMITER) for token in tokenizer.encode(part)]
    cut = server.generate(text, {"pic": False}, generated, extra_key="cut")
    plain = server.generate(ids, None, generated, extra_key="plain")
    assert cut["meta_info"]["prompt_tokens"] == len(ids)
    assert cut["output_ids"] == plain["output_ids"]


@pytest.mark.parametrize("text", ["aDDb", "Da", "aD", "DaDDbD"])
def test_empty_chunks_change_nothing(server: Server, tokenizer: Any, text: str) -> None:
    ids = [token for part in text.split("D") for token in tokenizer.encode(part)]
    cut = server.generate(text, {"pic_delimiter": "D", "pic_strategy": "full"}, 4)
    plain = server.generate(ids, None, 4)
    assert cut["output_ids"] == plain["output_ids"]
    assert cut["meta_info"]["prompt_tokens"] == len(ids)


def test_chunks_of_any_size_are_reused(server: Server, corpus: Corpus) -> None:
    sizes = (1, 15, 40, 255, 256, 257)
    system, query = corpus.chunks(8, 9)
    chunks = corpus.chunks(*sizes)
    ids, params = join(system, *chunks, query)
    server.generate(ids, {**REUSE, **params})
    ids, params = join(system, *chunks[::-1], query)
    warm = server.generate(ids, {**REUSE, **params})
    assert counts(warm) == (len(system), sum(sizes), 0, len(query))


def test_a_prompt_that_ends_in_a_cached_chunk_is_answered(server: Server, corpus: Corpus) -> None:
    a, b, q = corpus.chunks(30, 40, 10)
    ids, params = join(a, b, q)
    server.generate(ids, {**REUSE, **params})
    ids, params = join(b, a)
    answer = server.generate(ids, {**REUSE, **params}, 3)
    assert counts(answer) == (len(b), len(a) - 1, 1, 0)
    assert len(answer["output_ids"]) == 3


def test_a_prompt_above_the_chunked_prefill_size_keeps_its_reuse(
    server: Server, corpus: Corpus
) -> None:
    system, query = corpus.chunks(20, 12)
    chunks = corpus.chunks(*[200] * 8)
    ids, params = join(system, *chunks, query)
    assert len(ids) > 3 * CHUNKED_PREFILL
    cold = server.generate(ids, {**REUSE, **params})
    assert counts(cold) == (0, 0, 0, len(ids))
    ids, params = join(system, *chunks[::-1], query)
    warm = server.generate(ids, {**REUSE, **params})
    assert counts(warm) == (len(system), 1600, 0, len(query))
    assert warm["meta_info"]["cached_tokens"] <= len(system)


def test_chunks_are_kept_as_the_request_says(server: Server, corpus: Corpus) -> None:
    system, a, query = corpus.chunks(10, 30, 20)
    ids, params = join(system, a, query)
    reports = [
        report_of(server.generate(ids, {**REUSE, **params, "pic_store": store}, extra_key="keep"))
        for store in ("none", "chunks", "all", "all")
    ]
    assert [report["outcome"] for report in reports] == ["cold", "cold", "reused", "reused"]
    assert reports[2]["computed_tokens"] == len(query)
    assert reports[3]["computed_tokens"] == 0  # the query itself was kept


def test_chunks_live_as_long_as_the_request_says(server: Server, corpus: Corpus) -> None:
    ids, params = join(*corpus.chunks(10, 30, 20))
    request = {**REUSE, **params, "pic_ttl_s": 0.5}
    fresh = report_of(server.generate(ids, request, extra_key="ttl"))
    time.sleep(0.6)
    assert fresh["outcome"] == "cold"
    assert report_of(server.generate(ids, request, extra_key="ttl"))["outcome"] == "cold"


def test_new_weights_make_every_chunk_stale(
    server: Server, corpus: Corpus, model_path: str
) -> None:
    # The same weights again: what SGLang calls an update must not rest on our noticing a change.
    ids, params = join(*corpus.chunks(20, 60, 10))
    server.generate(ids, {**REUSE, **params})
    server.wait_until_idle()
    request = {"model_path": model_path}
    server.http.post("/update_weights_from_disk", json=request).raise_for_status()
    assert report_of(server.generate(ids, {**REUSE, **params}))["outcome"] == "cold"


def test_flushing_forgets_chunks(server: Server, corpus: Corpus) -> None:
    ids, params = join(*corpus.chunks(20, 60, 10))
    for expected in ("cold", "reused"):
        answer = server.generate(ids, {**REUSE, **params}, extra_key=expected)
    server.wait_until_idle()
    again = [report_of(server.generate(ids, {**REUSE, **params})) for _ in range(2)]
    assert [report["outcome"] for report in again] == ["cold", "reused"]
    server.wait_until_idle()
    server.flush()
    answer = server.generate(ids, {**REUSE, **params})
    assert report_of(answer)["outcome"] == "cold"
    assert counts(answer) == (0, 0, 0, len(ids))


# What was done, said in every answer


def test_every_streamed_piece_carries_the_report_as_one_dict(
    server: Server, corpus: Corpus
) -> None:
    ids, params = join(*corpus.chunks(20, 40, 10))
    for _ in ("cold", "warm"):
        pieces = server.stream(ids, params, 6)
        assert len(pieces) > 1
        reports = [report_of(piece) for piece in pieces if "meta_info" in piece]
        assert all(report == reports[0] for report in reports)
        assert len(reports) == len(pieces)


def test_streaming_changes_neither_answer_nor_counts(server: Server, corpus: Corpus) -> None:
    ids, params = join(*corpus.chunks(20, 40, 10))
    server.generate(ids, params, extra_key="stream")  # the chunks are cached from here on
    whole = server.generate(ids, params, 6, extra_key="stream")
    pieces = server.stream(ids, params, 6, extra_key="stream")
    assert pieces[-1]["output_ids"] == whole["output_ids"]
    assert counts(pieces[-1]) == counts(whole)


def test_each_request_of_a_batch_has_its_own_report(server: Server, corpus: Corpus) -> None:
    first, bounds = join(*corpus.chunks(20, 40, 10))
    second, others = join(*corpus.chunks(30, 10))
    answers = server.generate(
        [first, second, second],
        None,
        sampling_params=[
            {"max_new_tokens": 1, "custom_params": bounds},
            {"max_new_tokens": 1, "custom_params": {**others, "pic": False}},
            {"max_new_tokens": 1},
        ],
    )
    assert [report_of(answer)["chunks"] for answer in answers] == [3, 0, 1]
    assert [report_of(answer)["fallback"] for answer in answers] == [
        None,
        "disabled_by_request",
        "single_chunk",
    ]


def test_a_batch_of_texts_is_cut_one_by_one(server: Server) -> None:
    texts = [f"one{DELIMITER}two", f"one{DELIMITER}two{DELIMITER}three", "four"]
    answers = server.generate(texts, {"pic_store": "none"})
    assert [report_of(answer)["chunks"] for answer in answers] == [2, 3, 1]


def test_metrics_count_what_reports_say(server: Server, corpus: Corpus) -> None:
    ids, params = join(*corpus.chunks(20, 40, 10))
    server.generate(ids, {**REUSE, **params})
    kinds = [kind.removesuffix("_tokens") for kind in KINDS]

    def read() -> list[float]:
        tokens = [server.metric("sglang_pic_tokens_total", kind=kind) for kind in kinds]
        return [server.metric("sglang_pic_requests_total", outcome="reused"), *tokens]

    before = read()
    answer = server.generate([*ids, 1], {**REUSE, **params})
    grown = [after - then for after, then in zip(read(), before, strict=True)]
    assert grown == [1, *counts(answer)]


# Full prefill, and why


def test_pic_false_computes_the_same_tokens_exactly(server: Server, corpus: Corpus) -> None:
    text = DELIMITER.join(["The sky", " is blue.", " Why?"])
    on = server.generate(text, extra_key="on")
    off = server.generate(text, {"pic": False}, extra_key="off")
    assert off["meta_info"]["prompt_tokens"] == on["meta_info"]["prompt_tokens"]
    report = report_of(off)
    assert (report["outcome"], report["fallback"]) == ("full", "disabled_by_request")
    assert counts(off) == (0, 0, 0, off["meta_info"]["prompt_tokens"])


@pytest.mark.parametrize(
    ("params", "fields", "reason"),
    [
        (None, {}, "single_chunk"),
        ({"pic_bounds": [0]}, {}, "single_chunk"),
        ({"pic_strategy": "full", "pic_bounds": [0, 5]}, {}, "full_strategy"),
        (
            {"pic_bounds": [0, 5]},
            {"return_logprob": True, "logprob_start_len": 0},
            "input_logprobs",
        ),
    ],
)
def test_a_full_prefill_says_why(
    server: Server,
    corpus: Corpus,
    params: dict[str, Any] | None,
    fields: dict[str, Any],
    reason: str,
) -> None:
    ids = list(corpus.chunk(20))
    answer = server.generate(ids, params, **fields)
    report = report_of(answer)
    assert (report["outcome"], report["fallback"]) == ("full", reason)
    assert counts(answer) == (0, 0, 0, 20)
    if fields:
        assert len(answer["meta_info"]["input_token_logprobs"]) == 20


def test_a_session_is_computed_in_full(server: Server, corpus: Corpus) -> None:
    ids, params = join(*corpus.chunks(20, 30, 10))
    opened = server.http.post("/open_session", json={"capacity_of_str_len": 1000})
    session = opened.raise_for_status().json()
    answer = server.generate(ids, params, session_params={"id": session})
    assert report_of(answer)["fallback"] == "session"
    server.http.post("/close_session", json={"session_id": session}).raise_for_status()


def test_text_without_the_delimiter_is_one_chunk(server: Server) -> None:
    assert report_of(server.generate("Nothing to cut here."))["fallback"] == "single_chunk"


def test_output_logprobs_keep_pic_active(server: Server, corpus: Corpus) -> None:
    ids, params = join(*corpus.chunks(20, 30, 10))
    answer = server.generate(ids, params, 3, return_logprob=True, top_logprobs_num=2)
    report = report_of(answer)
    assert (report["outcome"], report["fallback"]) == ("cold", None)
    logprobs = answer["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in logprobs] == answer["output_ids"]
    assert [top[0][1] for top in answer["meta_info"]["output_top_logprobs"]] == answer["output_ids"]


def test_a_grammar_is_kept_to(server: Server) -> None:
    texts = ["A passage about cats.", "Another about dogs.", "Is a cat a dog? Answer:"]
    for _ in ("cold", "warm"):
        texts[:2] = texts[1::-1]
        answer = server.generate(
            DELIMITER.join(texts),
            sampling_params={"temperature": 0, "max_new_tokens": 8, "regex": "(yes|no)"},
        )
        assert answer["text"] in ("yes", "no")
        assert report_of(answer)["fallback"] is None


def test_a_request_for_no_tokens_is_served(server: Server, corpus: Corpus) -> None:
    ids, params = join(*corpus.chunks(20, 30, 10))
    assert report_of(server.generate(ids, params, 0))["outcome"] == "cold"
    assert report_of(server.generate(ids, {**REUSE, **params}, 0))["reused_tokens"] == 30


def test_input_logprobs_beside_pic_requests_are_right(server: Server, corpus: Corpus) -> None:
    # Both kinds arrive together; they must not share a batch.
    ids = list(corpus.chunk(40))
    alone = server.generate(ids, None, return_logprob=True, logprob_start_len=0, extra_key="1")
    prompts = [join(*corpus.chunks(20, 50, 10)) for _ in range(4)]
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(server.generate, *prompt) for prompt in prompts]
        asked = [
            pool.submit(
                server.generate, ids, None, return_logprob=True, logprob_start_len=0, extra_key=key
            )
            for key in "23"
        ]
        assert all(report_of(other.result())["fallback"] is None for other in others)
        for answer in (future.result() for future in asked):
            got = answer["meta_info"]["input_token_logprobs"][1:]
            expected = alone["meta_info"]["input_token_logprobs"][1:]
            assert [token for _, token, _ in got] == ids[1:]
            assert [p for p, *_ in got] == pytest.approx([p for p, *_ in expected], abs=0.1)


# Isolation


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"pic_namespace": "a"}, {"pic_namespace": "b"}),
        ({"pic_namespace": "a"}, {}),
        ({"extra_key": "a"}, {"extra_key": "b"}),
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"cache_salt": "a"}, {}),
        ({"cache_salt": "a"}, {"extra_key": "a"}),
        ({"cache_salt": "a", "extra_key": "b"}, {"cache_salt": "ab"}),
    ],
    ids=str,
)
def test_tenants_do_not_see_each_others_chunks(
    server: Server, corpus: Corpus, first: dict[str, str], second: dict[str, str]
) -> None:
    ids, params = join(*corpus.chunks(20, 40, 10))

    def ask(tenant: dict[str, str]) -> dict[str, Any]:
        ours = {key: value for key, value in tenant.items() if key.startswith("pic_")}
        theirs = {key: value for key, value in tenant.items() if key not in ours}
        return report_of(server.generate(ids, {**REUSE, **params, **ours}, **theirs))

    assert ask(first)["outcome"] == "cold"
    stranger = ask(second)
    assert (stranger["outcome"], stranger["reused_tokens"]) == ("cold", 0)
    assert ask(first)["reused_tokens"] == 40
    assert ask(second)["reused_tokens"] == 40


# Wrong requests

IDS = [504, 11, 88, 1024, 7, 300]
TEXT = f"a{DELIMITER}b"
WRONG: list[tuple[Any, Any, str]] = [
    # prompt, custom_params, key that the message names
    (IDS, {"pic_navg": 4}, "pic_navg"),
    (IDS, {"pic_ttft_s": 1}, "pic_ttft_s"),
    (IDS, {"pic": "yes"}, "pic: got 'yes'"),
    (IDS, {"pic_n_avg": "8"}, "pic_n_avg"),
    (IDS, {"pic_n_avg": True}, "pic_n_avg"),
    (IDS, {"pic_max_share": 0}, "pic_max_share"),
    (IDS, {"pic_bounds": [0, 4, 2]}, "pic_bounds"),
    (IDS, {"pic_bounds": [2, 2]}, "pic_bounds"),
    (IDS, {"pic_bounds": [0, len(IDS)]}, "pic_bounds"),
    (IDS, {"pic_bounds": [-1]}, "pic_bounds"),
    (IDS, {"pic_bounds": [[0]]}, "pic_bounds"),
    (IDS, {"pic_bounds": "0"}, "pic_bounds"),
    (IDS, {"pic_delimiter": "#"}, "pic_delimiter"),
    (TEXT, {"pic_bounds": [0, 1]}, "pic_bounds"),
    (TEXT, {"pic_delimiter": ""}, "pic_delimiter"),
    (TEXT, {"pic_strategy": "best"}, "pic_strategy"),
    (DELIMITER, None, "pic_delimiter"),
    (DELIMITER * 2, None, "pic_delimiter"),
    ("D", {"pic_delimiter": "D"}, "pic_delimiter"),
    ("DD", {"pic_delimiter": "D"}, "pic_delimiter"),
    (IDS, {"x": {"y": {"z": 1}}}, "custom_params"),
    (IDS, {"x": [[1, 2]]}, "custom_params"),
    ("Hello", {"x": [{"y": 1}]}, "custom_params"),
    ("Hello", [1], "custom_params"),
]


@pytest.mark.parametrize(("prompt", "params", "key"), WRONG, ids=[str(row)[:60] for row in WRONG])
def test_a_wrong_request_is_a_400_that_names_the_key(
    server: Server, prompt: Any, params: Any, key: str
) -> None:
    response = server.post(prompt, params)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith(key)
    assert ", expected " in message
    # Once streaming has begun the error comes as the first event.
    streamed = server.post(prompt, params, stream=True)
    error = json.loads(streamed.text.splitlines()[0].removeprefix("data: "))["error"]
    assert (error["code"], error["message"]) == (400, message)


def test_one_wrong_request_refuses_its_batch(server: Server) -> None:
    sampling = [{"max_new_tokens": 1}, {"max_new_tokens": 1, "custom_params": {"pic_navg": 1}}]
    response = server.post([IDS, IDS], sampling_params=sampling)
    assert response.status_code == 400
    assert "pic_navg" in response.json()["error"]["message"]


@pytest.mark.parametrize("with_pic", [True, False], ids=["pic", "plain"])
def test_a_prompt_longer_than_the_context_is_a_400(
    server: Server, corpus: Corpus, with_pic: bool
) -> None:
    ids = list(itertools.islice(itertools.cycle(corpus.chunk(100)), CONTEXT_LEN + 10))
    params = {"pic_bounds": [0, 5000]} if with_pic else None
    response = server.post(ids, params)
    assert response.status_code == 400
    assert str(CONTEXT_LEN) in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("prompt", "params"),
    [("Hello", {}), (IDS, {"pic_bounds": [0]}), (IDS, {"pic_strategy": "full"})],
)
def test_strict_refuses_what_pic_cannot_serve(
    server: Server, prompt: Any, params: dict[str, Any]
) -> None:
    response = server.post(prompt, {**params, "pic_strict": True})
    assert response.status_code == 400
    assert "pic_strict" in response.json()["error"]["message"]


def test_strict_serves_what_pic_can_serve(server: Server, corpus: Corpus) -> None:
    ids, params = join(*corpus.chunks(20, 30, 10))
    assert report_of(server.generate(ids, {**params, "pic_strict": True}))["fallback"] is None


# Clients that go away


def leave(server: Server, request: Mapping[str, Any], after_events: int, wait_s: float) -> None:
    """Send a request, read so many events of its answer, wait, and close the connection."""
    content = json.dumps({**request, "stream": True}).encode()
    head = (
        "POST /generate HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {API_KEY}\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection(server.address, timeout=60) as connection:
        connection.sendall(head.encode() + content)
        seen = b""
        while seen.count(b"data: ") < after_events:
            received = connection.recv(65536)
            assert received, seen
            seen += received
        time.sleep(wait_s)


@pytest.mark.parametrize(
    ("after_events", "wait_s"),
    [(0, 0.0), (0, 0.05), (0, 0.3), (0, 1.0), (1, 0.0), (5, 0.0)],
    ids=["at_once", "50ms", "300ms", "1s", "first_token", "mid_decode"],
)
def test_a_client_that_goes_away_leaves_nothing_behind(
    server: Server, corpus: Corpus, after_events: int, wait_s: float
) -> None:
    system, query = corpus.chunks(20, 10)
    old = corpus.chunk(60)
    ids, params = join(system, old, query)
    server.generate(ids, params)
    ids, params = join(system, *corpus.chunks(*[150] * 6), old, query)
    before = server.metric(ABORTED)
    leave(server, body(ids, params, 200), after_events, wait_s)
    server.wait_until_idle()
    assert server.metric(ABORTED) == before + 1
    answer = server.generate(ids, {**REUSE, **params}, 2)
    assert report_of(answer)["fallback"] is None
    assert report_of(answer)["reused_tokens"] >= len(old)
    server.flush()  # refused if anything still ran


def test_many_clients_that_go_away_at_once_leave_nothing_behind(
    server: Server, corpus: Corpus
) -> None:
    shared = corpus.chunk(100)
    requests = []
    for _ in range(8):
        ids, params = join(corpus.chunk(10), shared, corpus.chunk(150), corpus.chunk(10))
        requests.append(body(ids, params, 100))
    before = server.metric(ABORTED)
    moments = [(0, 0.0), (0, 0.1), (0, 0.5), (1, 0.0), (1, 0.1), (3, 0.0), (8, 0.0), (0, 1.5)]
    with ThreadPoolExecutor(8) as pool:
        futures = [
            pool.submit(leave, server, request, *moment)
            for request, moment in zip(requests, moments, strict=True)
        ]
        for future in futures:
            future.result()
    server.wait_until_idle()
    assert server.metric(ABORTED) == before + 8
    ids, params = join(corpus.chunk(10), shared, corpus.chunk(10))
    assert report_of(server.generate(ids, {**REUSE, **params}))["reused_tokens"] == len(shared)
    server.flush()


def test_requests_that_are_aborted_leave_nothing_behind(server: Server, corpus: Corpus) -> None:
    # More than run at once, so that some wait, some prefill and some decode.
    prompts = [join(*corpus.chunks(20, 100, 10)) for _ in range(8)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        futures = [pool.submit(server.post, *prompt, 150) for prompt in prompts]
        time.sleep(0.4)
        server.http.post("/abort_request", json={"abort_all": True}).raise_for_status()
        answers = [future.result() for future in futures]
    assert all(answer.status_code in (200, 400, 503) for answer in answers)
    finished = [a.json()["meta_info"]["completion_tokens"] for a in answers if a.status_code == 200]
    assert all(num_tokens < 150 for num_tokens in finished)
    server.wait_until_idle()
    server.flush()


# Many at once


def test_requests_in_company_get_the_answers_they_get_alone(server: Server, corpus: Corpus) -> None:
    system = corpus.chunk(20)
    shared = corpus.chunks(60, 70, 80, 50, 40)
    orders = list(itertools.permutations(range(5), 3))[::3]
    asked = []
    for number in range(20):
        chosen = [shared[index] for index in orders[number]]
        ids, params = join(system, *chosen, corpus.chunk(12))
        asked.append((ids, params, 6))
    plain = [(list(corpus.chunk(90)), None, 6) for _ in range(8)]
    for request in asked:
        server.generate(*request)  # chunks and exact prefixes are cached from here on
    alone = [server.generate(*request) for request in asked]
    mixed = [request for pair in itertools.zip_longest(asked, plain) for request in pair if request]
    with ThreadPoolExecutor(len(mixed)) as pool:
        answers = list(pool.map(lambda request: server.generate(*request), mixed))
    together = [
        answer for request, answer in zip(mixed, answers, strict=True) if request[1] is not None
    ]
    for answer in answers:
        assert len(answer["output_ids"]) == 6
        report_of(answer)
    assert all(report_of(answer)["fallback"] is None for answer in together)
    same = sum(a["output_ids"] == b["output_ids"] for a, b in zip(alone, together, strict=True))
    assert same >= 19


def test_cold_requests_that_share_chunks_arrive_together(server: Server, corpus: Corpus) -> None:
    system = corpus.chunk(20)
    shared = corpus.chunks(200, 100)
    prompts = [join(system, *shared, corpus.chunk(10)) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(lambda prompt: server.generate(prompt[0], {**REUSE, **prompt[1]}, 4), prompts)
        )
    assert all(report_of(answer)["fallback"] is None for answer in answers)
    again = [server.generate(ids, {**REUSE, **params}, 4) for ids, params in prompts]
    assert [report_of(answer)["reused_tokens"] for answer in again] == [300] * 4


def test_several_samples_of_one_prompt_are_answered(server: Server, corpus: Corpus) -> None:
    ids, params = join(*corpus.chunks(20, 60, 10))
    sampling = {"n": 3, "temperature": 0.8, "max_new_tokens": 4, "custom_params": params}
    answers = server.generate(ids, sampling_params=sampling)
    assert len(answers) == 3
    assert all(report_of(answer)["fallback"] is None for answer in answers)


# OpenAI's routes, plain


def test_a_plain_completion_works(server: Server) -> None:
    request = {"model": "x", "prompt": "The sky is", "max_tokens": 4, "temperature": 0}
    response = server.http.post("/v1/completions", json=request)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_plain_chat_works(server: Server, stream: bool) -> None:
    request = {
        "model": "x",
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 4,
        "temperature": 0,
        "stream": stream,
    }
    response = server.http.post("/v1/chat/completions", json=request)
    assert response.status_code == 200, response.text
    assert "hello" in response.text.lower()


def test_pic_goes_on_being_active(server: Server) -> None:
    assert server.metric("sglang_pic_active") == 1
    assert server.metric("sglang_pic_requests_total", fallback="internal_error") == 0


# Last, because a server that does not refuse these dies of them


@pytest.mark.parametrize(
    "prompt",
    [
        {"input_ids": []},
        {"text": ""},
        {"text": ["Hi", ""]},
        {"input_ids": [[1, 2], []]},
    ],
    ids=str,
)
def test_an_empty_prompt_is_a_400(server: Server, prompt: dict[str, Any]) -> None:
    request = {**prompt, "sampling_params": {"max_new_tokens": 1}}
    assert server.http.post("/generate", json=request).status_code == 400
