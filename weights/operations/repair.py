"""Verification: read back what the store has, and report everything wrong with it. Repair: write it again from
wherever it is still sound.

A repaired model is published like a new one: its sound extents stay where they are, the others are written from sound
copies of their tensors. An extent's id says what its bytes are, so whoever has it in memory goes on with it.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from weights.formats.checkpoint import read_checkpoint
from weights.formats.tensors import SourceTensor
from weights.operations.base_pipeline import open_base
from weights.operations.layouts import publish_again
from weights.platform.durable import disk_errors, remove_path
from weights.reading.extents import read_extent
from weights.records.dtypes import cast
from weights.records.errors import DiskFull, ExtentCorrupt, FormatError, StoreError, WeightsError
from weights.records.manifest import Component, ExtentRef, Manifest, TensorRef
from weights.storage.hashing import Progress, hash_tensors
from weights.storage.index import IndexDamaged
from weights.storage.publishing import publish_places
from weights.storage.store import DecodedExtents, StoredTensor, WeightStore, stored_tensor, stored_tensors

_Read = Callable[[], bytes | memoryview]
_BySource = dict[tuple[str, str], SourceTensor]  # by component and name
_Place = tuple[str, int, int, str, str]  # pack, offset, bytes, checksum, and the places of the bases of a delta


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
    report = _verify_models(store, manifests, deep=deep, progress=progress)
    return replace(report, damages=(*damages, *report.damages))


def _verify_models(
    store: WeightStore, manifests: Sequence[Manifest], *, deep: bool = False, progress: Progress | None = None
) -> VerifyReport:
    """Check the extents of some models, given by their manifests, as `verify` does."""
    extents = [extent for manifest in manifests for extent in manifest.extents.values()]
    places = {_place_of(form): form for extent in extents for form in extent.forms()}
    problems: dict[_Place, str] = {}
    total_bytes, done_bytes = sum(extent.nbytes for extent in places.values()), 0
    for place, extent in sorted(places.items()):
        try:
            _read_form(store, extent)
        except StoreError as error:
            problems[place] = str(error)
        done_bytes += extent.nbytes
        if progress:
            progress(done_bytes, total_bytes)
    damages = tuple(damage for manifest in manifests for damage in _damages(store, manifest, problems, deep))
    return VerifyReport(len(manifests), len(places), total_bytes, damages)


def _read_form(store: WeightStore, form: ExtentRef) -> None:
    """Read an extent that has one form. Raises StoreError, ExtentCorrupt naming the file that is damaged."""
    for run in form.runs():
        whole = ExtentRef(id=form.id, **run._asdict(), checksum=form.checksum)
        if not store.pack_files.holds(whole):  # before it takes memory
            store.pack_files.path_of(run.pack)
            raise ExtentCorrupt(f"{store.packs / run.pack}: missing or too short for extent {form.id}", form.id)
    read_extent(store.packs, form)


def _place_of(form: ExtentRef) -> _Place:
    """Return the key that models sharing an extent, in one of its forms, have in common."""
    bases = " ".join(f"{base.pack}@{base.offset}" for base in form.delta.bases) if form.delta else ""
    return form.pack, form.offset, form.nbytes, form.checksum, bases


def _readable(store: WeightStore, damages: list[Damage]) -> list[Manifest]:
    try:
        store.index.check()
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


def _damages(store: WeightStore, manifest: Manifest, problems: Mapping[_Place, str], deep: bool) -> Iterator[Damage]:
    if not store.skeleton(manifest).is_dir():
        yield Damage(manifest.model, f"models/{manifest.skeleton}", (), "the skeleton is missing")
    forms = [form for extent in manifest.extents.values() for form in extent.forms() if _place_of(form) in problems]
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
        yield Damage(manifest.model, f"packs/{form.pack}", names, problems[_place_of(form)], form.id)
    for id_ in wrong.keys() - broken:
        problem = "the checksum is right, but the sha256 of tensors is not"
        yield Damage(manifest.model, f"packs/{manifest.extents[id_].pack}", tuple(wrong[id_]), problem, id_)


def _is_right(tensor: StoredTensor) -> bool:
    try:
        tensor.read()
    except ExtentCorrupt:
        return False
    return True


@dataclass(frozen=True, slots=True)
class RepairReport:
    """The outcome of a repair: damage that was `repaired`, models `rewritten` for it, which may be more, and `damages`
    that are left, with what was tried against them."""

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
    sources that are pickles. `progress` gets the bytes that are read: of the store, then of each model.

    What cannot be repaired is reported and stays as it is. Raises ModelNotStored for an unknown model, StoreError when
    the store cannot be written.
    """
    if models:
        found = _verify_models(store, [store.manifest(model) for model in sorted(models)], deep=True, progress=progress)
    else:
        found = verify(store, deep=True, progress=progress)
    if not found.damages:
        return RepairReport(found.num_models, (), (), ())
    manifests = {manifest.model: manifest for manifest in store.readable_manifests()}
    broken = {
        form
        for damage in found.damages
        if (manifest := manifests.get(damage.model)) and (extent := manifest.extents.get(damage.extent))
        for form in extent.forms()
        if damage.file == f"packs/{form.pack}"
    }
    broken |= {base for form in broken if form.delta for base in form.delta.bases if not _is_sound(store, base)}
    with store.locked(), disk_errors(store.path, 0):
        store.index.run(lambda index: index.forget_extents(broken))
    run = _Repair(store, manifests, frozenset(map(_place_of, broken)), allow_torch, weight_dir, progress)
    concerned = [manifest for manifest in manifests.values() if run.broken_tensors(manifest) is not None]
    concerned.sort(key=lambda manifest: manifest.version)  # bases before what is a delta from them
    problems = run.rewrite_all(concerned)
    with store.locked(), disk_errors(store.path, 0):
        try:
            store.index.write_meta()
        except (OSError, DiskFull):  # it follows from the manifests, and names what is damaged: the next `gc` makes it
            remove_path(store.meta_file)
    rewritten = tuple(manifest.model for manifest in concerned if manifest.model not in problems)
    left = tuple(_remaining_damage(store, found, [manifest.model for manifest in concerned], problems))
    keys = {_key(damage) for damage in left}
    repaired = tuple(damage for damage in found.damages if _key(damage) not in keys)
    return RepairReport(found.num_models, rewritten, repaired, left)


