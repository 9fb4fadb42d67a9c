"""Arms of the quality lab: how they are written, named and asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.chunk_index.spans import Span, count_tokens
from sglang_ext.errors import ConfigError
from sglang_ext.recompute.layerwise import LayerPlan
from sglang_ext.recompute.selection import PRIOR_STRATEGIES
from sglang_ext.recompute.strategies.registry import LAYERWISE_STRATEGIES
from sglang_ext.request import RequestOptions, parse_options, plan_layers
from sglang_ext.scripts.quality.arms import (
    COVERAGE_ONLY,
    DEFAULT_ARMS,
    FULL,
    REUSE,
    WITHOUT_BUDGET,
    Arm,
    Phases,
    parse_arm,
    parse_arms,
)

NUM_LAYERS = 30
CHUNKS = [Span(0, 15), *(Span(15 + 100 * i, 115 + 100 * i) for i in range(16)), Span(1615, 1640)]
"""90 tokens of prose, a name and a fact."""
CACHED = 16 * 100

SHARES = st.integers(1, 999).map(lambda mils: mils / 1000)
LAYERS = st.integers(0, 40)
ARMS = st.one_of(
    st.sampled_from([Arm(name) for name in WITHOUT_BUDGET]),
    st.builds(Arm, st.sampled_from(["daric", "epic"]), st.integers(1, 500)),
    st.builds(
        lambda name, w, p, r: Arm(name, phases=Phases(w, p), coverage=r),
        st.sampled_from(["kvdev", "qci", "cacheblend"]),
        LAYERS,
        LAYERS,
        SHARES,
    ),
    st.builds(lambda name, r: Arm(name, coverage=r), st.sampled_from(COVERAGE_ONLY), SHARES),
)


@pytest.mark.parametrize(
    ("text", "arm", "budget", "params"),
    [
        ("reuse", Arm("reuse"), "", {}),
        ("full", Arm("full"), "", {}),
        (
            "daric:16",
            Arm("daric", n_avg=16),
            "n_avg=16",
            {"pic_n_avg": 16, "pic_max_share": 1.0},
        ),
        (
            "kvdev:4,2,0.15",
            Arm("kvdev", phases=Phases(4, 2), coverage=0.15),
            "4,2,15%",
            {"pic_warmup": 4, "pic_probe": 2, "pic_coverage": 0.15},
        ),
        (
            "qci:1,8,2.5%",
            Arm("qci", phases=Phases(1, 8), coverage=0.025),
            "1,8,2.5%",
            {"pic_warmup": 1, "pic_probe": 8, "pic_coverage": 0.025},
        ),
        ("prophetkv:20%", Arm("prophetkv", coverage=0.2), "20%", {"pic_coverage": 0.2}),
    ],
)
def test_an_arm_is_read_named_and_asked_for(
    text: str, arm: Arm, budget: str, params: dict[str, object]
) -> None:
    assert parse_arm(text) == arm
    assert arm.budget == budget
    assert arm.params == {"pic_strategy": arm.strategy, **params}


@given(ARMS)
def test_a_label_is_read_as_the_arm_it_names(arm: Arm) -> None:
    assert parse_arm(arm.label) == arm


@pytest.mark.parametrize(
    ("text", "got", "expected"),
    [
        ("cachebland:1,0,5%", "'cachebland'", "expected one of daric"),
        ("", "''", "expected one of daric"),
        ("reuse:3", "'reuse:3'", "nothing behind it"),
        ("full:", "'full:'", "nothing behind it"),
        ("daric", "N: got ''", "daric:N with N an integer of at least 1"),
        ("epic:0", "N: got '0'", "at least 1"),
        ("epic:-4", "N: got '-4'", "at least 1"),
        ("epic:²", "N: got '²'", "at least 1"),
        ("kvdev", "got ''", "expected kvdev:W,P,R"),
        ("kvdev:4,2", "got '4,2'", "expected kvdev:W,P,R"),
        ("kvdev:4,2,15%,1", "got '4,2,15%,1'", "expected kvdev:W,P,R"),
        ("qci:x,8,15%", "W: got 'x'", "at least 0"),
        ("qci:1,,15%", "P: got ''", "at least 0"),
        ("qci:1,8,15", "R: got '15'", "above 0 and below 1, such as 0.15 or 15%"),
        ("qci:1,8,0", "R: got '0'", "above 0"),
        ("qci:1,8,100%", "R: got '100%'", "below 1"),
        ("qci:1,8,nan", "R: got 'nan'", "below 1"),
        ("qci:1,8,%", "R: got '%'", "below 1"),
        ("prophetkv:1,8,15%", "got '1,8,15%'", "expected prophetkv:R"),
        ("fusionrag", "R: got ''", "fusionrag:R"),
    ],
)
def test_what_cannot_be_read_is_named_with_what_is_expected(
    text: str, got: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_arm(text)
    assert f"arm {text!r}" in str(raised.value)
    assert got in str(raised.value)
    assert expected in str(raised.value)


def test_reuse_comes_first_full_is_left_out_and_none_comes_twice() -> None:
    arms = parse_arms(["daric:16  full", "epic:4", "daric:16", "reuse"])
    assert arms == (REUSE, Arm("daric", n_avg=16), Arm("epic", n_avg=4))
    assert parse_arms(["full"]) == (REUSE,)
    assert FULL not in DEFAULT_ARMS


@pytest.mark.parametrize("texts", [[], [""], [" ", ""]])
def test_no_arm_at_all_is_refused(texts: list[str]) -> None:
    with pytest.raises(ConfigError, match="got none"):
        parse_arms(texts)


@given(ARMS)
def test_a_server_reads_what_an_arm_asks_for(arm: Arm) -> None:
    options = parse_options(arm.params, RequestOptions())
    assert options.strategy == arm.strategy
    if arm.n_avg:
        assert (options.selection.n_avg, options.selection.max_share) == (arm.n_avg, 1.0)
    assert options.layerwise.coverage == arm.coverage
    if arm.phases:
        assert (options.layerwise.warmup, options.layerwise.probe) == arm.phases


def test_every_strategy_has_a_form() -> None:
    for strategy in (*PRIOR_STRATEGIES, *LAYERWISE_STRATEGIES):
        budgets = ["", ":5%", ":1,8,5%", ":16"]
        read = []
        for budget in budgets:
            try:
                read.append(parse_arm(f"{strategy}{budget}"))
            except ConfigError:
                continue
        assert len(read) == 1, f"{strategy} is read in one of {budgets}"


def test_default_arms_are_six_strategies_at_two_budgets_and_reuse() -> None:
    assert DEFAULT_ARMS[0] == REUSE
    shares: dict[str, list[float]] = {}
    for arm in DEFAULT_ARMS[1:]:
        shares.setdefault(arm.strategy, []).append(_share(arm))
    assert sorted(shares) == ["cacheblend", "daric", "epic", "kvdev", "prophetkv", "qci"]
    for strategy, (low, high) in shares.items():
        assert low == pytest.approx(0.08, abs=0.015), strategy
        assert high == pytest.approx(0.20, abs=0.025), strategy


def _share(arm: Arm) -> float:
    """Recomputed share of 16 cached chunks of 100 tokens on 30 layers."""
    options = parse_options(arm.params, RequestOptions())
    plan: LayerPlan | None = plan_layers(options, NUM_LAYERS)
    if plan is not None:
        return plan.share(NUM_LAYERS, num_context=CACHED, num_query=25)
    chosen = PRIOR_STRATEGIES[arm.strategy](CHUNKS, options.selection)
    inside = [Span(max(s.start, 15), min(s.end, 1615)) for s in chosen]
    return count_tokens([span for span in inside if span.start < span.end]) / CACHED
