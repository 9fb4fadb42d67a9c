"""The benchmark: time to first token and first-token KL of PIC against full prefill, and overheads.

Knows what is compared and what the project aims for. Does not know how a server is started or
asked (`server`) or where the prompts come from (`workload`).

    server with PIC             every arm, and full prefill by our attention backend
    server on torch_native      full prefill as SGLang does it; one token behind a cached prompt
    two fresh servers           plain requests with the flag and without, strictly alternating

One request is on its way at a time, so a server that is up but not asked costs nothing. Within a
round the same token ids are sent once to each plain side (under an `extra_key` of its own, so that
nothing is cached for it) and once by each arm, in an order that rotates. A pair is an arm and a
plain request of its round; the plain side of a row is the one with the lower median. Afterwards,
untimed, every arm is asked again for the log-probabilities of the first token over the whole
vocabulary, and so is full prefill, whose prompt is in SGLang's prefix cache by then: its KV is what
it was and only the last token is computed again, at the cost of bf16 noise (KL below 0.005).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from sglang_ext.errors import ExtError, ServerFailed
from sglang_ext.scripts.server import (
    Client,
    Result,
    default_threads,
    load_encoder,
    serve,
)
from sglang_ext.scripts.workload import (
    Passage,
    Prompt,
    cut_passages,
    make_prompts,
    python_topics,
)

PROMPT_TOKENS = (1000, 2000, 3700)
NUM_PASSAGES = (8, 16)
FRAME_TOKENS = 60  # system text and question
PASSAGE_SLACK = (12, 20)  # a passage ends with a sentence, so its length varies around the mean
FLAG_PROMPT_TOKENS = 300
FLAG_WARMUP_PAIRS = 6
NUM_RESAMPLES = 5000
SEED = 11

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured.

    Attributes:
        pairs: Rounds of each kind of prompt.
        kl_prompts: Rounds of the longest prompts with most passages, where KL is compared.
        flag_pairs: Requests to each server of the flag's comparison.
        is_quick: Leave out all but the shortest and the longest prompts.
    """

    pairs: int
    kl_prompts: int
    flag_pairs: int
    is_quick: bool = False

    def cases(self) -> list[Case]:
        """Kinds of prompts; the last is the one the aims are about."""
        kinds = [(tokens, count) for tokens in PROMPT_TOKENS for count in NUM_PASSAGES]
        if self.is_quick:
            kinds = [kinds[0], kinds[-1]]
        *others, largest = kinds
        return [*(Case(*kind, self.pairs) for kind in others), Case(*largest, self.kl_prompts)]


