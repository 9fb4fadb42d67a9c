"""PIC in one scheduler process: its cache, its executor, and what happens to a request.

Knows SGLang's scheduler, requests and batches, and wires the other modules to them. Does not know
how SGLang's functions are wrapped (`plugin`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from functools import lru_cache, wraps
from threading import Event
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglang_ext import compat
from sglang_ext.borrowed import borrowed_batch
from sglang_ext.chunk_index.cache import ChunkCache, LifeCycle
from sglang_ext.chunk_index.commands import Clear, Invalidate
from sglang_ext.chunk_index.identity import RootKey, model_id, owner_id, root_key
from sglang_ext.config import ExtConfig
from sglang_ext.errors import ExtError, RequestError, UnsupportedSGLang
from sglang_ext.extend import PicExecutor, active_task, deactivate, settle
from sglang_ext.fingerprint import model_fingerprint
from sglang_ext.guard import FULL_LEVEL, Guard, at_level
from sglang_ext.kv_pool import KvPool, SegmentKV, layer_rope_of
from sglang_ext.layers import layer_stack_of
from sglang_ext.layerwise import LayerwiseExecutor
from sglang_ext.metrics import Metrics
from sglang_ext.recompute.planning import Chunk
from sglang_ext.recompute.strategies.registry import LAYERWISE_STRATEGIES
from sglang_ext.report import PicReport, Reason
from sglang_ext.request import (
    DEFAULT_NAMESPACE,
    MAX_CHUNKS,
    REASON_KEY,
    RequestOptions,
    is_given,
    parse_options,
    plan_layers,
)
from sglang_ext.rows import Forward, PassLimits, RowRunner
from sglang_ext.self_test import run_self_test
from sglang_ext.shadow import ShadowChecks
from sglang_ext.support import request_blocker
from sglang_ext.task import PicTask, cut_prompt, select_tokens
from sglang_ext.tiers import Tiers, build_cache, start_tiers

logger = logging.getLogger(__name__)

ROOTS_KEPT = 4096
WAIT_S = 0.002
OBSERVE_S = 1.0
UNBOUNDED = 1 << 31
TOLD_REASONS = {Reason.CHAT_TEMPLATE.value, Reason.MULTIMODAL.value, Reason.TOO_MANY_CHUNKS.value}
"""What the HTTP process may say of a request it did not cut."""


Method = TypeVar("Method", bound=Callable[..., None])


def _never_raises(method: Method) -> Method:
    """An exception here would end the server: log it and let SGLang go on without PIC."""

    @wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            method(*args, **kwargs)
        except Exception:
            logger.exception("pic error in %s", method.__name__)

    return cast(Method, guarded)


class PicRuntime:
    """Attached to the scheduler and its model runner as `pic_runtime`."""

    def __init__(self, config: ExtConfig, scheduler: Any) -> None:
        """Build everything and run the self-test.

        Raises:
            ExtError: The model or pool is not supported, or the self-test failed.
        """
        self._config = config
        self._runner = scheduler.tp_worker.model_runner
        self._pending: Any = None
        self._off_reason: str | None = None
        self._layerwise: LayerwiseExecutor | None = None
        self._why_no_layers = ""
        self.metrics = Metrics.create(scheduler)
        self._scheduler = scheduler
        self._guard = Guard(config.shadow_limit)
        self._shadow = ShadowChecks(
            config.shadow_share, self._guard, self._full_logits, self.metrics
        )
        self.tiers = Tiers(build_cache(config.index))
        self._has_loaded = Event()
        self._observed_s = 0.0
        self._root_of = lru_cache(maxsize=ROOTS_KEPT)(self._make_root)
        self._owner_of = lru_cache(maxsize=ROOTS_KEPT)(
            lambda namespace: owner_id(namespace, self._config.index.secret)
        )
        try:
            self._start(scheduler)
        except Exception as exc:
            if config.is_strict or not isinstance(exc, ExtError):
                raise
            self._off_reason = str(exc)
        self._announce()

    @property
    def cache(self) -> ChunkCache[SegmentKV]:
        """What is cached, in all tiers."""
        return self.tiers.cache

    @property
    def is_on(self) -> bool:
        """Whether requests are served with PIC."""
        return self._off_reason is None

    def _start(self, scheduler: Any) -> None:
        runner = self._runner
        rope = layer_rope_of(runner.model, len(runner.token_to_kv_pool.k_buffer))
        pool = KvPool(runner.token_to_kv_pool, rope)
        rows = RowRunner(runner, _pass_limits(runner, scheduler))
        self._fingerprint = model_fingerprint(runner)
        self._model = model_id(self._fingerprint)
        self._layerwise, self._why_no_layers = _layerwise_of(runner, rows)
        run_self_test(scheduler, rows, pool, self._layerwise)
        self.tiers = start_tiers(self._config.index, pool, lambda: self._model)
        self.cache.when_loaded(self._has_loaded.set)
        self._executor = PicExecutor(
            rows, pool, self.cache, runner.req_to_token_pool.req_to_token, now_ms, self._layerwise
        )

    def _announce(self) -> None:
        self.metrics.set_active(self._off_reason)
        self._observe()
        if self._off_reason is not None:
            logger.error("PIC is off: %s", self._off_reason)
            return
        backend = compat.resolved_options(self._runner.server_args)[0].attention_backend
        index = self._config.index
        logger.info(
            "PIC is active: strategy=%s n_avg=%d segment_len=%d arena_mib=%d backend=%s "
            "layerwise=%s self_test=passed",
            self._config.defaults.strategy,
            self._config.defaults.selection.n_avg,
            index.segment_len,
            index.arena_bytes >> 20,
            backend,
            self._why_no_layers or "on",
        )

    # Requests

    def attach(self, req: Any, recv_req: Any) -> None:
        """Give a new request its task. Sets `req.pic`, and what follows from it on `req`.

        Never raises: a request that cannot be served with PIC gets a task that says why.
        """
        started = time.perf_counter()
        try:
            task = self._make_task(recv_req)
        except Exception as exc:
            logger.exception("rid=%s pic fallback=%s", recv_req.rid, Reason.ERROR.value)
            task = PicTask(self._config.defaults, PicReport("unknown"), np.empty(0, np.int64))
            task.report.fall_back(Reason.ERROR, f"{type(exc).__name__}: {exc}")
            req.extra_key = f"{req.extra_key or ''}\0pic-error:{recv_req.rid}"  # tenant unknown
        req.pic = task
        if task.options.namespace != DEFAULT_NAMESPACE:
            # Exact prefixes are as much the tenant's own as its chunks are.
            req.extra_key = f"{req.extra_key or ''}\0pic-namespace:{task.options.namespace}"
        if task.is_active:
            req.skip_radix_cache_insert = True
            task.report.phase_ms["own"] = (time.perf_counter() - started) * 1e3
        elif task.options.is_strict and task.options.is_enabled and task.report.fallback:
            reason = task.report.fallback.value
            req.set_finish_with_abort(f"pic_strict: PIC cannot serve this request: {reason}")

    def _make_task(self, recv_req: Any) -> PicTask:
        custom_params = recv_req.sampling_params.custom_params
        asked = parse_options(custom_params, self._config.defaults)
        level = self._guard.level(asked.strategy, now_ms())
        options = at_level(asked, level) if level < FULL_LEVEL else asked
        prompt = np.asarray(recv_req.input_ids, dtype=np.int64)
        report = PicReport(asked.strategy, prompt_tokens=len(prompt), level=level)
        task = PicTask(options, report, prompt, is_given=is_given(custom_params))
        self._manage(options)
        reason = self._why_full(options, recv_req)
        if reason is None and level == FULL_LEVEL:
            reason = Reason.DIVERGED
        if reason is None:
            salt = "\0".join((recv_req.cache_salt or "", recv_req.extra_key or ""))
            root = self._root_of(options.namespace, salt)
            task.life = self._life_of(options)
            task.chunks = self._cut(prompt, options, root)
            if self._reads_pool(options):
                pool_root = self._root_of(self._config.index.pool, salt)
                task.pool_chunks = self._cut(prompt, options, pool_root)
            report.num_chunks = len(task.chunks)
            if options.strategy in LAYERWISE_STRATEGIES:
                reason = self._plan_layers(task)
            if reason is None and len(task.chunks) < 2 and not self._helps_single(task):
                reason = Reason.SINGLE_CHUNK
        if reason is not None:
            report.fall_back(reason, report.detail)
            return task
        task.selection = select_tokens(task.chunks, options)
        task.is_active = True
        report.bytes_loaded.update({lower.tier.name: 0 for lower in self.cache.lower})
        task.prefetch = self.cache.prefetch(task.paths, now_ms())
        return task

    def _plan_layers(self, task: PicTask) -> Reason | None:
        """Give a task its phases; returns why it cannot have them."""
        if self._layerwise is None:
            return Reason.LAYERWISE
        try:
            task.layer_plan = plan_layers(task.options, self._layerwise.num_layers)
        except RequestError as exc:
            task.report.detail = str(exc)
            return Reason.LAYERWISE_PLAN
        return None

    def _manage(self, options: RequestOptions) -> None:
        """Remove what a request asks to be removed, before it finds or stores anything."""
        owner = self._owner_of(options.namespace)
        if options.purges:
            self.tiers.carry_out(Clear(owner))
        for doc_id in options.invalidates:
            self.tiers.carry_out(Invalidate(owner, doc_id))

    def _cut(
        self, prompt: npt.NDArray[np.int64], options: RequestOptions, root: RootKey
    ) -> tuple[Chunk, ...]:
        return cut_prompt(prompt, options.bounds or (), root, self._config.index.segment_len)

    def _reads_pool(self, options: RequestOptions) -> bool:
        pool = self._config.index.pool
        return pool is not None and options.namespace != pool

    def _life_of(self, options: RequestOptions) -> LifeCycle:
        return LifeCycle(
            owner=self._owner_of(options.namespace),
            model=self._model,
            doc_ids=options.doc_ids,
            ttl_ms=None if options.ttl_s is None else int(options.ttl_s * 1e3),
            pinned=options.is_pinned,
        )

    def _why_full(self, options: RequestOptions, recv_req: Any) -> Reason | None:
        if not self.is_on:
            return Reason.PIC_OFF
        if not options.is_enabled:
            return Reason.DISABLED
        if options.strategy == "full":
            return Reason.FULL_STRATEGY
        if options.bounds is not None and len(options.bounds) > MAX_CHUNKS:
            return Reason.TOO_MANY_CHUNKS
        told = (recv_req.sampling_params.custom_params or {}).get(REASON_KEY)
        if told in TOLD_REASONS:
            return Reason(told)
        return request_blocker(recv_req)

    def _helps_single(self, task: PicTask) -> bool:
        """Whether a prompt of one chunk has something to load or to keep."""
        if task.keeps_query or not task.chunks:
            return bool(task.chunks)
        return self.cache.knows([path[:1] for path in task.paths], now_ms())

    def _make_root(self, namespace: str, salt: str) -> RootKey:
        return root_key(self._fingerprint, namespace, self._config.index.secret, salt)

    def is_waiting(self, req: Any) -> bool:
        """Whether a request's cached KV is still on its way, and waiting for it can pay.

        Modifies the request's report, once, when the waiting is over.
        """
        task = active_task(req)
        if task is None or task.prefetch is None or task.prefetch.is_settled:
            return False
        prefetch = task.prefetch
        if not prefetch.check(time.monotonic()):
            return True
        report = task.report
        if prefetch.waited_ms:
            report.phase_ms["load"] = prefetch.waited_ms
        report.declined, report.late = prefetch.num_declined, prefetch.num_late
        for index, lower in enumerate(self.cache.lower):
            report.bytes_loaded[lower.tier.name] = prefetch.num_bytes[index]
        return False

    def idle(self, waiting: Collection[Any]) -> None:
        """Bring metrics up to date; sleep a moment if there is only a load to wait for.

        With nothing to wait for, one waiting shadow check is made.
        """
        now_s = time.monotonic()
        if now_s >= self._observed_s + OBSERVE_S:
            self._observed_s = now_s
            self._observe()
        if any(self.is_waiting(req) for req in waiting):
            self._has_loaded.wait(WAIT_S)
            self._has_loaded.clear()
        elif not waiting:
            self._check_shadow()

    @_never_raises
    def _check_shadow(self) -> None:
        self._shadow.check_one(now_ms())

    def _full_logits(self, token_ids: npt.NDArray[np.int64]) -> Tensor | None:
        """`[vocab]` of a prompt's last token by full prefill; None if it has no room now."""
        scheduler = self._scheduler
        if scheduler.token_to_kv_pool_allocator.available_size() <= len(token_ids):
            return None
        with torch.inference_mode(), borrowed_batch(scheduler, token_ids) as (batch, _):
            logits = self._executor.run_full(batch, self._runner.forward)[0].float().cpu()
        self._runner.shared_read_done_event = None
        return logits

    def _observe(self) -> None:
        self.metrics.observe(self.cache.stats(), self.tiers.link_stats)

    # Batches

    @_never_raises
    def begin(self, batch: Any) -> None:
        """Before an extend batch runs: settle every task, remember whether PIC has work."""
        has_work = False
        for req in batch.reqs:
            task: PicTask | None = getattr(req, "pic", None)
            if task is None:
                continue
            settle(req)
            has_work |= task.is_active
        self._pending = batch if has_work else None

    @_never_raises
    def end(self, batch: Any) -> None:
        """After an extend batch ran or failed: hand the reports over, forget the batch."""
        self._pending = None
        self._observe()
        for index, req in enumerate(batch.reqs):
            task: PicTask | None = getattr(req, "pic", None)
            if task is None or task.is_reported:
                continue
            task.is_reported = True
            if not task.is_active:
                task.report.set_full(int(batch.prefix_lens[index]))
            req.customized_info = {**(req.customized_info or {}), "pic": [task.report.as_dict()]}
            self.metrics.count(task.report)
            if task.is_given:
                _log(req.rid, task.report)

    def forward(self, forward_batch: Any, forward: Forward) -> Any:
        """Run a pass SGLang asked for; with PIC if the batch announced by `begin` needs it."""
        batch, self._pending = self._pending, None
        if batch is None:
            return forward(forward_batch)
        try:
            logits = self._executor.run(batch, forward)
        except Exception as exc:
            logger.exception(
                "pic fallback=%s for a batch of %d", Reason.ERROR.value, len(batch.reqs)
            )
            for req in batch.reqs:
                if active_task(req) is not None:
                    deactivate(req, Reason.ERROR, f"{type(exc).__name__}: {exc}")
            logits = self._run_full(batch, forward)
            if logits is None:
                return forward(forward_batch)
        finally:
            self._runner.shared_read_done_event = None
        self._offer_to_shadow(batch, logits)
        return compat.new_forward_output(logits)

    @_never_raises
    def _offer_to_shadow(self, batch: Any, logits: Tensor) -> None:
        if not self._config.shadow_share:
            return
        for index, req in enumerate(batch.reqs):
            task = active_task(req)
            if task is not None and not req.output_ids:
                report = task.report
                self._shadow.offer(report.strategy, report.level, task.token_ids, logits[index])

    def _run_full(self, batch: Any, forward: Forward) -> Any:
        """Logits of a batch that PIC failed on, None if our passes fail as well."""
        try:
            return self._executor.run_full(batch, forward)
        except Exception:
            logger.exception("pic error in a full prefill batch_size=%d", len(batch.reqs))
            return None

    # Caches

    def flush(self) -> None:
        """Forget every chunk that this server alone keeps; what it shares stays."""
        self.cache.apply_local(lambda tier: tier.clear())
        self._observe()

    def weights_changed(self) -> None:
        """Name the model anew and forget what the old one computed."""
        if self.is_on:
            old_model = self._model
            self._fingerprint = model_fingerprint(self._runner)
            self._model = model_id(self._fingerprint)
            self._root_of.cache_clear()
            if old_model != self._model:
                self.tiers.retire_model(old_model)
            self._observe()


