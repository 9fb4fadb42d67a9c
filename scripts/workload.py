"""A retrieval workload of real prose: passages, and prompts that put them in changing orders.

Knows Python's own documentation (`pydoc_data.topics`) and how a question is asked about passages.
Does not know a tokenizer (token counts are passed in), SGLang or PIC. Deterministic: the same
arguments give the same prompts on one Python version.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

SYSTEM = (
    "You answer questions about the Python language. Use only the passages below; "
    "if they do not hold the answer, say so.\n\n"
)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z(*\"'])")


@dataclass(frozen=True, slots=True)
class Passage:
    """Whole sentences of one topic, as retrieved.

    Attributes:
        topic: What the passage is about, in words.
        text: Its sentences, with a blank line behind them.
    """

    topic: str
    text: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: system text, passages, question; each is a chunk.

    Attributes:
        passages: In the order of the prompt, none twice.
        question: The question with the line that asks for an answer.
    """

    passages: tuple[Passage, ...]
    question: str

    @property
    def chunks(self) -> tuple[str, ...]:
        """The texts whose concatenation is the prompt."""
        return (SYSTEM, *(passage.text for passage in self.passages), self.question)


def python_topics() -> Mapping[str, str]:
    """Python's reference documentation by topic name, plain text."""
    from pydoc_data.topics import topics

    return topics


def cut_passages(
    topics: Mapping[str, str], count_tokens: Callable[[str], int], min_tokens: int, max_tokens: int
) -> Iterator[Passage]:
    """Cut prose into passages that end where a sentence ends and stay within one topic.

    Args:
        topics: Plain text by topic name; indented paragraphs (code, grammar) are left out.
        count_tokens: Tokens of a text.
        min_tokens: A passage ends with the sentence that reaches this many tokens.
        max_tokens: A passage that would be longer is left out.

    Yields:
        Passages in the order of `topics`, none with the text of another.
    """
    seen: set[str] = set()
    for name, document in topics.items():
        text = ""
        for sentence in sentences_of(document):
            text += sentence
            num_tokens = count_tokens(f"{text}\n\n")
            if num_tokens < min_tokens:
                text += " "
                continue
            if num_tokens <= max_tokens and text not in seen:
                seen.add(text)
                yield Passage(name.replace("-", " "), f"{text}\n\n")
            text = ""


def make_prompts(passages: Sequence[Passage], sizes: Sequence[int], seed: int) -> list[Prompt]:
    """Draw prompts from a pool of passages: changing subsets, never the same order twice.

    Args:
        passages: The pool, all different.
        sizes: Passages of each prompt, at least 1 each.
        seed: Of the random choices.

    Raises:
        ValueError: The pool has too few passages for so many different prompts, or a size is 0.
    """
    for size, wanted in Counter(sizes).items():
        possible = math.perm(len(passages), size) if size > 0 else 0
        if possible < wanted:
            raise ValueError(f"sizes: got {wanted} prompts of {size}, expected at most {possible}")
    rng = random.Random(seed)
    used: set[tuple[Passage, ...]] = set()
    return [_draw(passages, size, used, rng) for size in sizes]


def spread_sizes(num_prompts: int, smallest: int, largest: int, seed: int) -> list[int]:
    """Prompt sizes spread evenly over `[smallest, largest]`, in random order."""
    steps = max(num_prompts - 1, 1)
    sizes = [smallest + round(index * (largest - smallest) / steps) for index in range(num_prompts)]
    random.Random(seed).shuffle(sizes)
    return sizes


def _draw(
    passages: Sequence[Passage], size: int, used: set[tuple[Passage, ...]], rng: random.Random
) -> Prompt:
    while True:
        chosen = tuple(rng.sample(passages, size))
        if chosen not in used:
            break
    used.add(chosen)
    topic = rng.choice(chosen).topic
    return Prompt(chosen, f"Question: What do the passages say about {topic}?\nAnswer:")


def sentences_of(document: str) -> Iterator[str]:
    """Sentences of the paragraphs that are prose: not indented, ended by a full stop."""
    for paragraph in re.split(r"\n\s*\n", document):
        lines = paragraph.strip("\n").splitlines()
        is_prose = bool(lines) and not any(line.startswith("   ") for line in lines)
        text = " ".join(line.strip() for line in lines)
        if is_prose and text.endswith("."):
            yield from _SENTENCE_END.split(text)