QUICK = Scale(pairs=2, kl_prompts=2, flag_pairs=20, is_quick=True)


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to serve a prompt with PIC.

    Attributes:
        strategy: Its name.
        budget: `pic_n_avg`; 0 where nothing is recomputed.
        cached: `warm`, every chunk but the question is cached; `cold`, none is.
    """

    strategy: str
    budget: int
    cached: str = "warm"

    @property
    def label(self) -> str:
        """Strategy, budget and, if so, that it is cold."""
        parts = [self.strategy, str(self.budget) if self.budget else ""]
        return " ".join(filter(None, [*parts, "cold" if self.cached == "cold" else ""]))


class Plain(StrEnum):
    """Full prefill, by which attention backend."""

    OURS = "our backend"
    STOCK = "torch_native"


Side = Arm | Plain

REUSE = Arm("reuse", 0)
DARIC_4, DARIC_16, DARIC_64 = (Arm("daric", budget) for budget in (4, 16, 64))
WARM_ARMS = (REUSE, Arm("epic", 16), DARIC_4, DARIC_16, DARIC_64)
COLD = Arm("daric", 16, "cold")


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of prompt.

    Attributes:
        prompt_tokens: Wanted length; prompts come close to it.
        num_passages: Chunks between system text and question.
        rounds: Prompts of this kind.
    """

    prompt_tokens: int
    num_passages: int
    rounds: int

    def arms(self, has_cold: bool) -> list[Arm]:
        """What is compared; a budget that covers the prompt would be an exact prefill."""
        arms = [*WARM_ARMS, COLD] if has_cold else [*WARM_ARMS]
        chunks = self.num_passages + 2
        return [arm for arm in arms if arm.budget * chunks < 0.9 * self.prompt_tokens]


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt as token ids.

    Attributes:
        ids: Of the whole prompt.
        bounds: Where its chunks start.
    """

    ids: list[int]
    bounds: list[int]

    @property
    def question_len(self) -> int:
        """Tokens of the last chunk, which is never cached."""
        return len(self.ids) - self.bounds[-1]


class Sample(NamedTuple):
    """One round of an arm."""

    plain_ms: Mapping[Plain, float]
    """TTFT of full prefill on each plain side."""
    pic_ms: float
    """TTFT of the arm."""
    kl: float
    """First-token KL(full prefill || arm), nats."""
    report: Mapping[str, Any]
    """PIC's report of the timed request."""


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the pairs of one arm and one kind of prompt.

    Attributes:
        prompt_tokens: Of the prompt.
        chunks: Passages.
        strategy: The arm's.
        budget: The arm's.
        cached: The arm's.
        ttft_plain_ms: Of full prefill.
        ttft_pic_ms: Of the arm.
        ratio: Plain by PIC within a pair.
        kl_first_token: KL(full prefill || arm) of the first token, nats.
        recomputed_share: Of the cached tokens.
        pairs: How many.
    """

    prompt_tokens: int
    chunks: int
    strategy: str
    budget: int
    cached: str
    ttft_plain_ms: float
    ttft_pic_ms: float
    ratio: float
    kl_first_token: float
    recomputed_share: float
    pairs: int


@dataclass(frozen=True, slots=True)
class Overheads:
    """What PIC costs where it does not help, and what its CPU backend gains.

    Attributes:
        plain_with_flag_ratio: TTFT of plain requests with `--enable-pic` by without.
        plain_with_flag_upper95: Upper end of its 95 % bootstrap interval.
        aa_control_ratio: The same quotient between two halves of the requests without the flag.
        pic_fixed_ms_32_chunks: Our own time outside model passes and KV copies, 32 passages, ms.
        one_token_extend_4k_ratio: TTFT of one new token behind a cached prompt of about 3.7k
            tokens, torch_native by our backend.
    """

    plain_with_flag_ratio: float
    plain_with_flag_upper95: float
    aa_control_ratio: float
    pic_fixed_ms_32_chunks: float
    one_token_extend_4k_ratio: float


class FlagCost(NamedTuple):
    """Plain requests with the flag and without; as in `Overheads`."""

    ratio: float
    upper95: float
    control: float


class Servers(NamedTuple):
    """Clients of the two servers that are up together."""

    ours: Client
    """With PIC, on our attention backend."""
    stock: Client
    """SGLang alone, on torch_native."""


class Bench:
    """Runs the measurements of one model, printing what it does."""

    def __init__(self, model: str, scale: Scale, threads: int, log_dir: Path, out: Console) -> None:
        self._model = model
        self._scale = scale
        self._threads = threads
        self._log_dir = log_dir
        self._out = out
        self._encode = load_encoder(model)
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        self._vocab_size: int = config["vocab_size"]

    def run(self) -> tuple[list[Row], Overheads]:
        """All of it.

        Raises:
            ExtError: A server failed, or a request was not served as its arm says.
        """
        rows: list[Row] = []
        with (
            self._serve("pic", "--enable-pic") as ours,
            self._serve("torch_native", "--attention-backend", "torch_native") as stock,
        ):
            for case in self._scale.cases():
                rows += self._measure_case(Servers(ours, stock), case)
            fixed_ms = self._measure_fixed_ms(ours)
            extend_ratio = self._measure_extend(Servers(ours, stock))
        with (
            self._serve("plain") as bare,
            self._serve("plain-with-flag", "--enable-pic") as flagged,
        ):
            flag = self._measure_flag(bare, flagged)
        return rows, Overheads(*flag, fixed_ms, extend_ratio)

    def _serve(self, name: str, *options: str) -> AbstractContextManager[Client]:
        self._out.print(f"starting server {name}, OMP_NUM_THREADS={self._threads}")
        log_path = self._log_dir / f"bench-{name}.log"
        return serve(
            self._model, *options, threads=self._threads, log_path=log_path, say=self._out.print
        )

    def _measure_case(self, servers: Servers, case: Case) -> list[Row]:
        """Rows of one kind of prompt; the cold arm takes part in the first `pairs` rounds."""
        for client in servers:
            client.flush()
        preload(servers.ours, case, self._encode)
        samples: dict[Arm, list[Sample]] = defaultdict(list)
        for index, ask in enumerate(make_asks(case, self._encode, SEED)):
            arms = case.arms(has_cold=index < self._scale.pairs)
            answers = time_round(servers, ask, arms, index)
            kls = compare_answers(servers.ours, ask, arms, index, self._vocab_size)
            plain_ms = {side: answers[side].ttft_ms for side in Plain}
            for arm in arms:
                report = answers[arm].require_pic()
                check_cached(arm, ask, report)
                samples[arm].append(Sample(plain_ms, answers[arm].ttft_ms, kls[arm], report))
            self._out.print(
                f"  {case.prompt_tokens} tokens, {case.num_passages} passages, "
                f"{index + 1} of {case.rounds}: plain {min(plain_ms.values()):.0f} ms, "
                f"{DARIC_16.label} {answers[DARIC_16].ttft_ms:.0f} ms"
            )
        rows = [make_row(case, arm, taken) for arm, taken in samples.items()]
        plain = ", ".join(f"{side.value} {ms:.0f} ms" for side, ms in plain_medians(samples[REUSE]))
        self._out.print(f"  full prefill, faster first: {plain}")
        return rows

    def _measure_fixed_ms(self, client: Client) -> float:
        """Our own time of warm requests with 32 passages."""
        case = Case(3500, 32, 3 * self._scale.pairs)
        self._out.print(f"{case.rounds} prompts of {case.num_passages} passages")
        preload(client, case, self._encode)
        own_ms: list[float] = []
        for index, ask in enumerate(make_asks(case, self._encode, SEED)):
            report = ask_arm(client, ask, DARIC_16, str(index)).require_pic()
            check_cached(DARIC_16, ask, report)
            own_ms.append(report["ms"]["own"])
        return statistics.median(own_ms)

    def _measure_extend(self, servers: Servers) -> float:
        """Median of torch_native by our backend, one token behind a cached prompt."""
        case = Case(PROMPT_TOKENS[-1], NUM_PASSAGES[-1], self._scale.pairs)
        ratios: list[float] = []
        for index, ask in enumerate(make_asks(case, self._encode, SEED + 1)):
            order = servers if index % 2 else servers[::-1]
            times = {client: time_extend(client, ask.ids) for client in order}
            ratios.append(times[servers.stock] / times[servers.ours])
            self._out.print(
                f"  {index + 1} of {case.rounds}: one token behind {len(ask.ids)} cached, "
                f"torch_native by ours {ratios[-1]:.1f}"
            )
        return statistics.median(ratios)

    def _measure_flag(self, bare: Client, flagged: Client) -> FlagCost:
        """Plain requests to two servers in turn; every prompt has the same length and is new."""
        num_pairs = FLAG_WARMUP_PAIRS + self._scale.flag_pairs
        self._out.print(f"{num_pairs} plain requests to each server")
        ids = self._encode("\n\n".join(python_topics().values()))
        starts = range(0, num_pairs * FLAG_PROMPT_TOKENS, FLAG_PROMPT_TOKENS)
        prompts = [ids[start : start + FLAG_PROMPT_TOKENS] for start in starts]
        times = [[server.generate(p).ttft_ms for server in (bare, flagged)] for p in prompts]
        bare_ms, flagged_ms = np.asarray(times[FLAG_WARMUP_PAIRS:]).T
        ratio, upper95 = ratio_of_medians(flagged_ms, bare_ms)
        control = float(np.median(bare_ms[::2]) / np.median(bare_ms[1::2]))
        return FlagCost(ratio, upper95, control)


def make_asks(case: Case, encode: Encode, seed: int) -> list[Ask]:
    """Prompts of one kind, different subsets and orders of the case's passages."""
    prompts = make_prompts(_passages(case, encode), [case.num_passages] * case.rounds, seed)
    return [encode_prompt(prompt, encode) for prompt in prompts]


