"""Tasks have one right answer, which the passages hold and the question alone does not."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest

from sglang_ext.scripts.quality.rating import METRICS, rate
from sglang_ext.scripts.quality.tasks import (
    DISTRACTORS,
    PUZZLES,
    TASKS,
    Names,
    Prose,
    TaskPrompt,
    held_out_topics,
    make_context,
    make_prompt,
    make_prompts,
    make_tools,
    training_topics,
)
from sglang_ext.scripts.workload import python_topics


def words(text: str) -> int:
    return len(text.split())


@pytest.fixture(scope="module")
def prose() -> Prose:
    return Prose(held_out_topics(python_topics()), words)


def prompts(prose: Prose, task: str, num_chunks: int = 16) -> list[TaskPrompt]:
    return make_prompts(task, prose, 20, num_chunks, 60, seed=5)


@pytest.mark.parametrize("task", TASKS)
def test_the_same_arguments_give_the_same_prompts_and_more_of_them_begin_with_these(
    prose: Prose, task: str
) -> None:
    few = make_prompts(task, prose, 2, 8, 60, seed=5)
    assert few == make_prompts(task, prose, 5, 8, 60, seed=5)[:2]
    assert few != make_prompts(task, prose, 2, 8, 60, seed=6)


@pytest.mark.parametrize("task", TASKS)
def test_a_prompt_has_the_chunks_asked_for_and_about_that_length(prose: Prose, task: str) -> None:
    num_passages = 4 if task == "agent" else 16
    for prompt in prompts(prose, task):
        assert len(prompt.chunks) == num_passages + 2
        assert all(prompt.chunks)
        assert 0.4 * 16 * 60 < words("".join(prompt.chunks)) < 2.2 * 16 * 60


@pytest.mark.parametrize("task", TASKS)
def test_the_answer_stands_in_the_passages_and_not_in_the_question(prose: Prose, task: str) -> None:
    for prompt in prompts(prose, task):
        context, question = "".join(prompt.chunks[:-1]), prompt.chunks[-1]
        assert question.endswith("Answer:")
        for part in re.findall(r"\w+", prompt.answer):
            assert part in context
            assert part not in re.findall(r"\w+", question.replace("<<Name>>", ""))


@pytest.mark.parametrize("task", TASKS)
def test_the_right_answer_scores_1_and_a_distractors_answer_less(prose: Prose, task: str) -> None:
    first, second, *_ = prompts(prose, task)
    assert rate(task, first.answer, first.answer) == 1.0
    assert rate(task, second.answer, first.answer) < 1.0
    assert set(METRICS) == set(TASKS)


def follow(chain: dict[str, str], name: str) -> str:
    while name in chain:
        name = chain[name]
    return name


WORKS = re.compile(r"(\w+) works for (\w+)")
OFFICE = re.compile(r"office of (\w+) is in the city of (\w+)")
RIVER = re.compile(r"runs through (\w+) is the (\w+)")
ASSIGNED = re.compile(r"variable (\w+) is set to (?:the value of )?(\w+)")


def only(pattern: str, text: str) -> str:
    (found,) = re.findall(pattern, text)
    return str(found)


def solve_multi_value(context: str, question: str) -> str:
    key = only(r"numbers of (\w+)", question)
    return ", ".join(re.findall(rf"special numbers of {key} is (\d+)", context))


def solve_variables(context: str, question: str) -> str:
    return follow(dict(ASSIGNED.findall(context)), only(r"value of (\w+)", question))


def solve_two_hop(context: str, question: str) -> str:
    hops = dict(WORKS.findall(context) + OFFICE.findall(context))
    return follow(hops, only(r"does (\w+) work", question))


def solve_three_hop(context: str, question: str) -> str:
    hops = dict(WORKS.findall(context) + OFFICE.findall(context) + RIVER.findall(context))
    return follow(hops, only(r"which (\w+) works", question))


def solve_suffix(context: str, question: str) -> str:
    return f"<<{solve_two_hop(context, question)}>>"


def solve_passage(context: str, question: str) -> str:
    quoted = only(r'says "(.*)"\?', question)
    passages = re.findall(r"Passage (\w+): (.*?)\n\n", context)
    (name,) = [name for name, text in passages if quoted in text]
    return str(name)


def solve_tool_call(context: str, question: str) -> str:
    deed = re.escape(only(r"tool that (.*?) with", question))
    attribute = only(r"with the (.*?) of", question)
    tool = only(rf"Tool (\w+): {deed}\.", context)
    return f"{tool}({only(rf'The {attribute} of the user is (.+?)[.]', context)})"


SOLVERS: dict[str, Callable[[str, str], str]] = {
    "multi_value": solve_multi_value,
    "variables": solve_variables,
    "passage": solve_passage,
    "two_hop": solve_two_hop,
    "three_hop": solve_three_hop,
    "suffix": solve_suffix,
    "tool_call": solve_tool_call,
    "agent": solve_two_hop,
}


@pytest.mark.parametrize("task", TASKS)
def test_reading_the_passages_word_by_word_gives_the_answer(prose: Prose, task: str) -> None:
    for prompt in prompts(prose, task):
        context = "".join(prompt.chunks[1:-1])
        assert SOLVERS[task](context, prompt.chunks[-1]) == prompt.answer


@pytest.mark.parametrize("task", sorted(PUZZLES))
def test_facts_of_one_puzzle_stand_in_different_passages(task: str) -> None:
    prose = Prose(held_out_topics(python_topics()), words)
    for seed in range(20):
        rng = random.Random(seed)
        context = make_context(prose, rng, [task], [40] * 12, has_distractors=False)
        marks = r"special numbers of|is set to|works for|office of|river that runs"
        found = [len(re.findall(marks, passage)) for passage in context.passages]
        assert max(found) == 1
        assert sum(found) >= 2


@pytest.mark.parametrize("task", sorted(DISTRACTORS))
def test_others_of_the_same_kind_stand_around_a_puzzle(prose: Prose, task: str) -> None:
    prompt = prompts(prose, task)[0]
    context = "".join(prompt.chunks[1:-1])
    openings = {
        "multi_value": r"special numbers of (\w+)",
        "variables": r"variable (\w+) is set to \d",
        **dict.fromkeys(("two_hop", "three_hop", "suffix"), r"(\w+) works for"),
    }
    assert len(set(re.findall(openings[task], context))) == DISTRACTORS[task] + 1


def test_a_chain_of_assignments_is_in_order(prose: Prose) -> None:
    for prompt in prompts(prose, "variables"):
        known: set[str] = set()
        context = "".join(prompt.chunks[1:-1])
        for name, of, value in re.findall(
            r"variable (\w+) is set to (the value of )?(\w+)", context
        ):
            assert not of or value in known
            known.add(name)


def test_training_never_sees_the_prose_of_the_evaluation() -> None:
    topics = python_topics()
    training, held_out = training_topics(topics), held_out_topics(topics)
    assert not training.keys() & held_out.keys()
    assert training.keys() | held_out.keys() == topics.keys()
    assert len(held_out) >= len(topics) // 5


def test_names_and_numbers_never_repeat() -> None:
    names = Names(random.Random(0))
    drawn = [names.word() for _ in range(500)] + [names.number() for _ in range(500)]
    assert len(set(drawn)) == len(drawn)


def test_several_questions_of_a_context_have_their_own_answers(prose: Prose) -> None:
    tasks = ["two_hop", "variables", "passage", "multi_value"]
    context = make_context(prose, random.Random(3), tasks, [40] * 10)
    assert len(context.questions) == 4
    joined = "".join(context.passages)
    for task, (question, answer) in zip(tasks, context.questions, strict=True):
        assert SOLVERS[task](joined, question) == answer
    tools = make_tools(prose, random.Random(3), 6, 30, num_questions=3)
    for question, answer in tools.questions:
        assert SOLVERS["tool_call"]("".join(tools.passages), question) == answer


def test_wrong_arguments_are_named(prose: Prose) -> None:
    with pytest.raises(ValueError, match="task: got 'riddle', expected one of multi_value"):
        make_prompt("riddle", prose, random.Random(0), 4, 30)
    with pytest.raises(ValueError, match="passage_lens: got none"):
        make_context(prose, random.Random(0), ["two_hop"], [])
