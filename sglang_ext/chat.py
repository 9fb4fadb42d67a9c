"""Chunks of chat requests: messages, content parts and delimiters, through any chat template.

Knows SGLang's chat messages and how a template's text becomes token ids. A boundary is written into
the messages as a mark, text that no client can know; the template carries it to where it belongs;
where SGLang encodes the rendered text, the marks are taken out and each piece is encoded by itself:

    messages    system "S"     user [part "A", part "B", part "Q?"]
    marked      "⟨0⟩S"         "⟨1⟩A⟨2⟩B⟨3⟩Q?"
    rendered    <|im_start|>system ⟨0⟩S<|im_end|> <|im_start|>user ⟨1⟩A⟨2⟩B⟨3⟩Q?<|im_end|> ...
    pieces      [header           ][S + what follows              ][A ][B ][Q? + the tail     ]

The same messages are rendered without marks too. A template that drops, repeats, reorders or reads
marks renders another text then, and one that is not rendered as text at all leaves none: both get
their messages as they came, and the request is served in full with the reason `chat_template`.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from sglang_ext.errors import RequestError
from sglang_ext.report import Reason
from sglang_ext.request import MAX_CHUNKS, REASON_KEY, RequestOptions, with_custom_params

_NONCE = secrets.token_hex(8)
_MARK = re.compile(f"\ue0f0{_NONCE}\\.(\\d+)\ue0f1")
_TEXT_PARTS = ("text", "input_text")
_PLACEHOLDER_IDS = (0,)

Convert = Callable[[], tuple[Any, Any]]
Encode = Callable[..., list[int]]


@dataclass(slots=True)
class Rendering:
    """One rendering of a chat request, seen where SGLang encodes it.

    Attributes:
        is_dry: Only the text is wanted; nothing is encoded.
        text: The rendered text without marks, once there is one.
        numbers: The marks in it.
        ids: Token ids of the whole text.
        bounds: Where chunks start in `ids`.
    """

    is_dry: bool
    text: str | None = None
    numbers: tuple[int, ...] = ()
    ids: list[int] = field(default_factory=list)
    bounds: list[int] = field(default_factory=list)

    def encode(self, encode: Encode, tokenizer: Any, text: str, kwargs: Any) -> list[int]:
        """Encode rendered text piece by piece; stands in for SGLang's own encoding."""
        parts = _MARK.split(text)
        pieces = parts[0::2]
        self.text = "".join(pieces)
        self.numbers = tuple(int(number) for number in parts[1::2])
        if self.is_dry:
            return list(_PLACEHOLDER_IDS)
        kwargs = dict(kwargs or {})
        self.ids, self.bounds = [], []
        for piece in filter(None, pieces):
            self.bounds.append(len(self.ids))
            self.ids += encode(tokenizer, piece, kwargs)
            if "add_special_tokens" in kwargs:
                kwargs["add_special_tokens"] = False
        return list(self.ids)


_current: ContextVar[Rendering | None] = ContextVar("pic_rendering", default=None)


def current_rendering() -> Rendering | None:
    """The rendering going on in this context, if its text is to be seen."""
    return _current.get()


@contextmanager
def _rendering(is_dry: bool) -> Iterator[Rendering]:
    state = Rendering(is_dry)
    token = _current.set(state)
    try:
        yield state
    finally:
        _current.reset(token)


def convert_request(
    convert: Convert,
    request: Any,
    options: RequestOptions,
    keeps_parts: bool,
    is_multimodal: bool = False,
) -> tuple[Any, Any]:
    """Convert a chat request to SGLang's internal one, cut into chunks.

    Args:
        convert: SGLang's own conversion of `request`; may be called several times.
        request: ChatCompletionRequest; its messages are replaced while this runs.
        options: Its checked options.
        keeps_parts: The template takes content as a list of parts and joins them itself.
        is_multimodal: SGLang keeps what such a model's template rendered for the next request, so
            it must not see marks.

    Returns:
        What `convert` returns, the internal request with `pic_bounds`, or with the reason why not.

    Raises:
        RequestError: `pic_bounds` was given, which counts tokens no chat client can know.
    """
    if request.input_ids is not None:
        return convert()
    if options.bounds is not None:
        raise RequestError("pic_bounds", "messages", "input_ids (messages are chunks themselves)")
    if is_multimodal or has_media(request.messages):
        return _convert_whole(convert, request, options.delimiter, Reason.MULTIMODAL)
    messages = request.messages
    marked = mark_messages(messages, options.delimiter, keeps_parts)
    num_marks = _count_marks(marked)
    if num_marks > MAX_CHUNKS:
        return _convert_whole(convert, request, options.delimiter, Reason.TOO_MANY_CHUNKS)
    try:
        request.messages = unmark_messages(marked)
        with _rendering(is_dry=True) as expected:
            convert()
        request.messages = marked
        with _rendering(is_dry=False) as got:
            converted = convert()
    finally:
        request.messages = messages
    adapted = converted[0]
    is_kept = (
        got.text is not None
        and got.text == expected.text
        and got.numbers == tuple(range(num_marks))
        and isinstance(adapted.input_ids, list)
        and adapted.input_ids[: len(got.ids)] == got.ids
    )
    if not is_kept:
        return _convert_whole(convert, request, options.delimiter, Reason.CHAT_TEMPLATE)
    adapted.sampling_params = with_custom_params(
        adapted.sampling_params, {"pic_bounds": got.bounds}
    )
    return converted


