"""The `sglang.srt.plugins` entry point: which of SGLang's functions are wrapped, and by what.

Wiring only. Without `--enable-pic` two functions are wrapped, those that add and read arguments;
with it, each process wraps what it needs and checks that the wraps are in effect.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

from sglang_ext import chat, compat, frontend
from sglang_ext.admission import make_adder_class
from sglang_ext.compat import Target
from sglang_ext.config import ExtConfig, add_arguments, config_from_args
from sglang_ext.errors import ConfigError, UnsupportedSGLang
from sglang_ext.request import parse_options

logger = logging.getLogger(__name__)

MARKER = "SGLANG_PIC_ENABLED"
"""Set in the environment of processes that a PIC server starts, which cannot see its arguments."""

EAGER_NO_COPY = "SGLANG_EAGER_INPUT_NO_COPY"
"""Without it SGLang copies a pass into buffers that hold `max_running_requests` rows."""


def register() -> None:
    """Called by SGLang once in every process, before arguments are parsed."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(compat.ADD_CLI_ARGS.path, _after_add_cli_args, HookType.AFTER)
    HookRegistry.register(compat.FROM_CLI_ARGS.path, _around_from_cli_args, HookType.AROUND)
    _accept_engine_options()
    if os.environ.get(MARKER) == "1" and "sglang.srt.managers.scheduler" in sys.modules:
        _register(SCHEDULER_HOOKS)


def _after_add_cli_args(result: Any, parser: Any, *args: Any) -> None:
    add_arguments(parser)


def _around_from_cli_args(original: Callable[..., Any], cls: Any, args: Any) -> Any:
    with _one_line():
        config = config_from_args(args)
        server_args = original(cls, args)
        _enable(server_args, config)
    server_args._pic_is_cli = True
    return server_args


def _accept_engine_options() -> None:
    """Let `sgl.Engine(enable_pic=True, pic_...)` through to our configuration."""
    if "sglang.srt.entrypoints.engine" not in sys.modules:
        return
    from sglang.srt.entrypoints.engine import Engine

    server_args_class = Engine.server_args_class

    def make_server_args(**kwargs: Any) -> Any:
        ours = {key: kwargs.pop(key) for key in list(kwargs) if _is_ours(key)}
        config = config_from_args(ours)
        server_args = server_args_class(**kwargs)
        _enable(server_args, config)
        return server_args

    Engine.server_args_class = staticmethod(make_server_args)


def _is_ours(key: str) -> bool:
    return key == "enable_pic" or key.startswith("pic_")


def _enable(server_args: Any, config: ExtConfig | None) -> None:
    """Carry the configuration with SGLang's arguments and wrap what this process needs."""
    if config is None:
        if os.environ.pop(MARKER, None) is not None:
            os.environ.pop(EAGER_NO_COPY, None)
        return
    compat.check_version(config.allows_untested_sglang)
    compat.check_signatures(compat.FRONTEND_TARGETS)
    server_args._pic_options = config
    os.environ[MARKER] = "1"
    os.environ[EAGER_NO_COPY] = "1"
    _check_features_on_resolution()
    _register(FRONTEND_HOOKS)
    compat.apply_hooks()
    compat.check_hooks_live(FRONTEND_HOOKS)


def _check_features_on_resolution() -> None:
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    register_resolution_hook("handle_other_validations")(_on_resolution)


def _on_resolution(server_args: Any, previous: Callable[[Any], None]) -> None:
    previous(server_args)
    if getattr(server_args, "_pic_options", None) is None:
        return
    from sglang_ext.support import check_server

    view, model_config = compat.resolved_options(server_args)
    is_cli = getattr(server_args, "_pic_is_cli", False)
    with _one_line() if is_cli else contextlib.nullcontext():
        check_server(view, model_config)


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    """End start-up with one clear line instead of a traceback."""
    try:
        yield
    except (ConfigError, UnsupportedSGLang) as exc:
        raise SystemExit(f"sglang-pic: {exc}") from exc


