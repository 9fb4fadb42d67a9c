"""Signals against loops in float64, over shapes, layouts and block sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_ext.errors import ShapeError
from sglang_ext.recompute import signals
from sglang_ext.recompute.reference import reference_kv_deviation, reference_query_importance
from sglang_ext.recompute.signals import (
    kv_deviation,
    normalised_entropy,
    query_importance,
    top_tokens,
)

HEAD_DIM = 16
SCALING = HEAD_DIM**-0.5
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOLERANCE = 2e-6
"""Of a deviation absolutely, in [0, 4]; of an importance relatively, scores being below 10."""
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Relative error of a number put into the dtype."""

all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
all_groups = pytest.mark.parametrize("group", [1, 3, 8])


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_kv(
    num_tokens: int,
    num_kv_heads: int = 3,
    v_head_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    spread: float = 0.3,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """New keys and values, and old ones `spread` away from them."""
    shapes = [(num_tokens, num_kv_heads, dim) for dim in (HEAD_DIM, v_head_dim)]
    new = [random_tensor(*shape, seed=seed + i) for i, shape in enumerate(shapes)]
    old = [
        part + spread * random_tensor(*part.shape, seed=seed + 2 + i) for i, part in enumerate(new)
    ]
    new_keys, new_values, old_keys, old_values = (part.to(dtype) for part in (*new, *old))
    return new_keys, new_values, old_keys, old_values


def random_attention(
    columns: Tensor,
    kv_len: int,
    num_kv_heads: int = 2,
    group: int = 3,
    head_dim: int = HEAD_DIM,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Queries and keys with scores of a few units."""
    queries = 1.5 * random_tensor(len(columns), num_kv_heads * group, head_dim, seed=seed)
    keys = random_tensor(kv_len, num_kv_heads, head_dim, seed=seed + 1)
    return queries.to(dtype), keys.to(dtype)


def last_columns(kv_len: int, num_queries: int) -> Tensor:
    return torch.arange(kv_len - num_queries, kv_len)


def is_close(importance: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> bool:
    """Whether every column agrees relative to its own weight; hidden ones must be exactly 0."""
    error = (importance.double() - expected).abs()
    return bool((error <= tolerance * expected).all())


class Spy(TorchDispatchMode):
    """Records what every tensor operation returns.

    Attributes:
        shapes: Shapes of the float32 results, in order.
        names: Names of the operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.append(func.__name__)
        if isinstance(result, Tensor) and result.dtype == torch.float32:
            self.shapes.append(tuple(result.shape))
        return result

    @property
    def largest(self) -> int:
        return max(math.prod(shape) for shape in self.shapes)

    def count(self, name: str) -> int:
        return sum(called.startswith(name) for called in self.names)


# KV deviation


@all_dtypes
@pytest.mark.parametrize("num_kv_heads", [1, 3, 8])
@pytest.mark.parametrize("spread", [1e-3, 0.3, 10.0])
def test_deviation_equals_the_reference(dtype, num_kv_heads, spread):
    kv = random_kv(20, num_kv_heads, dtype=dtype, spread=spread)
    got, expected = kv_deviation(*kv), reference_kv_deviation(*kv)
    assert (got.dtype, got.shape) == (torch.float32, (20,))
    assert (got.double() - expected).abs().max() < TOLERANCE
    assert (got.double() - expected.roll(1)).abs().max() > 100 * TOLERANCE


@settings(max_examples=60)
@given(
    num_tokens=st.integers(0, 12),
    num_kv_heads=st.integers(1, 4),
    v_head_dim=st.integers(1, 20),
    dtype=st.sampled_from(DTYPES),
    spread=st.floats(0, 3),
    block_numel=st.integers(1, 300),
    seed=st.integers(0, 1000),
)
def test_any_deviation_equals_the_reference(
    num_tokens, num_kv_heads, v_head_dim, dtype, spread, block_numel, seed
):
    kv = random_kv(num_tokens, num_kv_heads, v_head_dim, dtype, spread, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signals, "BLOCK_NUMEL", block_numel)
        got = kv_deviation(*kv)
    torch.testing.assert_close(got.double(), reference_kv_deviation(*kv), rtol=0, atol=TOLERANCE)


def test_deviation_of_known_vectors():
    # Two KV heads of two dimensions make one vector: (3, 0, 0, 4) has norm 5.
    new_keys = torch.tensor([[[3.0, 0.0], [0.0, 4.0]]])
    old_keys = torch.tensor([[[0.0, 0.0], [0.0, 2.0]]])
    new_values, old_values = torch.tensor([[[1.0], [0.0]]]), torch.tensor([[[0.0], [-7.0]]])
    got = kv_deviation(new_keys, new_values, old_keys, old_values)
    expected = math.hypot(0.6, 0.8 - 1.0) + math.sqrt(2)
    assert got.tolist() == pytest.approx([expected], abs=TOLERANCE)


def test_heads_are_normalised_together_rather_than_one_by_one():
    new_keys, new_values, old_keys, old_values = random_kv(20)
    new_keys[:, 0] *= 10
    old_keys[:, 0] *= 10

    def per_head(new: Tensor, old: Tensor) -> Tensor:
        unit_new, unit_old = (part / part.norm(dim=-1, keepdim=True) for part in (new, old))
        return (unit_new - unit_old).flatten(1).norm(dim=1)

    expected = reference_kv_deviation(new_keys, new_values, old_keys, old_values)
    got = kv_deviation(new_keys, new_values, old_keys, old_values).double()
    assert (got - expected).abs().max() < TOLERANCE
    one_by_one = per_head(new_keys, old_keys) + per_head(new_values, old_values)
    assert (one_by_one - expected).abs().min() > 100 * TOLERANCE


@all_dtypes
def test_kv_that_has_not_moved_deviates_by_exactly_zero(dtype):
    keys, values, _, _ = random_kv(20, dtype=dtype)
    assert kv_deviation(keys, values, keys.clone(), values.clone()).tolist() == [0.0] * 20
    one_value = values.clone()
    one_value[7, 0, 0] += 1
    moved = kv_deviation(keys, one_value, keys, values).nonzero().flatten()
    assert moved.tolist() == [7]


@all_dtypes
def test_only_the_direction_counts(dtype):
    new_keys, new_values, old_keys, old_values = random_kv(20, dtype=dtype)
    expected = kv_deviation(new_keys, new_values, old_keys, old_values)
    scaled = kv_deviation(new_keys * 8, new_values / 4, old_keys / 2, old_values * 16)
    torch.testing.assert_close(scaled, expected, rtol=0, atol=TOLERANCE)
    opposite = kv_deviation(new_keys, new_values, -new_keys, -new_values)
    torch.testing.assert_close(opposite, torch.full((20,), 4.0), rtol=0, atol=TOLERANCE)


@all_dtypes
def test_a_zero_vector_stays_zero(dtype):
    new_keys, new_values, old_keys, old_values = random_kv(3, dtype=dtype)
    new_keys[0] = old_keys[0] = 0  # no deviation of keys
    old_keys[1] = 0  # a unit vector from the origin
    new_values[2] = 0
    got = kv_deviation(new_keys, new_values, old_keys, old_values)
    expected = reference_kv_deviation(new_keys, new_values, old_keys, old_values)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=TOLERANCE)
    without_values = kv_deviation(new_keys, new_values, old_keys, new_values)
    assert without_values[0] == 0
    assert float(without_values[1]) == pytest.approx(1, abs=TOLERANCE)


def test_deviation_follows_permuted_heads_in_both_but_not_in_one():
    new_keys, new_values, old_keys, old_values = random_kv(20)
    order = [2, 0, 1]
    expected = kv_deviation(new_keys, new_values, old_keys, old_values)
    both = kv_deviation(new_keys[:, order], new_values, old_keys[:, order], old_values)
    torch.testing.assert_close(both, expected, rtol=0, atol=TOLERANCE)
    one = kv_deviation(new_keys[:, order], new_values, old_keys, old_values)
    assert (one - expected).abs().min() > 100 * TOLERANCE


@all_dtypes
def test_deviation_of_slices_equals_deviation_of_copies(dtype):
    wide = random_kv(21, 4, dtype=dtype)
    slices = [part[::2, 1:] for part in wide]
    copies = [part.clone(memory_format=torch.contiguous_format) for part in slices]
    before = [part.clone() for part in wide]
    torch.testing.assert_close(kv_deviation(*slices), kv_deviation(*copies), rtol=0, atol=TOLERANCE)
    assert all(torch.equal(part, copy) for part, copy in zip(wide, before, strict=True))


@all_dtypes
@pytest.mark.parametrize("block_numel", [100, 500])
def test_deviation_works_in_blocks_of_tokens(monkeypatch, dtype, block_numel):
    kv = random_kv(50, dtype=dtype)
    expected = kv_deviation(*kv)
    monkeypatch.setattr(signals, "BLOCK_NUMEL", block_numel)
    with Spy() as spy:
        got = kv_deviation(*kv)
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)
    assert spy.largest <= block_numel
    assert spy.count("div") >= 4 * (50 * 3 * HEAD_DIM // block_numel)
    monkeypatch.undo()
    with Spy() as spy:
        kv_deviation(*kv)
    assert spy.largest == 50 * 3 * HEAD_DIM


# Query importance


@all_dtypes
@all_groups
@pytest.mark.parametrize("window", [None, 0, 7, 100])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize(
    "columns",
    [last_columns(40, 6), torch.tensor([0, 3, 4, 19, 33]), torch.tensor([25]), torch.arange(40)],
    ids=["last", "scattered", "one", "all"],
)
def test_importance_equals_the_reference(dtype, group, window, soft_cap, columns):
    queries, keys = random_attention(columns, 40, group=group, dtype=dtype)
    got = query_importance(queries, keys, columns, SCALING, window, soft_cap)
    expected = reference_query_importance(queries, keys, columns, SCALING, window, soft_cap)
    assert (got.dtype, got.shape) == (torch.float32, (40,))
    assert is_close(got, expected)
    assert float(got.sum()) == pytest.approx(1, abs=1e-5)


@settings(max_examples=150)
@given(
    data=st.data(),
    kv_len=st.integers(1, 40),
    num_kv_heads=st.integers(1, 4),
    group=st.sampled_from([1, 2, 3, 8]),
    head_dim=st.sampled_from([1, 4, 16]),
    dtype=st.sampled_from(DTYPES),
    window=st.none() | st.integers(0, 45),
    soft_cap=st.none() | st.floats(0.5, 50),
    block_numel=st.integers(1, 3000),
    seed=st.integers(0, 1000),
)
def test_any_importance_equals_the_reference(
    data, kv_len, num_kv_heads, group, head_dim, dtype, window, soft_cap, block_numel, seed
):
    chosen = data.draw(st.sets(st.integers(0, kv_len - 1), min_size=1))
    columns = torch.tensor(sorted(chosen))
    queries, keys = random_attention(
        columns, kv_len, num_kv_heads, group, head_dim, dtype=dtype, seed=seed
    )
    scaling = head_dim**-0.5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signals, "BLOCK_NUMEL", block_numel)
        got = query_importance(queries, keys, columns, scaling, window, soft_cap)
    expected = reference_query_importance(queries, keys, columns, scaling, window, soft_cap)
    assert is_close(got, expected)
    assert float(got.sum()) == pytest.approx(1, abs=1e-5)
    assert not got[columns[-1] + 1 :].any()


