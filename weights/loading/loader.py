"""Load models: what is missing is read, and tensors are views of what was read, or private copies of it.

Extents are seen where the provider has them, copied, or uploaded to a device; a file is there once per device.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from weights.loading.provider import ExtentProvider, LocalExtents
from weights.loading.stage_transforms import StageTransform, apply_stage
from weights.loading.views import Tensors, attach, bytes_tensors, given_extents, view_of
from weights.memory.devices import open_device
from weights.platform.torch_seam import storage_at
from weights.records.errors import WeightsError
from weights.records.manifest import Component, ExtentRef, Manifest, TensorRef
from weights.storage.store import WeightStore

__all__ = ["load_from_store", "load_model"]

_Key = tuple[str, str]
# What is in memory twice, as bytes and as what becomes of them; wide enough for the parallel reads of a provider.
_WINDOW_BYTES: Final = 512 * 2**20


class _WeakBytes:
    """A weak reference to memory, not to the tensor object: views and parameters keep only the former alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._weak: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._place = (tensor.storage_offset(), tensor.shape, tensor.stride())

    def __call__(self) -> torch.Tensor | None:
        storage = storage_at(self._weak.cdata)
        if storage is None:
            return None
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, *self._place)

    def expired(self) -> bool:
        return bool(self._weak.expired())