def encode_prompt(prompt: Prompt, encode: Encode) -> Ask:
    """Token ids of each chunk by itself, one after the other."""
    ids: list[int] = []
    bounds: list[int] = []
    for chunk in prompt.chunks:
        bounds.append(len(ids))
        ids += encode(chunk)
    return Ask(ids, bounds)


def preload(client: Client, case: Case, encode: Encode) -> None:
    """Have every passage of a case cached, by prompts that hold each of them once."""
    passages = _passages(case, encode)
    for start in range(0, len(passages), case.num_passages):
        prompt = Prompt(tuple(passages[start : start + case.num_passages]), "Question:")
        ask_arm(client, encode_prompt(prompt, encode), REUSE, "preload").require_pic()


def ask_arm(client: Client, ask: Ask, arm: Arm, tag: str) -> Result:
    """One timed answer by PIC; `tag` makes a cold arm's namespace new."""
    return client.generate(ask.ids, arm_params(ask, arm, tag))


def arm_params(ask: Ask, arm: Arm, tag: str) -> dict[str, Any]:
    """The arm's `custom_params`; the budget is never clipped by its share of the prompt."""
    params = {
        "pic_bounds": ask.bounds,
        "pic_strategy": arm.strategy,
        "pic_n_avg": arm.budget,
        "pic_max_share": 1.0,
    }
    return params | ({"pic_namespace": f"cold-{tag}"} if arm.cached == "cold" else {})


