"""What one request asks of PIC: the `pic_*` keys of its `custom_params`, checked.

Knows keys, types, ranges and defaults. Knows nothing of tokenizers, caches or SGLang, so that the
HTTP process (to answer 400) and the scheduler (to act) read a request in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from sglang_ext.errors import RequestError
from sglang_ext.recompute.layerwise import LayerPlan, LayerwiseParams
from sglang_ext.recompute.selection import PRIOR_STRATEGIES, Allocation, SelectionParams
from sglang_ext.recompute.strategies.registry import LAYERWISE_STRATEGIES

KEY_PREFIX = "pic_"
REASON_KEY = "__pic_reason"
"""In `custom_params`: why a request was not cut, from the HTTP process to the scheduler."""
DEFAULT_NAMESPACE = "default"
MAX_NAME_LEN = 256
MAX_BUDGET = 1 << 20
MAX_LAYERS = 1024
MAX_DOC_IDS = 64
MAX_CHUNKS = 1024
"""Most chunks of a prompt: copying that many pieces of KV takes a tenth of a second on its own."""


STRATEGIES = (*PRIOR_STRATEGIES, *LAYERWISE_STRATEGIES)
"""Every name that `pic_strategy` takes."""


class StorePolicy(StrEnum):
    """Which chunks of a request are kept for later ones."""

    CHUNKS = "chunks"
    ALL = "all"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """One request's choices; every field has the server's default.

    Attributes:
        is_enabled: False computes exactly, with the same splitting and token ids.
        bounds: Token offsets of chunk starts, sorted and unique; None where text is split instead.
        delimiter: Text between chunks, removed before the model sees anything.
        strategy: A name in `PRIOR_STRATEGIES` or `LAYERWISE_STRATEGIES`.
        selection: Budget and shape of the recomputed tokens (prior strategies).
        layerwise: Phases and coverage (layerwise strategies).
        namespace: Tenant; its chunks are invisible to other namespaces.
        doc_ids: Documents the stored chunks belong to.
        ttl_s: Seconds the stored chunks live; None for as long as they are not evicted.
        store: Which chunks are kept.
        is_pinned: Stored chunks are not evicted.
        invalidates: Documents whose chunks in this namespace are removed before anything else.
        purges: Remove every chunk of this namespace before anything else.
        is_strict: Answer 400 instead of prefilling in full where PIC cannot apply.
    """

    is_enabled: bool = True
    bounds: tuple[int, ...] | None = None
    delimiter: str | None = None
    strategy: str = "daric"
    selection: SelectionParams = field(default_factory=lambda: SelectionParams(n_avg=32))
    layerwise: LayerwiseParams = field(default_factory=LayerwiseParams)
    namespace: str = DEFAULT_NAMESPACE
    doc_ids: tuple[str, ...] = ()
    ttl_s: float | None = None
    store: StorePolicy = StorePolicy.CHUNKS
    is_pinned: bool = False
    invalidates: tuple[str, ...] = ()
    purges: bool = False
    is_strict: bool = False


def parse_options(
    custom_params: Mapping[str, Any] | None, defaults: RequestOptions
) -> RequestOptions:
    """Read and check the `pic` and `pic_*` keys; other keys belong to somebody else.

    Args:
        custom_params: A request's `custom_params`, or None.
        defaults: The server's choices for absent keys.

    Raises:
        RequestError: An unknown `pic_*` key, a wrong type or a value out of range; the message
            names key, got and expected.
    """
    if not custom_params:
        return defaults
    given = {key: value for key, value in custom_params.items() if _is_ours(key)}
    unknown = sorted(set(given) - set(_READERS))
    if unknown:
        raise RequestError(unknown[0], given[unknown[0]], f"one of {', '.join(sorted(_READERS))}")
    fields: dict[str, Any] = {}
    selection: dict[str, Any] = {}
    layerwise: dict[str, Any] = {}
    for key, value in given.items():
        name, reader = _READERS[key]
        target = fields
        if name in _SELECTION_FIELDS:
            target = selection
        elif name in _LAYERWISE_FIELDS:
            target = layerwise
        target[name] = reader(key, value)
    if selection:
        fields["selection"] = replace(defaults.selection, **selection)
    if layerwise:
        fields["layerwise"] = replace(defaults.layerwise, **layerwise)
    return replace(defaults, **fields)


def plan_layers(options: RequestOptions, num_layers: int) -> LayerPlan | None:
    """The phases a request asks for; None for a prior strategy.

    Raises:
        RequestError: They do not fit a model of `num_layers`.
    """
    strategy = LAYERWISE_STRATEGIES.get(options.strategy)
    return None if strategy is None else strategy.plan(options.layerwise, num_layers)


def check_bounds(bounds: Sequence[int], num_tokens: int) -> None:
    """Refuse a bound at or behind the prompt's end.

    Raises:
        RequestError: The last bound is not below `num_tokens`.
    """
    if bounds and bounds[-1] >= num_tokens:
        expected = f"offsets below the prompt's {num_tokens} tokens"
        raise RequestError("pic_bounds", bounds[-1], expected)


def with_custom_params(params: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters whose `custom_params` say what came of the delimiter, instead of it."""
    custom = {**(params.get("custom_params") or {}), **changes}
    custom.pop("pic_delimiter", None)
    return {**params, "custom_params": custom}


