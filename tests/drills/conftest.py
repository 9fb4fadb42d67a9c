"""What the drills share: prompts, right answers, and the table at the end.

Every drill leaves a row, right or not; the rows are shown at the end of the run and written to
`build/drills.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from itertools import islice
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from sglang_ext.scripts.server import load_encoder
from sglang_ext.scripts.workload import (
    Prompt,
    cut_passages,
    make_prompts,
    python_topics,
    spread_sizes,
)
from tests.drills.drill import (
    DELIMITER,
    VOCAB_SIZE,
    Case,
    Row,
    Run,
    Served,
    StartRun,
    open_server,
)

PASSAGE_TOKENS = (60, 110)
NUM_PASSAGES = 20
PROMPT_PASSAGES = (3, 6)
NUM_CASES = 11
QUOTED_WORDS = 12
SEED = 11
ROWS = pytest.StashKey[list[Row]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash[ROWS]
    if not rows:
        return
    path = config.rootpath / "build" / "drills.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    table = Table(caption=str(path.relative_to(config.rootpath)))
    for field in fields(Row):
        table.add_column(field.name, justify="left" if field.name == "drill" else "right")
    for row in rows:
        table.add_row(*(str(value) for value in asdict(row).values()))
    terminalreporter.section("drills")
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table)
    terminalreporter.write(capture.get())


@pytest.fixture(scope="session")
def rows(request: pytest.FixtureRequest) -> list[Row]:
    """What the drills so far came to; a drill adds its own."""
    return request.config.stash[ROWS]


class Reference:
    """What a server by itself answers.

    Attributes:
        cases: The prompts with their right answers.
        full: For each prompt the answer after an ordinary prefill.
        log: The server's log.
    """

    def __init__(self, cases: list[Case], full: list[Any], log: str) -> None:
        self.cases = cases
        self.full = full
        self.log = log


@pytest.fixture(scope="session")
def texts(model_path: str) -> list[str]:
    """Prompts of real prose: system text, passages in changing orders, a question about one."""
    encode = load_encoder(model_path)
    cut = cut_passages(python_topics(), lambda text: len(encode(text)), *PASSAGE_TOKENS)
    sizes = spread_sizes(NUM_CASES, *PROMPT_PASSAGES, seed=SEED)
    prompts = make_prompts(list(islice(cut, NUM_PASSAGES)), sizes, seed=SEED)
    return [
        DELIMITER.join((*prompt.chunks[:-1], _question(prompt, number)))
        for number, prompt in enumerate(prompts)
    ]


def _question(prompt: Prompt, number: int) -> str:
    """Asks for one passage's next word, which only that passage's KV can tell."""
    words = prompt.passages[number % len(prompt.passages)].text.split()
    quote = " ".join(words[len(words) // 2 - QUOTED_WORDS : len(words) // 2])
    return f"Question: How does the passage go on that says this?\nAnswer: {quote}"


@pytest.fixture(scope="session")
def reference(
    model_path: str, texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    """Asks a server without lower tiers, which is gone then; every prompt finds nothing cached."""
    log_path = tmp_path_factory.mktemp("reference") / "log"
    with open_server(model_path, log_path) as served:
        cases: list[Case] = []
        full: list[Any] = []
        for number, text in enumerate(texts):
            answer = served.ask(text, pic_namespace=f"reference {number}")
            assert answer.report["outcome"] == "cold"
            assert answer.report["reused_tokens"] == 0
            cases.append(Case(text, answer.logprobs))
            plain = {"pic": False}
            full.append(
                served.client.first_logprobs(text, VOCAB_SIZE, plain, extra_key=str(number))
            )
    return Reference(cases, full, log_path.read_text(errors="replace"))


@pytest.fixture(scope="session")
def cases(reference: Reference) -> list[Case]:
    """The prompts with their right answers."""
    return reference.cases


@pytest.fixture(scope="session")
def start_run(cases: list[Case], rows: list[Row]) -> StartRun:
    """Begins a drill on a server; at its end the row is added, and what always holds is checked."""

    @contextmanager
    def start(name: str, served: Served, **options: Any) -> Iterator[Run]:
        run = Run(name, served, cases, **options)
        try:
            with run:
                yield run
        finally:
            rows.append(run.row)
        assert run.row.lost == 0, run.errors
        assert run.row.wrong == 0
        assert run.is_prompt(), run.row
        assert served.is_unharmed(), served.complaints()

    return start