@pytest.mark.parametrize(
    "slip",
    [
        lambda call: call | {"window": call["window"] + 1},
        lambda call: call | {"window": call["window"] - 1},
        lambda call: call | {"window": None},
        lambda call: call | {"columns": call["columns"] - 1},
        lambda call: call | {"columns": call["columns"] + 1},
        lambda call: call | {"scaling": call["scaling"] * 1.001},
        lambda call: call | {"soft_cap": None},
        lambda call: call | {"soft_cap": call["soft_cap"] * 1.001},
        lambda call: call | {"keys": call["keys"].flip(1)},
        lambda call: call | {"queries": call["queries"].flip(0)},
        lambda call: call | {"queries": call["queries"][:, [0, 2, 4, 1, 3, 5]]},
        lambda call: call | {"queries": call["queries"][:-1], "columns": call["columns"][:-1]},
    ],
    ids=[
        "wider window",
        "narrower window",
        "no window",
        "column before",
        "column behind",
        "scaling",
        "no soft cap",
        "soft cap",
        "KV heads",
        "order of queries",
        "heads interleaved",
        "a query left out",
    ],
)
def test_a_slip_in_any_argument_shows(slip: Callable[[dict[str, Any]], dict[str, Any]]):
    columns = torch.tensor([2, 11, 12, 30, 38])
    queries, keys = random_attention(columns, 40)
    call = {
        "queries": queries,
        "keys": keys,
        "columns": columns,
        "scaling": SCALING,
        "window": 7,
        "soft_cap": 3.0,
    }
    expected = reference_query_importance(**call)
    assert is_close(query_importance(**call), expected)
    assert not is_close(query_importance(**slip(call)), expected, 20 * TOLERANCE)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_importance_of_rounded_inputs_is_as_close_as_their_rounding(dtype):
    columns = last_columns(40, 6)
    queries, keys = random_attention(columns, 40)
    expected = reference_query_importance(queries, keys, columns, SCALING)
    rounded = query_importance(queries.to(dtype), keys.to(dtype), columns, SCALING)
    # A score is at most 6; its error moves the numerator and the denominator.
    assert is_close(rounded, expected, 2 * 6 * ROUNDING[dtype])
    assert not is_close(rounded, expected, 0.02 * ROUNDING[dtype])


