"""CacheBlend: rank once, by the deviation of keys and values in layer 1."""

from __future__ import annotations

from sglang_ext.recompute.layerwise import LayerPlan, LayerwiseStrategy, ProbeRows, Signal


class CacheBlend(LayerwiseStrategy):
    """One layer for every token, keys and values of the next, then 15 % of the tokens.

    Source: CacheBlend (arXiv:2405.16444); (kvdev, 1, 0, 15 %) in the terms of CacheSmith.
    """

    base = LayerPlan(Signal.KV_DEVIATION, ProbeRows.ALL, warmup=1, probe=0, coverage=0.15)
