"""A loaded model as a stack of layers that can be run one at a time over any tokens.

Knows how SGLang's model families hand hidden states from layer to layer, and where attention is
met. Knows nothing of phases, signals, chunks or which tokens are computed.

Between layers hidden states are a plain pair: what the last layer put out, and the residual that
the next one adds to it. A pair may be cut to fewer tokens before the next layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sglang_ext import compat
from sglang_ext.errors import UnsupportedSGLang


class Hidden(NamedTuple):
    """What stands between two layers."""

    output: Tensor
    """`[num_tokens, hidden]`; the embedding before the first layer."""
    residual: Tensor | None
    """As `output`; None before the first layer."""

    def take(self, rows: Tensor) -> Hidden:
        """A copy of some tokens; `rows` int64 on the device."""
        return Hidden(*(None if part is None else part[rows] for part in self))  # type: ignore[arg-type]

    def clone(self) -> Hidden:
        """A copy; layers may write into what they are given."""
        return Hidden(*(None if part is None else part.clone() for part in self))  # type: ignore[arg-type]

    def part(self, start: int, end: int) -> Hidden:
        """Tokens `[start, end)`, sharing memory."""
        return Hidden(*(None if part is None else part[start:end] for part in self))  # type: ignore[arg-type]


def join(parts: list[Hidden]) -> Hidden:
    """Several parts as one."""
    if len(parts) == 1:
        return parts[0]
    outputs = torch.cat([part.output for part in parts])
    residuals = [part.residual for part in parts if part.residual is not None]
    return Hidden(outputs, torch.cat(residuals) if residuals else None)


class LayerStack(Protocol):
    """One model family; methods write K/V of what they compute where the ForwardBatch says."""

    num_layers: int

    def embed(self, token_ids: Tensor) -> Hidden:
        """What goes into layer 0; `[num_tokens]` int64."""

    def run(self, layer: int, hidden: Hidden, forward_batch: Any) -> Hidden:
        """One layer over the tokens of a ForwardBatch. May write into `hidden`."""

    def logits(self, hidden: Hidden, forward_batch: Any) -> Tensor:
        """`[num_rows, vocab]` of the last token of each row, from what the last layer put out."""


class _Decoder:
    """What the families have in common."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._layers = model.model.layers
        self.num_layers = len(self._layers)

    def embed(self, token_ids: Tensor) -> Hidden:
        """See `LayerStack`."""
        return Hidden(self._model.model.embed_tokens(token_ids), None)


class BoundaryStack(_Decoder):
    """Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE: the residual lives in the ForwardBatch."""

    def run(self, layer: int, hidden: Hidden, forward_batch: Any) -> Hidden:
        """See `LayerStack`."""
        stream = compat.open_residual(hidden.output, hidden.residual, forward_batch)
        output = self._layers[layer](forward_batch.positions, stream, forward_batch)
        return Hidden(*compat.close_residual(output, forward_batch))

    def logits(self, hidden: Hidden, forward_batch: Any) -> Tensor:
        """See `LayerStack`."""
        stream = compat.open_residual(hidden.output, hidden.residual, forward_batch)
        normed = compat.final_norm(stream, forward_batch, self._model.model.norm)
        return _logits(self._model, self._model.lm_head, normed, forward_batch)


class GemmaStack(_Decoder):
    """Gemma3: hidden and residual travel as arguments, with rotations for both kinds of layers."""

    def run(self, layer: int, hidden: Hidden, forward_batch: Any) -> Hidden:
        """See `LayerStack`."""
        inner = self._model.model
        positions = forward_batch.positions.unsqueeze(0)
        is_sliding = self._layers[layer].is_sliding
        rotation = (inner.rotary_emb_local if is_sliding else inner.rotary_emb)(
            hidden.output, positions
        )
        output, residual = self._layers[layer](
            positions=positions,
            hidden_states=hidden.output,
            position_embeddings_global=None if is_sliding else rotation,
            position_embeddings_local=rotation if is_sliding else None,
            forward_batch=forward_batch,
            residual=hidden.residual,
        )
        return Hidden(output, residual)

    def logits(self, hidden: Hidden, forward_batch: Any) -> Tensor:
        """See `LayerStack`."""
        normed, _ = self._model.model.norm(hidden.output, hidden.residual)
        # SGLang's Gemma3 has tied weights, and loads no others.
        return _logits(self._model, self._model.model.embed_tokens, normed, forward_batch)


STACKS: Mapping[str, Callable[[Any], LayerStack]] = MappingProxyType(
    {
        "LlamaForCausalLM": BoundaryStack,
        "MistralForCausalLM": BoundaryStack,
        "Qwen2ForCausalLM": BoundaryStack,
        "Qwen3ForCausalLM": BoundaryStack,
        "Qwen3MoeForCausalLM": BoundaryStack,
        "Gemma3ForCausalLM": GemmaStack,
    }
)
"""How to run the layers of SGLang's model classes, by class name; subclasses are not included."""


def layer_stack_of(model: Any) -> LayerStack:
    """The stack of a loaded model.

    Raises:
        UnsupportedSGLang: Its class is none of `STACKS`.
    """
    name = type(model).__name__
    if name not in STACKS:
        raise UnsupportedSGLang(
            f"layerwise strategies: model class {name}, expected one of {', '.join(STACKS)}"
        )
    return STACKS[name](model)


class StopLayer(Exception):
    """Raised by an observer that has seen enough of a layer."""


Observer = Callable[[Any, Tensor, Tensor, Tensor], None]
"""Takes SGLang's attention layer, and its queries, keys and values as they go into it."""


class ObservedBackend:
    """An attention backend whose calls somebody looks at.

    Attributes:
        before: Called before attention; may raise `StopLayer`.
        after: Called when keys and values are in the pool.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.before: Observer | None = None
        self.after: Observer | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Attention of one layer; see SGLang's AttentionBackend."""
        if self.before is not None:
            self.before(layer, q, k, v)
        output = self._backend.forward(q, k, v, layer, *args, **kwargs)
        if self.after is not None:
            self.after(layer, q, k, v)
        return output

    @contextmanager
    def watch(
        self, before: Observer | None = None, after: Observer | None = None
    ) -> Iterator[None]:
        """Look at calls for as long as the context lasts."""
        self.before, self.after = before, after
        try:
            yield
        finally:
            self.before = self.after = None


def _logits(model: Any, head: Any, normed: Tensor, forward_batch: Any) -> Tensor:
    output = model.logits_processor(forward_batch.input_ids, normed, head, forward_batch)
    logits: Tensor = output.next_token_logits
    return logits
