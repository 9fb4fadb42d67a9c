"""Arms of the quality lab: a strategy and what it may recompute, as a value.

Knows how an arm is written, named and asked for. Does not know prompts, servers or scores.

    written                 recomputes
    reuse                   nothing
    daric:16  epic:16       16 tokens a chunk on average
    kvdev:1,1,2%            w, p, r: layers of WarmUp and Probe, then the share of the context
    cacheblend:1,0,0.05     the same; a share is a number or percent
    qci:1,8,5%              the same
    prophetkv:8%            r alone: the query looks ahead through every layer
    fusionrag:8%            the same
    full                    everything

How many layers there are is the model's affair: phases that do not fit it are the server's to
refuse.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from sglang_ext.errors import ConfigError
from sglang_ext.recompute.selection import PRIOR_STRATEGIES
from sglang_ext.recompute.strategies.registry import LAYERWISE_STRATEGIES

WITHOUT_BUDGET = ("reuse", "full")
"""Strategies that nothing is chosen for."""

COVERAGE_ONLY = ("prophetkv", "fusionrag")
"""Layerwise strategies whose phases follow from the model."""

MAX_SHARE = 1.0
"""`pic_max_share` of every request: a budget is what it says, on short prompts too."""


class Phases(NamedTuple):
    """Layers of a layerwise arm."""

    warmup: int
    """w, at least 0."""
    probe: int
    """p, at least 0."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to serve a prompt.

    Attributes:
        strategy: A value of `pic_strategy`.
        n_avg: Tokens a chunk, at least 1 for daric and epic, else 0.
        phases: Of kvdev, cacheblend and qci; None for the others.
        coverage: r, above 0 and below 1, of layerwise strategies; None for the others.
    """

    strategy: str
    n_avg: int = 0
    phases: Phases | None = None
    coverage: float | None = None

    @property
    def budget(self) -> str:
        """Short label, such as `n_avg=16`, `1,8,15%`, `8%`, or nothing."""
        if self.n_avg:
            return f"n_avg={self.n_avg}"
        if self.coverage is None:
            return ""
        share = f"{100 * self.coverage:.6g}%"
        return share if self.phases is None else f"{self.phases.warmup},{self.phases.probe},{share}"

    @property
    def label(self) -> str:
        """The arm as `parse_arm` reads it."""
        budget = self.budget.removeprefix("n_avg=")
        return f"{self.strategy}:{budget}" if budget else self.strategy

    @property
    def params(self) -> dict[str, Any]:
        """What the arm adds to a request's `custom_params`."""
        params: dict[str, Any] = {"pic_strategy": self.strategy}
        if self.n_avg:
            params |= {"pic_n_avg": self.n_avg, "pic_max_share": MAX_SHARE}
        if self.coverage is not None:
            params["pic_coverage"] = self.coverage
        if self.phases is not None:
            params |= {"pic_warmup": self.phases.warmup, "pic_probe": self.phases.probe}
        return params


FULL, REUSE = Arm("full"), Arm("reuse")


def parse_arm(text: str) -> Arm:
    """Read one arm, written as in the module's docstring.

    Raises:
        ConfigError: It cannot be read; the message says what was got and what is expected.
    """
    strategy, _, budget = text.partition(":")
    if strategy not in PRIOR_STRATEGIES and strategy not in LAYERWISE_STRATEGIES:
        known = ", ".join((*PRIOR_STRATEGIES, *LAYERWISE_STRATEGIES))
        raise ConfigError(f"arm {text!r}: got strategy {strategy!r}, expected one of {known}")
    if strategy in WITHOUT_BUDGET:
        if text != strategy:
            raise ConfigError(f"arm {text!r}: expected {strategy} with nothing behind it")
        return Arm(strategy)
    if strategy in PRIOR_STRATEGIES:
        return Arm(strategy, n_avg=_count(text, "N", budget, f"{strategy}:N", least=1))
    form = f"{strategy}:R" if strategy in COVERAGE_ONLY else f"{strategy}:W,P,R"
    *layers, coverage = budget.split(",")
    if len(layers) != (0 if strategy in COVERAGE_ONLY else 2):
        raise ConfigError(f"arm {text!r}: got {budget!r}, expected {form}")
    phases = None
    if layers:
        warmup, probe = layers
        phases = Phases(_count(text, "W", warmup, form), _count(text, "P", probe, form))
    return Arm(strategy, phases=phases, coverage=_share(text, coverage, form))


def parse_arms(texts: Iterable[str]) -> tuple[Arm, ...]:
    """Read arms, several to a text with blanks between them, each once.

    `reuse` comes first, asked for or not: the others are compared with it. `full` is left out:
    whatever is measured is measured against it.

    Raises:
        ConfigError: One cannot be read, or there is none.
    """
    arms = [parse_arm(text) for part in texts for text in part.split()]
    if not arms:
        raise ConfigError("arms: got none, expected one or more, such as daric:16")
    return tuple(arm for arm in dict.fromkeys((REUSE, *arms)) if arm != FULL)


def _count(text: str, name: str, got: str, form: str, least: int = 0) -> int:
    if not (got.isascii() and got.isdigit()) or int(got) < least:
        expected = f"{form} with {name} an integer of at least {least}"
        raise ConfigError(f"arm {text!r}: {name}: got {got!r}, expected {expected}")
    return int(got)


def _share(text: str, got: str, form: str) -> float:
    try:
        share = round(float(got.removesuffix("%")) / (100 if got.endswith("%") else 1), 9)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        expected = f"{form} with R a share above 0 and below 1, such as 0.15 or 15%"
        raise ConfigError(f"arm {text!r}: R: got {got!r}, expected {expected}")
    return share


DEFAULT_ARMS = parse_arms(
    (
        "reuse",
        "daric:8 daric:20",
        "epic:8 epic:20",
        "kvdev:1,1,2% kvdev:2,2,8%",
        "cacheblend:1,0,5% cacheblend:1,0,17%",
        "qci:1,8,5% qci:1,8,17%",
        "prophetkv:8% prophetkv:20%",
    )
)
"""Each strategy with about 8 and about 20 % recomputed share: 16 chunks of 90 tokens, 30 layers.

Of L layers, kvdev computes `((w + p) + (L - w - p) r) / L`, qci `(w + (L - w) r) / L`, cacheblend
as kvdev without p, prophetkv r; daric and epic `n_avg` of the tokens of a chunk.
"""
