"""The lease of a request on a model while it runs: its built components and adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deployments.modules.built_modules import PartName, Slot
from deployments.modules.resident_modules import ResidentModules
from deployments.records import SwitchReport
from weights.manifest import Manifest


class Lease:
    """The built components of a model and the adapters asked for, held until the `async with` ends."""

    def __init__(
        self,
        modules: ResidentModules,
        manifest: Manifest,
        skeleton: Path,
        slots: Mapping[PartName, Slot],
        report: SwitchReport,
    ) -> None:
        self.manifest = manifest
        self.skeleton = skeleton
        self.report = report
        self._resident = modules
        self._slots = {part.name: slot for part, slot in slots.items() if not part.is_adapter}
        self._adapters = {part.name: slot for part, slot in slots.items() if part.is_adapter}

    @property
    def modules(self) -> dict[str, Any]:
        return {name: slot.thing for name, slot in self._slots.items()}

    @property
    def adapters(self) -> dict[str, Any]:
        return {name: slot.thing for name, slot in self._adapters.items()}

    @property
    def adapter_keys(self) -> dict[str, str]:
        """Return the identities of the adapters by name, as `Component.module_key`."""
        return {name: slot.key for name, slot in self._adapters.items()}

    def bound(self, make: Callable[[], Any], settings: str = "") -> Any:
        """Return the pipeline over exactly these modules (not the adapters): made once, kept while all of them stay.

        `settings` is the identity of what `make` depends on beside them: models may share all modules and no solver.
        """
        return self._resident.bound(settings, tuple(slot.serial for slot in self._slots.values()), make)
