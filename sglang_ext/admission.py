"""Admits PIC requests whole, and keeps them apart from requests their batch could not serve.

Knows SGLang's prefill adder. Does not decide anything about chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.extend import active_task, settle


def make_adder_class(base: Any, is_waiting: Callable[[Any], bool]) -> type:
    """A subclass of SGLang's PrefillAdder that knows PIC requests.

    `is_waiting` tells of a request whose cached KV is on its way; it stays in the queue.

    A PIC request is not cut by `chunked_prefill_size`: most of its tokens are not computed, and
    its passes are split later by what they really compute. Requests that need something from
    every prompt token, such as input logprobs, wait for a batch without PIC.
    """

    class PicPrefillAdder(base):  # type: ignore[misc]
        """PrefillAdder with PIC admission."""

        rem_chunk_tokens: int | None

        def add_one_req(self, req: Any, *args: Any, **kwargs: Any) -> Any:
            """Admit one request; see PrefillAdder."""
            settle(req)
            if is_waiting(req):
                return _skip()
            is_pic = active_task(req) is not None
            has_pic = any(active_task(other) is not None for other in self.can_run_list)
            if is_pic and not all(map(_shares_batch, self.can_run_list)):
                return _skip()
            if has_pic and not _shares_batch(req):
                return _skip()
            if not is_pic:
                return super().add_one_req(req, *args, **kwargs)
            num_admitted = len(self.can_run_list)
            chunk_tokens, self.rem_chunk_tokens = self.rem_chunk_tokens, None
            try:
                result = super().add_one_req(req, *args, **kwargs)
            finally:
                self.rem_chunk_tokens = chunk_tokens
            return self.budget_state() if len(self.can_run_list) > num_admitted else result

    return PicPrefillAdder


def _skip() -> Any:
    """Leave the request in the queue and look at the next."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    return AddReqResult.CONTINUE


def _shares_batch(req: Any) -> bool:
    """Whether a request needs nothing but its last token's logits from an extend."""
    if active_task(req) is not None:
        return True
    return not (
        (req.return_logprob and req.logprob_start_len >= 0)
        or req.return_hidden_states
        or req.return_routed_experts
        or req.return_indexer_topk
        or req.multimodal_inputs is not None
        or req.input_embeds is not None
        or req.positional_embed_overrides is not None
        or req.token_indices_to_pool is not None
        or req.multi_item_delimiter_indices is not None
        or req.lora_id is not None
        or req.beam_group is not None
    )
