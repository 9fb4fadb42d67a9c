"""The quality lab: what an arm makes of a prompt, beside what full prefill makes of it.

Knows what is asked, in which order, and what the numbers mean. Does not know how a server is
started (`run`), which arms there are (`arms`), or where the prompts' texts come from.

For each prompt, one request at a time, to one server:

    request            namespace    cached for it                gives
    reuse              own          nothing                      chunks for the arms; is cold
    full, and arms     own          every chunk but the query    answer, TTFT; in rotating order
    full, and arms     own          the same                     log-probabilities of one token
    reuse, three more  new ones     nothing                      the control: cold against cold

Full prefill has an `extra_key` of its own, so that nothing is cached for it, but when its
log-probabilities are asked for: its own prompt is in SGLang's prefix cache by then, and only the
last token is computed again, at the cost of bf16 noise. An arm's namespace is the prompt's own, and
what PIC computes approximately never enters SGLang's prefix cache: no arm has more than the system
text as an exact prefix, which every report is checked for.

The token whose probabilities are compared is the answer's first that is not blank: where a
tokenizer has the blank before a number as a token of its own, all arms are sure of it, and no
distance could be seen. Full prefill's blanks are put behind the prompt for these requests.

The control says what noise looks like: the same prompt twice by the same strategy, with nothing
cached. All but rounding is equal.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_ext.errors import ServerFailed
from sglang_ext.scripts.bench import Ask, kl_divergence, plain_params
from sglang_ext.scripts.quality.arms import FULL, REUSE, Arm
from sglang_ext.scripts.quality.bootstrap import Interval, bootstrap_ratio_ci
from sglang_ext.scripts.quality.longbench import FIRST_LINE_TASKS, LongPrompt
from sglang_ext.scripts.quality.rating import METRICS
from sglang_ext.scripts.quality.scores import Metric, first_line, score
from sglang_ext.scripts.quality.tasks import TaskPrompt
from sglang_ext.scripts.server import Client, Result

CONTROL = "control"
"""Strategy of the rows that compare a cold request with another one."""
CONTROL_BUDGET = "cold twice"
MAX_ANSWER = 28
"""Tokens of an answer to a synthetic task, at most."""
ANSWER_SLACK = 4
"""How many tokens more than the right answer has are generated, so that too long is wrong."""
NUM_CONTROLS = 3
"""How many of a task's compared prompts take part in the control: each costs three cold requests,
and where nothing but rounding differs, more of them say no more."""
MIN_GAP = 0.05
"""Least score that reuse has to lose for a share of it to be regained."""

LogProbs = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt as it is asked and scored, whatever it comes from.

    Attributes:
        task: Name of the task or data set.
        index: Place among the prompts of its task, from 0.
        prompt_id: Which prompt it is, in words.
        chunks: Texts that make up the prompt, at least two; the last is the query.
        answers: Any of which is right.
        metric: How it is scored.
        max_new_tokens: Longest answer, in tokens.
        is_one_line: The answer ends at its first newline.
    """

    task: str
    index: int
    prompt_id: str
    chunks: tuple[str, ...]
    answers: tuple[str, ...]
    metric: Metric
    max_new_tokens: int
    is_one_line: bool

    @property
    def num_chunks(self) -> int:
        """Chunks between the first, which says what to do, and the query."""
        return len(self.chunks) - 2


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A model's tokenizer.

    Attributes:
        encode: Text to token ids, nothing added.
        decode: Token ids to text.
        special_ids: Tokens that are no text; the first of them ends an answer.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    special_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one timed request.

    Attributes:
        text: Of the answer, cut where it ends.
        tokens: The tokens that the text is made of.
        ttft_ms: Until its first token, ms.
        recomputed_share: Of the cached tokens, in [0, 1]; 1 for full prefill.
    """

    text: str
    tokens: tuple[int, ...]
    ttft_ms: float
    recomputed_share: float


class Distance(NamedTuple):
    """How far the probabilities of one token are from full prefill's."""

    kl: float
    """KL(full || arm), nats, at least 0 but for rounding."""
    ppl_gap: float
    """-log p_arm(t) + log p_full(t) of full prefill's likeliest token t, nats."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt by one arm. `full_*` and `reuse_*` are of the same prompt.

    Attributes:
        task: Name of the task or data set.
        index: Place of the prompt in its task.
        prompt_id: Which prompt it is.
        chunks: Chunks between instruction and query.
        prompt_tokens: Of the prompt.
        strategy: The arm's; `full`, or `control` for cold against cold.
        budget: The arm's label.
        recomputed_share: Reported, in [0, 1].
        score: The answer's, in [0, 1].
        full_score: Of full prefill's answer.
        reuse_score: Of reuse's answer.
        agreement: See `agreement`.
        kl: KL(full || arm) of the first token that is not blank, nats; None if not asked for.
        ppl_gap: See `Distance`; None if not asked for.
        ttft_ms: Until the first token, ms.
        full_ttft_ms: Of full prefill, ms.
        answer: What the arm answered.
        full_answer: What full prefill answered; for the control, the other cold request.
        expected: A right answer.
    """

    task: str
    index: int
    prompt_id: str
    chunks: int
    prompt_tokens: int
    strategy: str
    budget: str
    recomputed_share: float
    score: float
    full_score: float
    reuse_score: float
    agreement: float
    kl: float | None
    ppl_gap: float | None
    ttft_ms: float
    full_ttft_ms: float
    answer: str
    full_answer: str
    expected: str


