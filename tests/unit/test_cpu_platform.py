"""When the CPU platform serves, what it sets, and its rotary embedding against float64."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.rotary_embedding import get_rope
from torch import Tensor, nn

from sglang_ext.cpu.platform import PicCpuPlatform, activate
from sglang_ext.cpu.rotary import apply_rotary_float32, use_float32_rotary

PATH = "sglang_ext.cpu.platform.PicCpuPlatform"


@pytest.fixture
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No accelerator, no wish in the environment."""
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    for name in ("cuda", "xpu", "mps"):
        monkeypatch.setattr(getattr(torch, name), "is_available", lambda: False)
    return monkeypatch


# Activation


def test_a_bare_cpu_machine_is_served(bare_machine: pytest.MonkeyPatch) -> None:
    assert activate() == PATH


@pytest.mark.parametrize("name", ["cuda", "xpu", "mps"])
def test_an_accelerator_takes_precedence(bare_machine: pytest.MonkeyPatch, name: str) -> None:
    bare_machine.setattr(getattr(torch, name), "is_available", lambda: True)
    assert activate() is None


def test_an_accelerator_of_another_make_takes_precedence(
    bare_machine: pytest.MonkeyPatch,
) -> None:
    bare_machine.setattr(torch, "npu", SimpleNamespace(is_available=lambda: True), raising=False)
    assert activate() is None


def test_sglangs_own_cpu_engine_takes_precedence(bare_machine: pytest.MonkeyPatch) -> None:
    bare_machine.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert activate() is None


def test_the_cpu_engine_may_be_declined(bare_machine: pytest.MonkeyPatch) -> None:
    bare_machine.setenv("SGLANG_USE_CPU_ENGINE", "0")
    assert activate() == PATH


def test_naming_this_platform_overrides_everything(bare_machine: pytest.MonkeyPatch) -> None:
    bare_machine.setattr(torch.cuda, "is_available", lambda: True)
    bare_machine.setenv("SGLANG_USE_CPU_ENGINE", "1")
    bare_machine.setenv("SGLANG_PLATFORM", "pic_cpu")
    assert activate() == PATH


def test_naming_another_platform_does_not_override(bare_machine: pytest.MonkeyPatch) -> None:
    bare_machine.setattr(torch.cuda, "is_available", lambda: True)
    bare_machine.setenv("SGLANG_PLATFORM", "pic_cpu_2")
    assert activate() is None


def test_activation_makes_the_backend_a_choice_once(bare_machine: pytest.MonkeyPatch) -> None:
    from sglang.srt.arg_groups import choices

    names = choices.ATTENTION_BACKEND_CHOICES
    before = list(names)
    others = [name for name in before if name != "pic_cpu"]
    names[:] = others
    try:
        activate()
        activate()
        assert names == [*others, "pic_cpu"]
    finally:
        names[:] = before


def test_the_class_that_activation_names_exists(bare_machine: pytest.MonkeyPatch) -> None:
    import pkgutil

    path = activate()
    assert path is not None
    assert pkgutil.resolve_name(path) is PicCpuPlatform


# Defaults


@pytest.mark.parametrize(
    ("asked", "served"),
    [
        (None, "pic_cpu"),
        ("intel_amx", "pic_cpu"),  # SGLang's default for CPUs, whose kernels are not there
        ("torch_native", "torch_native"),
        ("pic_cpu", "pic_cpu"),
    ],
)
def test_only_sglangs_default_backend_is_replaced(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, served: str
) -> None:
    monkeypatch.setenv("SGLANG_ROPE_CACHE_FP32", "0")
    server_args = SimpleNamespace(attention_backend=asked)
    PicCpuPlatform().apply_server_args_defaults(server_args)
    assert server_args.attention_backend == served
    assert os.environ["SGLANG_ROPE_CACHE_FP32"] == "1"


def test_workers_find_the_backend_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.attention import attention_registry

    from sglang_ext.cpu.attention import PicCpuAttnBackend

    monkeypatch.delitem(attention_registry.ATTENTION_BACKENDS, "pic_cpu", raising=False)
    platform = PicCpuPlatform()
    platform.init_backend()
    name = platform.get_default_attention_backend()
    assert attention_registry.ATTENTION_BACKENDS[name] is PicCpuAttnBackend