def test_importance_of_equal_scores_is_uniform_over_what_each_query_sees():
    keys = random_tensor(8, 2, HEAD_DIM)
    queries = torch.zeros(2, 4, HEAD_DIM)
    columns = torch.tensor([1, 5])
    plain = query_importance(queries, keys, columns, SCALING)
    six, two = 1 / 12, 1 / 4
    assert plain.tolist() == pytest.approx([six + two] * 2 + [six] * 4 + [0, 0])
    # Window 2: column 5 sees 3, 4 and 5.
    windowed = query_importance(queries, keys, columns, SCALING, window=2)
    assert windowed.tolist() == pytest.approx([1 / 4] * 2 + [0] + [1 / 6] * 3 + [0] * 2)


def test_a_column_that_no_query_sees_weighs_exactly_nothing():
    columns = torch.tensor([3, 4, 20])
    queries, keys = random_attention(columns, 30)
    keys[[0, 8, 15, 25]] = 1000.0  # hidden ones must not even touch the row's maximum
    got = query_importance(queries, keys, columns, SCALING, window=2)
    assert got.nonzero().flatten().tolist() == [1, 2, 3, 4, 18, 19, 20]
    kept = [1, 2, 3, 4, 18, 19, 20]
    expected = reference_query_importance(queries, keys, columns, SCALING, window=2)
    assert is_close(got[kept], expected[kept])


