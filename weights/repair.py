"""Making damaged models whole: what is damaged on disk is written anew from wherever it is still right.

A repaired model is published like a new one: its sound extents stay where they are, the others are written from sound
copies of their tensors. An extent's id says what its bytes are, so whoever has it in memory goes on with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from weights.errors import ExtentCorrupt, StoreError, WeightsError
from weights.layouts import publish_again
from weights.manifest import Manifest
from weights.storage.copies import Copies
from weights.storage.hashing import Progress, hash_tensors
from weights.store import WeightStore
from weights.verification import Damage, Place, VerifyReport, place_of, verify, verify_models


@dataclass(frozen=True, slots=True)
class RepairReport:
    """`repaired`: damage that is gone, `rewritten`: the models that were published anew for it, which may be more;
    `damages`: what is left, with what was tried against it."""

    num_models: int
    rewritten: tuple[str, ...]
    repaired: tuple[Damage, ...]
    damages: tuple[Damage, ...]


def repair(
    store: WeightStore,
    models: Collection[str] = (),
    *,
    allow_torch: bool = False,
    weight_dir: Path | None = None,
    progress: Progress | None = None,
) -> RepairReport:
    """Find what is damaged of `models`, or of the whole store, as a deep `verify` does, and write it anew.

    Tensors come from sound copies in the store, of whichever model, else from the source of theirs, where they must
    have the bytes that were stored. Models that share a damaged extent are repaired as well. `allow_torch` opens
    sources that are pickles. `progress` hears of the bytes that are read: of the store, then of each model.

    What cannot be repaired is reported and stays as it is. Raises ModelNotStored for an unknown model, StoreError when
    the store cannot be written.
    """
    if models:
        found = verify_models(store, [store.manifest(model) for model in sorted(models)], deep=True, progress=progress)
    else:
        found = verify(store, deep=True, progress=progress)
    if not found.damages:
        return RepairReport(found.num_models, (), (), ())
    manifests = {manifest.model: manifest for manifest in store.readable_manifests()}
    broken = {
        extent
        for damage in found.damages
        if (manifest := manifests.get(damage.model)) and (extent := manifest.extents.get(damage.extent))
    }
    with store.locked():
        store.indexed(lambda index: index.forget(broken))  # a damaged index is made again by this
    run = _Repair(store, manifests, {place_of(extent) for extent in broken}, allow_torch, weight_dir, progress)
    concerned = [manifest for manifest in manifests.values() if run.broken_tensors(manifest) is not None]
    problems = run.rewrite_all(concerned)
    with store.locked():
        store.write_meta()
    rewritten = tuple(manifest.model for manifest in concerned if manifest.model not in problems)
    left = tuple(_left(store, found, [manifest.model for manifest in concerned], problems))
    keys = {_key(damage) for damage in left}
    repaired = tuple(damage for damage in found.damages if _key(damage) not in keys)
    return RepairReport(found.num_models, rewritten, repaired, left)


@dataclass(frozen=True, slots=True)
class _Repair:
    """One run: `known` are all manifests of the store, `places` those of the damaged extents."""

    store: WeightStore
    known: dict[str, Manifest]
    places: Collection[Place]
    allow_torch: bool
    weight_dir: Path | None
    progress: Progress | None

    def broken_tensors(self, manifest: Manifest) -> list[tuple[str, str, str]] | None:
        """Component, name and sha256 of the tensors in damaged extents; None when no extent is damaged."""
        broken = {id_ for id_, extent in manifest.extents.items() if place_of(extent) in self.places}
        refs = [(part.name, name, ref) for part in manifest.components.values() for name, ref in part.tensors.items()]
        return [(part, name, ref.sha256) for part, name, ref in refs if ref.extent in broken] if broken else None

    def rewrite_all(self, concerned: Sequence[Manifest]) -> dict[str, str]:
        """Publish anew all that can be; returns what stood against the others, by model.

        A model whose source is gone may find its tensors in one that was repaired after it, so it is tried again.
        """
        wanted = {sha256 for manifest in concerned for _, _, sha256 in self.broken_tensors(manifest) or ()}
        pending, problems = concerned, dict[str, str]()
        while True:
            problems = {}
            copies = Copies(self.store, self.known.values(), wanted, allow_torch=self.allow_torch)
            for manifest in pending:
                try:
                    self.known[manifest.model] = self._rewrite(manifest, copies)
                except WeightsError as error:
                    problems[manifest.model] = str(error)
            if len(problems) in (0, len(pending)):
                return problems
            pending = [manifest for manifest in pending if manifest.model in problems]

    def _rewrite(self, manifest: Manifest, copies: Copies) -> Manifest:
        """Raises WeightsError naming every tensor that is nowhere; then nothing is changed."""
        tensors = {name: copies.tensors(manifest, part) for name, part in manifest.components.items()}
        lost = []
        for part, name, _ in self.broken_tensors(manifest) or ():
            try:
                tensors[part][name].read()
            except ExtentCorrupt as error:
                lost.append(str(error))
        if lost:
            raise StoreError("; ".join(lost))
        hashed = hash_tensors(tensors, progress=self.progress)
        return publish_again(self.store, manifest, hashed, manifest.layout, self.weight_dir)


def _left(
    store: WeightStore, found: VerifyReport, concerned: Sequence[str], problems: dict[str, str]
) -> Iterator[Damage]:
    """What was found and is still there, and all that is wrong with the models that were to be repaired."""
    for damage in found.damages:
        if damage.model and damage.model not in concerned:  # a manifest or a skeleton
            yield replace(damage, problem=f"{damage.problem}; `remove {damage.model}` and bring it in again")
    for damage in verify_models(store, [store.manifest(model) for model in concerned], deep=True).damages:
        problem = problems.get(damage.model)
        yield replace(damage, problem=f"{damage.problem}; {problem}") if problem else damage


def _key(damage: Damage) -> tuple[str, str]:
    return damage.model, damage.extent or damage.file
