"""Manifests as the registry keeps them: a summary of each on disk, and the last used ones in memory.

A manifest of 1,000 tensors takes 50 ms to read and 30 MB to hold, and a store may have ten thousand models. A summary
is kept beside the store, <store>/summaries/<id>.json, and counts only for the very manifest file that it was made of.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, ValidationError

from configs.model import StrictModel
from weights.formats.language_models import language_model_facts
from weights.formats.pipeline_parts import pipeline_variant
from weights.formats.source import AdapterBase
from weights.formats.upscaler import read_upscaler
from weights.memory.needs import Needs
from weights.operations.feature_sizes import FeatureSizes, feature_sizes
from weights.platform.panics import panics_as_errors
from weights.platform.private_folder import remember
from weights.programs.signature import COMPONENT, ProgramSignature, signature_of
from weights.records.manifest import Manifest, ModelKind
from weights.residency.recent import Recent
from weights.storage.store import ManifestMark, WeightStore, manifest_mark

FOLDER: Final = "summaries"  # in the store
MAX_MANIFESTS: Final = 64


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """The facts of one version of a model. `extents` has the ids of all its extents; `class_name` is "" without one.

    `variant` is what `variant_of` tells. `widened` has the types of tensors that became float32 though the config
    asks for none (`weights/platform/processor.py`), and what `unpacked_types` says of quantized weights that are stored
    plain. `signature` is a program's. `needs` is the memory that it takes at once, empty where nobody has counted it.
    """

    kind: ModelKind
    nbytes: int
    fingerprint: str
    extents: tuple[str, ...]
    features: FeatureSizes
    class_name: str
    variant: Mapping[str, bool | int]
    widened: tuple[str, ...] = ()
    signature: ProgramSignature | None = None
    needs: Needs = field(default_factory=Needs)

    @property
    def facts(self) -> dict[str, Any]:
        """All but the extents, by the names that they have in a `ModelRecord` too."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "extents"}


def summarize(manifest: Manifest, skeleton: Path, widened: tuple[str, ...] = ()) -> ModelSummary:
    """Return the summary of a manifest, whose skeleton folder has the model's configs.

    Raises FormatError for a program that cannot be served.
    """
    return ModelSummary(
        manifest.kind,
        manifest.nbytes,
        manifest.fingerprint,
        tuple(manifest.extents),
        feature_sizes(manifest.kind, manifest.components.values(), skeleton),
        manifest.class_name or "",
        variant_of(manifest, skeleton),
        widened,
        signature_of(manifest.components[COMPONENT]) if manifest.kind == "program" else None,
    )


def variant_of(manifest: Manifest, skeleton: Path) -> Mapping[str, bool | int]:
    """Return the facts by which models of one class differ: those of `pipeline_variant` or `language_model_facts`, or
    the `scale` of an upscaler."""
    if manifest.kind == "llm":
        return language_model_facts(skeleton)
    if manifest.kind == "diffusion":
        return pipeline_variant(skeleton)
    if manifest.kind != "upscaler":
        return {}
    (component,) = manifest.components.values()
    shapes = {name: tensor.shape for name, tensor in component.tensors.items()}
    return {"scale": read_upscaler(Path(manifest.source), shapes).scale}


class _SummaryFile(StrictModel):
    """A summary and what it holds for: the checkpoint's mark (`weights/operations/source_mark.py`), the manifest file's
    mark, the bytes needed of each pack, the skeleton folder, and the versions of an adapter's bases that it was found
    to fit. Only of a model that can be served: version 1 was of any. Version 2 had no needs."""

    version: Literal[3]
    source_mark: str
    manifest: ManifestMark
    packs: dict[str, int]
    skeleton: str
    summary: ModelSummary
    bases: dict[str, str] = Field(default_factory=dict)


