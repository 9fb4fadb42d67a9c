"""What a client is told: one flat dict whose four counts sum to the prompt."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.report import Outcome, PicReport, Reason

COUNTS = ("exact_tokens", "reused_tokens", "recomputed_tokens", "computed_tokens")


def filled() -> PicReport:
    """A report of a request that reused chunks."""
    return PicReport(
        strategy="daric",
        num_chunks=4,
        prompt_tokens=100,
        outcome=Outcome.REUSED,
        exact=10,
        reused=60,
        recomputed=20,
        computed=10,
        selected=25,
        recomputed_share=1 / 3,
        bytes_loaded={"host": 4096, "disk": 512},
        declined=2,
        late=1,
        level=1,
        phase_ms={"lookup": 0.12345, "patch": 7.0},
    )


def test_the_dict_says_everything_under_its_published_name() -> None:
    assert filled().as_dict() == {
        "strategy": "daric",
        "outcome": "reused",
        "fallback": None,
        "detail": None,
        "chunks": 4,
        "prompt_tokens": 100,
        "exact_tokens": 10,
        "reused_tokens": 60,
        "recomputed_tokens": 20,
        "computed_tokens": 10,
        "selected_tokens": 25,
        "recomputed_share": 0.333333,
        "plan": {"warmup": 0, "probe": 0, "coverage": 0.333333},
        "level": 1,
        "bytes_loaded": {"host": 4096, "disk": 512},
        "declined_segments": 2,
        "late_segments": 1,
        "ms": {"lookup": 0.123, "patch": 7.0},
    }


def test_a_fallback_names_its_reason_and_claims_no_reuse() -> None:
    report = filled()
    report.fall_back(Reason.ERROR, "ValueError: broken")
    said = report.as_dict()
    assert (said["outcome"], said["fallback"], said["detail"]) == (
        "full",
        "internal_error",
        "ValueError: broken",
    )
    assert [said[name] for name in COUNTS] == [0, 0, 0, 100]
    assert (said["selected_tokens"], said["recomputed_share"]) == (0, 0.0)
    assert said["bytes_loaded"] == {"host": 0, "disk": 512}


def test_a_full_prefill_behind_an_exact_prefix_counts_the_prefix() -> None:
    report = filled()
    report.fall_back(Reason.DISABLED)
    report.set_full(prefix_len=64)
    said = report.as_dict()
    assert [said[name] for name in COUNTS] == [64, 0, 0, 36]
    assert said["fallback"] == "disabled_by_request"


def test_reasons_and_outcomes_are_words_for_metrics() -> None:
    words = [*Reason, *Outcome]
    assert len({word.value for word in words}) == len(words)
    assert all(word.value == word.value.lower().strip() for word in words)
    assert all(word.value.replace("_", "").isalpha() for word in words)


def depth(value: Any) -> int:
    return 1 + max(map(depth, value.values()), default=0) if isinstance(value, dict) else 0


@pytest.mark.parametrize("reason", [None, *Reason])
def test_the_dict_is_plain_json_one_mapping_deep(reason: Reason | None) -> None:
    report = filled()
    if reason is not None:
        report.fall_back(reason)
    said = report.as_dict()
    assert json.loads(json.dumps(said)) == said
    assert depth(said) == 2
    assert type(said["outcome"]) is str


@given(st.integers(0, 1 << 20), st.integers(0, 1 << 20), st.sampled_from(Reason))
def test_a_full_prefill_always_sums_to_the_prompt(
    prompt_tokens: int, prefix_len: int, reason: Reason
) -> None:
    report = PicReport("daric", prompt_tokens=prompt_tokens)
    report.fall_back(reason)
    report.set_full(min(prefix_len, prompt_tokens))
    said = report.as_dict()
    assert sum(said[name] for name in COUNTS) == prompt_tokens
    assert min(said[name] for name in COUNTS) >= 0


def test_two_reports_do_not_share_their_phases() -> None:
    first, second = PicReport("daric"), PicReport("daric")
    first.phase_ms["lookup"] = 1.0
    first.bytes_loaded["host"] = 1
    assert second.phase_ms == {}
    assert second.bytes_loaded == {"host": 0}
