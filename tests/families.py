"""Tiny models of the families that are run layer by layer, and what is observed of each.

SGLang builds one scheduler in a process and takes seconds to import, so that `main` imports it
once and forks for every family. Weights are random, but large enough that context matters.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

VOCAB = 512
LENGTHS = (12, 40, 33, 47, 10)
"""Tokens of the prompt's chunks; the first is exact, the last is the query."""
WINDOW = 16
COVERAGE = 0.3
PHASES: dict[str, dict[str, int]] = {
    "kvdev": {"pic_warmup": 1, "pic_probe": 2},
    "qci": {"pic_warmup": 1, "pic_probe": 2},
    "cacheblend": {},
    "prophetkv": {},
    "fusionrag": {},
}
"""Phases that fit a few layers, by layerwise strategy."""
FIRST_PATCHED = {"kvdev": 3, "qci": 1, "cacheblend": 1, "prophetkv": 0, "fusionrag": 0}

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def _llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_SIZES, head_dim=32)


def _mistral() -> Any:
    from transformers import MistralConfig

    return MistralConfig(**_SIZES, head_dim=32, sliding_window=None)


def _qwen2() -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(**{**_SIZES, "hidden_size": 128}, use_sliding_window=False)


def _qwen3() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**_SIZES, head_dim=32, use_sliding_window=False)


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **_SIZES,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        use_sliding_window=False,
    )


