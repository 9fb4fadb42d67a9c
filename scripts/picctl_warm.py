"""`picctl warm`: has a running server compute and keep the chunks of documents.

Knows where documents come from and how they are packed into prompts. A document is one chunk: what
is computed is found by prompts that have exactly the same text between two delimiters. Does not
know tokens: sizes are characters.

    system text      |system|D|.|                   once, alone, so that it gets no document's ids
    documents        |#|D|doc|D|doc|D|doc|D|.|      of one life cycle, up to `--max-chars`

No document comes first in a prompt: what SGLang's own prefix cache has is not kept a second time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from sglang_ext.errors import ConfigError, ServerFailed
from sglang_ext.scripts.picctl_options import Context
from sglang_ext.scripts.picctl_output import clean, count_of
from sglang_ext.scripts.picctl_server import PicServer

SUFFIXES = (".txt", ".md")
MAX_CHARS = 16_000
MAX_DOCUMENTS = 64
"""Of one prompt; a prompt may have 1024 chunks, and one that fails is sent again in parts."""

OPENING = "#"
"""What a prompt begins with, and what is kept as an entry of a token or two."""

QUERY = "."
"""What a prompt ends with, since its last chunk is never kept."""

_FIELDS = ("text", "doc_id", "ttl_s", "pin")


@dataclass(frozen=True, slots=True)
class Life:
    """What a document says of the chunks that are kept for it.

    Attributes:
        doc_ids: By which it can be invalidated.
        ttl_s: Seconds it lives.
        is_pinned: Never evicted.
    """

    doc_ids: tuple[str, ...] = ()
    ttl_s: float | None = None
    is_pinned: bool = False

    def params(self) -> dict[str, Any]:
        """The same as keys of a request."""
        params: dict[str, Any] = {}
        if self.doc_ids:
            params["pic_doc_ids"] = list(self.doc_ids)
        if self.ttl_s is not None:
            params["pic_ttl_s"] = self.ttl_s
        if self.is_pinned:
            params["pic_pin"] = True
        return params


@dataclass(frozen=True, slots=True)
class Document:
    """A text to be computed.

    Attributes:
        name: Where it comes from, for messages.
        text: All of it; one chunk.
        life: Of what is kept.
    """

    name: str
    text: str
    life: Life = field(default_factory=Life)


@dataclass(frozen=True, slots=True)
class Failed:
    """A document that was not computed, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Tally:
    """What came of documents.

    Attributes:
        num_documents: Computed or found.
        computed_tokens: Tokens computed now, those around the documents included.
        cached_tokens: Tokens that were cached already.
        num_requests: Prompts that were served.
        failures: Documents that were not.
    """

    num_documents: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    num_requests: int = 0
    failures: tuple[Failed, ...] = ()

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.num_documents + other.num_documents,
            self.computed_tokens + other.computed_tokens,
            self.cached_tokens + other.cached_tokens,
            self.num_requests + other.num_requests,
            self.failures + other.failures,
        )


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("warm", parents=[common], help="compute and keep documents")
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="PATH",
        help="a text file, a folder with *.txt and *.md, or a *.jsonl file with an object a line: "
        '{"text": ..., "doc_id": ..., "ttl_s": ..., "pin": ...}',
    )
    parser.add_argument("--delimiter", required=True, help="as --pic-delimiter of the prompts")
    parser.add_argument("--system", metavar="F", help="file with the text before the documents")
    parser.add_argument(
        "--name-files", action="store_true", help="give files their path as document id"
    )
    parser.add_argument("--max-chars", type=int, default=MAX_CHARS, help=f"a prompt, {MAX_CHARS}")
    parser.add_argument("--concurrency", type=int, default=2, metavar="N", help="prompts, 2")
    parser.set_defaults(run=warm)


