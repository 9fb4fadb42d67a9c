"""Text into chunks, and what the HTTP process refuses, with real tokenizers and request objects."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sglang_ext import compat, plugin
from sglang_ext.config import ExtConfig, config_from_args
from sglang_ext.errors import RequestError
from sglang_ext.frontend import check_custom_params, prepare_request, tidy_meta_info

D = "<|chunk|>"
WORDS = " # #"  # a delimiter that tokenizes differently between words
SYSTEM = "You are a helpful assistant.\n"
# Letters, spaces and digits right at the delimiter; "you" + "are" and "1" + "2" would merge.
DOCS = ("A cat sat on the mat, you", "are welcome 1", "2 dogs ran ", " and barked.\n", "été")
BOS_ID, EOS_ID = 0, 1


@pytest.fixture(scope="module")
def smollm2(model_path: str) -> Any:
    return AutoTokenizer.from_pretrained(model_path)


def special_tokenizer(single: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that dresses a prompt as `single` says, the way Llama 3's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SYSTEM, *DOCS, "youare", "12", WORDS], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", BOS_ID), ("</s>", EOS_ID)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def with_bos() -> Any:
    return special_tokenizer("<s> $A")


@pytest.fixture(scope="module")
def with_bos_and_eos() -> Any:
    return special_tokenizer("<s> $A </s>")


@pytest.fixture(params=["smollm2", "with_bos", "with_bos_and_eos"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def config(**options: Any) -> ExtConfig:
    built = config_from_args({"enable_pic": True, **options})
    assert built is not None
    return built


def generate(custom: Any = None, **fields: Any) -> GenerateReqInput:
    """A request as the tokenizer manager holds it."""
    params = {} if custom is None else {"custom_params": custom}
    obj = GenerateReqInput(sampling_params=params, **fields)
    obj.normalize_batch_and_arguments()
    return obj


def prepare(tokenizer: Any, obj: Any, **options: Any) -> Any:
    return prepare_request(SimpleNamespace(tokenizer=tokenizer), obj, config(**options))


def cut(tokenizer: Any, text: str, delimiter: str = D) -> Any:
    """The request that SGLang goes on with."""
    return prepare(tokenizer, generate({"pic_delimiter": delimiter}, text=text))


def chunks_of(obj: Any) -> list[tuple[int, ...]]:
    """Token ids of each chunk of a cut request."""
    bounds = [*obj.sampling_params["custom_params"]["pic_bounds"], len(obj.input_ids)]
    assert bounds[0] == 0
    return [tuple(obj.input_ids[start:end]) for start, end in pairwise(bounds)]


def bare(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


# Chunks of a text


@pytest.mark.parametrize("delimiter", [D, WORDS, "\t\t", "x"])
@pytest.mark.parametrize("system", [SYSTEM, ""], ids=["system", "no_system"])
def test_a_document_has_the_same_ids_wherever_it_stands(
    tokenizer: Any, system: str, delimiter: str
) -> None:
    for docs in (DOCS, DOCS[::-1], DOCS[2:] + DOCS[:2]):
        cut_request = cut(tokenizer, delimiter.join([system, *docs]), delimiter)
        expected = [bare(tokenizer, doc) for doc in docs]
        assert chunks_of(cut_request)[-len(docs) : -1] == expected[:-1]
        assert chunks_of(cut_request)[-1][: len(expected[-1])] == expected[-1]


def test_a_document_first_in_one_prompt_and_third_in_another_is_one_chunk(tokenizer: Any) -> None:
    a, b, c, q = DOCS[:4]
    first = chunks_of(cut(tokenizer, D.join(["", a, b, q])))
    third = chunks_of(cut(tokenizer, D.join([b, c, a, q])))
    assert bare(tokenizer, a) in first
    assert bare(tokenizer, a) in third


@pytest.mark.parametrize("system", [SYSTEM, ""], ids=["system", "no_system"])
def test_no_document_holds_what_the_tokenizer_puts_before_a_prompt(
    with_bos: Any, system: str
) -> None:
    cut_request = cut(with_bos, D.join([system, *DOCS]))
    assert cut_request.input_ids[0] == BOS_ID
    assert cut_request.input_ids.count(BOS_ID) == 1
    assert BOS_ID not in {token for chunk in chunks_of(cut_request)[1:] for token in chunk}
    assert chunks_of(cut_request)[0] == (BOS_ID, *bare(with_bos, system))


def test_text_before_the_first_delimiter_is_exact_behind_bos(with_bos: Any) -> None:
    """A document that opens a prompt is a chunk like any other only behind a delimiter."""
    opened = chunks_of(cut(with_bos, D.join(DOCS)))
    assert opened[0] == (BOS_ID, *bare(with_bos, DOCS[0]))
    behind = chunks_of(cut(with_bos, D.join(["", *DOCS])))
    assert behind == [(BOS_ID,), *(bare(with_bos, doc) for doc in DOCS)]


def test_what_the_tokenizer_puts_behind_a_prompt_ends_the_query(with_bos_and_eos: Any) -> None:
    ids = cut(with_bos_and_eos, D.join([SYSTEM, *DOCS])).input_ids
    assert (ids[0], ids[-1]) == (BOS_ID, EOS_ID)
    assert ids.count(EOS_ID) == 1


def test_delimiters_never_reach_the_model(tokenizer: Any) -> None:
    for delimiter in (D, WORDS):
        cut_request = cut(tokenizer, delimiter.join([SYSTEM, *DOCS]), delimiter)
        said = tokenizer.decode(cut_request.input_ids, skip_special_tokens=True)
        assert said == SYSTEM + "".join(DOCS)
        assert cut_request.text == SYSTEM + "".join(DOCS)


@pytest.mark.parametrize("text", ["aDDb", "DaDb", "aDbD", "DDaDDDbDD"])
def test_empty_pieces_are_no_chunks(tokenizer: Any, text: str) -> None:
    chunks = chunks_of(cut(tokenizer, text, "D"))
    assert all(chunks)
    bodies = [tuple(t for t in chunk if t not in special(tokenizer)) for chunk in chunks]
    assert [body for body in bodies if body] == [bare(tokenizer, "a"), bare(tokenizer, "b")]


@pytest.mark.parametrize("text", ["Da", "aD", "DDaD"])
def test_one_text_between_delimiters_has_the_ids_of_the_text_alone(
    tokenizer: Any, text: str
) -> None:
    assert cut(tokenizer, text, "D").input_ids == tokenizer.encode("a")


def special(tokenizer: Any) -> set[int]:
    """Ids that only the tokenizer's dressing of a prompt brings in."""
    return set(tokenizer.encode("a")) - set(bare(tokenizer, "a"))


