"""Query-context importance: compute again the tokens the query attends to."""

from __future__ import annotations

from sglang_ext.recompute.layerwise import LayerPlan, LayerwiseStrategy, ProbeRows, Signal


class QueryImportance(LayerwiseStrategy):
    """One layer for every token, eight of the query alone, then what it attended to.

    Source: CacheSmith (arXiv:2610.18925).
    """

    base = LayerPlan(Signal.QUERY_IMPORTANCE, ProbeRows.QUERY, warmup=1, probe=8, coverage=0.15)
