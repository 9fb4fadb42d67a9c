"""Rotation of cached keys against direct rotary embedding in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.layers.rotary_embedding import base, get_rope, rope_variant
from torch import Tensor

from sglang_ext.errors import ShapeError, UnsupportedSGLang
from sglang_ext.recompute.reencode import Rotation, plan_rotation, reencode_keys
from sglang_ext.recompute.reference import reencode_keys_reference, rope_keys_reference
from sglang_ext.recompute.rope import RopeSpec, rope_spec_from_config, rope_spec_from_module

HEAD_DIM = 64
MAX_LEN = 4096
THETA = 10000.0
SCALINGS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "default": {"rope_type": "default"},
    "linear": {"type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn-untruncated": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 16,
        "truncate": False,
    },
    "deepseek-yarn": {
        "rope_type": "deepseek_yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "mscale": 0.7,
        "mscale_all_dim": 0.3,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "dynamic-alpha": {"rope_type": "dynamic", "alpha": 1000.0},
}
# Rounding the cached key and rounding the result cost half an eps of the pair's norm each. In
# float32 the rounding of cosines, products and sum is as large and doubles that.
EPS_OF_PAIR_NORM = {torch.bfloat16: 1.05, torch.float16: 1.05, torch.float32: 4.0}

all_scalings = pytest.mark.parametrize("scaling", SCALINGS)
both_pairings = pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
partial_rotary = pytest.mark.parametrize("partial", [1.0, 0.5])
all_dtypes = pytest.mark.parametrize("dtype", EPS_OF_PAIR_NORM, ids=str)


def make_spec(scaling: str = "plain", is_neox: bool = True, partial: float = 1.0) -> RopeSpec:
    return rope_spec_from_config(
        head_dim=HEAD_DIM,
        rope_theta=THETA,
        max_position_embeddings=MAX_LEN,
        rope_scaling=SCALINGS[scaling],
        partial_rotary_factor=partial,
        is_neox=is_neox,
    )


@pytest.fixture(scope="module")
def make_module() -> Iterator[Callable[..., Any]]:
    """SGLang's own rotary modules, on a host with or without an accelerator."""

    def make(scaling: dict[str, Any] | None, is_neox: bool = True, partial: float = 1.0) -> Any:
        return get_rope(
            HEAD_DIM,
            HEAD_DIM,
            MAX_LEN,
            THETA,
            is_neox_style=is_neox,
            rope_scaling=scaling,
            dtype=torch.float32,
            partial_rotary_factor=partial,
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "_is_cpu", True)  # or it looks for a kernel of vLLM
        patch.setattr(rope_variant, "get_device", lambda: "cpu")
        yield make


def random_keys(num_tokens: int, num_heads: int = 2, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, num_heads, HEAD_DIM, dtype=torch.float64, generator=generator)


def pair_norm(keys: Tensor, spec: RopeSpec) -> Tensor:
    """Norm of the rotated pair each dimension belongs to; magnitude where nothing rotates."""
    half = spec.rotary_dim // 2
    magnitude = keys.double().abs()
    rotated = magnitude[..., : spec.rotary_dim]
    if spec.is_neox:
        norm = torch.hypot(rotated[..., :half], rotated[..., half:]).repeat(1, 1, 2)
    else:
        norm = torch.hypot(rotated[..., ::2], rotated[..., 1::2]).repeat_interleave(2, dim=-1)
    return torch.cat((norm, magnitude[..., spec.rotary_dim :]), dim=-1)


def worst_error(got: Tensor, expected: Tensor, spec: RopeSpec) -> float:
    """Largest error in units of the dtype's eps times the pair's norm (floored at subnormals)."""
    info = torch.finfo(got.dtype)
    unit = info.eps * (pair_norm(expected, spec) + info.smallest_normal)
    return float(((got.double() - expected).abs() / unit).max())