def test_scores_of_thousands_do_not_overflow():
    columns = last_columns(20, 4)
    queries, keys = random_attention(columns, 20)
    got = query_importance(queries * 1000, keys, columns, SCALING)
    expected = reference_query_importance(queries * 1000, keys, columns, SCALING)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-3)
    assert float(got.sum()) == pytest.approx(1, abs=1e-5)


def test_importance_follows_permuted_heads_within_groups_and_with_their_keys():
    columns = last_columns(40, 6)
    queries, keys = random_attention(columns, 40, num_kv_heads=2, group=3)
    expected = query_importance(queries, keys, columns, SCALING).double()
    within = [2, 0, 1, 3, 5, 4]
    assert is_close(query_importance(queries[:, within], keys, columns, SCALING), expected)
    with_keys = [3, 4, 5, 0, 1, 2]
    swapped = query_importance(queries[:, with_keys], keys[:, [1, 0]], columns, SCALING)
    assert is_close(swapped, expected)
    across = [3, 1, 2, 0, 4, 5]
    assert not is_close(
        query_importance(queries[:, across], keys, columns, SCALING), expected, 20 * TOLERANCE
    )


def test_importance_is_the_mean_over_queries():
    columns = torch.tensor([5, 17, 38])
    queries, keys = random_attention(columns, 40)
    alone = [
        query_importance(queries[index : index + 1], keys, columns[index : index + 1], SCALING)
        for index in range(3)
    ]
    together = query_importance(queries, keys, columns, SCALING)
    assert is_close(together, torch.stack(alone).double().mean(0))