def is_given(custom_params: Mapping[str, Any] | None) -> bool:
    """Whether a request mentions PIC at all."""
    return any(_is_ours(key) for key in custom_params or ())


def _is_ours(key: object) -> bool:
    return isinstance(key, str) and (key == "pic" or key.startswith(KEY_PREFIX))


def _bool(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise RequestError(key, value, "true or false")
    return value


def _int_between(low: int, high: int) -> Any:
    def read(key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise RequestError(key, value, f"an integer from {low} to {high}")
        return value

    return read


def _number(key: str, value: Any, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(key, value, expected)
    try:
        return float(value)
    except OverflowError as exc:
        raise RequestError(key, value, expected) from exc


def _ratio(key: str, value: Any) -> float:
    expected = "a number above 0 and below 1"
    number = _number(key, value, expected)
    if not 0.0 < number < 1.0:
        raise RequestError(key, value, expected)
    return number


def _share(key: str, value: Any) -> float:
    expected = "a number above 0 and at most 1"
    number = _number(key, value, expected)
    if not 0.0 < number <= 1.0:
        raise RequestError(key, value, expected)
    return number


def _coverage(key: str, value: Any) -> float:
    expected = "a number from 0 to 1"
    number = _number(key, value, expected)
    if not 0.0 <= number <= 1.0:
        raise RequestError(key, value, expected)
    return number


def _ttl(key: str, value: Any) -> float:
    expected = "a number of seconds above 0, at most 315360000"
    number = _number(key, value, expected)
    if not 0.0 < number <= 315360000.0:
        raise RequestError(key, value, expected)
    return number


def _name(key: str, value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_LEN:
        raise RequestError(key, value, f"a string of 1 to {MAX_NAME_LEN} characters")
    return value


def _choice(names: Sequence[str]) -> Any:
    def read(key: str, value: Any) -> str:
        if not isinstance(value, str) or value not in names:
            raise RequestError(key, value, f"one of {', '.join(names)}")
        return value

    return read


def _names(key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > MAX_DOC_IDS:
        raise RequestError(key, value, f"a list of at most {MAX_DOC_IDS} strings")
    return tuple(_name(key, item) for item in value)


def _bounds(key: str, value: Any) -> tuple[int, ...]:
    expected = "a list of token offsets, sorted, unique and not negative"
    if not isinstance(value, (list, tuple)):
        raise RequestError(key, value, expected)
    last = -1
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int) or item <= last:
            raise RequestError(key, item, expected)
        last = item
    return tuple(value)


def _store(key: str, value: Any) -> StorePolicy:
    return StorePolicy(_choice([policy.value for policy in StorePolicy])(key, value))


def _alloc(key: str, value: Any) -> Allocation:
    return Allocation(_choice([alloc.value for alloc in Allocation])(key, value))


_SELECTION_FIELDS = frozenset({"n_avg", "alloc", "alloc_ratio", "max_share"})
_LAYERWISE_FIELDS = frozenset({"warmup", "probe", "coverage", "is_gradual"})

_READERS: Mapping[str, tuple[str, Any]] = {
    "pic": ("is_enabled", _bool),
    "pic_bounds": ("bounds", _bounds),
    "pic_delimiter": ("delimiter", _name),
    "pic_strategy": ("strategy", _choice(STRATEGIES)),
    "pic_n_avg": ("n_avg", _int_between(0, MAX_BUDGET)),
    "pic_alloc": ("alloc", _alloc),
    "pic_alloc_ratio": ("alloc_ratio", _ratio),
    "pic_max_share": ("max_share", _share),
    "pic_warmup": ("warmup", _int_between(0, MAX_LAYERS)),
    "pic_probe": ("probe", _int_between(0, MAX_LAYERS)),
    "pic_coverage": ("coverage", _coverage),
    "pic_gradual": ("is_gradual", _bool),
    "pic_namespace": ("namespace", _name),
    "pic_doc_ids": ("doc_ids", _names),
    "pic_ttl_s": ("ttl_s", _ttl),
    "pic_store": ("store", _store),
    "pic_pin": ("is_pinned", _bool),
    "pic_invalidate": ("invalidates", _names),
    "pic_purge": ("purges", _bool),
    "pic_strict": ("is_strict", _bool),
}
