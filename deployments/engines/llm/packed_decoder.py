"""The layers of a decoder with packed weights in the compiled kernels (native/decoder.h), for prompts and completions.

At one token a step, what torch and Python do around some thirty small operations a layer costs as much as half of the
products; in a prompt, attention and passes over activations are a quarter. Activations stay in float32 from the
embedding to the logits. `PackedDecoder.create` says where it applies; everywhere else the module runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from itertools import accumulate
from typing import Any, Final, NamedTuple, Self

import numpy as np
import torch
from torch import nn

from deployments.engines.llm.block_manager import BLOCK_SIZE
from deployments.engines.llm.kv_cache import KVCache, LayerSlots
from deployments.engines.llm.models.registry import LoadedModel
from deployments.engines.native.library import ELEMENTS, Kernels, MatrixPointers, PackedMatrix, load_kernels
from deployments.engines.nn.packed_linear import PackedEmbedding, PackedLinear, product_path

_INT8_CACHE: Final = 2  # attention.h's, behind ELEMENTS
_VECTOR: Final = 16  # elements: attention.h leaves no remainder
_FEW_ROWS: Final = 64  # whose layers are computed in one call: they take less than a layer of a prompt
# What the kernels know of: a model that has more parts, or other values in more fields, runs layer by layer.
_SIZES: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
)
_OTHERS: Final = ("rms_norm_eps", "max_positions", "tied_embeddings", "qkv_bias", "output_bias", "mlp_bias", "qk_norm")
_PRODUCTS: Final = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
_NORMS: Final = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
_PARTS: Final = frozenset({"", "self_attn", "mlp", *_PRODUCTS, *_NORMS})


class _Linear(ctypes.Structure):
    _fields_ = (("weight", MatrixPointers), ("bias", ctypes.c_void_p))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Linear) for name in ("q", "k", "v", "output", "gate", "up", "down")),
        *((name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, ctypes.c_void_p) for name in LayerSlots._fields),
    )


class _CacheShape(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_kv_heads", "head_dim", "block_size")),
        ("element", ctypes.c_int),
    )


class _Decoder(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        *((name, ctypes.c_int64) for name in ("hidden", "intermediate", "num_heads")),
        ("cache", _CacheShape),
        ("eps", ctypes.c_float),
        ("is_interleaved", ctypes.c_int),
    )


class _Span(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("first_row", "num_rows", "position")),
        ("blocks", ctypes.c_void_p),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_rows", "num_spans", "first_layer", "last_layer")),
        *((name, ctypes.c_void_p) for name in ("x", "cos", "sin")),
        ("spans", ctypes.POINTER(_Span)),
    )


class TokenSpan(NamedTuple):
    """Tokens of a sequence to compute, from `position` on. Earlier ones are in the KV cache or in spans before it."""

    token_ids: Sequence[int]
    position: int
    block_table: Sequence[int]


class PackedDecoder:
    """The layers of one model with their KV cache, as the kernels take them. It keeps the tensors alive."""

    def __init__(self, model: LoadedModel, cache: KVCache, kernels: Kernels) -> None:
        decoder: Any = model.module.model
        self._embedding: PackedEmbedding = decoder.embed_tokens
        self._norm, self._rotary, self._kernels = decoder.norm, model.rotary, kernels
        self._kept: list[torch.Tensor] = []
        spec = model.spec
        self._layers = (_Layer * spec.num_layers)(
            *(self._layer(layer, cache.layer_slots(i)) for i, layer in enumerate(decoder.layers))
        )
        element = ELEMENTS.get(cache.layer_slots(0).keys.dtype, _INT8_CACHE)
        self._decoder = _Decoder(
            self._layers,
            spec.hidden_size,
            spec.intermediate_size,
            spec.num_heads,
            _CacheShape(spec.num_kv_heads, spec.head_dim, BLOCK_SIZE, element),
            spec.rms_norm_eps,
            model.rotary.is_interleaved,
        )

    @classmethod
    def create(cls, model: LoadedModel, cache: KVCache) -> Self | None:
        """Return the decoder, or None where the model has something that decoder.h does not compute."""
        kernels = load_kernels() if model.device.type == "cpu" else None
        if kernels is None or not _is_computed(model):
            return None
        return cls(model, cache, kernels)

    @torch.inference_mode()
    def run_layers(self, spans: Sequence[TokenSpan], check: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Store the tokens' keys and values and return the last layer's normalized output, (rows, hidden) in float32.

        A row's result depends on its sequence's tokens alone, bit for bit. With more than a few rows `check` is called
        before each layer, and what it raises ends the step. Raises MemoryError.
        """
        sizes = [len(span.token_ids) for span in spans]
        x_NC = self._embedding.packed.selected(torch.tensor([token for span in spans for token in span.token_ids]))
        positions = torch.cat(
            [torch.arange(one.position, one.position + n) for one, n in zip(spans, sizes, strict=True)]
        )
        angles = self._rotary.angles(positions, torch.float32)
        tables = [np.asarray(span.block_table, np.int64) for span in spans]
        rows = (_Span * len(spans))(
            *(
                _Span(end - size, size, span.position, table.ctypes.data)
                for span, size, end, table in zip(spans, sizes, accumulate(sizes), tables, strict=True)
            )
        )
        x_NC = x_NC.contiguous()
        pointers = x_NC.data_ptr(), angles.cos.data_ptr(), angles.sin.data_ptr()
        num_layers = len(self._layers)
        at_once = num_layers if len(x_NC) <= _FEW_ROWS else 1
        for first in range(0, num_layers, at_once):
            if at_once == 1:
                check()
            step = _Step(len(x_NC), len(spans), first, first + at_once, *pointers, rows)
            if self._kernels.decode(ctypes.byref(self._decoder), ctypes.byref(step), torch.get_num_threads()):
                raise MemoryError(f"no memory for a step of {len(x_NC)} tokens")
        normalized: torch.Tensor = self._norm(x_NC)
        return normalized

    def _layer(self, layer: nn.Module, slots: LayerSlots) -> _Layer:
        products: list[Any] = [layer.get_submodule(name) for name in _PRODUCTS]
        norms = [layer.get_submodule(name) for name in _NORMS]
        return _Layer(
            *(_Linear(PackedMatrix(*one.packed).pointers(), self._pointer(one.bias)) for one in products),
            *(self._pointer(getattr(norm, "weight", None)) for norm in norms),
            *(None if one is None else one.data_ptr() for one in slots),
        )

    def _pointer(self, vector: torch.Tensor | None) -> int | None:
        if vector is None:
            return None
        self._kept.append(vector.detach().float().contiguous())
        return self._kept[-1].data_ptr()


def _is_computed(model: LoadedModel) -> bool:
    spec, decoder = model.spec, model.module.model
    layers: Iterable[Any] = decoder.layers
    return (
        model.dtype in ELEMENTS
        and spec.hidden_size % _VECTOR == spec.head_dim % _VECTOR == spec.num_heads % spec.num_kv_heads == 0
        and all(getattr(spec, one.name) == one.default for one in fields(spec) if one.name not in (*_SIZES, *_OTHERS))
        and isinstance(decoder.embed_tokens, PackedEmbedding)
        and all({name for name, _ in layer.named_modules()} == _PARTS for layer in layers)
        and all(_is_int8(layer.get_submodule(name)) for layer in layers for name in _PRODUCTS)
    )


def _is_int8(product: nn.Module) -> bool:
    return isinstance(product, PackedLinear) and product_path(product.packed, product.arithmetic).startswith("int8")