@all_dtypes
def test_importance_of_slices_equals_importance_of_copies(dtype):
    columns = torch.tensor([5, 17, 38])
    queries, keys = random_attention(torch.arange(6), 80, num_kv_heads=4, group=3, dtype=dtype)
    sliced_queries, sliced_keys = queries[::2, 3:], keys[::2, 1:]
    before = queries.clone(), keys.clone()
    got = query_importance(sliced_queries, sliced_keys, columns, SCALING, soft_cap=5.0)
    copies = (part.clone(memory_format=torch.contiguous_format) for part in (queries, keys))
    copied_queries, copied_keys = copies
    expected = reference_query_importance(
        copied_queries[::2, 3:], copied_keys[::2, 1:], columns, SCALING, soft_cap=5.0
    )
    assert is_close(got, expected)
    assert torch.equal(queries, before[0])
    assert torch.equal(keys, before[1])


def test_queries_and_keys_may_differ_in_dtype():
    columns = last_columns(40, 6)
    queries, keys = random_attention(columns, 40)
    keys = keys.bfloat16()
    expected = reference_query_importance(queries, keys, columns, SCALING)
    assert is_close(query_importance(queries, keys, columns, SCALING), expected)


# Blocks


@all_groups
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("block_numel", [1, 61, 640, 1000, 5000])
def test_importance_does_not_depend_on_the_block_size(monkeypatch, group, window, block_numel):
    columns = torch.tensor([0, 7, 8, 20, 21, 22, 50, 58, 59])
    queries, keys = random_attention(columns, 60, num_kv_heads=3, group=group, head_dim=4)
    with Spy() as spy:
        expected = query_importance(queries, keys, columns, 0.5, window, soft_cap=4.0)
    assert spy.count("bmm") == 1
    monkeypatch.setattr(signals, "BLOCK_NUMEL", block_numel)
    with Spy() as spy:
        got = query_importance(queries, keys, columns, 0.5, window, soft_cap=4.0)
    assert is_close(got, expected.double())
    num_scores = queries.shape[0] * queries.shape[1] * 60
    assert spy.count("bmm") >= num_scores / max(block_numel, 60)
    if block_numel == 1:
        assert spy.count("bmm") == queries.shape[0] * queries.shape[1]


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("columns", [last_columns(100, 40), torch.arange(0, 100, 5)], ids=len)
@pytest.mark.parametrize("block_numel", [400, 1500, 6000])
def test_no_intermediate_tensor_exceeds_the_block(monkeypatch, window, columns, block_numel):
    queries, keys = random_attention(
        columns, 100, num_kv_heads=3, group=4, head_dim=4, dtype=torch.bfloat16
    )
    monkeypatch.setattr(signals, "BLOCK_NUMEL", block_numel)
    with Spy() as spy:
        query_importance(queries, keys, columns, 0.5, window, soft_cap=4.0)
    assert spy.largest <= block_numel
    monkeypatch.setattr(signals, "BLOCK_NUMEL", 100 * block_numel)
    with Spy() as spy:
        query_importance(queries, keys, columns, 0.5, window, soft_cap=4.0)
    assert spy.largest > block_numel


