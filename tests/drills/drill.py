"""What every drill needs: real prompts, a server seen from outside, a load, and the judgement.

    with Run("redis killed", served, cases) as run:   # the load begins
        run.warm()                                    # every prompt once, nothing is broken yet
        with run.fault():
            redis.kill()
            run.more(12)                              # answers while it is broken
            redis.start()
        run.recover()                                 # until something is shared again
    row = run.row

A prompt's answer is its first token's log-probabilities over the whole vocabulary. It is right if
it differs by at most `MAX_KL` from the one that a server without lower tiers gave, with nothing
cached and the same strategy. Every fourth request asks in a namespace of its own, so that it finds
nothing and stores: the same prompt must get the same answer there.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Thread
from types import TracebackType
from typing import Any, NamedTuple

import httpx
import numpy as np
import numpy.typing as npt
import psutil

from sglang_ext.scripts.server import Client, serve

VOCAB_SIZE = 49152
DELIMITER = "<|chunk|>"
OPTIONS = (
    *("--enable-pic", "--pic-delimiter", DELIMITER, "--pic-strategy", "daric", "--pic-n-avg", "16"),
    *("--enable-metrics", "--max-total-tokens", "8192", "--max-running-requests", "4"),
)
"""Of every server of the drills; few tokens are computed again, so that wrong KV would show."""

MAX_KL = 0.02
MAX_WAIT_MS = 2000.0
"""Most that a fault may make a request wait; noise may add twice the slowest calm request."""

NUM_THREADS = 3
FRESH_EVERY = 4
NUM_AFTER = 6
REQUEST_TIMEOUT_S = 60.0
PATIENCE_S = 60.0

STORES = "sglang_pic_stores_total"
UNAVAILABLE = "sglang_pic_tier_unavailable_total"
FAILURES = "sglang_pic_load_failures_total"
COMPLAINTS = re.compile(
    r"internal_error|memory leak|assertion|pic error in (?!upkeep)|scheduler hit an exception",
    re.IGNORECASE,
)

LogProbs = npt.NDArray[np.float64]


class Case(NamedTuple):
    """A prompt and what is right.

    Attributes:
        text: The chunks with delimiters between them.
        expected: `[VOCAB_SIZE]`, of the first token.
    """

    text: str
    expected: LogProbs


class Answer(NamedTuple):
    """What a request got.

    Attributes:
        logprobs: `[VOCAB_SIZE]`, of the first token.
        report: `meta_info["pic"]`.
        elapsed_ms: From sending the request to the end of the answer.
    """

    logprobs: LogProbs
    report: Mapping[str, Any]
    elapsed_ms: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request of a load.

    Attributes:
        case: Index of its prompt.
        began_s: When it was sent, by `time.monotonic`.
        elapsed_ms: Until its answer was there, or it was given up.
        kl: How far the answer is from the right one; None if there is none.
        load_ms: How long it says it waited for lower tiers.
        shared_bytes: What it says it brought from the shared tier.
        num_declined: Cached segments it says were faster computed than loaded.
        num_late: Payloads it says did not come in time.
        error: Why there is no answer.
    """

    case: int
    began_s: float
    elapsed_ms: float
    kl: float | None = None
    load_ms: float = 0.0
    shared_bytes: int = 0
    num_declined: int = 0
    num_late: int = 0
    error: str = ""

    @property
    def is_lost(self) -> bool:
        """Whether it was not answered, or not with PIC."""
        return self.kl is None

    @property
    def is_wrong(self) -> bool:
        """Whether the answer is not the right one."""
        return self.kl is not None and not self.kl <= MAX_KL


@dataclass(frozen=True, slots=True)
class Row:
    """What is told of a drill.

    Attributes:
        drill: What was done.
        requests: Sent, from before the fault until after it.
        wrong: Answers that differ from the right ones.
        lost: Requests without an answer.
        max_wait_ms: Longest that a request waited: what it reports as waiting for lower tiers, or,
            if that is more, the time it took beyond the slowest request of the same prompt under
            the same load without a fault.
        recovered_s: From the end of the fault until something was stored in the tier again; None if
            that was not looked for, or did not happen.
    """

    drill: str
    requests: int
    wrong: int
    lost: int
    max_wait_ms: float
    recovered_s: float | None


def kl_divergence(expected: LogProbs, got: LogProbs) -> float:
    """KL(expected || got) in nats between two vectors of log-probabilities."""
    is_possible = np.isfinite(expected)
    p, q = expected[is_possible], got[is_possible]
    return float((np.exp(p) * (p - q)).sum())


