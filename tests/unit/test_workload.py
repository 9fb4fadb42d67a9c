"""The retrieval workload: real prose, whole sentences, never the same order twice."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.scripts.workload import (
    SYSTEM,
    Passage,
    cut_passages,
    make_prompts,
    python_topics,
    spread_sizes,
)

POOL = [Passage(f"topic {index}", f"Passage {index}.\n\n") for index in range(8)]


def count_words(text: str) -> int:
    return len(text.split())


def test_python_documentation_yields_enough_different_passages_of_the_wanted_size() -> None:
    passages = list(islice(cut_passages(python_topics(), count_words, 130, 170), 40))
    assert len({passage.text for passage in passages}) == 40
    assert len({passage.topic for passage in passages}) > 5
    assert all(130 <= count_words(passage.text) <= 170 for passage in passages)
    assert all(passage.text.endswith(".\n\n") for passage in passages)


def test_a_passage_ends_with_a_sentence_and_stays_within_its_topic() -> None:
    topics = {"first-topic": "One two. Three four five.\n\nSix.", "second": "Seven eight nine ten."}
    assert list(cut_passages(topics, count_words, 4, 6)) == [
        Passage("first topic", "One two. Three four five.\n\n"),
        Passage("second", "Seven eight nine ten.\n\n"),
    ]


def test_code_headings_and_grammar_are_left_out() -> None:
    document = "Heading\n*******\n\nProse that\nwraps.\n\n   stmt ::= name.\n\n>>> code"
    assert list(cut_passages({"t": document}, count_words, 1, 9)) == [
        Passage("t", "Prose that wraps.\n\n")
    ]


def test_a_sentence_longer_than_a_passage_may_be_is_left_out() -> None:
    topics = {"t": "A b c d e f g. Short one. Another one."}
    assert [p.text for p in cut_passages(topics, count_words, 2, 3)] == [
        "Short one.\n\n",
        "Another one.\n\n",
    ]


def test_the_same_text_under_two_topics_is_one_passage() -> None:
    topics = {"a": "The same text.", "b": "The same text."}
    assert [p.topic for p in cut_passages(topics, count_words, 1, 9)] == ["a"]


@given(st.lists(st.integers(2, len(POOL)), min_size=1, max_size=20), st.integers(0, 2**32))
def test_prompts_have_their_sizes_no_repeated_passage_and_no_repeated_order(
    sizes: list[int], seed: int
) -> None:
    prompts = make_prompts(POOL, sizes, seed)
    assert [len(prompt.passages) for prompt in prompts] == sizes
    assert all(len(set(prompt.passages)) == len(prompt.passages) for prompt in prompts)
    assert len({prompt.passages for prompt in prompts}) == len(prompts)
    assert prompts == make_prompts(POOL, sizes, seed)


def test_every_order_can_be_used_once_but_no_more() -> None:
    orders = {prompt.passages for prompt in make_prompts(POOL[:3], [3] * 6, seed=0)}
    assert len(orders) == 6
    with pytest.raises(ValueError, match="got 7 prompts of 3, expected at most 6"):
        make_prompts(POOL[:3], [3] * 7, seed=0)


@pytest.mark.parametrize("size", [0, len(POOL) + 1])
def test_a_prompt_without_passages_or_with_more_than_there_are_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"got 1 prompts of {size}, expected at most 0"):
        make_prompts(POOL, [size], seed=0)


def test_a_prompt_is_system_text_passages_and_a_question_about_one_of_them() -> None:
    (prompt,) = make_prompts(POOL, [4], seed=3)
    system, *passages, question = prompt.chunks
    assert system == SYSTEM
    assert passages == [passage.text for passage in prompt.passages]
    assert sum(f"about {passage.topic}?" in question for passage in prompt.passages) == 1
    assert question.endswith("\nAnswer:")


@given(st.integers(2, 40), st.integers(1, 8), st.integers(0, 12))
def test_sizes_are_spread_from_the_smallest_to_the_largest(
    num_prompts: int, smallest: int, more: int
) -> None:
    sizes = sorted(spread_sizes(num_prompts, smallest, smallest + more, seed=1))
    assert (sizes[0], sizes[-1], len(sizes)) == (smallest, smallest + more, num_prompts)
    steps = [right - left for left, right in pairwise(sizes)]
    assert max(steps) - min(steps) <= 1
