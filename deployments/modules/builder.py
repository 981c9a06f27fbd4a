"""The builder that a replica's module cache has its components made by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weights.records.manifest import Component, ExtentRef

if TYPE_CHECKING:  # what looks at a config before a start plans parts, and loads no torch
    import torch

    from deployments.modules.footprints import FootprintBook


@dataclass(frozen=True, slots=True)
class BuildOrder:
    """A component to be built, where its weights are, and what it takes of a device beside them.

    `skeleton` is the folder of its model's files inside the store's, `class_name` the model's own. A denoiser has the
    `vae` beside it. The KV cache of a language model that ranks divide has `kv_cache_bytes` on each.
    """

    model: str
    version: str
    skeleton: str
    class_name: str
    component: Component
    extents: tuple[ExtentRef, ...]
    vae: Component | None = None
    working_bytes: int = 0
    workspace_bytes: int = 0
    kv_cache_bytes: int = 0


class Builder:
    """Builds components. What it says of them is true of a plain module; whoever builds others overrides it.

    `skeleton` is the folder with everything of a model but the weights. `footprints` are those of forwards; None where
    none are planned.
    """

    footprints: FootprintBook | None = None

    def __call__(self, component: Component, skeleton: Path, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Return the thing that runs. HAZARD: `tensors` may be views of shared memory."""
        raise NotImplementedError

    def build(self, order: BuildOrder, skeleton: Path, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Return the thing that runs. Whoever builds a part of it elsewhere has that built by the order, too."""
        return self(order.component, skeleton, tensors)

    def retire(self, thing: Any) -> None:
        """Take back what is needed no more, maybe in another thread than the one that it was built in."""

    def working_memory(self, component: Component, skeleton: Path) -> int:
        """Return the bytes of the device that the thing allocates itself and keeps: a KV cache."""
        return 0

    def own_part(self, component: Component, skeleton: Path) -> Component:
        """Return the component with the parts of its tensors that this process of a replica has: all by default."""
        return component

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