class SummaryFiles:
    """The summary files of one store, each after its sha256. They only save time: a wrong one counts as missing."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._folder = store.path / FOLDER

    def find(self, model: str, source_mark: str, bases: Sequence[AdapterBase] = ()) -> ModelSummary | None:
        """Return the summary if the store still has all of a checkpoint with that mark, which fits these bases.

        Reads one small file.
        """
        try:
            digest, _, content = self._file(model).read_bytes().partition(b"\n")
            if hashlib.sha256(content).hexdigest().encode() != digest:
                return None
            found = _SummaryFile.model_validate_json(content)
            is_current = (found.source_mark, found.manifest) == (source_mark, manifest_mark(self._store.models, model))
            is_current &= found.bases == _versions(bases)
            is_whole = (self._store.models / found.skeleton).is_dir() and all(
                (self._store.packs / pack).stat().st_size >= nbytes for pack, nbytes in found.packs.items()
            )
        except (OSError, ValidationError):
            return None
        return found.summary if is_current and is_whole else None

    def save(self, model: str, manifest: Manifest, summary: ModelSummary, bases: Sequence[AdapterBase] = ()) -> None:
        """Write the summary of the manifest that the store has now. A full disk is not an error."""
        mark = manifest_mark(self._store.models, model)
        if mark is None:
            return
        packs: dict[str, int] = {}
        for run in (run for extent in manifest.extents.values() for run in extent.runs()):
            packs[run.pack] = max(packs.get(run.pack, 0), run.offset + run.nbytes)
        file = _SummaryFile(
            version=3,
            source_mark=manifest.source_mark,
            manifest=mark,
            packs=packs,
            skeleton=manifest.skeleton,
            summary=summary,
            bases=_versions(bases),
        )
        content = file.model_dump_json().encode()
        remember(self._file(model), hashlib.sha256(content).hexdigest().encode() + b"\n" + content)

    def remove_summary(self, model: str) -> None:
        """Remove the model's summary, if there is one."""
        with contextlib.suppress(OSError):
            self._file(model).unlink()

    def _file(self, model: str) -> Path:
        return self._folder / f"{model}.json"


def _versions(bases: Sequence[AdapterBase]) -> dict[str, str]:
    return {base.model: base.fingerprint for base in bases}


@dataclass(frozen=True, slots=True)
class _Reading:
    """A manifest as it was read, or is being read, when its file had this mark."""

    mark: ManifestMark | None
    manifest: asyncio.Future[Manifest]


class ManifestCache:
    """The last used manifests, by model and version (fingerprint). Lives on one event loop.

    `atelier weights convert` and `repair` move a version's bytes and leave its fingerprint: when the manifest file has
    changed, it is read again. A version that the store no longer has is kept as it was.
    """

    def __init__(self, store: WeightStore, max_manifests: int = MAX_MANIFESTS) -> None:
        self._store = store
        self._readings: Recent[tuple[str, str], _Reading] = Recent(max_manifests)

    def has(self, model: str, fingerprint: str) -> bool:
        """Return whether that version is in the cache."""
        return (model, fingerprint) in self._readings

    async def get(self, model: str, fingerprint: str) -> Manifest:
        """Return the manifest, parsed in a thread, once for all waiting calls.

        It is another version's when the store has replaced the wanted one, and that was not in the cache. Raises what
        `WeightStore.manifest` raises; the next call tries again.
        """
        key = (model, fingerprint)
        mark = await asyncio.to_thread(manifest_mark, self._store.models, model)
        reading = self._readings.get(key)
        if reading is None or reading.mark != mark:
            reading = _Reading(mark, asyncio.ensure_future(self._read(model, fingerprint, reading)))
        self._readings.note(key, reading)
        try:
            manifest = await asyncio.shield(reading.manifest)
        except Exception:
            self._forget(key, reading)
            raise
        if manifest.fingerprint != fingerprint:  # replaced in the store after the caller looked at the directory
            self._forget(key, reading)
        return manifest

    async def _read(self, model: str, fingerprint: str, before: _Reading | None) -> Manifest:
        if before is None:
            with panics_as_errors():
                return await asyncio.to_thread(self._store.manifest, model)
        with contextlib.suppress(Exception), panics_as_errors():  # the cached manifest is still the version's
            manifest = await asyncio.to_thread(self._store.manifest, model)
            if manifest.fingerprint == fingerprint:
                return manifest
        return await before.manifest

    def _forget(self, key: tuple[str, str], reading: _Reading) -> None:
        if self._readings.get(key) is reading:
            del self._readings[key]
