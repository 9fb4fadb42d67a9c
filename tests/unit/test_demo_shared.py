"""The demo of sharing: what its rows come to, and what every server is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sglang_ext.config import config_from_args
from sglang_ext.errors import ServerFailed
from sglang_ext.scripts.demo_shared import MIB, Row, make_options, make_row, summarize
from sglang_ext.scripts.server import Result

COLD = Row("A", 1000, 20, 0, 0, 980, host_bytes=0, shared_bytes=0, ttft_pic_ms=900.0)
SHARED = Row("B", 1000, 20, 850, 100, 30, 20 * MIB, 19 * MIB, 250.0, ttft_plain_ms=1000.0)
OWN = replace(SHARED, shared_bytes=0, ttft_pic_ms=100.0)


def test_the_summary_counts_by_server_and_tells_first_documents_from_known_ones() -> None:
    summary = summarize([COLD, SHARED, OWN, OWN])
    assert summary["a"]["hit_tokens"] == 0
    assert summary["b"]["hit_tokens"] == 3 * 950
    assert summary["b"]["shared_bytes"] == 19 * MIB
    assert summary["median_ratio_first"] == 4
    assert summary["median_ratio"] == 10


@pytest.mark.parametrize(
    "answer",
    [
        replace(SHARED, reused_tokens=0, recomputed_tokens=0),
        OWN,
    ],
    ids=["nothing reused", "nothing shared"],
)
def test_the_demo_fails_if_nothing_of_a_came_to_b(answer: Row) -> None:
    with pytest.raises(ServerFailed, match="B reused nothing"):
        summarize([COLD, answer])


def test_a_row_has_the_numbers_of_the_report() -> None:
    report = {
        "fallback": None,
        "prompt_tokens": 1000,
        "exact_tokens": 20,
        "reused_tokens": 850,
        "recomputed_tokens": 100,
        "computed_tokens": 30,
        "bytes_loaded": {"host": 20 * MIB, "shared": 19 * MIB},
    }
    result = Result(250.0, (1,), "a", {"pic": report})
    assert make_row("B", result, 1000.0) == SHARED
    assert SHARED.ratio == 4
    assert COLD.ratio is None


def test_every_server_is_told_of_one_index_one_secret_and_one_folder(tmp_path: Path) -> None:
    options = make_options("redis://127.0.0.1:6379", tmp_path)
    given = dict(zip(options[1::2], options[2::2], strict=True))
    names = {name.removeprefix("--").replace("-", "_"): value for name, value in given.items()}
    names["pic_n_avg"] = int(names["pic_n_avg"])
    names["pic_index_deadline_ms"] = float(names["pic_index_deadline_ms"])
    ours = config_from_args({"enable_pic": True, **names})
    assert ours is not None
    assert ours.index.shared is not None
    assert ours.index.shared.path == tmp_path / "kv"
    assert ours.index.secret == (tmp_path / "secret").read_bytes()
    assert (tmp_path / "secret").stat().st_mode & 0o077 == 0
