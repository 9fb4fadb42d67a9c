"""LongBench data as prompts cut into chunks, so that a position-independent cache can serve them.

Knows the rows of LongBench (version 1), how the context of each data set is put together, and how
a question is asked about it, in words of its own. Does not know a tokenizer (sizes are characters),
a model or a server.

    chunks[0]         instruction                        of the data set
    chunks[1:-1]      passage | passage | ... | passage  the row's context, nothing added or lost
    chunks[-1]        question                           of the row

A passage ends where its data set ends it (`Dataset.unit`), and sooner if it is longer than a chunk
may be. Blanks and separators between two passages belong to the first of them.

Sources: LongBench (arXiv:2308.14508), `task.md`, `eval.py` and `config/` of THUDM/LongBench for
fields, scores and lengths of answers; Multi-News (arXiv:1906.01749) for `|||||`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sglang_ext.errors import ConfigError
from sglang_ext.scripts.quality.scores import Metric, check_answers

MAX_CHUNK_CHARS = 4_000
"""Of a chunk of the context: about a thousand tokens of English."""

_PARAGRAPH_END = re.compile(r"\n(?:[ \t\r]*\n)+")
_SENTENCE_END = re.compile(r"[.!?][\"'\u201d\u2019)\]]*\s+")
_LINE_END = re.compile(r"\n")
_WORD_END = re.compile(r"\s+")

PROSE = (_PARAGRAPH_END, _SENTENCE_END, _LINE_END, _WORD_END)
"""Where a piece of prose may end, best first; each border lies behind what the pattern matches."""

CODE = (_PARAGRAPH_END, _LINE_END, _WORD_END)
"""Where a piece of code may end."""

_PASSAGE = re.compile(r"^(?=Passage \d+:)", re.MULTILINE)
_PARAGRAPH = re.compile(r"^(?=Paragraph \d+:)", re.MULTILINE)
_DIALOGUE = re.compile(r"^(?=Dialogue:)", re.MULTILINE)
_ARTICLE = re.compile(r"^(?=Passage \d+:)|\|{5}\s*", re.MULTILINE)

Borders = Sequence[re.Pattern[str]]


@dataclass(frozen=True, slots=True)
class LongPrompt:
    """One row of a data set, as it is asked and scored.

    Attributes:
        task: Name of the data set.
        chunks: Instruction, pieces of the context, question; together they are the prompt.
        answers: Any of which is right, at least one.
        metric: How the data set is scored.
        max_new_tokens: How long an answer may be.
        prompt_id: The row's `_id`, or its file and line.
    """

    task: str
    chunks: tuple[str, ...]
    answers: tuple[str, ...]
    metric: Metric
    max_new_tokens: int
    prompt_id: str

    @property
    def context(self) -> str:
        """What the row has as its context, whole."""
        return "".join(self.chunks[1:-1])


@dataclass(frozen=True, slots=True)
class Dataset:
    """What is the same for all rows of a data set.

    Attributes:
        instruction: The first chunk.
        question: The last chunk; `{input}` stands for the row's input. A data set without it has
            nothing to ask but the same for every row, and its inputs are not read.
        metric: How LongBench scores it.
        max_new_tokens: How long LongBench lets an answer be.
        unit: Where one passage of its context ends and the next begins; None where there are none.
        borders: Where a passage that is too long may be cut, best first.
    """

    instruction: str
    question: str
    metric: Metric
    max_new_tokens: int
    unit: re.Pattern[str] | None
    borders: Borders = PROSE

    def cut(self, context: str, max_chunk_chars: int) -> list[str]:
        """Passages of a context, none longer than that; joined, they are the context."""
        passages = [context] if self.unit is None else split_behind(context, self.unit)
        return [
            piece
            for passage in passages
            for piece in cut_text(passage, max_chunk_chars, self.borders)
        ]


_MULTI_HOP = Dataset(
    instruction=(
        "Several passages follow, and behind them a question. Its answer has to be put together "
        "from what the passages say. Reply with the answer alone: a name, a date, a number, yes "
        "or no.\n\n"
    ),
    question="\n\nQuestion: {input}\nThe answer alone, without a sentence around it.\nAnswer:",
    metric=Metric.TOKEN_F1,
    max_new_tokens=32,
    unit=_PASSAGE,
)
_STORY = Dataset(
    instruction=(
        "Here is a book or the script of a film. Behind it comes a question, to be answered in a "
        "few words.\n\n"
    ),
    question="\n\nQuestion about this work: {input}\nA few words, no explanation.\nAnswer:",
    metric=Metric.TOKEN_F1,
    max_new_tokens=128,
    unit=None,
)
_FEW_SHOT = Dataset(
    instruction=(
        "Every dialogue below has its summary behind it. The last one has none yet: write it in "
        "the manner of the others.\n\n"
    ),
    question="\n\n{input}",
    metric=Metric.ROUGE_L,
    max_new_tokens=128,
    unit=_DIALOGUE,
)
_NEWS = Dataset(
    instruction="News articles follow that report on the same events.\n\n",
    question="\n\nTell in one text of about a page what these articles report.\nSummary:",
    metric=Metric.ROUGE_L,
    max_new_tokens=512,
    unit=_ARTICLE,
)
_RETRIEVAL = Dataset(
    instruction=(
        "Numbered paragraphs follow, and behind them an abstract of one of them. Find out which "
        "one it is.\n\n"
    ),
    question=(
        "\n\nAbstract: {input}\nName the paragraph it was written about, in the form "
        '"Paragraph <number>".\nAnswer:'
    ),
    metric=Metric.PASSAGE_RETRIEVAL,
    max_new_tokens=32,
    unit=_PARAGRAPH,
)
_ONE_FILE = Dataset(
    instruction="Here is the beginning of a source file. Go on with its next line.\n\n",
    question="\n\nThe one line of code that comes next:\n",
    metric=Metric.EDIT_SIMILARITY,
    max_new_tokens=64,
    unit=None,
    borders=CODE,
)
_MANY_FILES = Dataset(
    instruction=(
        "Here are parts of the files of a repository, and behind them the beginning of one more "
        "file. Go on with the next line of that one.\n\n"
    ),
    question="\n{input}\n\nThe one line of code that comes next:\n",
    metric=Metric.EDIT_SIMILARITY,
    max_new_tokens=64,
    unit=None,
    borders=CODE,
)

DATASETS: Mapping[str, Dataset] = MappingProxyType(
    {
        "2wikimqa": _MULTI_HOP,
        "hotpotqa": _MULTI_HOP,
        "lcc": _ONE_FILE,
        "multi_news": _NEWS,
        "musique": _MULTI_HOP,
        "narrativeqa": _STORY,
        "passage_retrieval_en": _RETRIEVAL,
        "repobench-p": _MANY_FILES,
        "samsum": _FEW_SHOT,
    }
)

FIRST_LINE_TASKS = frozenset({"samsum"})
"""Whose answers LongBench cuts off at their first newline (`scores.first_line`)."""


def read_prompts(
    path: Path, task: str | None = None, max_chunk_chars: int = MAX_CHUNK_CHARS
) -> Iterator[LongPrompt]:
    """Prompts of a file in the format of LongBench, a JSON object a line, read line by line.

    Args:
        path: The file; of its rows, `input`, `context`, `answers`, `dataset` and `_id` are read.
        task: Name of the data set, for rows without `dataset`.
        max_chunk_chars: Longest piece of a context, in characters, at least 1.

    Yields:
        A prompt for each line that is not blank, in their order.

    Raises:
        ConfigError: An argument is wrong, at once; or the file or a line of it is, when it is
            reached. The message says file, line, key, what was got and what was expected.
    """
    if task is not None and task not in DATASETS:
        raise ConfigError(f"--task: got {task!r}, expected one of {', '.join(DATASETS)}")
    if max_chunk_chars < 1:
        raise ConfigError(f"max_chunk_chars: got {max_chunk_chars}, expected at least 1")
    return _read_lines(path, task, max_chunk_chars)


def cut_text(text: str, max_chars: int, borders: Borders = PROSE) -> list[str]:
    """Cut a text into pieces as long as fit, at the best borders that make them fit.

    Args:
        text: Joined, the pieces are this text; one that is short enough is left whole.
        max_chars: Longest piece, at least 1.
        borders: Best first. A piece ends behind a match of the first; what lies between two of
            them and is still too long is cut at the next, and in the end anywhere.
    """
    if len(text) <= max_chars:
        return [text]
    if not borders:
        return [text[start : start + max_chars] for start in range(0, len(text), max_chars)]
    best, *others = borders
    units = (
        unit
        for whole in split_behind(text, best)
        for unit in cut_text(whole, max_chars, tuple(others))
    )
    return list(_pack(units, max_chars))


def split_behind(text: str, border: re.Pattern[str]) -> list[str]:
    """Split a text behind each match; nothing is lost, and no part is blank if the text is not."""
    parts = [""]
    start = 0
    for end in (*(match.end() for match in border.finditer(text)), len(text)):
        part = text[start:end]
        if part.strip() and parts[-1].strip():
            parts.append(part)
        else:
            parts[-1] += part
        start = end
    return parts


def _pack(units: Iterable[str], max_chars: int) -> Iterator[str]:
    """Join neighbours as long as they fit."""
    piece = ""
    for unit in units:
        if piece and len(piece) + len(unit) > max_chars:
            yield piece
            piece = ""
        piece += unit
    if piece:
        yield piece


def _read_lines(path: Path, task: str | None, max_chunk_chars: int) -> Iterator[LongPrompt]:
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _read_line(line, f"{path}:{number}", task, max_chunk_chars)
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc}") from exc


def _read_line(line: bytes, place: str, task: str | None, max_chunk_chars: int) -> LongPrompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{place}: got no JSON ({exc}), expected an object") from exc
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: got {type(row).__name__}, expected an object")
    name = _dataset_of(row, place, task)
    dataset = DATASETS[name]
    context = _text(row, "context", place)
    asked = _text(row, "input", place) if "{input}" in dataset.question else ""
    return LongPrompt(
        task=name,
        chunks=(
            dataset.instruction,
            *dataset.cut(context, max_chunk_chars),
            dataset.question.format(input=asked),
        ),
        answers=_answers(row, place, dataset.metric),
        metric=dataset.metric,
        max_new_tokens=dataset.max_new_tokens,
        prompt_id=_text(row, "_id", place) if row.get("_id") is not None else place,
    )


def _dataset_of(row: dict[str, Any], place: str, task: str | None) -> str:
    name = row.get("dataset")
    if name is None:
        name = task
    if name is None:
        raise ConfigError(f"{place}: dataset: got nothing, expected a name, here or as --task")
    if not isinstance(name, str) or name not in DATASETS:
        raise ConfigError(f"{place}: dataset: got {name!r}, expected one of {', '.join(DATASETS)}")
    return name


def _text(row: dict[str, Any], key: str, place: str) -> str:
    expected = "expected a string that is not blank"
    if key not in row:
        raise ConfigError(f"{place}: {key}: got nothing, {expected}")
    text = row[key]
    if not isinstance(text, str):
        raise ConfigError(f"{place}: {key}: got {type(text).__name__}, {expected}")
    if not text.strip():
        raise ConfigError(f"{place}: {key}: got {text[:20]!r}, {expected}")
    return text


def _answers(row: dict[str, Any], place: str, metric: Metric) -> tuple[str, ...]:
    expected = "expected a list of strings, at least one of them not blank"
    if "answers" not in row:
        raise ConfigError(f"{place}: answers: got nothing, {expected}")
    answers = row["answers"]
    if not isinstance(answers, list):
        raise ConfigError(f"{place}: answers: got {type(answers).__name__}, {expected}")
    for answer in answers:
        if not isinstance(answer, str):
            raise ConfigError(f"{place}: answers: got {type(answer).__name__} in it, {expected}")
    if not any(answer.strip() for answer in answers):
        raise ConfigError(f"{place}: answers: got {answers[:3]}, {expected}")
    try:
        check_answers(metric, answers)
    except ValueError as exc:
        raise ConfigError(f"{place}: {exc}") from exc
    return tuple(answers)
