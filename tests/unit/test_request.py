"""`custom_params` into checked options: what is accepted, what is refused, and in which words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.errors import RequestError
from sglang_ext.recompute.layerwise import LayerPlan, LayerwiseParams, ProbeRows, Signal
from sglang_ext.recompute.selection import PRIOR_STRATEGIES, Allocation, SelectionParams
from sglang_ext.recompute.strategies.registry import LAYERWISE_STRATEGIES
from sglang_ext.request import (
    MAX_BUDGET,
    MAX_LAYERS,
    MAX_NAME_LEN,
    STRATEGIES,
    RequestOptions,
    StorePolicy,
    check_bounds,
    is_given,
    parse_options,
    plan_layers,
)

DEFAULTS = RequestOptions()
# No field has the value RequestOptions() would give it, so that a lost default is seen.
OTHER_DEFAULTS = RequestOptions(
    is_enabled=False,
    delimiter="##",
    strategy="epic",
    selection=SelectionParams(n_avg=7, alloc=Allocation.LOG, alloc_ratio=0.5, max_share=0.75),
    layerwise=LayerwiseParams(warmup=3, probe=4, coverage=0.25, is_gradual=True),
    namespace="tenant",
    ttl_s=9.0,
    store=StorePolicy.ALL,
    is_strict=True,
)
KEYS = (
    "pic",
    "pic_bounds",
    "pic_delimiter",
    "pic_strategy",
    "pic_n_avg",
    "pic_alloc",
    "pic_alloc_ratio",
    "pic_max_share",
    "pic_warmup",
    "pic_probe",
    "pic_coverage",
    "pic_gradual",
    "pic_namespace",
    "pic_doc_ids",
    "pic_ttl_s",
    "pic_store",
    "pic_pin",
    "pic_invalidate",
    "pic_purge",
    "pic_strict",
)

ACCEPTED: list[tuple[str, Any, str, Any]] = [
    # key, value, field, what the field becomes
    ("pic", True, "is_enabled", True),
    ("pic", False, "is_enabled", False),
    ("pic_bounds", [], "bounds", ()),
    ("pic_bounds", [0], "bounds", (0,)),
    ("pic_bounds", [0, 1, 900], "bounds", (0, 1, 900)),
    ("pic_bounds", (3, 4), "bounds", (3, 4)),
    ("pic_delimiter", "#", "delimiter", "#"),
    ("pic_delimiter", "x" * MAX_NAME_LEN, "delimiter", "x" * MAX_NAME_LEN),
    *[("pic_strategy", name, "strategy", name) for name in STRATEGIES],
    ("pic_n_avg", 0, "selection.n_avg", 0),
    ("pic_n_avg", MAX_BUDGET, "selection.n_avg", MAX_BUDGET),
    *[("pic_alloc", alloc.value, "selection.alloc", alloc) for alloc in Allocation],
    ("pic_alloc_ratio", 0.999, "selection.alloc_ratio", 0.999),
    ("pic_max_share", 1, "selection.max_share", 1.0),
    ("pic_max_share", 1e-9, "selection.max_share", 1e-9),
    ("pic_warmup", 0, "layerwise.warmup", 0),
    ("pic_warmup", MAX_LAYERS, "layerwise.warmup", MAX_LAYERS),
    ("pic_probe", 0, "layerwise.probe", 0),
    ("pic_probe", MAX_LAYERS, "layerwise.probe", MAX_LAYERS),
    ("pic_coverage", 0, "layerwise.coverage", 0.0),
    ("pic_coverage", 1, "layerwise.coverage", 1.0),
    ("pic_coverage", 0.05, "layerwise.coverage", 0.05),
    ("pic_gradual", True, "layerwise.is_gradual", True),
    ("pic_gradual", False, "layerwise.is_gradual", False),
    ("pic_namespace", "é" * MAX_NAME_LEN, "namespace", "é" * MAX_NAME_LEN),
    ("pic_doc_ids", [], "doc_ids", ()),
    ("pic_doc_ids", ["a", "b"], "doc_ids", ("a", "b")),
    ("pic_invalidate", ["a@2"], "invalidates", ("a@2",)),
    ("pic_purge", True, "purges", True),
    ("pic_ttl_s", 1, "ttl_s", 1.0),
    ("pic_ttl_s", 0.5, "ttl_s", 0.5),
    ("pic_ttl_s", 315360000, "ttl_s", 315360000.0),
    *[("pic_store", policy.value, "store", policy) for policy in StorePolicy],
    ("pic_pin", True, "is_pinned", True),
    ("pic_strict", True, "is_strict", True),
]

REFUSED: list[tuple[str, Any]] = [
    *[(key, None) for key in KEYS],
    *[(key, {"a": 1}) for key in KEYS],
    ("pic", 1),
    ("pic", "true"),
    ("pic_bounds", "0,1"),
    ("pic_bounds", 3),
    ("pic_bounds", [1, 1]),
    ("pic_bounds", [2, 1]),
    ("pic_bounds", [-1, 1]),
    ("pic_bounds", [0, 1.0]),
    ("pic_bounds", [0, "1"]),
    ("pic_bounds", [0, None]),
    ("pic_bounds", [[0]]),
    ("pic_bounds", [False, True]),
    ("pic_delimiter", ""),
    ("pic_delimiter", "x" * (MAX_NAME_LEN + 1)),
    ("pic_delimiter", ["#"]),
    ("pic_delimiter", 7),
    ("pic_strategy", "DARIC"),
    ("pic_strategy", "best"),
    ("pic_strategy", ""),
    ("pic_strategy", ["daric"]),
    ("pic_n_avg", -1),
    ("pic_n_avg", MAX_BUDGET + 1),
    ("pic_n_avg", 8.0),
    ("pic_n_avg", "8"),
    ("pic_n_avg", True),
    ("pic_alloc", "cubic"),
    ("pic_alloc", 1),
    ("pic_alloc_ratio", 0),
    ("pic_alloc_ratio", 1),
    ("pic_alloc_ratio", float("nan")),
    ("pic_alloc_ratio", 10**400),
    ("pic_alloc_ratio", "0.1"),
    ("pic_alloc_ratio", True),
    ("pic_max_share", 0),
    ("pic_max_share", 1.01),
    ("pic_max_share", float("nan")),
    ("pic_max_share", float("inf")),
    ("pic_max_share", 10**400),
    ("pic_max_share", True),
    *[(key, -1) for key in ("pic_warmup", "pic_probe")],
    *[(key, MAX_LAYERS + 1) for key in ("pic_warmup", "pic_probe")],
    *[(key, 2.0) for key in ("pic_warmup", "pic_probe")],
    *[(key, "2") for key in ("pic_warmup", "pic_probe")],
    *[(key, True) for key in ("pic_warmup", "pic_probe", "pic_coverage")],
    ("pic_coverage", -0.01),
    ("pic_coverage", 1.01),
    ("pic_coverage", float("nan")),
    ("pic_coverage", float("inf")),
    ("pic_coverage", 10**400),
    ("pic_coverage", "0.5"),
    ("pic_gradual", 1),
    ("pic_gradual", "true"),
    ("pic_namespace", ""),
    ("pic_namespace", "x" * (MAX_NAME_LEN + 1)),
    ("pic_namespace", 1),
    ("pic_doc_ids", "a"),
    ("pic_invalidate", "a"),
    ("pic_purge", "yes"),
    ("pic_doc_ids", ["a", 1]),
    ("pic_doc_ids", [""]),
    ("pic_ttl_s", 0),
    ("pic_ttl_s", -1.0),
    ("pic_ttl_s", 315360001),
    ("pic_ttl_s", float("nan")),
    ("pic_ttl_s", float("inf")),
    ("pic_ttl_s", 10**400),
    ("pic_ttl_s", True),
    ("pic_store", "some"),
    ("pic_store", True),
    ("pic_pin", 1),
    ("pic_strict", "false"),
]

EXPECTED_WORDS = {
    "pic": "true or false",
    "pic_bounds": "sorted, unique and not negative",
    "pic_delimiter": f"1 to {MAX_NAME_LEN} characters",
    "pic_strategy": "one of daric, epic, reuse, full, kvdev, qci, cacheblend, prophetkv, fusionrag",
    "pic_n_avg": f"an integer from 0 to {MAX_BUDGET}",
    "pic_alloc": "one of linear, log, exp",
    "pic_alloc_ratio": "above 0 and below 1",
    "pic_max_share": "above 0 and at most 1",
    "pic_warmup": f"an integer from 0 to {MAX_LAYERS}",
    "pic_probe": f"an integer from 0 to {MAX_LAYERS}",
    "pic_coverage": "a number from 0 to 1",
    "pic_gradual": "true or false",
    "pic_namespace": f"1 to {MAX_NAME_LEN} characters",
    "pic_ttl_s": "seconds above 0",
    "pic_store": "one of chunks, all, none",
    "pic_pin": "true or false",
    "pic_purge": "true or false",
    "pic_strict": "true or false",
}


def read(options: RequestOptions, field: str) -> Any:
    value: Any = options
    for name in field.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize(("key", "value", "field", "expected"), ACCEPTED)
@pytest.mark.parametrize("defaults", [DEFAULTS, OTHER_DEFAULTS], ids=["builtin", "server"])
def test_a_key_changes_its_own_field_and_no_other(
    defaults: RequestOptions, key: str, value: Any, field: str, expected: Any
) -> None:
    options = parse_options({key: value}, defaults)
    got = read(options, field)
    assert got == expected
    assert type(got) is type(expected)
    owner, _, name = field.rpartition(".")
    if owner:
        default = getattr(getattr(defaults, owner), name)
        restored = replace(options, **{owner: replace(getattr(options, owner), **{name: default})})
    else:
        restored = replace(options, **{name: getattr(defaults, name)})
    assert restored == defaults


@pytest.mark.parametrize(("key", "value"), REFUSED)
def test_a_wrong_value_is_refused_by_key_value_and_expectation(key: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        parse_options({key: value}, DEFAULTS)
    message = str(caught.value)
    assert caught.value.key == key
    assert message.startswith(f"{key}: got ")
    if not isinstance(value, (list, tuple)):  # of a list, the item at fault may be shown instead
        assert repr(value) in message
    expected = message.partition(", expected ")[2]
    assert EXPECTED_WORDS.get(key, "strings") in expected or key == "pic_doc_ids"
    assert "\n" not in message


def test_a_wrong_list_item_is_shown() -> None:
    with pytest.raises(RequestError, match=r"^pic_bounds: got 4, expected a list of token offsets"):
        parse_options({"pic_bounds": [0, 5, 4]}, DEFAULTS)


def test_every_key_has_a_reader_and_is_named_in_the_message_for_unknown_ones() -> None:
    with pytest.raises(RequestError) as caught:
        parse_options({"pic_n_average": 3}, DEFAULTS)
    got, _, expected = str(caught.value).partition(", expected one of ")
    assert got == "pic_n_average: got 3"
    assert expected.split(", ") == sorted(KEYS)


@pytest.mark.parametrize("key", ["pic_", "pic_N_AVG", "pic_n_avg ", "pic_ttft"])
def test_a_key_in_our_name_that_means_nothing_is_refused(key: str) -> None:
    with pytest.raises(RequestError, match="expected one of"):
        parse_options({key: 1}, DEFAULTS)


def test_keys_of_others_are_left_alone() -> None:
    foreign = {"picture": {"deep": [1]}, "PIC": 1, "topic_n": 2, "thinking_budget": -1}
    assert parse_options(foreign, OTHER_DEFAULTS) == OTHER_DEFAULTS
    assert not is_given(foreign)


@pytest.mark.parametrize("custom_params", [None, {}])
def test_a_request_without_custom_params_gets_the_servers_choices(
    custom_params: dict[str, Any] | None,
) -> None:
    assert parse_options(custom_params, OTHER_DEFAULTS) is OTHER_DEFAULTS
    assert not is_given(custom_params)


@pytest.mark.parametrize("key", KEYS)
def test_naming_any_key_is_mentioning_pic(key: str) -> None:
    assert is_given({"other": 1, key: None})


def test_every_strategy_of_recompute_can_be_asked_for() -> None:
    assert set(STRATEGIES) == {*PRIOR_STRATEGIES, *LAYERWISE_STRATEGIES}
    for name in STRATEGIES:
        assert parse_options({"pic_strategy": name}, DEFAULTS).strategy == name


def test_parsing_does_not_modify_the_mapping() -> None:
    custom = {"pic_bounds": [0, 2], "pic_doc_ids": ["a"], "other": 1}
    parse_options(custom, DEFAULTS)
    assert custom == {"pic_bounds": [0, 2], "pic_doc_ids": ["a"], "other": 1}


# Phases against a model


def test_layers_are_planned_by_the_strategy_a_request_names() -> None:
    custom = {"pic_strategy": "kvdev", "pic_warmup": 3, "pic_coverage": 0.5, "pic_gradual": True}
    plan = plan_layers(parse_options(custom, DEFAULTS), num_layers=12)
    assert plan is not None
    assert (plan.signal, plan.rows) == (Signal.KV_DEVIATION, ProbeRows.ALL)
    assert (plan.warmup, plan.probe, plan.coverage) == (3, 2, 0.5)
    assert plan.filters == pytest.approx((0.8, 0.7, 0.6))


def test_what_a_request_does_not_say_is_the_servers_choice_and_then_the_strategys() -> None:
    servers = replace(DEFAULTS, layerwise=LayerwiseParams(probe=3))
    plan = plan_layers(parse_options({"pic_strategy": "qci", "pic_warmup": 2}, servers), 12)
    assert plan == LayerPlan(Signal.QUERY_IMPORTANCE, ProbeRows.QUERY, 2, 3, 0.15)


@pytest.mark.parametrize("name", PRIOR_STRATEGIES)
def test_a_prior_strategy_has_no_phases_whatever_a_request_says_of_them(name: str) -> None:
    custom = {"pic_strategy": name, "pic_warmup": MAX_LAYERS, "pic_probe": MAX_LAYERS}
    assert plan_layers(parse_options(custom, DEFAULTS), num_layers=2) is None


@pytest.mark.parametrize("name", LAYERWISE_STRATEGIES)
def test_phases_that_do_not_fit_a_model_are_refused_by_their_key(name: str) -> None:
    custom = {"pic_strategy": name, "pic_warmup": 13, "pic_probe": 0}
    with pytest.raises(RequestError, match=r"^pic_warmup: got 13, expected 0 to 12 layers"):
        plan_layers(parse_options(custom, DEFAULTS), num_layers=12)


# Bounds against a prompt: 0 <= b < num_tokens


@pytest.mark.parametrize("bounds", [(), (0,), (0, 9), (9,)])
def test_bounds_up_to_the_last_token_are_accepted(bounds: tuple[int, ...]) -> None:
    check_bounds(bounds, num_tokens=10)


@pytest.mark.parametrize("bounds", [(10,), (0, 11), (3, 1 << 40)])
def test_a_bound_at_or_behind_the_end_is_refused(bounds: tuple[int, ...]) -> None:
    message = f"pic_bounds: got {bounds[-1]}, expected offsets below the prompt's 10 tokens"
    with pytest.raises(RequestError, match=message):
        check_bounds(bounds, num_tokens=10)


# Properties

JSON_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
JSON = st.recursive(
    JSON_SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4))
def test_any_json_is_either_read_or_refused_by_a_key_that_was_given(given: dict[str, Any]) -> None:
    refused = ""
    try:
        options = parse_options(given, DEFAULTS)
    except RequestError as exc:
        refused = exc.key
    if refused:
        assert refused in given
        return
    assert hash(options) == hash(replace(options))
    assert options.bounds is None or sorted(set(options.bounds)) == list(options.bounds)
    assert 0 <= options.selection.n_avg <= MAX_BUDGET
    assert 0 < options.selection.max_share <= 1
    assert 0 <= (options.layerwise.coverage or 0) <= 1
    assert 0 <= (options.layerwise.warmup or 0) <= MAX_LAYERS


@given(st.lists(st.integers(-3, 40), max_size=8))
def test_bounds_are_accepted_exactly_when_sorted_unique_and_not_negative(bounds: list[int]) -> None:
    is_right = bounds == sorted(set(bounds)) and all(bound >= 0 for bound in bounds)
    if is_right:
        assert parse_options({"pic_bounds": bounds}, DEFAULTS).bounds == tuple(bounds)
    else:
        with pytest.raises(RequestError, match=r"^pic_bounds: got "):
            parse_options({"pic_bounds": bounds}, DEFAULTS)
