"""The models that a replica never evicts."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

from deployments.modules.device_tier import ArenaTier, DeviceTier
from deployments.modules.manifest_versions import ManifestVersions
from deployments.modules.parts import Part, PartsPlanner, Wants
from deployments.modules.resident_modules import ResidentModules
from weights.records.errors import BudgetExceeded
from weights.records.manifest import Manifest

logger = logging.getLogger("atelier.replica")


@dataclass(frozen=True, slots=True)
class _Pin:
    """The pinned parts of a model, and their version."""

    version: str
    wanted: Wants
    parts: tuple[Part, ...]


class Pins:
    """The pins of models, each in the version that is served now. Lives on one event loop."""

    def __init__(
        self, modules: ResidentModules, planner: PartsPlanner, manifests: ManifestVersions, tier: DeviceTier
    ) -> None:
        self._modules = modules
        self._planner = planner
        self._manifests = manifests
        self._device = tier if isinstance(tier, ArenaTier) else None
        self._pins: dict[str, _Pin] = {}  # by model

    @property
    def models(self) -> list[str]:
        """Return the models that are pinned, sorted."""
        return sorted(self._pins)

    def pin(self, manifest: Manifest, wanted: Wants) -> None:
        """Pin that version, and no other of its model. Raises BudgetExceeded when it does not fit; nothing changes."""
        model = manifest.model
        pin = _Pin(manifest.fingerprint, wanted, tuple(self._planner.plan(manifest, wanted).values()))
        try:
            self._modules.pin_only(_parts_of({**self._pins, model: pin}.values()))
        except BudgetExceeded as error:
            now = ", ".join(self._pins) or "nothing"
            raise BudgetExceeded(f"{model!r} cannot be pinned: {error} (now: {now})") from None
        before = self._pins.get(model)
        self._pins[model] = pin
        self._pins_changed(before)

    def unpin(self, model: str) -> None:
        """Let a model be evicted again, but for what another one pins."""
        before = self._pins.pop(model, None)
        self._modules.pin_only(_parts_of(self._pins.values()))
        self._pins_changed(before)

    def is_outdated(self, manifest: Manifest) -> bool:
        """Return whether another version of its model is pinned."""
        pin = self._pins.get(manifest.model)
        return pin is not None and pin.version != manifest.fingerprint

    async def renew(self, model: str) -> None:
        """Pin the version that is served now, if the model is pinned in another one."""
        try:
            manifest = await self._manifests.newest(model)
            if self.is_outdated(manifest):
                self.pin(manifest, self._pins[model].wanted)
        except BudgetExceeded as error:
            self.unpin(model)
            logger.warning("%r is pinned no longer: %s", model, error)
        except Exception as error:  # of the registry: the next request asks again
            logger.info("which version of %r is to be pinned is not known: %s", model, error)

    def _pins_changed(self, before: _Pin | None) -> None:
        """Pin on the device what is pinned, and let go on whoever waits for what is not any more."""
        if self._device is not None:
            for part in before.parts if before else ():
                self._device.unpin(part.component)
            for part in _parts_of(self._pins.values()):
                self._device.pin(part.component)
        self._modules.serve()


def _parts_of(pins: Collection[_Pin]) -> list[Part]:
    return [part for pin in pins for part in pin.parts]