@pytest.mark.parametrize("text", ["D", "DD", "DDDD"])
def test_nothing_but_delimiters_is_refused(tokenizer: Any, text: str) -> None:
    message = f"^pic_delimiter: got '{text}', expected text besides the delimiter$"
    with pytest.raises(RequestError, match=message):
        cut(tokenizer, text, "D")


@given(texts=st.lists(st.text("ab 1é", min_size=1, max_size=6), min_size=2, max_size=6))
def test_any_texts_become_chunks_of_their_own_ids(with_bos: Any, texts: Sequence[str]) -> None:
    chunks = chunks_of(cut(with_bos, D.join(["", *texts])))
    assert chunks == [(BOS_ID,), *(bare(with_bos, text) for text in texts)]


# Requests that are not cut


def test_text_without_the_delimiter_is_left_to_sglang(smollm2: Any) -> None:
    obj = generate({"pic_delimiter": D}, text="no such thing")
    assert prepare(smollm2, obj) is obj


def test_text_is_left_alone_where_neither_request_nor_server_names_a_delimiter(
    smollm2: Any,
) -> None:
    obj = generate(text=f"a{D}b")
    assert prepare(smollm2, obj) is obj


def test_the_servers_delimiter_serves_requests_that_name_none(smollm2: Any) -> None:
    for obj in (generate(text=f"a{D}b"), generate({"pic_n_avg": 4}, text=f"a{D}b")):
        assert len(chunks_of(prepare(smollm2, obj, pic_delimiter=D))) == 2


