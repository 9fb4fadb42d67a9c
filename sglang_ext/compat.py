"""Every SGLang symbol the extension relies on, and the checks that it is what we think.

The only place that names hook targets, versions and signatures; a new SGLang release is a change
here first. Knows nothing of what the hooks do.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sglang_ext.errors import UnsupportedSGLang

TESTED_VERSIONS = ("0.5.23",)


@dataclass(frozen=True, slots=True)
class Target:
    """A function of SGLang that is wrapped, and its parameters as they were when tested.

    Attributes:
        path: Dotted path.
        parameters: Names, in order.
    """

    path: str
    parameters: tuple[str, ...]


ADD_CLI_ARGS = Target("sglang.srt.server_args.ServerArgs.add_cli_args", ("parser",))
FROM_CLI_ARGS = Target("sglang.srt.server_args.ServerArgs.from_cli_args", ("cls", "args"))

_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager."
TOKENIZE_ONE = Target(_TOKENIZER + "_tokenize_one_request", ("self", "obj"))
TOKENIZE_BATCH = Target(_TOKENIZER + "_batch_tokenize_and_process", ("self", "batch_size", "obj"))
STREAM_ONE = Target(_TOKENIZER + "_stream_one_response", ("self", "obj", "state", "request"))

_OPENAI = "sglang.srt.entrypoints.openai."
CONVERT_CHAT = Target(
    _OPENAI + "serving_chat.OpenAIServingChat._convert_to_internal_request",
    ("self", "request", "raw_request"),
)
ENCODE_PROMPT = Target(
    _OPENAI + "parallel_prompt_encode.parallel_prompt_encode",
    ("tokenizer", "text", "encode_kwargs"),
)
ENCODE_SEGMENTS = Target(
    _OPENAI + "parallel_prompt_encode.encode_prompt_segments",
    ("tokenizer", "segments", "encode_kwargs"),
)

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
INIT_SCHEDULER = Target(_SCHEDULER + "__init__", ("self", "server_args", "port_args"))
CREATE_REQ = Target(_SCHEDULER + "_create_generation_req", ("self", "recv_req", "args", "kwargs"))
PREFILL_ADDER = Target(_SCHEDULER + "get_prefill_adder_class", ("self",))
ON_IDLE = Target(_SCHEDULER + "on_idle", ("self",))
FLUSH_CACHE = Target(_SCHEDULER + "flush_cache", ("self", "empty_cache"))
RUN_BATCH = Target(
    "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
    (
        "self",
        "batch",
        "forward_batch",
        "pp_proxy_tensors",
        "is_verify",
        "skip_attn_backend_init",
        "capture_hidden_mode",
        "return_kv_loc_plan",
    ),
)
FORWARD = Target(
    "sglang.srt.model_executor.model_runner.ModelRunner.forward",
    (
        "self",
        "forward_batch",
        "skip_attn_backend_init",
        "pp_proxy_tensors",
        "reinit_attn_backend",
        "split_forward_count",
    ),
)
IS_REQUEST_LEVEL = Target(
    "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
    ".is_request_level_customized_info_key",
    ("self", "key"),
)
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
WEIGHT_UPDATES = tuple(
    Target(_UPDATER + name, ("self", "recv_req"))
    for name in (
        "update_weights_from_disk",
        "update_weights_from_distributed",
        "update_weights_from_tensor",
        "update_weights_from_ipc",
        "end_weight_update",
    )
)

FRONTEND_TARGETS = (
    TOKENIZE_ONE,
    TOKENIZE_BATCH,
    STREAM_ONE,
    CONVERT_CHAT,
    ENCODE_PROMPT,
    ENCODE_SEGMENTS,
)
SCHEDULER_TARGETS = (
    INIT_SCHEDULER,
    CREATE_REQ,
    PREFILL_ADDER,
    ON_IDLE,
    FLUSH_CACHE,
    RUN_BATCH,
    FORWARD,
    IS_REQUEST_LEVEL,
    *WEIGHT_UPDATES,
)


def check_version(allows_untested: bool) -> None:
    """Refuse an SGLang version that was not tested.

    Raises:
        UnsupportedSGLang: Names the version and the tested ones.
    """
    from sglang.version import __version__

    if __version__ not in TESTED_VERSIONS and not allows_untested:
        tested = ", ".join(TESTED_VERSIONS)
        raise UnsupportedSGLang(
            f"SGLang {__version__} is not supported, expected {tested} "
            "(--pic-allow-untested-sglang tries it anyway)"
        )


def check_signatures(targets: tuple[Target, ...]) -> None:
    """Compare the parameters of functions about to be wrapped with the recorded ones.

    Raises:
        UnsupportedSGLang: One is missing or takes other parameters.
    """
    for target in targets:
        try:
            function = resolve(target)
        except (ImportError, AttributeError) as exc:
            raise UnsupportedSGLang(f"SGLang has no {target.path}") from exc
        parameters = tuple(inspect.signature(inspect.unwrap(function)).parameters)
        if parameters != target.parameters:
            raise UnsupportedSGLang(
                f"{target.path} takes ({', '.join(parameters)}), "
                f"expected ({', '.join(target.parameters)})"
            )


def check_hooks_live(hooks: Mapping[Target, Callable[..., Any]]) -> None:
    """Check that every hook wraps its function in this process.

    Raises:
        UnsupportedSGLang: A hook was registered but is not in effect.
    """
    for target, hook in hooks.items():
        if not _wraps(resolve(target), hook):
            raise UnsupportedSGLang(
                f"the hook on {target.path} is not in effect; does another plugin replace it?"
            )


def _wraps(function: Any, hook: Callable[..., Any]) -> bool:
    """Whether a chain of wrappers made by SGLang's registry contains our hook."""
    while function is not None:
        closure = getattr(function, "__closure__", None) or ()
        if any(cell.cell_contents is hook for cell in closure):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def new_forward_batch(batch: Any, model_runner: Any, positions: Tensor, starts: Tensor) -> Any:
    """A ForwardBatch of a hand-made ScheduleBatch whose tokens stand at `positions`.

    Args:
        batch: Copy of a ScheduleBatch with the fields of this pass.
        model_runner: SGLang's model runner.
        positions: `[num_tokens]` int64, on device.
        starts: `[num_rows]` int32, first token of each row, on device.
    """
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch

    return ForwardBatch.init_new(
        batch,
        model_runner,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        return_hidden_states_before_norm=False,
        extend_position_info=(positions, starts, None),
    )