@pytest.mark.parametrize(
    ("columns", "num_kv_heads", "group"),
    [(torch.tensor([19]), 8, 1), (torch.arange(5), 3, 4)],
    ids=["one query: keys outweigh scores", "few columns: queries outweigh scores"],
)
def test_copies_of_keys_and_queries_keep_to_the_block(monkeypatch, columns, num_kv_heads, group):
    kv_len = int(columns[-1]) + 1
    queries, keys = random_attention(columns, kv_len, num_kv_heads, group, dtype=torch.bfloat16)
    with Spy() as spy:
        expected = query_importance(queries, keys, columns, SCALING)
    assert spy.largest > 2 * 400
    monkeypatch.setattr(signals, "BLOCK_NUMEL", 400)
    with Spy() as spy:
        got = query_importance(queries, keys, columns, SCALING)
    assert spy.largest <= 400
    assert is_close(got, expected.double())


def test_blocks_are_filled_rather_than_cut_small(monkeypatch):
    columns = last_columns(100, 40)
    queries, keys = random_attention(columns, 100, num_kv_heads=4, group=2, head_dim=4)
    monkeypatch.setattr(signals, "BLOCK_NUMEL", 40 * 2 * 100 * 2)
    with Spy() as spy:
        query_importance(queries, keys, columns, 0.5)
    assert spy.count("bmm") == 2  # two KV heads each, all rows
    monkeypatch.setattr(signals, "BLOCK_NUMEL", 20 * 2 * 100)
    with Spy() as spy:
        query_importance(queries, keys, columns, 0.5)
    assert spy.count("bmm") == 8  # one KV head and half of the rows


def test_only_keys_that_some_query_sees_are_converted():
    columns = torch.tensor([40, 44])
    queries, keys = random_attention(columns, 5000, group=1, dtype=torch.bfloat16)
    with Spy() as spy:
        query_importance(queries, keys, columns, SCALING, window=10)
    converted = {shape for shape in spy.shapes if shape[-1] == HEAD_DIM and shape[0] > 2}
    assert converted == {(15, 2, HEAD_DIM)}  # columns 30..44
    assert max(math.prod(shape) for shape in spy.shapes if len(shape) > 1) == 15 * 2 * HEAD_DIM


# Entropy


