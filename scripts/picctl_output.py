"""What `picctl` prints: one JSON document, or text for people.

Knows consoles, units and how text from elsewhere is made harmless. Does not know what is shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

WIDTH = 160
"""Columns where the output is no terminal."""

_SIZES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_TIMES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))

Advance = Callable[[], None]


class Output:
    """Results go to `stdout`, all else to `stderr`; with JSON nothing but the document."""

    def __init__(self, stdout: TextIO, stderr: TextIO, *, is_json: bool) -> None:
        self.is_json = is_json
        self.console = _make_console(stdout)
        self._stdout = stdout
        self._notes = _make_console(stderr)

    def result(self, document: Mapping[str, Any], render: Callable[[Console], None]) -> None:
        """Print what a command found or did: the document, or what `render` makes of it."""
        if self.is_json:
            self._stdout.write(json.dumps(document) + "\n")
            self._stdout.flush()
        else:
            render(self.console)

    def failure(self, message: str) -> None:
        """Print why a command failed, in one line."""
        line = clean(" ".join(message.split()))
        if self.is_json:
            self._stdout.write(json.dumps({"error": line}) + "\n")
            self._stdout.flush()
        else:
            self._notes.print(Text(f"picctl: {line}"), soft_wrap=True)

    def note(self, message: str) -> None:
        """Print a line beside the result, for people only."""
        if not self.is_json:
            self._notes.print(Text(clean(message)), soft_wrap=True)

    @contextmanager
    def progress(self, what: str, total: int | None) -> Iterator[Advance]:
        """Show how far long work is; the function given counts one step.

        Shown only on a terminal, and never with JSON.
        """
        is_hidden = self.is_json or not self._notes.is_terminal
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(
            *columns, TimeElapsedColumn(), console=self._notes, transient=True, disable=is_hidden
        ) as bar:
            task = bar.add_task(what, total=total)
            yield lambda: bar.advance(task)


def make_table(*titles: str, left: int = 1) -> Table:
    """A table whose first `left` columns are text, and the others numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, title in enumerate(titles):
        justify: Any = "left" if place < left else "right"
        table.add_column(title, justify=justify, no_wrap=True)
    return table


def add_row(table: Table, *cells: object) -> None:
    """A row of plain text, in which nothing is markup and nothing steers the terminal."""
    table.add_row(*[Text("-" if cell is None else clean(str(cell))) for cell in cells])


def print_facts(console: Console, facts: Mapping[str, object]) -> None:
    """One fact a line: its name and its value."""
    width = max(map(len, facts), default=0) + 2
    for name, value in facts.items():
        text = "-" if value is None else clean(str(value))
        console.print(Text(f"{name:<{width}}{text}"), soft_wrap=True)


def clean(text: str) -> str:
    """Text in which what cannot be printed is written as an escape."""
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def format_bytes(num_bytes: int | None) -> str:
    """Such as `1.2 GiB`; `-` for None."""
    if num_bytes is None:
        return "-"
    for size, unit in _SIZES:
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"


def format_seconds(seconds: float | None) -> str:
    """Such as `45 s`, `2.5 h`; `-` for None."""
    if seconds is None:
        return "-"
    for size, unit in _TIMES:
        if abs(seconds) >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def count_of(number: int, one: str, many: str | None = None) -> str:
    """Such as `1 entry`, `3 entries`."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def _make_console(file: TextIO) -> Console:
    width = None if file.isatty() else WIDTH
    return Console(file=file, highlight=False, width=width)


def _escape(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")
