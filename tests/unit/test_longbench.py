"""LongBench rows: cut where their data sets cut them, nothing lost, bad ones named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_ext.errors import ConfigError
from sglang_ext.scripts.quality.longbench import (
    DATASETS,
    FIRST_LINE_TASKS,
    PROSE,
    LongPrompt,
    cut_text,
    read_prompts,
    split_behind,
)
from sglang_ext.scripts.quality.scores import Metric, score

PASSAGES = (
    "Passage 1:\nPolish-Russian War\nThe film was directed by Xawery Zulawski.\n\n",
    "Passage 2:\nXawery Zulawski\nHe is a son of Malgorzata Braunek. See Passage 1: the film.\n\n",
    "Passage 3:\nMalgorzata Braunek\nShe was an actress.",
)
PARAGRAPHS = (
    "Paragraph 1: The causeway runs north from the lake to the city.\n\n",
    "Paragraph 2: Mordashov is the son of Russian parents.\n\n",
    "Paragraph 3: The mascot came to life in 1952.",
)
DIALOGUES = (
    "Dialogue: Amanda: I baked cookies.\r\nJerry: Sure!\nSummary: Amanda baked cookies.\n\n",
    "Dialogue: Olivia: Who are you voting for?\r\nOliver: Liberals.\nSummary: They are liberals.",
)
ARTICLES = (
    "Passage 1:\nA storm hit the coast on Monday. Thousands left.\n\n",
    "Passage 2:\nOn Tuesday the storm moved inland.",
)
DOCUMENTS = (
    "A storm hit the coast on Monday.\n\nThousands left. ||||| ",
    "On Tuesday the storm moved inland. |||||\n\n",
    "Nobody was hurt.",
)
STORY = 'Chapter 1\n\nIt rained. "Come in," said Ann.\n\nNobody came.'
SOURCE = "import os\n\n\ndef name():\n    return os.name\n\n\ndef size():\n"
FILES = "# a.py\nclass A:\n    pass\n\n# b.py\nclass B(A):\n    pass\n"

CONTEXTS = {
    "2wikimqa": PASSAGES,
    "hotpotqa": PASSAGES,
    "musique": PASSAGES,
    "passage_retrieval_en": PARAGRAPHS,
    "samsum": DIALOGUES,
    "multi_news": ARTICLES,
    "narrativeqa": (STORY,),
    "lcc": (SOURCE,),
    "repobench-p": (FILES,),
}
INPUTS = {
    "samsum": "Dialogue: Tim: Hi {there}\r\nKim: Bye\nSummary: ",
    "multi_news": "",
    "lcc": "",
    "repobench-p": "from b import B\n\ndef make():\n",
}
ANSWERS = {"passage_retrieval_en": ["Paragraph 3"], "lcc": ["    return os.stat(name()).st_size"]}


def row(task: str, **changes: Any) -> dict[str, Any]:
    """A row of a data set as LongBench has it; a key changed to None is left out."""
    fields = {
        "input": INPUTS.get(task, "Who is the mother of the director?"),
        "context": "".join(CONTEXTS[task]),
        "answers": ANSWERS.get(task, ["Malgorzata Braunek", "Braunek"]),
        "length": 1234,
        "dataset": task,
        "language": "en",
        "all_classes": None,
        "_id": f"{task}-0",
        **changes,
    }
    return {key: value for key, value in fields.items() if key not in changes or value is not None}


def write(path: Path, *rows: object) -> Path:
    lines = [line if isinstance(line, str) else json.dumps(line) for line in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def read(path: Path, *rows: object, **arguments: Any) -> list[LongPrompt]:
    return list(read_prompts(write(path, *rows), **arguments))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


@pytest.mark.parametrize("task", DATASETS)
def test_a_row_becomes_instruction_passages_and_question(task: str, file: Path) -> None:
    (prompt,) = read(file, row(task))
    assert prompt.task == task
    assert prompt.chunks[1:-1] == CONTEXTS[task]
    assert prompt.context == "".join(CONTEXTS[task])
    assert prompt.chunks[0].endswith("\n\n")
    assert prompt.chunks[-1].startswith("\n")
    assert row(task)["input"] in prompt.chunks[-1]
    assert prompt.answers == tuple(row(task)["answers"])
    assert prompt.prompt_id == f"{task}-0"


def test_instruction_and_question_hold_nothing_of_the_context(file: Path) -> None:
    for task in DATASETS:
        one, other = read(file, row(task), row(task, context="Passage 1:\nSomething else."))
        assert one.chunks[0] == other.chunks[0]
        assert one.chunks[-1] == other.chunks[-1]


@pytest.mark.parametrize(
    ("task", "metric", "max_new_tokens"),
    [
        ("2wikimqa", Metric.TOKEN_F1, 32),
        ("hotpotqa", Metric.TOKEN_F1, 32),
        ("musique", Metric.TOKEN_F1, 32),
        ("narrativeqa", Metric.TOKEN_F1, 128),
        ("samsum", Metric.ROUGE_L, 128),
        ("multi_news", Metric.ROUGE_L, 512),
        ("passage_retrieval_en", Metric.PASSAGE_RETRIEVAL, 32),
        ("lcc", Metric.EDIT_SIMILARITY, 64),
        ("repobench-p", Metric.EDIT_SIMILARITY, 64),
    ],
)
def test_scores_and_lengths_of_answers_are_longbenchs(
    task: str, metric: Metric, max_new_tokens: int, file: Path
) -> None:
    (prompt,) = read(file, row(task))
    assert (prompt.metric, prompt.max_new_tokens) == (metric, max_new_tokens)
    assert score(prompt.metric, prompt.answers[0], prompt.answers) == pytest.approx(1, abs=1e-7)


def test_every_data_set_has_its_score_checked_and_first_lines_are_of_known_ones() -> None:
    assert set(CONTEXTS) == set(DATASETS)
    assert set(DATASETS) > FIRST_LINE_TASKS == {"samsum"}


def test_news_that_are_separated_by_bars_are_cut_behind_them(file: Path) -> None:
    (prompt,) = read(file, row("multi_news", context="".join(DOCUMENTS)))
    assert prompt.chunks[1:-1] == DOCUMENTS


def test_what_is_before_the_first_passage_and_behind_the_last_bars_is_kept(file: Path) -> None:
    before, behind = read(
        file,
        row("hotpotqa", context="Preface.\n\n" + "".join(PASSAGES)),
        row("multi_news", context="One. ||||| Two. |||||\n"),
    )
    assert before.chunks[1:-1] == ("Preface.\n\n", *PASSAGES)
    assert behind.chunks[1:-1] == ("One. ||||| ", "Two. |||||\n")


def test_blanks_make_no_chunk_of_their_own(file: Path) -> None:
    (prompt,) = read(file, row("hotpotqa", context="\n \n" + "".join(PASSAGES) + "\n\n"))
    assert prompt.chunks[1:-1] == ("\n \n" + PASSAGES[0], PASSAGES[1], PASSAGES[2] + "\n\n")


def test_a_passage_too_long_is_cut_on_its_own(file: Path) -> None:
    long = "Passage 1:\nTitle\nFirst sentence here. Second one here. Third one here.\n\n"
    (prompt,) = read(file, row("musique", context=long + PASSAGES[2]), max_chunk_chars=60)
    assert prompt.chunks[1:-1] == (
        "Passage 1:\nTitle\nFirst sentence here. Second one here. ",
        "Third one here.\n\n",
        PASSAGES[2],
    )


@pytest.mark.parametrize(
    ("text", "max_chars", "expected"),
    [
        ("One. Two.\n\nThree. Four.", 14, ["One. Two.\n\n", "Three. Four."]),  # paragraphs first
        ("One. Two.\n\nThree. Four.", 10, ["One. ", "Two.\n\n", "Three. ", "Four."]),
        ("One.\n\nTwo. Three.", 12, ["One.\n\n", "Two. Three."]),  # though a sentence would fit
        ("A b.\n\nC d.\n\nE f.", 12, ["A b.\n\nC d.\n\n", "E f."]),  # as many as fit
        ('He said "no." Then he went.', 20, ['He said "no." ', "Then he went."]),
        ("one two three", 8, ["one two ", "three"]),  # words, if there is nothing better
        ("abcdefgh", 3, ["abc", "def", "gh"]),  # anywhere, in the end
        ("short", 5, ["short"]),
    ],
)
def test_prose_is_cut_at_the_best_border_that_fits(
    text: str, max_chars: int, expected: list[str]
) -> None:
    assert cut_text(text, max_chars, PROSE) == expected


def test_code_is_cut_at_blank_lines_and_then_at_lines(file: Path) -> None:
    (prompt,) = read(file, row("lcc"), max_chunk_chars=40)
    assert prompt.chunks[1:-1] == (
        "import os\n\n\n",
        "def name():\n    return os.name\n\n\n",
        "def size():\n",
    )


@pytest.mark.parametrize("task", ["lcc", "repobench-p"])
def test_code_has_no_sentences(task: str) -> None:
    pieces = ["x = f(1. , 2)\n", "y = 3\n"]
    assert DATASETS[task].cut("".join(pieces), 16) == pieces


@pytest.mark.parametrize("task", DATASETS)
@given(
    st.lists(
        st.sampled_from(
            [
                "Passage 2:\n",
                "Paragraph 2: ",
                "Dialogue: ",
                "||||| ",
                "A b. ",
                "\n",
                "\n\n",
                "x" * 9,
            ]
        )
        | st.text(max_size=8),
        max_size=30,
    ).map("".join),
    st.integers(1, 60),
)
@example("\n\n \n", 2)
@example("Passage 1:\nA.\n\nPassage 2:\nB. |||||\n\n", 20)
def test_no_text_is_lost_and_no_piece_is_too_long(
    task: str, context: str, max_chunk_chars: int
) -> None:
    pieces = DATASETS[task].cut(context, max_chunk_chars)
    assert "".join(pieces) == context
    assert all(len(piece) <= max_chunk_chars for piece in pieces)
    assert all(pieces) or not context


@given(
    st.lists(st.sampled_from(["A. ", "b", "\n", "\n\n", " "]), max_size=20).map("".join),
    st.sampled_from(PROSE),
)
def test_a_text_is_split_without_loss_and_without_blank_parts(
    text: str, border: re.Pattern[str]
) -> None:
    parts = split_behind(text, border)
    assert "".join(parts) == text
    assert all(part.strip() for part in parts) or not text.strip()
    assert all(border.search(part) for part in parts[:-1])


def test_prompts_come_line_by_line_and_an_error_only_when_it_is_reached(file: Path) -> None:
    prompts = read_prompts(write(file, row("lcc"), "", "{", row("samsum")))
    assert next(prompts).task == "lcc"
    with pytest.raises(ConfigError, match=re.escape(f"{file}:3: got no JSON")):
        next(prompts)


def test_no_more_is_read_than_is_asked_for(file: Path) -> None:
    prompts = read_prompts(write(file, row("lcc")))
    assert next(prompts).task == "lcc"
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(row("samsum")))
    assert next(prompts).task == "samsum"


def test_rows_of_several_data_sets_may_share_a_file(file: Path) -> None:
    prompts = read(file, *(row(task) for task in DATASETS))
    assert [prompt.task for prompt in prompts] == list(DATASETS)


def test_the_task_is_for_rows_that_name_no_data_set(file: Path) -> None:
    one, other = read(file, row("musique", dataset=None), row("samsum"), task="hotpotqa")
    assert one.task == "hotpotqa"
    assert other.task == "samsum"


def test_a_row_without_id_has_its_place_for_one(file: Path) -> None:
    (prompt,) = read(file, "", row("musique", _id=None))
    assert prompt.prompt_id == f"{file}:2"


def test_braces_in_a_row_are_text(file: Path) -> None:
    (prompt,) = read(file, row("hotpotqa", input="What is {context} in {0}?"))
    assert "What is {context} in {0}?" in prompt.chunks[-1]


def test_what_is_not_asked_for_may_be_blank_or_missing(file: Path) -> None:
    assert len(read(file, row("lcc", input=None), row("multi_news", input=" "))) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", r"got no JSON \(.*\), expected an object"),
        ("[" * 100_000, "got no JSON"),
        ("[1]", "got list, expected an object"),
        (row("musique", dataset=None), "dataset: got nothing, expected a name, here or as --task"),
        (row("musique", dataset="qasper"), "dataset: got 'qasper', expected one of 2wikimqa, hot"),
        (row("musique", dataset=["musique"]), r"dataset: got \['musique'\], expected one of 2wiki"),
        (row("musique", context=None), "context: got nothing, expected a string that is not blank"),
        (row("musique", context=["a"]), "context: got list, expected a string"),
        (
            row("musique", context=" \n"),
            r"context: got ' \\n', expected a string that is not blank",
        ),
        (row("musique", input=None), "input: got nothing, expected a string"),
        (row("musique", input=""), "input: got '', expected a string that is not blank"),
        (row("musique", input=3), "input: got int, expected a string"),
        (row("musique", _id=7), "_id: got int, expected a string that is not blank"),
        (row("musique", answers=None), "answers: got nothing, expected a list of strings"),
        (row("musique", answers="Braunek"), "answers: got str, expected a list of strings"),
        (row("musique", answers=[]), r"answers: got \[\], expected a list of strings"),
        (row("musique", answers=["", " "]), r"answers: got \['', ' '\], expected a list"),
        (row("musique", answers=["a", 1]), "answers: got int in it, expected a list of strings"),
        (
            row("passage_retrieval_en", answers=["3"]),
            "answers: got '3', expected one like 'Paragraph 12'",
        ),
    ],
)
def test_a_bad_line_is_named_with_file_number_key_got_and_expected(
    line: object, message: str, file: Path
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(f'{file}:2')}: {message}"):
        read(file, row("musique"), line)


def test_bytes_that_are_no_text_are_named(file: Path) -> None:
    file.write_bytes(b'{"input": "\xff"}\n')
    with pytest.raises(ConfigError, match=re.escape(f"{file}:1: got no JSON ('utf-8' codec")):
        next(read_prompts(file))


def test_an_unknown_data_set_lists_all_known_ones(file: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read(file, row("musique", dataset="qasper"))
    assert all(name in str(error.value) for name in DATASETS)


def test_arguments_are_checked_before_anything_is_read(tmp_path: Path) -> None:
    missing = tmp_path / "missing.jsonl"
    with pytest.raises(ConfigError, match="--task: got 'qasper', expected one of 2wikimqa"):
        read_prompts(missing, task="qasper")
    with pytest.raises(ConfigError, match="max_chunk_chars: got 0, expected at least 1"):
        read_prompts(missing, max_chunk_chars=0)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing.jsonl"
    with pytest.raises(ConfigError, match=re.escape(f"{missing}: cannot be read")):
        next(read_prompts(missing))


def test_an_answer_that_is_blank_beside_a_good_one_is_kept(file: Path) -> None:
    (prompt,) = read(file, row("musique", answers=["", "Braunek"]))
    assert prompt.answers == ("", "Braunek")