@dataclass(frozen=True, slots=True)
class _Repair:
    """State of one run: `known` are all manifests of the store, `places` those of the damaged extents."""

    store: WeightStore
    known: dict[str, Manifest]
    places: frozenset[_Place]
    allow_torch: bool
    weight_dir: Path | None
    progress: Progress | None

    def broken_tensors(self, manifest: Manifest) -> list[tuple[str, str, str]] | None:
        """Return component, name and sha256 of tensors in damaged extents; None when no extent is damaged."""
        broken = {form.id for form in self._broken_forms(manifest)}
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
            copies = _Copies(self.store, self.known.values(), wanted, allow_torch=self.allow_torch)
            for manifest in pending:
                try:
                    self.known[manifest.model] = self._rewrite(manifest, copies)
                except WeightsError as error:
                    problems[manifest.model] = str(error)
            if len(problems) in (0, len(pending)):
                return problems
            pending = [manifest for manifest in pending if manifest.model in problems]

    def _rewrite(self, manifest: Manifest, copies: _Copies) -> Manifest:
        """Publish a model anew. Raises WeightsError naming every tensor that is nowhere, with nothing changed."""
        if rebased := self._rebased(manifest):
            publish_places(self.store, manifest, rebased, {})
            return rebased
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

    def _rebased(self, manifest: Manifest) -> Manifest | None:
        """Return the model with its deltas against the copies of damaged bases that were repaired; None when that does
        not make it sound."""
        sound = {
            extent.id: extent
            for known in self.known.values()
            for extent in known.plain_extents.values()
            if _place_of(extent) not in self.places
        }
        moved = {}
        for id_ in {form.id for form in self._broken_forms(manifest)}:
            extent = manifest.extents[id_]
            if extent.delta is None:
                return None
            bases = tuple(
                sound.get(base.id, base) if _place_of(base) in self.places else base for base in extent.delta.bases
            )
            moved[id_] = extent.model_copy(update={"delta": extent.delta.model_copy(update={"bases": bases})})
        if all(_is_sound(self.store, form) for extent in moved.values() for form in extent.forms()):
            return manifest.with_extents(moved)
        return None

    def _broken_forms(self, manifest: Manifest) -> Iterator[ExtentRef]:
        for extent in manifest.extents.values():
            for form in extent.forms():
                if not self.places.isdisjoint(map(_place_of, (form, *(form.delta.bases if form.delta else ())))):
                    yield form


def _is_sound(store: WeightStore, form: ExtentRef) -> bool:
    try:
        _read_form(store, form)
    except StoreError:
        return False
    return True