def judge(
    name: str,
    outcomes: Sequence[Outcome],
    calm_ms: Mapping[int, float],
    recovered_s: float | None = None,
) -> Row:
    """The row of a drill.

    Args:
        name: The drill.
        outcomes: Of all its requests.
        calm_ms: For each prompt the longest it took while nothing was broken.
        recovered_s: As `Row` has it.
    """
    waits = [max(o.load_ms, o.elapsed_ms - calm_ms.get(o.case, math.inf)) for o in outcomes]
    return Row(
        drill=name,
        requests=len(outcomes),
        wrong=sum(outcome.is_wrong for outcome in outcomes),
        lost=sum(outcome.is_lost for outcome in outcomes),
        max_wait_ms=round(max([0.0, *waits]), 1),
        recovered_s=None if recovered_s is None else round(recovered_s, 2),
    )


class Served:
    """A running server as its clients and its operator see it."""

    def __init__(self, client: Client, log_path: Path) -> None:
        self.client = client
        self.log_path = log_path
        self.calm_ms: dict[int, float] = {}
        self._scheduler = self._find_scheduler()

    def ask(self, text: str, **params: Any) -> Answer:
        """One request; `params` are its `custom_params`.

        One at a time or many; none waits for longer than `REQUEST_TIMEOUT_S`.

        Raises:
            httpx.HTTPError: It was not answered.
            LookupError, ValueError: The answer is not one.
        """
        sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        body = {
            "text": text,
            "sampling_params": {**sampling, "custom_params": params},
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": VOCAB_SIZE,
        }
        started = time.perf_counter()
        response = self.client.http.post("/generate", json=body, timeout=REQUEST_TIMEOUT_S)
        elapsed_ms = (time.perf_counter() - started) * 1e3
        meta_info = response.raise_for_status().json()["meta_info"]
        logprobs = np.full(VOCAB_SIZE, -np.inf)
        for logprob, token_id, _ in meta_info["output_top_logprobs"][0]:
            logprobs[token_id] = logprob
        return Answer(logprobs, meta_info["pic"], elapsed_ms)

    def attempt(self, number: int, case: Case, **params: Any) -> Outcome:
        """One request of a drill, whatever comes of it; `number` is the prompt's."""
        began_s = time.monotonic()
        try:
            answer = self.ask(case.text, **params)
        except (httpx.HTTPError, LookupError, ValueError) as exc:
            elapsed_ms = (time.monotonic() - began_s) * 1e3
            return Outcome(number, began_s, elapsed_ms, error=f"{type(exc).__name__}: {exc}")
        report = answer.report
        if report["fallback"] is not None:
            return Outcome(number, began_s, answer.elapsed_ms, error=report["fallback"])
        return Outcome(
            number,
            began_s,
            answer.elapsed_ms,
            kl=kl_divergence(case.expected, answer.logprobs),
            load_ms=report["ms"].get("load", 0.0),
            shared_bytes=report["bytes_loaded"].get("shared", 0),
            num_declined=report["declined_segments"],
            num_late=report["late_segments"],
        )

    def metrics(self) -> str:
        """Everything the server counts."""
        return self.client.http.get("/metrics").raise_for_status().text

    def is_unharmed(self) -> bool:
        """Whether it is the same process as ever, serves with PIC, and logged nothing bad."""
        is_same = self._scheduler.is_running() and self._find_scheduler() == self._scheduler
        is_active = metric_in(self.metrics(), "sglang_pic_active") == 1
        return is_same and is_active and not self.complaints()

    def complaints(self) -> list[str]:
        """Lines of the log that no fault outside may cause."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return [line for line in lines if COMPLAINTS.search(line)]

    def _find_scheduler(self) -> psutil.Process:
        """The scheduler's process; equal only to one of the same id and start."""
        port = str(self.client.http.base_url.port)
        for launcher in psutil.Process().children():
            if port in launcher.cmdline():
                return next(p for p in launcher.children() if "scheduler" in p.name())
        raise AssertionError("the server was started by this process")


def metric_in(text: str, name: str, **labels: str) -> float:
    """Sum of a metric's samples that have these labels."""
    total = 0.0
    for line in text.splitlines():
        key, _, value = line.rpartition(" ")
        has_labels = all(f'{label}="{text}"' in key for label, text in labels.items())
        if key.partition("{")[0] == name and has_labels:
            total += float(value)
    return total


