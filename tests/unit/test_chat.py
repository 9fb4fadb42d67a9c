"""Chat messages to chunks, with the real tokenizer and templates good and exotic."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

from sglang_ext.chat import convert_request, current_rendering
from sglang_ext.errors import RequestError
from sglang_ext.request import MAX_CHUNKS, REASON_KEY, RequestOptions

D = "<|chunk|>"
ORDINARY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
LISTS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)
EXOTIC = {
    "drops a message": "{{ messages[0].content }}{{ messages[-1].content }}",
    "moves the last message first": "{% for m in messages|reverse %}{{ m.content }}{% endfor %}",
    "repeats a message": "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
    "reads a content's beginning": (
        "{% for m in messages %}{% if m.content.startswith('A') %}<doc>{% endif %}"
        "{{ m.content }}{% endfor %}"
    ),
    "counts characters": "{% for m in messages %}{{ m.content|length }}{{ m.content }}{% endfor %}",
    "changes case": "{% for m in messages %}{{ m.content|upper }}{% endfor %}",
}


@pytest.fixture(scope="module")
def tokenizer(model_path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)


class Chat:
    """SGLang's conversion, reduced to rendering and encoding."""

    def __init__(self, tokenizer: Any, template: str, renders_text: bool = True) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.renders_text = renders_text

    def render(self, messages: list[Any]) -> str:
        dumped = [message.model_dump(exclude_none=True) for message in messages]
        return str(
            self.tokenizer.apply_chat_template(
                dumped, chat_template=self.template, tokenize=False, add_generation_prompt=True
            )
        )

    def encode(self, _: Any, text: str, kwargs: Any) -> list[int]:
        return list(self.tokenizer.encode(text, **kwargs))

    def convert(self, request: Any) -> Any:
        text = self.render(request.messages)
        kwargs = {"add_special_tokens": False}
        rendering = current_rendering()
        if rendering is not None and self.renders_text:
            ids = rendering.encode(self.encode, self.tokenizer, text, kwargs)
        else:
            ids = self.encode(self.tokenizer, text, kwargs)
        params = {"custom_params": request.custom_params}
        return SimpleNamespace(input_ids=ids, sampling_params=params), request

    def cut(self, request: Any, keeps_parts: bool = False, **options: Any) -> tuple[list[str], Any]:
        """The texts of the chunks, and the converted request."""
        asked = RequestOptions(**options)
        adapted, _ = convert_request(lambda: self.convert(request), request, asked, keeps_parts)
        custom = adapted.sampling_params["custom_params"] or {}
        edges = [*custom.get("pic_bounds", [0]), len(adapted.input_ids)]
        pieces = [adapted.input_ids[start:end] for start, end in pairwise(edges)]
        return [self.tokenizer.decode(piece) for piece in pieces], adapted


def request(*messages: tuple[str, Any], custom: dict[str, Any] | None = None) -> Any:
    return ChatCompletionRequest(
        model="m",
        messages=[{"role": role, "content": content} for role, content in messages],
        custom_params=custom,
    )


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_messages_and_parts_are_chunks_and_the_tail_belongs_to_the_query(tokenizer: Any) -> None:
    asked = request(("system", "Be brief."), ("user", parts("Alpha.", "Beta.", "Why?")))
    chunks, _ = Chat(tokenizer, ORDINARY).cut(asked)
    assert chunks == [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n",
        "Alpha.",
        "Beta.",
        "Why?<|im_end|>\n",
    ]


def test_delimiters_in_a_content_cut_as_parts_do(tokenizer: Any) -> None:
    chat = Chat(tokenizer, ORDINARY)
    by_parts = chat.cut(request(("user", parts("Alpha.", "Beta.", "Why?"))))
    text = D.join(["", "Alpha.", "Beta.", "Why?"])
    by_delimiter = chat.cut(request(("user", text)), delimiter=D)
    assert by_delimiter[0] == by_parts[0]
    assert by_delimiter[1].input_ids == by_parts[1].input_ids


def test_a_part_has_the_ids_of_its_text_alone_wherever_it_stands(tokenizer: Any) -> None:
    chat = Chat(tokenizer, ORDINARY)
    alone = tokenizer.encode("you # are", add_special_tokens=False)
    for texts in (("you # are", "x", "q"), ("x", "y", "you # are", "q")):
        _, adapted = chat.cut(request(("user", parts(*texts))))
        bounds = adapted.sampling_params["custom_params"]["pic_bounds"]
        start = bounds[1 + texts.index("you # are")]
        assert adapted.input_ids[start : start + len(alone)] == alone


def test_a_template_that_joins_parts_itself_keeps_them(tokenizer: Any) -> None:
    asked = request(("user", parts("Alpha.", "Beta.", "Why?")))
    chunks, _ = Chat(tokenizer, LISTS).cut(asked, keeps_parts=True)
    assert chunks == ["[user]", "Alpha.", "Beta.", "Why?"]