@pytest.mark.parametrize("num_tokens", [2, 3, 1000, 100_000])
def test_entropy_is_one_for_uniform_and_zero_for_one_hot_weights(num_tokens):
    uniform = torch.full((num_tokens,), 0.3)
    assert normalised_entropy(uniform) == pytest.approx(1, abs=1e-9)
    one_hot = torch.zeros(num_tokens)
    one_hot[num_tokens // 2] = 0.01
    assert normalised_entropy(one_hot) == 0


def test_entropy_of_known_weights():
    halves = torch.tensor([1.0, 0.0, 1.0, 0.0])
    assert normalised_entropy(halves) == pytest.approx(0.5)
    weights = torch.tensor([2.0, 1.0, 1.0])
    assert normalised_entropy(weights) == pytest.approx(1.5 * math.log(2) / math.log(3))


@given(
    weights=st.lists(st.floats(0, 100, width=32), min_size=2, max_size=40).filter(any),
    scale=st.integers(-20, 20),
    seed=st.integers(0, 100),
)
def test_entropy_is_scale_free_order_free_and_between_zero_and_one(weights, scale, seed):
    tensor = torch.tensor(weights)
    entropy = normalised_entropy(tensor)
    total = math.fsum(weights)
    terms = [weight / total * math.log(weight / total) for weight in weights if weight > 0]
    assert entropy == pytest.approx(-math.fsum(terms) / math.log(len(weights)), abs=1e-9)
    assert 0 <= entropy <= 1
    order = torch.randperm(len(weights), generator=torch.Generator().manual_seed(seed))
    assert normalised_entropy(tensor[order]) == pytest.approx(entropy, abs=1e-9)
    scaled = tensor.double() * 2.0**scale
    if torch.equal(scaled.float().double(), scaled):  # nothing has underflowed
        assert normalised_entropy(scaled.float()) == pytest.approx(entropy, abs=1e-9)


@pytest.mark.parametrize(
    "weights",
    [[], [0.5], [0.0], [0.0, 0.0], [1.0, math.nan, 0.0], [math.inf, 1.0], [math.inf, math.inf]],
    ids=str,
)
def test_weights_that_say_nothing_count_as_spread_out(weights):
    assert normalised_entropy(torch.tensor(weights, dtype=torch.float32)) == 1.0


def test_flatter_weights_have_more_entropy():
    logits = random_tensor(200)
    entropies = [normalised_entropy(torch.softmax(logits * beta, 0)) for beta in (0, 1, 2, 4, 8)]
    assert entropies == sorted(entropies, reverse=True)
    assert entropies[0] - entropies[-1] > 0.3


# Top tokens


@given(
    scores=st.lists(st.sampled_from([0.0, 1.0, 2.0, -1.0, math.inf, math.nan]) | st.floats()),
    count=st.integers(0, 30),
    dtype=st.sampled_from([*DTYPES, torch.float64]),
)
def test_top_tokens_are_the_first_of_a_sorted_list(scores, count, dtype):
    tensor = torch.tensor(scores, dtype=torch.float64).to(dtype)
    values = [-math.inf if math.isnan(value) else value for value in tensor.tolist()]
    expected = sorted(range(len(values)), key=lambda index: (-values[index], index))[:count]
    got = top_tokens(tensor, count)
    assert got.dtype == torch.int64
    assert got.tolist() == sorted(expected)


@all_dtypes
def test_ties_go_to_the_earlier_tokens(dtype):
    scores = torch.zeros(5000, dtype=dtype)
    assert top_tokens(scores, 1200).tolist() == list(range(1200))
    scores[4000:] = 1
    assert top_tokens(scores, 1200).tolist() == [*range(200), *range(4000, 5000)]


def test_zeros_of_either_sign_tie():
    assert top_tokens(torch.tensor([-0.0, 0.0]), 1).tolist() == [0]
    assert top_tokens(torch.tensor([0.0, -0.0]), 1).tolist() == [0]


def test_nan_is_chosen_last():
    scores = torch.tensor([math.nan, 0.1, -math.nan, 0.3, -5.0])
    assert top_tokens(scores, 3).tolist() == [1, 3, 4]
    assert top_tokens(scores, 4).tolist() == [0, 1, 3, 4]


def test_a_count_beyond_the_tokens_takes_them_all():
    scores = random_tensor(6)
    assert top_tokens(scores, 6).tolist() == top_tokens(scores, 7).tolist() == list(range(6))
    assert top_tokens(scores, 0).tolist() == []
    assert top_tokens(torch.empty(0), 3).tolist() == []


def test_scores_are_left_alone():
    scores = torch.tensor([math.nan, 1.0, -0.0])
    before = scores.clone().view(torch.int32)
    top_tokens(scores, 2)
    assert torch.equal(scores.view(torch.int32), before)


# Refusals


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("new_keys", torch.zeros(4, 2)),
        ("new_keys", torch.zeros(4, 2, HEAD_DIM, dtype=torch.float64)),
        ("new_values", torch.zeros(4, 8)),
        ("new_values", torch.zeros(5, 2, 8)),
        ("new_values", torch.zeros(4, 3, 8)),
        ("new_values", torch.zeros(4, 2, 8, dtype=torch.int64)),
        ("new_values", torch.zeros(4, 2, 8, device="meta")),
        ("old_keys", torch.zeros(5, 2, HEAD_DIM)),
        ("old_keys", torch.zeros(4, 1, HEAD_DIM)),
        ("old_keys", torch.zeros(4, 2, HEAD_DIM, dtype=torch.bfloat16)),
        ("old_keys", torch.zeros(4, 2, HEAD_DIM, device="meta")),
        ("old_values", torch.zeros(4, 2, 1)),
        ("old_values", torch.zeros(4, 2, 8, device="meta")),
    ],
)
def test_kv_that_does_not_fit_is_refused(name, wrong):
    keys, values = torch.zeros(4, 2, HEAD_DIM), torch.zeros(4, 2, 8)
    fitting = {"new_keys": keys, "new_values": values, "old_keys": keys, "old_values": values}
    assert kv_deviation(**fitting).tolist() == [0.0] * 4
    with pytest.raises(ShapeError, match=rf"^{name}: expected .*, got \["):
        kv_deviation(**fitting | {name: wrong})


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("queries", torch.zeros(2, HEAD_DIM)),
        ("queries", torch.zeros(0, 4, HEAD_DIM)),
        ("queries", torch.zeros(2, 5, HEAD_DIM)),
        ("queries", torch.zeros(2, 0, HEAD_DIM)),
        ("queries", torch.zeros(2, 4, 8)),
        ("queries", torch.zeros(2, 4, HEAD_DIM, dtype=torch.float64)),
        ("queries", torch.zeros(2, 4, HEAD_DIM, device="meta")),
        ("keys", torch.zeros(10, HEAD_DIM)),
        ("keys", torch.zeros(10, 2, HEAD_DIM, dtype=torch.int64)),
        ("columns", torch.tensor([3])),
        ("columns", torch.tensor([[3, 4]])),
        ("columns", torch.tensor([3, 4], dtype=torch.int32)),
        ("columns", torch.tensor([4, 3])),
        ("columns", torch.tensor([-1, 3])),
        ("columns", torch.tensor([3, 10])),
    ],
)
def test_attention_that_does_not_fit_is_refused(name, wrong):
    fitting = {
        "queries": torch.zeros(2, 4, HEAD_DIM),
        "keys": torch.zeros(10, 2, HEAD_DIM),
        "columns": torch.tensor([3, 9]),
        "scaling": SCALING,
    }
    assert float(query_importance(**fitting).sum()) == pytest.approx(1)
    with pytest.raises(ShapeError, match=rf"^{name}: expected .*, got "):
        query_importance(**fitting | {name: wrong})


