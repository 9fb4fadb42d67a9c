"""`picctl top`: the hottest entries and hit rates, again and again.

Knows what changed between two looks. Each look reads every entry. Changes nothing.
"""

from __future__ import annotations

import argparse
import heapq
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.text import Text

from sglang_ext.chunk_index.identity import ChunkKey
from sglang_ext.chunk_index.index import NodeView
from sglang_ext.errors import ConfigError
from sglang_ext.scripts.picctl_options import Context, Options
from sglang_ext.scripts.picctl_output import add_row, count_of, format_bytes, make_table
from sglang_ext.scripts.picctl_places import Place, namespaces_of, open_place
from sglang_ext.scripts.picctl_server import Sample, server_samples, total_of
from sglang_ext.scripts.picctl_view import (
    SHOWN_DIGITS,
    SORTS,
    Matching,
    check_limit,
    node_document,
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A moment of `top`.

    Attributes:
        taken_s: When it was taken, on a clock that only goes forward.
        num_hits: Hits of each entry since it was published.
        hottest: The entries with the most hits, hottest first.
        totals: Of the index.
        samples: Of a server's metrics, if one was named.
    """

    taken_s: float
    num_hits: Mapping[ChunkKey, int]
    hottest: tuple[NodeView, ...]
    totals: Mapping[str, Any]
    samples: tuple[Sample, ...]


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("top", parents=[common], help="watch the hottest entries")
    parser.add_argument("--once", action="store_true", help="print one snapshot and end")
    parser.add_argument("--interval", type=float, default=5.0, metavar="S", help="seconds, 5")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="most entries, 20")
    parser.set_defaults(run=watch)


def watch(args: argparse.Namespace, context: Context) -> int:
    """Show the hottest entries and hit rates, again and again, until interrupted."""
    limit = check_limit(args.limit)
    if not args.interval > 0:
        raise ConfigError(f"--interval: got {args.interval}, expected seconds above 0")
    names = namespaces_of(context.options)
    with open_place(context.options) as place:
        now = _take_snapshot(place, context.options, limit)
        document = _snapshot_document(now, None, names)
        if args.once or context.out.is_json:
            context.out.result(document, lambda console: console.print(_make_top(document, names)))
            return 0
        with Live(_make_top(document, names), console=context.out.console, screen=False) as live:
            while True:
                time.sleep(args.interval)
                before, now = now, _take_snapshot(place, context.options, limit)
                live.update(_make_top(_snapshot_document(now, before, names), names))


def _take_snapshot(place: Place, options: Options, limit: int) -> Snapshot:
    owner = None if options.namespace is None else options.owner()
    num_hits: dict[ChunkKey, int] = {}
    found = Matching(place.index.scan(), owner)

    def counted() -> Iterator[NodeView]:
        for view in found:
            if view.record.key not in num_hits:
                num_hits[view.record.key] = view.num_hits
                yield view

    hottest = heapq.nlargest(limit, counted(), key=SORTS["hits"])
    samples = server_samples(options) or ()
    totals = asdict(place.index.stats())
    return Snapshot(time.monotonic(), num_hits, tuple(hottest), totals, samples)


def _snapshot_document(
    now: Snapshot, before: Snapshot | None, names: Mapping[str, str]
) -> dict[str, Any]:
    """A snapshot, with rates since the one before if there is one."""
    elapsed_s = None if before is None else now.taken_s - before.taken_s
    old = {} if before is None else before.num_hits
    num_new = sum(max(0, hits - old.get(key, hits)) for key, hits in now.num_hits.items())
    return {
        **now.totals,
        "interval_s": elapsed_s,
        "hits_per_s": None if not elapsed_s else num_new / elapsed_s,
        "hit_rates": _hit_rates(now.samples, () if before is None else before.samples),
        "hottest": [
            {
                **node_document(view, names),
                "new_hits": max(0, view.num_hits - old.get(view.record.key, view.num_hits)),
            }
            for view in now.hottest
        ],
    }


def _hit_rates(now: Sequence[Sample], before: Sequence[Sample]) -> dict[str, float]:
    """For each tier the share of segments found, since the samples before."""
    name = "sglang_pic_segments_total"
    tiers = {sample.labels.get("tier", "") for sample in now if sample.name == name}
    rates = {}
    for tier in sorted(tiers):
        hits, misses = (
            total_of(now, name, tier=tier, result=result)
            - total_of(before, name, tier=tier, result=result)
            for result in ("hit", "miss")
        )
        if hits + misses > 0:
            rates[tier] = hits / (hits + misses)
    return rates


def _make_top(document: Mapping[str, Any], names: Mapping[str, str]) -> Group:
    rate = document["hits_per_s"]
    rates = [f"{tier} {share:.0%}" for tier, share in document["hit_rates"].items()]
    line = (
        f"{count_of(document['num_nodes'], 'entry', 'entries')}, "
        f"{format_bytes(document['num_bytes'])}; "
        f"hits {'-' if rate is None else f'{rate:.1f}'} a second; "
        f"hit rate {', '.join(rates) or 'not known without --server'}"
    )
    table = make_table("key", "namespace", "hits", "new", "tokens", "size", "documents", left=2)
    table.columns[-1].justify = "left"
    for node in document["hottest"]:
        add_row(
            table,
            node["key"][:SHOWN_DIGITS],
            node["namespace"] or node["owner"] or "-",
            node["hits"],
            node["new_hits"],
            node["tokens"],
            format_bytes(node["bytes"]),
            ", ".join(node["doc_ids"]) or "-",
        )
    return Group(Text(line), table)