def test_the_requests_delimiter_wins(smollm2: Any) -> None:
    obj = generate({"pic_delimiter": "#"}, text=f"a{D}b#c")
    assert chunks_of(prepare(smollm2, obj, pic_delimiter=D)) == [
        bare(smollm2, f"a{D}b"),
        bare(smollm2, "c"),
    ]


def test_a_request_without_pic_has_the_same_ids(smollm2: Any) -> None:
    text = D.join([SYSTEM, *DOCS])
    off = prepare(smollm2, generate({"pic": False}, text=text), pic_delimiter=D)
    assert off.input_ids == cut(smollm2, text).input_ids
    assert off.sampling_params["custom_params"]["pic"] is False


def test_embedding_requests_are_not_touched(smollm2: Any) -> None:
    obj = EmbeddingReqInput(text=f"a{D}b")
    obj.normalize_batch_and_arguments()
    assert prepare(smollm2, obj, pic_delimiter=D) is obj


def test_token_ids_go_through_with_their_bounds(smollm2: Any) -> None:
    obj = generate({"pic_bounds": [0, 2]}, input_ids=[5, 6, 7])
    assert prepare(smollm2, obj, pic_delimiter=D) is obj


def test_the_callers_request_is_not_modified(smollm2: Any) -> None:
    obj = generate({"pic_delimiter": D, "other": [1]}, text=f"a{D}b")
    cut_request = prepare(smollm2, obj)
    assert obj.text == f"a{D}b"
    assert obj.input_ids is None
    assert obj.sampling_params == {"custom_params": {"pic_delimiter": D, "other": [1]}}
    bounds = [0, len(bare(smollm2, "a"))]
    assert cut_request.sampling_params == {"custom_params": {"pic_bounds": bounds, "other": [1]}}


def test_every_request_of_a_batch_is_cut(smollm2: Any) -> None:
    texts = [f"a{D}b", f"c{D}d{D}e"]
    batch = GenerateReqInput(text=texts, sampling_params={"custom_params": {"pic_delimiter": D}})
    batch.normalize_batch_and_arguments()
    tokenized = []

    async def tokenize(manager: Any, obj: Any) -> Any:
        tokenized.append(obj)
        return obj

    manager = SimpleNamespace(tokenizer=smollm2, server_args=SimpleNamespace(_pic_options=config()))
    manager._tokenize_one_request = lambda obj: plugin._tokenize_one(tokenize, manager, obj)
    asyncio.run(plugin._tokenize_batch(tokenize, manager, len(texts), batch))
    assert [len(chunks_of(obj)) for obj in tokenized] == [2, 3]


# Refusals: each is an HTTP 400


