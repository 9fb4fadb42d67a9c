"""The quality lab's command: serve a model with PIC, ask every prompt by every arm, show it.

Knows options, files and the order of the work. Does not know what is measured (`lab`), how
strategies are written (`arms`), or how rows look (`tables`).

    python -m sglang_ext.scripts.quality.run --model FOLDER
    ... --arms kvdev:4,2,15% qci:1,8,15% daric:16 --tasks two_hop --n 50
    ... --tasks --longbench 2wikimqa.jsonl musique.jsonl --url http://127.0.0.1:30000

Tasks take turns, so that all have as many prompts when time is up. What was measured is written
after each turn, and when the run is interrupted.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from typing import Any, TextIO

import httpx
from rich.console import Console

from sglang_ext.errors import ConfigError, ExtError, ServerFailed
from sglang_ext.scripts.quality.arms import DEFAULT_ARMS, FULL, Arm, parse_arms
from sglang_ext.scripts.quality.lab import (
    Lab,
    Limits,
    Question,
    Row,
    Sample,
    Tokenizer,
    check_strategies,
    encode_chunks,
    from_longbench,
    from_task,
    make_rows,
)
from sglang_ext.scripts.quality.longbench import DATASETS, read_prompts
from sglang_ext.scripts.quality.tables import make_tables, make_verdict_table, plot_all
from sglang_ext.scripts.quality.tasks import TASKS, Prose, held_out_topics, make_prompts
from sglang_ext.scripts.server import (
    CONNECTION_LIMITS,
    REQUEST_TIMEOUT_S,
    Client,
    default_threads,
    load_encoder,
    serve,
)
from sglang_ext.scripts.workload import python_topics

DEFAULT_TASKS = ("multi_value", "passage", "two_hop", "tool_call")
SEED = 19
MAX_POOL_TOKENS = 16000
"""Longest prompt and answer that a server started here has room for, in tokens."""
INTERRUPTED = 130
"""Exit code, as of a shell's job that was interrupted."""
FILE_WIDTH = 130
"""Columns of output that is not a terminal's: the tables need as many."""


@dataclass(slots=True)
class Record:
    """What has been measured so far, and where it goes.

    Attributes:
        path: The JSON file; plots lie beside it.
        samples_file: Takes a line for each sample as soon as there is one.
        meta: About the run.
        samples: All of them.
    """

    path: Path
    samples_file: TextIO
    meta: dict[str, Any]
    samples: list[Sample] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        """A row for each task and arm."""
        return make_rows(self.meta["model"], self.samples)

    def add(self, samples: Iterable[Sample]) -> None:
        """Keep the samples of one prompt."""
        for sample in samples:
            self.samples.append(sample)
            self.samples_file.write(json.dumps(asdict(sample)) + "\n")
        self.samples_file.flush()

    def write(self) -> None:
        """Write the rows of what there is over those written before; nothing if there is none."""
        if not self.samples:
            return
        content = {"rows": [asdict(row) for row in self.rows], "meta": self.meta}
        partial = self.path.with_name(f"{self.path.name}.partial")
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.path)


def make_questions(
    args: argparse.Namespace, tokenizer: Tokenizer, max_tokens: int, out: Console
) -> dict[str, list[Question]]:
    """Every prompt by its task, at most `n` of each; those that are too long are left out.

    Args:
        args: Of `_parse`.
        tokenizer: Of the model.
        max_tokens: Longest prompt with its answer.
        out: Told how many were left out.

    Raises:
        ConfigError: A file or an option is wrong, or there is nothing to ask.
    """
    prose = Prose(held_out_topics(python_topics()), lambda text: len(tokenizer.encode(text)))
    questions: dict[str, list[Question]] = {}
    for task in args.tasks:
        prompts = make_prompts(task, prose, args.n, args.chunks, args.chunk_len, args.seed)
        asked = [from_task(prompt, index) for index, prompt in enumerate(prompts)]
        questions[task] = asked
        if any(not fits(question, tokenizer, max_tokens) for question in asked):
            got = f"--chunks {args.chunks} --chunk-len {args.chunk_len}"
            raise ConfigError(f"{got}: {task} has prompts of more than {max_tokens} tokens")
    for path in args.longbench:
        num_long = 0
        fallback = path.stem if path.stem in DATASETS else None
        for prompt in read_prompts(path, fallback):
            own = questions.setdefault(prompt.task, [])
            if len(own) == args.n:
                continue
            question = from_longbench(prompt, len(own))
            if fits(question, tokenizer, max_tokens):
                own.append(question)
            else:
                num_long += 1
        if num_long:
            out.print(f"{path}: left out {num_long} prompts of more than {max_tokens} tokens")
    questions = {task: own for task, own in questions.items() if own}
    if not questions:
        raise ConfigError("got no prompts, expected --tasks or --longbench with some that fit")
    return questions


