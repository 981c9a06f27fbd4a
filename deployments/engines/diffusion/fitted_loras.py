"""LoRAs fitted to one component of a pipeline: their modules named as it names them, in its dtype and place."""

from __future__ import annotations

import weakref

from torch import nn

from deployments.engines.diffusion.families.base import Family
from deployments.engines.nn.lora import FittedPairs, Pairs, fit_pairs
from deployments.engines.protocol import EngineError
from weights.adapters import LoraAdapter


class FittedLoras:
    """The pairs that LoRAs add to one component: the denoiser of a family, or one of its `lora_encoders`."""

    def __init__(self, family: Family, component: str, module: nn.Module) -> None:
        self._family = family
        self._component = component
        self._module = module
        self._pairs: weakref.WeakKeyDictionary[LoraAdapter, FittedPairs] = weakref.WeakKeyDictionary()

    def pairs_of(self, adapter: LoraAdapter) -> FittedPairs:
        """Return the adapter's pairs with the layers that they change, none if it leaves this component alone.

        The same object for the same adapter. Raises EngineError when it does not fit, or changes a component that none
        of the family may change.
        """
        pairs = self._pairs.get(adapter)
        if pairs is None:
            pairs = self._fit(adapter)
            self._pairs[adapter] = pairs
        return pairs

    def _fit(self, adapter: LoraAdapter) -> FittedPairs:
        family, of_text = self._family, self._component != self._family.denoiser_name
        if adapter.kohya:
            from deployments.engines.diffusion.kohya import rename_kohya  # it imports the loaders of diffusers

            config = None if of_text else self._module.config
            adapter = rename_kohya(adapter, family, of_text=of_text, denoiser_config=config)
        adaptable = (family.denoiser_name, *family.lora_encoders)
        if foreign := sorted(set(adapter.components) - set(adaptable)):
            raise EngineError(
                f"{adapter.path}: changes {', '.join(foreign)}; "
                f"of a {family.class_name}, {', '.join(adaptable)} can be adapted"
            )
        pairs = self._named(adapter.components.get(self._component, {}))
        try:
            return fit_pairs(self._module, pairs)
        except EngineError as error:
            raise EngineError(f"{adapter.path}: {error}") from None

    def _named(self, pairs: Pairs) -> Pairs:
        """Return the pairs by the paths of the module: transformers 5 has no `text_model` in a CLIPTextModel."""
        if self._component == self._family.denoiser_name or hasattr(self._module, "text_model"):
            return pairs
        return {path.removeprefix("text_model."): pair for path, pair in pairs.items()}