@pytest.mark.parametrize(
    ("custom", "fields", "message"),
    [
        ({"pic_navg": 1}, {"text": "a"}, "pic_navg: got 1, expected one of "),
        ({"pic_n_avg": "8"}, {"text": "a"}, "pic_n_avg: got '8', expected an integer"),
        ({"pic_bounds": [2, 1]}, {"input_ids": [1, 2, 3]}, "pic_bounds: got 1, expected a list"),
        ({"pic_bounds": [3]}, {"input_ids": [1, 2, 3]}, "pic_bounds: got 3, expected offsets"),
        ({"pic_bounds": [0]}, {"text": "a"}, "pic_bounds: got 'text', expected input_ids"),
        ({"pic_bounds": [0]}, {"text": f"a{D}b"}, "pic_bounds: got 'text', expected input_ids"),
        ({"pic_delimiter": D}, {"input_ids": [1]}, "pic_delimiter: got 'input_ids', expected text"),
        ([1], {"text": "a"}, "custom_params: got 'list', expected an object"),
        ("pic", {"text": "a"}, "custom_params: got 'str', expected an object"),
    ],
)
def test_a_wrong_request_is_refused_by_key_value_and_expectation(
    smollm2: Any, custom: Any, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        prepare(smollm2, generate(custom, **fields))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("fields", [{"text": ["", "a"]}, {"input_ids": [[], [1]]}], ids=str)
def test_an_empty_prompt_is_refused(smollm2: Any, fields: dict[str, Any]) -> None:
    # SGLang would hand it to the model, and end.
    batch = GenerateReqInput(**fields)
    batch.normalize_batch_and_arguments()
    with pytest.raises(RequestError):
        prepare(smollm2, batch[0])
    prepare(smollm2, batch[1])


def test_bounds_count_the_tokens_of_the_request() -> None:
    # The last token may be a chunk of its own.
    prepare(None, generate({"pic_bounds": [0, 2]}, input_ids=[1, 2, 3]))


def test_text_to_cut_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(RequestError, match=r"no tokenizer is loaded"):
        cut(None, f"a{D}b")


# What typed IPC carries

DEEP = {"x": {"y": {"z": 1}}}


@pytest.mark.parametrize("custom", [DEEP, {"x": [[1]]}, {"x": [{"y": 1}]}, {"pic_doc_ids": [[]]}])
@pytest.mark.parametrize("is_pickle", [True, False], ids=["pickle", "msgpack"])
def test_deep_values_are_refused_only_where_they_would_stop_the_scheduler(
    monkeypatch: pytest.MonkeyPatch, custom: dict[str, Any], is_pickle: bool
) -> None:
    monkeypatch.setenv("SGLANG_USE_PICKLE_IPC", str(int(is_pickle)))
    if is_pickle:
        check_custom_params(custom)
    else:
        with pytest.raises(RequestError, match=r"^custom_params: got .*, expected scalars, lists"):
            check_custom_params(custom)


@pytest.mark.parametrize(
    "value",
    [2**64, -(2**63) - 1, 10**400, "\ud800", ["\ud800"], {"\ud800": 1}],
    ids=["2**64", "-2**63-1", "10**400", "surrogate", "surrogate_in_list", "surrogate_key"],
)
def test_values_that_msgpack_cannot_encode_are_refused(
    monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    monkeypatch.setenv("SGLANG_USE_PICKLE_IPC", "0")
    with pytest.raises(RequestError, match=r"^custom_params: got "):
        check_custom_params({"x": value})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=8), JSON, max_size=4))
def test_what_is_accepted_survives_typed_ipc(custom: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_USE_PICKLE_IPC", "0")
        try:
            check_custom_params(custom)
        except RequestError:
            return
        encoded = msgspec.msgpack.encode(custom)
        decoded = msgspec.msgpack.decode(encoded, type=compat.custom_params_type())
    assert repr(decoded) == repr(custom)  # NaN is not equal to itself


# The answer


def test_the_report_is_one_dict_in_every_answer() -> None:
    report = {"outcome": "reused"}
    meta_info: dict[str, Any] = {"id": "x", "pic": [report]}
    tidy_meta_info(meta_info)
    assert meta_info == {"id": "x", "pic": report}
    tidy_meta_info(meta_info)  # a second pass changes nothing
    assert meta_info == {"id": "x", "pic": report}


def test_an_answer_without_a_report_says_nothing() -> None:
    empty: dict[str, Any] = {"id": "x", "pic": []}
    tidy_meta_info(empty)
    assert empty == {"id": "x"}
    tidy_meta_info(empty)
    assert empty == {"id": "x"}
