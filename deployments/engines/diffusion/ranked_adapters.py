"""The LoRAs of a denoiser on several ranks: rank 0 says one whole with the first forward that has it, and the others
keep it for as long as rank 0 has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from deployments.engines.nn.feature_maps import Gains, MappedPair, Mixed, Turns
from deployments.engines.nn.lora import FittedPairs
from deployments.engines.ranks.following import RankChannel
from deployments.engines.ranks.group import Plan
from deployments.engines.ranks.packing import packed, unpacked
from weights.operations.adapters import LoraPair

Use = tuple[FittedPairs, float]  # with its strength
Said = list[list[Any]]  # uses by number
_KINDS: Final[Mapping[str, Any]] = {kind.__name__: kind for kind in (LoraPair, MappedPair, Gains, Turns, Mixed)}


class AdapterWriter:
    """The LoRAs of rank 0's denoiser."""

    def __init__(self, ranks: RankChannel, denoiser: nn.Module) -> None:
        self._kept, self._denoiser = ranks.kept, denoiser
        self._paths: dict[nn.Module, str] = {}

    def plan(self, spans: Iterable[Sequence[Use]], tensors: list[torch.Tensor]) -> tuple[Plan, list[Said]]:
        """Return the part of a plan for adapters, and the uses of each span by number.

        The tensors of those that the other ranks do not have yet are put behind the others that go to them.
        """
        new, said = [], []
        for uses in spans:
            numbers = []
            for pairs, strength in uses:
                number, is_new = self._kept.number_of(pairs)
                numbers.append([number, strength])
                if is_new:
                    new.append(
                        [number, {self._path(layer): packed(pair, tensors, _KINDS) for layer, pair in pairs.items()}]
                    )
            said.append(numbers)
        return {"new": new, "gone": self._kept.gone()}, said

    def _path(self, layer: nn.Module) -> str:
        if not self._paths:
            self._paths = {module: path for path, module in self._denoiser.named_modules()}
        return self._paths[layer]


class AdapterReader:
    """The LoRAs of another rank's denoiser."""

    def __init__(self, denoiser: nn.Module) -> None:
        self._denoiser = denoiser
        self.kept: dict[int, FittedPairs] = {}  # by number

    def read(self, plan: Plan, tensors: Sequence[torch.Tensor]) -> None:
        """Keep the adapters that are new, of all tensors that came, and let go of those that rank 0 has no more."""
        for number in plan["gone"]:
            del self.kept[number]
        for number, said in plan["new"]:
            pairs = {self._denoiser.get_submodule(path): unpacked(pair, tensors, _KINDS) for path, pair in said.items()}
            self.kept[number] = FittedPairs(pairs)

    def uses(self, said: Said) -> list[Use]:
        """Return the adapters of a span."""
        return [(self.kept[number], strength) for number, strength in said]