def warm(args: argparse.Namespace, context: Context) -> int:
    """Send documents to a server; exit code 1 if one failed."""
    options = context.options
    if options.server is None:
        raise ConfigError("--server: got nothing, expected the address of a running server")
    for flag, value in (("--max-chars", args.max_chars), ("--concurrency", args.concurrency)):
        if value < 1:
            raise ConfigError(f"{flag}: got {value}, expected at least 1")
    params = {
        "pic_delimiter": _check_delimiter(args.delimiter),
        "pic_namespace": options.named_namespace,
        "pic_strategy": "reuse",
    }
    sources = [_check_source(Path(source)) for source in args.sources]
    failed: list[Failed] = []
    tally = Tally()
    started = time.monotonic()
    with PicServer(options.server, options.api_key) as server:
        sender = Sender(server, args.delimiter, params)
        if args.system is not None:
            tally += sender.send_system(_read_text(Path(args.system), "--system"))
        documents = _without_failed(read_documents(sources, args.name_files), failed)
        with context.out.progress("warm", total=None) as advance:
            batches = pack(documents, args.max_chars)
            tally += send_all(sender, batches, args.concurrency, advance)
    tally += Tally(failures=tuple(failed))
    seconds = time.monotonic() - started
    document = _document(tally, seconds)
    context.out.result(document, lambda console: _print(console, tally, seconds))
    return 1 if tally.failures else 0


class Sender:
    """Sends prompts to one server; thread-safe."""

    def __init__(self, server: PicServer, delimiter: str, params: dict[str, Any]) -> None:
        self._server = server
        self._delimiter = delimiter
        self._params = params

    def send_system(self, text: str) -> Tally:
        """Have the text that prompts begin with computed, which no document's end shall remove.

        Raises:
            ServerFailed: The server does not answer.
        """
        answer = self._server.generate(self._delimiter.join((text, QUERY)), self._params)
        if answer.report is None or answer.failure is not None:
            return Tally(failures=(Failed("--system", str(answer.failure)),))
        return _counted(answer.report, num_documents=0)

    def send(self, batch: Sequence[Document]) -> Tally:
        """Have documents of one life cycle computed; those of a prompt that fails, one by one."""
        text = self._delimiter.join((OPENING, *(document.text for document in batch), QUERY))
        try:
            answer = self._server.generate(text, {**self._params, **batch[0].life.params()})
        except ServerFailed as exc:
            return _all_failed(batch, str(exc))
        if answer.report is not None and answer.failure is None:
            return _counted(answer.report, len(batch))
        if len(batch) == 1 or answer.refusal is None:
            return _all_failed(batch, str(answer.failure))
        tally = Tally()
        for document in batch:
            tally += self.send([document])
        return tally


def send_all(
    sender: Sender,
    batches: Iterable[Sequence[Document]],
    concurrency: int,
    advance: Callable[[], None],
) -> Tally:
    """Send every batch, that many at once; `advance` is called for each document."""
    tally = Tally()
    waiting: dict[Future[Tally], int] = {}
    with ThreadPoolExecutor(concurrency, "warm") as pool:
        try:
            for batch in batches:
                waiting[pool.submit(sender.send, batch)] = len(batch)
                if len(waiting) >= concurrency:
                    tally += _collect(waiting, advance)
            while waiting:
                tally += _collect(waiting, advance)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return tally


def pack(documents: Iterable[Document], max_chars: int) -> Iterator[list[Document]]:
    """Documents by prompt: neighbours of one life cycle, up to so many characters.

    A document that is longer than that has a prompt of its own.
    """
    batch: list[Document] = []
    num_chars = 0
    for document in documents:
        is_full = num_chars + len(document.text) > max_chars or len(batch) == MAX_DOCUMENTS
        if batch and (is_full or document.life != batch[0].life):
            yield batch
            batch, num_chars = [], 0
        batch.append(document)
        num_chars += len(document.text)
    if batch:
        yield batch


def read_documents(sources: Sequence[Path], name_files: bool) -> Iterator[Document | Failed]:
    """Every document of files and folders, in the order of their names, or why it is none."""
    for source in sources:
        if source.is_dir():
            for path in sorted(source.rglob("*")):
                if path.suffix in SUFFIXES and path.is_file():
                    name = path.relative_to(source).as_posix()
                    yield _read_file(path, name if name_files else None)
        elif source.suffix == ".jsonl":
            yield from _read_lines(source)
        else:
            yield _read_file(source, source.name if name_files else None)


