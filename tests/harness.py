"""A real SGLang scheduler with the real model inside the test process.

Requests enter where the scheduler receives them, batches run through the scheduler's own steps, so
that a test can look at logits, KV, pins and slots, and break things on purpose, which a server
behind HTTP does not allow. What HTTP adds is tested in `integration/test_server.py`.
"""

from __future__ import annotations

import os
import uuid
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sglang_ext.rows import PassLimits


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        ids: Token ids of the prompt.
        params: Its `custom_params`.
        max_new_tokens: Tokens to generate.
        fields: Further fields of SGLang's request.
    """

    ids: Sequence[int]
    params: dict[str, Any] | None = None
    max_new_tokens: int = 1
    fields: dict[str, Any] | None = None


@dataclass(frozen=True)
class Answer:
    """What one request got.

    Attributes:
        logits: `[vocab]` float32 of the first token.
        kv: `[layers, 2, prompt, heads, dim]` of the prompt when the first token was sampled.
        output_ids: Generated tokens.
        report: `meta_info["pic"]`.
        cached_tokens: SGLang's own count of the exact prefix.
        finished_reason: SGLang's.
        batch_size: Requests that shared the prefill's batch.
    """

    logits: Tensor
    kv: Tensor
    output_ids: tuple[int, ...]
    report: dict[str, Any]
    cached_tokens: int
    finished_reason: Any
    batch_size: int


class Harness:
    """One scheduler; see the module's docstring."""

    def __init__(self, model: str, **options: Any) -> None:
        os.environ["SGLANG_PIC_ENABLED"] = os.environ["SGLANG_EAGER_INPUT_NO_COPY"] = "1"
        import sglang.srt.managers.scheduler  # noqa: F401  (the plugin looks for it)
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.plugins import load_plugins
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import PortArgs, ServerArgs

        from sglang_ext.config import config_from_args

        load_plugins()
        ours = {key: options.pop(key) for key in list(options) if key.startswith("pic_")}
        server_args = ServerArgs(
            model_path=model, device="cpu", disable_overlap_schedule=True, **options
        )
        server_args._pic_options = config_from_args({"enable_pic": True, **ours})
        server_args.resolve_once()
        publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        self.scheduler = Scheduler(server_args, PortArgs.init_new(server_args))
        self.server_args = server_args
        self.pool = self.runtime._executor._pool
        self._prefills: dict[str, tuple[Tensor, Tensor, int]] = {}

    @property
    def runtime(self) -> Any:
        return self.scheduler.pic_runtime

    @property
    def cache(self) -> Any:
        return self.runtime.cache

    def ask(self, ids: Sequence[int], params: dict[str, Any] | None = None, **more: Any) -> Answer:
        """One request alone."""
        return self.ask_all([Ask(ids, params, **more)])[0]

    def ask_all(self, asks: Sequence[Ask], max_steps: int = 10_000) -> list[Answer]:
        """Several requests that arrive together; runs until all have finished."""
        reqs = self.submit(asks)
        for _ in range(max_steps):
            if all(req.finished() for req in reqs):
                return [self._answer(req) for req in reqs]
            self.step()
        raise AssertionError(f"not finished after {max_steps} steps")

    def submit(self, asks: Sequence[Ask]) -> list[Any]:
        """Hand requests to the scheduler; returns SGLang's objects for them."""
        known = {id(req) for req in self.scheduler.waiting_queue}
        self.scheduler.process_input_requests([received(ask) for ask in asks])
        return [req for req in self.scheduler.waiting_queue if id(req) not in known]

    def step(self) -> None:
        """One round of SGLang's event loop."""
        scheduler = self.scheduler
        with torch.inference_mode():
            plan = scheduler.get_next_batch_to_run(
                running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
            )
            scheduler.running_batch = plan.running_batch
            batch = plan.batch_to_run
            if batch:
                result = scheduler.run_batch(batch)
                self._record(batch, result)
                scheduler.process_batch_result(batch, result)
            else:
                scheduler.on_idle()
            scheduler.last_batch = batch
            scheduler.invariant_checker.self_check_during_busy()

    def settle(self) -> None:
        """Let the scheduler go idle, which checks its memory, and check ours."""
        for _ in range(3):
            self.step()
        self.cache.check_integrity()
        assert self.cache.stats().num_held == 0

    def flush(self) -> None:
        """Forget the exact tree and every chunk."""
        self.settle()
        assert self.scheduler.flush_cache()

    def flush_tree(self) -> None:
        """Forget SGLang's exact tree, keep the chunks."""
        self.settle()
        flush = self.runtime.flush
        self.runtime.flush = lambda: None
        try:
            assert self.scheduler.flush_cache()
        finally:
            self.runtime.flush = flush

    @contextmanager
    def limits(self, **changes: Any) -> Iterator[None]:
        """Other pass limits for a while; `max_tokens` also is SGLang's chunked prefill size."""
        rows = self.runtime._executor._rows
        old_limits: PassLimits = rows.limits
        old_size = self.scheduler.chunked_prefill_size
        rows.limits = replace(old_limits, **changes)
        self.scheduler.chunked_prefill_size = changes.get("max_tokens", old_size)
        try:
            yield
        finally:
            rows.limits = old_limits
            self.scheduler.chunked_prefill_size = old_size

    def _record(self, batch: Any, result: Any) -> None:
        if not batch.forward_mode.is_extend() or result.logits_output is None:
            return
        logits = result.logits_output.next_token_logits.float().cpu()
        table = self.scheduler.req_to_token_pool.req_to_token
        for index, req in enumerate(batch.reqs):
            num_tokens = batch.prefix_lens[index] + batch.extend_lens[index]
            slots = table[req.kv.req_pool_idx, :num_tokens].long()
            kv = self.pool.capture(slots).data
            self._prefills.setdefault(req.rid, (logits[index], kv, len(batch.reqs)))
            if num_tokens == len(req.origin_input_ids):
                self._prefills[req.rid] = (logits[index], kv, len(batch.reqs))

    def _answer(self, req: Any) -> Answer:
        logits, kv, batch_size = self._prefills.pop(req.rid)
        report = (req.customized_info or {}).get("pic", [{}])[0]
        return Answer(
            logits,
            kv,
            tuple(req.output_ids),
            report,
            req.cached_tokens,
            req.finished_reason,
            batch_size,
        )


def received(ask: Ask) -> Any:
    """A request as it reaches the scheduler."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(
        max_new_tokens=ask.max_new_tokens,
        temperature=0.0,
        ignore_eos=True,
        custom_params=ask.params,
    )
    params.normalize(None)
    fields = {
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "stream": False,
        **(ask.fields or {}),
    }
    return TokenizedGenerateReqInput(
        rid=uuid.uuid4().hex,
        input_text="",
        input_ids=array("q", list(ask.ids)),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        **fields,
    )


def kl_divergence(expected: Tensor, got: Tensor) -> float:
    """KL(expected || got) in nats between the softmaxes of two logit vectors."""
    p, q = expected.double().log_softmax(-1), got.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum())
