"""Synthetic tasks whose answers hang together over several chunks, with known answers.

Knows prose to hide facts in, how facts are worded, and what is asked about them. Does not know a
tokenizer (token counts are passed in), SGLang, PIC or scores. Deterministic: the same arguments
give the same prompts on one Python version.

A prompt is system text, passages and a question; each is a chunk. A passage is prose under a
made-up name, with facts between its sentences. What is asked about is a `Puzzle`; others of the
same kind stand around it, so that nothing can be answered by looking for the only number.

    multi_value   all values of one key, spread over passages
    variables     the number a variable has at the end of a chain of assignments
    passage       the name of the passage that holds a quoted sentence
    two_hop       person -> company -> city
    three_hop     person -> company -> city -> river
    suffix        two_hop, with a long text about the form of the answer behind the question
    tool_call     the call of a tool: its name stands in one chunk, its argument in a middle one
    agent         two_hop over four uneven chunks: a long log, a note, a plan and the request
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from sglang_ext.scripts.workload import sentences_of

SYSTEM = "Read the passages, then answer the question. The answer is short.\n\n"
TOOL_SYSTEM = "Read the tools and the profile, then write the call of one tool.\n\n"
ANSWER = "Answer:"
HELD_OUT = 4
"""Every so manieth topic of the prose is kept for evaluation, the others are for training."""

_ONSETS = (
    *("b", "br", "d", "dr", "f", "fl", "g", "gr", "h", "k", "kl", "l"),
    *("m", "n", "p", "pr", "r", "s", "st", "t", "tr", "v", "z"),
)
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea")
_CODAS = ("l", "m", "n", "r", "s", "th", "nd", "rk")
_ATTRIBUTES = ("home city", "favourite team", "project", "account name", "ship", "garden", "street")
_DEEDS = (
    "books a table",
    "sends a report",
    "reads the weather",
    "orders a taxi",
    "opens a ticket",
    "plays a song",
    "files a claim",
    "rents a bicycle",
    "prints a map",
    "starts a backup",
    "checks the stock",
    "plans a route",
)
_FORM = (
    "Write the answer on one line.",
    "Do not repeat the question, and do not name the passages you have used.",
    "Put the answer between double angle brackets, like this: <<Name>>.",
    "Nothing else may stand between the brackets: no article, no comma, no full stop.",
    "Keep the capital letters as they are in the passages.",
    "If two answers seem right, take the one that follows from the passages alone.",
    "Do not explain how you have found it, and do not say how sure you are.",
    "An answer in another form cannot be read by the program that waits for it.",
)


@dataclass(frozen=True, slots=True)
class Puzzle:
    """Facts and what follows from them.

    Attributes:
        facts: Sentences, one to a passage.
        is_ordered: The facts stand in this order in the prompt.
        question: As asked, without the line that asks for an answer.
        answer: What a right answer says.
    """

    facts: tuple[str, ...]
    is_ordered: bool
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class TaskPrompt:
    """One request with its answer.

    Attributes:
        task: A name in `TASKS`.
        chunks: Texts whose concatenation is the prompt; the last is the question.
        answer: What a right answer says.
    """

    task: str
    chunks: tuple[str, ...]
    answer: str


class Prose:
    """Sentences of real text by topic, with their lengths in tokens.

    Args:
        topics: Plain text by topic name; indented paragraphs (code, grammar) are left out.
        count_tokens: Tokens of a text.
    """

    def __init__(self, topics: Mapping[str, str], count_tokens: Callable[[str], int]) -> None:
        self._topics: list[list[tuple[str, int]]] = []
        for text in topics.values():
            sentences = [(sentence, count_tokens(sentence)) for sentence in sentences_of(text)]
            if len(sentences) >= 4:
                self._topics.append(sentences)

    def draw(self, rng: random.Random, num_tokens: int) -> list[str]:
        """Sentences that follow each other and have about `num_tokens` tokens, at least one."""
        topic = rng.choice(self._topics)
        place = rng.randrange(len(topic))
        drawn: list[str] = []
        length = 0
        while not drawn or length < num_tokens:
            sentence, sentence_len = topic[place % len(topic)]
            if drawn and length + sentence_len > 1.25 * num_tokens:
                break
            drawn.append(sentence)
            length += sentence_len
            place += 1
        return drawn


def training_topics(topics: Mapping[str, str]) -> dict[str, str]:
    """What an adapter may see."""
    return {name: text for index, (name, text) in enumerate(topics.items()) if index % HELD_OUT}


def held_out_topics(topics: Mapping[str, str]) -> dict[str, str]:
    """What only the evaluation sees."""
    return {name: text for index, (name, text) in enumerate(topics.items()) if not index % HELD_OUT}


class Names:
    """Made-up words, none twice."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._used: set[str] = set()

    def word(self) -> str:
        """Two syllables in lower case."""
        while True:
            pick = self._rng.choice
            word = pick(_ONSETS) + pick(_VOWELS) + pick(_ONSETS) + pick(_VOWELS) + pick(_CODAS)
            if word not in self._used:
                self._used.add(word)
                return word

    def name(self) -> str:
        """The same with a capital."""
        return self.word().capitalize()

    def number(self) -> str:
        """Four digits."""
        while True:
            number = str(self._rng.randrange(1000, 10000))
            if number not in self._used:
                self._used.add(number)
                return number


