"""One real server as its clients use it: the official OpenAI client, programs, examples, docs."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient

from sglang_ext.scripts.conversation import documents_of, run_conversation, write_turns
from sglang_ext.scripts.server import serve
from tests.corpus import Corpus

pytestmark = pytest.mark.server

D = "<|chunk|>"
DOCS = Path(__file__).resolve().parents[2] / "docs"
EXAMPLES = DOCS / "examples"
SYSTEM = "You answer from the passages, briefly."
ANSWER = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


class Chat:
    """The official client of the server under test."""

    def __init__(self, http: Any) -> None:
        self.http = http
        self.url = str(http.base_url).rstrip("/")
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def ask(self, messages: list[Any], params: Any = None, **more: Any) -> tuple[Any, Any]:
        """The answer and what PIC did."""
        extra = {"return_meta_info": True, "custom_params": params, **more.pop("extra", {})}
        answer = self.client.chat.completions.create(
            model="m", messages=messages, max_tokens=4, temperature=0, extra_body=extra, **more
        )
        return answer, answer.choices[0].model_dump()["meta_info"]["pic"]


@pytest.fixture(scope="module")
def chat(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chat]:
    """Started as SGLang recommends, with its options in a file."""
    folder = tmp_path_factory.mktemp("chat")
    config = folder / "config.yaml"
    config.write_text(
        f"enable-pic: true\npic-delimiter: '{D}'\npic-n-avg: 8\nenable-metrics: true\n"
        "served-model-name: small\n",
        encoding="utf-8",
    )
    with serve(
        model_path,
        "--config",
        str(config),
        threads=1,
        log_path=folder / "log",
        say=print,
        entry=("-c", "from sglang.cli.main import main; main()", "serve"),
    ) as client:
        yield Chat(client.http)


@pytest.fixture(scope="module")
def documents(model_path: str) -> list[str]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    corpus = Corpus(tokenizer)
    return [tokenizer.decode(corpus.chunk(length)) for length in [120] * 12]


def parts(*texts: str) -> list[Any]:
    return [{"type": "text", "text": text} for text in texts]


def asked(*texts: str) -> list[Any]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": parts(*texts)}]


def hits(report: Any) -> int:
    return int(report["exact_tokens"] + report["reused_tokens"] + report["recomputed_tokens"])


def test_content_parts_are_reused_in_any_order(chat: Chat, documents: list[str]) -> None:
    a, b, c, new = documents[:4]
    _, cold = chat.ask(asked(a, b, c, "What is it about?"))
    assert cold["outcome"] == "cold"
    _, warm = chat.ask(asked(b, new, c, a, "And what else?"))
    assert warm["outcome"] == "reused"
    assert warm["computed_tokens"] < 120 + 40
    assert hits(warm) > 3 * 110
    assert warm["prompt_tokens"] == hits(warm) + warm["computed_tokens"]


def test_every_route_gives_a_chunk_the_same_ids(chat: Chat, documents: list[str]) -> None:
    a, b = documents[4:6]
    chat.ask(asked(a, b, "What is it about?"))
    by_delimiter = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": D.join([b, a, "Well?"])},
    ]
    _, report = chat.ask(by_delimiter)
    assert hits(report) > 2 * 110
    sampling = {"max_new_tokens": 1, "temperature": 0}
    body = {"text": D.join(["Other text.", b, a, "Well?"]), "sampling_params": sampling}
    generated = chat.http.post("/generate", json=body).json()["meta_info"]["pic"]
    assert hits(generated) > 2 * 110
    completion = chat.client.completions.create(
        model="m", prompt=D.join(["Third text.", a, b, "Well?"]), max_tokens=1, temperature=0
    )
    assert completion.usage is not None
    before = _tokens(chat, "reused")
    chat.client.completions.create(
        model="m", prompt=D.join(["Fourth text.", b, a, "Well?"]), max_tokens=1, temperature=0
    )
    assert _tokens(chat, "reused") - before > 200


def _tokens(chat: Chat, kind: str) -> float:
    for line in chat.http.get("/metrics").text.splitlines():
        if line.startswith("sglang_pic_tokens_total") and f'kind="{kind}"' in line:
            return float(line.rpartition(" ")[2])
    return 0.0


def test_pic_off_has_the_same_prompt(chat: Chat, documents: list[str]) -> None:
    messages = asked(documents[6], documents[7], "Well?")
    pic, report = chat.ask(messages)
    plain, off = chat.ask(messages, {"pic": False}, extra={"extra_key": "plain"})
    assert report["fallback"] is None
    assert off["fallback"] == "disabled_by_request"
    assert plain.usage.prompt_tokens == pic.usage.prompt_tokens


def test_streaming_answers_as_without(chat: Chat, documents: list[str]) -> None:
    messages = asked(documents[8], documents[9], "Well?")
    chat.ask(messages)
    whole, report = chat.ask(messages)
    assert report["outcome"] == "reused"
    stream = chat.client.chat.completions.create(
        model="m", messages=messages, max_tokens=4, temperature=0, stream=True
    )
    text = "".join(event.choices[0].delta.content or "" for event in stream if event.choices)
    assert text == whole.choices[0].message.content


def test_tools_and_json_answers_work_with_chunks(chat: Chat, documents: list[str]) -> None:
    messages = asked(documents[10], "Is it so?")
    chat.ask(messages, tools=[WEATHER])
    _, report = chat.ask(messages, tools=[WEATHER])
    assert report["fallback"] is None
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}
    answer = chat.client.chat.completions.create(
        model="m", messages=messages, max_tokens=64, temperature=0, response_format=schema
    )
    assert isinstance(json.loads(answer.choices[0].message.content)["ok"], bool)


def test_a_wrong_key_is_a_bad_request_that_names_it(chat: Chat) -> None:
    for params in ({"pic_n_avg": -1}, {"pic_bounds": [0, 1]}):
        with pytest.raises(openai.BadRequestError, match=next(iter(params))):
            chat.ask(asked("Hi."), params)


def test_a_conversation_keeps_reusing_its_documents(chat: Chat, documents: list[str]) -> None:
    turns = ["What is it about?", "Why?", "How?", "Where?", "Who?", "When?"]
    messages = asked(*documents[:4], turns[0])
    known = 0
    for turn, question in enumerate(turns):
        if turn:
            messages.append({"role": "user", "content": question})
        answer, report = chat.ask(messages)
        if turn:
            assert hits(report) >= 0.95 * known
        known = report["prompt_tokens"]
        messages.append({"role": "assistant", "content": answer.choices[0].message.content or "."})


# Examples and documented commands, run as a user would


def run_example(name: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *args],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_frontend_program_and_its_branches_reuse_chunks(chat: Chat) -> None:
    before = _tokens(chat, "reused")
    lines = run_example("frontend_program.py", chat.url).split("\n")
    first, second = (line.split() for line in lines[:2])
    assert first == ["cold", "0"]
    assert second[0] == "reused"
    assert int(second[1]) > 200
    assert _tokens(chat, "reused") > before


def test_options_of_a_program_reach_the_server(chat: Chat) -> None:
    import sglang as sgl

    from sglang_ext.lang import PicRuntimeEndpoint, chunk, pic_gen, pic_report, plain_text

    @sgl.function
    def program(s: Any) -> None:
        s += "Read." + chunk(" One.") + chunk(" Two.") + chunk(" Go:")
        s += pic_gen("off", max_tokens=2, temperature=0, pic=False)
        s += chunk(" On:")
        s += pic_gen("on", max_tokens=2, temperature=0, pic_strategy="epic")

    backend = PicRuntimeEndpoint(chat.url, pic_namespace="program")
    for stream in (False, True):
        state = program.run(backend=backend, stream=stream)
        assert plain_text(state).startswith("Read. One. Two. Go:")
        off, on = pic_report(state, "off"), pic_report(state, "on")
        assert off is not None
        assert on is not None
        assert off["fallback"] == "disabled_by_request"
        assert (on["strategy"], on["chunks"]) == ("epic", 5)


def test_langchain_needs_nothing_but_the_url(chat: Chat) -> None:
    before = _tokens(chat, "reused")
    assert len(run_example("langchain_rag.py", chat.url).splitlines()) >= 2
    assert _tokens(chat, "reused") > before


def test_an_engine_reuses_chunks_offline(model_path: str) -> None:
    lines = run_example("offline.py", model_path, "cpu").splitlines()[-2:]
    first, second = (line.split() for line in lines)
    assert first == ["cold", "0"]
    assert second[0] == "reused"
    assert int(second[1]) > 150


def test_an_agent_keeps_the_manual_behind_a_changing_state(chat: Chat) -> None:
    lines = run_example("agent_loop.py", chat.url).splitlines()
    shares = [int(line.split()[2]) / int(line.split()[4]) for line in lines]
    assert len(shares) == 3
    assert min(shares[1:]) > 0.8


def test_the_service_keeps_its_tenants_apart(chat: Chat, tmp_path: Path) -> None:
    for tenant in ("north", "south"):
        (tmp_path / tenant).mkdir()
        text = "The sea is moved by the moon. Bees dance in the hive. " * 40
        (tmp_path / tenant / "facts.txt").write_text(text, encoding="utf-8")
    app = _load_example("rag_service").make_app(tmp_path, chat.url)
    with TestClient(app) as service:
        outcomes = [
            _ask(service, tenant, question)
            for tenant, question in (
                ("north", "What moves the sea?"),
                ("north", "Who dances in the hive?"),
                ("south", "What moves the sea?"),
            )
        ]
        assert service.post("/ask", json={"question": "?"}, headers={"x-tenant": "no"}).is_error
    assert outcomes == ["cold", "reused", "cold"]


def _ask(service: Any, tenant: str, question: str) -> str:
    answer = service.post("/ask", json={"question": question}, headers={"x-tenant": tenant})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["pic"]["outcome"])


def _load_example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_quick_start_answers_as_it_says(chat: Chat) -> None:
    text = (DOCS / "quick-start.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```bash test\n(.*?)```", text, re.DOTALL)
    url = chat.url
    commands = [command for block in blocks for command in block.strip().split("\n\n")]
    answers = []
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command], env={**os.environ, "URL": url}, capture_output=True, check=True
        )
        answers.append(json.loads(done.stdout))
    reports = [answer["meta_info"]["pic"] for answer in answers[:2]]
    assert [report["outcome"] for report in reports] == ["cold", "reused"]
    assert answers[2]["choices"][0]["meta_info"]["pic"]["fallback"] is None


def test_several_answers_to_one_prompt_are_all_served(chat: Chat, documents: list[str]) -> None:
    answer = chat.client.chat.completions.create(
        model="m",
        messages=asked(documents[11], "Well?"),
        n=3,
        max_tokens=3,
        logprobs=True,
        stop=["zzz"],
        presence_penalty=0.5,
    )
    assert len(answer.choices) == 3
    assert all(choice.logprobs.content for choice in answer.choices)


def test_six_turns_over_documents_reuse_what_went_before(chat: Chat, model_path: str) -> None:
    """Also the evidence: build/conversation.json."""
    turns = run_conversation(chat.http, documents_of(model_path))
    write_turns(turns, DOCS.parent / "build" / "conversation.json")
    assert len(turns) == 6
    for before, turn in pairwise(turns):
        earlier = before.prompt_tokens
        assert turn.exact + turn.reused + turn.recomputed >= 0.95 * earlier
        assert turn.computed < 100
    assert max(turn.kl_first_token for turn in turns) < 0.5


def test_responses_are_served_in_full(chat: Chat, documents: list[str]) -> None:
    answer = chat.client.responses.create(
        model="small", input=f"{documents[0]} What is it?", max_output_tokens=4, temperature=0
    )
    assert answer.status in ("completed", "incomplete")
    assert answer.output_text


def test_a_batch_of_programs_shares_chunks(chat: Chat) -> None:
    from sglang_ext.lang import PicRuntimeEndpoint, pic_report

    program = _load_example("frontend_program").answer
    orders = (["tides", "bees"], ["bees", "tides"], ["tides", "iron", "bees"])
    asks = [{"names": list(names), "question": "What moves the sea?"} for names in orders]
    backend = PicRuntimeEndpoint(chat.url, pic_namespace="batch")
    states = program.run_batch(asks, backend=backend, num_threads=1)
    reports = [pic_report(state, "answer") for state in states]
    assert [report and report["outcome"] for report in reports] == ["cold", "reused", "reused"]
