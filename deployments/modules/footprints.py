"""Footprints of a replica's models: learned once per structure and size, beside the requests."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import torch

from deployments.engines.diffusion.families import FAMILIES
from deployments.engines.diffusion.rows import DEFAULT_BOUNDS, BatchBounds
from deployments.engines.graph.footprint import Footprint
from deployments.engines.graph.workspace import UNBOUNDED, Workspace
from deployments.modules.stock_parts import is_stock_part
from weights.manifest import Component, Manifest
from weights.memory.device_arena import DeviceArena

if TYPE_CHECKING:
    from deployments.engines.diffusion.footprints import AdapterShapes, PipelineTwin
    from deployments.engines.text.footprints import TextFootprints

CLIP_TOKENS: Final = 77
MAX_STRUCTURES: Final = 8
MAX_SIZES: Final = 256  # of one structure

logger = logging.getLogger("atelier.replica")


@dataclass(slots=True, eq=False)
class _Known:
    """The footprints of one structure. `twin` is None until it is built, and where that failed."""

    footprints: dict[Hashable, Footprint] = field(default_factory=dict)
    twin: PipelineTwin | None = None
    is_hopeless: bool = False
    seen: set[tuple[int | str, ...]] = field(default_factory=set)  # height, width, tokens, and names of LoRAs
    least_bytes: int = 0


class FootprintBook:
    """The footprints of forwards on one device, by structure and kind. Thread-safe.

    The kinds of pipelines are those of `rows.workspace_kind` and `decode_kind`, those of text encoders `text_kind`.
    `memory` has the books in which the device's forwards take room, None where nobody counts it.
    """

    def __init__(self, device: str, bounds: BatchBounds = DEFAULT_BOUNDS) -> None:
        self.memory: DeviceArena | None = None
        self.steps: dict[str, int] = {}  # by structure, what the largest step of a language model takes
        self._device = device  # by name: `sim` is no device of torch's before it is opened
        self._bounds = bounds
        self._lock = threading.Lock()
        self._known: OrderedDict[Hashable, _Known] = OrderedDict()
        self._texts: OrderedDict[str, TextFootprints] = OrderedDict()

    def inside(self, nbytes: int) -> int:
        """Return how many of a forward's bytes are of the budget: those that find no room beside it."""
        return 0 if self.memory is None else max(0, int(nbytes - self.memory.beside_bytes))

    def of(self, manifest: Manifest) -> dict[Hashable, Footprint]:
        """Return what is known of a pipeline's structure. What is learned later comes into it."""
        return self._entry(manifest).footprints

    def of_text(self, component: Component, folder: Path) -> Workspace:
        """Return the room of the forwards of a text encoder, whose skeleton is in `folder`."""
        if self.memory is None:
            return UNBOUNDED
        return Workspace(self.memory, self._text(component, folder))

    def _text(self, component: Component, folder: Path) -> TextFootprints:
        from deployments.engines.text.footprints import TextFootprints, make_text_twin

        with self._lock:
            new = TextFootprints(partial(make_text_twin, component, folder, torch.device(self._device)))
            found = self._texts.setdefault(structure_of(component), new)
            while len(self._texts) > MAX_STRUCTURES:
                self._texts.popitem(last=False)
            return found

    def knows(
        self, manifest: Manifest, height: int, width: int, text_length: int, adapters: Iterable[str] = ()
    ) -> bool:
        """Return whether `learn` would have nothing to do."""
        known = self._entry(manifest)
        return known.is_hopeless or (height, width, text_length, *sorted(adapters)) in known.seen

    def least_bytes(self, manifest: Manifest, component: Component) -> int:
        """Return what a forward of a component takes, once `learn_defaults` has learned it: 0 before.

        It is that of one image of the pipeline's own size, of one text as long as an encoder reads, or of the largest
        step of a language model.
        """
        if component.library == "diffusers":
            return self._entry(manifest).least_bytes
        if manifest.kind == "llm":
            return self.steps.get(structure_of(component), 0)
        found = self._texts.get(structure_of(component)) if _is_encoder(manifest, component) else None
        return found.least_bytes if found else 0

    def learn_defaults(self, manifest: Manifest, component: Component, folder: Path) -> None:
        """Learn what `least_bytes` tells of a component of a model, whose skeleton is in `folder`."""
        if component.library == "diffusers":
            self._learn_images(manifest, folder)
        elif _is_encoder(manifest, component):
            self._text(component, folder / component.folder).learn_default()

    def _learn_images(self, manifest: Manifest, folder: Path) -> None:
        known = self._entry(manifest)
        if known.least_bytes or (family := FAMILIES.get(manifest.class_name or "")) is None:
            return
        uses = family.text_encoders(None, "truncate")
        side, tokens = family.defaults.side, max((use.max_length or CLIP_TOKENS for use in uses), default=CLIP_TOKENS)
        self.learn(manifest, folder, side, side, tokens)
        known.least_bytes = max((one.bytes_of(1) for one in known.footprints.values()), default=0)

    def learn(
        self,
        manifest: Manifest,
        folder: Path,
        height: int,
        width: int,
        text_length: int,
        adapters: AdapterShapes = MappingProxyType({}),
    ) -> None:
        """Record forwards for images of that size, prompts of so many tokens, and these LoRAs. Takes up to seconds.

        What cannot be recorded (packed weights have kernels of their own) keeps to the bounds of the config, and the
        log says so once.
        """
        from deployments.engines.diffusion.footprints import make_twin  # who never learns needs nothing of it

        known = self._entry(manifest)
        with self._lock:
            if self.knows(manifest, height, width, text_length, adapters) or len(known.seen) >= MAX_SIZES:
                return
            try:
                if known.twin is None:
                    known.twin = make_twin(manifest, folder, torch.device(self._device))
                known.footprints |= known.twin.footprints(height, width, text_length, self._bounds, adapters)
            except Exception as error:  # of any operation of a model that fake tensors have no rule for
                known.is_hopeless = not adapters  # else it may be the adapters'
                logger.info("the memory of %r is not planned: %s", manifest.model, error)
            known.seen.add((height, width, text_length, *sorted(adapters)))

    def _entry(self, manifest: Manifest) -> _Known:
        key = tuple(sorted((name, part.structure_key) for name, part in manifest.components.items()))
        found = self._known.setdefault((manifest.class_name, key), _Known())
        while len(self._known) > MAX_STRUCTURES:
            self._known.popitem(last=False)
        return found


def _is_encoder(manifest: Manifest, component: Component) -> bool:
    is_text = manifest.kind in ("diffusion", "embedding", "reranker", "classifier")
    return is_text and component.library == "transformers" and not is_stock_part(component)


def structure_of(component: Component) -> str:
    """Return the key of a component's structure."""
    return component.structure_key or component.module_key
