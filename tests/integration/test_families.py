"""Every supported family, layer by layer: tiny random models behind a real scheduler, in float32.

Each family has a process of its own (`families.main`), which observes; here are the claims.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.layers import STACKS
from tests.families import FAMILIES, LENGTHS, OTHERS, PHASES

pytestmark = pytest.mark.server

TIMEOUT_S = 500
NOISE = 1e-5
"""Relative distance of two float32 computations of the same thing; 2e-7 to 1e-6 are seen."""
FAR = 0.2
"""Relative distance of a wrong one; 0.45 and more are seen."""
PROGRAM = """
import sys
sys.path.append(sys.argv[1])  # behind the standard library, which has a `sched` as well
from tests.families import main
main(sys.argv[2:])
"""
CONTEXT = sum(LENGTHS[1:-1])
COUNTS = {
    "exact_tokens": LENGTHS[0],
    "reused_tokens": CONTEXT - 36,
    "recomputed_tokens": 36,  # 30 % of 120
    "computed_tokens": LENGTHS[-1],
}
SHARES = {
    # of 5 layers of 120 tokens
    "kvdev": (3 * 120 + 2 * 36) / 600,
    "qci": (120 + 4 * 36) / 600,
    "cacheblend": (120 + 4 * 36) / 600,
    "prophetkv": 0.3,
    "fusionrag": 0.3,
}

families = pytest.mark.parametrize("family", FAMILIES)
strategies = pytest.mark.parametrize("strategy", PHASES)


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What was observed, by family."""
    environment = {name: value for name, value in os.environ.items() if "SGLANG" not in name}
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, root, *FAMILIES, *OTHERS],
        env={**environment, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"family"')]
    observed = {line["family"]: line for line in lines}
    errors = {name: line["error"] for name, line in observed.items() if "error" in line}
    assert not errors, f"{errors}\n{done.stderr[-4000:]}"
    return observed


def test_every_class_that_is_run_layer_by_layer_is_observed(seen: dict[str, Any]) -> None:
    assert {seen[family]["model"] for family in FAMILIES} == set(STACKS)


@families
def test_pic_is_on_and_its_self_test_passed(seen: dict[str, Any], family: str) -> None:
    assert seen[family]["off_reason"] is None
    assert seen[family]["why_no_layers"] == ""


@families
@strategies
def test_everything_covered_is_plain_prefill(
    seen: dict[str, Any], family: str, strategy: str
) -> None:
    assert max(seen[family]["everything"][strategy].values()) < NOISE


@families
def test_every_layer_warmed_is_plain_prefill(seen: dict[str, Any], family: str) -> None:
    assert max(seen[family]["all_warm"].values()) < NOISE


@families
def test_the_comparison_sees_reuse_and_a_layer_left_out(seen: dict[str, Any], family: str) -> None:
    """Controls of the two above."""
    for wrong in ("reuse", "without_a_layer"):
        assert min(seen[family][wrong].values()) > FAR


@families
def test_no_phase_at_all_is_bit_equal_to_reuse(seen: dict[str, Any], family: str) -> None:
    assert seen[family]["nothing_is_reuse"] is True


@families
@strategies
def test_a_strategy_computes_what_it_says(seen: dict[str, Any], family: str, strategy: str) -> None:
    report = seen[family]["some"][strategy]["report"]
    assert (report["outcome"], report["fallback"]) == ("reused", None)
    assert {kind: report[kind] for kind in COUNTS} == COUNTS
    assert report["recomputed_share"] == pytest.approx(SHARES[strategy], abs=1e-6)


@families
@strategies
def test_chosen_tokens_move_and_others_stay_as_reused(
    seen: dict[str, Any], family: str, strategy: str
) -> None:
    some = seen[family]["some"][strategy]
    assert some["chosen"] == some["chosen_moved"] == 36
    assert some["kept_as_reused"] is True
    assert some["warm_layers"] < NOISE


@families
@pytest.mark.parametrize("strategy", ["kvdev", "cacheblend"])
def test_the_tokens_whose_kv_is_furthest_from_plain_prefills_are_chosen(
    seen: dict[str, Any], family: str, strategy: str
) -> None:
    assert seen[family]["chosen"][strategy] == seen[family]["expected"][strategy]


@families
def test_the_tokens_the_query_attends_to_under_full_reuse_are_chosen(
    seen: dict[str, Any], family: str
) -> None:
    """By the reference in float64 on its own queries: heads, windows and scaling included."""
    assert seen[family]["chosen"]["prophetkv"] == seen[family]["expected"]["prophetkv"]


@families
@pytest.mark.parametrize("case", ["all_probed", "not_narrowed"])
def test_what_every_layer_computed_is_exact_and_reported_so(
    seen: dict[str, Any], family: str, case: str
) -> None:
    """A Probe that ends the model, and a gradual choice whose only layer takes everything."""
    last = seen[family]["last_layers"][case]
    assert max(last["far"].values()) < NOISE
    assert last["report"]["recomputed_share"] == 1.0
    assert (last["report"]["recomputed_tokens"], last["report"]["reused_tokens"]) == (CONTEXT, 0)
    assert last["cached"] == sum(LENGTHS) - 1


@families
def test_a_gradual_choice_reports_what_its_last_layer_computed(
    seen: dict[str, Any], family: str
) -> None:
    last = seen[family]["last_layers"]["narrowed"]
    computed = 96  # 1.6 * 50 % of 120
    assert last["report"]["recomputed_tokens"] == computed
    share = (4 * CONTEXT + computed) / (5 * CONTEXT)
    assert last["report"]["recomputed_share"] == pytest.approx(share, abs=1e-6)
    assert last["cached"] < sum(LENGTHS) - 1


@families
def test_signals_choose_differently(seen: dict[str, Any], family: str) -> None:
    chosen = {tuple(columns) for columns in seen[family]["chosen"].values()}
    assert len(chosen) == len(PHASES)


# Families that are not run layer by layer


def test_a_subclass_of_a_supported_class_is_not_supported(seen: dict[str, Any]) -> None:
    phi3 = seen["phi3"]
    assert phi3["off_reason"] is None
    assert "model class Phi3ForCausalLM, expected one of" in phi3["why_no_layers"]
    assert phi3["fallbacks"] == dict.fromkeys(PHASES, "layerwise_unsupported")
    assert phi3["fallback_distance"] < NOISE


def test_what_is_selected_beforehand_works_without_layers(seen: dict[str, Any]) -> None:
    phi3 = seen["phi3"]
    assert (phi3["daric"]["outcome"], phi3["daric"]["fallback"]) == ("reused", None)
    assert phi3["daric"]["recomputed_tokens"] > 0
    assert phi3["daric_everything"] < NOISE