@dataclass(frozen=True, slots=True)
class Row:
    """A cell: one task by one arm. `full` stands beside the arms, all its numbers trivial.

    Attributes:
        model: Its name.
        task: Name of the task or data set.
        chunks: Median number of chunks between instruction and query.
        strategy: The arm's; `control` for cold against cold.
        budget: The arm's label.
        recomputed_share: Mean of the reported ones, in [0, 1]; 1 for full prefill.
        n: Prompts.
        score: Mean, in [0, 1].
        full_score: Mean of full prefill over the same prompts.
        reuse_score: Mean of reuse over the same prompts.
        kept: `score / full_score`; None if full prefill scores 0.
        kept_ci95: Its paired bootstrap interval, low and high.
        regained: `(score - reuse_score) / (full_score - reuse_score)`: 0 is reuse, 1 is full
            prefill; None where reuse loses less than `MIN_GAP`.
        regained_ci95: Its paired bootstrap interval.
        kl_first_token: Mean KL(full || arm) of the answer's first token that is not blank, nats;
            None if not measured. The control's is that of one cold request to another.
        kl_n: Prompts whose KL was measured.
        ppl_gap: Mean of `Distance.ppl_gap`, nats; may be negative.
        agreement: Mean of `agreement`, in [0, 1].
        ttft_ratio: Median of full prefill's TTFT by the arm's, within a prompt.
    """

    model: str
    task: str
    chunks: int
    strategy: str
    budget: str
    recomputed_share: float
    n: int
    score: float
    full_score: float
    reuse_score: float
    kept: float | None
    kept_ci95: tuple[float, float] | None
    regained: float | None
    regained_ci95: tuple[float, float] | None
    kl_first_token: float | None
    kl_n: int
    ppl_gap: float | None
    agreement: float
    ttft_ratio: float


