"""Swaps the harness's cache for one with lower tiers, as a server with those options has it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from sglang_ext.config import config_from_args
from sglang_ext.tiers import start_tiers
from tests.harness import Harness

PATIENCE_S = 20.0


@contextmanager
def tiered(harness: Harness, *, are_used: bool = True, **options: Any) -> Iterator[Any]:
    """Serve with the cache that `--pic-*` options give, named without `pic_`, for a while.

    Waits first until all lower tiers are used, unless `are_used` is false.
    """
    runtime = harness.runtime
    ours = config_from_args({"enable_pic": True, **{f"pic_{k}": v for k, v in options.items()}})
    assert ours is not None
    old_config, old_tiers = runtime._config, runtime.tiers
    runtime._config = replace(old_config, index=ours.index)
    tiers = start_tiers(ours.index, harness.pool, lambda: runtime._model)
    cache = tiers.cache
    cache.when_loaded(runtime._has_loaded.set)
    _use(runtime, tiers)
    try:
        if are_used:
            wait_until(lambda: all(lower.cost.is_known for lower in cache.lower))
        yield cache
        settle_writes(cache)
        harness.settle()
    finally:
        tiers.close()
        runtime._config = old_config
        _use(runtime, old_tiers)


def _use(runtime: Any, tiers: Any) -> None:
    runtime.tiers, runtime._executor._cache = tiers, tiers.cache
    runtime._root_of.cache_clear()
    runtime._owner_of.cache_clear()


def settle_writes(cache: Any) -> None:
    """Wait until everything offered to lower tiers is written."""
    wait_until(lambda: all(lower.writes.num_bytes == 0 for lower in cache.lower))


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll a condition that another thread or process brings about."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "not so after 20 s"
        time.sleep(0.005)