def test_no_query_is_refused_even_with_no_columns():
    with pytest.raises(ShapeError, match=r"^queries: expected \[at least 1"):
        query_importance(
            torch.zeros(0, 4, HEAD_DIM),
            torch.zeros(10, 2, HEAD_DIM),
            torch.empty(0, dtype=torch.int64),
            SCALING,
        )


@pytest.mark.parametrize(
    ("name", "wrong"), [("window", -1), ("soft_cap", 0.0), ("soft_cap", -30.0)]
)
def test_a_window_or_cap_out_of_range_is_refused(name, wrong):
    queries, keys = random_attention(torch.tensor([3]), 10)
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got {wrong}"):
        query_importance(queries, keys, torch.tensor([3]), SCALING, **{name: wrong})


@pytest.mark.parametrize("weights", [torch.zeros(3, 1), torch.zeros(3, dtype=torch.float64)])
def test_weights_that_do_not_fit_are_refused(weights):
    with pytest.raises(ShapeError, match=r"^weights: expected \[N\] torch\.float32, got \[3"):
        normalised_entropy(weights)


@pytest.mark.parametrize("scores", [torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64)])
def test_scores_that_do_not_fit_are_refused(scores):
    with pytest.raises(ShapeError, match=r"^scores: expected \[N\] of a float dtype, got \[3"):
        top_tokens(scores, 1)


def test_a_negative_count_is_refused():
    with pytest.raises(ValueError, match=r"^count: expected at least 0, got -1"):
        top_tokens(torch.zeros(3), -1)
