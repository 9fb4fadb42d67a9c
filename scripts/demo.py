"""The demo: one real server, every prompt with PIC and without, one table.

Knows what is asked and what is shown. Does not know how a server is started (`server`), what a
request looks like (`demo_prompts`) or where the prompts come from (`workload`).

Both sides are requests to the same server, one at a time, in changing order. PIC starts with
nothing cached: rows with new passages compute and keep them, and count in the summary like all
others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang_ext.errors import ExtError, ServerFailed
from sglang_ext.scripts.demo_prompts import (
    N_AVG,
    OPTIONS,
    PROMPT_PASSAGES,
    SEED,
    draw_passages,
    send_pair,
)
from sglang_ext.scripts.server import Result, default_threads, serve
from sglang_ext.scripts.workload import Passage, make_prompts, spread_sizes

NUM_PASSAGES = 20


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt, sent twice.

    Attributes:
        prompt_tokens: Of the prompt; the sum of the four counts below.
        chunks: Of the prompt, system text and question included.
        new_passages: Passages no PIC request had before, so not cached yet.
        exact_tokens: Cached and exact (the system text).
        reused_tokens: Of cached passages, used as they were kept.
        recomputed_tokens: Of cached passages, computed again in full context.
        computed_tokens: Not cached: new passages and the question.
        ttft_plain_ms: Until the first token without PIC.
        ttft_pic_ms: Until the first token with PIC.
        ratio: Plain by PIC.
        first_token_same: Both answers start with the same token.
    """

    prompt_tokens: int
    chunks: int
    new_passages: int
    exact_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    computed_tokens: int
    ttft_plain_ms: float
    ttft_pic_ms: float
    ratio: float
    first_token_same: bool


def run_demo(
    model: str, num_requests: int, threads: int, log_path: Path, out: Console
) -> list[Row]:
    """Serve the model and send every prompt twice; progress goes to `out`.

    Raises:
        ExtError: The server failed, PIC did not serve a request, or it reused nothing.
    """
    passages = draw_passages(model, NUM_PASSAGES + PROMPT_PASSAGES[0])
    sizes = spread_sizes(num_requests, *PROMPT_PASSAGES, seed=SEED)
    prompts = make_prompts(passages[:NUM_PASSAGES], sizes, seed=SEED)
    (warmup,) = make_prompts(passages[NUM_PASSAGES:], [PROMPT_PASSAGES[0]], seed=SEED)
    out.print(f"starting SGLang with {' '.join(OPTIONS)}, OMP_NUM_THREADS={threads}")
    with serve(model, *OPTIONS, threads=threads, log_path=log_path, say=out.print) as client:
        out.print("the server is ready; one warm-up prompt with and without PIC")
        send_pair(client, warmup, pic_first=False)
        rows: list[Row] = []
        known: set[Passage] = set()
        for index, prompt in enumerate(prompts):
            plain, pic = send_pair(client, prompt, pic_first=index % 2 == 1)
            rows.append(_make_row(plain, pic, num_new=len(set(prompt.passages) - known)))
            known.update(prompt.passages)
            out.print(f"  request {index + 1:2d} of {num_requests}: {_describe(rows[-1])}")
    if not any(row.reused_tokens for row in rows):
        raise ServerFailed("PIC is active but reused nothing")
    return rows


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Sums, medians and the share of equal first tokens over all rows."""
    return {
        "requests": len(rows),
        "reused_tokens": sum(row.reused_tokens for row in rows),
        "recomputed_tokens": sum(row.recomputed_tokens for row in rows),
        "computed_tokens": sum(row.computed_tokens for row in rows),
        "median_ttft_plain_ms": statistics.median(row.ttft_plain_ms for row in rows),
        "median_ttft_pic_ms": statistics.median(row.ttft_pic_ms for row in rows),
        "median_ratio": statistics.median(row.ratio for row in rows),
        "first_token_agreement": statistics.fmean(row.first_token_same for row in rows),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Serve a model with PIC, compare it with plain prefill, print a table, write a JSON file."""
    parser = argparse.ArgumentParser(prog="demo", description=main.__doc__)
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--out", type=Path, default=Path("build/demo.json"))
    parser.add_argument("--requests", type=int, default=24, help="prompts, each sent twice")
    parser.add_argument("--threads", type=int, default=default_threads(), help="server threads")
    args = parser.parse_args(argv)
    out = Console(highlight=False)
    log_path: Path = args.out.with_suffix(".log")
    try:
        rows = run_demo(args.model, args.requests, args.threads, log_path, out)
    except ExtError as exc:
        out.print(f"demo failed: {exc}", f"server log: {log_path}", sep="\n", markup=False)
        return 1
    summary = summarize(rows)
    content = {"summary": summary, "rows": [asdict(row) for row in rows]}
    args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    out.print(_make_table(rows), _make_summary_line(summary, args.out))
    return 0


def _make_row(plain: Result, pic: Result, num_new: int) -> Row:
    report = pic.require_pic()
    return Row(
        prompt_tokens=report["prompt_tokens"],
        chunks=report["chunks"],
        new_passages=num_new,
        exact_tokens=report["exact_tokens"],
        reused_tokens=report["reused_tokens"],
        recomputed_tokens=report["recomputed_tokens"],
        computed_tokens=report["computed_tokens"],
        ttft_plain_ms=plain.ttft_ms,
        ttft_pic_ms=pic.ttft_ms,
        ratio=plain.ttft_ms / pic.ttft_ms,
        first_token_same=plain.output_ids[0] == pic.output_ids[0],
    )


def _describe(row: Row) -> str:
    new = f", new passages: {row.new_passages}" if row.new_passages else ""
    times = f"plain {row.ttft_plain_ms:.0f} ms, PIC {row.ttft_pic_ms:.0f} ms"
    return f"{row.prompt_tokens} tokens, {times}{new}"


def _make_table(rows: Sequence[Row]) -> Table:
    table = Table(
        title=f"the same server with and without PIC (DARIC, n_avg {N_AVG})",
        caption="* has new passages: computed alone and kept for later prompts",
    )
    for title in ("prompt tokens", "reused", "recomputed", "TTFT plain", "TTFT PIC", "ratio"):
        table.add_column(title, justify="right")
    table.add_column("first token")
    for row in rows:
        table.add_row(
            f"{row.prompt_tokens}{'*' if row.new_passages else ' '}",
            str(row.reused_tokens),
            str(row.recomputed_tokens),
            f"{row.ttft_plain_ms:.0f} ms",
            f"{row.ttft_pic_ms:.0f} ms",
            f"{row.ratio:.1f}",
            "same" if row.first_token_same else "other",
        )
    return table


def _make_summary_line(summary: dict[str, Any], path: Path) -> str:
    return (
        f"{summary['requests']} requests, medians: TTFT {summary['median_ttft_plain_ms']:.0f} ms "
        f"plain, {summary['median_ttft_pic_ms']:.0f} ms PIC, ratio {summary['median_ratio']:.1f}; "
        f"tokens: {summary['reused_tokens']} reused, {summary['recomputed_tokens']} recomputed, "
        f"{summary['computed_tokens']} computed; first token the same in "
        f"{summary['first_token_agreement']:.0%} ({path})"
    )


if __name__ == "__main__":
    sys.exit(main())