def fits(question: Question, tokenizer: Tokenizer, max_tokens: int) -> bool:
    """Whether a prompt and its answer have at most so many tokens."""
    num_tokens = len(encode_chunks(question.chunks, tokenizer.encode).ids)
    return num_tokens + question.max_new_tokens <= max_tokens


def measure_all(
    lab: Lab,
    questions: Mapping[str, Sequence[Question]],
    record: Record,
    minutes: float,
    out: Console,
) -> None:
    """Ask the first prompt of every task, then the second; modifies the record.

    Its file is written after each such round.

    Args:
        lab: Asks.
        questions: By task.
        record: Takes what comes of it.
        minutes: No prompt is begun that would not be done by then, but the first round.
        out: Told of every prompt.

    Raises:
        ServerFailed: A request failed or was not served as its arm says.
    """
    began_s = time.monotonic()
    rounds = list(zip_longest(*questions.values()))
    asked = [[question for question in row if question is not None] for row in rounds]
    lab.warm_up(asked[0][0])
    total, done = sum(map(len, asked)), 0
    for index, row in enumerate(asked):
        for question in row:
            needed_min = (time.monotonic() - began_s) / 60 * (done + 1) / max(done, 1)
            if index and needed_min > minutes:
                out.print(f"--minutes {minutes:g}: stopped after {done} of {total} prompts")
                return
            samples = lab.measure(question)
            record.add(samples)
            done += 1
            spent_min = (time.monotonic() - began_s) / 60
            full = next(sample for sample in samples if sample.strategy == FULL.strategy)
            out.print(
                f"  {done} of {total}: {question.task}, {full.prompt_tokens} tokens, "
                f"full {full.ttft_ms:.0f} ms, score {full.score:.2f}; {spent_min:.1f} min, "
                f"at most {min(spent_min / done * total, max(minutes, spent_min)):.0f}"
            )
        record.write()


