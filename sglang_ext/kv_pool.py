"""SGLang's KV pool on one side, chunk payloads on the other.

Knows the pool's layer buffers, which layers rotate their keys and how. Does not know requests,
plans or the index; is told slots and gets them right.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_ext.errors import PayloadLost, UnsupportedSGLang
from sglang_ext.recompute.reencode import Rotation, plan_rotation, reencode_keys
from sglang_ext.recompute.rope import RopeSpec, rope_spec_from_module


class SegmentKV:
    """K and V of one segment in host memory, K rotated for chunk-local positions.

    Attributes:
        data: `[num_layers, 2, num_tokens, num_kv_heads, head_dim]`, the pool's dtype, CPU,
            contiguous, pinned where there is a GPU; K first. Never changes once made.
    """

    __slots__ = ("data",)

    def __init__(self, data: Tensor) -> None:
        self.data = data

    @property
    def nbytes(self) -> int:
        """Bytes of `data`."""
        return self.data.numel() * self.data.element_size()

    def buffer(self) -> memoryview:
        """All bytes of `data`, without a copy."""
        return self.data.view(torch.uint8).numpy().data.cast("B")


class SegmentCodec:
    """Describes payloads of one model to other processes, and makes room for theirs.

    See `PayloadCodec`; the form is a dtype's name and a shape.
    """

    def __init__(self, num_layers: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self._shape = (num_layers, 2, num_heads, head_dim)
        self._dtype = dtype
        self._is_pinned = torch.cuda.is_available()

    def describe(self, payload: SegmentKV) -> bytes:
        """Dtype and shape, such as `bfloat16 30 2 256 3 64`."""
        shape = " ".join(map(str, payload.data.shape))
        return f"{_dtype_name(payload.data.dtype)} {shape}".encode()

    def allocate(self, form: bytes, num_tokens: int, num_bytes: int) -> SegmentKV:
        """A payload with undefined content for `num_tokens`.

        Raises:
            PayloadLost: `foreign`; the form is not this model's, or not of `num_bytes`.
        """
        layers, parts, heads, dim = self._shape
        shape = (layers, parts, num_tokens, heads, dim)
        expected = f"{_dtype_name(self._dtype)} {' '.join(map(str, shape))}".encode()
        size = math.prod(shape) * self._dtype.itemsize
        if form != expected or num_bytes != size:
            raise PayloadLost("foreign", f"form {form[:80]!r} with {num_bytes} bytes")
        return SegmentKV(torch.empty(shape, dtype=self._dtype, pin_memory=self._is_pinned))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Piece(NamedTuple):
    """Tokens `[start, end)` of a segment's payload, to be placed side by side with others.

    Attributes:
        payload: The segment's KV.
        start: First token of it, 0 at the segment's start.
        end: Behind its last token.
        delta: Positions its keys move by.
    """

    payload: SegmentKV
    start: int
    end: int
    delta: int


@dataclass(frozen=True, slots=True)
class LayerRope:
    """How the layers of a model rotate their keys.

    Attributes:
        specs: The distinct rotary embeddings.
        of_layer: For each layer the index of its embedding in `specs`; None does not rotate.
    """

    specs: tuple[RopeSpec, ...]
    of_layer: tuple[int | None, ...]


class KvPool:
    """Copies KV between SGLang's pool and payloads; see the module's docstring."""

    def __init__(self, token_to_kv_pool: Any, rope: LayerRope) -> None:
        """Check the pool's form.

        Raises:
            UnsupportedSGLang: The pool is not the plain one, or its keys and values differ in
                shape.
        """
        self._rope = rope
        self._keys: list[Tensor] = token_to_kv_pool.k_buffer
        self._values: list[Tensor] = token_to_kv_pool.v_buffer
        key, value = self._keys[0], self._values[0]
        if key.ndim != 3 or key.shape != value.shape or key.dtype != token_to_kv_pool.dtype:
            raise UnsupportedSGLang(
                f"KV pool {type(token_to_kv_pool).__name__} with keys {list(key.shape)} "
                f"{key.dtype} and values {list(value.shape)}: expected [slots, heads, dim] of "
                f"{token_to_kv_pool.dtype} for both"
            )

        self.copy_ms = 0.0
        """Time spent copying KV so far; callers take differences."""

    @property
    def num_layers(self) -> int:
        """Layers with KV."""
        return len(self._keys)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of all layers."""
        key = self._keys[0]
        return 2 * self.num_layers * key.shape[1] * key.shape[2] * key.element_size()

    @property
    def codec(self) -> SegmentCodec:
        """Describes this pool's payloads, and makes room for others of the same form."""
        heads, dim = self._keys[0].shape[1:]
        return SegmentCodec(self.num_layers, heads, dim, self._keys[0].dtype)

    def capture(self, slots: Tensor) -> SegmentKV:
        """Copy the KV at `slots` out. Changes nothing.

        Args:
            slots: `[num_tokens]` int64, on the pool's device.
        """
        started = time.perf_counter()
        key = self._keys[0]
        shape = (self.num_layers, 2, slots.numel(), *key.shape[1:])
        data = torch.empty(shape, dtype=key.dtype, device=key.device)
        for layer, (keys, values) in enumerate(zip(self._keys, self._values, strict=True)):
            data[layer, 0] = keys[slots]
            data[layer, 1] = values[slots]
        if key.is_cuda:
            pinned = torch.empty(shape, dtype=key.dtype, pin_memory=True)
            data = pinned.copy_(data)
        self.copy_ms += (time.perf_counter() - started) * 1e3
        return SegmentKV(data)

    def place(self, pieces: Sequence[Piece], slots: Tensor) -> None:
        """Write payloads into the pool, keys rotated to their new positions.

        Args:
            pieces: What to write, in the order of `slots`.
            slots: `[num_tokens]` int64, on the pool's device; overwritten in every layer.
        """
        if not pieces:
            return
        started = time.perf_counter()
        device = self._keys[0].device
        if device.type != "cpu":  # one copy a payload; slices are then taken on the device
            pieces = [piece._replace(payload=_on(piece.payload, device)) for piece in pieces]
        rotations = self._plan_rotations(pieces, device)
        for layer, (keys, values) in enumerate(zip(self._keys, self._values, strict=True)):
            own_keys = _gather(pieces, layer, 0)
            which = self._rope.of_layer[layer]
            if rotations and which is not None:
                own_keys = reencode_keys(own_keys, rotations[which], self._rope.specs[which])
            keys.index_copy_(0, slots, own_keys)
            values.index_copy_(0, slots, _gather(pieces, layer, 1))
        self.copy_ms += (time.perf_counter() - started) * 1e3

    def _plan_rotations(self, pieces: Sequence[Piece], device: torch.device) -> list[Rotation]:
        """One for each embedding; none at all if nothing moves."""
        if not any(piece.delta for piece in pieces):
            return []
        lengths = torch.tensor([piece.end - piece.start for piece in pieces])
        deltas = torch.tensor([piece.delta for piece in pieces]).repeat_interleave(lengths)
        heads = self._keys[0].shape[1]
        return [
            plan_rotation(spec, deltas, device).expand_heads(heads) for spec in self._rope.specs
        ]


