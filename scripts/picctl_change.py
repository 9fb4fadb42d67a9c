"""`picctl invalidate`, `pin`, `unpin`, `quota` and `purge`: changes of what is cached.

Knows the order: the shared index is changed first, then the change is posted to the log, by which
it reaches what each server keeps for itself. Without a shared index one server is asked by a
request. Does not know how a change is carried out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from sglang_ext.chunk_index.commands import MAX_KEYS, Clear, Invalidate, Pin, Unpin
from sglang_ext.chunk_index.identity import ChunkKey
from sglang_ext.chunk_index.index import NodeRecord, document_names
from sglang_ext.errors import ConfigError
from sglang_ext.scripts.picctl_options import Context
from sglang_ext.scripts.picctl_output import add_row, count_of, format_bytes, make_table
from sglang_ext.scripts.picctl_places import (
    BATCH,
    Place,
    namespaces_of,
    open_place,
    open_shared,
    resolve_keys,
)
from sglang_ext.scripts.picctl_server import PicServer, budget_of, server_samples
from sglang_ext.scripts.picctl_view import UNKNOWN_BUDGET
from sglang_ext.tier_config import MAX_MIB, MIB

MAX_DOC_IDS = 64
"""Documents that one request may name."""


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the five commands to the parser."""
    parser = commands.add_parser(
        "invalidate", parents=[common], help="remove what was stored for documents"
    )
    parser.add_argument("--doc-id", action="append", required=True, metavar="D[@VERSION]")
    parser.set_defaults(run=invalidate)
    for name, run in (("pin", pin), ("unpin", unpin)):
        parser = commands.add_parser(name, parents=[common], help=f"{name} entries or documents")
        parser.add_argument("keys", nargs="*", metavar="KEY", help="or a unique beginning of it")
        parser.add_argument("--doc-id", action="append", default=[], metavar="D[@VERSION]")
        parser.set_defaults(run=run)
    parser = commands.add_parser("quota", parents=[common], help="show or set a namespace's quota")
    parser.add_argument("tenant", nargs="?", metavar="NAMESPACE", help="all of them without")
    parser.add_argument("mib", nargs="?", metavar="MIB|none", help="new quota; none takes it away")
    parser.add_argument("--total", action="store_true", help="show what all have together")
    parser.set_defaults(run=quota)
    parser = commands.add_parser("purge", parents=[common], help="remove many entries at once")
    parser.add_argument("--model", metavar="M", help="only of this model, 16 hexadecimal digits")
    parser.add_argument(
        "--stale-models", action="store_true", help="of models that no live server serves"
    )
    parser.add_argument("--all", action="store_true", help="everything, whoever stored it")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.set_defaults(run=purge)


def invalidate(args: argparse.Namespace, context: Context) -> int:
    """Remove what a namespace stored for documents, everywhere."""
    options = context.options
    if options.index is None and options.disk_path is None and options.server is not None:
        params = {"pic_namespace": options.named_namespace}
        with PicServer(options.server, options.api_key) as server:
            for start in range(0, len(args.doc_id), MAX_DOC_IDS):
                doc_ids = args.doc_id[start : start + MAX_DOC_IDS]
                server.manage({**params, "pic_invalidate": doc_ids})
        _say_asked(context, options.server, {"doc_ids": args.doc_id})
        return 0
    owner = options.owner()
    removed: dict[str, tuple[int, int]] = {}
    with open_place(options) as place:
        place.require_store()
        for doc_id in args.doc_id:
            removed[doc_id] = place.drain(_invalidation(place, doc_id, owner))
            place.post(Invalidate(owner, doc_id))
    document = {
        "namespace": options.named_namespace,
        "documents": [
            {"doc_id": doc_id, "entries": entries, "bytes": num_bytes}
            for doc_id, (entries, num_bytes) in removed.items()
        ],
    }
    lines = [f"{doc_id}: removed {_amount(*amount)}" for doc_id, amount in removed.items()]
    context.out.result(document, _lines(lines))
    return 0


def pin(args: argparse.Namespace, context: Context) -> int:
    """Have entries never evicted."""
    with open_shared(context.options) as place:
        keys = _named_keys(args, context, place)
        changed = [key for key in keys if place.index.annotate(key, pinned=True) is not None]
        for batch in _batches(changed):
            place.post(Pin(batch))
    return _report_pins(context, "pinned", changed)


def unpin(args: argparse.Namespace, context: Context) -> int:
    """Let entries be evicted again."""
    with open_shared(context.options) as place:
        keys = _named_keys(args, context, place)
        changed = [key for key in keys if place.index.unpin(key) is not None]
        for batch in _batches(changed):
            place.post(Unpin(batch))
    return _report_pins(context, "unpinned", changed)


