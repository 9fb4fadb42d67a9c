"""`picctl doctor`: names what is set up wrongly, and what to do about it.

Knows which checks there are, and that one that cannot be made keeps others from being made. Of
Redis itself `picctl_reach` and `picctl_redis_checks` know.
"""

from __future__ import annotations

import argparse
import shutil
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from sglang_ext.chunk_index.file_store import FileStore
from sglang_ext.chunk_index.index import NodeView
from sglang_ext.chunk_index.redis_connection import Address, Endpoint, parse_url
from sglang_ext.errors import ConfigError, ExtError, PayloadLost, ServerFailed, TierUnavailable
from sglang_ext.scripts.picctl_options import Context, Options
from sglang_ext.scripts.picctl_output import clean, format_bytes
from sglang_ext.scripts.picctl_places import Place, RawCodec, open_shared
from sglang_ext.scripts.picctl_reach import Finding, Level, open_session
from sglang_ext.scripts.picctl_redis_checks import at_server, check_cluster, check_server
from sglang_ext.scripts.picctl_server import PicServer, Sample, budget_of, total_of

SAMPLE = 8
"""Payloads that are read."""

SCANNED = 2_000
"""Entries that are looked at to choose them."""

LITTLE_ROOM = 1 << 30
_STYLES = {Level.OK: "green", Level.INFO: "", Level.WARN: "yellow", Level.ERROR: "bold red"}


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("doctor", parents=[common], help="name what is set up wrongly")
    parser.add_argument("--timeout", type=float, default=3.0, metavar="S", help="a server, 3")
    parser.set_defaults(run=doctor)


def doctor(args: argparse.Namespace, context: Context) -> int:
    """Make every check that the options allow; exit code 1 if one is an error."""
    options = context.options
    if options.index is None and options.disk_path is None and options.server is None:
        raise ConfigError("--index: got nothing, expected it, --disk-path or --server")
    findings = list(check_secret_files(options.secret_files))
    samples: tuple[Sample, ...] = ()
    if options.server is not None:
        with PicServer(options.server, options.api_key) as server:
            found, samples = check_sglang(server, options.server)
        findings += found
    if options.index is not None:
        found = check_redis(options, args.timeout, _now_ms)
        findings += found
        if not any(finding.level is Level.ERROR for finding in found):
            findings += check_index(options, context.now_ms)
    for flag, folder in (("shared", options.shared_path), ("disk", options.disk_path)):
        if folder is not None:
            findings += check_folder(flag, folder, budget_of(samples, flag))
    document = {
        "findings": [asdict(finding) for finding in findings],
        "counts": Counter(finding.level.value for finding in findings),
    }
    context.out.result(document, lambda console: _print(console, findings))
    return 1 if any(finding.level is Level.ERROR for finding in findings) else 0


def check_redis(options: Options, timeout_s: float, now_ms: Callable[[], int]) -> list[Finding]:
    """Every check of Redis itself, of each master of a cluster."""
    assert options.index is not None
    endpoint = parse_url(options.index, options.index_password)
    findings: list[Finding] = []
    for seed in endpoint.seeds:
        session, finding = open_session(seed, endpoint, timeout_s)
        findings.append(finding)
        if session is None:
            continue
        try:
            found, masters = check_cluster(session)
            findings += found
            if not masters:
                return findings + check_server(session, now_ms)
        finally:
            session.close()
        return findings + _check_masters(masters, endpoint, timeout_s, now_ms)
    return findings


def check_index(options: Options, now_ms: int) -> list[Finding]:
    """What the entries of the shared index tell: of servers, secrets and payloads."""
    if options.shared_path is not None and not options.shared_path.is_dir():
        options = replace(options, shared_path=None)
    try:
        with open_shared(options) as place:
            servers = place.require_shared("doctor").index.servers(now_ms)
            owners = place.index.usage()
            views = choose(islice(place.index.scan(), SCANNED), set(servers.values()))
            findings = [check_models(servers)]
            if options.secret is None:
                hint = "give --secret-file to check namespaces and payloads"
                findings.append(Finding(Level.INFO, "secret", "not given, so not checked", hint))
            else:
                has_entries = any(usage.num_nodes for usage in owners.values())
                namespace, owner = options.named_namespace, options.owner()
                is_known = owner in owners and owners[owner].num_nodes > 0
                findings.append(check_owner(namespace, is_known, has_entries))
            if place.store is not None:
                findings += check_payloads(reasons_of(place, views), options.secret is not None)
            return findings
    except ExtError as exc:
        return [Finding(Level.ERROR, "index", str(exc), "see the findings before this")]


