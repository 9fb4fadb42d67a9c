"""`picctl verify`: reads every payload, says what is lost and why, and repairs what can be.

Knows how an entry and its payload are compared. Does not know what a payload holds: its checksum,
and its tag if there is a secret, are what is checked.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from sglang_ext.chunk_index.identity import ChunkKey
from sglang_ext.chunk_index.index import NodeRecord
from sglang_ext.errors import ExtError, PayloadLost, TierUnavailable
from sglang_ext.scripts.picctl_options import Context
from sglang_ext.scripts.picctl_output import (
    add_row,
    count_of,
    format_bytes,
    make_table,
)
from sglang_ext.scripts.picctl_places import Place, open_place, unreadable_files

ORPHAN_S = 3600.0
"""Age from which a payload without an entry is taken for a dead writer's, as the servers do."""

UNREADABLE = "unreadable"
"""Reason of a payload whose store cannot tell now; it may be intact."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A payload that is not what its entry says.

    Attributes:
        record: The entry's.
        reason: In one word; see `PayloadLost`.
        is_indexed: There is an entry; else it is a file that no entry names.
    """

    record: NodeRecord
    reason: str
    is_indexed: bool = True


@dataclass(frozen=True, slots=True)
class Findings:
    """What a whole reading found.

    Attributes:
        num_intact: Payloads that are what their entries say.
        num_bytes: Of those.
        losses: All others.
    """

    num_intact: int
    num_bytes: int
    losses: tuple[Loss, ...]


@dataclass(frozen=True, slots=True)
class Repairs:
    """What was done about losses.

    Attributes:
        num_removed: Entries that left, those below lost ones included.
        num_dropped: Files removed that no entry named.
        is_reconciled: Accounts were counted again.
    """

    num_removed: int
    num_dropped: int
    is_reconciled: bool


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("verify", parents=[common], help="read and check every payload")
    parser.add_argument(
        "--repair", action="store_true", help="remove lost entries, recount, sweep old files"
    )
    parser.add_argument(
        "--yes", action="store_true", help="repair even if not one payload is intact"
    )
    parser.set_defaults(run=verify)


def verify(args: argparse.Namespace, context: Context) -> int:
    """Check every payload; exit code 1 if one is lost and was not repaired."""
    with open_place(context.options) as place:
        place.require_store()
        total = place.index.stats().num_nodes
        with context.out.progress("verify", total) as advance:
            findings = check_all(place, advance)
        repairs = None
        if args.repair:
            if findings.losses and not findings.num_intact and not args.yes:
                raise ExtError(
                    "--repair: got not one intact payload, which a wrong --secret-file or folder "
                    "would explain; expected --yes if all are to be removed"
                )
            repairs = repair(place, findings, context.now_ms)
    document = _document(findings, repairs)
    context.out.result(document, lambda console: _print(console, findings, repairs))
    has_unreadable = any(loss.reason == UNREADABLE for loss in findings.losses)
    is_well = not findings.losses or (repairs is not None and not has_unreadable)
    return 0 if is_well else 1


def check_all(place: Place, advance: Callable[[], None]) -> Findings:
    """Read the payload of every entry, and every file without one. Changes nothing."""
    num_intact = num_bytes = 0
    losses: list[Loss] = []
    seen: set[ChunkKey] = set()
    for view in place.index.scan():
        record = view.record
        if record.key in seen:
            continue
        seen.add(record.key)
        reason = _why_lost(place, record)
        if reason is None:
            num_intact, num_bytes = num_intact + 1, num_bytes + record.payload_bytes
        elif _is_still_there(place, record):
            losses.append(Loss(record, reason))
        advance()
    losses += _stray_files(place)
    return Findings(num_intact, num_bytes, tuple(losses))


def repair(place: Place, findings: Findings, now_ms: int) -> Repairs:
    """Remove the entries of lost payloads, count accounts again, and sweep old files.

    What a store could not tell now stays. Modifies index and store.
    """
    store = place.require_store()
    num_removed = num_dropped = 0
    for loss in findings.losses:
        if loss.reason == UNREADABLE:
            continue
        if not loss.is_indexed:
            store.drop(loss.record)
            num_dropped += 1
        elif _is_still_there(place, loss.record):
            left = place.index.remove(loss.record.key)
            num_removed += len(left)
            for record in left:
                store.drop(record)
    if place.shared is not None:
        place.shared.index.reconcile()
    if place.files is not None:
        num_dropped += place.files.sweep(
            lambda record: _is_still_there(place, record), ORPHAN_S, now_ms / 1e3
        )
    return Repairs(num_removed, num_dropped, is_reconciled=place.shared is not None)


def _why_lost(place: Place, record: NodeRecord) -> str | None:
    """Why a payload is not what its record says; None if it is."""
    try:
        place.require_store().get(record)
    except PayloadLost as exc:
        return exc.reason
    except TierUnavailable:
        return UNREADABLE
    return None


def _is_still_there(place: Place, record: NodeRecord) -> bool:
    """Whether an entry is the same as when it was read; it may have left with its payload."""
    view = place.index.show(record.key)
    return view is not None and view.record.checksum == record.checksum


def _stray_files(place: Place) -> Iterator[Loss]:
    """Files of a disk tier that its server would not take up, or cannot read.

    A shared folder's are not looked at: they may be of other secrets, or on their way.
    """
    if place.name != "disk":
        return
    for record in place.strays:
        yield Loss(record, "stray", is_indexed=False)
    for record in unreadable_files(place):
        yield Loss(record, _why_lost(place, record) or "foreign", is_indexed=False)


def _document(findings: Findings, repairs: Repairs | None) -> dict[str, Any]:
    return {
        "intact": findings.num_intact,
        "intact_bytes": findings.num_bytes,
        "lost": dict(Counter(loss.reason for loss in findings.losses)),
        "losses": [
            {
                "key": loss.record.key.hex(),
                "checksum": f"{loss.record.checksum:016x}",
                "reason": loss.reason,
                "has_entry": loss.is_indexed,
            }
            for loss in findings.losses
        ],
        "repairs": None
        if repairs is None
        else {
            "entries_removed": repairs.num_removed,
            "files_dropped": repairs.num_dropped,
            "reconciled": repairs.is_reconciled,
        },
    }


def _print(console: Console, findings: Findings, repairs: Repairs | None) -> None:
    intact = count_of(findings.num_intact, "payload")
    console.print(Text(f"intact: {intact}, {format_bytes(findings.num_bytes)}"))
    if findings.losses:
        table = make_table("lost", "key", "tokens", "documents", left=2)
        table.columns[-1].justify = "left"
        for loss in findings.losses:
            documents = ", ".join(loss.record.doc_ids) or "-"
            add_row(table, loss.reason, loss.record.key.hex(), loss.record.num_tokens, documents)
        console.print(table)
        counts = Counter(loss.reason for loss in findings.losses)
        reasons = ", ".join(f"{number} {reason}" for reason, number in sorted(counts.items()))
        console.print(Text(f"lost: {reasons}"))
    if repairs is not None:
        removed = count_of(repairs.num_removed, "entry", "entries")
        dropped = count_of(repairs.num_dropped, "file")
        recounted = "; accounts counted again" if repairs.is_reconciled else ""
        console.print(Text(f"repaired: removed {removed}, {dropped}{recounted}"))
