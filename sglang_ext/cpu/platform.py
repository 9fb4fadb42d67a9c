"""The out-of-tree SGLang platform for CPUs without SGLang's own kernels.

Knows which defaults such a server needs. Knows nothing of chunks or PIC.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from sglang_ext.cpu.rotary import use_float32_rotary

PLATFORM_NAME = "pic_cpu"
ATTENTION_BACKEND = "pic_cpu"


def activate() -> str | None:
    """Entry point: the platform's class path, or None where another platform should serve.

    An accelerator, or SGLang's own CPU engine asked for by `SGLANG_USE_CPU_ENGINE=1`, takes
    precedence unless `SGLANG_PLATFORM=pic_cpu` names this one.
    """
    is_named = os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME
    has_other = os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1" or _has_accelerator()
    if has_other and not is_named:
        return None
    _add_backend_choice()
    return "sglang_ext.cpu.platform.PicCpuPlatform"


class PicCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """CPU serving with torch operators only."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_default_attention_backend(self) -> str:
        """The backend of `sglang_ext.cpu.attention`."""
        return ATTENTION_BACKEND

    def get_dispatch_key_name(self) -> str:
        """Operators in plain torch."""
        return "native"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        """There is no device to pin memory for."""
        return False

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Replace SGLang's default for CPUs, whose kernels are not in its wheel, by ours."""
        os.environ["SGLANG_ROPE_CACHE_FP32"] = "1"
        if server_args.attention_backend in (None, "intel_amx"):
            server_args.attention_backend = ATTENTION_BACKEND

    def init_backend(self) -> None:
        """Register the attention backend's factory in a worker process."""
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        from sglang_ext.cpu.attention import PicCpuAttnBackend

        register_attention_backend(ATTENTION_BACKEND)(PicCpuAttnBackend)

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Rotate in float32 from here on."""
        use_float32_rotary(model)


def _has_accelerator() -> bool:
    if torch.cuda.is_available():
        return True
    return any(
        hasattr(torch, name) and getattr(torch, name).is_available()
        for name in ("xpu", "npu", "musa", "mps")
    )


def _add_backend_choice() -> None:
    from sglang.srt.arg_groups import choices

    if ATTENTION_BACKEND not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([ATTENTION_BACKEND])
