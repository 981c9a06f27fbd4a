"""LoRAs of requests, fitted to one decoder: its module names, dtype, device and order of rows."""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from deployments.engines.llm.models.decoder_tensors import renamed_experts
from deployments.engines.llm.models.own_cache import OwnCacheModel
from deployments.engines.llm.models.registry import AnyModel, LoadedModel, decoder_name
from deployments.engines.llm.models.stock import StockLanguageModel
from deployments.engines.llm.sequences.sequence import FittedLora, SequenceLora
from deployments.engines.nn.lora import Pairs, check_targets
from deployments.engines.records.protocol import EngineError, TextLora
from weights.operations.adapters import LoraAdapter, LoraPair

_HEAD = "lm_head"


class DecoderLoras:
    """The LoRAs of all requests of one decoder."""

    def __init__(self, model: AnyModel) -> None:
        self._model = model
        self._fitted: weakref.WeakKeyDictionary[LoraAdapter, FittedLora] = weakref.WeakKeyDictionary()
        self._serials = itertools.count()

    def fit(self, loras: Iterable[TextLora]) -> tuple[SequenceLora, ...]:
        """Return the fitted LoRAs of non-zero scale, in a fixed order. Raises EngineError for one that does not fit."""
        found = [SequenceLora(lora.key, self._fit(lora.adapter), lora.scale) for lora in loras]
        return tuple(sorted((lora for lora in found if lora.scale), key=lambda lora: lora.place))

    def _fit(self, adapter: LoraAdapter) -> FittedLora:
        if adapter not in self._fitted:
            pairs = self._named(adapter)
            try:
                self._fitted[adapter] = fitted_lora(self._model, next(self._serials), pairs)
            except EngineError as error:
                raise EngineError(f"{adapter.path}: {error}") from None
        return self._fitted[adapter]

    def _named(self, adapter: LoraAdapter) -> Pairs:
        """Return an adapter's pairs by the decoder's own names of its layers."""
        model, given = self._model, adapter.components.get("model")
        if given is None:
            raise EngineError(f"{adapter.path}: is not a LoRA of a language model (PEFT's layout)")
        scope = model.lora_scope() if isinstance(model, StockLanguageModel) else None
        named = given if scope else {decoder_name(path): pair for path, pair in given.items()}
        dotted = renamed_experts({f"{path}.": pair for path, pair in named.items()})
        pairs = {path.removesuffix("."): pair for path, pair in dotted.items()}
        if scope and (outside := [path for path in pairs if not path.startswith((f"{scope}.", _HEAD))]):
            raise EngineError(f"{adapter.path}: changes {outside[0]!r}; the vision tower is the same for all requests")
        return pairs


def fitted_lora(model: AnyModel, serial: int, pairs: Pairs) -> FittedLora:
    """Return an adapter's pairs, by the decoder's own names of its layers, as the model's layers need them.

    A rank takes its part of each. Raises EngineError for one that does not fit.
    """
    share = None if isinstance(model, OwnCacheModel) else model.share
    own = pairs if share is None else {path: share.cut_pair(path, pair) for path, pair in pairs.items()}
    check_targets(model.module, own)
    placed = {path: _placed(model, path, pair) for path, pair in own.items()}
    head = {path: pair for path, pair in placed.items() if path == _HEAD}
    layers = {path: pair for path, pair in placed.items() if path != _HEAD}
    return FittedLora(serial, layers, head, {} if share is None or share.rank else pairs)


def _placed(model: AnyModel, path: str, pair: LoraPair) -> LoraPair:
    heads = _interleaved_heads(model, path)
    if heads:  # the base's rows are in the order of neighbouring pairs
        magnitude = None if pair.magnitude is None else _interleaved(pair.magnitude, heads)
        up = _interleaved(pair.up, heads)
        pair = replace(pair, up=up, magnitude=magnitude)
    return pair.to(model.device_of(path) if isinstance(model, LoadedModel) else model.device, model.dtype)


def _interleaved_heads(model: AnyModel, path: str) -> int | None:
    """Return the heads of a layer whose rows are in another order than its checkpoint's; None for any other."""
    if not isinstance(model, LoadedModel) or not model.rotary.is_interleaved:
        return None
    return {"q_proj": model.spec.num_heads, "k_proj": model.spec.num_kv_heads}.get(path.rpartition(".")[2])


def _interleaved(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows (out, ...) of heads whose halves follow each other, in the order of neighbouring pairs."""
    return rows.view(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def scope_of(loras: Sequence[SequenceLora]) -> bytes:
    """Return the key of the LoRAs that keys and values depend on beside the tokens; empty without LoRAs.

    An adapter's serial stands for it, not its weights' hash: results of a damaged copy are never found again.
    """
    if not loras:
        return b""
    names = repr([(lora.fitted.serial, lora.scale) for lora in loras])
    return hashlib.blake2b(names.encode(), digest_size=16, person=b"lora").digest()