def reencode(keys: Tensor, delta: Tensor, spec: RopeSpec) -> Tensor:
    return reencode_keys(keys, plan_rotation(spec, delta, "cpu"), spec)


def bits(keys: Tensor) -> Tensor:
    return keys.view({2: torch.int16, 4: torch.int32}[keys.element_size()])


# Against direct rotary embedding


@all_scalings
@both_pairings
@partial_rotary
@all_dtypes
def test_reencoded_keys_equal_keys_computed_at_the_new_position(scaling, is_neox, partial, dtype):
    spec = make_spec(scaling, is_neox, partial)
    keys = random_keys(24)
    cached_at, new_at = torch.arange(24) * 731 % 4001, torch.arange(24) * 997 % 4001
    cached = rope_keys_reference(keys, cached_at, spec).to(dtype)
    expected = rope_keys_reference(keys, new_at, spec)
    delta = new_at - cached_at
    assert delta.min() < 0 < delta.max()
    assert worst_error(reencode(cached, delta, spec), expected, spec) < EPS_OF_PAIR_NORM[dtype]
    assert worst_error(reencode(cached, delta + 1, spec), expected, spec) > 10


@given(
    old=st.integers(0, 200_000),
    new=st.integers(0, 200_000),
    scaling=st.sampled_from(sorted(SCALINGS)),
    is_neox=st.booleans(),
    dtype=st.sampled_from(list(EPS_OF_PAIR_NORM)),
    seed=st.integers(0, 1000),
)
def test_any_move_equals_direct_rope(old, new, scaling, is_neox, dtype, seed):
    spec = make_spec(scaling, is_neox)
    keys = random_keys(1, seed=seed)
    cached = rope_keys_reference(keys, torch.tensor([old]), spec).to(dtype)
    expected = rope_keys_reference(keys, torch.tensor([new]), spec)
    got = reencode(cached, torch.tensor([new - old]), spec)
    assert worst_error(got, expected, spec) < EPS_OF_PAIR_NORM[dtype]


@settings(max_examples=50)
@given(
    first=st.integers(-100_000, 100_000),
    second=st.integers(-100_000, 100_000),
    is_neox=st.booleans(),
    dtype=st.sampled_from(list(EPS_OF_PAIR_NORM)),
)
def test_two_moves_equal_their_sum(first, second, is_neox, dtype):
    spec = make_spec(is_neox=is_neox)
    cached = random_keys(3).to(dtype)
    once = reencode(cached, torch.full((3,), first + second), spec)
    twice = reencode(
        reencode(cached, torch.full((3,), first), spec), torch.full((3,), second), spec
    )
    assert worst_error(twice, once.double(), spec) < 2 * EPS_OF_PAIR_NORM[dtype]


@both_pairings
def test_bf16_error_is_at_most_one_ulp_over_a_million_values(is_neox):
    # One ulp is 2^(e - 7) in the binade 2^e of the exact value. Below 2^-14 of the pair's norm a
    # result is a cancellation, whose float32 error (under 2^-22.5 of the norm) is half an ulp or
    # more; there the ulp is taken at 2^-14 of the norm.
    spec = make_spec(is_neox=is_neox)
    generator = torch.Generator().manual_seed(1)
    num_tokens = 5300
    scale = torch.exp2(8 * torch.randn(num_tokens, 3, HEAD_DIM, generator=generator))
    keys = (random_keys(num_tokens, 3) * scale).bfloat16()
    delta = torch.randint(-32_000, 32_000, (num_tokens,), generator=generator)
    exact = reencode_keys_reference(keys, delta, spec)
    assert exact.numel() > 1_000_000
    size = torch.maximum(exact.abs(), pair_norm(exact, spec) * 2.0**-14)
    ulp = torch.exp2(size.log2().floor() - 7)
    error_ulps = ((reencode(keys, delta, spec).double() - exact).abs() / ulp).max()
    assert error_ulps <= 1
    off_by_one = reencode(keys, delta + 1, spec).double()
    assert ((off_by_one - exact).abs() / ulp).max() > 1