def _remaining_damage(
    store: WeightStore, found: VerifyReport, concerned: Sequence[str], problems: dict[str, str]
) -> Iterator[Damage]:
    """Yield damage that is still there, and everything wrong with the models that were to be repaired."""
    for damage in found.damages:
        if damage.model and damage.model not in concerned:  # a manifest or a skeleton
            yield replace(damage, problem=f"{damage.problem}; `remove {damage.model}` and bring it in again")
    for damage in _verify_models(store, [store.manifest(model) for model in concerned], deep=True).damages:
        problem = problems.get(damage.model)
        yield replace(damage, problem=f"{damage.problem}; {problem}") if problem else damage


def _key(damage: Damage) -> tuple[str, str]:
    return damage.model, damage.extent or damage.file


@dataclass
class _CopiedTensor:
    """A SourceTensor that is read from the first of its copies that has the bytes of `sha256`."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    sha256: str
    copies: list[_Read]

    def read(self) -> bytes | memoryview:
        """Return the bytes. Raises ExtentCorrupt saying why each copy is unusable."""
        problems = []
        for copy in self.copies:
            try:
                data = copy()
            except WeightsError as error:
                problems.append(str(error))
                continue
            if hashlib.sha256(data).hexdigest() == self.sha256:
                self.copies = [copy]
                return data
            problems.append("the source has other bytes than were stored")
        raise ExtentCorrupt(f"tensor {self.name}: no sound copy: {'; '.join(problems)}")


class _Copies:
    """The copies of the `wanted` tensors, by sha256, in all models of the store. Sources are opened when needed."""

    def __init__(
        self, store: WeightStore, manifests: Iterable[Manifest], wanted: Collection[str], *, allow_torch: bool
    ) -> None:
        self._store = store
        self._allow_torch = allow_torch
        self._sources: dict[str, _BySource | WeightsError] = {}
        self._decoded = DecodedExtents(store.packs)
        self._stored: dict[str, dict[tuple[str, int], tuple[ExtentRef, TensorRef]]] = defaultdict(dict)
        for manifest in manifests:
            for component in manifest.components.values():
                for ref in component.tensors.values():
                    if ref.sha256 in wanted:
                        for form in manifest.extents[ref.extent].forms():
                            self._stored[ref.sha256][form.pack, form.offset + ref.offset] = form, ref

    def tensors(self, manifest: Manifest, component: Component) -> Mapping[str, _CopiedTensor]:
        """Return the component's tensors by name: each from its own place, else others, else the source."""
        return {name: self._tensor(manifest, component, name, ref) for name, ref in component.tensors.items()}

    def _tensor(self, manifest: Manifest, component: Component, name: str, ref: TensorRef) -> _CopiedTensor:
        label = f"{component.name}.{name}"
        extent = manifest.extents[ref.extent]
        places = [(extent, ref), *self._stored.get(ref.sha256, {}).values()]
        copies = [self._in_store(label, *place) for place in places]
        copies.append(lambda: self._in_source(manifest, component.name, name, ref))
        return _CopiedTensor(
            label, self._store.packs / extent.pack, ref.dtype, ref.shape, ref.nbytes, ref.sha256, copies
        )

    def _in_store(self, label: str, extent: ExtentRef, ref: TensorRef) -> _Read:
        def read() -> bytes | memoryview:
            return stored_tensor(self._store.pack_files.path_of(extent.pack), extent, label, ref, self._decoded).read()

        return read

    def _in_source(self, manifest: Manifest, component: str, name: str, ref: TensorRef) -> bytes | memoryview:
        if manifest.source not in self._sources:
            try:
                self._sources[manifest.source] = self._open(manifest)
            except WeightsError as error:
                self._sources[manifest.source] = error
        source = self._sources[manifest.source]
        if isinstance(source, WeightsError):
            raise source
        tensor = source.get((component, name))
        if tensor is None:
            raise FormatError(f"{manifest.source}: has no tensor {component}.{name}")
        try:
            return cast(tensor.read(), tensor.dtype, ref.dtype)
        except KeyError:  # of a type that is not cast: not what was stored
            raise FormatError(f"{tensor.file}: tensor {name!r} is {tensor.dtype} by now, not {ref.dtype}") from None

    def _open(self, manifest: Manifest) -> _BySource:
        if manifest.kind == "program":
            raise FormatError(f"{manifest.source}: a program cannot be repaired; `remove` it and import it again")
        source = Path(manifest.source)
        is_single_file = manifest.kind == "diffusion" and source.is_file()
        like = open_base(manifest.model, self._store) if is_single_file else None  # its skeleton came from there
        if base := manifest.base:
            like = open_base(Path(base) if Path(base).is_absolute() else base, self._store)
        checkpoint = read_checkpoint(source, allow_torch=self._allow_torch, like=like)
        return {(part.name, name): tensor for part in checkpoint.components for name, tensor in part.tensors.items()}
