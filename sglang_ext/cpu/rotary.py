"""Rotary embedding with float32 arithmetic for models served in bfloat16 or float16.

SGLang's native op casts cos and sin to the dtype of the query and multiplies there, which costs
one rounding a product. Keys that will be rotated again later deserve a single rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def apply_rotary_float32(x: Tensor, cos: Tensor, sin: Tensor, is_neox_style: bool) -> Tensor:
    """Rotate pairs of dimensions in float32 and round once to the input's dtype.

    Args:
        x: `[num_tokens, num_heads, rotary_dim]`, any float dtype.
        cos: `[num_tokens, rotary_dim // 2]`.
        sin: `[num_tokens, rotary_dim // 2]`.
        is_neox_style: True pairs dimension i with i + rotary_dim / 2, False pairs 2i with 2i + 1.

    Returns:
        A new tensor of the shape and dtype of `x`.

    Source: RoFormer (arXiv:2104.09864), section 3.4.
    """
    cos32, sin32 = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()
    out = torch.empty_like(x, dtype=torch.float32)
    if is_neox_style:
        first, second = x.float().chunk(2, dim=-1)
        out_first, out_second = out.chunk(2, dim=-1)
    else:
        x32 = x.float()
        first, second = x32[..., ::2], x32[..., 1::2]
        out_first, out_second = out[..., ::2], out[..., 1::2]
    torch.mul(first, cos32, out=out_first)
    out_first.addcmul_(second, sin32, value=-1.0)
    torch.mul(second, cos32, out=out_second)
    out_second.addcmul_(first, sin32)
    return out.to(x.dtype)


def use_float32_rotary(model: nn.Module) -> int:
    """Point every rotary module of a loaded model at `apply_rotary_float32`.

    Modifies the modules in place.

    Returns:
        Number of modules changed.
    """
    modules = [m for m in model.modules() if hasattr(m, "_apply_rotary_emb_wrapped")]
    for module in modules:
        setattr(module, "_apply_rotary_emb_wrapped", apply_rotary_float32)  # noqa: B010
    return len(modules)
