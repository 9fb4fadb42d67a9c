"""FusionRAG: a pilot of the query alone, compared with the context in its last layer."""

from __future__ import annotations

from dataclasses import replace

from sglang_ext.recompute.layerwise import (
    LayerPlan,
    LayerwiseParams,
    LayerwiseStrategy,
    ProbeRows,
    Signal,
)


class FusionRag(LayerwiseStrategy):
    """The query goes through every layer without context; its last layer's attention decides.

    Only the online part: the offline fusion of similar chunks' KV is not done here.
    Source: FusionRAG, as compared with in CacheSmith (arXiv:2610.18925).
    """

    base = LayerPlan(
        Signal.QUERY_IMPORTANCE, ProbeRows.QUERY_ALONE, warmup=0, probe=0, coverage=0.15
    )

    def plan(self, params: LayerwiseParams, num_layers: int) -> LayerPlan:
        """As for the others; the pilot takes every layer unless the request says otherwise."""
        probe = num_layers - (params.warmup or 0) if params.probe is None else params.probe
        return super().plan(replace(params, probe=probe), num_layers)
