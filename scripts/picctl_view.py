"""`picctl ls`, `show` and `stats`: what is cached, by whom, and how it is used.

Knows which facts are shown and in which order. Changes nothing.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sglang_ext.chunk_index.identity import ChunkKey
from sglang_ext.chunk_index.index import NodeView
from sglang_ext.errors import ConfigError
from sglang_ext.scripts.picctl_options import Context
from sglang_ext.scripts.picctl_output import (
    add_row,
    count_of,
    format_bytes,
    format_seconds,
    make_table,
    print_facts,
)
from sglang_ext.scripts.picctl_places import Place, namespaces_of, open_place, resolve_keys
from sglang_ext.scripts.picctl_server import budget_of, server_samples

UNKNOWN_BUDGET = "not known without --server and its metrics"
ALWAYS_SHOWN = ("sglang_pic_active", "sglang_pic_tier_ready", "sglang_pic_index_held")
SHOWN_DIGITS = 12
SHOWN_CHILDREN = 100

SortKey = Callable[[NodeView], Any]
SORTS: Mapping[str, SortKey] = {
    "last-hit": lambda view: view.last_hit_ms or 0,
    "hits": lambda view: view.num_hits,
    "created": lambda view: view.record.created_ms,
    "age": lambda view: -view.record.created_ms,
    "tokens": lambda view: view.record.num_tokens,
    "bytes": lambda view: view.record.payload_bytes,
    "expires": lambda view: -(view.record.expires_ms or 1 << 62),
}
"""What comes first: the largest value."""


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the three commands to the parser."""
    listing = commands.add_parser("ls", parents=[common], help="list cached segments")
    listing.add_argument("--limit", type=int, default=50, metavar="N", help="most entries, 50")
    listing.add_argument("--sort", choices=SORTS, default="last-hit", help="what comes first")
    listing.set_defaults(run=list_nodes)
    showing = commands.add_parser("show", parents=[common], help="show one entry in full")
    showing.add_argument("key", metavar="KEY", help="its key, or a unique beginning of it")
    showing.add_argument("--children", action="store_true", help="find its children: reads all")
    showing.set_defaults(run=show_node)
    statistics = commands.add_parser("stats", parents=[common], help="totals, quotas, servers")
    statistics.set_defaults(run=show_stats)


def list_nodes(args: argparse.Namespace, context: Context) -> int:
    """Print the entries that come first, of all namespaces or of one."""
    limit = check_limit(args.limit)
    options = context.options
    owner = None if options.namespace is None else options.owner()
    with open_place(options) as place:
        found = Matching(place.index.scan(), owner)
        views = _largest(found, limit, SORTS[args.sort])
    names = namespaces_of(options)
    document = {
        "nodes": [node_document(view, names) for view in views],
        "num_nodes": found.num_seen,
    }
    table = _make_listing(views, names, context.now_ms)
    shown = f"{len(views)} of {count_of(found.num_seen, 'entry', 'entries')}, by {args.sort}"
    context.out.result(document, lambda console: console.print(table, Text(shown)))
    return 0


def show_node(args: argparse.Namespace, context: Context) -> int:
    """Print all that is known of one entry, and of those above and below it."""
    names = namespaces_of(context.options)
    with open_place(context.options) as place:
        (view,) = resolve_keys(place, [args.key.lower()])
        parents = list(_parents(place, view))
        children = _children(place, view.record.key) if args.children else None
    node = node_document(view, names)
    above = [parent.record.key.hex() for parent in parents]
    below = None if children is None else [child.record.key.hex() for child in children]
    document = {**node, "parents": above, "children": below}
    facts = _node_facts(view, names, context.now_ms)
    facts["above it"] = ", ".join(above) or "nothing: it is a chunk's first segment"
    if below is not None:
        facts["below it"] = ", ".join(below) or "nothing"
    context.out.result(document, lambda console: print_facts(console, facts))
    return 0