class Lab:
    """Asks one server, about one prompt after the other.

    Args:
        client: Of a server with PIC.
        tokenizer: Of the model it serves.
        vocab_size: Of the model.
        arms: What is compared; `reuse` is among them, `full` is not.
        num_compared: How many prompts of each task have a token's probabilities compared; the
            first of them take part in the control.
        run_id: Begins every namespace; unlike that of any other run on the same server.
        has_kl: Ask for probabilities at all.
    """

    def __init__(
        self,
        client: Client,
        tokenizer: Tokenizer,
        vocab_size: int,
        arms: Sequence[Arm],
        num_compared: int,
        run_id: str,
        has_kl: bool = True,
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._arms = tuple(arms)
        self._num_compared = num_compared
        self._run_id = run_id
        self._has_kl = has_kl

    def warm_up(self, question: Question) -> None:
        """Send a prompt by every arm, untimed; says at once if the server refuses one.

        Raises:
            ServerFailed: It does.
        """
        ask = encode_chunks(question.chunks, self._tokenizer.encode)
        name = f"{self._run_id}-warmup"
        self._client.generate(ask.ids, plain_params(ask), extra_key=name)
        for arm in (REUSE, *self._arms):
            self._client.generate(ask.ids, arm_params(ask, arm, name)).require_pic()

    def measure(self, question: Question) -> list[Sample]:
        """Everything about one prompt: full prefill, every arm, and if it is compared the control.

        Raises:
            ServerFailed: A request failed or was not served as its arm says.
        """
        ask = encode_chunks(question.chunks, self._tokenizer.encode)
        name = f"{self._run_id}-{question.task}-{question.index}"
        is_compared = question.index < self._num_compared
        is_control = is_compared and question.index < NUM_CONTROLS
        new_tokens = self._answer_len(question) if is_control else 1
        cold = self._ask_cold(ask, name, question, new_tokens)
        answers = self._answers(ask, name, question)
        led = with_lead(ask, answers[FULL].tokens, self._tokenizer.decode)
        distances = self._distances(led, name) if self._has_kl and is_compared else {}
        others: list[tuple[str, str, Answer, Answer, Distance | None]] = [
            (arm.strategy, arm.budget, answer, answers[FULL], distances.get(arm))
            for arm, answer in answers.items()
        ]
        if is_control:
            again = self._ask_cold(ask, f"{name}-again", question, new_tokens)
            noise = self._noise(led, name) if self._has_kl else None
            others.append((CONTROL, CONTROL_BUDGET, again, cold, noise))
        full, reuse = (_rate(question, answers[arm].text) for arm in (FULL, REUSE))
        return [
            Sample(
                task=question.task,
                index=question.index,
                prompt_id=question.prompt_id,
                chunks=question.num_chunks,
                prompt_tokens=len(ask.ids),
                strategy=strategy,
                budget=budget,
                recomputed_share=answer.recomputed_share,
                score=_rate(question, answer.text),
                full_score=full,
                reuse_score=reuse,
                agreement=agreement(other.tokens, answer.tokens),
                kl=None if distance is None else distance.kl,
                ppl_gap=None if distance is None else distance.ppl_gap,
                ttft_ms=answer.ttft_ms,
                full_ttft_ms=answers[FULL].ttft_ms,
                answer=answer.text,
                full_answer=other.text,
                expected=question.answers[0],
            )
            for strategy, budget, answer, other, distance in others
        ]

    def _answers(self, ask: Ask, name: str, question: Question) -> dict[Arm, Answer]:
        """Of full prefill and every arm, asked in an order that rotates from prompt to prompt."""
        sides = (FULL, *self._arms)
        shift = question.index % len(sides)
        new_tokens = self._answer_len(question)
        taken: dict[Arm, Answer] = {}
        for arm in sides[shift:] + sides[:shift]:
            params = plain_params(ask) if arm == FULL else arm_params(ask, arm, name)
            key = name if arm == FULL else None
            result = self._client.generate(
                ask.ids, params, extra_key=key, max_new_tokens=new_tokens
            )
            share = 1.0
            if arm != FULL:
                report = result.require_pic()
                check_warm(arm.label, ask, report)
                share = report["recomputed_share"]
            taken[arm] = self._read(question, result, share)
        return {arm: taken[arm] for arm in sides}

    def _distances(self, ask: Ask, name: str) -> dict[Arm, Distance]:
        """Of every arm's next token, after `_answers` for the same prompt."""
        full = self._client.first_logprobs(
            ask.ids, self._vocab_size, plain_params(ask), extra_key=name
        )
        found = {FULL: Distance(0.0, 0.0)}
        for arm in self._arms:
            params = arm_params(ask, arm, name)
            got = self._client.first_logprobs(ask.ids, self._vocab_size, params)
            found[arm] = first_token_distance(full, got)
        return found

    def _noise(self, ask: Ask, name: str) -> Distance:
        """Of one cold request's next token to another's."""
        first, second = (
            self._client.first_logprobs(
                ask.ids, self._vocab_size, arm_params(ask, REUSE, f"{name}-noise-{index}")
            )
            for index in range(2)
        )
        return first_token_distance(first, second)

    def _ask_cold(self, ask: Ask, namespace: str, question: Question, new_tokens: int) -> Answer:
        """One answer by reuse in a new namespace; leaves every chunk but the query cached there."""
        params = arm_params(ask, REUSE, namespace)
        result = self._client.generate(ask.ids, params, max_new_tokens=new_tokens)
        check_cold(ask, result.require_pic())
        return self._read(question, result, 0.0)

    def _answer_len(self, question: Question) -> int:
        """Tokens to generate: what a right answer needs and some more, at most the task's."""
        if not question.is_one_line:
            return question.max_new_tokens
        longest = max(len(self._tokenizer.encode(f" {answer}\n")) for answer in question.answers)
        return min(question.max_new_tokens, longest + ANSWER_SLACK)

    def _read(self, question: Question, result: Result, share: float) -> Answer:
        special = self._tokenizer.special_ids
        ids = tuple(takewhile(lambda token: token not in special, result.output_ids))
        text = self._tokenizer.decode(ids)
        if question.is_one_line:
            ids = line_tokens(ids, self._tokenizer.decode)
            text = first_line(text)
        return Answer(text, ids, result.ttft_ms, share)


def from_task(prompt: TaskPrompt, index: int) -> Question:
    """A synthetic prompt as a question."""
    return Question(
        task=prompt.task,
        index=index,
        prompt_id=f"{prompt.task}/{index}",
        chunks=prompt.chunks,
        answers=(prompt.answer,),
        metric=METRICS[prompt.task],
        max_new_tokens=MAX_ANSWER,
        is_one_line=True,
    )


def from_longbench(prompt: LongPrompt, index: int) -> Question:
    """A prompt in LongBench's format as a question, its answer cut as LongBench cuts it."""
    return Question(
        task=prompt.task,
        index=index,
        prompt_id=prompt.prompt_id,
        chunks=prompt.chunks,
        answers=prompt.answers,
        metric=prompt.metric,
        max_new_tokens=prompt.max_new_tokens,
        is_one_line=prompt.task in FIRST_LINE_TASKS,
    )


def encode_chunks(chunks: Iterable[str], encode: Callable[[str], list[int]]) -> Ask:
    """Token ids of each chunk by itself, one after the other."""
    ids: list[int] = []
    bounds: list[int] = []
    for chunk in chunks:
        bounds.append(len(ids))
        ids += encode(chunk)
    return Ask(ids, bounds)


def with_lead(ask: Ask, answer: Sequence[int], decode: Callable[[Sequence[int]], str]) -> Ask:
    """A prompt that goes on with the blank tokens an answer begins with, all but its last token."""
    lead: list[int] = []
    for token in answer[:-1]:
        if decode([*lead, token]).strip():
            break
        lead.append(token)
    return Ask([*ask.ids, *lead], ask.bounds)


def arm_params(ask: Ask, arm: Arm, namespace: str) -> dict[str, Any]:
    """`custom_params` of a request by an arm."""
    return {"pic_bounds": ask.bounds, "pic_namespace": namespace, **arm.params}


def check_warm(label: str, ask: Ask, report: Mapping[str, Any]) -> None:
    """Refuse a request for which not every chunk but the query was cached, or a prefix was.

    Raises:
        ServerFailed: It says what the server reports.
    """
    if report["computed_tokens"] > ask.question_len or _has_prefix(ask, report):
        raise ServerFailed(f"{label}: not warm, the server reports {dict(report)}")


def check_cold(ask: Ask, report: Mapping[str, Any]) -> None:
    """Refuse a request for which anything was cached.

    Raises:
        ServerFailed: It says what the server reports.
    """
    if report["reused_tokens"] or report["recomputed_tokens"] or _has_prefix(ask, report):
        raise ServerFailed(f"reuse: not cold, the server reports {dict(report)}")


def _has_prefix(ask: Ask, report: Mapping[str, Any]) -> bool:
    """More than the first chunk is exact."""
    return bool(report["exact_tokens"] > ask.bounds[1])


def line_tokens(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> tuple[int, ...]:
    """The leading tokens of an answer that its first line is made of, as few as there can be."""
    line = first_line(decode(ids))
    for count in range(len(ids) + 1):
        if first_line(decode(ids[:count])) == line:
            return tuple(ids[:count])
    return tuple(ids)


def agreement(full: Sequence[int], got: Sequence[int]) -> float:
    """Share of full prefill's answer tokens that an arm repeats until the first difference.

    Args:
        full: Tokens of full prefill's answer. Where it has none, only another empty one agrees.
        got: Tokens of the arm's answer.

    Returns:
        In [0, 1].
    """
    if not full:
        return float(not got)
    same = takewhile(lambda pair: pair[0] == pair[1], zip(full, got, strict=False))
    return sum(1 for _ in same) / len(full)


def first_token_distance(full: LogProbs, got: LogProbs) -> Distance:
    """Distance of an arm's token from full prefill's.

    Args:
        full: `[vocab_size]` log-probabilities of full prefill, nats.
        got: `[vocab_size]` of the arm.
    """
    likeliest = int(np.argmax(full))
    return Distance(kl_divergence(full, got), float(full[likeliest] - got[likeliest]))


def make_rows(model: str, samples: Iterable[Sample]) -> list[Row]:
    """A row for each task and arm that has samples, in the order of their first ones."""
    cells: dict[tuple[str, str, str], list[Sample]] = {}
    for sample in samples:
        cells.setdefault((sample.task, sample.strategy, sample.budget), []).append(sample)
    return [make_row(model, cell) for cell in cells.values()]


def make_row(model: str, samples: Sequence[Sample]) -> Row:
    """Sum up the samples of one cell, at least one."""
    scores = [sample.score for sample in samples]
    fulls = [sample.full_score for sample in samples]
    reuses = [sample.reuse_score for sample in samples]
    gaps = [full - reuse for full, reuse in zip(fulls, reuses, strict=True)]
    gains = [score - reuse for score, reuse in zip(scores, reuses, strict=True)]
    has_kept = sum(fulls) > 0
    has_gap = statistics.fmean(gaps) >= MIN_GAP
    kls = [sample.kl for sample in samples if sample.kl is not None]
    ppl_gaps = [sample.ppl_gap for sample in samples if sample.ppl_gap is not None]
    return Row(
        model=model,
        task=samples[0].task,
        chunks=round(statistics.median(sample.chunks for sample in samples)),
        strategy=samples[0].strategy,
        budget=samples[0].budget,
        recomputed_share=statistics.fmean(sample.recomputed_share for sample in samples),
        n=len(samples),
        score=statistics.fmean(scores),
        full_score=statistics.fmean(fulls),
        reuse_score=statistics.fmean(reuses),
        kept=sum(scores) / sum(fulls) if has_kept else None,
        kept_ci95=_ends(bootstrap_ratio_ci(scores, fulls)) if has_kept else None,
        regained=sum(gains) / sum(gaps) if has_gap else None,
        regained_ci95=_ends(bootstrap_ratio_ci(gains, gaps)) if has_gap else None,
        kl_first_token=statistics.fmean(kls) if kls else None,
        kl_n=len(kls),
        ppl_gap=statistics.fmean(ppl_gaps) if ppl_gaps else None,
        agreement=statistics.fmean(sample.agreement for sample in samples),
        ttft_ratio=statistics.median(s.full_ttft_ms / s.ttft_ms for s in samples),
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """What a strategy that works keeps to, on any model. Each is generous: it finds faults.

    Attributes:
        kl_of_reuse: Mean first-token KL by that of reuse in the same task, at most: computing
            tokens again must not lead further from full prefill. Above 1, because the KL of a few
            prompts scatters.
        noise_kl: KL in nats below which nothing is judged, and which the control must not exceed:
            bf16 alone makes as much. 0.02 is four times what it was seen to make.
        kept_of_reuse: Least share of full prefill's score by the share that reuse keeps, reached
            by the upper end of the interval: an arm fails only if other prompts of the kind would
            hardly have saved it.
        kept: Least share of full prefill's score whatever reuse keeps, reached likewise. How much
            a budget can regain depends on model and task, so it asks for nothing by itself.
    """

    kl_of_reuse: float = 1.5
    noise_kl: float = 0.02
    kept_of_reuse: float = 0.9
    kept: float = 0.0


class Verdict(NamedTuple):
    """One number of one row against its limit."""

    task: str
    """The row's."""
    strategy: str
    """The row's."""
    budget: str
    """The row's."""
    name: str
    """`kl_first_token` or `kept`."""
    value: float
    """The row's; for `kept` the upper end of the interval."""
    limit: float
    """What it is compared with."""
    passed: bool
    """KL is at most the limit, or `kept` at least."""


def check_strategies(rows: Iterable[Row], limits: Limits) -> list[Verdict]:
    """Judge every arm that recomputes, and the control; pure.

    `full` and `reuse` are what is compared with and get no verdict. What was not measured gets
    none either: KL that was not asked for or has no reuse beside it, and a share of a score of 0.

    Args:
        rows: Of `make_rows`; of one model.
        limits: What they have to keep to.
    """
    rows = list(rows)
    of_reuse = {row.task: row for row in rows if row.strategy == REUSE.strategy}
    verdicts: list[Verdict] = []
    for row in rows:
        if row.strategy in (FULL.strategy, REUSE.strategy):
            continue
        is_control = row.strategy == CONTROL
        names = row.task, row.strategy, row.budget
        reuse = of_reuse.get(row.task)
        reuse_kl = reuse.kl_first_token if reuse and not is_control else None
        if is_control:
            reuse_kl = 0.0
        if row.kl_first_token is not None and reuse_kl is not None:
            limit = max(limits.noise_kl, limits.kl_of_reuse * reuse_kl)
            passed = row.kl_first_token <= limit  # not true of nan
            verdicts.append(Verdict(*names, "kl_first_token", row.kl_first_token, limit, passed))
        if row.kept_ci95 is not None and not is_control:
            high = row.kept_ci95[1]
            reuse_kept = reuse.kept if reuse and reuse.kept else 0.0
            limit = max(limits.kept, limits.kept_of_reuse * reuse_kept)
            verdicts.append(Verdict(*names, "kept", high, limit, high >= limit))
    return verdicts


def _rate(question: Question, text: str) -> float:
    return score(question.metric, text, question.answers)


def _ends(interval: Interval) -> tuple[float, float]:
    return interval.low, interval.high
