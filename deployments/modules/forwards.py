"""The device memory of forwards of a replica's models, planned before they run."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from deployments.engines.graph.workspace import UNBOUNDED, Workspace
from deployments.engines.records.protocol import StockRequest
from deployments.modules.builder import Builder
from deployments.modules.device_tier import ArenaTier, DeviceTier
from deployments.modules.footprints import FootprintBook
from deployments.modules.parts import PartsPlanner, Wants
from weights.memory.forward_memory import ForwardMemory
from weights.records.manifest import Manifest
from weights.residency.sizes import shown_bytes

logger = logging.getLogger("atelier.replica")


class Forwards:
    """The footprints of forwards, where their memory is counted: not on the host.

    `memory` has the books in which forwards take room, `footprints` what they take; None where nobody counts it.
    """

    def __init__(self, planner: PartsPlanner, builder: Builder, tier: DeviceTier) -> None:
        self._planner = planner
        self.memory: ForwardMemory | None = tier.forward_memory if isinstance(tier, ArenaTier) else None
        self.footprints: FootprintBook | None = None if self.memory is None else builder.footprints
        if builder.footprints is not None:
            builder.footprints.memory = self.memory

    def workspace(self, manifest: Manifest) -> Workspace:
        """Return the bound on what forwards of a pipeline take; `UNBOUNDED` where nobody counts it."""
        book = self.footprints
        return UNBOUNDED if book is None else Workspace(book.memory, book.of(manifest))

    def learn_defaults(self, manifest: Manifest, wanted: Wants) -> None:
        """Learn what a forward of each component takes, and say what the model needs of the device. Blocks."""
        if (book := self.footprints) is None:
            return
        components = [component for component in manifest.components.values() if wanted(component)]
        for component in components:
            book.learn_defaults(manifest, component, self._planner.skeleton(manifest))
        least_bytes = max((book.least_bytes(manifest, component) for component in components), default=0)
        if not least_bytes:
            return
        parts = self._planner.plan(manifest, wanted).values()
        logger.info(
            "model %r: static=%s, weights=%s, workspace=%s",
            manifest.model,
            shown_bytes(sum(part.working_bytes for part in parts)),
            shown_bytes(sum(part.component.nbytes for part in parts)),
            shown_bytes(least_bytes),
        )

    def learn_adapted(self, manifest: Manifest, adapters: Mapping[str, Manifest]) -> None:
        """Learn what a forward with these adapters takes, so that a lease has room for it. Blocks."""
        if (book := self.footprints) is not None:
            folders = {name: (adapter, self._planner.skeleton(adapter)) for name, adapter in adapters.items()}
            book.learn_adapted(manifest, self._planner.skeleton(manifest), folders)

    def plan_call(self, manifest: Manifest, wanted: Wants, request: StockRequest) -> Mapping[str, int]:
        """Return `StockRequest.forward_bytes` for a request: none where nobody counts or can tell them. Blocks."""
        if (book := self.footprints) is None:
            return {}
        return book.plan_call(manifest, wanted, self._planner.skeleton(manifest), request)