def show_stats(args: argparse.Namespace, context: Context) -> int:
    """Print totals, each owner's share, live servers, and what the payloads take."""
    options = context.options
    samples = server_samples(options)
    if options.index is None and options.disk_path is None and options.server is not None:
        document: dict[str, Any] = {}
    else:
        with open_place(options) as place:
            document = _stats_document(place, namespaces_of(options), context.now_ms)
            document["budget_bytes"] = budget_of(samples or (), place.name)
    if samples is not None:
        document["metrics"] = [asdict(sample) for sample in samples]
    context.out.result(document, lambda console: _print_stats(console, document))
    return 0


def node_document(view: NodeView, names: Mapping[str, str]) -> dict[str, Any]:
    """An entry as JSON: every field of its record, and its use."""
    record = view.record
    return {
        "key": record.key.hex(),
        "parent": None if record.parent is None else record.parent.hex(),
        "tokens": record.num_tokens,
        "bytes": record.payload_bytes,
        "checksum": f"{record.checksum:016x}",
        "created_ms": record.created_ms,
        "expires_ms": record.expires_ms,
        "pinned": record.pinned,
        "doc_ids": list(record.doc_ids),
        "owner": record.owner,
        "namespace": names.get(record.owner),
        "model": record.model,
        "compute_us": record.compute_us,
        "hits": view.num_hits,
        "last_hit_ms": view.last_hit_ms,
    }


class Matching:
    """Entries of one owner, or of all; counts what it lets through, what comes twice too."""

    def __init__(self, views: Iterator[NodeView], owner: str | None) -> None:
        self._views = views
        self._owner = owner
        self.num_seen = 0

    def __iter__(self) -> Iterator[NodeView]:
        for view in self._views:
            if self._owner is None or view.record.owner == self._owner:
                self.num_seen += 1
                yield view


def check_limit(limit: int) -> int:
    """A number of entries to show.

    Raises:
        ConfigError: It is none.
    """
    if limit < 1:
        raise ConfigError(f"--limit: got {limit}, expected at least 1")
    return limit


def _largest(views: Matching, limit: int, sort: SortKey) -> list[NodeView]:
    """The first entries in an order, each once, without keeping all of them."""
    candidates = heapq.nlargest(2 * limit, views, key=sort)  # a scan may name one twice
    unique = {view.record.key: view for view in candidates}
    return list(islice(unique.values(), limit))


def _parents(place: Place, view: NodeView) -> Iterator[NodeView]:
    """The entries above one, nearest first, as far as they are there."""
    above: NodeView | None = view
    while above is not None and above.record.parent is not None:
        above = place.index.show(above.record.parent)
        if above is not None:
            yield above


def _children(place: Place, key: ChunkKey) -> list[NodeView]:
    found = (view for view in place.index.scan() if view.record.parent == key)
    unique = {view.record.key: view for view in islice(found, SHOWN_CHILDREN)}
    return list(unique.values())


def _node_facts(view: NodeView, names: Mapping[str, str], now_ms: int) -> dict[str, object]:
    record = view.record
    left_s = None if record.expires_ms is None else (record.expires_ms - now_ms) / 1e3
    return {
        "key": record.key.hex(),
        "tokens": record.num_tokens,
        "bytes": f"{record.payload_bytes} ({format_bytes(record.payload_bytes)})",
        "checksum": f"{record.checksum:016x}",
        "age": format_seconds((now_ms - record.created_ms) / 1e3),
        "expires in": "never" if left_s is None else _left(left_s),
        "pinned": "yes" if record.pinned else "no",
        "hits": view.num_hits,
        "last hit": _ago(view.last_hit_ms, now_ms),
        "documents": ", ".join(record.doc_ids) or "none",
        "namespace": names.get(record.owner, f"owner {record.owner or '-'}"),
        "model": record.model or "-",
        "cost": f"{record.compute_us / 1e3:.1f} ms to compute" if record.compute_us else "unknown",
    }


