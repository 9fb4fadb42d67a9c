"""ProphetKV: the query looks ahead through every layer, then a second pass computes."""

from __future__ import annotations

from dataclasses import replace

from sglang_ext.recompute.layerwise import (
    LayerPlan,
    LayerwiseParams,
    LayerwiseStrategy,
    ProbeRows,
    Signal,
)


class ProphetKV(LayerwiseStrategy):
    """The mean over all layers decides, 20 % of the tokens.

    Source: ProphetKV; (qci, 0, L, 20 %) in the terms of CacheSmith (arXiv:2610.18925).
    """

    base = LayerPlan(Signal.QUERY_IMPORTANCE, ProbeRows.QUERY, warmup=0, probe=0, coverage=0.20)

    def plan(self, params: LayerwiseParams, num_layers: int) -> LayerPlan:
        """As for the others; the Probe takes every layer unless the request says otherwise."""
        probe = num_layers - (params.warmup or 0) if params.probe is None else params.probe
        return super().plan(replace(params, probe=probe), num_layers)