def load_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of a model folder.

    Raises:
        ServerFailed: There is no model folder with a tokenizer.
    """
    encode = load_encoder(model)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    return Tokenizer(encode, decode, frozenset(tokenizer.all_special_ids))


@contextmanager
def open_client(args: argparse.Namespace, out: Console) -> Iterator[Client]:
    """A client of the server that `--url` names, or of one that lives as long as the context.

    Raises:
        ServerFailed: It does not start or answer.
    """
    if args.url is None:
        log_path = args.out.with_suffix(".log")
        out.print(f"starting a server, OMP_NUM_THREADS={args.threads}, log in {log_path}")
        with serve(
            args.model, "--enable-pic", threads=args.threads, log_path=log_path, say=out.print
        ) as client:
            yield client
        return
    with httpx.Client(
        base_url=args.url, timeout=REQUEST_TIMEOUT_S, limits=CONNECTION_LIMITS, trust_env=False
    ) as http:
        yield Client(http)


def describe_run(args: argparse.Namespace, arms: Sequence[Arm], client: Client) -> dict[str, Any]:
    """What the rows were measured with; `None` where it cannot be told."""
    info: dict[str, Any] = {}
    if args.url is not None:
        try:
            info = client.http.get("/server_info").raise_for_status().json()
        except (httpx.HTTPError, ValueError) as exc:
            raise ServerFailed(f"{args.url}: {type(exc).__name__}: {exc}") from exc
    return {
        "model": Path(args.model).name,
        "commit": find_commit(),
        "command": shlex.join(["python", "-m", "sglang_ext.scripts.quality.run", *args.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "sglang": info.get("version") or _installed_version("sglang"),
        "machine": args.machine or _machine_of(info.get("device") or "cpu"),
        "threads": args.threads if args.url is None else None,
        "arms": [arm.label for arm in arms],
        "seed": args.seed,
    }


def find_commit() -> str | None:
    """Git's name of the commit that is checked out; None outside a repository."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def run(args: argparse.Namespace, out: Console) -> int:
    """Measure, write and show; returns the exit code.

    Raises:
        ExtError: An option is wrong, or a server failed; what was measured has been written.
    """
    arms = parse_arms(args.arms) if args.arms else DEFAULT_ARMS
    unknown = [task for task in args.tasks if task not in TASKS]
    if unknown:
        raise ConfigError(f"--tasks: got {unknown[0]!r}, expected some of {', '.join(TASKS)}")
    tokenizer = load_tokenizer(args.model)
    config = _read_config(args.model)
    max_tokens = config.get("max_position_embeddings", MAX_POOL_TOKENS)
    if args.url is None:
        max_tokens = min(max_tokens, MAX_POOL_TOKENS)
    questions = make_questions(args, tokenizer, max_tokens, out)
    out.print(f"arms: {' '.join(arm.label for arm in arms)}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    is_interrupted = False
    with open_client(args, out) as client, args.samples.open("w", encoding="utf-8") as samples_file:
        record = Record(args.out, samples_file, describe_run(args, arms, client))
        lab = Lab(
            client,
            tokenizer,
            config["vocab_size"],
            arms,
            num_compared=args.kl_prompts,
            run_id=f"quality-{uuid.uuid4().hex[:12]}",
            has_kl=not args.no_kl,
        )
        try:
            measure_all(lab, questions, record, args.minutes, out)
        except KeyboardInterrupt:
            is_interrupted = True
        finally:
            record.write()
    rows = record.rows
    if not rows:
        out.print("interrupted before anything was measured")
        return INTERRUPTED
    for table in make_tables(rows):
        out.print(table)
    out.print(make_verdict_table(check_strategies(rows, Limits())))
    plots = plot_all(rows, args.out.with_suffix(""))
    out.print(f"written: {' '.join(map(str, (args.out, args.samples, *plots)))}")
    return INTERRUPTED if is_interrupted else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what each strategy keeps of full prefill's answers, and what it costs."""
    args = _parse(argv)
    out = Console(highlight=False, width=None if sys.stdout.isatty() else FILE_WIDTH)
    try:
        return run(args, out)
    except ExtError as exc:
        out.print(f"quality failed: {exc}", markup=False)
        return 1
    except KeyboardInterrupt:
        out.print("interrupted before anything was measured")
        return INTERRUPTED


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="quality", description=main.__doc__)
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--url", help="server with PIC that serves it; without, one is started")
    parser.add_argument(
        "--tasks", nargs="*", default=DEFAULT_TASKS, help=f"some of {', '.join(TASKS)}, or none"
    )
    parser.add_argument(
        "--longbench", nargs="+", type=Path, default=[], metavar="FILE", help="JSONL to ask as well"
    )
    parser.add_argument(
        "--arms",
        nargs="+",
        metavar="ARM",
        help="such as reuse daric:16 epic:16 kvdev:4,2,15%% qci:1,8,15%% prophetkv:20%%",
    )
    parser.add_argument("--n", type=_at_least(1), default=25, help="prompts of each task")
    parser.add_argument("--chunks", type=_at_least(2), default=16, help="of a synthetic prompt")
    parser.add_argument("--chunk-len", type=_at_least(16), default=90, help="tokens, about")
    parser.add_argument("--seed", type=int, default=SEED, help="of the synthetic prompts")
    parser.add_argument(
        "--kl-prompts",
        type=_at_least(0),
        default=10,
        help="prompts of each task for first-token KL and the cold-against-cold control",
    )
    parser.add_argument(
        "--minutes", type=float, default=35.0, help="longest time to ask; tasks take turns"
    )
    parser.add_argument("--no-kl", action="store_true", help="do not ask for probabilities")
    parser.add_argument("--out", type=Path, default=Path("build/quality.json"))
    parser.add_argument(
        "--samples", type=Path, metavar="FILE", help="JSONL, a line for each answer"
    )
    parser.add_argument("--threads", type=_at_least(1), default=default_threads())
    parser.add_argument("--machine", help="what the result says it was measured on")
    args = parser.parse_args(argv)
    args.samples = args.samples or args.out.with_name(f"{args.out.stem}-samples.jsonl")
    args.argv = list(sys.argv[1:] if argv is None else argv)
    return args


def _at_least(least: int) -> Any:
    def read(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"got {number}, expected at least {least}")
        return number

    read.__name__ = "integer"
    return read


def _read_config(model: str) -> dict[str, Any]:
    """Of the part of the model that reads text."""
    path = Path(model) / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path}: cannot be read: {exc}") from exc
    return {**config, **config.get("text_config", {})}


def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _machine_of(device: str) -> str:
    """`cpu`, or the GPU's name where it can be asked, else the kind of device."""
    if device != "cuda":
        return device
    try:
        import torch

        return str(torch.cuda.get_device_name())
    except (ImportError, RuntimeError, AssertionError):
        return device


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as an interrupt does
    sys.exit(main())