def plain_params(ask: Ask) -> dict[str, Any]:
    """The same chunks, computed in full."""
    return {"pic": False, "pic_bounds": ask.bounds}


def time_round(servers: Servers, ask: Ask, arms: Sequence[Arm], index: int) -> dict[Side, Result]:
    """Timed answers of both plain sides and of every arm, in an order rotated by `index`."""
    sides: list[Side] = [*Plain, *arms]
    shift = index % len(sides)
    return {side: time_side(servers, ask, side, index) for side in sides[shift:] + sides[:shift]}


def time_side(servers: Servers, ask: Ask, side: Side, index: int) -> Result:
    """One timed answer."""
    if isinstance(side, Arm):
        return ask_arm(servers.ours, ask, side, f"time-{index}")
    key = f"round-{index}"
    if side is Plain.STOCK:
        return servers.stock.generate(ask.ids, extra_key=key)
    return servers.ours.generate(ask.ids, plain_params(ask), extra_key=key)


def compare_answers(
    client: Client, ask: Ask, arms: Sequence[Arm], index: int, vocab_size: int
) -> dict[Arm, float]:
    """First-token KL of every arm to full prefill, after `time_round` of the same index."""
    key = f"round-{index}"
    full = client.first_logprobs(ask.ids, vocab_size, plain_params(ask), extra_key=key)
    return {
        arm: kl_divergence(
            full, client.first_logprobs(ask.ids, vocab_size, arm_params(ask, arm, f"kl-{index}"))
        )
        for arm in arms
    }


def kl_divergence(full: npt.NDArray[np.float64], got: npt.NDArray[np.float64]) -> float:
    """KL(full || got) in nats, of two `[vocab_size]` arrays of log-probabilities."""
    return float(np.sum(np.exp(full) * (full - got)))


def check_cached(arm: Arm, ask: Ask, report: Mapping[str, Any]) -> None:
    """Refuse a pair in which something else was cached than the arm says.

    Raises:
        ServerFailed: It says what was cached.
    """
    is_warm = report["computed_tokens"] <= ask.question_len
    is_cold = report["reused_tokens"] == report["recomputed_tokens"] == 0
    has_prefix = report["exact_tokens"] > ask.bounds[1]  # more than the system text
    if has_prefix or not (is_warm if arm.cached == "warm" else is_cold):
        raise ServerFailed(f"{arm.label}: not {arm.cached}, the server reports {dict(report)}")


def time_extend(client: Client, ids: Sequence[int]) -> float:
    """TTFT in ms of a prompt that is cached but for its last token; sends the prompt first.

    Raises:
        ServerFailed: The prompt was not in the prefix cache.
    """
    client.generate(ids)
    extend = client.generate([*ids, ids[0]])
    num_cached = extend.meta_info["cached_tokens"]
    if num_cached != len(ids):
        raise ServerFailed(f"{num_cached} tokens were in the prefix cache, expected {len(ids)}")
    return extend.ttft_ms