def check_models(servers: Mapping[str, str]) -> Finding:
    """Which models the live servers serve; those of different ones share nothing."""
    models = Counter(servers.values())
    if not servers:
        return Finding(Level.INFO, "servers", "no server is live")
    listed = ", ".join(f"{model} on {number}" for model, number in sorted(models.items()))
    if len(models) > 1:
        message = f"live servers serve {len(models)} models, which share nothing: {listed}"
        return Finding(Level.INFO, "servers", message)
    return Finding(Level.OK, "servers", f"live servers by model: {listed}")


def check_owner(namespace: str, is_known: bool, has_entries: bool) -> Finding:
    """Whether a namespace has entries under this secret."""
    what = "namespace"
    if is_known:
        return Finding(Level.OK, what, f"{namespace} has entries under this secret")
    if not has_entries:
        return Finding(Level.INFO, what, "the index is empty")
    hint = "check that --secret-file is the servers', or name the tenant by --namespace"
    return Finding(Level.WARN, what, f"{namespace} has no entries under this secret", hint)


def check_payloads(reasons: Sequence[str | None], has_secret: bool) -> list[Finding]:
    """What a sample of payloads tells of the secret and of where payloads lie.

    Args:
        reasons: For each why it is lost; None if it is intact.
        has_secret: It was checked with one.
    """
    what, counts = "payloads", Counter(reasons)
    if not reasons:
        return [Finding(Level.INFO, what, "none to look at")]
    if counts[None] == len(reasons):
        return [Finding(Level.OK, what, f"{len(reasons)} of a sample are intact")]
    findings = []
    for reason, number in sorted(counts.items(), key=str):
        if reason is not None:
            message = f"{number} of {len(reasons)} in a sample are {reason}"
            is_all = number == len(reasons)
            findings.append(_payload_finding(reason, message, is_all, has_secret))
    return findings


def check_folder(what: str, folder: Path, budget_bytes: int | None) -> list[Finding]:
    """Whether a tier's folder is there, can be written, and has room for its budget."""
    check, flag = f"{what} folder", f"--{what}-path"
    if not folder.is_dir():
        hint = f"mount it, or check {flag}"
        return [Finding(Level.ERROR, check, f"{folder} is no folder", hint)]
    files: FileStore[Any] = FileStore(folder, RawCodec())
    try:
        files.probe()
    except TierUnavailable as exc:
        hint = "give the servers' user the right to write there"
        return [Finding(Level.ERROR, check, f"cannot be written: {exc}", hint)]
    room, used = shutil.disk_usage(folder).free, files.used_bytes()
    message = f"{folder}: {format_bytes(used)} used, {format_bytes(room)} free"
    hint = f"free space, or lower --pic-{what}-gib"
    if budget_bytes is not None and used + room < budget_bytes:
        message += f", less than the budget of {format_bytes(budget_bytes)}"
        return [Finding(Level.WARN, check, message, hint)]
    if room < LITTLE_ROOM:
        return [Finding(Level.WARN, check, message, hint)]
    return [Finding(Level.OK, check, message)]


def check_secret_files(paths: Sequence[Path]) -> Iterator[Finding]:
    """Whether others may read the files that hold secrets."""
    for path in paths:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            message = f"{path} may be read by others (mode {mode:03o})"
            yield Finding(Level.WARN, "secret file", message, f"chmod 600 {path}")
        else:
            yield Finding(Level.OK, "secret file", f"{path}: mode {mode:03o}")


def check_sglang(server: PicServer, url: str) -> tuple[list[Finding], tuple[Sample, ...]]:
    """Whether a server has PIC and uses its tiers, and the metrics that told it."""
    what = "server"
    try:
        version = str(server.info().get("version", "of unknown version"))
        samples = server.metrics()
        findings = [Finding(Level.OK, what, f"{url}: SGLang {version}")]
        if samples:
            return findings + list(check_metrics(samples)), samples
        hint = "--enable-metrics on the server tells more"
        findings.append(Finding(Level.INFO, "metrics", "the server has none of PIC", hint))
        answer = server.generate("a picctl doctor b", _PROBE)
        failure = answer.failure
        if failure is None or "single_chunk" in failure:
            findings.append(Finding(Level.OK, "pic", "a request was served with PIC"))
        else:
            findings.append(Finding(Level.ERROR, "pic", failure, "see the server's start line"))
        return findings, samples
    except ServerFailed as exc:
        hint = "check --server and --api-key-file, and that it runs"
        return [Finding(Level.ERROR, what, str(exc), hint)], ()


