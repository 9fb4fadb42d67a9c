"""PIC for SGLang's frontend language: chunks inside a program, options for each `gen`.

Knows `sgl.function` programs and SGLang's HTTP backend. A chunk is marked in the program's text, so
that it is there in every fork and copy; the endpoint tells the server what the mark is, and the
server takes it out before the model sees anything.

    @sgl.function
    def answer(s, passages, question):
        s += "Answer from the passages.\\n"
        for passage in passages:
            s += chunk(passage)
        s += chunk(f"Question: {question}\\nAnswer:")
        s += pic_gen("answer", max_tokens=32, pic_n_avg=16)

    state = answer.run(passages=..., question=..., backend=PicRuntimeEndpoint(url))
    print(state["answer"], pic_report(state, "answer"))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import sglang as sgl
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint

from sglang_ext.errors import RequestError
from sglang_ext.request import RequestOptions, parse_options

CHUNK_MARK = "\ue0c0"
"""Stands before every chunk in a program's text; a private-use character no document has."""

DEFAULT_MAX_TOKENS = 128


def chunk(text: str) -> str:
    """Text that is a chunk of its own in a program: `s += chunk(passage)`.

    What follows without a mark belongs to the same chunk.
    """
    return CHUNK_MARK + text


def plain_text(state: Any) -> str:
    """A program's text as the model sees it, without marks."""
    return str(state.text()).replace(CHUNK_MARK, "")


def pic_report(state: Any, name: str) -> Mapping[str, Any] | None:
    """What PIC did for the `gen` of that name; None if the server says nothing about PIC."""
    report: Mapping[str, Any] | None = (state.get_meta_info(name) or {}).get("pic")
    return report


def pic_gen(name: str | None = None, max_tokens: int = DEFAULT_MAX_TOKENS, **options: Any) -> Any:
    """`sgl.gen` with `pic` and `pic_*` options for this call.

    Args:
        name: Of the variable.
        max_tokens: Most tokens to generate.
        **options: `pic`, `pic_*`, and whatever `sgl.gen` takes.

    Raises:
        RequestError: A `pic_*` option is unknown or has a wrong value.
    """
    ours = {key: value for key, value in options.items() if key == "pic" or key.startswith("pic_")}
    for key in ("pic_bounds", "pic_delimiter"):
        if key in ours:
            raise RequestError(key, ours[key], "chunk() to mark chunks in a program")
    parse_options(ours, RequestOptions())
    others = {key: value for key, value in options.items() if key not in ours}
    return sgl.gen(name, max_tokens=_MaxTokens(max_tokens, ours), **others)


class PicRuntimeEndpoint(RuntimeEndpoint):
    """SGLang's HTTP backend, whose requests say what marks a chunk and carry PIC's options."""

    def __init__(self, base_url: str, *args: Any, **pic_options: Any) -> None:
        """Connect to a server.

        Args:
            base_url: Of the server.
            *args: As `RuntimeEndpoint` takes them.
            **pic_options: Defaults of `pic_*` options for every `gen`; other keywords go to
                `RuntimeEndpoint`.
        """
        ours = {key: value for key, value in pic_options.items() if key.startswith("pic")}
        others = {key: value for key, value in pic_options.items() if key not in ours}
        parse_options(ours, RequestOptions())
        super().__init__(base_url, *args, **others)
        self._pic_defaults = ours

    def generate(self, s: Any, sampling_params: Any) -> Any:
        """One `gen`; see `RuntimeEndpoint`."""
        return super().generate(s, self._with_options(sampling_params))

    def generate_stream(self, s: Any, sampling_params: Any) -> Iterator[Any]:
        """One streamed `gen`; see `RuntimeEndpoint`."""
        stream: Iterator[Any] = super().generate_stream(s, self._with_options(sampling_params))
        return stream

    def _generate_http_request(self, s: Any, data: dict[str, Any]) -> Any:
        params = data["sampling_params"]
        custom = {**self._pic_defaults, "pic_delimiter": CHUNK_MARK}
        if "text" in data:
            data = {**data, "sampling_params": {**params, "custom_params": custom}}
        return super()._generate_http_request(s, data)

    def _with_options(self, sampling_params: Any) -> Any:
        custom = {**self._pic_defaults, "pic_delimiter": CHUNK_MARK}
        custom.update(getattr(sampling_params.max_new_tokens, "pic_options", {}))
        return _CarriesOptions(sampling_params, custom)


class _MaxTokens(int):
    """A number of tokens that carries options: SGLang copies fixed fields, of which this is one."""

    pic_options: Mapping[str, Any]

    def __new__(cls, value: int, options: Mapping[str, Any]) -> _MaxTokens:
        number = super().__new__(cls, value)
        number.pic_options = options
        return number

    def __deepcopy__(self, memo: Any) -> _MaxTokens:
        return self


class _CarriesOptions:
    """Sampling parameters that add `custom_params` to what is sent."""

    def __init__(self, params: Any, custom: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_params", params)
        object.__setattr__(self, "_custom", custom)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._params, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._params, name, value)

    def to_srt_kwargs(self) -> dict[str, Any]:
        """What SGLang sends, with ours."""
        return {**self._params.to_srt_kwargs(), "custom_params": dict(self._custom)}