def _register(hooks: Mapping[Target, Callable[..., Any]]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in hooks.items():
        registered = [entry[1] for entry in HookRegistry._hooks.get(target.path, ())]
        if hook not in registered:
            HookRegistry.register(target.path, hook, HookType.AROUND)


# Hooks of the process that talks to clients


async def _tokenize_one(original: Callable[..., Any], manager: Any, obj: Any) -> Any:
    config = frontend.config_of(manager)
    if config is not None:
        obj = frontend.prepare_request(manager, obj, config)
    return await original(manager, obj)


async def _tokenize_batch(
    original: Callable[..., Any], manager: Any, batch_size: int, obj: Any
) -> Any:
    if frontend.config_of(manager) is None:
        return await original(manager, batch_size, obj)
    return [await manager._tokenize_one_request(obj[index]) for index in range(batch_size)]


async def _stream_one(
    original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any
) -> AsyncIterator[Any]:
    async with contextlib.aclosing(original(manager, *args, **kwargs)) as outputs:
        async for output in outputs:
            frontend.tidy_meta_info(output.get("meta_info") or {})
            yield output


def _convert_chat(
    original: Callable[..., Any], serving: Any, request: Any, raw_request: Any = None
) -> Any:
    def convert() -> Any:
        return original(serving, request, raw_request)

    config = frontend.config_of(serving.tokenizer_manager)
    if config is None:
        return convert()
    options = parse_options(request.custom_params, config.defaults)
    keeps_parts = serving.template_manager.jinja_template_content_format == "openai"
    is_multimodal = bool(serving.tokenizer_manager.model_config.is_multimodal)
    return chat.convert_request(convert, request, options, keeps_parts, is_multimodal)


def _encode_prompt(
    original: Callable[..., Any], tokenizer: Any, text: Any, encode_kwargs: Any = None
) -> Any:
    rendering = chat.current_rendering()
    if rendering is None or not isinstance(text, str):
        return original(tokenizer, text, encode_kwargs)
    return rendering.encode(original, tokenizer, text, encode_kwargs)


def _encode_segments(
    original: Callable[..., Any], tokenizer: Any, segments: Any, encode_kwargs: Any = None
) -> Any:
    rendering = chat.current_rendering()
    if rendering is None:
        return original(tokenizer, segments, encode_kwargs)
    encode = inspect.unwrap(compat.resolve(compat.ENCODE_PROMPT))
    return rendering.encode(encode, tokenizer, "".join(segments), encode_kwargs)


# Hooks of the scheduler process


def _init_scheduler(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(scheduler, *args, **kwargs)
    config = frontend.config_of(scheduler)
    if config is not None:
        from sglang_ext.runtime import PicRuntime

        compat.check_signatures(compat.SCHEDULER_TARGETS)
        compat.check_hooks_live(SCHEDULER_HOOKS)
        runtime = PicRuntime(config, scheduler)
        scheduler.pic_runtime = scheduler.tp_worker.pic_runtime = runtime
        scheduler.tp_worker.model_runner.pic_runtime = runtime
    return result


def _create_req(
    original: Callable[..., Any], scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any
) -> Any:
    req = original(scheduler, recv_req, *args, **kwargs)
    runtime = getattr(scheduler, "pic_runtime", None)
    if runtime is not None and not compat.is_health_check(recv_req):
        runtime.attach(req, recv_req)
    return req


def _prefill_adder(original: Callable[..., Any], scheduler: Any) -> Any:
    base = original(scheduler)
    runtime = getattr(scheduler, "pic_runtime", None)
    if runtime is None:
        return base
    if getattr(scheduler, "_pic_adder_base", None) is not base:
        scheduler._pic_adder_base = base
        scheduler._pic_adder = make_adder_class(base, runtime.is_waiting)
    return scheduler._pic_adder


def _on_idle(original: Callable[..., Any], scheduler: Any) -> Any:
    result = original(scheduler)
    runtime = getattr(scheduler, "pic_runtime", None)
    if runtime is not None:
        runtime.idle(scheduler.waiting_queue)
    return result


def _run_batch(
    original: Callable[..., Any], worker: Any, batch: Any = None, *args: Any, **kwargs: Any
) -> Any:
    runtime = getattr(worker, "pic_runtime", None)
    if runtime is None or batch is None or not batch.forward_mode.is_extend_without_speculative():
        return original(worker, batch, *args, **kwargs)
    runtime.begin(batch)
    try:
        return original(worker, batch, *args, **kwargs)
    finally:
        runtime.end(batch)


def _forward(
    original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    runtime = getattr(runner, "pic_runtime", None)
    if runtime is None:
        return original(runner, forward_batch, *args, **kwargs)
    return runtime.forward(forward_batch, lambda fb: original(runner, fb, *args, **kwargs))


def _flush_cache(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    is_flushed = original(scheduler, *args, **kwargs)
    runtime = getattr(scheduler, "pic_runtime", None)
    if is_flushed and runtime is not None:
        runtime.flush()
    return is_flushed


def _is_request_level(original: Callable[..., Any], streamer: Any, key: str) -> bool:
    return key == "pic" or original(streamer, key)


def _update_weights(original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return original(updater, *args, **kwargs)
    finally:
        runtime = getattr(updater.tp_worker, "pic_runtime", None)
        if runtime is not None:
            runtime.weights_changed()


FRONTEND_HOOKS: Mapping[Target, Callable[..., Any]] = {
    compat.TOKENIZE_ONE: _tokenize_one,
    compat.TOKENIZE_BATCH: _tokenize_batch,
    compat.STREAM_ONE: _stream_one,
    compat.CONVERT_CHAT: _convert_chat,
    compat.ENCODE_PROMPT: _encode_prompt,
    compat.ENCODE_SEGMENTS: _encode_segments,
}
SCHEDULER_HOOKS: Mapping[Target, Callable[..., Any]] = {
    compat.INIT_SCHEDULER: _init_scheduler,
    compat.CREATE_REQ: _create_req,
    compat.PREFILL_ADDER: _prefill_adder,
    compat.ON_IDLE: _on_idle,
    compat.FLUSH_CACHE: _flush_cache,
    compat.RUN_BATCH: _run_batch,
    compat.FORWARD: _forward,
    compat.IS_REQUEST_LEVEL: _is_request_level,
    **dict.fromkeys(compat.WEIGHT_UPDATES, _update_weights),
}
