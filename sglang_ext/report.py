"""What PIC did for one request, as the client is told.

Knows the names of outcomes and reasons. `docs/reasons.md` says what each means and what to do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_ext.recompute.planning import TokenCounts


class Reason(StrEnum):
    """Why a request was prefilled in full; the value is what clients and metrics see."""

    PIC_OFF = "pic_off"
    DISABLED = "disabled_by_request"
    FULL_STRATEGY = "full_strategy"
    SINGLE_CHUNK = "single_chunk"
    TOO_MANY_CHUNKS = "too_many_chunks"
    CHAT_TEMPLATE = "chat_template"
    LORA = "lora"
    SESSION = "session"
    MULTIMODAL = "multimodal"
    INPUT_EMBEDS = "input_embeds"
    DIVERGED = "diverged"
    LAYERWISE = "layerwise_unsupported"
    LAYERWISE_PLAN = "layerwise_plan"
    INPUT_LOGPROBS = "input_logprobs"
    HIDDEN_STATES = "hidden_states"
    POOLING = "pooling"
    BEAM_SEARCH = "beam_search"
    PROMPT_CHANGED = "prompt_changed"
    ERROR = "internal_error"


class Outcome(StrEnum):
    """What happened, in one word."""

    REUSED = "reused"
    COLD = "cold"
    EXACT = "exact"
    FULL = "full"


@dataclass(slots=True)
class PicReport:
    """Filled in as a request advances; `as_dict` is `meta_info["pic"]`.

    Attributes:
        strategy: The strategy asked for.
        num_chunks: Chunks of the prompt.
        prompt_tokens: Tokens of the prompt.
        outcome: `reused` some cached chunk; `cold`: nothing cached, chunks computed alone and
            kept; `exact`: everything was an exact prefix or had to be computed in context;
            `full`: ordinary prefill, `fallback` says why.
        fallback: The reason of a full prefill.
        detail: For `internal_error` the exception's type and message.
        exact: Tokens there exactly: SGLang's prefix and cached segments of the first chunk.
        reused: Tokens of cached chunks used as they were kept.
        recomputed: Tokens of cached chunks computed again in full context; by a layerwise
            strategy those of its last layer.
        computed: Tokens that were not cached.
        selected: Tokens the strategy chose in the whole prompt.
        recomputed_share: Cached tokens computed again, summed over layers, of all cached tokens
            in all layers; 0 without hits.
        plan: Phases of a layerwise strategy: `signal`, `warmup` and `probe` in layers, `coverage`.
        bytes_loaded: Bytes of cached KV: `host` what was placed, all of it from host memory by
            then; `disk` and `shared`, where there are such tiers, what this request brought from
            there.
        declined: Cached segments of lower tiers that are faster computed than loaded.
        late: Payloads that did not come before waiting any longer had cost more than computing.
        level: 0 if served as asked; 1 with twice the budget, 2 in full, after shadow checks.
        phase_ms: Milliseconds in the scheduler process: `load`, waiting for lower tiers, `lookup`
            of the index and planning, `misses` computed alone, `place`, `warmup`, `probe` and
            `patch` in context; and
            across these `own`, what is neither SGLang's forward nor a copy of KV. A batch's patch
            is every member's.
    """

    strategy: str
    num_chunks: int = 0
    prompt_tokens: int = 0
    outcome: Outcome = Outcome.FULL
    fallback: Reason | None = None
    detail: str | None = None
    exact: int = 0
    reused: int = 0
    recomputed: int = 0
    computed: int = 0
    selected: int = 0
    recomputed_share: float = 0.0
    plan: dict[str, Any] = field(default_factory=dict)
    bytes_loaded: dict[str, int] = field(default_factory=lambda: {"host": 0})
    declined: int = 0
    late: int = 0
    level: int = 0
    phase_ms: dict[str, float] = field(default_factory=dict)

    def fall_back(self, reason: Reason, detail: str | None = None) -> None:
        """Turn the report into that of a full prefill."""
        self.outcome, self.fallback, self.detail = Outcome.FULL, reason, detail
        self.exact = self.reused = self.recomputed = self.selected = 0
        self.bytes_loaded["host"] = 0
        self.recomputed_share = 0.0
        self.plan = {}
        self.computed = self.prompt_tokens

    def set_counts(self, counts: TokenCounts, num_selected: int) -> None:
        """Count every token of a request that PIC served."""
        self.exact, self.reused = counts.exact, counts.reused
        self.recomputed, self.computed = counts.recomputed, counts.computed
        self.selected = num_selected

    def set_full(self, prefix_len: int) -> None:
        """Count the tokens of a full prefill behind an exact prefix."""
        self.exact, self.computed = prefix_len, max(self.prompt_tokens - prefix_len, 0)

    def as_dict(self) -> dict[str, Any]:
        """Scalars and one level of mappings only, so that any IPC carries it."""
        return {
            "strategy": self.strategy,
            "outcome": self.outcome.value,
            "fallback": None if self.fallback is None else self.fallback.value,
            "detail": self.detail,
            "chunks": self.num_chunks,
            "prompt_tokens": self.prompt_tokens,
            "exact_tokens": self.exact,
            "reused_tokens": self.reused,
            "recomputed_tokens": self.recomputed,
            "computed_tokens": self.computed,
            "selected_tokens": self.selected,
            "recomputed_share": round(self.recomputed_share, 6),
            "plan": self.plan
            or {"warmup": 0, "probe": 0, "coverage": round(self.recomputed_share, 6)},
            "level": self.level,
            "bytes_loaded": dict(self.bytes_loaded),
            "declined_segments": self.declined,
            "late_segments": self.late,
            "ms": {name: round(value, 3) for name, value in self.phase_ms.items()},
        }
