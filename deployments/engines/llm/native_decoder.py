"""A decoder with dense or packed weights in the compiled kernels (native/decoder.h), for prompts and completions.

At one token a step, torch's and Python's work around some thirty small operations a layer costs as much as half of the
products, and of a small model nearly all; in a prompt, attention and passes over activations are a quarter. Activations
stay in float32 from the embedding to the logits; products with bfloat16 weights round theirs where the processor
multiplies pairs of bfloat16. `NativeDecoder.create` decides where it applies; everywhere else the module runs.
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

from deployments.engines.llm.models.registry import LoadedModel
from deployments.engines.llm.models.stock import StockLanguageModel
from deployments.engines.llm.sequences.block_manager import BLOCK_SIZE
from deployments.engines.llm.sequences.kv_cache import KVCache, LayerSlots
from deployments.engines.native.library import ELEMENTS, Kernels, MatrixPointers, PackedMatrix, load_kernels
from deployments.engines.nn.packed_linear import PackedEmbedding, PackedLinear, product_path
from deployments.engines.ranks.group import RankGroup

_CACHE_ELEMENTS: Final = {**ELEMENTS, torch.int8: 2, torch.float16: 3}  # attention.h's
_VECTOR: Final = 16  # elements: attention.h and dense_product.h leave no remainder
_DENSE: Final = {torch.float32: "F32", torch.bfloat16: "BF16"}  # kinds of products, and one of packed weights
_INT8: Final = "int8"
_FEW_ROWS: Final = 64  # so few rows are computed in one call for all layers: it takes less than a layer of a prompt
# The parts that the kernels support: a model with more parts, or other values in more fields, runs layer by layer.
_SIZES: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
)
_OTHERS: Final = (
    *("rms_norm_eps", "max_positions", "tied_embeddings", "qkv_bias", "output_bias", "mlp_bias", "qk_norm"),
    "head_rows",
)
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
        *((name, ctypes.c_int64) for name in ("num_layers", "hidden", "intermediate", "num_heads")),
        ("cache", _CacheShape),
        ("eps", ctypes.c_float),
        ("is_interleaved", ctypes.c_int),
        ("frequencies", ctypes.c_void_p),
        ("magnitude", ctypes.c_float),
        ("norm", ctypes.c_void_p),
        ("head", _Linear),
    )


class _Span(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("first_row", "num_rows", "position")),
        ("blocks", ctypes.c_void_p),
    )


_Sum: Any = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_float), ctypes.c_int64)


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_rows", "num_spans", "first_layer", "last_layer")),
        *((name, ctypes.c_void_p) for name in ("x", "cos", "sin")),
        ("spans", ctypes.POINTER(_Span)),
        ("num_logits", ctypes.c_int64),
        ("logit_rows", ctypes.POINTER(ctypes.c_int64)),
        ("logits", ctypes.c_void_p),
        ("sum_ranks", _Sum),
        ("is_first_rank", ctypes.c_int),
    )


class TokenSpan(NamedTuple):
    """Tokens of a sequence to compute, from `position` on. Earlier ones are in the KV cache or in spans before it."""

    token_ids: Sequence[int]
    position: int
    block_table: Sequence[int]


class NativeDecoder:
    """The layers of one model with their KV cache in the kernels' form. It keeps the tensors alive.

    A decoder of some of the layers ends without the last norm and the head, which are elsewhere.
    """

    def __init__(self, model: LoadedModel, cache: KVCache, kernels: Kernels, part: range | None = None) -> None:
        decoder: Any = model.module.model
        self._embedding: PackedEmbedding | nn.Embedding = decoder.embed_tokens
        self._kernels = kernels
        self._kept: list[torch.Tensor] = []
        spec, rotary, head = model.spec, model.rotary, model.module.lm_head
        numbers = range(spec.num_layers) if part is None else part
        # The module computes a head of another kind than the layers.
        has_head = part is None and _kind_of(head) == _kind_of(decoder.layers[0].mlp.up_proj)
        self.vocab_size = (spec.head_rows or spec.vocab_size) if has_head else 0
        self._sum = _RankSum(model.ranks) if model.ranks is not None and spec.head_rows else None
        self._layers = (_Layer * len(numbers))(
            *(self._layer(decoder.layers[number], cache.layer_slots(number)) for number in numbers)
        )
        element = _CACHE_ELEMENTS[cache.layer_slots(numbers.start).keys.dtype]
        self._decoder = _Decoder(
            self._layers,
            len(numbers) + (part is not None),  # the last layer of a part is not the model's last one
            spec.hidden_size,
            spec.intermediate_size,
            spec.num_heads,
            _CacheShape(spec.num_kv_heads, spec.head_dim, BLOCK_SIZE, element),
            spec.rms_norm_eps,
            rotary.is_interleaved,
            self._pointer(rotary.inverse_frequencies.cpu()),
            rotary.magnitude,
            None if part else self._pointer(decoder.norm.weight),
            self._linear(head) if self.vocab_size else _Linear(),
        )

    @classmethod
    def create(cls, model: LoadedModel | StockLanguageModel, cache: KVCache) -> Self | None:
        """Return the decoder, or None if the model has a part that decoder.h does not support."""
        kernels = load_kernels() if model.device.type == "cpu" else None
        if kernels is None or not isinstance(model, LoadedModel) or model.is_split or not _is_computed(model):
            return None
        return cls(model, cache, kernels)

    @classmethod
    def create_part(cls, model: LoadedModel, cache: KVCache, part: range) -> Self | None:
        """Return the decoder of these layers, which are on the host; None as `create`."""
        kernels = load_kernels()
        return cls(model, cache, kernels, part) if kernels is not None and _is_computed(model, part) else None

    @classmethod
    def cache_dtype(cls, model: LoadedModel | StockLanguageModel) -> torch.dtype:
        """Return the dtype in which a model's keys and values lose least, of two bytes if activations have two.

        Packed weights compute in float32 here, of which float16 keeps three bits more than bfloat16.
        """
        if not isinstance(model, LoadedModel):
            return model.dtype
        is_packed = isinstance(model.module.model.embed_tokens, PackedEmbedding) and not model.is_split
        is_wide = is_packed and model.device.type == "cpu" and load_kernels() is not None and _is_computed(model)
        return torch.float16 if is_wide and model.dtype == torch.bfloat16 else model.dtype

    @torch.inference_mode()
    def run_step(
        self, spans: Sequence[TokenSpan], logit_rows: Sequence[int], check: Callable[[], None] = lambda: None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Store the tokens' keys and values; return the last layer's normalized output, and logits of `logit_rows`.

        These are (rows, hidden) and (N, vocabulary), or a rank's part of it, in float32; there are no logits if the
        head is of another kind than the layers. A row's result depends on its sequence's tokens alone, bit for bit.
        With more than a few rows `check` is called before each layer, and its exception ends the step. Raises
        MemoryError.
        """
        return self._run_rows(
            self.embedded([token for span in spans for token in span.token_ids]), spans, logit_rows, check
        )

    @torch.inference_mode()
    def run_part(self, x_NC: torch.Tensor, spans: Sequence[TokenSpan], check: Callable[[], None]) -> torch.Tensor:
        """Return these layers' output for `x_NC` (rows, hidden), float32, which is overwritten. As `run_step`."""
        return self._run_rows(x_NC, spans, (), check)[0]

    def _run_rows(
        self, x_NC: torch.Tensor, spans: Sequence[TokenSpan], logit_rows: Sequence[int], check: Callable[[], None]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        sizes = [len(span.token_ids) for span in spans]
        num_rows, num_layers = len(x_NC), len(self._layers)
        angles = torch.empty(2, num_rows, self._decoder.cache.head_dim // 2)
        asked = logit_rows if self.vocab_size else ()
        logits_NV = torch.empty(len(asked), self.vocab_size)
        tables = [(ctypes.c_int64 * len(span.block_table))(*span.block_table) for span in spans]
        rows = (_Span * len(spans))(
            *(
                _Span(end - size, size, span.position, ctypes.addressof(table))
                for span, size, end, table in zip(spans, sizes, accumulate(sizes), tables, strict=True)
            )
        )
        outputs = len(asked), (ctypes.c_int64 * len(asked))(*asked), logits_NV.data_ptr()
        ranks = () if self._sum is None else (self._sum.function, self._sum.is_first)
        pointers = x_NC.data_ptr(), angles.data_ptr(), angles.data_ptr() + angles.nbytes // 2, rows, *outputs
        at_once = num_layers if num_rows <= _FEW_ROWS else 1
        for first in range(0, num_layers, at_once):
            if at_once == 1:
                check()
            step = _Step(num_rows, len(spans), first, first + at_once, *pointers, *ranks)
            if self._kernels.decode(ctypes.byref(self._decoder), ctypes.byref(step), torch.get_num_threads()):
                if self._sum is not None and self._sum.error is not None:
                    raise self._sum.error
                raise MemoryError(f"no memory for a step of {num_rows} tokens")
        return x_NC, logits_NV if self.vocab_size else None

    def embedded(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the rows of the embedding (N, hidden) in new, contiguous float32 memory."""
        ids = torch.tensor(token_ids)
        if isinstance(self._embedding, PackedEmbedding):
            return self._embedding.packed.selected(ids).contiguous()
        return self._embedding.weight.index_select(0, ids).float()

    def _layer(self, layer: nn.Module, slots: LayerSlots) -> _Layer:
        norms = [layer.get_submodule(name) for name in _NORMS]
        return _Layer(
            *(self._linear(layer.get_submodule(name)) for name in _PRODUCTS),
            *(self._pointer(getattr(norm, "weight", None)) for norm in norms),
            *(None if one is None else one.data_ptr() for one in slots),
        )

    def _linear(self, product: nn.Module) -> _Linear:
        if isinstance(product, PackedLinear):
            return _Linear(PackedMatrix(*product.packed).pointers(), self._pointer(product.bias))
        assert isinstance(product, nn.Linear)
        weight = product.weight.detach()
        self._kept.append(weight)
        return _Linear(
            PackedMatrix(_DENSE[weight.dtype], weight, *weight.shape).pointers(), self._pointer(product.bias)
        )

    def _pointer(self, vector: torch.Tensor | None) -> int | None:
        if vector is None:
            return None
        self._kept.append(vector.detach().float().contiguous())
        return self._kept[-1].data_ptr()


class _RankSum:
    """The sum over all ranks of what the kernels have computed, as a function that they call; `error` is its last."""

    def __init__(self, ranks: RankGroup) -> None:
        self.function, self.is_first = _Sum(self._run), ranks.place.tensor == 0
        self.error: Exception | None = None
        self._ranks = ranks

    def _run(self, pointer: Any, count: int) -> int:
        try:
            values = torch.from_numpy(np.ctypeslib.as_array(pointer, (count,)))
            values.copy_(self._ranks.all_reduce(values, "tensor"))
        except Exception as error:  # no kernel knows it
            self.error = error
            return 1
        return 0


def _is_computed(model: LoadedModel, part: range | None = None) -> bool:
    spec, decoder = model.spec, model.module.model
    every: Any = decoder.layers
    layers: list[Any] = list(every) if part is None else [every[number] for number in part]
    sizes = spec.hidden_size, spec.head_dim
    return (
        model.dtype in ELEMENTS
        and all(size % _VECTOR == 0 for size in sizes)
        and spec.num_heads % spec.num_kv_heads == 0
        and all(getattr(spec, one.name) == one.default for one in fields(spec) if one.name not in (*_SIZES, *_OTHERS))
        and all({name for name, _ in layer.named_modules()} == _PARTS for layer in layers)
        and _is_of_one_kind(decoder.embed_tokens, [layer.get_submodule(name) for layer in layers for name in _PRODUCTS])
    )


def _is_of_one_kind(embedding: nn.Module, products: Iterable[nn.Module]) -> bool:
    """Return whether a model is packed, or all float32, or all bfloat16."""
    kinds = {_kind_of(one) for one in products}
    if isinstance(embedding, nn.Embedding):
        return len(kinds) == 1 and kinds <= set(_DENSE.values())  # also the embedding's: create_model refuses others
    return kinds == {_INT8} and isinstance(embedding, PackedEmbedding)


def _kind_of(product: nn.Module) -> str | None:
    """Return the kernels' kind of a product; None where they have none for it."""
    if isinstance(product, PackedLinear):
        return _INT8 if product_path(product.packed, product.arithmetic).startswith(_INT8) else None
    if type(product) is not nn.Linear or product.in_features % _VECTOR or product.weight.stride(1) != 1:
        return None
    return _DENSE.get(product.weight.dtype)
