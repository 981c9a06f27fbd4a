"""The manifests of a replica: a version keeps its name when its bytes move."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from unit.deployments.modules.test_module_cache import manifest

from deployments.modules import manifest_versions
from deployments.modules.manifest_versions import ManifestVersions
from weights.records.manifest import Manifest


class Store:
    """A store that counts what is fetched; `offset` is where its extents are."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "a" / "manifest.json"
        self.file.parent.mkdir()
        self.file.write_text("{}")
        self.asked: list[tuple[str, str | None]] = []
        self.offset, self.fingerprint = 0, "v1"

    async def fetch(self, model: str, version: str | None) -> Manifest:
        self.asked.append((model, version))
        found = manifest(model)
        extents = {id_: extent.model_copy(update={"offset": self.offset}) for id_, extent in found.extents.items()}
        return found.model_copy(update={"extents": extents, "fingerprint": self.fingerprint})

    def move(self, offset: int) -> None:
        self.offset = offset
        self.file.write_text("{}" + " " * offset)
        os.utime(self.file, ns=(offset, offset))


async def test_a_manifest_is_fetched_once_as_long_as_its_file_stays(tmp_path: Path) -> None:
    store = Store(tmp_path)
    versions = ManifestVersions(store.fetch, tmp_path)
    first = await versions.find_version("a", "v1")
    assert await versions.locate(first) is first
    assert await versions.find_version("a") is first
    assert store.asked == [("a", "v1")]


async def test_bytes_that_were_moved_are_found_where_they_are_now(tmp_path: Path) -> None:
    store = Store(tmp_path)
    versions = ManifestVersions(store.fetch, tmp_path)
    first = await versions.find_version("a")
    assert not versions.has_moved(first)
    store.move(4096)
    assert versions.has_moved(first)
    located = await versions.locate(first)
    assert {extent.offset for extent in located.extents.values()} == {4096}
    assert not versions.has_moved(located)
    assert await versions.find_version("a", "v1") is located
    assert await versions.locate(first) is located
    assert len(store.asked) == 2


async def test_a_version_that_was_replaced_keeps_its_places(tmp_path: Path) -> None:
    store = Store(tmp_path)
    versions = ManifestVersions(store.fetch, tmp_path)
    first = await versions.find_version("a", "v1")
    store.fingerprint = "v2"
    store.move(4096)
    assert await versions.locate(first) is first


async def test_the_versions_that_were_used_longest_ago_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_versions, "MAX_MANIFESTS", 2)
    store = Store(tmp_path)
    versions = ManifestVersions(store.fetch, tmp_path)
    for fingerprint in ("v1", "v2"):
        store.fingerprint = fingerprint
        await versions.find_version("a", fingerprint)
    await versions.find_version("a", "v1")  # used again
    store.fingerprint = "v3"
    await versions.newest("a")
    assert set(versions._known) == {("a", "v1"), ("a", "v3")}
    assert versions._latest == {"a": "v3"}
    store.asked.clear()
    await versions.find_version("a")
    assert store.asked == []
    for fingerprint in ("v4", "v5"):
        store.fingerprint = fingerprint
        await versions.find_version("b", fingerprint)
    assert versions._latest == {"b": "v5"}
    assert (await versions.find_version("a")).fingerprint == "v5"  # asked for anew
    assert store.asked[-1] == ("a", None)
