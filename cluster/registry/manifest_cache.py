"""Parsed manifests, the latest used few of them: a store may have ten thousand, and a large one takes 30 MB."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from weights.manifest import Manifest

MAX_MANIFESTS: Final = 64


class ManifestCache:
    """By model and fingerprint. `read` parses the manifest that the store has now; it runs in a thread, once for all
    who wait for it. Lives on one event loop.
    """

    def __init__(self, read: Callable[[str], Manifest], max_manifests: int = MAX_MANIFESTS) -> None:
        self._read = read
        self._max_manifests = max_manifests
        self._known: OrderedDict[tuple[str, str], asyncio.Future[Manifest]] = OrderedDict()

    def has(self, model: str, fingerprint: str) -> bool:
        return (model, fingerprint) in self._known

    async def get(self, model: str, fingerprint: str) -> Manifest:
        """Raises what `read` raises; the next call tries again."""
        key = (model, fingerprint)
        future = self._known.get(key) or asyncio.ensure_future(asyncio.to_thread(self._read, model))
        self._remember(key, future)
        try:
            manifest = await asyncio.shield(future)
        except Exception:
            self._forget(key, future)
            raise
        if manifest.fingerprint != fingerprint:  # replaced in the store between the directory's word and the reading
            self._forget(key, future)
        return manifest

    def _remember(self, key: tuple[str, str], future: asyncio.Future[Manifest]) -> None:
        self._known[key] = future
        self._known.move_to_end(key)
        while len(self._known) > self._max_manifests:
            self._known.popitem(last=False)

    def _forget(self, key: tuple[str, str], future: asyncio.Future[Manifest]) -> None:
        if self._known.get(key) is future:
            del self._known[key]
