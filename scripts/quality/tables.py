"""The quality lab's rows as tables on a terminal and as plots.

Knows what a reader looks for. Does not know how anything was measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rich.table import Table

from sglang_ext.scripts.quality.arms import FULL, REUSE
from sglang_ext.scripts.quality.lab import CONTROL, Row, Verdict

LEVELS: Mapping[str, str] = MappingProxyType(
    {FULL.strategy: "-", REUSE.strategy: "--", CONTROL: ":"}
)
"""Line styles of what is a level in a plot, and no line of its own."""
REFERENCES = tuple(LEVELS)
APART = 0.0016
"""Recomputed share between one strategy's line and the next."""
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink")


class Point(NamedTuple):
    """An arm in a plot: the mean over tasks."""

    strategy: str
    """The arm's."""
    budget: str
    """The arm's label."""
    share: float
    """Recomputed share, in [0, 1]."""
    value: float
    """Share of full prefill's score that is kept, say."""
    below: float
    """Length of the interval below the value, at least 0."""
    above: float
    """Length of the interval above it, at least 0."""


def make_tables(rows: Sequence[Row]) -> list[Table]:
    """A table for each task, an arm to a line."""
    return [
        _make_table(task, [row for row in rows if row.task == task])
        for task in dict.fromkeys(row.task for row in rows)
    ]


def make_verdict_table(verdicts: Sequence[Verdict]) -> Table:
    """How many numbers were judged, and those that failed."""
    num_failed = sum(not verdict.passed for verdict in verdicts)
    table = Table(title=f"{len(verdicts)} numbers have a limit, {num_failed} of them are beyond it")
    for name in ("task", "strategy", "budget", "number"):
        table.add_column(name)
    for name in ("value", "limit"):
        table.add_column(name, justify="right")
    for verdict in verdicts:
        if not verdict.passed:
            table.add_row(*verdict[:4], f"{verdict.value:.3f}", f"{verdict.limit:.3f}")
    return table


def mean_points(rows: Iterable[Row]) -> list[Point]:
    """Share of the score kept by each arm, mean over the tasks where full prefill scores.

    The interval is that of a mean of independent tasks: the root of the sum of the squares of
    their lengths on that side, by the number of tasks.
    """
    cells: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.kept is not None and row.kept_ci95 is not None and row.strategy != CONTROL:
            cells.setdefault((row.strategy, row.budget), []).append(row)
    points: list[Point] = []
    for (strategy, budget), own in cells.items():
        kept = [row.kept or 0.0 for row in own]
        ends = [row.kept_ci95 or (0.0, 0.0) for row in own]
        below = math.hypot(*(max(0.0, k - low) for k, (low, _) in zip(kept, ends, strict=True)))
        above = math.hypot(*(max(0.0, high - k) for k, (_, high) in zip(kept, ends, strict=True)))
        share = statistics.fmean(row.recomputed_share for row in own)
        value, num = statistics.fmean(kept), len(own)
        points.append(Point(strategy, budget, share, value, below / num, above / num))
    return points


def pareto_front(points: Iterable[Point]) -> list[Point]:
    """The points that no other beats: every one with as little share keeps less. By share."""
    front: list[Point] = []
    for point in sorted(points, key=lambda point: (point.share, -point.value)):
        if not front or point.value > front[-1].value:
            front.append(point)
    return front


def plot_all(rows: Sequence[Row], stem: Path) -> list[Path]:
    """Write the plots.

    Args:
        rows: Of any tasks; none makes no plot.
        stem: Plots lie beside it and are called as it, with what they show behind: `x-pareto.png`.

    Returns:
        The files written.
    """
    points = mean_points(rows)
    has_kl = any(row.kl_first_token is not None for row in rows if row.strategy not in REFERENCES)
    plots: list[tuple[str, Callable[[Any, Path], None]]] = []
    if points:
        plots.append(("pareto", lambda pyplot, path: _plot_pareto(pyplot, points, rows, path)))
        plots.append(("tasks", lambda pyplot, path: _plot_tasks(pyplot, rows, path)))
    if has_kl:
        plots.append(("kl", lambda pyplot, path: _plot_kl(pyplot, rows, path)))
    if not plots:
        return []
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    written: list[Path] = []
    for name, plot in plots:
        path = stem.with_name(f"{stem.name}-{name}.png")
        plot(pyplot, path)
        written.append(path)
    return written


def _make_table(task: str, rows: Sequence[Row]) -> Table:
    chunks = round(statistics.median(row.chunks for row in rows))
    compared = max(row.kl_n for row in rows)
    table = Table(
        title=f"{task}, {chunks} chunks, {max(row.n for row in rows)} prompts",
        caption=f"95 % intervals; KL and ppl gap in nats, of {compared} prompts",
    )
    for name in ("strategy", "budget"):
        table.add_column(name, no_wrap=True)
    for name in ("share", "score", "kept", "regained", "KL", "ppl gap", "agreement", "TTFT"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.strategy,
            row.budget,
            f"{row.recomputed_share:.1%}",
            f"{row.score:.3f}",
            _with_interval(row.kept, row.kept_ci95),
            _with_interval(row.regained, row.regained_ci95),
            _number(row.kl_first_token, 4),
            _number(row.ppl_gap, 3),
            f"{row.agreement:.2f}",
            f"{row.ttft_ratio:.1f}x",
        )
    return table