def quota(args: argparse.Namespace, context: Context) -> int:
    """Show the owners' quotas and what they use, or change one."""
    options = context.options
    names = dict(namespaces_of(options))
    with open_shared(options) as place:
        if args.mib is not None:
            place.index.set_quota(options.owner(args.tenant), _check_mib(args.mib))
        usage = dict(place.index.usage())
        stats = place.index.stats()
        samples = server_samples(options) if args.total else None
    if args.tenant is not None:
        owner = options.owner(args.tenant)
        names[owner] = args.tenant
        usage = {owner: usage[owner]} if owner in usage else {}
    document: dict[str, Any] = {
        "owners": [
            {
                "owner": owner,
                "namespace": names.get(owner),
                "entries": share.num_nodes,
                "bytes": share.num_bytes,
                "quota_bytes": share.quota_bytes,
            }
            for owner, share in sorted(usage.items())
        ]
    }
    if args.total:
        document["total"] = {
            "bytes": stats.num_bytes,
            "reserved_bytes": stats.reserved_bytes,
            "budget_bytes": budget_of(samples or (), "shared"),
        }
    context.out.result(document, lambda console: _print_quotas(console, document))
    return 0


def purge(args: argparse.Namespace, context: Context) -> int:
    """Remove all entries of a namespace, of models, or of all."""
    options = context.options
    chosen = [bool(args.model), args.stale_models, args.all, options.namespace is not None]
    if sum(chosen) != 1:
        raise ConfigError(
            f"purge: got {count_of(sum(chosen), 'choice')}, expected one of "
            "--namespace, --model, --stale-models, --all"
        )
    if options.index is None and options.disk_path is None and options.server is not None:
        return _purge_server(args, context, options.server)
    with open_place(options) as place:
        place.require_store()
        clears = _choose(args, context, place)
        if not clears:
            context.out.result({"entries": 0, "bytes": 0}, _lines(["no stale model"]))
            return 0
        if not _is_confirmed(args, context, place, clears):
            context.out.result({"entries": 0, "bytes": 0}, _lines(["nothing was removed"]))
            return 1
        num_entries = num_bytes = 0
        for clear in clears:
            entries, size = place.drain(_clearing(place, clear))
            place.post(clear)
            num_entries, num_bytes = num_entries + entries, num_bytes + size
        num_files = _drop_files(place, clears)
    document = {"entries": num_entries, "bytes": num_bytes, "files": num_files}
    lines = [f"removed {_amount(num_entries, num_bytes)}"]
    if num_files:
        lines.append(f"and {count_of(num_files, 'file')} that no entry named")
    context.out.result(document, _lines(lines))
    return 0


def _purge_server(args: argparse.Namespace, context: Context, url: str) -> int:
    """Have one server without a shared index forget a namespace, or all that is its own."""
    namespace = context.options.namespace
    if namespace is None and not args.all:
        raise ConfigError("--index: got nothing, expected it to choose by model")
    what = f"the namespace {namespace}" if namespace else "every chunk and prefix"
    if not _ask(args, context, f"have {url} forget {what}?"):
        context.out.result({"server": url, "asked": False}, _lines(["nothing was removed"]))
        return 1
    with PicServer(url, context.options.api_key) as server:
        if namespace is None:
            server.forget()
        else:
            server.manage({"pic_namespace": namespace, "pic_purge": True})
    _say_asked(context, url, {"namespace": namespace})
    return 0


def _choose(args: argparse.Namespace, context: Context, place: Place) -> list[Clear]:
    """What is to be removed, as commands."""
    if args.all:
        return [Clear()]
    if args.model:
        return [Clear(model=_check_model(args.model))]
    if args.stale_models:
        return [Clear(model=model) for model in _stale_models(place, context.now_ms)]
    return [Clear(owner=context.options.owner())]


def _stale_models(place: Place, now_ms: int) -> list[str]:
    """Models that have entries and that no live server serves, in order."""
    served = set(place.require_shared("--stale-models").index.servers(now_ms).values())
    if not served:
        raise ConfigError(
            "--stale-models: got no live server, by which every model would be stale; "
            "expected --model or --all"
        )
    return sorted({view.record.model for view in place.index.scan()} - served)


def _drop_files(place: Place, clears: Sequence[Clear]) -> int:
    """Drop what lies in a folder without an entry in the index; returns how many files."""
    if place.files is None:
        return 0
    if Clear() in clears:
        return place.files.empty()
    left = [
        record
        for record in place.files.records()
        if any(_covers(clear, record) for clear in clears)
        and (place.name == "disk" or place.index.show(record.key) is None)
    ]
    for record in left:
        place.files.drop(record)
    return len(left)


