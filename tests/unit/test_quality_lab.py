"""The quality lab: what is asked in which order, rows by hand, verdicts, tables and plots."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sglang_ext.errors import ConfigError, ServerFailed
from sglang_ext.scripts.quality import run as command
from sglang_ext.scripts.quality.arms import parse_arms
from sglang_ext.scripts.quality.bootstrap import bootstrap_ratio_ci
from sglang_ext.scripts.quality.lab import (
    Lab,
    Limits,
    Question,
    Row,
    Sample,
    Tokenizer,
    agreement,
    check_strategies,
    check_warm,
    encode_chunks,
    first_token_distance,
    from_longbench,
    from_task,
    line_tokens,
    make_row,
    make_rows,
    with_lead,
)
from sglang_ext.scripts.quality.longbench import LongPrompt
from sglang_ext.scripts.quality.scores import Metric
from sglang_ext.scripts.quality.tables import (
    Point,
    make_tables,
    make_verdict_table,
    mean_points,
    pareto_front,
    plot_all,
)
from sglang_ext.scripts.quality.tasks import TaskPrompt
from sglang_ext.scripts.server import Result

END = 0
LETTERS = Tokenizer(
    encode=lambda text: [ord(letter) for letter in text],
    decode=lambda ids: "".join(map(chr, ids)),
    special_ids=frozenset({END}),
)
"""A token is a letter, and 0 ends an answer."""

ARMS = parse_arms(["daric:4", "qci:1,8,5%"])
QUESTION = Question(
    task="two_hop",
    index=0,
    prompt_id="two_hop/0",
    chunks=("Read.", "Ann works for Bo.", "Bo is in Rome.", "Where is Ann?"),
    answers=("Rome",),
    metric=Metric.EXACT_MATCH,
    max_new_tokens=28,
    is_one_line=True,
)
SAMPLE = Sample(
    task="two_hop",
    index=0,
    prompt_id="two_hop/0",
    chunks=16,
    prompt_tokens=1700,
    strategy="daric",
    budget="n_avg=8",
    recomputed_share=0.1,
    score=1.0,
    full_score=1.0,
    reuse_score=0.0,
    agreement=1.0,
    kl=0.1,
    ppl_gap=0.2,
    ttft_ms=50.0,
    full_ttft_ms=100.0,
    answer="Rome",
    full_answer="Rome",
    expected="Rome",
)


class FakeServer:
    """Answers as a server with PIC would, and remembers what was asked and cached."""

    def __init__(self, answers: Mapping[str, str] | None = None) -> None:
        self.answers = {"full": " Rome\nQuestion", **(answers or {})}
        self.calls: list[tuple[str, str, int]] = []
        self.namespaces: set[str] = set()
        self.compared: list[str] = []
        self.prefix_len = 0

    def generate(
        self,
        ids: Sequence[int],
        params: Mapping[str, Any],
        *,
        extra_key: str | None = None,
        max_new_tokens: int = 1,
    ) -> Result:
        strategy, name, report = self._serve(ids, params, extra_key)
        self.calls.append((strategy, name, max_new_tokens))
        text = self.answers.get(strategy, " Rome\nQuestion")[:max_new_tokens]
        ttft_ms = 100.0 if strategy == "full" else 50.0
        return Result(ttft_ms, tuple(LETTERS.encode(text)), text, {"pic": report})

    def first_logprobs(
        self,
        ids: Sequence[int],
        vocab_size: int,
        params: Mapping[str, Any],
        *,
        extra_key: str | None = None,
    ) -> Any:
        strategy, name, _ = self._serve(ids, params, extra_key)
        self.calls.append((f"{strategy} logprobs", name, 1))
        self.compared.append(LETTERS.decode(ids))
        return np.log([0.5, 0.3, 0.2] if strategy == "full" else [0.2, 0.3, 0.5])

    def _serve(
        self, ids: Sequence[int], params: Mapping[str, Any], extra_key: str | None
    ) -> tuple[str, str, dict[str, Any]]:
        if params.get("pic") is False:
            assert extra_key is not None
            return "full", extra_key, {"fallback": "disabled_by_request", "detail": None}
        name, bounds = params["pic_namespace"], params["pic_bounds"]
        is_cold = name not in self.namespaces
        self.namespaces.add(name)
        report = {
            "fallback": None,
            "detail": None,
            "exact_tokens": self.prefix_len if is_cold else max(bounds[1], self.prefix_len),
            "reused_tokens": 0 if is_cold else bounds[-1] - bounds[1],
            "recomputed_tokens": 0,
            "computed_tokens": len(ids) - (0 if is_cold else bounds[-1]),
            "recomputed_share": 0.0 if is_cold else 0.25,
        }
        return params["pic_strategy"], name, report


def make_lab(server: FakeServer, num_compared: int = 1, has_kl: bool = True) -> Lab:
    return Lab(server, LETTERS, 3, ARMS, num_compared, "run", has_kl)  # type: ignore[arg-type]


def make_cells() -> list[Row]:
    """Two tasks by full, reuse, two budgets of daric, and the control."""
    cells = []
    for task, lost in (("two_hop", 0.5), ("passage", 0.2)):
        cases = [
            ("full", "", 1.0, 0.0, 1.0),
            ("reuse", "", 0.0, 1.0, 1 - lost),
            ("daric", "n_avg=8", 0.08, 0.5, 1 - lost / 2),
            ("daric", "n_avg=20", 0.2, 0.1, 0.95),
            ("control", "cold twice", 0.0, 0.001, 1 - lost),
        ]
        for strategy, budget, share, kl, score in cases:
            samples = [
                replace(
                    SAMPLE,
                    task=task,
                    index=index,
                    strategy=strategy,
                    budget=budget,
                    recomputed_share=share,
                    kl=kl,
                    score=score,
                    reuse_score=1 - lost,
                )
                for index in range(3)
            ]
            cells.append(make_row("tiny", samples))
    return cells


def show(*tables: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    for table in tables:
        console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_a_prompt_is_preloaded_then_asked_by_every_arm_in_its_own_namespace() -> None:
    server = FakeServer()
    make_lab(server, num_compared=0).measure(QUESTION)
    own = "run-two_hop-0"
    most = len(" Rome\n") + 4
    assert server.calls == [
        ("reuse", own, 1),
        ("full", own, most),
        ("reuse", own, most),
        ("daric", own, most),
        ("qci", own, most),
    ]


def test_a_compared_prompt_is_asked_for_probabilities_and_the_control() -> None:
    server = FakeServer()
    make_lab(server).measure(QUESTION)
    own = "run-two_hop-0"
    assert server.calls[0] == ("reuse", own, 10)
    assert server.calls[5:] == [
        ("full logprobs", own, 1),
        ("reuse logprobs", own, 1),
        ("daric logprobs", own, 1),
        ("qci logprobs", own, 1),
        ("reuse", f"{own}-again", 10),
        ("reuse logprobs", f"{own}-noise-0", 1),
        ("reuse logprobs", f"{own}-noise-1", 1),
    ]


def test_probabilities_are_those_behind_the_blank_an_answer_begins_with() -> None:
    server = FakeServer()
    make_lab(server).measure(QUESTION)
    assert server.compared == ["".join(QUESTION.chunks) + " "] * 6


@pytest.mark.parametrize(
    ("answer", "lead"), [("Rome", ""), (" Rome", " "), (" \n 7", " \n "), ("  ", " "), ("", "")]
)
def test_the_lead_is_blank_and_leaves_a_token_to_compare(answer: str, lead: str) -> None:
    ask = encode_chunks(["ab", "c"], LETTERS.encode)
    led = with_lead(ask, LETTERS.encode(answer), LETTERS.decode)
    assert LETTERS.decode(led.ids) == "abc" + lead
    assert led.bounds == ask.bounds


def test_the_order_of_arms_rotates_and_that_of_samples_does_not() -> None:
    for index in range(6):
        server = FakeServer()
        samples = make_lab(server, num_compared=0).measure(replace(QUESTION, index=index))
        sides = ["full", "reuse", "daric", "qci"]
        turned = sides[index % 4 :] + sides[: index % 4]
        assert [strategy for strategy, _, _ in server.calls[1:]] == turned
        assert [sample.strategy for sample in samples] == sides


def test_samples_say_what_each_arm_made_of_the_prompt() -> None:
    server = FakeServer({"reuse": " Paris\n", "qci": " Rome" + chr(END) + "Rome"})
    full, reuse, daric, qci, control = make_lab(server).measure(QUESTION)
    assert full == Sample(
        task="two_hop",
        index=0,
        prompt_id="two_hop/0",
        chunks=2,
        prompt_tokens=sum(map(len, QUESTION.chunks)),
        strategy="full",
        budget="",
        recomputed_share=1.0,
        score=1.0,
        full_score=1.0,
        reuse_score=0.0,
        agreement=1.0,
        kl=0.0,
        ppl_gap=0.0,
        ttft_ms=100.0,
        full_ttft_ms=100.0,
        answer="Rome",
        full_answer="Rome",
        expected="Rome",
    )
    assert (reuse.answer, reuse.score, reuse.agreement) == ("Paris", 0.0, 1 / 5)
    assert (reuse.recomputed_share, reuse.ttft_ms, reuse.full_ttft_ms) == (0.25, 50.0, 100.0)
    assert reuse.kl == pytest.approx(0.3 * math.log(2.5))
    assert reuse.ppl_gap == pytest.approx(math.log(2.5))
    assert (daric.strategy, daric.budget, daric.score) == ("daric", "n_avg=4", 1.0)
    assert (qci.budget, qci.answer, qci.agreement) == ("1,8,5%", "Rome", 1.0)
    assert (control.strategy, control.budget) == ("control", "cold twice")
    assert (control.answer, control.full_answer, control.agreement) == ("Paris", "Paris", 1.0)
    assert (control.score, control.full_score, control.recomputed_share) == (0.0, 1.0, 0.0)
    assert control.kl == pytest.approx(0.0)


def test_only_the_first_compared_prompts_take_part_in_the_control() -> None:
    for index, has_kl, has_control in ((2, True, True), (3, True, False), (5, False, False)):
        samples = make_lab(FakeServer(), 5).measure(replace(QUESTION, index=index))
        assert (samples[-1].strategy == "control") is has_control
        assert (samples[1].kl is not None) is has_kl


def test_without_kl_the_control_still_compares_answers() -> None:
    server = FakeServer()
    samples = make_lab(server, has_kl=False).measure(QUESTION)
    assert not any("logprobs" in strategy for strategy, _, _ in server.calls)
    assert all(sample.kl is None and sample.ppl_gap is None for sample in samples)
    assert samples[-1].strategy == "control"


def test_an_arm_helped_by_an_exact_prefix_is_refused() -> None:
    server = FakeServer()
    server.prefix_len = len(QUESTION.chunks[0]) + 1
    with pytest.raises(ServerFailed, match="not cold"):
        make_lab(server).measure(QUESTION)
    server.namespaces.add("run-two_hop-0")
    server.prefix_len = 0
    with pytest.raises(ServerFailed, match="not cold"):
        make_lab(server).measure(QUESTION)


@pytest.mark.parametrize(
    ("changes", "is_fine"),
    [({}, True), ({"exact_tokens": 6}, False), ({"computed_tokens": 14}, False)],
)
def test_a_warm_arm_has_the_first_chunk_and_its_query_to_compute(
    changes: dict[str, int], is_fine: bool
) -> None:
    ask = encode_chunks(QUESTION.chunks, LETTERS.encode)
    report = {"exact_tokens": 5, "computed_tokens": 13, **changes}
    if is_fine:
        check_warm("daric:4", ask, report)
    else:
        with pytest.raises(ServerFailed, match=r"daric:4: not warm, .*computed_tokens"):
            check_warm("daric:4", ask, report)


def test_an_arm_without_its_chunks_is_refused() -> None:
    class Forgetful(FakeServer):
        def _serve(self, *args: Any) -> Any:
            served = super()._serve(*args)
            self.namespaces.clear()
            return served

    with pytest.raises(ServerFailed, match="reuse: not warm"):
        make_lab(Forgetful()).measure(QUESTION)


def test_a_warm_up_asks_by_every_arm() -> None:
    server = FakeServer()
    make_lab(server).warm_up(QUESTION)
    assert [strategy for strategy, _, _ in server.calls] == [
        "full",
        "reuse",
        "reuse",
        "daric",
        "qci",
    ]


def test_each_chunk_is_tokenized_by_itself() -> None:
    ask = encode_chunks(["ab", "c", "def"], LETTERS.encode)
    assert LETTERS.decode(ask.ids) == "abcdef"
    assert ask.bounds == [0, 2, 3]
    assert ask.question_len == 3


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (" Rome\nQuestion", " Rome"),
        ("\n Rome \nmore", "\n Rome"),
        ("Rome", "Rome"),
        ("\n\n", ""),
        ("", ""),
    ],
)
def test_an_answer_is_made_of_the_tokens_of_its_first_line(text: str, line: str) -> None:
    assert LETTERS.decode(line_tokens(LETTERS.encode(text), LETTERS.decode)) == line


@pytest.mark.parametrize(
    ("full", "got", "expected"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4, 5], 1.0),
        ([1, 2, 3, 4], [1, 2, 9, 4], 0.5),
        ([1, 2, 3, 4], [1, 2, 3], 0.75),
        ([1, 2], [], 0.0),
        ([], [], 1.0),
        ([], [1], 0.0),
    ],
)
def test_agreement_ends_at_the_first_difference(
    full: list[int], got: list[int], expected: float
) -> None:
    assert agreement(full, got) == expected


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_agreement_is_a_share_and_whole_with_oneself(full: list[int], got: list[int]) -> None:
    assert 0 <= agreement(full, got) <= 1
    assert agreement(full, full) == 1


def test_distance_of_the_first_token() -> None:
    full, got = np.log([0.5, 0.25, 0.25]), np.log([0.25, 0.5, 0.25])
    kl, ppl_gap = first_token_distance(full, got)
    assert kl == pytest.approx(0.25 * math.log(2))
    assert ppl_gap == pytest.approx(math.log(2))
    assert first_token_distance(full, full) == (0.0, 0.0)


def test_a_synthetic_prompt_becomes_a_question() -> None:
    question = from_task(TaskPrompt("multi_value", ("a", "b", "c", "q"), "12, 7"), 3)
    assert (question.task, question.index, question.prompt_id) == (
        "multi_value",
        3,
        "multi_value/3",
    )
    assert (question.num_chunks, question.answers) == (2, ("12, 7",))
    assert (question.metric, question.max_new_tokens) == (Metric.VALUE_F1, 28)
    assert question.is_one_line


def test_a_longbench_prompt_keeps_its_length_and_only_some_end_with_a_line() -> None:
    prompt = LongPrompt("multi_news", ("a", "b", "q"), ("x", "y"), Metric.ROUGE_L, 512, "id1")
    question = from_longbench(prompt, 1)
    assert (question.prompt_id, question.num_chunks, question.answers) == ("id1", 1, ("x", "y"))
    assert (question.metric, question.max_new_tokens) == (Metric.ROUGE_L, 512)
    assert not question.is_one_line
    assert from_longbench(replace(prompt, task="samsum"), 0).is_one_line


def test_a_long_answer_is_neither_cut_at_a_line_nor_generated_shorter() -> None:
    server = FakeServer({"full": "Rome\nis\n" + chr(END) + "x"})
    question = replace(
        QUESTION, metric=Metric.ROUGE_L, max_new_tokens=64, is_one_line=False, answers=("Rome is",)
    )
    full, *_ = make_lab(server, num_compared=0).measure(question)
    assert full.answer == "Rome\nis\n"
    assert ("full", "run-two_hop-0", 64) in server.calls


def test_a_row_by_hand() -> None:
    samples = [
        SAMPLE,
        replace(
            SAMPLE,
            index=1,
            chunks=14,
            recomputed_share=0.2,
            score=0.0,
            agreement=0.5,
            kl=0.3,
            ppl_gap=-0.1,
            ttft_ms=30.0,
            full_ttft_ms=90.0,
        ),
        replace(
            SAMPLE,
            index=2,
            recomputed_share=0.3,
            score=1.0,
            full_score=0.5,
            reuse_score=0.5,
            agreement=0.75,
            kl=None,
            ppl_gap=None,
            ttft_ms=80.0,
            full_ttft_ms=80.0,
        ),
    ]
    kept = bootstrap_ratio_ci([1, 0, 1], [1, 1, 0.5])
    regained = bootstrap_ratio_ci([1, 0, 0.5], [1, 1, 0])
    assert asdict(make_row("tiny", samples)) == {
        "model": "tiny",
        "task": "two_hop",
        "chunks": 16,
        "strategy": "daric",
        "budget": "n_avg=8",
        "recomputed_share": pytest.approx(0.2),
        "n": 3,
        "score": pytest.approx(2 / 3),
        "full_score": pytest.approx(2.5 / 3),
        "reuse_score": pytest.approx(0.5 / 3),
        "kept": pytest.approx(0.8),
        "kept_ci95": (kept.low, kept.high),
        "regained": pytest.approx(0.75),
        "regained_ci95": (regained.low, regained.high),
        "kl_first_token": pytest.approx(0.2),
        "kl_n": 2,
        "ppl_gap": pytest.approx(0.05),
        "agreement": pytest.approx(0.75),
        "ttft_ratio": 2.0,
    }


def test_nothing_is_kept_of_a_score_of_zero_and_nothing_regained_of_a_small_gap() -> None:
    row = make_row("tiny", [replace(SAMPLE, full_score=0.0, kl=None, ppl_gap=None)])
    assert (row.kept, row.kept_ci95, row.kl_first_token, row.ppl_gap) == (None, None, None, None)
    assert (row.regained, row.regained_ci95, row.kl_n) == (None, None, 0)
    assert make_row("tiny", [replace(SAMPLE, reuse_score=0.96)]).regained is None
    assert make_row("tiny", [replace(SAMPLE, reuse_score=0.75)]).regained == pytest.approx(1.0)


def test_reuse_regains_nothing_and_full_prefill_all() -> None:
    full, reuse, *_ = make_cells()
    assert (full.kept, full.regained, full.kl_first_token) == (1.0, 1.0, 0.0)
    assert (reuse.kept, reuse.regained) == (0.5, 0.0)


def test_cells_keep_their_tasks_and_arms_apart() -> None:
    samples = [
        SAMPLE,
        replace(SAMPLE, budget="n_avg=20"),
        replace(SAMPLE, task="passage"),
        replace(SAMPLE, index=1, score=0.0),
    ]
    rows = make_rows("tiny", samples)
    assert [(row.task, row.budget, row.n, row.score) for row in rows] == [
        ("two_hop", "n_avg=8", 2, 0.5),
        ("two_hop", "n_avg=20", 1, 1.0),
        ("passage", "n_avg=8", 1, 1.0),
    ]


def test_verdicts_judge_arms_and_control_but_not_what_they_are_compared_with() -> None:
    verdicts = check_strategies(make_cells(), Limits(kl_of_reuse=0.3, kept=0.8))
    assert [(v.task, v.strategy, v.budget, v.name, v.passed) for v in verdicts] == [
        ("two_hop", "daric", "n_avg=8", "kl_first_token", False),
        ("two_hop", "daric", "n_avg=8", "kept", False),
        ("two_hop", "daric", "n_avg=20", "kl_first_token", True),
        ("two_hop", "daric", "n_avg=20", "kept", True),
        ("two_hop", "control", "cold twice", "kl_first_token", True),
        ("passage", "daric", "n_avg=8", "kl_first_token", False),
        ("passage", "daric", "n_avg=8", "kept", True),
        ("passage", "daric", "n_avg=20", "kl_first_token", True),
        ("passage", "daric", "n_avg=20", "kept", True),
        ("passage", "control", "cold twice", "kl_first_token", True),
    ]
    assert verdicts[0].value == pytest.approx(0.5)
    assert verdicts[0].limit == pytest.approx(0.3)
    assert verdicts[1].value == pytest.approx(0.75)
    assert verdicts[4].limit == 0.02


def test_what_is_only_noise_or_only_a_few_prompts_passes() -> None:
    full, reuse, daric, *_ = make_cells()
    quiet = replace(daric, kl_first_token=0.02)
    few = replace(daric, kept=0.3, kept_ci95=(0.1, 0.46))
    limits = Limits(kl_of_reuse=0.0)
    assert check_strategies([reuse, quiet], limits)[0].passed
    assert not check_strategies([reuse, daric], limits)[0].passed
    kept = check_strategies([full, reuse, few], limits)[1]
    assert (kept.name, kept.passed) == ("kept", True)
    assert kept.limit == pytest.approx(0.9 * 0.5)
    worse = replace(few, kept_ci95=(0.1, 0.44))
    assert not check_strategies([full, reuse, worse], limits)[1].passed


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_kl_that_is_no_number_fails(kl: float) -> None:
    _, reuse, daric, *_ = make_cells()
    verdict, _ = check_strategies([reuse, replace(daric, kl_first_token=kl)], Limits())
    assert not verdict.passed


def test_what_was_not_measured_gets_no_verdict() -> None:
    _, reuse, daric, *_ = make_cells()
    empty = replace(daric, kl_first_token=None, kept=None, kept_ci95=None)
    assert check_strategies([reuse, empty], Limits()) == []
    assert [v.name for v in check_strategies([daric], Limits())] == ["kept"]
    assert check_strategies([], Limits()) == []


def test_a_table_for_each_task_shows_every_arm() -> None:
    text = show(*make_tables(make_cells()))
    for words in ("two_hop, 16 chunks, 3 prompts", "passage, 16 chunks", "n_avg=20", "cold twice"):
        assert words in text
    assert "0.75 [0.75, 0.75]" in text
    assert "2.0x" in text
    assert "1.0000" in text


def test_tables_and_plots_do_without_what_was_not_measured(tmp_path: Path) -> None:
    empty = [
        replace(
            row,
            kept=None,
            kept_ci95=None,
            regained=None,
            regained_ci95=None,
            kl_first_token=None,
            kl_n=0,
            ppl_gap=None,
        )
        for row in make_cells()
    ]
    assert " - " in show(*make_tables(empty))
    assert plot_all(empty, tmp_path / "quality") == []
    assert make_tables([]) == []
    assert plot_all([], tmp_path / "quality") == []
    assert "0 numbers" in show(make_verdict_table([]))


def test_only_failures_are_listed_among_verdicts() -> None:
    limits = Limits(kl_of_reuse=0.3, kept=0.8)
    text = show(make_verdict_table(check_strategies(make_cells(), limits)))
    assert "10 numbers have a limit, 3 of them" in text
    assert text.count("daric") == 3
    assert "control" not in text


def test_a_point_is_the_mean_over_tasks_with_its_interval() -> None:
    base = make_cells()[2]
    rows = [
        replace(base, kept=0.8, kept_ci95=(0.5, 0.9), recomputed_share=0.1),
        replace(base, task="passage", kept=0.6, kept_ci95=(0.2, 0.6), recomputed_share=0.2),
        replace(base, task="agent", kept=None, kept_ci95=None, recomputed_share=0.9),
    ]
    (point,) = mean_points(rows)
    assert point[:2] == ("daric", "n_avg=8")
    assert point.share == pytest.approx(0.15)
    assert point.value == pytest.approx(0.7)
    assert point.below == pytest.approx(math.hypot(0.3, 0.4) / 2)
    assert point.above == pytest.approx(0.05)


def test_the_front_rises() -> None:
    values = [(0.0, 0.5), (0.08, 0.9), (0.08, 0.7), (0.1, 0.9), (0.2, 0.95), (0.3, 0.6)]
    points = [Point("daric", str(i), *value, 0.0, 0.0) for i, value in enumerate(values)]
    assert [point.budget for point in pareto_front(points)] == ["0", "1", "4"]
    assert pareto_front([]) == []


def test_plots_are_written_beside_the_rows(tmp_path: Path) -> None:
    paths = plot_all(make_cells(), tmp_path / "new" / "quality")
    assert [path.name for path in paths] == [
        "quality-pareto.png",
        "quality-tasks.png",
        "quality-kl.png",
    ]
    assert all(path.stat().st_size > 0 for path in paths)


def test_a_single_row_can_be_plotted(tmp_path: Path) -> None:
    for row in make_cells()[:5]:
        plot_all([row], tmp_path / row.strategy)


def test_a_record_is_a_file_of_rows_and_a_line_for_each_sample(tmp_path: Path) -> None:
    lines = io.StringIO()
    record = command.Record(tmp_path / "quality.json", lines, {"model": "tiny", "seed": 19})
    record.write()
    assert not record.path.exists(), "nothing was measured: an earlier file stays"
    record.add([SAMPLE, replace(SAMPLE, index=1)])
    record.write()
    assert [json.loads(line)["index"] for line in lines.getvalue().splitlines()] == [0, 1]
    content = json.loads(record.path.read_text(encoding="utf-8"))
    assert content["meta"] == {"model": "tiny", "seed": 19}
    (row,) = content["rows"]
    assert (row["model"], row["strategy"], row["n"], row["kept"]) == ("tiny", "daric", 2, 1.0)
    assert list(tmp_path.iterdir()) == [record.path]


def test_what_was_measured_is_there_after_an_interrupt(tmp_path: Path) -> None:
    class Interrupted(FakeServer):
        def generate(self, *args: Any, **kwargs: Any) -> Result:
            if len(self.calls) == 12:
                raise KeyboardInterrupt
            return super().generate(*args, **kwargs)

    lines = io.StringIO()
    record = command.Record(tmp_path / "quality.json", lines, {"model": "tiny"})
    questions = {"two_hop": [replace(QUESTION, index=index) for index in range(3)]}
    lab = make_lab(Interrupted(), num_compared=0)
    with pytest.raises(KeyboardInterrupt):
        command.measure_all(lab, questions, record, math.inf, Console(file=io.StringIO()))
    record.write()
    assert [row.n for row in record.rows] == [1, 1, 1, 1]
    assert len(lines.getvalue().splitlines()) == 4


def test_tasks_take_turns_until_time_is_up(tmp_path: Path) -> None:
    questions = {
        "two_hop": [replace(QUESTION, index=index) for index in range(3)],
        "passage": [replace(QUESTION, task="passage", index=index) for index in range(2)],
    }
    for minutes, turns in (
        (
            math.inf,
            [("two_hop", 0), ("passage", 0), ("two_hop", 1), ("passage", 1), ("two_hop", 2)],
        ),
        (0.0, [("two_hop", 0), ("passage", 0)]),
    ):
        record = command.Record(tmp_path / "quality.json", io.StringIO(), {"model": "tiny"})
        out = Console(file=io.StringIO(), width=200)
        command.measure_all(make_lab(FakeServer()), questions, record, minutes, out)
        asked = dict.fromkeys((sample.task, sample.index) for sample in record.samples)
        assert list(asked) == turns
        assert ("stopped after 2 of 5" in out.file.getvalue()) is (minutes == 0)  # type: ignore[attr-defined]
        assert record.path.exists()


def test_defaults_of_the_command(tmp_path: Path) -> None:
    args = command._parse(["--model", "m"])
    assert (args.n, args.chunks, args.chunk_len, args.kl_prompts) == (25, 16, 90, 10)
    assert tuple(args.tasks) == ("multi_value", "passage", "two_hop", "tool_call")
    assert args.samples == Path("build/quality-samples.jsonl")
    args = command._parse(["--model", "m", "--tasks", "--out", str(tmp_path / "x.json")])
    assert args.tasks == []
    assert args.samples == tmp_path / "x-samples.jsonl"


def test_the_command_says_which_task_or_arm_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--model", "/nowhere", "--tasks", "three_hops"]) == 1
    assert "--tasks: got 'three_hops', expected some of multi_value" in capsys.readouterr().out
    assert command.main(["--model", "/nowhere", "--arms", "daric:x"]) == 1
    assert "N: got 'x'" in capsys.readouterr().out


def test_prompts_of_files_and_tasks_are_asked_as_far_as_they_fit(tmp_path: Path) -> None:
    path = tmp_path / "samsum.jsonl"
    contexts = ("short", "long " * 400, "short too", "short as well")
    rows = [{"input": "q", "context": context, "answers": ["a"]} for context in contexts]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    out = Console(file=io.StringIO(), width=1000)
    options = ["--model", "m", "--n", "2", "--tasks", "--longbench", str(path)]
    questions = command.make_questions(command._parse(options), LETTERS, 1000, out)
    assert [question.index for question in questions["samsum"]] == [0, 1]
    assert ["".join(q.chunks[1:-1]) for q in questions["samsum"]] == ["short", "short too"]
    assert "left out 1 prompts of more than 1000 tokens" in out.file.getvalue()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="got no prompts"):
        command.make_questions(command._parse(options), LETTERS, 10, out)
    options = ["--model", "m", "--n", "2", "--tasks", "passage"]
    with pytest.raises(ConfigError, match="--chunks 16 --chunk-len 90: passage has prompts"):
        command.make_questions(command._parse(options), LETTERS, 100, out)
    questions = command.make_questions(command._parse(options), LETTERS, 100000, out)
    assert [question.num_chunks for question in questions["passage"]] == [16, 16]
