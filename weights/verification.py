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
Place = tuple[str, int, int, str, str]  # pack, offset, bytes, checksum, and the places of the bases of a delta


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
    extents = [extent for manifest in manifests for extent in manifest.extents.values()]
    places = {place_of(form): form for extent in extents for form in extent.forms()}
    problems: dict[Place, str] = {}
    total_bytes, done_bytes = sum(extent.nbytes for extent in places.values()), 0
    for place, extent in sorted(places.items()):
        try:
            read_form(store, extent)
        except StoreError as error:
            problems[place] = str(error)
        done_bytes += extent.nbytes
        if progress:
            progress(done_bytes, total_bytes)
    damages = tuple(damage for manifest in manifests for damage in _damages(store, manifest, problems, deep))
    return VerifyReport(len(manifests), len(places), total_bytes, damages)


def read_form(store: WeightStore, form: ExtentRef) -> None:
    """Read an extent that has one form. Raises StoreError, ExtentCorrupt naming the file that is damaged."""
    for run in form.runs():
        if not store.holds(ExtentRef(id=form.id, **run._asdict(), checksum=form.checksum)):  # before it takes memory
            store.pack_file(run.pack)
            raise ExtentCorrupt(f"{store.packs / run.pack}: missing or too short for extent {form.id}", form.id)
    read_extent(store.packs, form)


def place_of(form: ExtentRef) -> Place:
    """Return the key that models sharing an extent, in one of its forms, have in common."""
    bases = " ".join(f"{base.pack}@{base.offset}" for base in form.delta.bases) if form.delta else ""
    return form.pack, form.offset, form.nbytes, form.checksum, bases


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
    forms = [form for extent in manifest.extents.values() for form in extent.forms() if place_of(form) in problems]
    broken = {form.id for form in forms}
    wrong: dict[str, list[str]] = {}
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
    for form in forms:
        names = tuple(wrong.get(form.id, ()))
        yield Damage(manifest.model, f"packs/{form.pack}", names, problems[place_of(form)], form.id)
    for id_ in wrong.keys() - broken:
        problem = "the checksum is right, but the sha256 of tensors is not"
        yield Damage(manifest.model, f"packs/{manifest.extents[id_].pack}", tuple(wrong[id_]), problem, id_)


def _is_right(tensor: StoredTensor) -> bool:
    try:
        tensor.read()
    except ExtentCorrupt:
        return False
    return True