def _with_interval(value: float | None, ends: tuple[float, float] | None) -> str:
    if value is None or ends is None:
        return "-"
    return f"{value:.2f} [{ends[0]:.2f}, {ends[1]:.2f}]"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _lines(points: Iterable[Point]) -> dict[str, list[Point]]:
    """Points by strategy, each by share; the references are no lines."""
    lines: dict[str, list[Point]] = {}
    for point in sorted(points, key=lambda point: (point.strategy, point.share)):
        if point.strategy not in REFERENCES:
            lines.setdefault(point.strategy, []).append(point)
    return lines


def _plot_pareto(pyplot: Any, points: Sequence[Point], rows: Sequence[Row], path: Path) -> None:
    """Score kept over recomputed share, mean over tasks."""
    figure, axes = pyplot.subplots(figsize=(8, 4.8), layout="constrained")
    _draw(axes, points)
    front = pareto_front(point for point in points if point.strategy != FULL.strategy)
    shares, values = [point.share for point in front], [point.value for point in front]
    axes.step(shares, values, where="post", color="0.75", linewidth=5, label="front", zorder=0)
    tasks = dict.fromkeys(row.task for row in rows if row.kept is not None)
    axes.set_title(f"{rows[0].model}: mean of {', '.join(tasks)}", fontsize="medium")
    axes.set_ylabel("score kept, of full prefill")
    figure.legend(loc="outside right upper", fontsize="small")
    _save(pyplot, figure, path)


def _plot_tasks(pyplot: Any, rows: Sequence[Row], path: Path) -> None:
    """The same for each task by itself."""
    tasks = list(dict.fromkeys(row.task for row in rows if row.kept is not None))
    width = math.ceil(math.sqrt(len(tasks)))
    height = math.ceil(len(tasks) / width)
    figure, grid = pyplot.subplots(
        height,
        width,
        figsize=(4.4 * width + 1.2, 3.4 * height),
        layout="constrained",
        squeeze=False,
    )
    for axes in grid.flat[len(tasks) :]:
        axes.set_visible(False)
    for task, axes in zip(tasks, grid.flat, strict=False):
        _draw(axes, mean_points(row for row in rows if row.task == task))
        axes.set_title(task, fontsize="medium")
        axes.set_ylabel("score kept")
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside right upper")
    _save(pyplot, figure, path)


def _plot_kl(pyplot: Any, rows: Sequence[Row], path: Path) -> None:
    """First-token KL over recomputed share, mean over tasks."""
    cells: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.kl_first_token is not None and row.strategy != FULL.strategy:
            cells.setdefault((row.strategy, row.budget), []).append(row)
    points = [
        Point(
            *arm,
            share=statistics.fmean(row.recomputed_share for row in own),
            value=statistics.fmean(row.kl_first_token or 0.0 for row in own),
            below=0.0,
            above=0.0,
        )
        for arm, own in cells.items()
    ]
    figure, axes = pyplot.subplots(figsize=(8, 4.8), layout="constrained")
    _draw(axes, points)
    axes.set_ylabel("mean first-token KL to full prefill, nats")
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside right upper", fontsize="small")
    _save(pyplot, figure, path)


def _draw(axes: Any, points: Sequence[Point]) -> None:
    """A line for each strategy from reuse on, with intervals; references as levels.

    Lines are set apart by a fraction of a percent, so that intervals can be told from each other.
    """
    lines = _lines(points)
    references = {point.strategy: point for point in points if point.strategy in REFERENCES}
    reuse: list[Point] = []
    if REUSE.strategy in references:
        start = references[REUSE.strategy]
        reuse = [start._replace(below=0.0, above=0.0)]
        ends = [[start.below], [start.above]]
        axes.errorbar([start.share], [start.value], ends, color="0.4", capsize=2, elinewidth=0.7)
    for index, (strategy, own) in enumerate(lines.items()):
        aside = APART * (index - (len(lines) - 1) / 2)
        line = [*reuse, *(point._replace(share=point.share + aside) for point in own)]
        axes.errorbar(
            [point.share for point in line],
            [point.value for point in line],
            [[point.below for point in line], [point.above for point in line]],
            fmt="o-",
            color=COLOURS[index % len(COLOURS)],
            label=strategy,
            markersize=4,
            capsize=2,
            linewidth=1.2,
            elinewidth=0.7,
        )
    for strategy, point in references.items():
        style = LEVELS[strategy]
        axes.axhline(point.value, color="0.4", linestyle=style, linewidth=0.8, label=strategy)
    axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:.3g}%")
    axes.set_xlabel("recomputed share of the cached tokens")


def _save(pyplot: Any, figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
