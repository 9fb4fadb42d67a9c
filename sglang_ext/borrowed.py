"""A batch of our own making, for computing something that nobody has asked for.

Knows how SGLang builds a request and a batch, and gives back what they hold. Knows nothing of what
is computed. The request matches nothing in SGLang's prefix tree and leaves nothing there.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor

RID = "pic-borrowed"


@contextmanager
def borrowed_batch(
    scheduler: Any, token_ids: np.ndarray[Any, np.dtype[np.int64]]
) -> Iterator[tuple[Any, Tensor]]:
    """An extend batch of one made-up request with slots of its own; given back at the end.

    Args:
        scheduler: SGLang's scheduler, between batches, with that many slots free.
        token_ids: `[num_tokens]` int64, at least 1.

    Yields:
        The ScheduleBatch, and its slots, `[num_tokens]` int64 on device.
    """
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.common import release_kv_cache
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=1, temperature=0.0)
    params.normalize(None)
    vocab, ids = scheduler.model_config.vocab_size, array("q", token_ids.tolist())
    req = Req(RID, "", ids, params, vocab_size=vocab, extra_key=RID)
    req.skip_radix_cache_insert = True
    req.init_next_round_input(scheduler.tree_cache)
    req.extend_end = len(token_ids)
    req.lock = scheduler.tree_cache.lock(req.last_node)
    batch = ScheduleBatch.init_new(
        [req],
        scheduler.req_to_token_pool,
        scheduler.token_to_kv_pool_allocator,
        scheduler.tree_cache,
        scheduler.model_config,
        scheduler.enable_overlap,
        scheduler.spec_algorithm,
    )
    batch.prepare_for_extend()
    try:
        table = scheduler.req_to_token_pool.req_to_token
        yield batch, table[req.kv.req_pool_idx, : len(token_ids)].long()
    finally:
        release_kv_cache(req, scheduler.tree_cache, checkpoint=False)