class LoadedFiles:
    """Memory by (device, location). Thread-safe; of several callers that need the same location, one loads it.

    References are weak: an entry is gone when no tensor uses its memory any more, or when it is dropped.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[_Key, _WeakBytes] = {}
        self._loading: dict[_Key, Future[None]] = {}
        self.num_loads: Counter[_Key] = Counter()

    def get(self, device: str, location: str, load: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the bytes of `location` on `device` (1-D uint8), by `load` when nobody holds them."""
        return self.get_all(device, [location], lambda _: {location: load()})[location]

    def get_all(
        self, device: str, locations: Sequence[str], load: Callable[[list[str]], Mapping[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """Several at once: `load` is called with those that are nowhere yet. What it raises, its caller gets;
        callers that waited for it then try themselves.
        """
        found: dict[str, torch.Tensor] = {}
        while missing := [location for location in locations if location not in found]:
            mine, others = self._claim(device, missing, found)
            try:
                if mine:
                    loaded = load(mine)
                    found.update({location: loaded[location] for location in mine})
                    self._remember(device, {location: found[location] for location in mine})
            finally:
                self._release(device, mine)
            for other in others:  # after the loads of our own, so that both go on at once
                other.result()
        return found

    def drop(self, device: str, location: str) -> None:
        """Forget it: the next `get` loads again. Tensors that use the memory keep it."""
        with self._lock:
            self._known.pop((device, location), None)

    def __contains__(self, key: _Key) -> bool:
        with self._lock:
            return key in self._known and not self._known[key].expired()

    def _claim(
        self, device: str, missing: Sequence[str], found: dict[str, torch.Tensor]
    ) -> tuple[list[str], list[Future[None]]]:
        mine: list[str] = []
        others: list[Future[None]] = []
        with self._lock:
            self._known = {key: weak for key, weak in self._known.items() if not weak.expired()}
            for location in missing:
                key = (device, location)
                if (weak := self._known.get(key)) and (tensor := weak()) is not None:
                    found[location] = tensor
                elif key in self._loading:
                    others.append(self._loading[key])
                else:
                    self._loading[key] = Future()
                    self.num_loads[key] += 1
                    mine.append(location)
        return mine, others

    def _remember(self, device: str, loaded: Mapping[str, torch.Tensor]) -> None:
        with self._lock:
            for location, tensor in loaded.items():
                self._known[device, location] = _WeakBytes(tensor)

    def _release(self, device: str, mine: Sequence[str]) -> None:
        with self._lock:
            futures = [self._loading.pop((device, location)) for location in mine]
        for future in futures:
            future.set_result(None)


class _ExtentSource:
    """Extents as 1-D uint8 tensors on a device. `will_copy`: the caller makes private memory of everything anyway."""

    def __init__(
        self, provider: ExtentProvider, device: str, loaded: LoadedFiles | None, *, will_copy: bool = False
    ) -> None:
        is_private = device == "cpu-private"
        self._provider = provider
        self._device = target = open_device(device)
        self._loaded = None if is_private else loaded  # memory that may be written is nobody else's
        self._place: Callable[[torch.Tensor], torch.Tensor] | None = None
        if target.type != "cpu":
            self._place = lambda base: base.to(target)
        elif is_private and not will_copy:
            self._place = torch.clone

    def load_extents(self, extents: Sequence[ExtentRef]) -> dict[str, torch.Tensor]:
        """Load extents; returned by id. Raises what the provider raises."""
        if not extents:
            return {}
        by_location = {f"{extent.pack}@{extent.offset}:{extent.id}": extent for extent in extents}

        def load(locations: Sequence[str]) -> dict[str, torch.Tensor]:
            found = self._fetch([by_location[location] for location in locations])
            return {location: found[by_location[location].id] for location in locations}

        if self._loaded is None:
            bases = load(list(by_location))
        else:
            bases = self._loaded.get_all(str(self._device), list(by_location), load)
        return {by_location[location].id: base for location, base in bases.items()}

    def _fetch(self, extents: Sequence[ExtentRef]) -> dict[str, torch.Tensor]:
        if self._place is None:
            return _tensors(self._provider, extents)
        bases = {}
        for window in windows(extents):
            for id_, base in _tensors(self._provider, window).items():
                bases[id_] = self._place(base)
        return bases


def windows(extents: Sequence[ExtentRef], max_bytes: int = _WINDOW_BYTES) -> Iterator[list[ExtentRef]]:
    """Yield runs of extents of at most `max_bytes`, or of one extent."""
    window: list[ExtentRef] = []
    for extent in extents:
        if window and sum(held.nbytes for held in window) + extent.nbytes > max_bytes:
            yield window
            window = []
        window.append(extent)
    if window:
        yield window


def _tensors(provider: ExtentProvider, extents: Sequence[ExtentRef]) -> dict[str, torch.Tensor]:
    buffers = provider.fetch(extents)
    return bytes_tensors({extent.id: buffers[extent.id] for extent in extents})


def load_model(
    manifest: Manifest,
    provider: ExtentProvider,
    components: Iterable[str] | None = None,
    *,
    external_weights: Mapping[str, Any] | None = None,
    verify: bool = False,
    stage: StageTransform | None = None,
    loaded: LoadedFiles | None = None,
    device: str = "cpu",
) -> dict[str, Tensors]:
    """Load the tensors of all components or the given ones; returned by component and name.

    `external_weights` are files that the caller has in memory, by location (`ExtentRef.pack`): their tensors are
    views of it on whatever device it is, and the provider is not asked; `verify` checks their checksums.
    `device` is "cpu" (views of what the provider gives), "cpu-private" (copies that may be written), or an accelerator.
    `loaded` shares what is on a device already, by (device, file and extent); private copies are never shared.
    `stage` makes private tensors of every tensor, a window of extents at a time; equal references stay tied.
    Raises WeightsError for unknown components or devices, and for external memory that does not fit.
    """
    names = list(manifest.components if components is None else components)
    for name in names:
        if name not in manifest.components:
            raise WeightsError(f"{manifest.model} has no component {name!r} (known: {', '.join(manifest.components)})")
    given = given_extents(manifest, names, external_weights or {}, verify=verify)
    wanted = [extent for extent in manifest.extents_of(names) if extent.id not in given]
    source = _ExtentSource(provider, device, loaded, will_copy=stage is not None)
    if stage is None:
        bases = given | source.load_extents(wanted)
        return {name: attach(manifest.components[name], bases) for name in names}
    staged = _stage_window(manifest, names, given, stage)
    for window in windows(wanted):
        staged |= _stage_window(manifest, names, source.load_extents(window), stage)
    return {name: _merged(manifest.components[name], staged) for name in names}


def load_from_store(store: Path, model: str) -> dict[str, Tensors]:
    """Load everything of one model in one call, in one process, without Ray."""
    weight_store = WeightStore(store)
    return load_model(weight_store.manifest(model), LocalExtents(weight_store.packs))


def _stage_window(
    manifest: Manifest, names: Sequence[str], bases: Mapping[str, torch.Tensor], stage: StageTransform
) -> dict[tuple[str, str], Tensors]:
    """Apply `stage` to the tensors that lie in `bases`; returned by (component, name) and suffix."""
    once: dict[TensorRef, Tensors] = {}
    staged = {}
    for component in names:
        for name, ref in manifest.components[component].tensors.items():
            if ref.extent in bases:
                if ref not in once:
                    once[ref] = apply_stage(stage, name, view_of(bases[ref.extent], ref))
                staged[component, name] = once[ref]
    return staged


def _merged(component: Component, staged: Mapping[tuple[str, str], Tensors]) -> Tensors:
    merged: Tensors = {}
    for name in component.tensors:
        for suffix, tensor in staged[component.name, name].items():
            if suffix and name + suffix in component.tensors:
                raise WeightsError(f"{component.name}: staging {name!r} adds {name + suffix!r}, which exists already")
            merged[name + suffix] = tensor
    return merged
