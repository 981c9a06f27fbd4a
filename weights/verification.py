"""Verification: read back what the store has, and report everything wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from weights.errors import ExtentCorrupt, StoreError, WeightsError
from weights.manifest import ExtentRef, Manifest
from weights.reading.extents import read_extent
from weights.storage.index import IndexDamaged
from weights.store import StoredTensor, WeightStore, stored_tensors

Progress = Callable[[int, int], None]  # bytes done, bytes in all
Place = tuple[str, int, int, str]  # pack, offset, bytes, checksum


@dataclass(frozen=True, slots=True)
class Damage:
    """A defect. `tensors` (component.name) cannot be used; empty when no tensor is affected.

    `extent` is the id of the extent that is damaged, "" for what is no extent.
    """

    model: str
    file: str
    tensors: tuple[str, ...]
    problem: str
    extent: str = ""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """A count of what was read, each place once however many models share it, and every damage found."""

    num_models: int
    num_extents: int
    nbytes: int
    damages: tuple[Damage, ...]


def verify(
    store: WeightStore, model: str | None = None, *, deep: bool = False, progress: Progress | None = None
) -> VerifyReport:
    """Check every extent of `model`, or of the whole store, against its checksum; `deep`: each tensor's sha256 too.

    One extent is in memory at a time. Damage is reported, not raised; raises ModelNotStored for an unknown model.
    """
    damages: list[Damage] = []
    manifests = _readable(store, damages) if model is None else [store.manifest(model)]
    report = verify_models(store, manifests, deep=deep, progress=progress)
    return replace(report, damages=(*damages, *report.damages))


def verify_models(
    store: WeightStore, manifests: Sequence[Manifest], *, deep: bool = False, progress: Progress | None = None
) -> VerifyReport:
    """Check the extents of some models, given by their manifests, as `verify` does."""
    places = {place_of(extent): extent for manifest in manifests for extent in manifest.extents.values()}
    problems: dict[Place, str] = {}
    total_bytes, done_bytes = sum(extent.nbytes for extent in places.values()), 0
    for place, extent in sorted(places.items()):
        try:
            if not store.holds(extent):  # before memory is taken for it
                store.pack_file(extent.pack)
                raise ExtentCorrupt(f"{store.packs / extent.pack}: missing or too short for extent {extent.id}")
            read_extent(store.packs, extent)
        except StoreError as error:
            problems[place] = str(error)
        done_bytes += extent.nbytes
        if progress:
            progress(done_bytes, total_bytes)
    damages = tuple(damage for manifest in manifests for damage in _damages(store, manifest, problems, deep))
    return VerifyReport(len(manifests), len(places), total_bytes, damages)


def place_of(extent: ExtentRef) -> Place:
    """Return the key that models sharing an extent have in common."""
    return extent.pack, extent.offset, extent.nbytes, extent.checksum


def _readable(store: WeightStore, damages: list[Damage]) -> list[Manifest]:
    try:
        store.check_index()
    except IndexDamaged as error:
        damages.append(Damage("", store.index_file.name, (), f"{error}; it is made again when it is needed"))
    except StoreError as error:
        damages.append(Damage("", store.index_file.name, (), str(error)))
    manifests = []
    for name in store.model_names():
        try:
            manifests.append(store.manifest(name))
        except WeightsError as error:
            damages.append(Damage(name, f"models/{name}/manifest.json", (), str(error)))
    return manifests


def _damages(store: WeightStore, manifest: Manifest, problems: Mapping[Place, str], deep: bool) -> Iterator[Damage]:
    if not store.skeleton(manifest).is_dir():
        yield Damage(manifest.model, f"models/{manifest.skeleton}", (), "the skeleton is missing")
    broken = {id_: problems[place_of(ref)] for id_, ref in manifest.extents.items() if place_of(ref) in problems}
    wrong: dict[str, list[str]] = {id_: [] for id_ in broken}
    for component in manifest.components.values():
        concerned = {name: ref for name, ref in component.tensors.items() if deep or ref.extent in broken}
        part = component.model_copy(update={"tensors": concerned})
        try:
            tensors: Mapping[str, StoredTensor] = stored_tensors(store, manifest, part)
        except StoreError:  # the pack leads out of the store: nothing of it is read
            tensors = {}
        for name, ref in concerned.items():
            if name not in tensors or not _is_right(tensors[name]):
                wrong.setdefault(ref.extent, []).append(f"{component.name}.{name}")
    for id_, names in wrong.items():
        problem = broken.get(id_, "the checksum is right, but the sha256 of tensors is not")
        yield Damage(manifest.model, f"packs/{manifest.extents[id_].pack}", tuple(names), problem, id_)


def _is_right(tensor: StoredTensor) -> bool:
    try:
        tensor.read()
    except ExtentCorrupt:
        return False
    return True
