"""The HTTP process's part: check a request's options, cut its text into chunks, tidy the answer.

Knows SGLang's tokenizer manager and request objects. Every error a client can cause is raised
here, as a ValueError, which SGLang answers with HTTP 400.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from sglang_ext import compat
from sglang_ext.config import ExtConfig
from sglang_ext.errors import RequestError
from sglang_ext.recompute.strategies.registry import LAYERWISE_STRATEGIES
from sglang_ext.report import Reason
from sglang_ext.request import (
    MAX_CHUNKS,
    REASON_KEY,
    RequestOptions,
    check_bounds,
    parse_options,
    plan_layers,
    with_custom_params,
)


def config_of(owner: Any) -> ExtConfig | None:
    """The configuration carried by an object's SGLang server arguments; None when PIC is off."""
    config: ExtConfig | None = getattr(owner.server_args, "_pic_options", None)
    return config


def prepare_request(manager: Any, obj: Any, config: ExtConfig) -> Any:
    """Check a single request and cut its text; returns a changed copy, or `obj` itself.

    Args:
        manager: SGLang's TokenizerManager.
        obj: GenerateReqInput of one request; other kinds are returned unchanged.
        config: The server's configuration.

    Raises:
        RequestError: A `pic_*` key is wrong, or the text leaves nothing to compute.
    """
    params = getattr(obj, "sampling_params", None)
    if not isinstance(params, dict) or not hasattr(obj, "custom_logit_processor"):
        return obj
    custom = params.get("custom_params")
    if custom is not None and not isinstance(custom, dict):
        raise RequestError("custom_params", type(custom).__name__, "an object")
    options = parse_options(custom, config.defaults)
    if options.strategy in LAYERWISE_STRATEGIES:
        plan_layers(options, compat.num_layers(manager.model_config))
    check_custom_params(custom)
    _refuse_empty(obj)
    if obj.input_ids is not None:
        _refuse_delimiter_for_ids(custom)
        check_bounds(options.bounds or (), len(obj.input_ids))
        return obj
    if options.bounds is not None:
        raise RequestError("pic_bounds", "text", "input_ids (text takes pic_delimiter)")
    if options.delimiter is None or not isinstance(obj.text, str) or obj.contains_mm_input():
        return obj
    return _cut_text(manager, obj, options, options.delimiter)


def check_custom_params(custom: Any) -> None:
    """Refuse `custom_params` that would not survive the way to the scheduler.

    Raises:
        RequestError: It nests deeper than typed IPC carries.
    """
    if custom is None or compat.uses_pickle_ipc():
        return
    import msgspec

    try:
        sent = msgspec.msgpack.encode(custom)
        msgspec.msgpack.decode(sent, type=compat.custom_params_type())
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as exc:
        expected = "scalars, lists of scalars or flat objects of scalars"
        raise RequestError("custom_params", str(exc), expected) from exc


def tidy_meta_info(meta_info: dict[str, Any]) -> None:
    """Replace the list SGLang makes of a request's report by the report itself, in place."""
    reports = meta_info.get("pic")
    if isinstance(reports, list):
        if reports:
            meta_info["pic"] = reports[0]
        else:
            del meta_info["pic"]


def _refuse_empty(obj: Any) -> None:
    """SGLang's scheduler does not survive a prompt without tokens."""
    if obj.input_embeds is not None or obj.contains_mm_input():
        return
    for key, prompt in (("input_ids", obj.input_ids), ("text", obj.text)):
        if prompt is not None:
            if len(prompt) == 0:
                raise RequestError(key, prompt, "at least one token")
            return


def _refuse_delimiter_for_ids(custom: Any) -> None:
    if custom and custom.get("pic_delimiter") is not None:
        raise RequestError("pic_delimiter", "input_ids", "text (input_ids take pic_bounds)")


def _cut_text(manager: Any, obj: Any, options: RequestOptions, delimiter: str) -> Any:
    if delimiter not in obj.text:
        return obj
    texts = obj.text.split(delimiter)
    if len(texts) > MAX_CHUNKS:
        return _leave_whole(obj, "".join(texts))
    first, rest = texts[0], [text for text in texts[1:] if text]
    if not first and not rest:
        raise RequestError("pic_delimiter", obj.text[:64], "text besides the delimiter")
    pieces = _tokenize_chunks(manager, [first, *rest])
    ids: list[int] = []
    bounds: list[int] = []
    for piece in pieces:
        if piece:
            bounds.append(len(ids))
            ids += piece
    cut = copy.copy(obj)
    cut.text = "".join([first, *rest])
    cut.input_ids = ids
    cut.sampling_params = with_custom_params(obj.sampling_params, {"pic_bounds": bounds})
    return cut


def _leave_whole(obj: Any, text: str) -> Any:
    """The text without delimiters, and why it was not cut."""
    if not text:
        raise RequestError("pic_delimiter", obj.text[:64], "text besides the delimiter")
    whole = copy.copy(obj)
    whole.text = text
    reason = {REASON_KEY: Reason.TOO_MANY_CHUNKS.value}
    whole.sampling_params = with_custom_params(obj.sampling_params, reason)
    return whole


def _tokenize_chunks(manager: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text by itself; what the tokenizer puts around a prompt comes separately.

    The first piece is that opening (a BOS token, say) with the first text, or alone where the
    first text is empty, so that no document's chunk ever holds it. A closing goes with the last.
    """
    tokenizer = manager.tokenizer
    if tokenizer is None:
        raise RequestError("pic_delimiter", "text", "input_ids (no tokenizer is loaded)")
    opening, closing = _special_tokens(tokenizer)
    pieces = [
        list(tokenizer.encode(text, add_special_tokens=False)) if text else [] for text in texts
    ]
    if pieces[0]:
        pieces[0] = opening + pieces[0]
    else:
        pieces.insert(0, opening)
    pieces[-1] = pieces[-1] + closing
    return pieces


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer adds before and after a prompt."""
    bare = list(tokenizer.encode("a", add_special_tokens=False))
    dressed = list(tokenizer.encode("a"))
    for start in range(len(dressed) - len(bare) + 1):
        if dressed[start : start + len(bare)] == bare:
            return dressed[:start], dressed[start + len(bare) :]
    return [], []