# Rotary embedding


def rotate_float64(x: Tensor, cos: Tensor, sin: Tensor, is_neox: bool) -> Tensor:
    """The definition, pair by pair."""
    out = x.double().clone()
    half = x.shape[-1] // 2
    for pair in range(half):
        first, second = (pair, pair + half) if is_neox else (2 * pair, 2 * pair + 1)
        a, b = x[..., first].double(), x[..., second].double()
        c, s = cos[:, pair, None].double(), sin[:, pair, None].double()
        out[..., first] = a * c - b * s
        out[..., second] = b * c + a * s
    return out


def angles(num_tokens: int, half: int) -> tuple[Tensor, Tensor]:
    """float32 cos and sin `[num_tokens, half]` of positions up to 100,000."""
    generator = torch.Generator().manual_seed(3)
    positions = torch.randint(0, 100_000, (num_tokens, 1), generator=generator).double()
    turns = positions * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    return turns.cos().float(), turns.sin().float()


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 50])
def test_rotation_is_rounded_once(num_tokens: int, dtype: torch.dtype, is_neox: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(num_tokens, 3, 32, generator=generator).to(dtype)
    before = x.clone()
    cos, sin = angles(num_tokens, 16)
    got = apply_rotary_float32(x, cos, sin, is_neox)
    expected = rotate_float64(x, cos, sin, is_neox)
    assert (got.dtype, got.shape) == (dtype, x.shape)
    assert torch.equal(x, before)
    # Half a unit of the last place, and what float32 arithmetic adds where products cancel.
    unit = torch.finfo(dtype).eps
    bound = 0.5 * unit * expected.abs() + 4 * torch.finfo(torch.float32).eps * 4.0
    assert bool(((got.double() - expected).abs() <= bound).all())


def test_a_table_in_the_models_dtype_is_used_as_it_is() -> None:
    cos, sin = (table.to(torch.bfloat16) for table in angles(9, 16))
    x = torch.randn(9, 2, 32, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    got = apply_rotary_float32(x, cos, sin, True)
    assert torch.equal(got, apply_rotary_float32(x, cos.float(), sin.float(), True))


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [64, 32], ids=["whole", "partial"])
def test_a_models_rotary_modules_rotate_in_float32(
    monkeypatch: pytest.MonkeyPatch, rotary_dim: int, is_neox: bool
) -> None:
    monkeypatch.setenv("SGLANG_ROPE_CACHE_FP32", "1")
    rope = get_rope(
        head_size=64,
        rotary_dim=rotary_dim,
        max_position=4096,
        base=10_000 + rotary_dim + is_neox,  # a module of this test's own; SGLang shares them
        is_neox_style=is_neox,
        dtype=torch.bfloat16,
    )
    model = nn.ModuleDict({"rope": rope, "other": nn.Linear(2, 2)})
    assert use_float32_rotary(model) == 1
    positions = torch.tensor([0, 1, 700, 4095])
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(4, n * 64, generator=generator).to(torch.bfloat16) for n in (3, 1))
    cos, sin = rope.cos_sin_cache[positions].chunk(2, dim=-1)
    rotated = rope.forward_native(positions, q.clone(), k.clone())
    for got, plain in zip(rotated, (q, k), strict=True):
        heads = plain.view(4, -1, 64)
        turned = rotate_float64(heads[..., :rotary_dim], cos, sin, is_neox)
        expected = torch.cat([turned, heads[..., rotary_dim:].double()], dim=-1)
        assert torch.allclose(got.view(4, -1, 64).double(), expected, rtol=2**-8, atol=1e-6)


def test_a_model_without_rotary_modules_is_left_alone() -> None:
    assert use_float32_rotary(nn.Linear(2, 2)) == 0


def test_every_module_of_a_model_is_changed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def module(**attributes: Any) -> nn.Module:
        made = nn.Identity()
        for name, value in attributes.items():
            setattr(made, name, value)
        return made

    ropes = [module(_apply_rotary_emb_wrapped=None) for _ in range(2)]
    model = nn.ModuleList([*ropes, ropes[0], module()])
    assert use_float32_rotary(model) == 2
    assert all(rope._apply_rotary_emb_wrapped is apply_rotary_float32 for rope in ropes)