def check_metrics(samples: Sequence[Sample]) -> Iterator[Finding]:
    """What a server's metrics tell: whether PIC is active, and each tier in use."""
    active = [sample for sample in samples if sample.name == "sglang_pic_active"]
    reasons = [sample.labels.get("reason", "") for sample in active if sample.value == 0]
    if any(sample.value for sample in active):
        yield Finding(Level.OK, "pic", "active")
    else:
        hint = "see the server's log; plain prefills are served meanwhile"
        message = f"off: {', '.join(filter(None, reasons)) or 'no reason given'}"
        yield Finding(Level.ERROR, "pic", message, hint)
    for sample in samples:
        if sample.name == "sglang_pic_tier_ready":
            tier = sample.labels.get("tier", "")
            if sample.value:
                yield Finding(Level.OK, f"{tier} tier", "in use by the server")
            else:
                hint = "see `pic tier=` in the server's log"
                yield Finding(Level.ERROR, f"{tier} tier", "not in use by the server", hint)
    failures = total_of(samples, "sglang_pic_load_failures_total")
    if failures:
        hint = "picctl verify tells which; each was a miss"
        yield Finding(Level.WARN, "load failures", f"{failures:g} payloads were lost", hint)


def choose(views: Iterator[NodeView], models: set[str]) -> list[NodeView]:
    """A few entries to read, newest first, of models that are served now if there are any."""
    newest = sorted(views, key=lambda view: -view.record.created_ms)
    served = [view for view in newest if view.record.model in models]
    return (served or newest)[:SAMPLE]


def reasons_of(place: Place, views: Sequence[NodeView]) -> list[str | None]:
    """For each entry why its payload is lost, None if it is intact; left out if it is gone."""
    reasons: list[str | None] = []
    for view in views:
        try:
            place.require_store().get(view.record)
            reasons.append(None)
        except PayloadLost as exc:
            if place.index.show(view.record.key) is not None:
                reasons.append(exc.reason)
        except TierUnavailable:
            reasons.append("unreadable")
    return reasons


def _check_masters(
    masters: Sequence[Address], endpoint: Endpoint, timeout_s: float, now_ms: Callable[[], int]
) -> list[Finding]:
    """Every check of each master of a cluster."""
    findings: list[Finding] = []
    for address in masters:
        session, finding = open_session(address, endpoint, timeout_s)
        found = [finding]
        if session is not None:
            try:
                found += check_server(session, now_ms)
            finally:
                session.close()
        findings += [at_server(each, address) for each in found]
    return findings


def _payload_finding(reason: str, message: str, is_all: bool, has_secret: bool) -> Finding:
    level = Level.ERROR if is_all else Level.WARN
    if reason == "forged":
        hint = "check that --secret-file is the same for every server and here"
        return Finding(level, "secret", f"{message}: they carry another secret's tag", hint)
    if reason == "damaged" and not has_secret:
        hint = "give --secret-file: payloads that carry a secret's tag look so without it"
        return Finding(Level.INFO, "payloads", message, hint)
    if reason in ("absent", "unreadable"):
        hint = "check that --shared-path is the folder all servers see; picctl verify --repair"
        return Finding(level, "payloads", message, hint)
    return Finding(level, "payloads", message, "picctl verify --repair")


def _print(console: Console, findings: Sequence[Finding]) -> None:
    width = max(len(finding.check) for finding in findings) + 2
    for finding in findings:
        hint = f" -> {finding.hint}" if finding.hint else ""
        level = Text(f"{finding.level.value:<6}", style=_STYLES[finding.level])
        line = Text(clean(f"{finding.check:<{width}}{finding.message}{hint}"))
        console.print(level + line, soft_wrap=True)


def _now_ms() -> int:
    return int(time.time() * 1e3)


_PROBE = {"pic_delimiter": " picctl doctor ", "pic_store": "none"}