def ratio_of_medians(
    left: npt.NDArray[np.float64], right: npt.NDArray[np.float64]
) -> tuple[float, float]:
    """median(left) / median(right) and the upper end of its 95 % bootstrap interval.

    Args:
        left: `[num_pairs]`.
        right: `[num_pairs]`; pairs are resampled together.
    """
    rng = np.random.default_rng(SEED)
    picks = rng.integers(0, len(left), (NUM_RESAMPLES, len(left)))
    resampled = np.median(left[picks], axis=1) / np.median(right[picks], axis=1)
    return float(np.median(left) / np.median(right)), float(np.quantile(resampled, 0.975))


def plain_medians(samples: Sequence[Sample]) -> list[tuple[Plain, float]]:
    """Median TTFT in ms of each plain side, the faster first."""
    medians = {side: statistics.median(s.plain_ms[side] for s in samples) for side in Plain}
    return sorted(medians.items(), key=lambda item: item[1])


def make_row(case: Case, arm: Arm, samples: Sequence[Sample]) -> Row:
    """Medians of an arm's pairs with the faster plain side."""
    side, plain_ms = plain_medians(samples)[0]
    return Row(
        prompt_tokens=round(statistics.median(s.report["prompt_tokens"] for s in samples)),
        chunks=case.num_passages,
        strategy=arm.strategy,
        budget=arm.budget,
        cached=arm.cached,
        ttft_plain_ms=plain_ms,
        ttft_pic_ms=statistics.median(s.pic_ms for s in samples),
        ratio=statistics.median(s.plain_ms[side] / s.pic_ms for s in samples),
        kl_first_token=statistics.median(s.kl for s in samples),
        recomputed_share=statistics.median(s.report["recomputed_share"] for s in samples),
        pairs=len(samples),
    )


def describe_machine(threads: int) -> str:
    """CPU model, cores and server threads."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else "unknown CPU"
    return f"{name}, {len(os.sched_getaffinity(0))} cores, {threads} server threads"


def describe_commit() -> str:
    """Git's name of the working tree, marked `-dirty` if it was changed; or `unknown`."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure PIC against full prefill on this machine's CPU, in about 20 minutes."""
    args = _parse(argv)
    path: Path = args.out
    out = Console(highlight=False)
    load_before = os.getloadavg()
    try:
        bench = Bench(args.model, args.scale, args.threads, path.parent, out)
        rows, overheads = bench.run()
    except ExtError as exc:
        logs = path.parent / "bench-*.log"
        out.print(f"bench failed: {exc}", f"server logs: {logs}", sep="\n", markup=False)
        return 1
    content = {
        "machine": describe_machine(args.threads),
        "commit": describe_commit(),
        "loadavg": {"before": load_before, "after": os.getloadavg()},
        "rows": [asdict(row) for row in rows],
        "overheads": asdict(overheads),
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    plot(rows, path.with_suffix(".png"))
    out.print(make_table(rows), make_aims_table(rows, overheads))
    out.print(f"written: {path} and {path.with_suffix('.png')}")
    return 0


def largest(rows: Sequence[Row]) -> dict[Arm, Row]:
    """Rows of the kind of prompt that the aims are about."""
    chunks = max(row.chunks for row in rows)
    tokens = max(row.prompt_tokens for row in rows if row.chunks == chunks)
    chosen = [row for row in rows if row.chunks == chunks and row.prompt_tokens >= 0.9 * tokens]
    return {Arm(row.strategy, row.budget, row.cached): row for row in chosen}


def plot(rows: Sequence[Row], path: Path) -> None:
    """TTFT ratio against first-token KL, a point per warm arm of the longest prompts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.4), layout="constrained")
    chosen = {arm: row for arm, row in largest(rows).items() if arm.cached == "warm"}
    for arm, row in chosen.items():
        axes.plot(row.kl_first_token, row.ratio, "o", color="tab:blue")
        axes.annotate(
            arm.label, (row.kl_first_token, row.ratio), (6, 4), textcoords="offset points"
        )
    tokens = next(iter(chosen.values())).prompt_tokens
    axes.set_title(f"{tokens} tokens, {next(iter(chosen.values())).chunks} cached passages")
    axes.set_xlabel("median first-token KL to full prefill, nats")
    axes.set_ylabel("TTFT plain / PIC")
    axes.set_xlim(0, 1.2 * max(row.kl_first_token for row in chosen.values()))
    axes.set_ylim(0, 1.1 * max(row.ratio for row in chosen.values()))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def make_table(rows: Sequence[Row]) -> Table:
    """All rows."""
    table = Table(title="TTFT and first-token KL, medians of interleaved pairs")
    for title in ("tokens", "chunks", "arm", "plain", "PIC", "ratio", "KL", "share"):
        table.add_column(title, justify="left" if title == "arm" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.prompt_tokens),
            str(row.chunks),
            Arm(row.strategy, row.budget, row.cached).label,
            f"{row.ttft_plain_ms:.0f} ms",
            f"{row.ttft_pic_ms:.0f} ms",
            f"{row.ratio:.1f}",
            f"{row.kl_first_token:.3f}",
            f"{row.recomputed_share:.1%}",
        )
    return table


