"""The entries of a registry: those of its config, and registered ones, which override them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from cluster.records.errors import RegistrationRefused
from cluster.registry.directory import Entry
from cluster.registry.registrations import Registration, Registrations
from configs.workflow import WorkflowConfig

logger = logging.getLogger("atelier.registry")


class KnownEntries:
    """The configured entries by id, and the files of registered ones. Who changes either holds `writing`."""

    def __init__(self, configured: Mapping[str, Entry], registrations: Registrations) -> None:
        self.configured = configured
        self.writing = asyncio.Lock()
        self._registrations = registrations

    async def read(self) -> dict[str, Entry | WorkflowConfig | str]:
        """Return the entries to serve by id, or the reason why the registration of that id cannot be used.

        Registrations that the config has overruled since are removed.
        """
        found, damaged = await asyncio.to_thread(self._registrations.read_registrations)
        for id_, registration in list(found.items()):
            if registration.replaces != self.configured.get(id_):
                del found[id_]  # the config has changed since, and counts now
                try:
                    await self.forget(id_)
                except RegistrationRefused as error:  # it will be passed over again
                    logger.warning("%s", error)
        entries: dict[str, Entry | WorkflowConfig] = {
            **self.configured,
            **{id_: found[id_].entry for id_ in sorted(found)},
        }
        return {id_: damaged.get(id_) or entries[id_] for id_ in [*entries, *sorted(damaged.keys() - entries.keys())]}

    async def save(self, entry: Entry | WorkflowConfig) -> None:
        """Remember that the entry was registered; nothing for one of the config. Raises RegistrationRefused."""
        configured = self.configured.get(entry.id)
        if entry == configured:
            await self.forget(entry.id)
        else:
            await asyncio.to_thread(self._registrations.save, Registration(entry=entry, replaces=configured))

    async def forget(self, id_: str) -> None:
        """Forget that an entry of that id was registered. Raises RegistrationRefused."""
        await asyncio.to_thread(self._registrations.remove, id_)
