"""Names a loaded model so that KV of one is never taken for KV of another.

Knows parameters and configuration. Covers what changes KV: weights, architecture, rope, dtypes,
tensor parallelism. Nothing for a user to set, so nothing to forget.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from sglang_ext import compat

SAMPLES_PER_PARAMETER = 1024
SUM_STEPS = (1, 2, 3)
"""Sums over every word, every second and every third: words that change places change them."""


def model_fingerprint(model_runner: Any) -> bytes:
    """32-byte digest of the model as it is loaded now.

    Weights enter by name, shape, dtype, three sums of all bytes, and up to 1024 elements spread
    evenly, which finds a different checkpoint, a fine-tuned one and an update in place without
    reading gigabytes to the host. The sums are of integers, so that neither the number of threads
    nor the device changes them.
    """
    config = model_runner.model_config
    digest = hashlib.blake2b(digest_size=32, person=b"pic-model")
    facts = {
        "architectures": list(config.hf_config.architectures or ()),
        "config": config.hf_text_config.to_dict(),
        "dtype": str(config.dtype),
        "kv_dtype": str(model_runner.kv_cache_dtype),
        "tp": list(compat.tensor_parallel()),
    }
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    for name, parameter in sorted(model_runner.model.state_dict().items()):
        digest.update(f"\0{name} {tuple(parameter.shape)} {parameter.dtype} ".encode())
        digest.update(_sample(parameter))
    return digest.digest()


def _sample(parameter: torch.Tensor) -> bytes:
    flat = parameter.detach().reshape(-1).contiguous()
    if flat.numel() == 0:
        return b""
    words = flat.view(torch.uint8)
    if words.numel() % 4 == 0:
        words = words.view(torch.int32)
    sums = [int(words[::step].sum(dtype=torch.int64)) for step in SUM_STEPS]
    step = max(1, words.numel() // SAMPLES_PER_PARAMETER)
    picked = words[::step].cpu().contiguous().numpy().tobytes()
    return picked + repr(sums).encode()
