"""Which file is on which device already, so that models that share a file load it once.

Underneath, the unit is whatever the caller loads as a whole (`load_model`: an extent of a file), so a file of which
two models need different parts has each byte read once per device as well.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

Key = tuple[str, str]


class _WeakBytes:
    """A weak reference to memory, not to the tensor object: views and parameters keep only the former alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._weak: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._place = (tensor.storage_offset(), tensor.shape, tensor.stride())

    def __call__(self) -> torch.Tensor | None:
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)
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
        self._known: dict[Key, _WeakBytes] = {}
        self._loading: dict[Key, Future[None]] = {}
        self.num_loads: Counter[Key] = Counter()

    def get(self, device: str, location: str, load: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The bytes of `location` on `device` (1-D uint8), by `load` when nobody holds them."""
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

    def __contains__(self, key: Key) -> bool:
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