def _make_listing(views: Sequence[NodeView], names: Mapping[str, str], now_ms: int) -> Table:
    titles = ("key", "namespace", "tokens", "size", "age", "hits", "last hit", "expires", "pinned")
    table = make_table(*titles, "documents", left=2)
    table.columns[-1].justify = "left"
    for view in views:
        record = view.record
        expires_s = None if record.expires_ms is None else (record.expires_ms - now_ms) / 1e3
        add_row(
            table,
            record.key.hex()[:SHOWN_DIGITS],
            names.get(record.owner, record.owner or "-"),
            record.num_tokens,
            format_bytes(record.payload_bytes),
            format_seconds((now_ms - record.created_ms) / 1e3),
            view.num_hits,
            _ago(view.last_hit_ms, now_ms),
            _left(expires_s),
            "yes" if record.pinned else "no",
            ", ".join(record.doc_ids) or "-",
        )
    return table


def _left(seconds: float | None) -> str:
    """Time to live; an entry whose time is up is not collected yet."""
    return "expired" if seconds is not None and seconds <= 0 else format_seconds(seconds)


def _ago(moment_ms: int | None, now_ms: int) -> str:
    return "never" if moment_ms is None else format_seconds((now_ms - moment_ms) / 1e3)


def _stats_document(place: Place, names: Mapping[str, str], now_ms: int) -> dict[str, Any]:
    document: dict[str, Any] = {
        "place": place.name,
        **asdict(place.index.stats()),
        "owners": [
            {"owner": owner, "namespace": names.get(owner), **asdict(usage)}
            for owner, usage in sorted(place.index.usage().items())
        ],
        "folder_bytes": None if place.files is None else place.files.used_bytes(),
    }
    if place.shared is not None:
        servers = place.shared.index.servers(now_ms)
        document["servers"] = [
            {"server": server, "model": model} for server, model in sorted(servers.items())
        ]
    return document


def _print_stats(console: Console, document: Mapping[str, Any]) -> None:
    if "num_nodes" in document:
        _print_totals(console, document)
    if "metrics" in document:
        _print_metrics(console, document["metrics"])


def _print_metrics(console: Console, samples: Sequence[Mapping[str, Any]]) -> None:
    """A server's metrics; counters that stand at 0 are left out."""
    if not samples:
        console.print("the server has no metrics of PIC: was it started with --enable-metrics?")
        return
    table = make_table("metric", "labels", "value", left=2)
    for sample in samples:
        if sample["value"] or sample["name"] in ALWAYS_SHOWN:
            labels = [f"{k}={v}" for k, v in sample["labels"].items() if k != "model_name" and v]
            add_row(table, sample["name"], " ".join(labels), f"{sample['value']:.10g}")
    console.print(table)


def _print_totals(console: Console, document: Mapping[str, Any]) -> None:
    budget = document["budget_bytes"]
    facts = {
        "entries": document["num_nodes"],
        "payload bytes": format_bytes(document["num_bytes"]),
        "reserved": format_bytes(document["reserved_bytes"]),
        "budget": format_bytes(budget) if budget is not None else UNKNOWN_BUDGET,
        "folder": format_bytes(document["folder_bytes"]),
    }
    if "servers" in document:
        live = [f"{each['server']} (model {each['model']})" for each in document["servers"]]
        facts["live servers"] = ", ".join(live) or "none"
    print_facts(console, facts)
    table = make_table("owner", "namespace", "entries", "bytes", "quota", left=2)
    for owner in document["owners"]:
        quota = owner["quota_bytes"]
        add_row(
            table,
            owner["owner"] or "-",
            owner["namespace"],
            owner["num_nodes"],
            format_bytes(owner["num_bytes"]),
            "none" if quota is None else format_bytes(quota),
        )
    console.print(table)
