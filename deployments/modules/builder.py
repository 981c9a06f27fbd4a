"""The builder that a replica's module cache has its components made by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weights.records.manifest import Component

if TYPE_CHECKING:  # what looks at a config before a start plans parts, and loads no torch
    import torch

    from deployments.modules.footprints import FootprintBook


class Builder:
    """Builds components. What it says of them is true of a plain module; whoever builds others overrides it.

    `skeleton` is the folder with everything of a model but the weights. `footprints` are those of forwards; None where
    none are planned.
    """

    footprints: FootprintBook | None = None

    def __call__(self, component: Component, skeleton: Path, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Return the thing that runs. HAZARD: `tensors` may be views of shared memory."""
        raise NotImplementedError

    def retire(self, thing: Any) -> None:
        """Take back what is needed no more, maybe in another thread than the one that it was built in."""

    def working_memory(self, component: Component, skeleton: Path) -> int:
        """Return the bytes of the device that the thing allocates itself and keeps: a KV cache."""
        return 0

    def can_stream(self, component: Component) -> bool:
        """Return whether its blocks may come to the device one after the other, where it is larger than the budget."""
        return False

    def layer_caches(self, component: Component, skeleton: Path) -> Sequence[int] | None:
        """Return the bytes of the device that the thing takes beside its weights where 0, 1, ... of its layers are
        there; None for what cannot be split.
        """
        return None

    def streams_layers(self, component: Component) -> bool:
        """Return whether layers that are the host's may come to the device for steps of many tokens."""
        return False