def multi_value(rng: random.Random, names: Names, num_chunks: int) -> Puzzle:
    """All values of one key."""
    key = names.name()
    values = [names.number() for _ in range(rng.randint(2, min(4, num_chunks)))]
    facts = tuple(f"One of the special numbers of {key} is {value}." for value in values)
    question = f"What are all the special numbers of {key}, in the order of the passages?"
    return Puzzle(facts, True, question, ", ".join(values))


def variables(rng: random.Random, names: Names, num_chunks: int) -> Puzzle:
    """A chain of assignments, each in a later passage than the one it builds on."""
    value = names.number()
    chain = [names.word() for _ in range(min(rng.randint(2, 3), num_chunks))]
    facts = [f"The variable {chain[0]} is set to {value}."]
    facts += [f"The variable {new} is set to the value of {old}." for old, new in pairwise(chain)]
    return Puzzle(tuple(facts), True, f"Which number is the value of {chain[-1]}?", value)


def _hops(rng: random.Random, names: Names, num_hops: int) -> tuple[tuple[str, ...], list[str]]:
    person, company, city, river = (names.name() for _ in range(4))
    facts = (
        f"{person} works for {company}.",
        f"The office of {company} is in the city of {city}.",
        f"The river that runs through {city} is the {river}.",
    )
    return facts[:num_hops], [person, company, city, river]


def two_hop(rng: random.Random, names: Names, num_chunks: int) -> Puzzle:
    """Person -> company -> city."""
    facts, entities = _hops(rng, names, 2)
    return Puzzle(facts, False, f"In which city does {entities[0]} work?", entities[2])


def three_hop(rng: random.Random, names: Names, num_chunks: int) -> Puzzle:
    """Person -> company -> city -> river."""
    facts, entities = _hops(rng, names, 3)
    question = f"Which river runs through the city in which {entities[0]} works?"
    return Puzzle(facts, False, question, entities[3])


def suffix(rng: random.Random, names: Names, num_chunks: int) -> Puzzle:
    """A two-hop question with a long text behind it."""
    plain = two_hop(rng, names, num_chunks)
    form = " ".join(rng.sample(_FORM, len(_FORM)))
    return Puzzle(plain.facts, False, f"{plain.question}\n{form}", f"<<{plain.answer}>>")


MakePuzzle = Callable[[random.Random, Names, int], Puzzle]

