"""The manifests that a replica has seen, by model and version: a request gets the version that it was sent for."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from weights.records.manifest import Manifest
from weights.storage.store import ManifestMark, manifest_mark

MAX_MANIFESTS: Final = 256  # of 1,000 tensors each has about 2 MB
FetchManifest = Callable[[str, str | None], Awaitable[Manifest]]


@dataclass(frozen=True, slots=True)
class _Known:
    """A manifest, and the mark of its file before it was fetched."""

    mark: ManifestMark | None
    manifest: Manifest


class ManifestVersions:
    """The manifests by model and version (fingerprint). Lives on one event loop.

    `fetch` is given a model and the version wanted, None for the one that is served; it may answer with another
    version when that one is no longer known. `models` is the store's folder of manifests: `atelier weights convert`
    and `repair` move a version's bytes and leave its fingerprint, which the file's mark tells.
    """

    def __init__(self, fetch: FetchManifest, models: Path) -> None:
        self._fetch = fetch
        self._models = models
        self._known: OrderedDict[tuple[str, str], _Known] = OrderedDict()
        self._latest: dict[str, str] = {}

    async def find_version(self, model: str, version: str | None = None) -> Manifest:
        """Return the manifest of `version` (a fingerprint), None for any that is known. Raises what `fetch` raises.

        Where its bytes are may be out of date: what is to be read is asked for by `locate`.
        """
        key = (model, version if version is not None else self._latest.get(model, ""))
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key].manifest
        return await self._fetch_anew(model, version)

    async def newest(self, model: str) -> Manifest:
        """Return the manifest of the version that is served now."""
        return await self._fetch_anew(model, None)

    def has_moved(self, manifest: Manifest) -> bool:
        """Return whether the bytes may be elsewhere by now: its file has changed. Blocks; from any thread."""
        known = self._known.get((manifest.model, manifest.fingerprint))
        return known is None or known.mark != manifest_mark(self._models, manifest.model)

    async def locate(self, manifest: Manifest) -> Manifest:
        """Return the manifest with the places that its bytes have now: fetched again if its file has changed."""
        known = self._known.get((manifest.model, manifest.fingerprint))
        mark = await asyncio.to_thread(manifest_mark, self._models, manifest.model)
        if known is not None and known.mark == mark:
            return known.manifest
        found = await self._fetch(manifest.model, manifest.fingerprint)
        if found.fingerprint != manifest.fingerprint:  # nobody knows that version any more
            return manifest
        return self._remember(manifest.model, found, mark, is_latest=False)

    async def _fetch_anew(self, model: str, version: str | None) -> Manifest:
        mark = manifest_mark(self._models, model)  # rarely, and beside what the answer takes it is nothing
        return self._remember(model, await self._fetch(model, version), mark)

    def _remember(
        self, model: str, manifest: Manifest, mark: ManifestMark | None, *, is_latest: bool = True
    ) -> Manifest:
        if is_latest:
            self._latest[model] = manifest.fingerprint
        self._known[model, manifest.fingerprint] = _Known(mark, manifest)
        self._known.move_to_end((model, manifest.fingerprint))
        while len(self._known) > MAX_MANIFESTS:
            (gone, version), _ = self._known.popitem(last=False)
            if self._latest.get(gone) == version:
                del self._latest[gone]
        return manifest
