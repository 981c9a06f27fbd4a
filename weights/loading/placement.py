"""Placement of extents: seen where the provider has them, copied, or uploaded to a device; files once per device."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from weights.loading.external_memory import bytes_tensors
from weights.manifest import ExtentRef
from weights.memory.devices import open_device
from weights.provider import ExtentProvider
from weights.torch_seam import storage_at

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


class ExtentSource:
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
