"""KV deviation: compute again the tokens whose keys and values change most in context."""

from __future__ import annotations

from sglang_ext.recompute.layerwise import LayerPlan, LayerwiseStrategy, ProbeRows, Signal


class KvDeviation(LayerwiseStrategy):
    """WarmUp, a Probe that adds up deviations, then the tokens that deviate most.

    The default is the point CacheSmith (arXiv:2610.18925) finds strong under a tight budget.
    """

    base = LayerPlan(Signal.KV_DEVIATION, ProbeRows.ALL, warmup=4, probe=2, coverage=0.05)