PUZZLES: Mapping[str, MakePuzzle] = MappingProxyType(
    {
        "multi_value": multi_value,
        "variables": variables,
        "two_hop": two_hop,
        "three_hop": three_hop,
        "suffix": suffix,
    }
)
"""Kinds of puzzles whose facts stand in passages of prose."""

DISTRACTORS: Mapping[str, int] = MappingProxyType(
    {"multi_value": 2, "variables": 2, "two_hop": 3, "three_hop": 2, "suffix": 3}
)
"""Further puzzles of the same kind in a prompt; nobody asks about them."""

TASKS = (
    *("multi_value", "variables", "passage", "two_hop"),
    *("three_hop", "suffix", "tool_call", "agent"),
)


@dataclass(frozen=True, slots=True)
class Context:
    """Passages and what can be asked about them.

    Attributes:
        passages: Texts, a blank line behind each.
        questions: Question and answer, of every puzzle that was asked for.
    """

    passages: tuple[str, ...]
    questions: tuple[tuple[str, str], ...]


def make_context(
    prose: Prose,
    rng: random.Random,
    tasks: Sequence[str],
    passage_lens: Sequence[int],
    has_distractors: bool = True,
) -> Context:
    """Passages that hold the facts of several puzzles.

    Args:
        prose: Where sentences come from.
        rng: Of the random choices.
        tasks: Kinds of the puzzles, of `PUZZLES` or `passage`.
        passage_lens: For each passage about how many tokens of prose it has.
        has_distractors: Put puzzles nobody asks about beside each; at most one set a kind.

    Raises:
        ValueError: There is no passage.
    """
    if not passage_lens:
        raise ValueError("passage_lens: got none, expected at least one passage")
    names = Names(rng)
    headings = [names.name() for _ in passage_lens]
    passages = [prose.draw(rng, length) for length in passage_lens]
    plain = [list(sentences) for sentences in passages]
    puzzles: list[tuple[str, Puzzle | None]] = []
    for task in tasks:
        make = PUZZLES.get(task)
        puzzles.append((task, make(rng, names, len(passages)) if make else None))
    for task in dict.fromkeys(tasks if has_distractors else ()):
        for _ in range(DISTRACTORS.get(task, 0)):
            _scatter(PUZZLES[task](rng, names, len(passages)), passages, rng)
    for _, puzzle in puzzles:
        if puzzle is not None:
            _scatter(puzzle, passages, rng)
    questions = tuple(
        (puzzle.question, puzzle.answer) if puzzle else _quote(plain, headings, rng)
        for _, puzzle in puzzles
    )
    texts = tuple(
        f"Passage {heading}: {' '.join(sentences)}\n\n"
        for heading, sentences in zip(headings, passages, strict=True)
    )
    return Context(texts, questions)


def _scatter(puzzle: Puzzle, passages: Sequence[list[str]], rng: random.Random) -> None:
    """Put the facts of a puzzle between sentences of different passages."""
    places = rng.sample(range(len(passages)), min(len(puzzle.facts), len(passages)))
    while len(places) < len(puzzle.facts):
        places.append(rng.randrange(len(passages)))
    if puzzle.is_ordered:
        places.sort()
    last: dict[int, int] = {}
    for place, fact in zip(places, puzzle.facts, strict=True):
        lowest = last.get(place, -1) + 1 if puzzle.is_ordered else 0
        spot = rng.randint(lowest, len(passages[place]))
        passages[place].insert(spot, fact)
        last[place] = spot


def _quote(
    plain: Sequence[Sequence[str]], headings: Sequence[str], rng: random.Random
) -> tuple[str, str]:
    """Asks for the passage of a sentence that no other passage has."""
    counted: dict[str, int] = {}
    for sentences in plain:
        for sentence in set(sentences):
            counted[sentence] = counted.get(sentence, 0) + 1
    order = rng.sample(range(len(plain)), len(plain))
    for place in order:
        own = [sentence for sentence in plain[place] if counted[sentence] == 1]
        if own:
            words = rng.choice(own).split()
            start = rng.randint(0, max(0, len(words) - 12))
            quoted = " ".join(words[start : start + 12])
            return f'Which passage says "{quoted}"?', headings[place]
    return "Which passage stands first?", headings[0]


