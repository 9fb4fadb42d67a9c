"""Options and marks of frontend programs, without a server."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest
from sglang.lang.ir import SglSamplingParams

from sglang_ext.errors import RequestError
from sglang_ext.lang import CHUNK_MARK, _CarriesOptions, chunk, pic_gen, pic_report, plain_text


def test_a_chunk_is_marked_and_the_mark_can_be_taken_out() -> None:
    state = SimpleNamespace(text=lambda: "Read." + chunk("A") + chunk("B"))
    assert plain_text(state) == "Read.AB"
    assert state.text().split(CHUNK_MARK) == ["Read.", "A", "B"]


def test_options_survive_what_sglang_does_to_parameters() -> None:
    expression = pic_gen("x", max_tokens=5, temperature=0, pic_n_avg=3, pic=False)
    params = expression.sampling_params
    clone = copy.deepcopy(SglSamplingParams())
    clone.max_new_tokens = copy.deepcopy(params.max_new_tokens)
    assert clone.max_new_tokens == 5
    assert json.dumps(clone.max_new_tokens) == "5"
    assert clone.max_new_tokens.pic_options == {"pic_n_avg": 3, "pic": False}
    sent = _CarriesOptions(clone, clone.max_new_tokens.pic_options).to_srt_kwargs()
    assert sent["max_new_tokens"] == 5
    assert sent["custom_params"] == {"pic_n_avg": 3, "pic": False}


def test_a_change_of_parameters_reaches_the_original() -> None:
    params = SglSamplingParams()
    carried = _CarriesOptions(params, {})
    carried.regex = "a+"
    assert params.regex == "a+"
    assert carried.to_srt_kwargs()["regex"] == "a+"


@pytest.mark.parametrize("options", [{"pic_navg": 1}, {"pic_n_avg": -1}, {"pic_bounds": [0]}])
def test_wrong_options_are_refused_where_the_program_is_written(options: dict[str, int]) -> None:
    with pytest.raises(RequestError, match=next(iter(options))):
        pic_gen("x", **options)


def test_a_server_without_pic_reports_nothing() -> None:
    assert pic_report(SimpleNamespace(get_meta_info=lambda name: {}), "x") is None