@pytest.mark.parametrize("name", EXOTIC)
def test_an_exotic_template_gives_its_own_prompt_and_a_reason(tokenizer: Any, name: str) -> None:
    chat = Chat(tokenizer, EXOTIC[name])
    messages = (("system", "Sys"), ("user", "Able"), ("user", "Baker"))
    expected = chat.convert(request(*messages))[0].input_ids
    _, adapted = chat.cut(request(*messages))
    assert adapted.input_ids == expected
    custom = adapted.sampling_params["custom_params"]
    assert custom == {REASON_KEY: "chat_template"}


def test_a_prompt_that_is_not_rendered_as_text_is_left_alone(tokenizer: Any) -> None:
    chat = Chat(tokenizer, ORDINARY, renders_text=False)
    asked = request(("system", "Sys"), ("user", "Able"))
    expected = chat.convert(asked)[0].input_ids
    _, adapted = chat.cut(asked)
    assert adapted.input_ids == expected
    assert adapted.sampling_params["custom_params"] == {REASON_KEY: "chat_template"}


def test_messages_come_back_as_they_were(tokenizer: Any) -> None:
    asked = request(("system", "Sys"), ("user", parts("Alpha.", "Why?")))
    before = [message.model_dump() for message in asked.messages]
    Chat(tokenizer, ORDINARY).cut(asked)
    assert [message.model_dump() for message in asked.messages] == before


def test_an_image_leaves_the_request_as_it_is(tokenizer: Any) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    asked = request(("user", [*parts("Look:"), image]))
    adapted = SimpleNamespace(input_ids=[1], sampling_params={})
    got, _ = convert_request(lambda: (adapted, asked), asked, RequestOptions(), False)
    assert got is adapted
    assert got.sampling_params["custom_params"] == {REASON_KEY: "multimodal"}


def test_a_multimodal_models_cache_never_sees_marks_or_placeholders(tokenizer: Any) -> None:
    asked = request(("system", "Sys"), ("user", parts("Alpha.", "Why?")))
    seen: list[Any] = []

    def convert() -> Any:
        assert current_rendering() is None
        seen.append([message.model_dump() for message in asked.messages])
        return SimpleNamespace(input_ids=[1], sampling_params={}), asked

    convert_request(convert, asked, RequestOptions(), False, is_multimodal=True)
    assert seen == [[message.model_dump() for message in asked.messages]]


def test_delimiters_never_reach_the_model_where_nothing_is_cut(tokenizer: Any) -> None:
    chat = Chat(tokenizer, EXOTIC["changes case"])
    _, adapted = chat.cut(request(("user", f"A{D}B"), ("user", parts(f"C{D}", "D"))), delimiter=D)
    assert "CHUNK" not in tokenizer.decode(adapted.input_ids)


def test_more_parts_than_can_be_copied_are_left_whole(tokenizer: Any) -> None:
    asked = request(("user", parts(*["a"] * (MAX_CHUNKS + 1))))
    _, adapted = Chat(tokenizer, ORDINARY).cut(asked)
    assert adapted.sampling_params["custom_params"] == {REASON_KEY: "too_many_chunks"}


def test_a_final_assistant_message_starts_no_chunk(tokenizer: Any) -> None:
    asked = request(("user", "Count."), ("assistant", f"One,{D} two"))
    chunks, _ = Chat(tokenizer, ORDINARY).cut(asked, delimiter=D)
    assert chunks == [
        "<|im_start|>user\nCount.<|im_end|>\n<|im_start|>assistant\nOne, two<|im_end|>\n"
    ]


def test_a_lone_message_is_one_chunk(tokenizer: Any) -> None:
    chunks, _ = Chat(tokenizer, ORDINARY).cut(request(("user", "Hi")))
    assert chunks == ["<|im_start|>user\nHi<|im_end|>\n"]


def test_bounds_for_messages_are_refused(tokenizer: Any) -> None:
    with pytest.raises(RequestError, match=r"^pic_bounds: got 'messages'"):
        Chat(tokenizer, ORDINARY).cut(request(("user", "Hi")), bounds=(0, 1))


def test_other_custom_params_are_kept(tokenizer: Any) -> None:
    custom = {"pic_n_avg": 3, "pic_delimiter": D, "mine": 1}
    _, adapted = Chat(tokenizer, ORDINARY).cut(
        request(("user", f"A{D}B"), custom=custom), delimiter=D
    )
    got = dict(adapted.sampling_params["custom_params"])
    bounds = got.pop("pic_bounds")
    assert tokenizer.decode(adapted.input_ids[bounds[1] :]) == "B<|im_end|>\n"
    assert got == {"pic_n_avg": 3, "mine": 1}