def make_aims_table(rows: Sequence[Row], overheads: Overheads) -> Table:
    """Every number that has an aim, beside it."""
    of = largest(rows)
    kls = [of[arm].kl_first_token for arm in (DARIC_4, DARIC_16, DARIC_64)]
    relative_kl = of[DARIC_16].kl_first_token / of[REUSE].kl_first_token
    extend = overheads.one_token_extend_4k_ratio
    table = Table(title="against the aims")
    table.add_column("number")
    table.add_column("measured", justify="right")
    table.add_column("aim", justify="right")
    for line in (
        ("TTFT ratio, daric 16, warm", f"{of[DARIC_16].ratio:.1f}", ">= 6"),
        ("TTFT ratio, reuse, warm", f"{of[REUSE].ratio:.1f}", ">= 15"),
        ("TTFT ratio, daric 16, cold", f"{of[COLD].ratio:.2f}", ">= 1.3"),
        ("one token extend, torch_native by ours", f"{extend:.1f}", ">= 10"),
        ("plain with the flag by without", f"{overheads.plain_with_flag_ratio:.3f}", ""),
        ("  upper 95 % bound", f"{overheads.plain_with_flag_upper95:.3f}", "<= 1.03"),
        ("  A/A control", f"{overheads.aa_control_ratio:.3f}", ""),
        ("own ms, 32 chunks", f"{overheads.pic_fixed_ms_32_chunks:.1f}", "< 5"),
        ("KL, daric 16 by reuse", f"{relative_kl:.2f}", "<= 0.6"),
        ("KL, daric 4, 16, 64", " ".join(f"{kl:.3f}" for kl in kls), "falling"),
    ):
        table.add_row(*line)
    return table


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description=main.__doc__)
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--out", type=Path, default=Path("build/bench.json"))
    parser.add_argument("--pairs", type=int, default=6, help="of each kind of prompt")
    parser.add_argument("--kl-prompts", type=int, default=24, help="prompts that KL is taken from")
    parser.add_argument("--flag-pairs", type=int, default=120, help="plain requests to each server")
    parser.add_argument("--threads", type=int, default=default_threads(), help="server threads")
    parser.add_argument("--quick", action="store_true", help="few pairs: does everything work?")
    args = parser.parse_args(argv)
    args.scale = QUICK if args.quick else Scale(args.pairs, args.kl_prompts, args.flag_pairs)
    return args


def _passages(case: Case, encode: Encode) -> list[Passage]:
    """The pool of a case; more prompts draw from more passages, as long as there are enough."""
    mean = (case.prompt_tokens - FRAME_TOKENS) // case.num_passages
    low, high = mean - PASSAGE_SLACK[0], mean + PASSAGE_SLACK[1]
    cut = cut_passages(python_topics(), lambda text: len(encode(text)), low, high)
    return list(islice(cut, case.num_passages + 2 * case.rounds))


if __name__ == "__main__":
    sys.exit(main())