def test_reference_rotates_a_known_pair():
    spec = RopeSpec(2, 2, True, torch.tensor([torch.pi / 2], dtype=torch.float64))
    keys = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]])
    turned = rope_keys_reference(keys, torch.tensor([1, -1]), spec)
    expected = torch.tensor([[[0.0, 1.0]], [[0.0, -1.0]]], dtype=torch.float64)
    torch.testing.assert_close(turned, expected)


# Values that must not change


@all_dtypes
@both_pairings
def test_tokens_that_do_not_move_come_back_bit_identical(dtype, is_neox):
    spec = make_spec(is_neox=is_neox)
    keys = random_keys(16).to(dtype)
    delta = torch.arange(16) % 2 * 100
    moved = (bits(reencode(keys, delta, spec)) != bits(keys)).flatten(1).any(dim=1)
    assert moved.tolist() == [False, True] * 8


@all_dtypes
@both_pairings
def test_dimensions_past_the_rotary_ones_are_copied(dtype, is_neox):
    spec = make_spec(is_neox=is_neox, partial=0.5)
    keys = random_keys(16).to(dtype)
    moved = reencode(keys, torch.full((16,), 777), spec)
    assert torch.equal(bits(moved)[..., 32:], bits(keys)[..., 32:])
    assert not torch.equal(bits(moved)[..., :32], bits(keys)[..., :32])


@all_dtypes
@both_pairings
def test_keys_are_left_alone(dtype, is_neox):
    spec = make_spec(is_neox=is_neox)
    keys = random_keys(5).to(dtype)
    before = keys.clone()
    reencode(keys, torch.full((5,), 9), spec)
    assert torch.equal(keys, before)


# Layouts


@all_dtypes
@both_pairings
@partial_rotary
def test_rotation_in_place_equals_rotation_into_a_new_tensor(dtype, is_neox, partial):
    spec = make_spec(is_neox=is_neox, partial=partial)
    keys = random_keys(7).to(dtype)
    rotation = plan_rotation(spec, torch.arange(7) - 3, "cpu")
    expected = reencode_keys(keys, rotation, spec)
    assert reencode_keys(keys, rotation, spec, out=keys) is keys
    assert torch.equal(keys, expected)


@all_dtypes
@both_pairings
def test_keys_and_out_may_be_slices_of_larger_tensors(dtype, is_neox):
    spec = make_spec(is_neox=is_neox, partial=0.5)
    source, pool = random_keys(14, 3).to(dtype), torch.zeros(20, 4, HEAD_DIM, dtype=dtype)
    keys, out = source[::2, 1:], pool[3:10, :2]
    rotation = plan_rotation(spec, torch.arange(7) * 50, "cpu")
    reencode_keys(keys, rotation, spec, out=out)
    assert torch.equal(out, reencode_keys(keys.clone(), rotation, spec))
    assert pool[:3].count_nonzero() + pool[10:].count_nonzero() + pool[:, 2:].count_nonzero() == 0


@both_pairings
def test_zero_tokens_give_zero_tokens(is_neox):
    spec = make_spec(is_neox=is_neox)
    moved = reencode(random_keys(0).bfloat16(), torch.empty(0, dtype=torch.int64), spec)
    assert moved.shape == (0, 2, HEAD_DIM)