def _covers(clear: Clear, record: NodeRecord) -> bool:
    is_owner = clear.owner is None or clear.owner == record.owner
    return is_owner and (clear.model is None or clear.model == record.model)


def _is_confirmed(
    args: argparse.Namespace, context: Context, place: Place, clears: Sequence[Clear]
) -> bool:
    records = (view.record for view in place.index.scan())
    sizes = {
        record.key: record.payload_bytes
        for record in (() if args.yes else records)
        if any(_covers(clear, record) for clear in clears)
    }
    return _ask(args, context, f"remove {_amount(len(sizes), sum(sizes.values()))}?")


def _ask(args: argparse.Namespace, context: Context, question: str) -> bool:
    """Whether the operator agrees, or said so beforehand."""
    if args.yes:
        return True
    if context.out.is_json:
        raise ConfigError("--json: got it without --yes, expected both, for nobody can be asked")
    context.out.note(f"{question} [y/N] ")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _invalidation(place: Place, doc_id: str, owner: str) -> Callable[[], Sequence[NodeRecord]]:
    return lambda: place.index.invalidate(doc_id, owner, BATCH)


def _clearing(place: Place, clear: Clear) -> Callable[[], Sequence[NodeRecord]]:
    return lambda: place.index.clear(BATCH, clear.owner, clear.model)


def _named_keys(args: argparse.Namespace, context: Context, place: Place) -> list[ChunkKey]:
    """The keys given, and those of the documents given."""
    if not args.keys and not args.doc_id:
        raise ConfigError("KEY: got nothing, expected keys, or --doc-id")
    views = resolve_keys(place, [key.lower() for key in args.keys]) if args.keys else []
    found = [view.record.key for view in views]
    if args.doc_id:
        owner = context.options.owner()
        wanted = set(args.doc_id)
        found += [
            view.record.key
            for view in place.index.scan()
            if view.record.owner == owner and wanted & _names_of(view.record)
        ]
    return list(dict.fromkeys(found))


def _names_of(record: NodeRecord) -> set[str]:
    return {name for doc_id in record.doc_ids for name in document_names(doc_id)}


def _batches(keys: Sequence[ChunkKey]) -> Iterator[tuple[ChunkKey, ...]]:
    for start in range(0, len(keys), MAX_KEYS):
        yield tuple(keys[start : start + MAX_KEYS])


def _report_pins(context: Context, what: str, keys: Sequence[ChunkKey]) -> int:
    document = {what: [key.hex() for key in keys]}
    context.out.result(document, _lines([f"{what} {count_of(len(keys), 'entry', 'entries')}"]))
    return 0


def _print_quotas(console: Console, document: dict[str, Any]) -> None:
    table = make_table("owner", "namespace", "entries", "bytes", "quota", left=2)
    for each in document["owners"]:
        has_quota = each["quota_bytes"] is not None
        add_row(
            table,
            each["owner"] or "-",
            each["namespace"],
            each["entries"],
            format_bytes(each["bytes"]),
            format_bytes(each["quota_bytes"]) if has_quota else "none",
        )
    console.print(table if document["owners"] else "nothing is stored, and no quota set")
    if "total" in document:
        total = document["total"]
        budget = total["budget_bytes"]
        known = UNKNOWN_BUDGET if budget is None else format_bytes(budget)
        used = format_bytes(total["bytes"] + total["reserved_bytes"])
        console.print(Text(f"all together {used}, budget {known}"))


def _say_asked(context: Context, url: str, document: dict[str, Any]) -> None:
    document = {"server": url, "asked": True, **document}
    context.out.result(document, _lines([f"asked {url}: done"]))


def _lines(lines: Sequence[str]) -> Callable[[Console], None]:
    def render(console: Console) -> None:
        for line in lines:
            console.print(Text(line), soft_wrap=True)

    return render


def _amount(num_entries: int, num_bytes: int) -> str:
    return f"{count_of(num_entries, 'entry', 'entries')}, {format_bytes(num_bytes)}"


def _check_mib(text: str) -> int | None:
    if text == "none":
        return None
    try:
        mib = float(text)
    except ValueError:
        mib = 0.0
    if not 0 < mib <= MAX_MIB:
        raise ConfigError(f"MIB: got {text!r}, expected a number above 0, or none")
    return int(mib * MIB)


def _check_model(text: str) -> str:
    if len(text) != 16 or not set(text) <= set("0123456789abcdef"):
        raise ConfigError(f"--model: got {text!r}, expected 16 hexadecimal digits")
    return text