def _on(payload: SegmentKV, device: torch.device) -> SegmentKV:
    return SegmentKV(payload.data.to(device, non_blocking=True))


def _gather(pieces: Sequence[Piece], layer: int, which: int) -> Tensor:
    """`[num_tokens, num_kv_heads, head_dim]` of one layer's keys (0) or values (1)."""
    return torch.cat([p.payload.data[layer, which, p.start : p.end] for p in pieces])


def layer_rope_of(model: torch.nn.Module, num_layers: int) -> LayerRope:
    """Find every attention layer's rotary embedding in a loaded SGLang model.

    Raises:
        UnsupportedSGLang: A layer is not found, or its embedding cannot be re-encoded.
    """
    specs: list[RopeSpec] = []
    index_of: dict[int, int] = {}
    of_layer: dict[int, int | None] = {}
    for module in model.modules():
        attention = getattr(module, "attn", None)
        layer_id = getattr(attention, "layer_id", None)
        if layer_id is None or not hasattr(module, "rotary_emb"):
            continue
        rotary = module.rotary_emb
        if rotary is None:
            of_layer[layer_id] = None
            continue
        if id(rotary) not in index_of:
            index_of[id(rotary)] = len(specs)
            specs.append(rope_spec_from_module(rotary))
        of_layer[layer_id] = index_of[id(rotary)]
    missing = sorted(set(range(num_layers)) - set(of_layer))
    if missing:
        raise UnsupportedSGLang(
            f"model {type(model).__name__}: no rotary embedding found for layer {missing[0]}"
        )
    return LayerRope(tuple(specs), tuple(of_layer[layer] for layer in range(num_layers)))