def ask(question: str) -> str:
    """The text of a question's chunk."""
    return f"Question: {question}\n{ANSWER}"


def make_tools(
    prose: Prose, rng: random.Random, num_chunks: int, chunk_len: int, num_questions: int = 1
) -> Context:
    """Tools, and in their middle a profile that changes from request to request.

    Args:
        prose: Where sentences come from.
        rng: Of the random choices.
        num_chunks: Tools and profile, at least 2.
        chunk_len: About how many tokens a chunk has.
        num_questions: Calls to ask for.
    """
    names = Names(rng)
    deeds = [rng.choice(_DEEDS) + f" at {names.name()}" for _ in range(num_chunks - 1)]
    tools = [f"{names.word()}_{names.word()}" for _ in deeds]
    chunks = [
        f"Tool {tool}: {deed}. {' '.join(prose.draw(rng, max(8, chunk_len - 24)))}\n\n"
        for tool, deed in zip(tools, deeds, strict=True)
    ]
    attributes = rng.sample(_ATTRIBUTES, 4)
    values = [names.name() for _ in attributes]
    known = " ".join(
        f"The {attribute} of the user is {value}."
        for attribute, value in zip(attributes, values, strict=True)
    )
    chunks.insert(len(chunks) // 2, f"Profile: {known}\n\n")
    questions = []
    for _ in range(num_questions):
        tool, which = rng.randrange(len(tools)), rng.randrange(len(values))
        question = f"Call the tool that {deeds[tool]} with the {attributes[which]} of the user."
        questions.append((question, f"{tools[tool]}({values[which]})"))
    return Context(tuple(chunks), tuple(questions))


def make_agent(prose: Prose, rng: random.Random, num_tokens: int) -> TaskPrompt:
    """Four uneven chunks (70, 20, 7 and 3 of 100) between system text and question."""
    lens = [max(12, round(num_tokens * share)) for share in (0.70, 0.20, 0.07, 0.03)]
    return _first_question("agent", SYSTEM, make_context(prose, rng, ["two_hop"], lens))


def _first_question(task: str, system: str, context: Context) -> TaskPrompt:
    (question, answer), *_ = context.questions
    return TaskPrompt(task, (system, *context.passages, ask(question)), answer)


def make_prompt(
    task: str, prose: Prose, rng: random.Random, num_chunks: int, chunk_len: int
) -> TaskPrompt:
    """One prompt of a task.

    Args:
        task: A name in `TASKS`.
        prose: Where sentences come from.
        rng: Of the random choices.
        num_chunks: Chunks between system text and question; `agent` always has four, and spreads
            as many tokens over them.
        chunk_len: About how many tokens a chunk has.

    Raises:
        ValueError: No such task.
    """
    if task == "tool_call":
        tools = make_tools(prose, rng, num_chunks, chunk_len)
        return _first_question(task, TOOL_SYSTEM, tools)
    if task == "agent":
        return make_agent(prose, rng, num_chunks * chunk_len)
    if task not in TASKS:
        raise ValueError(f"task: got {task!r}, expected one of {', '.join(TASKS)}")
    lens = [round(chunk_len * rng.uniform(0.7, 1.3)) for _ in range(num_chunks)]
    return _first_question(task, SYSTEM, make_context(prose, rng, [task], lens))


def make_prompts(
    task: str, prose: Prose, num_prompts: int, num_chunks: int, chunk_len: int, seed: int
) -> list[TaskPrompt]:
    """Prompts of a task, each of a seed of its own, so that more of them begin with the same."""
    return [
        make_prompt(task, prose, random.Random(f"{seed}/{task}/{index}"), num_chunks, chunk_len)
        for index in range(num_prompts)
    ]