def has_media(messages: Sequence[Any]) -> bool:
    """Whether a message has a part that is not text."""
    return any(
        not isinstance(part, str) and _field(part, "type") not in _TEXT_PARTS
        for message in messages
        for part in _parts_of(message)
    )


def mark_messages(messages: Sequence[Any], delimiter: str | None, keeps_parts: bool) -> list[Any]:
    """Mark the start of every message, of every content part, and every delimiter.

    Args:
        messages: SGLang's message objects, text only.
        delimiter: Text that separates chunks inside a content; taken out.
        keeps_parts: Leave content lists as lists; else their texts are joined with nothing.

    Returns:
        Marked copies. A first message that is one text belongs to the first chunk, with what the
        template writes before it: at position 0 it is exact. A final assistant message, which the
        answer continues or which SGLang turns into a user message, starts no chunk.
    """
    marked: list[Any] = []
    count = 0
    last = len(messages) - 1
    for index, message in enumerate(messages):
        is_prefix = index == last and message.role == "assistant"
        is_opening = index == 0 and isinstance(message.content, str)
        texts: list[str] = []
        for part in _parts_of(message):
            text = ""
            for number, piece in enumerate(_cut(_text_of(part), delimiter)):
                if piece and not is_prefix and not (is_opening and number == 0):
                    text += _mark(count)
                    count += 1
                text += piece
            texts.append(text)
        if not texts:
            marked.append(message)
        elif keeps_parts and not isinstance(message.content, str):
            parts = [_with_text(p, text) for p, text in zip(message.content, texts, strict=True)]
            marked.append(message.model_copy(update={"content": parts}))
        else:
            marked.append(message.model_copy(update={"content": "".join(texts)}))
    return marked


def unmark_messages(messages: Sequence[Any]) -> list[Any]:
    """Copies of marked messages with the marks taken out again."""
    plain: list[Any] = []
    for message in messages:
        content = getattr(message, "content", None)
        if isinstance(content, str):
            content = _MARK.sub("", content)
        elif content is not None:
            content = [_with_text(part, _MARK.sub("", _text_of(part))) for part in content]
        plain.append(message.model_copy(update={"content": content}))
    return plain


def _convert_whole(
    convert: Convert, request: Any, delimiter: str | None, reason: Reason
) -> tuple[Any, Any]:
    """Convert as SGLang does, but without delimiters, and say why nothing was cut."""
    messages = request.messages
    try:
        request.messages = [_without(message, delimiter) for message in messages]
        converted = convert()
    finally:
        request.messages = messages
    adapted = converted[0]
    adapted.sampling_params = with_custom_params(
        adapted.sampling_params, {REASON_KEY: reason.value}
    )
    return converted


def _without(message: Any, delimiter: str | None) -> Any:
    content = getattr(message, "content", None)
    if delimiter is None or content is None:
        return message
    if isinstance(content, str):
        content = content.replace(delimiter, "")
    else:
        content = [
            _with_text(part, text.replace(delimiter, "")) if (text := _text_of(part)) else part
            for part in content
        ]
    return message.model_copy(update={"content": content})


def _count_marks(messages: Sequence[Any]) -> int:
    return sum(
        len(_MARK.findall(_text_of(part))) for message in messages for part in _parts_of(message)
    )


def _mark(number: int) -> str:
    return f"\ue0f0{_NONCE}.{number}\ue0f1"


def _parts_of(message: Any) -> Sequence[Any]:
    content = getattr(message, "content", None)
    if content is None:
        return ()
    return (content,) if isinstance(content, str) else content


def _text_of(part: Any) -> str:
    text = part if isinstance(part, str) else _field(part, "text")
    return text or ""


def _with_text(part: Any, text: str) -> Any:
    if isinstance(part, str):
        return text
    if isinstance(part, dict):
        return {**part, "text": text}
    return part.model_copy(update={"text": text})


def _field(part: Any, name: str) -> Any:
    return part.get(name) if isinstance(part, dict) else getattr(part, name, None)


def _cut(text: str, delimiter: str | None) -> list[str]:
    return text.split(delimiter) if delimiter else [text]