@both_pairings
def test_a_rotation_copied_per_head_gives_the_same_keys(is_neox):
    spec = make_spec(is_neox=is_neox)
    keys = random_keys(9, 3).bfloat16()
    rotation = plan_rotation(spec, torch.arange(9) * 31, "cpu")
    per_head = rotation.expand_heads(3)
    assert per_head.cos.shape == (9, 3, HEAD_DIM // 2)
    assert torch.equal(reencode_keys(keys, per_head, spec), reencode_keys(keys, rotation, spec))


# Frequencies


@all_scalings
@both_pairings
@partial_rotary
def test_module_spec_reproduces_the_cos_sin_table_of_sglang(make_module, scaling, is_neox, partial):
    module = make_module(SCALINGS[scaling], is_neox, partial)
    spec = rope_spec_from_module(module)
    assert (spec.head_dim, spec.rotary_dim) == (HEAD_DIM, int(HEAD_DIM * partial))
    assert spec.is_neox is is_neox
    table = module.cos_sin_cache.double() / getattr(module, "mscale", 1.0)
    cos, sin = table.chunk(2, dim=-1)
    positions = torch.arange(len(table), dtype=torch.float64)
    angles = positions[:, None] * spec.inv_freq
    # The table's float32 angles are rounded once, after a rounded division where rope is linear.
    tolerance = angles * 2.0**-23 + 2.0**-22
    assert ((angles.cos() - cos).abs() < tolerance).all()
    assert ((angles.sin() - sin).abs() < tolerance).all()
    assert not ((angles[1:].cos() - cos[:-1]).abs() < tolerance[1:]).all()


@all_scalings
@partial_rotary
def test_config_spec_equals_module_spec(make_module, scaling, partial):
    module = rope_spec_from_module(make_module(SCALINGS[scaling], True, partial))
    config = make_spec(scaling, True, partial)
    assert torch.equal(config.inv_freq, module.inv_freq)
    assert (config.head_dim, config.rotary_dim) == (module.head_dim, module.rotary_dim)


@all_scalings
def test_every_scaling_changes_the_frequencies(scaling):
    is_plain = torch.equal(make_spec(scaling).inv_freq, make_spec("plain").inv_freq)
    assert is_plain == (scaling in ("plain", "default"))


def test_llama3_keeps_fast_frequencies_and_divides_slow_ones():
    plain, scaled = make_spec("plain").inv_freq, make_spec("llama3").inv_freq
    assert scaled[0] == plain[0]
    assert scaled[-1] == plain[-1] / 8


@both_pairings
@all_dtypes
def test_yarn_keys_keep_norm_and_direction_over_ten_thousand_positions(make_module, is_neox, dtype):
    module = make_module(SCALINGS["yarn"], is_neox)
    module._ensure_cos_sin_cache_length(12_000)
    spec = rope_spec_from_module(module)
    keys = random_keys(64).float().flatten(1)
    cached_at = torch.arange(64) * 31

    def rope_of_sglang(positions: Tensor) -> Tensor:
        _, roped = module.forward_native(positions, keys.clone(), keys.clone())
        return roped.view(64, -1, HEAD_DIM)

    cached = rope_of_sglang(cached_at).to(dtype)
    moved = reencode(cached, torch.full((64,), 10_000), spec).double()
    direct = rope_of_sglang(cached_at + 10_000).double()
    assert abs(moved.norm() / cached.double().norm() - 1) < 1e-3
    assert torch.cosine_similarity(moved, direct, dim=-1).min() > 0.9999
    # What the table of SGLang would do: it holds the attention factor a second time.
    table = module.cos_sin_cache[10_000].float().view(1, 1, -1).expand(64, 1, -1)
    twice = reencode_keys(cached, Rotation(*table.chunk(2, dim=-1)), spec).double()
    assert twice.norm() / cached.double().norm() - 1 > 0.1


# Refusals


@pytest.mark.parametrize(
    ("scaling", "name"),
    [
        ({"rope_type": "longrope", "factor": 4.0}, "longrope"),
        ({"rope_type": "proportional"}, "proportional"),
        ({"rope_type": "default", "mrope_section": [8, 12, 12]}, "mrope"),
        ({"rope_type": "default", "use_fope": True}, "fourier"),
        ({"factor": 2.0}, "None"),
    ],
)
def test_an_unsupported_rope_type_is_named(scaling, name):
    with pytest.raises(UnsupportedSGLang, match=f"'{name}'"):
        rope_spec_from_config(
            head_dim=HEAD_DIM,
            rope_theta=THETA,
            max_position_embeddings=MAX_LEN,
            rope_scaling=scaling,
        )


@pytest.mark.parametrize(
    ("scaling", "name"),
    [
        ({"rope_type": "default", "mrope_section": [8, 12, 12]}, "MRotaryEmbedding"),
        ({"rope_type": "proportional"}, "Gemma4RotaryEmbedding"),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 32,
                "long_factor": [2.0] * 32,
                "original_max_position_embeddings": 1024,
            },
            "Phi3LongRoPEScaledRotaryEmbedding",
        ),
    ],
)
def test_an_unsupported_rotary_module_is_named(make_module, scaling, name):
    with pytest.raises(UnsupportedSGLang, match=name):
        rope_spec_from_module(make_module(scaling))


