"""Layerwise strategies by the name a request gives in `pic_strategy`. One line each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sglang_ext.recompute.layerwise import LayerwiseStrategy
from sglang_ext.recompute.strategies.cacheblend import CacheBlend
from sglang_ext.recompute.strategies.fusionrag import FusionRag
from sglang_ext.recompute.strategies.kvdev import KvDeviation
from sglang_ext.recompute.strategies.prophetkv import ProphetKV
from sglang_ext.recompute.strategies.qci import QueryImportance

LAYERWISE_STRATEGIES: Mapping[str, LayerwiseStrategy] = MappingProxyType(
    {
        "kvdev": KvDeviation(),
        "qci": QueryImportance(),
        "cacheblend": CacheBlend(),
        "prophetkv": ProphetKV(),
        "fusionrag": FusionRag(),
    }
)