def _without_failed(
    documents: Iterable[Document | Failed], failed: list[Failed]
) -> Iterator[Document]:
    """The documents that could be read; the others are added to `failed`."""
    for document in documents:
        if isinstance(document, Document):
            yield document
        else:
            failed.append(document)


def _read_file(path: Path, doc_id: str | None) -> Document | Failed:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        return Failed(str(path), f"cannot be read: {exc}")
    life = Life() if doc_id is None else Life(doc_ids=(doc_id,))
    return Document(str(path), text, life) if text else Failed(str(path), "it is empty")


def _read_lines(path: Path) -> Iterator[Document | Failed]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _read_line(line, f"{path}:{number}")


def _read_line(line: bytes, name: str) -> Document | Failed:
    """A document of a line of JSON, or what is wrong with it."""
    try:
        content = json.loads(line)
    except ValueError:
        return Failed(name, "no JSON")
    if not isinstance(content, dict):
        return Failed(name, f"got {type(content).__name__}, expected an object")
    unknown = sorted(set(content) - set(_FIELDS))
    if unknown:
        return Failed(name, f"got {unknown[0]!r}, expected {', '.join(_FIELDS)}")
    text, doc_id = content.get("text"), content.get("doc_id")
    ttl_s, pin = content.get("ttl_s"), content.get("pin", False)
    if not isinstance(text, str) or not text:
        return Failed(name, "text: expected a string that is not empty")
    doc_ids = [] if doc_id is None else doc_id if isinstance(doc_id, list) else [doc_id]
    if not all(isinstance(each, str) and each for each in doc_ids):
        return Failed(name, "doc_id: expected a string that is not empty, or a list of them")
    is_number = isinstance(ttl_s, (int, float)) and not isinstance(ttl_s, bool)
    if ttl_s is not None and not (is_number and ttl_s > 0):
        return Failed(name, "ttl_s: expected seconds above 0")
    if not isinstance(pin, bool):
        return Failed(name, "pin: expected true or false")
    return Document(name, text, Life(tuple(doc_ids), ttl_s, pin))


def _collect(waiting: dict[Future[Tally], int], advance: Callable[[], None]) -> Tally:
    """Wait for at least one batch; returns what came of those that ended."""
    done, _ = wait(waiting, return_when=FIRST_COMPLETED)
    tally = Tally()
    for future in done:
        for _ in range(waiting.pop(future)):
            advance()
        tally += future.result()
    return tally


def _counted(report: Any, num_documents: int) -> Tally:
    cached = sum(report[f"{kind}_tokens"] for kind in ("exact", "reused", "recomputed"))
    return Tally(num_documents, report["computed_tokens"], cached, num_requests=1)


def _all_failed(batch: Sequence[Document], reason: str) -> Tally:
    return Tally(failures=tuple(Failed(document.name, reason) for document in batch))


def _document(tally: Tally, seconds: float) -> dict[str, Any]:
    return {
        "documents": tally.num_documents,
        "computed_tokens": tally.computed_tokens,
        "cached_tokens": tally.cached_tokens,
        "requests": tally.num_requests,
        "seconds": round(seconds, 3),
        "failures": [{"document": each.name, "reason": each.reason} for each in tally.failures],
    }


def _print(console: Console, tally: Tally, seconds: float) -> None:
    documents = count_of(tally.num_documents, "document")
    requests = count_of(tally.num_requests, "prompt")
    tokens = f"{tally.computed_tokens} tokens computed, {tally.cached_tokens} cached already"
    console.print(Text(f"{documents} in {requests}: {tokens}, {seconds:.1f} s"), soft_wrap=True)
    for each in tally.failures:
        console.print(Text(clean(f"failed: {each.name}: {each.reason}")), soft_wrap=True)


def _read_text(path: Path, flag: str) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{flag}: cannot read {path}: {exc}") from exc
    if not text:
        raise ConfigError(f"{flag}: got an empty file, expected text")
    return text


def _check_source(path: Path) -> Path:
    if not path.is_dir() and not path.is_file():
        raise ConfigError(f"PATH: got {path}, expected a file or a folder")
    return path


def _check_delimiter(text: str) -> str:
    if not text:
        raise ConfigError("--delimiter: got '', expected a text that is not empty")
    return text