def test_several_linear_factors_are_refused(make_module):
    scaling = {"rope_type": "linear", "factor": [2.0, 4.0]}
    with pytest.raises(UnsupportedSGLang, match="2 scaling factors"):
        rope_spec_from_module(make_module(scaling))
    with pytest.raises(UnsupportedSGLang, match="2 scaling factors"):
        rope_spec_from_config(
            head_dim=HEAD_DIM,
            rope_theta=THETA,
            max_position_embeddings=MAX_LEN,
            rope_scaling=scaling,
        )


@pytest.mark.parametrize(
    ("rotary_dim", "inv_freq", "name"),
    [
        (7, torch.ones(3, dtype=torch.float64), "rotary_dim"),
        (66, torch.ones(33, dtype=torch.float64), "rotary_dim"),
        (0, torch.ones(0, dtype=torch.float64), "rotary_dim"),
        (64, torch.ones(64, dtype=torch.float64), "inv_freq"),
        (64, torch.ones(32), "inv_freq"),
    ],
)
def test_a_spec_that_does_not_fit_is_refused(rotary_dim, inv_freq, name):
    with pytest.raises(ShapeError, match=f"^{name}: expected"):
        RopeSpec(HEAD_DIM, rotary_dim, True, inv_freq)


@pytest.mark.parametrize(
    "delta", [torch.zeros(3), torch.zeros(3, 1, dtype=torch.int64)], ids=["dtype", "shape"]
)
def test_a_delta_that_does_not_fit_is_refused(delta):
    with pytest.raises(ShapeError, match=r"^delta: expected"):
        plan_rotation(make_spec(), delta, "cpu")


@pytest.mark.parametrize(
    ("keys", "out", "num_steps", "name"),
    [
        (torch.zeros(4, HEAD_DIM), None, 4, "keys"),
        (torch.zeros(4, 2, 32), None, 4, "keys"),
        (torch.zeros(4, 2, HEAD_DIM, dtype=torch.float64), None, 4, "keys"),
        (torch.zeros(4, 2, HEAD_DIM), None, 1, "rotation.cos"),
        (torch.zeros(4, 2, HEAD_DIM), torch.zeros(5, 2, HEAD_DIM), 4, "out"),
        (torch.zeros(4, 2, HEAD_DIM), torch.zeros(4, 2, HEAD_DIM).bfloat16(), 4, "out"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(keys, out, num_steps, name):
    rotation = plan_rotation(make_spec(), torch.arange(num_steps), "cpu")
    with pytest.raises(ShapeError, match=f"^{name}: expected"):
        reencode_keys(keys, rotation, make_spec(), out=out)


def test_a_rotation_on_another_device_is_refused():
    rotation = plan_rotation(make_spec(), torch.arange(4), "cpu")
    elsewhere = Rotation(rotation.cos, rotation.sin.to("meta"))
    with pytest.raises(ShapeError, match=r"^rotation\.sin: expected .* on cpu, got .* on meta"):
        reencode_keys(torch.zeros(4, 2, HEAD_DIM), elsewhere, make_spec())