def now_ms() -> int:
    """Milliseconds since the epoch, which other servers and later runs share."""
    return int(time.time() * 1e3)


def _log(rid: str, report: PicReport) -> None:
    logger.info(
        "rid=%s strategy=%s outcome=%s fallback=%s prompt=%d exact=%d reused=%d recomputed=%d "
        "computed=%d recomputed_share=%.3f own_ms=%.1f",
        rid,
        report.strategy,
        report.outcome.value,
        report.fallback.value if report.fallback else None,
        report.prompt_tokens,
        report.exact,
        report.reused,
        report.recomputed,
        report.computed,
        report.recomputed_share,
        report.phase_ms.get("own", 0.0),
    )


def _layerwise_of(runner: Any, rows: RowRunner) -> tuple[LayerwiseExecutor | None, str]:
    """What runs a model layer by layer, or why nothing does."""
    if not rows.limits.packs:
        return None, "the attention backend does not take packed rows"
    try:
        return LayerwiseExecutor(runner, rows, layer_stack_of(runner.model)), ""
    except UnsupportedSGLang as exc:
        return None, str(exc)


def _pass_limits(runner: Any, scheduler: Any) -> PassLimits:
    size = scheduler.chunked_prefill_size
    packs = bool(getattr(runner.attn_backend, "supports_packed_rows", False))
    has_row_buffers = not packs or not compat.runs_without_row_buffers()
    return PassLimits(
        max_tokens=size if size and size > 0 else UNBOUNDED,
        max_rows=max(1, runner.max_running_requests) if has_row_buffers else UNBOUNDED,
        packs=packs,
        isolates=runner.device == "cpu",
    )