def new_forward_output(logits: Tensor) -> Any:
    """What `ModelRunner.forward` returns for logits `[batch_size, vocab]`."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.model_executor.model_runner import ModelRunnerOutput

    return ModelRunnerOutput(
        logits_output=LogitsProcessorOutput(next_token_logits=logits), can_run_graph=False
    )


def uses_pickle_ipc() -> bool:
    """Whether requests travel to the scheduler pickled, rather than as typed msgpack."""
    from sglang.srt.environ import envs

    return bool(envs.SGLANG_USE_PICKLE_IPC.get())


def custom_params_type() -> Any:
    """The type that msgpack decodes a request's `custom_params` into."""
    from typing import get_type_hints

    from sglang.srt.sampling.sampling_params import SamplingParams

    return get_type_hints(SamplingParams)["custom_params"]


PACKING_BACKENDS = frozenset({"pic_cpu"})
"""Backends that take the columns of a packed row."""

VIRTUAL_ROW_BACKENDS = frozenset({"triton", "fa3", "torch_native"})
"""Backends that write K/V before attention reads them and read earlier columns from the pool."""


def resolved_options(server_args: Any) -> tuple[Any, Any]:
    """SGLang's options as resolved so far, readable by attribute, and its ModelConfig."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(server_args), model_config_of(server_args)


def apply_hooks() -> None:
    """Put hooks registered after SGLang loaded its plugins into effect."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()


def tensor_parallel() -> tuple[int, int]:
    """Size of the tensor-parallel group and this process's rank in it."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return int(parallel.tp_size), int(parallel.tp_rank)


def runs_without_row_buffers() -> bool:
    """Whether an eager pass takes its batch as it is, not copied into buffers of fixed rows."""
    from sglang.srt.environ import envs

    return bool(envs.SGLANG_EAGER_INPUT_NO_COPY.get())


def resolve(target: Target) -> Any:
    """The function a target names, as it is now."""
    return pkgutil.resolve_name(target.path)


def is_health_check(recv_req: Any) -> bool:
    """Whether a request is SGLang's own probe."""
    from sglang.srt.managers.scheduler import is_health_check_generate_req

    return bool(is_health_check_generate_req(recv_req))


@contextmanager
def layer_context(model_runner: Any, forward_batch: Any, attn_backend: Any) -> Iterator[None]:
    """What SGLang's runner sets up around a model's layers, with an attention backend of ours."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    from sglang.srt.runtime_context import get_model

    experts = model_runner.model.shared_experts_config
    context = ForwardContext(attn_backend=attn_backend)
    with (
        get_model().override(shared_experts=experts),
        forward_context(context, forward_batch=forward_batch),
    ):
        yield


def open_residual(output: Tensor, residual: Tensor | None, forward_batch: Any) -> Any:
    """Give a ForwardBatch the residual stream that a layer expects; returns the layer's input.

    Args:
        output: `[num_tokens, hidden]`, what the layer before put out, or the embedding.
        residual: As `output`; None at the first layer.
        forward_batch: Modified.
    """
    from sglang.srt.layers.layer_boundary.residual import batch as residual_batch
    from sglang.srt.layers.layer_boundary.residual.add_norm import PLAIN_ADD
    from sglang.srt.layers.layer_boundary.residual.stream import ResidualStream

    if residual is None:
        residual_batch.start(forward_batch)
        return output
    stream_input, stream = ResidualStream.from_handoff(output, residual, PLAIN_ADD)
    forward_batch.residual_stream = stream
    return stream_input


def close_residual(output: Any, forward_batch: Any) -> tuple[Tensor, Tensor | None]:
    """Take a layer's output and its residual out of a ForwardBatch; see `open_residual`."""
    from sglang.srt.layers.layer_boundary.residual import batch as residual_batch

    pair: tuple[Tensor, Tensor | None] = residual_batch.stream_of(forward_batch).export(output)
    residual_batch.clear(forward_batch)
    return pair


def final_norm(stream_input: Any, forward_batch: Any, norm: Any) -> Tensor:
    """The norm behind the last layer, of what `open_residual` returned."""
    from sglang.srt.layers.layer_boundary.residual import batch as residual_batch

    normed: Tensor = residual_batch.final_norm(stream_input, forward_batch, norm)
    return normed


def num_layers(model_config: Any) -> int:
    """Layers of a model, of SGLang's ModelConfig."""
    return int(model_config.num_hidden_layers)
