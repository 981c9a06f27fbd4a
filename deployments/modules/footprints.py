"""Footprints of a replica's image models: learned once per structure and size, beside the requests."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from deployments.engines.diffusion.families import FAMILIES
from deployments.engines.diffusion.rows import BatchBounds
from deployments.engines.graph.footprint import Footprint
from weights.manifest import Manifest

if TYPE_CHECKING:
    from deployments.engines.diffusion.footprints import PipelineTwin

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
    seen: set[tuple[int, int, int]] = field(default_factory=set)
    least_bytes: int = 0


class FootprintBook:
    """The footprints of pipelines on one device, by the kinds of `rows.memory_kind` and `decode_kind`. Thread-safe."""

    def __init__(self, device: torch.device, bounds: BatchBounds) -> None:
        self._device = device
        self._bounds = bounds
        self._lock = threading.Lock()
        self._known: OrderedDict[Hashable, _Known] = OrderedDict()

    def of(self, manifest: Manifest) -> dict[Hashable, Footprint]:
        """Return what is known of a pipeline's structure. What is learned later comes into it."""
        return self._entry(manifest).footprints

    def knows(self, manifest: Manifest, height: int, width: int, text_length: int) -> bool:
        """Return whether `learn` would have nothing to do."""
        known = self._entry(manifest)
        return known.is_hopeless or (height, width, text_length) in known.seen

    def least_bytes(self, manifest: Manifest) -> int:
        """Return what one image of the pipeline's own size takes, once `learn_defaults` has learned it."""
        return self._entry(manifest).least_bytes

    def learn_defaults(self, manifest: Manifest, folder: Path) -> None:
        """Learn what images of the pipeline's own size take, of prompts as long as its encoders read."""
        known = self._entry(manifest)
        if known.least_bytes or (family := FAMILIES.get(manifest.class_name or "")) is None:
            return
        uses = family.text_encoders(None, "truncate")
        side, tokens = family.defaults.side, max((use.max_length or CLIP_TOKENS for use in uses), default=CLIP_TOKENS)
        self.learn(manifest, folder, side, side, tokens)
        known.least_bytes = max((one.bytes_of(1) for one in known.footprints.values()), default=0)

    def learn(self, manifest: Manifest, folder: Path, height: int, width: int, text_length: int) -> None:
        """Record forwards for images of that size and prompts of so many tokens. Takes up to seconds.

        What cannot be recorded (packed weights have kernels of their own) keeps to the bounds of the config, and the
        log says so once.
        """
        from deployments.engines.diffusion.footprints import make_twin  # who never learns needs nothing of it

        known = self._entry(manifest)
        with self._lock:
            if self.knows(manifest, height, width, text_length) or len(known.seen) >= MAX_SIZES:
                return
            try:
                if known.twin is None:
                    known.twin = make_twin(manifest, folder, self._device)
                known.footprints |= known.twin.footprints(height, width, text_length, self._bounds)
            except Exception as error:  # of any operation of a model that fake tensors have no rule for
                known.is_hopeless = True
                logger.info("the memory of %r is not planned: %s", manifest.model, error)
            known.seen.add((height, width, text_length))

    def _entry(self, manifest: Manifest) -> _Known:
        key = tuple(sorted((name, part.structure_key) for name, part in manifest.components.items()))
        found = self._known.setdefault((manifest.class_name, key), _Known())
        while len(self._known) > MAX_STRUCTURES:
            self._known.popitem(last=False)
        return found
