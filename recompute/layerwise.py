"""What a layerwise strategy is: a plan of three phases over the layers, and a choice of tokens.

Knows layers by number, signals by name and chunks by their spans. Knows nothing of models, KV or
SGLang; `sglang_ext.layerwise` carries a plan out.

    layers      0 ....... w ........... w+p .............. L
    kvdev       WarmUp    Probe         Patch                 w+p layers of every token, then r
                all       all           chosen + query
    qci         WarmUp    Probe                               the query looks ahead and is rewound
                all       query
                          Patch ...........................
                          chosen + query

Source: CacheSmith (arXiv:2610.18925) for the phases, CacheBlend (arXiv:2405.16444) for KV
deviation, ProphetKV for the importance of a token to the query.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from sglang_ext.chunk_index.spans import Span
from sglang_ext.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

_ROUNDING_SLACK = 1e-9


class Signal(StrEnum):
    """What a Probe measures of a context token."""

    KV_DEVIATION = "kvdev"
    """How far its fresh keys and values are from the reused ones."""
    QUERY_IMPORTANCE = "qci"
    """How much the query attends to it."""


class ProbeRows(StrEnum):
    """Which tokens a Probe computes."""

    ALL = "all"
    """Context and query; what it computes is kept."""
    QUERY = "query"
    """The query over the cached context; rewound afterwards."""
    QUERY_ALONE = "query_alone"
    """The query seeing itself only; in its last layer it is compared with the cached context."""


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Phases of one request.

    Attributes:
        signal: What the Probe measures.
        rows: What the Probe computes.
        warmup: w, layers that every token goes through first.
        probe: p, layers the Probe goes through. With rows `ALL` and 0, the keys and values of
            layer w are computed for every token and nothing else of that layer.
        coverage: r, share of the context tokens that the Patch computes, in [0, 1].
        filters: Coverage of the Patch's first layers, each at least the next and at least
            `coverage`: with rows `ALL`, tokens are dropped layer by layer by the deviation
            they show there. Empty for one choice that holds.
    """

    signal: Signal
    rows: ProbeRows
    warmup: int
    probe: int
    coverage: float
    filters: tuple[float, ...] = ()

    @property
    def key(self) -> tuple[Signal, ProbeRows, int, int, int]:
        """Plans with equal keys can share their passes; coverage may differ."""
        return (self.signal, self.rows, self.warmup, self.probe, len(self.filters))

    @property
    def first_patched(self) -> int:
        """The Patch's first layer."""
        return self.warmup + (self.probe if self.rows is ProbeRows.ALL else 0)

    def check(self, num_layers: int) -> None:
        """See that the phases fit a model, and that the Probe can tell tokens apart.

        Raises:
            RequestError: They do not; names the key, what was got and what is expected.
        """
        w, p = self.warmup, self.probe
        if not 0 <= w <= num_layers:
            raise RequestError("pic_warmup", w, f"0 to {num_layers} layers")
        if not 0 <= p <= num_layers - w:
            expected = f"0 to {num_layers - w} layers behind a warm-up of {w}"
            raise RequestError("pic_probe", p, expected)
        if self.coverage in (0.0, 1.0) or w == num_layers:
            return
        if self.rows is not ProbeRows.ALL and p < 1:
            raise RequestError("pic_probe", p, "at least 1 layer of the query")
        if self.rows is ProbeRows.ALL and w + max(p, 1) < 2:
            expected = (
                f"with a warm-up of {w} at least {2 - w} layers: layer 0 sees no context, "
                "so nothing deviates there"
            )
            raise RequestError("pic_probe", p, expected)

    def coverage_of(self, layer: int) -> float:
        """Share of the context that the Patch computes in a layer."""
        step = layer - self.first_patched
        return self.filters[step] if 0 <= step < len(self.filters) else self.coverage

    def share(self, num_layers: int, num_context: int, num_query: int) -> float:
        """Recomputed share: context tokens computed, summed over layers, of all there are.

        WarmUp layers and Probe layers with rows `ALL` compute every token, other Probes none.

        Args:
            num_layers: L.
            num_context: Context tokens, at least 1.
            num_query: Query tokens; they are no context.
        """
        full = self.first_patched * num_context
        patched = sum(
            count_covered(self.coverage_of(layer), num_context)
            for layer in range(self.first_patched, num_layers)
        )
        return (full + patched) / (num_layers * num_context)


@dataclass(frozen=True, slots=True)
class LayerwiseParams:
    """What a request may choose; None leaves it to the strategy.

    Attributes:
        warmup: w, at least 0.
        probe: p, at least 0.
        coverage: r, in [0, 1].
        is_gradual: Drop tokens over several layers instead of at once (kvdev, cacheblend).
    """

    warmup: int | None = None
    probe: int | None = None
    coverage: float | None = None
    is_gradual: bool = False


@dataclass(frozen=True, slots=True)
class Scored:
    """A prompt's context as its Probe saw it.

    Attributes:
        scores: `[num_candidates]` float32, higher is dearer; on the model's device.
        columns: `[num_candidates]` int64 ascending, where the tokens stand in the prompt.
        chunks: Spans of the prompt's chunks; the last is the query.
        plan: The phases.
    """

    scores: Tensor
    columns: Tensor
    chunks: Sequence[Span]
    plan: LayerPlan


class LayerwiseStrategy:
    """A way to choose tokens by what the model sees; one subclass, one file.

    Subclasses set `base`, the plan where a request chooses nothing, and may override `choose`.
    """

    base: LayerPlan

    def plan(self, params: LayerwiseParams, num_layers: int) -> LayerPlan:
        """The phases for a request.

        Raises:
            RequestError: What the request chose does not fit the model.
        """
        base = self.base
        plan = replace(
            base,
            warmup=base.warmup if params.warmup is None else params.warmup,
            probe=base.probe if params.probe is None else params.probe,
            coverage=base.coverage if params.coverage is None else params.coverage,
        )
        if params.is_gradual and plan.rows is ProbeRows.ALL:
            plan = replace(plan, filters=gradual_filters(plan.coverage))
        plan.check(num_layers)
        return plan

    def choose(self, scored: Scored, count: int) -> Tensor:
        """Which candidates the Patch computes.

        Args:
            scored: The context and its scores.
            count: How many, at most the candidates there are.

        Returns:
            `[count]` int64 ascending, indices of candidates. A pure function of its arguments.
        """
        from sglang_ext.recompute.signals import top_tokens

        return top_tokens(scored.scores, count)


def gradual_filters(coverage: float) -> tuple[float, ...]:
    """Coverage of the first Patch layers when tokens are dropped bit by bit: 1.6, 1.4, 1.2 r.

    Source: CacheBlend (arXiv:2405.16444), §4.3: a few more tokens than wanted are taken at first
    and the choice is narrowed where deeper layers agree. It gives no numbers; these are ours.
    """
    return tuple(min(1.0, coverage * factor) for factor in (1.6, 1.4, 1.2))


def count_covered(coverage: float, num_tokens: int) -> int:
    """Whole tokens of a coverage in [0, 1]: rounded up, so that any coverage above 0 chooses."""
    return min(num_tokens, math.ceil(coverage * num_tokens - _ROUNDING_SLACK))
