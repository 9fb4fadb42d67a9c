"""Task scores: how near an answer comes to the expected one, from 0 to 1.

Knows the scores of LongBench and SQuAD, by their definitions. Does not know tasks, models or
prompts: which score belongs to a task, and where its answers end, is for the caller to say.

Every score takes a prediction and the answers that count as right, and is that of the best
answer. All of them raise `ValueError` for answers that nothing can be compared with: none at all,
one string in place of a sequence, or an answer without the number its score looks for.

Sources: LongBench (arXiv:2308.14508), `metrics.py` and `eval.py` of THUDM/LongBench; SQuAD
(arXiv:1606.05250), the evaluation script of version 1.1.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_NUMBER = re.compile(r"\d+")
_PARAGRAPH = re.compile(r"Paragraph (\d+)")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NO_CODE = ("`", "#", "//")
"""What a line of an answer has that LongBench takes for a fence or a comment."""


class Metric(StrEnum):
    """A score by its name; the function of the same name says what it is."""

    EXACT_MATCH = "exact_match"
    TOKEN_F1 = "token_f1"
    ROUGE_L = "rouge_l"
    EDIT_SIMILARITY = "edit_similarity"
    PASSAGE_RETRIEVAL = "passage_retrieval"
    VALUE_F1 = "value_f1"


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1 if the prediction is an answer but for case, punctuation, articles and blanks, else 0.

    Source: SQuAD, `exact_match_score`.
    """
    return _best(_same_words, prediction, answers)


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """F1 of the words two texts share, after the normalisation of `exact_match`.

    `2 * shared / (words of the prediction + words of the answer)`; a word that occurs twice counts
    twice. Texts without any word share none: 0.

    Source: LongBench, `qa_f1_score`.
    """
    return _best(_words_f1, prediction, answers)


def rouge_l(prediction: str, answers: Sequence[str]) -> float:
    """F of the longest common subsequence of words, as the package `rouge` computes it.

    The package splits at full stops, counts each different word once and adds 1e-8 to the
    denominator: equal texts score 0.999999995. What it refuses scores 0, as in LongBench: a text
    of nothing but full stops, and sentences too long for its recursion (about 900 words in one
    of the prediction and one of the answer together). A blank prediction scores 0, too.

    Source: LongBench, `rouge_score`; ROUGE (Lin, 2004), §3.
    """
    return _best(_rouge_l, prediction, answers)


def edit_similarity(prediction: str, answers: Sequence[str]) -> float:
    """Share of the characters that stay when one line of code is edited into the other.

    `2 * common / (length of both)`, with the longest common subsequence of characters. Of the
    prediction, newlines at its beginning are dropped, and then its first line counts that has
    neither a backtick nor `#` nor `//`; it may be blank. LongBench rounds to whole percent,
    this does not.

    Source: LongBench, `code_sim_score`.
    """
    return _best(_similarity, code_line(prediction), answers)


def passage_retrieval(prediction: str, answers: Sequence[str]) -> float:
    """Share of the numbers in the prediction that are the number of the right paragraph.

    Numbers are compared as they are written. A prediction without a number scores 0.

    Args:
        prediction: For example `Paragraph 12`.
        answers: Each names a paragraph: `Paragraph 12`; the first one it names counts.

    Source: LongBench, `retrieval_score`.
    """
    return _best(_share_of_number, prediction, answers)


def value_f1(prediction: str, answers: Sequence[str]) -> float:
    """F1 of the numbers two texts share; a number that occurs twice counts twice.

    Args:
        prediction: Its numbers are its runs of digits, compared as they are written.
        answers: Each names all of the values: `17, 4, 23`. Values in separate answers would be
            alternatives.
    """
    return _best(_numbers_f1, prediction, answers)


Score = Callable[[str, Sequence[str]], float]
SCORES: Mapping[Metric, Score] = MappingProxyType(
    {
        Metric.EXACT_MATCH: exact_match,
        Metric.TOKEN_F1: token_f1,
        Metric.ROUGE_L: rouge_l,
        Metric.EDIT_SIMILARITY: edit_similarity,
        Metric.PASSAGE_RETRIEVAL: passage_retrieval,
        Metric.VALUE_F1: value_f1,
    }
)


def score(metric: Metric, prediction: str, answers: Sequence[str]) -> float:
    """The score of that name, in [0, 1].

    Raises:
        ValueError: See the module; or there is no score of that name.
    """
    return SCORES[Metric(metric)](prediction, answers)


def check_answers(metric: Metric, answers: Sequence[str]) -> None:
    """Say before anything is generated what `score` would say afterwards.

    Raises:
        ValueError: Nothing can be compared with these answers.
    """
    score(metric, "", answers)


def first_line(text: str) -> str:
    """An answer up to its first newline, without blanks around it.

    Newlines at the beginning are dropped first. LongBench does this where a model that has seen
    examples goes on with the next one (samsum among others).

    Source: LongBench, `eval.py`.
    """
    return text.lstrip("\n").partition("\n")[0].strip()


def code_line(text: str) -> str:
    """The line of an answer that `edit_similarity` looks at; empty if there is none."""
    for line in text.lstrip("\n").split("\n"):
        if not any(mark in line for mark in _NO_CODE):
            return line
    return ""


def normalise(text: str) -> str:
    """Lower case, without punctuation and articles, one blank between words.

    Source: SQuAD, `normalize_answer`.
    """
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def _best(one: Callable[[str, str], float], prediction: str, answers: Sequence[str]) -> float:
    if isinstance(answers, str):
        raise ValueError("answers: got a string, expected a sequence of strings")
    if not answers:
        raise ValueError("answers: got none, expected at least one")
    return max(one(prediction, answer) for answer in answers)


def _same_words(prediction: str, answer: str) -> float:
    return float(normalise(prediction) == normalise(answer))


def _words_f1(prediction: str, answer: str) -> float:
    return _f1(normalise(prediction).split(), normalise(answer).split())


def _rouge_l(prediction: str, answer: str) -> float:
    from rouge import Rouge  # type: ignore[import-untyped]

    if not prediction.strip():
        return 0.0
    try:
        scores = Rouge(metrics=["rouge-l"]).get_scores(prediction, answer)
    except (ValueError, RecursionError):
        return 0.0
    return float(scores[0]["rouge-l"]["f"])


def _similarity(line: str, answer: str) -> float:
    from rapidfuzz import fuzz

    return fuzz.ratio(line, answer) / 100


def _share_of_number(prediction: str, answer: str) -> float:
    paragraph = _PARAGRAPH.search(answer)
    if paragraph is None:
        raise ValueError(f"answers: got {answer!r}, expected one like 'Paragraph 12'")
    numbers = _NUMBER.findall(prediction)
    return numbers.count(paragraph[1]) / len(numbers) if numbers else 0.0


def _numbers_f1(prediction: str, answer: str) -> float:
    values = _NUMBER.findall(answer)
    if not values:
        raise ValueError(f"answers: got {answer!r}, expected one with numbers, like '17, 4'")
    return _f1(_NUMBER.findall(prediction), values)


def _f1(found: Sequence[str], wanted: Sequence[str]) -> float:
    """F1 of two multisets, `2 * shared / (found + wanted)`: precision and recall's harmonic mean.

    0 if both are empty.
    """
    shared = (Counter(found) & Counter(wanted)).total()
    return 2 * shared / (len(found) + len(wanted)) if shared else 0.0
