"""A step of a decoder with layers on several devices, or partly on the host: each layer computes in place.

Only the activations of the step's tokens cross a border, once. The KV cache of a layer is where the layer is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, Protocol

import torch
from torch.func import functional_call
from torch.nn import functional as F

from deployments.engines.llm.models.llama import Rotary, RotaryAngles
from deployments.engines.llm.models.registry import LoadedModel
from deployments.engines.llm.native_decoder import NativeDecoder, TokenSpan
from deployments.engines.llm.sequences.kv_cache import KVCache
from deployments.engines.llm.sequences.paged_attention import LayerAttention, StepAttention
from weights.memory.block_plan import Rates, choose_way
from weights.memory.block_stream import BlockStream
from weights.memory.layer_plan import layer_of
from weights.memory.rates import measured_rates

HOST: Final = torch.device("cpu")

logger = logging.getLogger(__name__)


class SplitPlanner(Protocol):
    """Plans the attention of a step for the layers of one window on one device."""

    def __call__(self, window: int, device: torch.device) -> StepAttention: ...


@dataclass(frozen=True, slots=True)
class SplitStep:
    """The `token_ids` (T,) of a step and their `positions` on the host, `num_rows` of them real, the others padding.

    With `spans` the host's kernels may compute them; `check` may end the step before any layer. Adapted layers
    stay where they are.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    num_rows: int
    planner: SplitPlanner
    check: Callable[[], None]
    spans: Sequence[TokenSpan] | None = None
    is_adapted: bool = False


@dataclass(frozen=True, slots=True)
class _Part:
    """Consecutive layers on one device, with the host's kernels for them if there are any."""

    device: torch.device
    layers: range
    kernels: NativeDecoder | None


class SplitLayers:
    """The layers of one model in the order in which they compute."""

    def __init__(self, model: LoadedModel, cache: KVCache) -> None:
        self._model = model
        self._rates: Rates | None = None
        logger.info("layers by device: %s", ", ".join(f"{place}: {part}" for place, part in _runs(model)))
        self._stream: BlockStream | None = None
        self._blocks: dict[int, int] = {}  # of the stream, by layer
        self._parts = [_Part(device, part, _kernels(model, cache, device, part)) for device, part in _runs(model)]
        rotary = model.rotary
        self._rotaries = {
            device: Rotary(
                rotary.inverse_frequencies.to(device), rotary.magnitude, is_interleaved=rotary.is_interleaved
            )
            for device in {model.device, *model.layer_devices}
        }

    def stream_layers(self, stream: BlockStream) -> None:
        """Stream layers of the host to the device through `stream` where that is faster."""
        numbers = [layer_of(next(iter(block.offsets))) for block in stream.plan.blocks]
        self._rates = measured_rates(self._model.device)
        self._stream, self._blocks = stream, {layer: at for at, layer in enumerate(numbers) if layer is not None}

    @property
    def has_kernels(self) -> bool:
        """Return whether the host's kernels compute some of the layers."""
        return any(part.kernels is not None for part in self._parts)

    def hidden_states(self, step: SplitStep) -> torch.Tensor:
        """Return the hidden states (T, C) of a step's tokens after the last norm, on the device of the head."""
        decoder: Any = self._model.module.model
        embedding = decoder.embed_tokens
        attends: dict[torch.device, Callable[..., Any]] = {}
        first = self._parts[0].kernels
        if step.spans is not None and first is not None and _place_of(embedding) == HOST:
            x_TC = first.embedded(step.token_ids[: step.num_rows].tolist())
        else:
            x_TC = embedding(step.token_ids[: step.num_rows].to(_place_of(embedding)))
        for part in self._parts:
            if self._is_streamed(part, step):
                x_TC = self._run_streamed(part, x_TC, step)
                continue
            if part.kernels is not None and step.spans is not None:
                x_TC = part.kernels.run_part(_for_kernels(x_TC[: step.num_rows]), step.spans, step.check)
                continue
            x_TC = self._padded(x_TC[: step.num_rows].to(self._model.dtype).to(part.device), step)
            if part.device not in attends:
                attends[part.device] = self._attention(part.device, step)
            for layer in part.layers:
                x_TC = attends[part.device](decoder.layers[layer], x_TC)
        return decoder.norm(self._padded(x_TC[: step.num_rows].to(self._model.dtype).to(self._model.device), step))

    def _is_streamed(self, part: _Part, step: SplitStep) -> bool:
        """Return whether the layers of a part go to the device for this step, rather than its rows to the host."""
        if self._stream is None or self._rates is None or step.is_adapted or part.layers.start not in self._blocks:
            return False
        block = self._stream.plan.blocks[self._blocks[part.layers.start]]
        num_weights = block.nbytes // self._model.dtype.itemsize
        return choose_way(block.nbytes, num_weights, step.num_rows, self._rates) == "stream"

    def _run_streamed(self, part: _Part, x_TC: torch.Tensor, step: SplitStep) -> torch.Tensor:
        """Run layers of the host on the device: their weights come there, and attention stays with their KV cache."""
        device, decoder = self._model.device, self._model.module.model
        assert self._stream is not None
        layers: Any = decoder.layers
        angles, host = self._angles(device, step), self._attend(HOST, step)

        def attend(layer: int, *qkv: torch.Tensor) -> torch.Tensor:
            return host(layer, *(one.to(HOST) for one in qkv)).to(device)

        x_TC = self._padded(x_TC[: step.num_rows].to(self._model.dtype).to(device), step)
        for number in part.layers:
            tensors = self._stream.tensors_of(self._blocks[number])
            own = {name.partition(f"layers.{number}.")[2]: tensor for name, tensor in tensors.items()}
            x_TC = functional_call(layers[number], own, (x_TC, angles, attend))
        return x_TC

    def _attention(self, device: torch.device, step: SplitStep) -> Callable[..., Any]:
        attend, angles = self._attend(device, step), self._angles(device, step)
        return lambda layer, x_TC: layer(x_TC, angles, attend)

    def _attend(self, device: torch.device, step: SplitStep) -> LayerAttention:
        spec = self._model.spec
        windows = spec.windows or (0,) * spec.num_layers
        plans = {window: step.planner(window, device) for window in set(windows)}
        return LayerAttention(tuple(plans[window] for window in windows), step.check)

    def _angles(self, device: torch.device, step: SplitStep) -> RotaryAngles:
        return self._rotaries[device].angles(step.positions.to(device), self._model.dtype)

    def _padded(self, x_NC: torch.Tensor, step: SplitStep) -> torch.Tensor:
        """Return the rows with the step's padding of zeros, which crosses no border."""
        missing = len(step.token_ids) - len(x_NC)
        return F.pad(x_NC, (0, 0, 0, missing)) if missing else x_NC


def _runs(model: LoadedModel) -> list[tuple[torch.device, range]]:
    """Return the devices in the order of the layers, each with its consecutive layers."""
    found, start = [], 0
    for device, layers in groupby(model.layer_devices):
        stop = start + len(list(layers))
        found.append((device, range(start, stop)))
        start = stop
    return found


def _kernels(model: LoadedModel, cache: KVCache, device: torch.device, part: range) -> NativeDecoder | None:
    return NativeDecoder.create_part(model, cache, part) if device == HOST else None


def _place_of(embedding: Any) -> torch.device:
    found: torch.device = (embedding.packed.data if hasattr(embedding, "packed") else embedding.weight).device
    return found


def _for_kernels(x_NC: torch.Tensor) -> torch.Tensor:
    """Return rows in the form for the kernels, which overwrite them."""
    return x_NC.to(HOST).float().contiguous()
