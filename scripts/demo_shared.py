"""The demo of sharing: two real servers, one Redis, one folder; what one computed the other loads.

Knows who is asked what and what is shown. Does not know how servers are started (`server`,
`redis_process`) or what a request looks like (`demo_prompts`).

    server A   every document once, with PIC: computed there, and written to the shared tier
    server B   the same documents in other orders, each prompt with PIC and without
    no Redis   killed in the end: both go on with what they have

B saw none of the documents before, so what it reuses of one the first time comes from the shared
tier, and after that from its own memory. Each server is warm from a prompt of other passages.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang_ext.chunk_index.redis_index import RedisIndex
from sglang_ext.chunk_index.redis_link import RedisConfig, RedisLink
from sglang_ext.errors import ExtError, ServerFailed
from sglang_ext.scripts.demo_prompts import (
    N_AVG,
    OPTIONS,
    PROMPT_PASSAGES,
    SEED,
    draw_passages,
    send_pair,
    send_pic,
)
from sglang_ext.scripts.redis_process import redis_process
from sglang_ext.scripts.server import Client, Result, load_encoder, serve
from sglang_ext.scripts.workload import SYSTEM, Passage, Prompt, make_prompts, spread_sizes

NUM_DOCUMENTS = 20
SEGMENT_TOKENS = 256
REDIS_DEADLINE_MS = 1_000.0
"""Of a look-up, where the default is 5 ms: servers, Redis and client share few cores here."""

WRITTEN_S = 60.0
MIB = 1 << 20
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt.

    Attributes:
        server: `A` or `B`.
        prompt_tokens: Of the prompt; the sum of the next four.
        exact_tokens: Cached and exact (the system text).
        reused_tokens: Of cached documents, used as they were kept.
        recomputed_tokens: Of cached documents, computed again in full context.
        computed_tokens: Not cached.
        host_bytes: KV placed, all of it from the server's own memory by then.
        shared_bytes: KV that came from the shared tier for this request.
        ttft_pic_ms: Until the first token with PIC.
        ttft_plain_ms: Without PIC; None where that was not asked.
    """

    server: str
    prompt_tokens: int
    exact_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    computed_tokens: int
    host_bytes: int
    shared_bytes: int
    ttft_pic_ms: float
    ttft_plain_ms: float | None = None

    @property
    def hit_tokens(self) -> int:
        """Of cached documents."""
        return self.reused_tokens + self.recomputed_tokens

    @property
    def ratio(self) -> float | None:
        """Time to the first token, plain by PIC."""
        return None if self.ttft_plain_ms is None else self.ttft_plain_ms / self.ttft_pic_ms


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the demo saw.

    Attributes:
        rows: Prompts, with Redis there.
        after: Prompts after Redis was killed.
    """

    rows: tuple[Row, ...]
    after: tuple[Row, ...]


class SharedDemo:
    """Runs the demo with one model, printing what it does."""

    def __init__(self, model: str, num_requests: int, folder: Path, out: Console) -> None:
        """Start nothing yet.

        Args:
            model: Model folder.
            num_requests: Prompts to B.
            folder: For the servers' logs.
            out: Takes lines of progress.
        """
        self._model = model
        self._num_requests = num_requests
        self._folder = folder
        self._out = out
        passages = draw_passages(model, NUM_DOCUMENTS + 2 * PROMPT_PASSAGES[0])
        self._documents = passages[:NUM_DOCUMENTS]
        others = passages[NUM_DOCUMENTS:]
        self._warmups = others[: PROMPT_PASSAGES[0]], others[PROMPT_PASSAGES[0] :]

    def run(self) -> Outcome:
        """All of it.

        Raises:
            ExtError: A server or Redis failed, or PIC did not serve a request.
        """
        with tempfile.TemporaryDirectory(prefix="pic-demo-") as folder, redis_process() as redis:
            options = make_options(redis.unix_url, Path(folder))
            self._say(f"each server: {' '.join(options)}, OMP_NUM_THREADS=1")
            with (
                closing(RedisLink(RedisConfig(redis.unix_url, deadline_ms=1e3))) as link,
                self._serve("A", options) as a,
                self._serve("B", options) as b,
            ):
                watch = IndexWatch(RedisIndex(link), self._model)
                for name, client, passages in zip("AB", (a, b), self._warmups, strict=True):
                    self._say(f"warm-up of server {name}")
                    warm_up(client, passages)
                    watch.wait_for(passages)
                rows = self._ask_a(a)
                watch.wait_for(self._documents)
                self._say(f"the shared index has {watch.num_nodes} segments")
                rows += self._ask_b(b)
                redis.kill()
                return Outcome(tuple(rows), self._ask_without_redis(a, b))

    def _serve(self, name: str, options: Sequence[str]) -> AbstractContextManager[Client]:
        self._say(f"starting server {name}")
        log_path = self._folder / f"demo-shared-{name}.log"
        return serve(self._model, *options, threads=1, log_path=log_path, say=self._say)

    def _ask_a(self, client: Client) -> list[Row]:
        """Every document, in the order in which they were drawn."""
        size = PROMPT_PASSAGES[0]
        rows: list[Row] = []
        for start in range(0, NUM_DOCUMENTS, size):
            (prompt,) = make_prompts(self._documents[start : start + size], [size], SEED)
            rows.append(make_row("A", send_pic(client, prompt)))
            self._say(f"  {describe_row(rows[-1])}")
        return rows

    def _ask_b(self, client: Client) -> list[Row]:
        """The same documents in changing subsets and orders."""
        rows: list[Row] = []
        for index, prompt in enumerate(self._prompts(self._num_requests, SEED + 1)):
            plain, pic = send_pair(client, prompt, pic_first=index % 2 == 1)
            rows.append(make_row("B", pic, plain.ttft_ms))
            self._say(f"  {describe_row(rows[-1])}")
        return rows

    def _ask_without_redis(self, a: Client, b: Client) -> tuple[Row, ...]:
        """One more prompt to each."""
        prompts = self._prompts(2, SEED + 2)
        answers = [send_pic(client, prompt) for client, prompt in zip((a, b), prompts, strict=True)]
        return tuple(make_row(name, answer) for name, answer in zip("AB", answers, strict=True))

    def _prompts(self, num_prompts: int, seed: int) -> list[Prompt]:
        return make_prompts(
            self._documents, spread_sizes(num_prompts, *PROMPT_PASSAGES, seed=seed), seed
        )

    def _say(self, line: str) -> None:
        self._out.print(line, markup=False, soft_wrap=True)


class IndexWatch:
    """Sees, in the shared index, when what a server wrote is there."""

    def __init__(self, index: RedisIndex, model: str) -> None:
        """Ask nothing yet.

        Args:
            index: The index that the servers share.
            model: Model folder, for its tokenizer.
        """
        self._index = index
        self._encode = load_encoder(model)
        self._expected: dict[str, int] = {}

    @property
    def num_nodes(self) -> int:
        """Segments that can be found now; raises `IndexUnavailable`."""
        return self._index.stats().num_nodes

    def wait_for(self, passages: Iterable[Passage]) -> None:
        """Wait until these, the system text, and all that was waited for before, are there.

        Raises:
            ServerFailed: They do not come.
        """
        for text in (SYSTEM, *(passage.text for passage in passages)):
            self._expected[text] = -(-len(self._encode(text)) // SEGMENT_TOKENS)
        expected = sum(self._expected.values())
        deadline = time.monotonic() + WRITTEN_S
        while self.num_nodes < expected:
            if time.monotonic() > deadline:
                raise ServerFailed(f"{self.num_nodes} segments are shared, expected {expected}")
            time.sleep(_POLL_S)


def make_options(url: str, folder: Path) -> list[str]:
    """Options of every server; makes a secret and a folder for payloads.

    Args:
        url: Of the Redis.
        folder: An empty one.
    """
    secret, payloads = folder / "secret", folder / "kv"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32), encoding="ascii")
    payloads.mkdir(mode=0o700)
    options = ["--pic-index", url, "--pic-secret-file", str(secret)]
    options += ["--pic-shared-path", str(payloads)]
    return [*OPTIONS, *options, "--pic-index-deadline-ms", f"{REDIS_DEADLINE_MS:g}"]


def warm_up(client: Client, passages: Sequence[Passage]) -> None:
    """One prompt with and without PIC; raises `ServerFailed`."""
    (prompt,) = make_prompts(passages, [len(passages)], SEED)
    _, pic = send_pair(client, prompt, pic_first=False)
    pic.require_pic()


def make_row(server: str, pic: Result, ttft_plain_ms: float | None = None) -> Row:
    """The row of an answer.

    Raises:
        ServerFailed: PIC did not serve it.
    """
    report = pic.require_pic()
    return Row(
        server=server,
        prompt_tokens=report["prompt_tokens"],
        exact_tokens=report["exact_tokens"],
        reused_tokens=report["reused_tokens"],
        recomputed_tokens=report["recomputed_tokens"],
        computed_tokens=report["computed_tokens"],
        host_bytes=report["bytes_loaded"]["host"],
        shared_bytes=report["bytes_loaded"]["shared"],
        ttft_pic_ms=pic.ttft_ms,
        ttft_plain_ms=ttft_plain_ms,
    )


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Sums by server, and how much sooner B answered, first of all with what it never saw.

    Args:
        rows: Of both servers; B's have a plain partner.

    Raises:
        ServerFailed: B reused nothing, or nothing came to it from the shared tier.
    """
    by_server = {name: [row for row in rows if row.server == name] for name in "AB"}
    ratios = [(row.ratio, row.shared_bytes > 0) for row in by_server["B"] if row.hit_tokens]
    first = [ratio for ratio, is_first in ratios if is_first and ratio is not None]
    if not first:
        raise ServerFailed("B reused nothing of what A shared")
    return {
        **{name.lower(): _sums(theirs) for name, theirs in by_server.items()},
        "median_ratio_first": statistics.median(first),
        "median_ratio": statistics.median(ratio for ratio, _ in ratios if ratio is not None),
    }


