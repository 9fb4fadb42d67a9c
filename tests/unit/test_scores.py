"""Task scores: by hand, and what holds for every text."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.scripts.quality.scores import (
    SCORES,
    Metric,
    check_answers,
    code_line,
    edit_similarity,
    exact_match,
    first_line,
    normalise,
    passage_retrieval,
    rouge_l,
    score,
    token_f1,
    value_f1,
)

WORDS = st.lists(st.sampled_from(["a", "the", "cat", "dog", "sat", "12", "7", "it's"]), max_size=8)
"""Few enough that texts have words in common."""

TEXTS = st.text(max_size=30) | WORDS.map(" ".join)
NUMBERS = st.lists(st.sampled_from(["4", "17", "17", "23", "007", "7"]), min_size=1, max_size=6)
NEEDED = {Metric.PASSAGE_RETRIEVAL: "Paragraph 7 ", Metric.VALUE_F1: "7 "}
"""What every answer has to hold, to be scored."""


def test_every_score_has_a_name_and_its_function_the_same() -> None:
    assert {metric.value: SCORES[metric].__name__ for metric in Metric} == {
        name: name
        for name in (
            "exact_match",
            "token_f1",
            "rouge_l",
            "edit_similarity",
            "passage_retrieval",
            "value_f1",
        )
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Beatles!", "beatles"),
        ("an apple\ta day", "apple day"),
        ("Theatre, anthem", "theatre anthem"),  # articles are words, not beginnings
        ("U.S.A.", "usa"),
        ("well-known", "wellknown"),
        ("sand\u2013the\u2013sea", "sand\u2013 \u2013sea"),  # a blank is where an article was
        ("a the an", ""),
    ],
)
def test_normalisation_leaves_lower_case_words(text: str, expected: str) -> None:
    assert normalise(text) == expected


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("The Beatles.", ["beatles"], 1),
        ("beatles", ["The Who", "a Beatles"], 1),
        ("the beatles band", ["beatles"], 0),
        ("", ["beatles"], 0),
    ],
)
def test_exact_match_by_hand(prediction: str, answers: list[str], expected: float) -> None:
    assert exact_match(prediction, answers) == expected


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("The cat sat.", ["a cat sat down"], Fraction(4, 5)),  # 2 of 2 and 2 of 3
        ("cat cat cat", ["cat cat dog"], Fraction(4, 6)),  # two of the three are shared
        ("cat cat", ["cat"], Fraction(2, 3)),
        ("sat cat", ["cat sat"], 1),  # in any order
        ("green", ["red", "dark green"], Fraction(2, 3)),  # the better answer counts
        ("dog", ["cat"], 0),
        ("", ["cat"], 0),
        ("the", ["the"], 0),  # no word is left
    ],
)
def test_token_f1_by_hand(prediction: str, answers: list[str], expected: float) -> None:
    assert token_f1(prediction, answers) == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        # Four different words (the, cat, on, mat) of five different ones on either side.
        ("the cat sat on the mat", ["the cat lay on the mat"], Fraction(4, 5)),
        ("mat the on", ["on the mat"], Fraction(1, 3)),  # only one word keeps its place
        ("Cat sat", ["cat sat"], Fraction(1, 2)),  # case counts
        # Sentence by sentence: both of the answer's are found, in whichever order.
        ("he ran. she sat", ["she sat. he ran"], 1),
        ("blue", ["red", "red blue green"], Fraction(1, 2)),  # 1 of 1 and 1 of 3
        ("dog", ["cat"], 0),
    ],
)
def test_rouge_l_by_hand(prediction: str, answers: list[str], expected: float) -> None:
    assert rouge_l(prediction, answers) == pytest.approx(float(expected), abs=1e-6)


def test_rouge_l_of_equal_texts_is_short_of_one_by_the_packages_constant() -> None:
    assert rouge_l("cat sat", ["cat sat"]) == pytest.approx(2 / (2 + 1e-8), abs=1e-12)
    assert rouge_l("cat sat", ["cat sat"]) < 1


@pytest.mark.parametrize("prediction", ["", "  \n", "..."])
def test_rouge_l_of_nothing_is_zero(prediction: str) -> None:
    assert rouge_l(prediction, ["cat sat", "cat sat. "]) == 0  # the package finds '' in the second


def test_rouge_l_of_a_sentence_that_the_package_cannot_take_is_zero() -> None:
    words = [f"w{index}" for index in range(5000)]
    assert rouge_l(" ".join(words), ["w0"]) == 0
    assert rouge_l(" ".join(words[:100]), ["w0"]) == pytest.approx(2 / 101, abs=1e-6)


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        ("\n\nreturn x\nreturn y", "return x"),
        ("```python\nreturn x\n```", "return x"),
        ("# the next line\n// or this\n    return x", "    return x"),
        ("x = 1  # one\ny = 2", "y = 2"),  # a line with code before the comment is left out, too
        ("# only\n\nreturn x", ""),  # a blank line counts, but at the beginning
        ("url = 'http://a'", ""),
        ("", ""),
    ],
)
def test_a_line_of_code_is_the_first_without_fence_or_comment(
    prediction: str, expected: str
) -> None:
    assert code_line(prediction) == expected


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("return x", ["return y"], Fraction(14, 16)),  # seven characters of eight are common
        ("```\nreturn x\nx += 1", ["return x"], 1),
        ("ab", ["ba"], Fraction(2, 4)),  # one is deleted and inserted, not replaced
        ("abc", ["xyz", "abd"], Fraction(4, 6)),
        ("# return x", ["return x"], 0),  # no line is left
        ("return x\nreturn y", ["return x\nreturn y"], Fraction(16, 25)),  # 8 of 8 and of 17
    ],
)
def test_edit_similarity_by_hand(prediction: str, answers: list[str], expected: float) -> None:
    assert edit_similarity(prediction, answers) == pytest.approx(float(expected), abs=1e-9)


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("Paragraph 12", ["Paragraph 12"], 1),
        ("12", ["Paragraph 12"], 1),
        ("Paragraph 12 or Paragraph 13", ["Paragraph 12"], Fraction(1, 2)),
        ("12, 12 and 3", ["Paragraph 12"], Fraction(2, 3)),
        ("Paragraph 1", ["Paragraph 12"], 0),
        ("Paragraph 012", ["Paragraph 12"], 0),  # as written
        ("the twelfth", ["Paragraph 12"], 0),
        ("30", ["Paragraph 3", "Paragraph 30"], 1),
        ("4", ["Paragraph 3, not Paragraph 4"], 0),  # the first that is named
    ],
)
def test_passage_retrieval_by_hand(prediction: str, answers: list[str], expected: float) -> None:
    assert passage_retrieval(prediction, answers) == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("4, 17 and 17", ["17, 4, 23"], Fraction(4, 6)),  # 4 and one 17
        ("They are 23, 17 and 4.", ["17, 4, 23"], 1),
        ("17", ["17, 4, 23"], Fraction(2, 4)),
        ("17, 4, 23, 5, 6", ["17, 4, 23"], Fraction(6, 8)),
        ("17", ["4", "17"], 1),  # answers are alternatives
        ("1,000", ["1000"], 0),  # two numbers, neither the one
        ("none", ["17"], 0),
    ],
)
def test_value_f1_by_hand(prediction: str, answers: list[str], expected: float) -> None:
    assert value_f1(prediction, answers) == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Amanda baked cookies. \nDialogue: Olivia", "Amanda baked cookies."),
        ("\n\n  Amanda\nOlivia", "Amanda"),
        (" \nAmanda", ""),  # only newlines are dropped at the beginning
        ("Amanda", "Amanda"),
        ("", ""),
    ],
)
def test_the_first_line_is_what_comes_before_a_newline(text: str, expected: str) -> None:
    assert first_line(text) == expected


def test_a_score_is_found_by_its_metric_or_its_name() -> None:
    assert score(Metric.EXACT_MATCH, "cat sat", ["sat cat"]) == 0
    assert score(Metric("token_f1"), "cat sat", ["sat cat"]) == 1
    with pytest.raises(ValueError, match="bleu"):
        score("bleu", "cat", ["cat"])  # type: ignore[arg-type]


@pytest.mark.parametrize("metric", Metric)
def test_answers_that_nothing_can_be_compared_with_are_refused(metric: Metric) -> None:
    answer = f"{NEEDED.get(metric, '')}cat"
    check_answers(metric, [answer])
    for refuse in (check_answers, lambda m, answers: score(m, "cat", answers)):
        with pytest.raises(ValueError, match="got none, expected at least one"):
            refuse(metric, [])
        with pytest.raises(ValueError, match="got a string, expected a sequence"):
            refuse(metric, answer)


@pytest.mark.parametrize(
    ("metric", "answer", "message"),
    [
        (Metric.PASSAGE_RETRIEVAL, "12", "got '12', expected one like 'Paragraph 12'"),
        (Metric.PASSAGE_RETRIEVAL, "paragraph 12", "got 'paragraph 12', expected one like"),
        (Metric.VALUE_F1, "four", "got 'four', expected one with numbers"),
    ],
)
def test_an_answer_without_the_number_its_score_looks_for_is_refused(
    metric: Metric, answer: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_answers(metric, [answer])


@given(st.sampled_from(list(Metric)), TEXTS, st.lists(TEXTS, min_size=1, max_size=3))
def test_every_score_lies_between_zero_and_one(
    metric: Metric, prediction: str, answers: list[str]
) -> None:
    answers = [NEEDED.get(metric, "") + answer for answer in answers]
    assert 0 <= score(metric, prediction, answers) <= 1


@given(st.sampled_from(list(Metric)), TEXTS, st.lists(TEXTS, min_size=1, max_size=4))
def test_the_best_answer_counts_wherever_it_stands(
    metric: Metric, prediction: str, answers: list[str]
) -> None:
    answers = [NEEDED.get(metric, "") + answer for answer in answers]
    alone = [score(metric, prediction, [answer]) for answer in answers]
    assert score(metric, prediction, answers) == max(alone)
    assert score(metric, prediction, answers[::-1]) == max(alone)


@given(st.sampled_from(list(Metric)), st.lists(TEXTS, max_size=2))
def test_the_answer_itself_scores_one(metric: Metric, others: list[str]) -> None:
    answer = "Paragraph 12"
    answers = [*(NEEDED.get(metric, "") + other for other in others), answer]
    assert score(metric, answer, answers) == pytest.approx(1, abs=1e-7)


@given(TEXTS)
def test_any_answer_with_a_word_in_it_scores_one_against_itself(text: str) -> None:
    assert exact_match(text, [text]) == 1
    assert token_f1(text, [text]) == (1 if normalise(text) else 0)


@given(TEXTS, TEXTS)
def test_f1_of_words_does_not_care_which_text_is_the_answer(one: str, other: str) -> None:
    assert token_f1(one, [other]) == token_f1(other, [one])
    assert exact_match(one, [other]) == exact_match(other, [one])


@given(NUMBERS, NUMBERS, st.randoms(use_true_random=False))
def test_f1_of_values_cares_neither_for_sides_nor_for_order(
    one: list[str], other: list[str], rng: object
) -> None:
    expected = value_f1(" ".join(one), [" ".join(other)])
    assert value_f1(" and ".join(other), [", ".join(one)]) == expected
    shuffled = sorted(one, key=lambda _: rng.random())  # type: ignore[attr-defined]
    assert value_f1(" ".join(shuffled), [" ".join(other)]) == expected


@given(WORDS)
def test_case_punctuation_articles_and_blanks_make_no_difference(words: list[str]) -> None:
    answer = " ".join(words)
    prediction = f"The {answer.upper()}!".replace(" ", "\n an ")
    assert exact_match(prediction, [answer]) == 1
    assert token_f1(prediction, [answer]) == token_f1(answer, [answer])


@given(TEXTS)
def test_a_first_line_is_one_line_of_the_text(text: str) -> None:
    line = first_line(text)
    assert "\n" not in line
    assert line == line.strip()
    assert line in text
