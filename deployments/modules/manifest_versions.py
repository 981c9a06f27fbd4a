"""The manifests that a replica has seen, by model and version: a request gets the version that it was sent for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final

from weights.manifest import Manifest

MAX_MANIFESTS: Final = 256  # of 1,000 tensors each has about 2 MB
FetchManifest = Callable[[str, str | None], Awaitable[Manifest]]


class ManifestVersions:
    """Lives on one event loop. `fetch` is given a model and the version wanted, None for the one that is served; it may
    answer with another version when that one is no longer known."""

    def __init__(self, fetch: FetchManifest, max_manifests: int = MAX_MANIFESTS) -> None:
        self._fetch = fetch
        self._max_manifests = max_manifests
        self._known: OrderedDict[tuple[str, str], Manifest] = OrderedDict()
        self._latest: dict[str, str] = {}

    async def get(self, model: str, version: str | None = None) -> Manifest:
        """Of `version` (a fingerprint), None for any that is known. Raises what `fetch` raises."""
        key = (model, version if version is not None else self._latest.get(model, ""))
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        return self._remember(model, await self._fetch(model, version))

    async def newest(self, model: str) -> Manifest:
        """Of the version that is served now."""
        return self._remember(model, await self._fetch(model, None))

    def _remember(self, model: str, manifest: Manifest) -> Manifest:
        self._latest[model] = manifest.fingerprint
        self._known[model, manifest.fingerprint] = manifest
        self._known.move_to_end((model, manifest.fingerprint))
        while len(self._known) > self._max_manifests:
            (gone, version), _ = self._known.popitem(last=False)
            if self._latest.get(gone) == version:
                del self._latest[gone]
        return manifest
