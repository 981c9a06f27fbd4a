"""LoRAs of text encoders: their share in one encoder, and the identity that encodings made with them have."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass

from deployments.engines.diffusion.families.base import Family
from deployments.engines.diffusion.fitted_loras import FittedLoras
from deployments.engines.nn.lora import FittedPairs
from deployments.engines.text.encoder import TextEncoder
from weights.adapters import LoraAdapter


@dataclass(frozen=True, slots=True, eq=False)
class EncoderLora:
    """A LoRA's pairs for one encoder, its strength, and `key`, which tells it from all others."""

    key: str
    pairs: FittedPairs
    scale: float

    @property
    def identity(self) -> str:
        """Return what changes an encoding: the weights and their strength."""
        return f"{self.key} * {self.scale!r}"


class EncoderLoras:
    """The LoRAs of a replica, each fitted once to each encoder that it changes."""

    def __init__(self) -> None:
        self._fitted: weakref.WeakKeyDictionary[TextEncoder, dict[tuple[str, str], FittedLoras]]
        self._fitted = weakref.WeakKeyDictionary()

    def loras_of(
        self,
        family: Family,
        component: str,
        encoder: TextEncoder,
        adapters: Mapping[str, LoraAdapter],
        keys: Mapping[str, str],
        scales: Mapping[str, float],
    ) -> tuple[EncoderLora, ...]:
        """Return the LoRAs that change this encoder, in one order for the same ones; `keys` and `scales` are by name.

        Raises EngineError for one that does not fit.
        """
        by_use = self._fitted.setdefault(encoder, {})
        fitted = by_use.setdefault((family.class_name, component), FittedLoras(family, component, encoder.module))
        found = [(name, fitted.pairs_of(adapter)) for name, adapter in adapters.items()]
        if component not in family.lora_encoders:
            return ()
        acting = [EncoderLora(keys[name], pairs, scales[name]) for name, pairs in found if pairs and scales[name]]
        return tuple(sorted(acting, key=lambda lora: lora.identity))