class Run:
    """One drill: a load, a fault in its middle, and what came of it; see the module's docstring."""

    def __init__(
        self, name: str, served: Served, cases: Sequence[Case], tier: str = "shared"
    ) -> None:
        """Nothing runs yet.

        Args:
            name: Of the drill, and of the namespace it asks in.
            served: Whom to ask.
            cases: What to ask.
            tier: Where something must be stored for the server to have recovered.
        """
        self.name = name
        self.served = served
        self.outcomes: list[Outcome] = []
        self._cases = cases
        self._tier = tier
        self._changed = Condition()
        self._numbers = itertools.count()
        self._is_over = False
        self._broken_s = math.nan
        self._ended_s = math.nan
        self._recovered_s: float | None = None
        self._threads = [Thread(target=self._send, daemon=True) for _ in range(NUM_THREADS)]
        self._before = served.metrics()

    def __enter__(self) -> Run:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join(2 * REQUEST_TIMEOUT_S)

    def warm(self) -> None:
        """Wait until every prompt was served once."""
        self._wait_for(lambda: len(self.outcomes) >= len(self._cases))

    def more(self, num_requests: int) -> None:
        """Wait until so many requests are done that begin from now on."""
        now_s = time.monotonic()
        self._wait_for(lambda: sum(o.began_s >= now_s for o in self.outcomes) >= num_requests)

    def last(self, duration_s: float) -> None:
        """Let requests go on for so long, and until one is done that began after that."""
        ends_s = time.monotonic() + duration_s
        self._wait_for(lambda: any(o.began_s >= ends_s for o in self.outcomes))

    def until(self, is_so: Callable[[], object], what: str) -> None:
        """Let requests go on until something is so, and fail with `what` if it never is."""
        ends_s = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < ends_s, f"{what}; {self.row}; {self.errors}"
            num_done = len(self.outcomes)
            self._wait_for(lambda num_done=num_done: len(self.outcomes) > num_done)

    @contextmanager
    def fault(self) -> Iterator[None]:
        """What happens inside is the fault, whose end is what recovery counts from."""
        self._broken_s = time.monotonic()
        yield
        self._ended_s = time.monotonic()
        self._ended = self.served.metrics()

    def recover(self) -> None:
        """Wait until something is stored in the tier again, and for a few requests after that."""
        stored = {"tier": self._tier, "result": "stored"}
        before = metric_in(self._ended, STORES, **stored)
        self.until(
            lambda: metric_in(self.served.metrics(), STORES, **stored) > before,
            f"nothing was stored again in {self._tier}",
        )
        self.note_recovery()
        self.more(NUM_AFTER)

    def note_recovery(self) -> None:
        """Say that all is well again as of now."""
        self._recovered_s = time.monotonic() - self._ended_s

    def has_recovered_within(self, limit_s: float) -> bool:
        """Whether recovery was seen, and no later than that after the fault."""
        return self._recovered_s is not None and self._recovered_s <= limit_s

    def is_within_fault(self, outcome: Outcome) -> bool:
        """Whether a request began and ended during the fault."""
        ended_s = outcome.began_s + outcome.elapsed_ms / 1e3
        return self._broken_s <= outcome.began_s and ended_s <= self._ended_s

    def rise(self, name: str, **labels: str) -> float:
        """How much a metric has grown since the drill began."""
        after = metric_in(self.served.metrics(), name, **labels)
        return after - metric_in(self._before, name, **labels)

    @property
    def row(self) -> Row:
        """What came of it so far."""
        return judge(self.name, self.outcomes, self.served.calm_ms, self._recovered_s)

    def is_prompt(self) -> bool:
        """Whether no request waited for longer than noise explains.

        Noise is what requests took before the fault, or after it where it was there at first.
        """
        calm_ms = [*self.served.calm_ms.values()]
        if not calm_ms and self._recovered_s is not None:
            well_s = self._ended_s + self._recovered_s
            calm_ms = [o.elapsed_ms for o in self.outcomes if o.began_s >= well_s]
        return self.row.max_wait_ms <= MAX_WAIT_MS + 2 * max(calm_ms, default=0.0)

    @property
    def errors(self) -> list[str]:
        """Why requests were lost, each reason once."""
        return sorted({outcome.error for outcome in self.outcomes if outcome.error})

    def _send(self) -> None:
        """A thread of the load."""
        while not self._is_over:
            number = next(self._numbers)
            case = number % len(self._cases)
            is_fresh = number >= len(self._cases) and number % FRESH_EVERY == 0
            namespace = f"{self.name} {number}" if is_fresh else self.name
            outcome = self.served.attempt(case, self._cases[case], pic_namespace=namespace)
            with self._changed:
                self.outcomes.append(outcome)
                if math.isnan(self._broken_s):
                    calm_ms = self.served.calm_ms
                    calm_ms[case] = max(calm_ms.get(case, 0.0), outcome.elapsed_ms)
                self._changed.notify_all()

    def _wait_for(self, is_done: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(is_done, PATIENCE_S), f"no progress: {self.errors}"


@contextmanager
def open_server(model_path: str, log_path: Path, *options: str) -> Iterator[Served]:
    """A server with the options of all drills and further ones."""
    with serve(
        model_path,
        *OPTIONS,
        *("--log-level", "info", "--log-level-http", "warning"),
        *options,
        threads=1,  # two fight for the cores with this process and the server's own
        log_path=log_path,
        say=print,
    ) as client:
        yield Served(client, log_path)


StartRun = Callable[..., AbstractContextManager[Run]]
"""Begins a drill and adds its row at the end; takes what `Run` takes, but the prompts."""
