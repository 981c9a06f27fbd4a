"""The LoRAs of requests to a stock pipeline: side paths of the layers of its own denoisers and text encoders."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from deployments.engines.diffusion.adapted_parts import StockParts, is_divided, stage_of, stock_parts
from deployments.engines.diffusion.fitted_loras import FittedLoras, check_adapters
from deployments.engines.nn.lora import AdaptedSpan
from deployments.engines.records.protocol import AdapterUse, EngineError
from weights.operations.adapters import LoraAdapter


class AdaptedModules:
    """Fits LoRAs to the modules of a stock pipeline, once for each of both."""

    def __init__(self, class_name: str, modules: Mapping[str, nn.Module]) -> None:
        self._class_name = class_name
        self._modules = modules
        self._fitted: dict[tuple[str, bool], FittedLoras] = {}

    def spans_of(
        self, pipeline: Any, uses: Sequence[AdapterUse], known: Mapping[str, LoraAdapter]
    ) -> list[AdaptedSpan]:
        """Return the additions of a request's LoRAs to the modules of its pipeline.

        Raises EngineError for one that is not `known`, does not fit, or changes nothing.
        """
        loras, found = check_adapters(uses, known), []
        for use in uses:
            if loras[use.name].words:
                continue
            pairs = [(fitted.pairs_of(loras[use.name]), scale) for fitted, scale in self._of(pipeline, use, loras)]
            if not any(one for one, _ in pairs):
                raise EngineError(f"adapter {use.name!r} changes nothing of a {self._class_name}")
            found += [(one, scale) for one, scale in pairs if one]
        return [AdaptedSpan(found)] if found else []

    def _of(
        self, pipeline: Any, use: AdapterUse, loras: Mapping[str, LoraAdapter]
    ) -> Iterator[tuple[FittedLoras, float]]:
        """Yield the fit of a LoRA to each component that it may change, with its strength there."""
        divided = is_divided(loras[use.name].raw)
        parts = stock_parts(self._class_name, self._modules, is_divided=divided)
        stage = None if divided or len(parts) < 2 else stage_of(use.name)
        chosen = parts if stage is None else parts[stage : stage + 1]
        for one in chosen:
            yield self._fitted_to(pipeline, one, one.denoiser_name, is_divided=divided), use.scale
        for name in _text_encoders(chosen[0].lora_encoders) if chosen else ():
            scale = use.scale if use.text_scale is None else use.text_scale
            yield self._fitted_to(pipeline, chosen[0], name, is_divided=divided), scale

    def _fitted_to(self, pipeline: Any, parts: StockParts, component: str, *, is_divided: bool) -> FittedLoras:
        """Return the fit of LoRAs to a component as the pipeline has it: some classes make a module of their own."""
        module = getattr(pipeline, component, None)
        if isinstance(module, nn.Module) and module is not self._modules[component]:
            return FittedLoras(parts, component, module)
        key = component, is_divided
        if key not in self._fitted:
            self._fitted[key] = FittedLoras(parts, component, self._modules[component])
        return self._fitted[key]


def with_side_paths(planned: Mapping[str, int], components: Collection[str]) -> dict[str, int]:
    """Return `StockRequest.forward_bytes` of a request with LoRAs.

    A side path takes no more than what goes into its layer and comes out of it, which the call holds as well.
    """
    parts = stock_parts("", components)
    adapted = {name for one in parts for name in (one.denoiser_name, *_text_encoders(one.lora_encoders))}
    return {entry: nbytes * 2 if entry.partition(".")[0] in adapted else nbytes for entry, nbytes in planned.items()}


def _text_encoders(components: Collection[str]) -> list[str]:
    return [name for name in components if name.startswith("text_encoder")]
