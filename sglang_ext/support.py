"""What this version does not serve with PIC: refused at start, or per request with a reason.

Knows SGLang's configuration and request fields. A refusal is one line that names the option.
"""

from __future__ import annotations

import os
from typing import Any

from sglang_ext import compat
from sglang_ext.errors import UnsupportedSGLang
from sglang_ext.report import Reason

# Option of SGLang -> (the value PIC needs, why). Compared with `!=` after SGLang resolved it.
_NEEDS: dict[str, tuple[Any, str]] = {
    "disaggregation_mode": ("null", "prefill and decode must run in one server"),
    "speculative_algorithm": (None, "draft KV of skipped tokens would be missing"),
    "tp_size": (1, "ranks do not agree on cached chunks yet"),
    "pp_size": (1, "a pass over chosen tokens does not cross pipeline stages"),
    "attn_dp_size": (1, "attention data parallelism pads rows at layer boundaries"),
    "attn_cp_size": (1, "context parallelism splits rows"),
    "dcp_size": (1, "context parallelism shards the KV of a row"),
    "enable_kv_cache_sharding": (False, "the KV of a row must be in one place"),
    "enable_mixed_chunk": (False, "decode rows would join an extend pass"),
    "enable_two_batch_overlap": (False, "rows are split between two batches"),
    "enable_pdmux": (False, "prefill is split by layers"),
    "enable_layernorm_sp": (False, "rows are sharded at layer boundaries"),
    "enable_unified_memory": (False, "KV slots are virtual"),
    "enable_page_major_kv_layout": (False, "KV is not stored by token"),
    "enable_hisparse": (False, "KV is not stored by token"),
    "enable_hierarchical_cache": (False, "it owns the layer-wise loading of KV"),
    "enable_unified_cache_external_linker": (False, "it owns the layer-wise loading of KV"),
    "enable_lmcache": (False, "it owns the layer-wise loading of KV"),
    "enable_flexkv": (False, "it owns the layer-wise loading of KV"),
    "enable_encoder_swa_bounded_replay": (False, "it replays prefixes by its own rows"),
    "enable_deterministic_inference": (False, "answers depend on what is cached, by design"),
    "enable_watermark": (False, "its state follows rows"),
    "dllm_algorithm": (None, "diffusion models have no causal prefix"),
    "is_embedding": (False, "there is no next token"),
    "tokenizer_worker_num": (1, "extra tokenizer workers do not load plugins"),
    "page_size": (1, "chunks start at any token"),
}


def check_server(view: Any, model_config: Any) -> None:
    """Refuse options and models that PIC does not serve.

    Args:
        view: SGLang's resolved options, read by attribute.
        model_config: SGLang's ModelConfig.

    Raises:
        UnsupportedSGLang: One line naming the first option or property.
    """
    for name, (needed, why) in _NEEDS.items():
        value = getattr(view, name, needed)
        if value != needed and not (needed is False and value is None):
            flag = "--" + name.replace("_", "-")
            raise UnsupportedSGLang(
                f"--enable-pic does not work with {flag} {value!r} (needs {needed!r}): {why}"
            )
    _check_environment()
    _check_backend(view)
    _check_model(model_config)


def _check_environment() -> None:
    for name in ("SGLANG_RUST_SERVER", "SGLANG_USE_HND_KVCACHE"):
        if os.environ.get(name, "0").lower() in ("1", "true", "yes"):
            raise UnsupportedSGLang(f"--enable-pic does not work with {name}=1")


def _check_backend(view: Any) -> None:
    names = {
        view.attention_backend,
        view.prefill_attention_backend,
        view.decode_attention_backend,
    } - {None}
    known = compat.PACKING_BACKENDS | compat.VIRTUAL_ROW_BACKENDS
    paged = os.environ.get("SGLANG_FLASHINFER_USE_PAGED", "0").lower() in ("1", "true", "yes")
    if paged:
        known |= {"flashinfer"}
    for name in sorted(names - known):
        hint = " (flashinfer needs SGLANG_FLASHINFER_USE_PAGED=1)" if name == "flashinfer" else ""
        raise UnsupportedSGLang(
            f"--enable-pic does not work with --attention-backend {name}, "
            f"expected one of {', '.join(sorted(known))}{hint}"
        )
    if len(names) > 1:
        raise UnsupportedSGLang(
            "--enable-pic needs one attention backend for prefill and decode, "
            f"got {', '.join(sorted(names))}"
        )
    if view.kv_cache_dtype not in ("auto", "bfloat16", "bf16"):
        raise UnsupportedSGLang(
            f"--enable-pic does not work with --kv-cache-dtype {view.kv_cache_dtype} yet"
        )


def _check_model(model_config: Any) -> None:
    name = ", ".join(model_config.hf_config.architectures or ("unknown",))
    problems = {
        "uses MLA or another compressed KV": model_config.attention_arch.name != "MHA",
        "has a sliding-window KV pool": bool(model_config.is_hybrid_swa),
        "is an encoder-decoder": bool(model_config.is_encoder_decoder),
        "is not a generation model": not model_config.is_generation,
        "has recurrent layers": _has_recurrent_layers(model_config),
        "has multi-dimensional positions": bool(model_config.model_is_mrope),
    }
    for problem, applies in problems.items():
        if applies:
            raise UnsupportedSGLang(f"--enable-pic does not serve {name}: it {problem}")


def _has_recurrent_layers(model_config: Any) -> bool:
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model_config) is not None


def request_blocker(recv_req: Any) -> Reason | None:
    """Why a request as it reaches the scheduler must be computed in full, if it must.

    Args:
        recv_req: SGLang's TokenizedGenerateReqInput.
    """
    blockers = {
        Reason.LORA: recv_req.lora_id is not None,
        Reason.SESSION: recv_req.session_params is not None or recv_req.session_id is not None,
        Reason.MULTIMODAL: recv_req.mm_inputs is not None,
        Reason.INPUT_EMBEDS: recv_req.input_embeds is not None
        or recv_req.positional_embed_overrides is not None,
        Reason.INPUT_LOGPROBS: bool(recv_req.return_logprob) and recv_req.logprob_start_len >= 0,
        Reason.HIDDEN_STATES: bool(
            recv_req.return_hidden_states
            or recv_req.return_routed_experts
            or recv_req.return_indexer_topk
        ),
        Reason.POOLING: recv_req.token_indices_to_pool is not None
        or recv_req.multi_item_delimiter_indices is not None,
        Reason.BEAM_SEARCH: getattr(recv_req.sampling_params, "beam_width", 1) not in (None, 0, 1),
    }
    return next((reason for reason, applies in blockers.items() if applies), None)