def _gemma3() -> Any:
    from transformers import Gemma3TextConfig

    sliding, full = "sliding_attention", "full_attention"
    return Gemma3TextConfig(
        **_SIZES,  # untied: SGLang ties the weights of every Gemma 3, whatever its config says
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=WINDOW,
        layer_types=[sliding, full, sliding, full, sliding],
        rope_parameters={
            sliding: {"rope_type": "default", "rope_theta": 10_000.0},
            full: {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    )


def _phi3() -> Any:
    from transformers import Phi3Config

    return Phi3Config(**{**_SIZES, "hidden_size": 128})


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma3": _gemma3,
}
OTHERS: dict[str, Callable[[], Any]] = {"phi3": _phi3}
"""Served with PIC, but not layer by layer."""


def save_model(name: str, folder: Path) -> None:
    """A model with fixed random weights, as SGLang loads it."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config({**FAMILIES, **OTHERS}[name]())
    model.to(torch.float32).save_pretrained(folder)


def prompt() -> tuple[list[int], dict[str, Any]]:
    """Random ids and the bounds of their chunks."""
    from tests.corpus import join

    ids = iter(np.random.default_rng(0).integers(3, VOCAB, sum(LENGTHS)).tolist())
    return join(*([next(ids) for _ in range(length)] for length in LENGTHS))


def distance(got: Tensor, expected: Tensor) -> float:
    """Relative L2 distance."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def main(names: Sequence[str]) -> None:
    """Print one JSON line for each family, what was observed or the error."""
    os.environ["SGLANG_PIC_ENABLED"] = os.environ["SGLANG_EAGER_INPUT_NO_COPY"] = "1"
    import sglang.srt.managers.scheduler  # noqa: F401  (once for every family)

    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            sys.stdout.flush()
            pid = os.fork()
            if not pid:
                _in_child(name, Path(folder))
            _, status = os.waitpid(pid, 0)
            result = Path(folder, "result.json")
            seen = (
                json.loads(result.read_text())
                if result.exists()
                else {"error": f"ended with {status}"}
            )
            print(json.dumps({"family": name, **seen}), flush=True)


def _in_child(name: str, folder: Path) -> None:
    try:
        save_model(name, folder)
        seen = observe(name, folder)
    except BaseException as exc:
        import traceback

        traceback.print_exc()
        seen = {"error": f"{type(exc).__name__}: {exc}"}
    (folder / "result.json").write_text(json.dumps(seen))
    sys.stderr.flush()
    os._exit(0)


def observe(name: str, folder: Path) -> dict[str, Any]:
    """Serve a family and compare its answers; see the keys."""
    from tests.harness import Harness

    harness = Harness(
        str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        max_total_tokens=4000,
        max_running_requests=4,
        log_level="error",
    )
    seen: dict[str, Any] = {
        "model": type(harness.scheduler.tp_worker.model_runner.model).__name__,
        "off_reason": harness.runtime._off_reason,
        "why_no_layers": harness.runtime._why_no_layers,
    }
    if name in OTHERS:
        return {**seen, **_observe_refusal(harness)}
    return {**seen, **_Observer(harness).observe()}


def _observe_refusal(harness: Any) -> dict[str, Any]:
    ids, params = prompt()
    plain = harness.ask(ids, {"pic": False}, fields={"extra_key": "plain"})
    harness.ask(ids, {**params, "pic_strategy": "daric", "pic_n_avg": 4})
    answers = {
        strategy: harness.ask(ids, {**params, "pic_strategy": strategy, "pic_store": "none"})
        for strategy in PHASES
    }
    harness.flush_tree()
    daric = harness.ask(ids, {**params, "pic_strategy": "daric", "pic_n_avg": 4})
    every = {"pic_strategy": "daric", "pic_n_avg": 100_000, "pic_max_share": 1.0}
    harness.flush_tree()
    full = harness.ask(ids, {**params, **every})
    return {
        "fallbacks": {key: answer.report["fallback"] for key, answer in answers.items()},
        "fallback_distance": max(distance(a.logits, plain.logits) for a in answers.values()),
        "daric": daric.report,
        "daric_everything": distance(full.logits, plain.logits),
    }


class _Observer:
    """Asks for one prompt in many ways."""

    def __init__(self, harness: Any) -> None:
        self._harness = harness
        self._ids, self._params = prompt()
        self._first = LENGTHS[0]
        self._query = len(self._ids) - LENGTHS[-1]
        self._depth = harness.runtime._executor._layerwise.num_layers
        self._chosen: list[Any] = []
        self._plain = harness.ask(self._ids, {"pic": False}, fields={"extra_key": "plain"})

    def observe(self) -> dict[str, Any]:
        self._ask("reuse")  # fills the cache
        reuse, queries = self._ask_reuse()
        plain, depth = self._plain, self._depth
        nothing = {"pic_warmup": 0, "pic_probe": 0, "pic_coverage": 0.0}
        all_warm = {"pic_warmup": depth, "pic_probe": 0}
        chosen = {name: self._ask_some(name) for name in PHASES}
        with self._without(1):
            without = self._ask("kvdev", pic_coverage=1.0, **PHASES["kvdev"])
        return {
            "depth": depth,
            "reuse": self._far(reuse),
            "everything": {
                name: self._far(self._ask(name, pic_coverage=1.0, **PHASES[name]))
                for name in PHASES
            },
            "all_warm": self._far(self._ask("kvdev", **all_warm)),
            "nothing_is_reuse": all(
                torch.equal(got.logits, reuse.logits) and torch.equal(got.kv, reuse.kv)
                for got in (self._ask(name, **nothing) for name in ("kvdev", "qci"))
            ),
            "without_a_layer": self._far(without),
            "some": {
                name: self._describe(name, answer, columns, reuse)
                for name, (answer, columns) in chosen.items()
            },
            "last_layers": {
                "all_probed": self._ask_twice(pic_warmup=2, pic_probe=depth - 2, pic_coverage=0.1),
                "narrowed": self._ask_twice(
                    pic_warmup=1, pic_probe=depth - 2, pic_coverage=0.5, pic_gradual=True
                ),
                "not_narrowed": self._ask_twice(
                    pic_warmup=1, pic_probe=depth - 2, pic_coverage=0.65, pic_gradual=True
                ),
            },
            "chosen": {name: columns.tolist() for name, (_, columns) in chosen.items()},
            "expected": {
                "cacheblend": self._by_deviation(plain, reuse, 1, 2),
                "kvdev": self._by_deviation(plain, reuse, 1, 3),
                "prophetkv": self._by_importance(reuse, queries),
            },
        }

    def _ask(self, strategy: str, **more: Any) -> Any:
        self._harness.flush_tree()
        answer = self._harness.ask(self._ids, {**self._params, "pic_strategy": strategy, **more})
        if answer.report["fallback"] is not None:
            raise AssertionError(f"{strategy} {more}: {answer.report}")
        return answer

    def _ask_twice(self, **params: Any) -> dict[str, Any]:
        """A report of kvdev, its distance, and what a plain request finds in the tree then."""
        answer = self._ask("kvdev", **params)
        again = self._harness.ask(self._ids, {"pic": False})
        cached = again.cached_tokens
        return {"report": answer.report, "far": self._far(answer), "cached": cached}

    def _ask_some(self, name: str) -> tuple[Any, Any]:
        """An answer with some tokens chosen, and their columns."""
        layerwise = self._harness.runtime._executor._layerwise
        run = layerwise.run
        results: list[Any] = []

        def keep(*args: Any) -> Any:
            results.extend(run(*args))
            return results

        layerwise.run = keep
        try:
            answer = self._ask(name, pic_coverage=COVERAGE, **PHASES[name])
        finally:
            del layerwise.run
        return answer, results[-1].patched[-1][1]

    def _ask_reuse(self) -> tuple[Any, dict[int, Tensor]]:
        """The answer of full reuse, and the queries its attention layers saw."""
        backend = self._harness.scheduler.tp_worker.model_runner.attn_backend
        forward = backend.forward
        queries: dict[int, Any] = {}

        def keep(q: Tensor, k: Tensor, v: Tensor, layer: Any, *args: Any, **kwargs: Any) -> Any:
            rows = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim).clone()
            if len(rows) == LENGTHS[-1]:
                queries[layer.layer_id] = (rows, layer.scaling, layer.sliding_window_size)
            return forward(q, k, v, layer, *args, **kwargs)

        backend.forward = keep
        try:
            return self._ask("reuse"), queries
        finally:
            del backend.forward

    @contextmanager
    def _without(self, layer: int) -> Iterator[None]:
        executor = self._harness.runtime._executor
        whole = executor._layerwise
        executor._layerwise = whole.without(layer)
        try:
            yield
        finally:
            executor._layerwise = whole

    def _far(self, answer: Any) -> dict[str, float]:
        """Relative distances of an answer from plain prefill."""
        return {
            "logits": distance(answer.logits, self._plain.logits),
            "kv": distance(answer.kv, self._plain.kv),
        }

    def _describe(self, name: str, answer: Any, columns: Any, reuse: Any) -> dict[str, Any]:
        first = FIRST_PATCHED[name]
        context = range(self._first, self._query)
        kept = torch.tensor(sorted(set(context) - set(columns.tolist())))
        moved = answer.kv[first:, :, columns] - reuse.kv[first:, :, columns]
        behind = max(first, 1)  # layer 0 sees no context
        num_moved = int((moved[behind - first :].abs().amax((0, 1, 3, 4)) > 0).sum())
        return {
            "report": answer.report,
            "kept_as_reused": torch.equal(
                answer.kv[first:][:, :, kept], reuse.kv[first:][:, :, kept]
            ),
            "chosen": len(columns),
            "chosen_moved": num_moved,
            "warm_layers": distance(answer.kv[:first], self._plain.kv[:first]) if first else 0.0,
        }

    def _by_deviation(self, plain: Any, reuse: Any, first: int, end: int) -> list[int]:
        """Columns whose KV moves most in some layers, by the KV of the answers."""
        from sglang_ext.recompute.reference import reference_kv_deviation

        columns = slice(self._first, self._query)
        scores = sum(
            reference_kv_deviation(
                plain.kv[layer, 0, columns],
                plain.kv[layer, 1, columns],
                reuse.kv[layer, 0, columns],
                reuse.kv[layer, 1, columns],
            )
            for layer in range(first, end)
        )
        return self._top(torch.as_tensor(scores))

    def _by_importance(self, reuse: Any, queries: dict[int, Any]) -> list[int]:
        """Columns that the query attends to most in all layers, by its queries in full reuse."""
        from sglang_ext.recompute.reference import reference_query_importance

        own = torch.arange(self._query, len(self._ids))
        scores = torch.zeros(len(self._ids), dtype=torch.float64)
        for layer in range(self._depth):
            rows, scaling, window = queries[layer]
            scores += reference_query_importance(
                rows, reuse.kv[layer, 0], own, scaling, window=None if window < 0 else window
            )
        return self._top(scores[self._first : self._query])

    def _top(self, scores: Tensor) -> list[int]:
        count = -(-int(COVERAGE * 1000) * len(scores) // 1000)
        top = scores.argsort(descending=True)[:count] + self._first
        return sorted(top.tolist())
