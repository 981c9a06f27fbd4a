"""The registry as the controller follows it: the config, models, manual orders, and the extents that nodes hold."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Final

from cluster.placement.observing import CatalogEntry
from cluster.records.errors import OverrideRefused
from cluster.records.overrides import OverrideChange, Overrides, changed
from cluster.registry.actor import WeightRegistry
from cluster.registry.extent_locations import HeldComponents
from cluster.registry.snapshot import RegistrySnapshot
from configs.admission import ControllerConfig

REGISTRY_S: Final = 5.0


class FollowedRegistry:
    """The registry's last answers, which hold while it is away."""

    def __init__(self, snapshot: RegistrySnapshot) -> None:
        self.overrides: Overrides | None = None  # None until the registry has answered
        self._snapshot = snapshot
        self._changing = asyncio.Lock()
        self._catalog_revision: tuple[str, int] | None = None
        self._held = HeldComponents()

    async def controller_config(self) -> ControllerConfig:
        """Return the settings of placement. Raises TimeoutError, and Ray's errors."""
        await self._snapshot.ready()
        async with asyncio.timeout(REGISTRY_S):
            return await self._snapshot.call_registry(WeightRegistry.controller_config)

    async def learn_overrides(self) -> None:
        """Fetch the manual orders, unless they are known. Raises TimeoutError, and Ray's errors."""
        if self.overrides is None:
            async with asyncio.timeout(REGISTRY_S), self._changing:
                self.overrides = await self._snapshot.call_registry(WeightRegistry.overrides)

    async def held(self, wanted: Mapping[str, tuple[str, ...]]) -> Mapping[str, frozenset[str]]:
        """Return the wanted components that nodes hold whole. Raises TimeoutError, and Ray's errors."""
        async with asyncio.timeout(REGISTRY_S):
            query = self._held.query(wanted)
            self._held.apply_update(await self._snapshot.call_registry(WeightRegistry.follow_groups, *query))
        return self._held.nodes

    async def change(self, change: OverrideChange, workers: Collection[str], models: Collection[str]) -> Overrides:
        """Change the manual orders durably, and return all of them. Raises OverrideRefused."""
        async with self._changing:
            if self.overrides is None:
                raise OverrideRefused("worker: the registry is restarting; try again")
            overrides = changed(self.overrides, change, workers, models)
            try:
                await self._snapshot.call_registry(WeightRegistry.set_overrides, overrides)
            except BaseException:
                # The registry may have stored them, with only its answer lost: it is asked before the next decision.
                self.overrides = None
                raise
            self.overrides = overrides
        return overrides

    def new_catalog(self) -> Mapping[str, CatalogEntry] | None:
        """Return the models that can be placed; None when they are those of the last call."""
        if self._snapshot.revision == self._catalog_revision:
            return None
        self._catalog_revision = self._snapshot.revision
        return {
            record.id: CatalogEntry(record.kind, record.fingerprint, record.state == "unloaded")
            for record in self._snapshot
            if record.kind is not None and record.serves and record.state != "does_not_fit"
        }
