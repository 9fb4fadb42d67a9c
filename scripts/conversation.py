"""A conversation of several turns over documents in the first, with PIC and without, turn by turn.

Knows chat messages and what is compared. Does not know how a server is started (`server`). Answers
are scripted, so that both sides see the same conversation. The plain side keeps SGLang's own prefix
cache under an `extra_key`, as a real conversation would.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from sglang_ext.errors import ExtError, ServerFailed
from sglang_ext.scripts.server import default_threads, load_encoder, serve
from sglang_ext.scripts.workload import cut_passages, python_topics

NUM_DOCUMENTS = 6
DOCUMENT_TOKENS = (200, 260)
TOP_LOGPROBS = 200
TURNS = (
    ("What are these passages about?", "They describe parts of the Python language."),
    ("Which statement is described first?", "The first passage describes an assertion."),
    ("Does it take an expression?", "Yes, it takes a condition and an optional message."),
    ("What happens if it is false?", "An error is raised with the message."),
    ("Can this be turned off?", "Yes, with an option of the interpreter."),
    ("Name one other statement.", "Assignment is another one."),
)

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn, asked on both sides.

    Attributes:
        turn: From 1.
        prompt_tokens: Of the prompt; the sum of the next four.
        exact: Tokens there exactly.
        reused: Tokens of cached chunks used as kept.
        recomputed: Tokens of cached chunks computed again.
        computed: Tokens not cached.
        ttft_ratio: Time to the first token, plain by PIC.
        kl_first_token: KL of the first token to plain, nats, over the most likely tokens of plain
            and all others together.
    """

    turn: int
    prompt_tokens: int
    exact: int
    reused: int
    recomputed: int
    computed: int
    ttft_ratio: float
    kl_first_token: float


def run_conversation(http: httpx.Client, documents: Sequence[str]) -> list[Turn]:
    """Hold the conversation with a running PIC server.

    Args:
        http: Client of the server.
        documents: Texts that stand in the first turn, a content part each.

    Raises:
        ServerFailed: A request was refused, or PIC did not serve it.
    """
    turns: list[Turn] = []
    messages: list[Message] = [{"role": "system", "content": "Answer from the passages."}]
    for number, (question, answer) in enumerate(TURNS, start=1):
        texts = [*documents, question] if number == 1 else [question]
        messages.append({"role": "user", "content": [{"type": "text", "text": t} for t in texts]})
        plain, plain_ms = _ask(http, messages, {"pic": False}, extra_key="plain")
        pic, pic_ms = _ask(http, messages, {})
        turns.append(_make_turn(number, plain, pic, plain_ms / pic_ms))
        messages.append({"role": "assistant", "content": answer})
    return turns


def documents_of(model: str) -> list[str]:
    """Passages for the first turn."""
    encode = load_encoder(model)
    passages = cut_passages(python_topics(), lambda text: len(encode(text)), *DOCUMENT_TOKENS)
    return [passage.text for passage, _ in zip(passages, range(NUM_DOCUMENTS), strict=False)]


def main(argv: Sequence[str] | None = None) -> int:
    """Serve a model with PIC, hold a conversation, write a JSON file."""
    parser = argparse.ArgumentParser(prog="conversation", description=main.__doc__)
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--out", type=Path, default=Path("build/conversation.json"))
    args = parser.parse_args(argv)
    log_path = args.out.with_suffix(".log")
    try:
        threads = default_threads()
        with serve(
            args.model, "--enable-pic", threads=threads, log_path=log_path, say=print
        ) as client:
            turns = run_conversation(client.http, documents_of(args.model))
    except ExtError as exc:
        print(f"conversation failed: {exc}")
        return 1
    write_turns(turns, args.out)
    return 0


def write_turns(turns: Sequence[Turn], path: Path) -> None:
    """Write the turns as JSON, and show them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [asdict(turn) for turn in turns]
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(" ".join(f"{name}={value}" for name, value in row.items()))


def _ask(
    http: httpx.Client, messages: Sequence[Message], params: Mapping[str, Any], **fields: Any
) -> tuple[Mapping[str, Any], float]:
    body = {
        "model": "default",
        "messages": messages,
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": TOP_LOGPROBS,
        "return_meta_info": True,
        "custom_params": dict(params),
        **fields,
    }
    started = time.perf_counter()
    response = http.post("/v1/chat/completions", json=body)
    elapsed_ms = (time.perf_counter() - started) * 1e3
    if response.status_code != httpx.codes.OK:
        raise ServerFailed(f"HTTP {response.status_code}: {response.text}")
    choice: Mapping[str, Any] = response.json()["choices"][0]
    return choice, elapsed_ms


def _make_turn(number: int, plain: Mapping[str, Any], pic: Mapping[str, Any], ratio: float) -> Turn:
    report = pic["meta_info"]["pic"]
    if report["fallback"] is not None:
        raise ServerFailed(f"turn {number} was prefilled in full: {report['fallback']}")
    return Turn(
        turn=number,
        prompt_tokens=report["prompt_tokens"],
        exact=report["exact_tokens"],
        reused=report["reused_tokens"],
        recomputed=report["recomputed_tokens"],
        computed=report["computed_tokens"],
        ttft_ratio=round(ratio, 3),
        kl_first_token=round(_kl(_top(plain), _top(pic)), 5),
    )


def _top(choice: Mapping[str, Any]) -> dict[str, float]:
    first = choice["logprobs"]["content"][0]
    return {str(entry["bytes"]): entry["logprob"] for entry in first["top_logprobs"]}


def _kl(expected: Mapping[str, float], got: Mapping[str, float]) -> float:
    """KL over the tokens both sides name, and all others as one."""
    shared = expected.keys() & got.keys()
    pairs = [(math.exp(expected[token]), math.exp(got[token])) for token in shared]
    rest = [max(1 - sum(side), 1e-9) for side in zip(*pairs, strict=True)]
    return math.fsum(p * math.log(p / q) for p, q in [*pairs, (rest[0], rest[1])])


if __name__ == "__main__":
    sys.exit(main())