def describe_row(row: Row) -> str:
    """A row as a line."""
    plain = "" if row.ttft_plain_ms is None else f", plain {row.ttft_plain_ms:.0f} ms"
    shared = f", {row.shared_bytes / MIB:.0f} MiB shared" if row.shared_bytes else ""
    return (
        f"{row.server}: {row.prompt_tokens} tokens, {row.hit_tokens} cached, "
        f"PIC {row.ttft_pic_ms:.0f} ms{plain}{shared}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Let one server use what another computed; print a table, write a JSON file."""
    parser = argparse.ArgumentParser(prog="demo_shared", description=main.__doc__)
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--out", type=Path, default=Path("build/demo-shared.json"))
    parser.add_argument("--requests", type=int, default=8, help="prompts to B, each sent twice")
    args = parser.parse_args(argv)
    path: Path = args.out
    out = Console(highlight=False)
    try:
        outcome = SharedDemo(args.model, args.requests, path.parent, out).run()
        summary = summarize(outcome.rows)
    except ExtError as exc:
        logs = path.parent / "demo-shared-*.log"
        out.print(f"demo failed: {exc}", f"server logs: {logs}", sep="\n", markup=False)
        return 1
    content = {
        "summary": summary,
        "rows": [asdict(row) for row in outcome.rows],
        "after_redis_was_killed": [asdict(row) for row in outcome.after],
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    out.print(make_table(outcome.rows))
    out.print(make_summary_line(summary, path), make_after_line(outcome.after), sep="\n")
    return 0


def make_table(rows: Iterable[Row]) -> Table:
    """All rows with Redis there."""
    table = Table(
        title=f"what A computed, B reuses (DARIC, n_avg {N_AVG})",
        caption="computed: cached tokens computed again, and those not cached",
    )
    table.add_column("server")
    sizes = ("tokens", "reused", "computed", "host\nMiB", "shared\nMiB")
    for title in (*sizes, "plain\nms", "PIC\nms", "ratio"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.server,
            str(row.prompt_tokens),
            str(row.reused_tokens),
            str(row.recomputed_tokens + row.computed_tokens),
            f"{row.host_bytes / MIB:.0f}",
            f"{row.shared_bytes / MIB:.0f}",
            "" if row.ttft_plain_ms is None else f"{row.ttft_plain_ms:.0f}",
            f"{row.ttft_pic_ms:.0f}",
            "" if row.ratio is None else f"{row.ratio:.1f}",
        )
    return table


def make_summary_line(summary: Mapping[str, Any], path: Path) -> str:
    """What the table comes to."""
    a, b = summary["a"], summary["b"]
    return (
        f"A: {a['requests']} requests, {a['hit_tokens']} tokens cached; "
        f"B: {b['requests']} requests, {b['hit_tokens']} tokens cached, "
        f"{b['shared_bytes'] / MIB:.0f} MiB from the shared tier; TTFT plain by PIC on B: "
        f"{summary['median_ratio_first']:.1f} where documents came that it never saw, "
        f"{summary['median_ratio']:.1f} over all ({path})"
    )


def make_after_line(rows: Sequence[Row]) -> str:
    """How requests went on without Redis."""
    parts = [
        f"{row.server} answers in {row.ttft_pic_ms:.0f} ms with {row.hit_tokens} tokens cached"
        for row in rows
    ]
    return f"Redis killed: {', '.join(parts)}"


def _sums(rows: Sequence[Row]) -> dict[str, int]:
    return {
        "requests": len(rows),
        "hit_tokens": sum(row.hit_tokens for row in rows),
        "computed_tokens": sum(row.computed_tokens for row in rows),
        "host_bytes": sum(row.host_bytes for row in rows),
        "shared_bytes": sum(row.shared_bytes for row in rows),
    }


if __name__ == "__main__":
    sys.exit(main())
